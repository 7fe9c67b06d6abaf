"""Eight neighbouring elements at a time: loaded as they are, as float32 numbers, and stored again.

*Raw* elements are four 64-bit words, of which a type uses as many as its elements fill: float32 4, float16 and bfloat16 2,
float8 1. Kinds are those of `bits`, and RAW: 16 bytes that nobody looks into. Kinds, and `wide`, are constants at every call.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import BFLOAT16, FLOAT8, FLOAT16, FLOAT32
from numba_kv.kernels.routines import routine
from numba_kv.kernels.wide_access import (
    load_2,
    load_4,
    load_8,
    load_16,
    load_16_kept,
    store_2,
    store_4,
    store_8_if,
    store_16_if,
)
from numba_kv.kernels.wide_values import (
    bfloat16_of,
    bfloat16_of_results,
    float8_of,
    float16_of,
    float16_of_results,
    float32_of,
    from_bfloat16,
    from_float8,
    from_float16,
    from_float32_word,
    scaled,
)

__all__ = [
    "EIGHT",
    "RAW",
    "divided",
    "element_nbytes",
    "floats_of",
    "load_raw",
    "load_some",
    "product",
    "raw_of",
    "reciprocal",
    "rescaled",
    "results_of",
    "slot_place",
    "store_raw",
    "store_some",
    "unit_nbytes",
]

EIGHT = 8
RAW = -1


def reciprocal(divisor: int) -> int:
    """Return what `divided` takes for a divisor in [1, 2**31). Host only."""
    return min((1 << 32) - 1, (1 << 32) // divisor)


@routine
def product(a, b):
    """Return ``a * b`` of numbers in [0, 2**32): one instruction of a GPU, where 64 bits take four."""
    return np.int64(np.uint64(np.uint32(a)) * np.uint64(np.uint32(b)))


@routine
def divided(number, divisor, by):
    """Return ``number // divisor`` of a number in [0, 2**31) without a division; `by` is the divisor's `reciprocal`."""
    found = np.int64(np.uint64(np.uint32(number)) * np.uint64(np.uint32(by)) >> np.uint64(32))
    if number - product(found, divisor) >= divisor:
        found += 1
    return found


@routine
def slot_place(slot, shift, page_stride, token_stride):
    """Return where the token of a slot begins in half 0, by `product`: slots and strides are below 2**31."""
    page = np.uint32(slot) >> np.uint32(shift)
    return product(page, page_stride) + product(np.uint32(slot) - (page << np.uint32(shift)), token_stride)


@routine
def element_nbytes(kind):
    """Return the bytes of an element."""
    if kind == FLOAT32:
        return np.int64(4)
    if kind == FLOAT8:
        return np.int64(1)
    return np.int64(2)


@routine
def unit_nbytes(kind):
    """Return the bytes of eight elements; of RAW 16."""
    return EIGHT * element_nbytes(kind)


@routine
def load_raw(memory, at, kind, kept):
    """Return eight elements at byte `at`, a multiple of their size or of 16; `kept`: read again when much else has passed."""
    none = np.uint64(0)
    if kind == FLOAT8:
        return load_8(memory, at), none, none, none
    if kept:
        a, b = load_16_kept(memory, at)
        if kind == FLOAT32:
            c, d = load_16_kept(memory, at + 16)
            return a, b, c, d
    else:
        a, b = load_16(memory, at)
        if kind == FLOAT32:
            c, d = load_16(memory, at + 16)
            return a, b, c, d
    return a, b, none, none


@routine
def store_raw(memory, at, raw, kind, is_wanted):
    """Set eight elements at byte `at`, a multiple of their size or of 16, if that is wanted: on a GPU without a branch."""
    a, b, c, d = raw
    if kind == FLOAT8:
        store_8_if(memory, at, a, is_wanted)
    else:
        store_16_if(memory, at, a, b, is_wanted)
    if kind == FLOAT32:
        store_16_if(memory, at + 16, c, d, is_wanted)


