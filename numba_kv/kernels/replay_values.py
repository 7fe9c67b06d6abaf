"""Numbers of recurrent states as replays use them: four at once, rounded as the state keeps them.

Sums and products are rounded one by one, and fused with no other, so that all targets give the same states, bit by bit. A NaN
stays one on the way, and is stored as a GPU makes it: all bits set but the sign.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_kv.kernels.bits import BFLOAT16, FLOAT16, FLOAT32, bits_of, float_of, to_float32
from numba_kv.kernels.numba_targets import cuda_device_function
from numba_kv.kernels.routines import primitive, routine
from numba_kv.kernels.wide_access import load_2, load_4, load_8, load_16, store_2, store_4, store_8, store_16
from numba_kv.kernels.wide_values import (
    bfloat16_results,
    float16_results,
    float32_of,
    from_bfloat16,
    from_float16,
    from_float32_word,
    rounded_bfloat16,
    rounded_float16,
)

__all__ = ["load_four", "load_one", "rounded_four", "rounded_one", "store_four", "store_one"]


@routine
def rounded_four(a, b, c, d, kind):
    """Return four float32 as a state of `kind` keeps them."""
    if kind == BFLOAT16:
        return rounded_bfloat16(a, b, c, d)
    if kind == FLOAT16:
        return rounded_float16(a, b, c, d)
    return a, b, c, d


@routine
def rounded_one(value, kind):
    """Return a float32 as a state of `kind` keeps it."""
    return rounded_four(value, value, value, value, kind)[0]


def _gpu_result(architecture: tuple[int, int]) -> Any:
    def result(value):
        return value

    return cuda_device_function(result)


@primitive(gpu=_gpu_result)
def result(value):
    """Return what arithmetic gave, with all bits of a NaN set but the sign, as a GPU makes it."""
    if value != value:
        value = float_of(0x7FFFFFFF)
    return value


@routine
def load_one(memory, at, kind):
    """Return element `at` of a memory that is given as bytes, as float32."""
    if kind == FLOAT32:
        return float_of(load_4(memory, at * 4))
    return float_of(to_float32(load_2(memory, at * 2), kind))


@routine
def store_one(memory, at, value, kind):
    """Set element `at` to what arithmetic gave."""
    if kind == FLOAT32:
        store_4(memory, at * 4, np.uint64(bits_of(result(value))))
    elif kind == BFLOAT16:
        store_2(memory, at * 2, bfloat16_results(value, value, value, value))
    else:
        store_2(memory, at * 2, float16_results(value, value, value, value))


@routine
def load_four(memory, at, kind):
    """Return elements `at` to `at` + 3 as float32; `at` is a multiple of 4."""
    if kind == FLOAT32:
        low, high = load_16(memory, at * 4)
        a, b = from_float32_word(low)
        c, d = from_float32_word(high)
        return a, b, c, d
    word = load_8(memory, at * 2)
    if kind == BFLOAT16:
        return from_bfloat16(word)
    return from_float16(word)


@routine
def store_four(memory, at, values, kind):
    """Set elements `at` to `at` + 3 to what arithmetic gave; `at` is a multiple of 4."""
    a, b, c, d = values
    if kind == FLOAT32:
        store_16(memory, at * 4, float32_of(result(a), result(b)), float32_of(result(c), result(d)))
    elif kind == BFLOAT16:
        store_8(memory, at * 2, bfloat16_results(a, b, c, d))
    else:
        store_8(memory, at * 2, float16_results(a, b, c, d))
