"""Bits of the element types of K and V, and their conversion through float32, on integers alone where that is possible.

The same bits on every target: rounding is to nearest even, subnormal numbers are kept, float8_e4m3 saturates at 448, and a NaN
stays a NaN of its sign. Arithmetic is 64-bit on purpose: the simulator's NumPy scalars overflow without wrapping.

A *kind* is the number of mantissa bits that float32 has more than the type.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.routines import routine

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "FLOAT8",
    "KINDS",
    "clear_row",
    "copy_pair",
    "from_float32",
    "move_pair",
    "pack_pair",
    "scale_float32",
    "to_float32",
    "unpack_pair",
]

FLOAT32, FLOAT16, BFLOAT16, FLOAT8 = 0, 13, 16, 20
#: Kind of each element type that K and V can have.
KINDS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16, "float8_e4m3": FLOAT8}

_INFINITY = 0x7F800000
_SIGN = 0x80000000


@routine
def float_of(bits):
    """Return the float32 of 32 bits."""
    return np.uint32(bits).view(np.float32)


@routine
def bits_of(value):
    """Return the 32 bits of a float32."""
    return np.int64(np.float32(value).view(np.uint32))


@routine
def to_float32(bits, kind):
    """Return the float32 bits of an element's bits; exact."""
    bits = np.int64(bits)
    if kind == FLOAT32:
        return bits
    sign = np.int64(0x8000)
    if kind == FLOAT8:
        sign = np.int64(0x80)
    magnitude = (bits & (sign - 1)) << kind
    if kind == FLOAT16:  # the exponents' bases are 112 apart, and a product brings subnormals up too
        magnitude = bits_of(float_of(magnitude) * np.float32(2.0**112))
        if magnitude >= 0x47800000:  # 65536 and above: infinity and NaN
            magnitude |= _INFINITY
    elif kind == FLOAT8:
        magnitude = bits_of(float_of(magnitude) * np.float32(2.0**120))
        if bits & 0x7F == 0x7F:
            magnitude = np.int64(0x7FC00000)
    if bits & sign:
        magnitude |= _SIGN
    return magnitude


@routine
def from_float32(bits, kind):
    """Return an element's bits of float32 bits; rounded to nearest even."""
    bits = np.int64(bits)
    if kind == FLOAT32:
        return bits
    magnitude = bits & 0x7FFFFFFF
    sign = np.int64(0x8000)
    if kind == BFLOAT16:
        found = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        if magnitude > _INFINITY:
            found = np.int64(0x7FC0)
    elif kind == FLOAT16:
        found = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
        if magnitude < 0x38800000:  # below 2**-14: a sum whose last place is that of the subnormals rounds them
            found = bits_of(float_of(magnitude) + np.float32(0.5)) - 0x3F000000
        if magnitude >= 0x47800000:
            found = np.int64(0x7C00)
        if magnitude > _INFINITY:
            found = np.int64(0x7E00)
    else:
        sign = np.int64(0x80)
        found = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        if magnitude < 0x3C800000:  # below 2**-6
            found = bits_of(float_of(magnitude) + np.float32(16384.0)) - 0x46800000
        if magnitude > 0x43E00000:  # above 448, infinity included
            found = np.int64(0x7E)
        if magnitude > _INFINITY:
            found = np.int64(0x7F)
    if bits & _SIGN:
        found |= sign
    return found


@routine
def scale_float32(bits, factor):
    """Return the bits of `factor` times a float32, given as bits; a NaN keeps the sign, which machines choose differently."""
    product = bits_of(float_of(bits) * factor)
    if product & 0x7FFFFFFF > _INFINITY:
        product = (np.int64(bits) & _SIGN) | 0x7FC00000
    return product


@routine
def converted(bits, kind, new_kind, factor):
    """Return the bits of an element in another type; times `factor` if one of the types is float8."""
    wide = to_float32(bits, kind)
    if kind == FLOAT8 or new_kind == FLOAT8:
        wide = scale_float32(wide, factor)
    return from_float32(wide, new_kind)


@routine
def copy_pair(t, u, to_t, to_u, s, q, from_s, from_q, count, lane, lanes):
    """Copy `count` neighbours from `s` to `t` and from `q` to `u`; lanes share them."""
    t_at, u_at = np.uint64(to_t), np.uint64(to_u)  # unsigned indices have no wrap-around to be tested for
    s_at, q_at = np.uint64(from_s), np.uint64(from_q)
    step, stop = np.uint64(lanes), np.uint64(count)
    j = np.uint64(lane)
    while j < stop:
        s_value = s[s_at + j]  # both loads before the stores: their latencies overlap
        q_value = q[q_at + j]
        t[t_at + j] = s_value
        u[u_at + j] = q_value
        j += step


