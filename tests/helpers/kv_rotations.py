"""Norm and rotation of heads in NumPy: float32, every operation rounded by itself, in the order that is promised."""

from __future__ import annotations

import numpy as np

ONE = np.float32(1.0)


def tree(values: np.ndarray) -> np.ndarray:
    """Return the sum over the last axis, neighbours first; as if zeros followed up to a power of two."""
    while values.shape[-1] > 1:
        if values.shape[-1] % 2:
            values = np.concatenate([values, np.zeros_like(values[..., :1])], -1)
        values = values[..., ::2] + values[..., 1::2]
    return values[..., 0]


def unit_order(dim: int, rotary: int, interleaved: bool) -> np.ndarray:
    """Return the channels in the order of units of sixteen, -1 where a unit is not full."""
    order = []
    for first in range(0, rotary // 2, 8):
        pairs = range(first, min(first + 8, rotary // 2))
        if interleaved:
            run = [channel for pair in pairs for channel in (2 * pair, 2 * pair + 1)]
            order += run + [-1] * (16 - len(run))
        else:
            empty = [-1] * (8 - len(pairs))
            order += [*pairs, *empty, *(rotary // 2 + pair for pair in pairs), *empty]
    for first in range(rotary, dim, 16):
        run = list(range(first, min(first + 16, dim)))
        order += run + [-1] * (16 - len(run))
    return np.array(order)


def normalised(heads: np.ndarray, weight: np.ndarray, eps: float, offset: float, order: np.ndarray) -> np.ndarray:
    """Return float32 [T, H, D] over its root mean square, times the weight."""
    dim = heads.shape[-1]
    squares = np.where(order < 0, np.float32(0), (heads * heads)[..., order])
    units = squares.reshape(*heads.shape[:-1], -1, 2, 8)
    total = tree(tree(tree(units)))
    mean = total * (ONE / np.float32(dim)) + np.float32(eps)
    inverse = ONE / np.sqrt(mean)
    return heads * inverse[..., None] * (np.float32(offset) + weight.astype(np.float32))


def turned(heads: np.ndarray, rows: np.ndarray, interleaved: bool) -> np.ndarray:
    """Return float32 [T, H, D] rotated by the table's rows [T, R]."""
    pairs = rows.shape[1] // 2
    cosines, sines = rows[:, None, :pairs], rows[:, None, pairs:]
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    x, y = heads[..., first], heads[..., second]
    found = heads.copy()
    found[..., first] = x * cosines - y * sines
    found[..., second] = y * cosines + x * sines
    return found
