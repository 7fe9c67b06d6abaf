"""Rotary tables: `fill_rope` and `fill_rope_axes` write cosines and sines, `gather_rope` and `gather_rope_sets` read rows.

A row is one position: the cosines of all pairs, then their sines. Angles are float64 in *turns*: what is left after whole
turns is exact, so a phase loses nothing but the rounding of position x frequency. Cosine and sine are polynomials of at most
an eighth of a turn, because the range reduction of libdevice for any angle needs a stack frame.
"""

from __future__ import annotations

import math

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar

__all__ = ["fill_rope", "fill_rope_axes", "gather_rope", "gather_rope_sets"]

_TWO_PI = 2.0 * math.pi


@routine
def cos_sin(turns):
    """Return cosine and sine of an angle in turns, to 1e-12."""
    part = turns - math.floor(turns)
    quadrant = np.int64(math.floor(4.0 * part + 0.5))
    x = (part - 0.25 * quadrant) * _TWO_PI
    y = x * x
    sine = x * (
        1.0 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880 + y * (-1 / 39916800 + y * (1 / 6227020800))))))
    )
    cosine = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * (-1 / 720 + y * (1 / 40320 + y * (-1 / 3628800 + y * (1 / 479001600))))))
    if quadrant & 1:
        cosine, sine = -sine, cosine
    if quadrant & 2:
        cosine, sine = -cosine, -sine
    return cosine, sine


@kernel(
    table=array("float32", 2),
    frequencies=array("float64", 2),
    magnitudes=array("float64"),
    variant=scalar(),
    first_row=scalar(),
    length=scalar(),
)
def fill_rope(item, table, frequencies, magnitudes, variant, first_row, length):
    """Write one pair of one row; row sets of `length` positions follow each other from `first_row` on.

    Item: a pair of a row, neighbouring pairs together.
    """
    pairs = np.int64(frequencies.shape[1])
    row = np.int64(item) // pairs
    pair = np.int64(item) - row * pairs
    position = row - row // length * length
    cosine, sine = cos_sin(position * frequencies[variant, pair])
    table[first_row + row, pair] = cosine * magnitudes[variant]
    table[first_row + row, pairs + pair] = sine * magnitudes[variant]


@kernel(
    table=array("float32", 2),
    frequencies=array("float64", 2),
    magnitudes=array("float64"),
    axes=array("int32"),
    positions=array("float64", 3),
    next_positions=array("float64"),
    rows=array("int64"),
    variant=scalar(),
    first_row=scalar(),
    length=scalar(),
)
def fill_rope_axes(item, table, frequencies, magnitudes, axes, positions, next_positions, rows, variant, first_row, length):
    """Write one pair of one position of a row set from positions [K, 3, n] of its own; `rows` [K] are the row sets.

    Positions behind the n given ones go on from `next_positions` [K] on every axis alike. Item: a pair of a position of a row
    set, neighbouring pairs together.
    """
    pairs = np.int64(frequencies.shape[1])
    row = np.int64(item) // pairs
    pair = np.int64(item) - row * pairs
    k = row // length
    place = row - k * length
    count = np.int64(positions.shape[2])
    if place < count:
        position = positions[k, np.int64(axes[pair]), place]
    else:
        position = next_positions[k] + (place - count)
    cosine, sine = cos_sin(position * frequencies[variant, pair])
    at = first_row + rows[k] * length + place
    table[at, pair] = cosine * magnitudes[variant]
    table[at, pairs + pair] = sine * magnitudes[variant]


@kernel(
    block_form=True,
    gathered=array("float32", 2),
    positions=array("int32"),
    table=array("float32", 2),
)
def gather_rope(item, lane, lanes, gathered, positions, table):
    """Copy the table row of one token; zeros if its position is not in the table. Item: a token; lanes share its channels."""
    position = np.int64(positions[item])
    is_there = position >= 0 and position < table.shape[0]
    channel = lane
    stop = table.shape[1]
    while channel < stop:
        value = np.float32(0.0)
        if is_there:
            value = table[position, channel]
        gathered[item, channel] = value
        channel += lanes


@kernel(
    block_form=True,
    gathered=array("float32", 2),
    positions=array("int32"),
    table=array("float32", 2),
    sets=array("int64", 2),
    cu_seqlens_q=array("int32"),
    row_sets=array("int32"),
    counts=array("int32"),
    has_counts=scalar(),
)
def gather_rope_sets(item, lane, lanes, gathered, positions, table, sets, cu_seqlens_q, row_sets, counts, has_counts):
    """Copy the table row of one token from the row set of its sequence.

    Zeros where there is none: the position or the number of the set is out of range, the token is behind the last sequence, or
    behind the `counts` [B] valid ones of its sequence. Item: a token; lanes share its channels.
    """
    row = np.int64(0)
    beyond = np.int64(cu_seqlens_q.shape[0] - 1)
    is_there = np.int64(item) < np.int64(cu_seqlens_q[beyond])
    while beyond - row > 1:  # the last row that starts at or before the token
        middle = (row + beyond) >> 1
        if cu_seqlens_q[middle] <= item:
            row = middle
        else:
            beyond = middle
    if has_counts and np.int64(item) - np.int64(cu_seqlens_q[row]) >= np.int64(counts[row]):
        is_there = False
    number = np.int64(row_sets[row])
    position = np.int64(positions[item])
    if number < 0 or number >= sets.shape[0] or position < 0 or position >= sets[number, 1]:
        is_there = False
    at = np.int64(0)
    if is_there:
        at = sets[number, 0] + position
    channel = lane
    stop = table.shape[1]
    while channel < stop:
        value = np.float32(0.0)
        if is_there:
            value = table[at, channel]
        gathered[item, channel] = value
        channel += lanes