@routine
def convert_pair(t, u, to_t, to_u, new_kind, s, q, from_s, from_q, kind, count, s_factor, q_factor, lane, lanes):
    """Convert `count` neighbours from `s` to `t` and from `q` to `u`; lanes share them.

    The kinds are constants at every call, so that the compiler keeps nothing but their own arithmetic.
    """
    t_at, u_at = np.uint64(to_t), np.uint64(to_u)
    s_at, q_at = np.uint64(from_s), np.uint64(from_q)
    step, stop = np.uint64(lanes), np.uint64(count)
    j = np.uint64(lane)
    while j < stop:
        s_value = s[s_at + j]
        q_value = q[q_at + j]
        t[t_at + j] = converted(s_value, kind, new_kind, s_factor)
        u[u_at + j] = converted(q_value, kind, new_kind, q_factor)
        j += step


@routine
def move_pair(ts, us, to_t, to_u, new_kind, ss, qs, from_s, from_q, kind, count, lane, lanes):
    """Copy or convert two rows of `count` elements, where float8 is only copied; lanes share them.

    ``ts`` is the memory of a target as arrays of 1-, 2- and 4-byte elements; so are ``us``, ``ss`` and ``qs``. The kinds say
    which array is meant; places count its elements.
    """
    t8, t16, t32 = ts
    u8, u16, u32 = us
    s8, s16, s32 = ss
    q8, q16, q32 = qs
    one = np.float32(1.0)
    if kind == new_kind:
        if kind == FLOAT8:
            copy_pair(t8, u8, to_t, to_u, s8, q8, from_s, from_q, count, lane, lanes)
        elif kind == FLOAT32:
            copy_pair(t32, u32, to_t, to_u, s32, q32, from_s, from_q, count, lane, lanes)
        else:
            copy_pair(t16, u16, to_t, to_u, s16, q16, from_s, from_q, count, lane, lanes)
    elif kind == FLOAT32:
        if new_kind == FLOAT16:
            convert_pair(t16, u16, to_t, to_u, FLOAT16, s32, q32, from_s, from_q, FLOAT32, count, one, one, lane, lanes)
        else:
            convert_pair(t16, u16, to_t, to_u, BFLOAT16, s32, q32, from_s, from_q, FLOAT32, count, one, one, lane, lanes)
    elif kind == FLOAT16:
        if new_kind == FLOAT32:
            convert_pair(t32, u32, to_t, to_u, FLOAT32, s16, q16, from_s, from_q, FLOAT16, count, one, one, lane, lanes)
        else:
            convert_pair(t16, u16, to_t, to_u, BFLOAT16, s16, q16, from_s, from_q, FLOAT16, count, one, one, lane, lanes)
    elif new_kind == FLOAT32:
        convert_pair(t32, u32, to_t, to_u, FLOAT32, s16, q16, from_s, from_q, BFLOAT16, count, one, one, lane, lanes)
    else:
        convert_pair(t16, u16, to_t, to_u, FLOAT16, s16, q16, from_s, from_q, BFLOAT16, count, one, one, lane, lanes)


@routine
def pack_pair(t, u, to_t, to_u, ss, qs, from_s, from_q, kind, count, s_factor, q_factor, lane, lanes):
    """Convert two rows to float8, times their factors; lanes share them."""
    _, s16, s32 = ss
    _, q16, q32 = qs
    if kind == FLOAT32:
        convert_pair(t, u, to_t, to_u, FLOAT8, s32, q32, from_s, from_q, FLOAT32, count, s_factor, q_factor, lane, lanes)
    elif kind == FLOAT16:
        convert_pair(t, u, to_t, to_u, FLOAT8, s16, q16, from_s, from_q, FLOAT16, count, s_factor, q_factor, lane, lanes)
    else:
        convert_pair(t, u, to_t, to_u, FLOAT8, s16, q16, from_s, from_q, BFLOAT16, count, s_factor, q_factor, lane, lanes)


@routine
def unpack_pair(ts, us, to_t, to_u, new_kind, s, q, from_s, from_q, count, s_factor, q_factor, lane, lanes):
    """Convert two rows from float8, times their factors; lanes share them."""
    _, t16, t32 = ts
    _, u16, u32 = us
    if new_kind == FLOAT32:
        convert_pair(t32, u32, to_t, to_u, FLOAT32, s, q, from_s, from_q, FLOAT8, count, s_factor, q_factor, lane, lanes)
    elif new_kind == FLOAT16:
        convert_pair(t16, u16, to_t, to_u, FLOAT16, s, q, from_s, from_q, FLOAT8, count, s_factor, q_factor, lane, lanes)
    else:
        convert_pair(t16, u16, to_t, to_u, BFLOAT16, s, q, from_s, from_q, FLOAT8, count, s_factor, q_factor, lane, lanes)


@routine
def clear_row(t8, t16, t32, at, kind, count, lane, lanes):
    """Set `count` neighbours of kind `kind` to zero; lanes share them."""
    to, step, stop = np.uint64(at), np.uint64(lanes), np.uint64(count)
    j = np.uint64(lane)
    if kind == FLOAT32:
        while j < stop:
            t32[to + j] = 0
            j += step
    elif kind == FLOAT8:
        while j < stop:
            t8[to + j] = 0
            j += step
    else:
        while j < stop:
            t16[to + j] = 0
            j += step
