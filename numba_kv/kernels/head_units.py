"""The channels of one head in units of sixteen: where a unit lies, its rotation, its squares.

    unit c of a head of D channels, the first R of which are rotated:  two runs a, b of eight channels, so that every pair of
    the rotation is within one unit

    c < ceil(R / 16), halves       a = 8c ..         b = R/2 + 8c ..      pairs (a[i], b[i])
    c < ceil(R / 16), interleaved  a = 16c ..        b = 16c + 8 ..       pairs (a[2i], a[2i+1]), (b[2i], b[2i+1])
    behind them                    a = R + 16c' ..   b = a + 8 ..         not rotated

A unit has pairs 8c .. 8c+7 of the rotary table's row: cosines of all pairs, then their sines. Arithmetic is float32, every
operation rounded by itself, in one order on every target.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import float_of
from numba_kv.kernels.routines import routine
from numba_kv.kernels.wide_rows import element_nbytes, load_raw, load_some, store_raw, store_some
from numba_kv.kernels.wide_values import inverse_root, minus, plus, times

__all__ = [
    "close_tree",
    "get_run",
    "grow_tree",
    "norm_factor",
    "normalised",
    "put_run",
    "rotated",
    "squares",
    "unit_runs",
]


@routine
def unit_runs(c, rotary_units, rotary, dim, interleaved):
    """Return first channel and number of channels of both runs of a unit."""
    if c < rotary_units:
        pairs = min(np.int64(8), (rotary >> 1) - 8 * c)
        if interleaved:
            return 16 * c, min(np.int64(8), 2 * pairs), 16 * c + 8, max(np.int64(0), 2 * pairs - 8)
        return 8 * c, pairs, (rotary >> 1) + 8 * c, pairs
    first = rotary + 16 * (c - rotary_units)
    count = min(np.int64(16), dim - first)
    return first, min(np.int64(8), count), first + 8, max(np.int64(0), count - 8)


@routine
def get_run(memory, at, first, count, kind, wide, kept):
    """Return a run of the head at byte `at`, raw; `wide` runs are eight channels on a boundary of theirs."""
    place = at + first * element_nbytes(kind)
    if wide:
        return load_raw(memory, place, kind, kept)
    return load_some(memory, place, kind, count)


@routine
def put_run(memory, at, first, count, raw, kind, wide, is_wanted):
    """Set a run of the head at byte `at`, if it is wanted."""
    place = at + first * element_nbytes(kind)
    if wide:
        store_raw(memory, place, raw, kind, is_wanted)
    elif is_wanted:
        store_some(memory, place, raw, kind, count)


@routine
def _turned(x, y, cosine, sine):
    return minus(times(x, cosine), times(y, sine)), plus(times(y, cosine), times(x, sine))


@routine
def rotated(a, b, cosines, sines, interleaved):
    """Return both runs of a unit, rotated."""
    a0, a1, a2, a3, a4, a5, a6, a7 = a
    b0, b1, b2, b3, b4, b5, b6, b7 = b
    c0, c1, c2, c3, c4, c5, c6, c7 = cosines
    s0, s1, s2, s3, s4, s5, s6, s7 = sines
    if interleaved:
        a0, a1 = _turned(a0, a1, c0, s0)
        a2, a3 = _turned(a2, a3, c1, s1)
        a4, a5 = _turned(a4, a5, c2, s2)
        a6, a7 = _turned(a6, a7, c3, s3)
        b0, b1 = _turned(b0, b1, c4, s4)
        b2, b3 = _turned(b2, b3, c5, s5)
        b4, b5 = _turned(b4, b5, c6, s6)
        b6, b7 = _turned(b6, b7, c7, s7)
    else:
        a0, b0 = _turned(a0, b0, c0, s0)
        a1, b1 = _turned(a1, b1, c1, s1)
        a2, b2 = _turned(a2, b2, c2, s2)
        a3, b3 = _turned(a3, b3, c3, s3)
        a4, b4 = _turned(a4, b4, c4, s4)
        a5, b5 = _turned(a5, b5, c5, s5)
        a6, b6 = _turned(a6, b6, c6, s6)
        a7, b7 = _turned(a7, b7, c7, s7)
    return (a0, a1, a2, a3, a4, a5, a6, a7), (b0, b1, b2, b3, b4, b5, b6, b7)


@routine
def _run_squares(run):
    a, b, c, d, e, f, g, h = run
    low = plus(plus(times(a, a), times(b, b)), plus(times(c, c), times(d, d)))
    high = plus(plus(times(e, e), times(f, f)), plus(times(g, g), times(h, h)))
    return plus(low, high)


@routine
def squares(a, b):
    """Return the sum of a unit's squares: neighbours first, then run a and run b."""
    return plus(_run_squares(a), _run_squares(b))


@routine
def grow_tree(number, value, tree):
    """Return the tree with leaf `number` added: sums of 1, 2, 4, ... 32 neighbouring leaves that wait for their like."""
    s0, s1, s2, s3, s4, s5 = tree
    if number & 1 == 0:
        s0 = value
    else:
        value = plus(s0, value)
        if number & 2 == 0:
            s1 = value
        else:
            value = plus(s1, value)
            if number & 4 == 0:
                s2 = value
            else:
                value = plus(s2, value)
                if number & 8 == 0:
                    s3 = value
                else:
                    value = plus(s3, value)
                    if number & 16 == 0:
                        s4 = value
                    else:
                        s5 = plus(s4, value)
    return s0, s1, s2, s3, s4, s5


@routine
def close_tree(count, tree):
    """Return the sum of a tree of `count` leaves, 63 at most; the missing ones count as zeros."""
    s0, s1, s2, s3, s4, s5 = tree
    total = np.float32(0.0)
    if count & 1:
        total = s0
    if count & 2:
        total = plus(s1, total)
    if count & 4:
        total = plus(s2, total)
    if count & 8:
        total = plus(s3, total)
    if count & 16:
        total = plus(s4, total)
    if count & 32:
        total = plus(s5, total)
    return total


@routine
def norm_factor(total, inverse_dim, eps):
    """Return one over the root of the mean of squares; the last two are bits of float32."""
    return inverse_root(plus(times(total, float_of(inverse_dim)), float_of(eps)))


@routine
def _normal(x, inverse, offset, weight):
    return times(times(x, inverse), plus(offset, weight))


@routine
def normalised(run, inverse, offset, weights):
    """Return a run times one over its head's root mean square, times ``offset + weight``."""
    a, b, c, d, e, f, g, h = run
    s, t, u, v, w, x, y, z = weights
    return (
        _normal(a, inverse, offset, s),
        _normal(b, inverse, offset, t),
        _normal(c, inverse, offset, u),
        _normal(d, inverse, offset, v),
        _normal(e, inverse, offset, w),
        _normal(f, inverse, offset, x),
        _normal(g, inverse, offset, y),
        _normal(h, inverse, offset, z),
    )
