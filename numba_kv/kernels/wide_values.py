"""Packed elements to float32 and back, a 64-bit word at a time, and float32 operations that are rounded one by one.

The bits are those of `bits.to_float32` and `bits.from_float32` on every target; the lowest element of a word comes first. A GPU
that has instructions for it uses them (float8 from compute capability 8.9 on).
"""

from __future__ import annotations

import math

import numpy as np

from numba_kv.kernels.bits import BFLOAT16, FLOAT8, FLOAT16, bits_of, float_of, from_float32, to_float32
from numba_kv.kernels.gpu_intrinsics import float_operation, narrow_elements, narrow_results, widen_elements
from numba_kv.kernels.routines import primitive, routine

__all__ = [
    "bfloat16_of",
    "bfloat16_of_results",
    "bfloat16_results",
    "float8_of",
    "float16_of",
    "float16_of_results",
    "float16_results",
    "float32_of",
    "from_bfloat16",
    "from_float8",
    "from_float16",
    "from_float16_any_nan",
    "from_float32_word",
    "inverse_root",
    "minus",
    "plus",
    "scaled",
    "times",
]

_FLOAT8_INSTRUCTIONS, _BFLOAT16_COMPARISONS = (8, 9), (9, 0)


@routine
def _element(word, first, size, kind):
    """Return the float32 of the element of `size` bits at bit `first`."""
    bits = np.int64(word >> np.uint64(first) & np.uint64((1 << size) - 1))
    return float_of(to_float32(bits, kind))


@routine
def _bits(value, kind):
    return np.uint64(from_float32(bits_of(value), kind))


@routine
def from_float32_word(word):
    """Return the two float32 of a word."""
    low, high = np.int64(word & np.uint64(0xFFFFFFFF)), np.int64(word >> np.uint64(32))
    return float_of(low), float_of(high)


@routine
def float32_of(a, b):
    """Return the word of two float32."""
    return np.uint64(bits_of(a)) | np.uint64(bits_of(b)) << np.uint64(32)


@routine
def _four_elements(word, kind):
    a, b = _element(word, 0, 16, kind), _element(word, 16, 16, kind)
    return a, b, _element(word, 32, 16, kind), _element(word, 48, 16, kind)


@primitive(gpu=lambda architecture: widen_elements("float16"))
def from_float16(word):
    """Return the four float16 of a word as float32."""
    return _four_elements(word, FLOAT16)


@primitive(gpu=lambda architecture: widen_elements("float16", mends=False))
def from_float16_any_nan(word):
    """Return the four float16 of a word as float32; a NaN stays one, whatever its bits."""
    return _four_elements(word, FLOAT16)


@primitive(gpu=lambda architecture: widen_elements("bfloat16"))
def from_bfloat16(word):
    """Return the four bfloat16 of a word as float32."""
    return _four_elements(word, BFLOAT16)


@primitive(gpu=lambda architecture: widen_elements("float8") if architecture >= _FLOAT8_INSTRUCTIONS else None)
def from_float8(word):
    """Return the eight float8 of a word as float32."""
    return (
        _element(word, 0, 8, FLOAT8),
        _element(word, 8, 8, FLOAT8),
        _element(word, 16, 8, FLOAT8),
        _element(word, 24, 8, FLOAT8),
        _element(word, 32, 8, FLOAT8),
        _element(word, 40, 8, FLOAT8),
        _element(word, 48, 8, FLOAT8),
        _element(word, 56, 8, FLOAT8),
    )


@routine
def _four(a, b, c, d, size, kind):
    low = _bits(a, kind) | _bits(b, kind) << np.uint64(size)
    return low | (_bits(c, kind) | _bits(d, kind) << np.uint64(size)) << np.uint64(2 * size)


@primitive(gpu=lambda architecture: narrow_elements("float16"))
def float16_of(a, b, c, d, e, f, g, h):
    """Return the two words of eight float32 as float16."""
    return _four(a, b, c, d, 16, FLOAT16), _four(e, f, g, h, 16, FLOAT16)


@primitive(gpu=lambda architecture: narrow_elements("bfloat16"))
def bfloat16_of(a, b, c, d, e, f, g, h):
    """Return the two words of eight float32 as bfloat16."""
    return _four(a, b, c, d, 16, BFLOAT16), _four(e, f, g, h, 16, BFLOAT16)


@primitive(gpu=lambda architecture: narrow_elements("float16", of_results=True))
def float16_of_results(a, b, c, d, e, f, g, h):
    """Return the two words of eight results of float32 operations as float16: a GPU's NaN are positive."""
    return _four(a, b, c, d, 16, FLOAT16), _four(e, f, g, h, 16, FLOAT16)


@primitive(gpu=lambda architecture: narrow_elements("bfloat16", of_results=architecture >= _BFLOAT16_COMPARISONS))
def bfloat16_of_results(a, b, c, d, e, f, g, h):
    """Return the two words of eight results of float32 operations as bfloat16: a GPU's NaN are positive."""
    return _four(a, b, c, d, 16, BFLOAT16), _four(e, f, g, h, 16, BFLOAT16)


@primitive(gpu=lambda architecture: narrow_elements("float8") if architecture >= _FLOAT8_INSTRUCTIONS else None)
def float8_of(a, b, c, d, e, f, g, h):
    """Return the word of eight float32 as float8, saturated."""
    return _four(a, b, c, d, 8, FLOAT8) | _four(e, f, g, h, 8, FLOAT8) << np.uint64(32)


@routine
def _result(value, kind):
    bits = _bits(value, kind)
    if value != value:
        bits = np.uint64(0x7FFF)
    return bits


@routine
def _four_results(a, b, c, d, kind):
    low = _result(a, kind) | _result(b, kind) << np.uint64(16)
    return low | (_result(c, kind) | _result(d, kind) << np.uint64(16)) << np.uint64(32)


@primitive(gpu=lambda architecture: narrow_results("float16"))
def float16_results(a, b, c, d):
    """Return the word of four float32 as float16; a NaN has all bits set but the sign, as a GPU makes it."""
    return _four_results(a, b, c, d, FLOAT16)


@primitive(gpu=lambda architecture: narrow_results("bfloat16"))
def bfloat16_results(a, b, c, d):
    """Return the word of four float32 as bfloat16; a NaN has all bits set but the sign, as a GPU makes it."""
    return _four_results(a, b, c, d, BFLOAT16)


@primitive(gpu=lambda architecture: float_operation("fmul_rn"))
def times(a, b):
    """Return the float32 product, rounded."""
    return np.float32(a * b)


@primitive(gpu=lambda architecture: float_operation("fadd_rn"))
def plus(a, b):
    """Return the float32 sum, rounded."""
    return np.float32(a + b)


@primitive(gpu=lambda architecture: float_operation("fsub_rn"))
def minus(a, b):
    """Return the float32 difference, rounded."""
    return np.float32(a - b)


@primitive(gpu=lambda architecture: float_operation("fsqrt_rn"))
def _root(value):
    return np.float32(math.sqrt(value))


@primitive(gpu=lambda architecture: float_operation("frcp_rn"))
def _reciprocal(value):
    return np.float32(1.0) / np.float32(value)


@routine
def inverse_root(value):
    """Return one over the square root of a positive float32; both are rounded."""
    return _reciprocal(_root(value))


@routine
def scaled(value, factor):
    """Return the float32 product with a positive number; a NaN stays as it is."""
    product = times(value, factor)
    if value != value:  # NaN
        product = value
    return product
