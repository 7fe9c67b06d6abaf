"""Pools of K and V between guard bytes, and what elements become in another type: NumPy and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from numba_kv.device import Device, Tensor
from numba_kv.dtypes import dtype

NUMPY = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
GUARD_NBYTES = 256
GUARD = 0xA5


class Guarded:
    """A tensor with guard bytes before and behind it; its own bytes start as `fill`.

    Axes are in the order of `shape`; `order` says in which order they lie in memory. `skew` bytes move it off its alignment.
    """

    def __init__(
        self,
        device: Device,
        shape: tuple[int, ...],
        kind: str,
        *,
        order: tuple[int, ...] | None = None,
        skew: int = 0,
        fill: int = 0x11,
    ) -> None:
        order = order or tuple(range(len(shape)))
        strides, step = [0] * len(shape), 1
        for axis in reversed(order):
            strides[axis] = step
            step *= shape[axis]
        self._first = GUARD_NBYTES + skew
        self._nbytes = step * dtype(kind).itemsize
        self._bytes = device.tensor((self._first + self._nbytes + GUARD_NBYTES,), dtype("uint8"))
        raw = np.full(self._bytes.shape, GUARD, np.uint8)
        raw[self._first : self._first + self._nbytes] = fill
        self._bytes.fill_from(raw)
        memory = self._bytes._memory
        self.tensor = Tensor(memory, device, dtype(kind), shape, offset_nbytes=self._first, strides=tuple(strides))

    def fill(self, values: np.ndarray) -> Guarded:
        """Set all elements."""
        self.tensor.fill_from(values)
        return self

    def values(self) -> np.ndarray:
        """Return the elements, after a look at the guard bytes."""
        raw = self._bytes.to_host()
        assert (raw[: self._first] == GUARD).all(), "bytes before the tensor were written"
        assert (raw[self._first + self._nbytes :] == GUARD).all(), "bytes behind the tensor were written"
        return self.tensor.to_host()


def numbers(random: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return normal numbers, among them large ones, zeros of both signs and tiny ones."""
    values = random.normal(size=shape).astype(np.float32)
    special = random.integers(0, 12, shape)
    values[special == 0] *= 300
    values[special == 1] *= 1e-6
    values[special == 2] = -0.0
    return converted(values, kind)


def converted(values: np.ndarray, kind: str, factors: np.ndarray | None = None) -> np.ndarray:
    """Return [.., H, D] values in another type: times factors [H] in float32, rounded to nearest even, float8 saturated."""
    if values.dtype == NUMPY[kind] and factors is None:
        return values
    wide = values.astype(np.float32)
    if factors is not None:
        wide = wide * factors[:, None]
    if kind == "float8_e4m3":
        wide = np.clip(wide, -448, 448)
    return wide.astype(NUMPY[kind])


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether two arrays are equal, bit by bit."""
    bits = f"u{found.itemsize}"
    return found.dtype == expected.dtype and np.array_equal(
        np.ascontiguousarray(found).view(bits), np.ascontiguousarray(expected).view(bits)
    )