@routine
def _some_word(memory, at, size, count):
    """Return up to a word of `count` elements of `size` bytes; zeros behind them."""
    word = np.uint64(0)
    for i in range(8 // size):
        if i < count:
            place = at + i * size
            if size == 4:
                bits = load_4(memory, place)
            elif size == 2:
                bits = load_2(memory, place)
            else:
                bits = np.uint64(memory[np.uint64(place)])
            word |= bits << np.uint64(8 * size * i)
    return word


@routine
def _set_some(memory, at, word, size, count):
    for i in range(8 // size):
        if i < count:
            place, bits = at + i * size, word >> np.uint64(8 * size * i)
            if size == 4:
                store_4(memory, place, bits)
            elif size == 2:
                store_2(memory, place, bits)
            else:
                memory[np.uint64(place)] = np.uint8(bits & np.uint64(0xFF))


@routine
def load_some(memory, at, kind, count):
    """Return `count` elements, of eight, at byte `at`, one by one; zeros behind them."""
    none = np.uint64(0)
    if kind == FLOAT8:
        return _some_word(memory, at, 1, count), none, none, none
    if kind == FLOAT32:
        return (
            _some_word(memory, at, 4, count),
            _some_word(memory, at + 8, 4, count - 2),
            _some_word(memory, at + 16, 4, count - 4),
            _some_word(memory, at + 24, 4, count - 6),
        )
    return _some_word(memory, at, 2, count), _some_word(memory, at + 8, 2, count - 4), none, none


@routine
def store_some(memory, at, raw, kind, count):
    """Set `count` elements, of eight, at byte `at`, one by one."""
    a, b, c, d = raw
    if kind == FLOAT8:
        _set_some(memory, at, a, 1, count)
    elif kind == FLOAT32:
        _set_some(memory, at, a, 4, count)
        _set_some(memory, at + 8, b, 4, count - 2)
        _set_some(memory, at + 16, c, 4, count - 4)
        _set_some(memory, at + 24, d, 4, count - 6)
    else:
        _set_some(memory, at, a, 2, count)
        _set_some(memory, at + 8, b, 2, count - 4)


@routine
def floats_of(raw, kind):
    """Return eight elements as float32; exact."""
    w0, w1, w2, w3 = raw
    if kind == FLOAT8:
        return from_float8(w0)
    if kind == FLOAT32:
        a, b = from_float32_word(w0)
        c, d = from_float32_word(w1)
        e, f = from_float32_word(w2)
        g, h = from_float32_word(w3)
    elif kind == FLOAT16:
        a, b, c, d = from_float16(w0)
        e, f, g, h = from_float16(w1)
    else:
        a, b, c, d = from_bfloat16(w0)
        e, f, g, h = from_bfloat16(w1)
    return a, b, c, d, e, f, g, h


@routine
def raw_of(floats, kind):
    """Return eight float32 as elements, rounded to nearest even; float8 saturates."""
    a, b, c, d, e, f, g, h = floats
    none = np.uint64(0)
    if kind == FLOAT8:
        return float8_of(a, b, c, d, e, f, g, h), none, none, none
    if kind == FLOAT32:
        return float32_of(a, b), float32_of(c, d), float32_of(e, f), float32_of(g, h)
    if kind == BFLOAT16:
        w0, w1 = bfloat16_of(a, b, c, d, e, f, g, h)
    else:
        w0, w1 = float16_of(a, b, c, d, e, f, g, h)
    return w0, w1, none, none


@routine
def results_of(floats, kind):
    """Return eight results of float32 operations as elements of 16 or 32 bits: those of `raw_of`, without a branch of a GPU."""
    a, b, c, d, e, f, g, h = floats
    none = np.uint64(0)
    if kind == FLOAT32:
        return float32_of(a, b), float32_of(c, d), float32_of(e, f), float32_of(g, h)
    if kind == BFLOAT16:
        w0, w1 = bfloat16_of_results(a, b, c, d, e, f, g, h)
    else:
        w0, w1 = float16_of_results(a, b, c, d, e, f, g, h)
    return w0, w1, none, none


@routine
def rescaled(floats, factor):
    """Return eight float32 times a positive number; NaN stays as it is."""
    a, b, c, d, e, f, g, h = floats
    return (
        scaled(a, factor),
        scaled(b, factor),
        scaled(c, factor),
        scaled(d, factor),
        scaled(e, factor),
        scaled(f, factor),
        scaled(g, factor),
        scaled(h, factor),
    )
