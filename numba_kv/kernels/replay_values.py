"""Numbers of recurrent states as replays use them: four at once, rounded as the state keeps them.

Sums and products are rounded one by one, and fused with no other, so that all targets give the same states, bit by bit. A NaN
stays one on the way, and is stored as a GPU makes it: all bits set but the sign.

Words are what memory has of four numbers: two of 64 bits for float32, else one, and 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_kv.kernels.bits import BFLOAT16, FLOAT32, float_of, to_float32
from numba_kv.kernels.numba_targets import cuda_device_function
from numba_kv.kernels.routines import primitive, routine
from numba_kv.kernels.wide_access import load_2, load_4, load_8, load_16, store_2, store_4, store_8, store_16
from numba_kv.kernels.wide_values import (
    bfloat16_results,
    float16_results,
    float32_of,
    from_bfloat16,
    from_float16_any_nan,
    from_float32_word,
)

__all__ = [
    "TILE_COLUMNS",
    "TILE_ROWS",
    "four_of",
    "load_four",
    "load_one",
    "load_tile",
    "store_one",
    "store_tile",
    "words_of",
]

#: Rows and columns of a tile, which is what a lane of a GPU has in registers.
TILE_ROWS, TILE_COLUMNS = 8, 4


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
def load_words(memory, at, kind):
    """Return the words of elements `at` to `at` + 3 of a memory that is given as bytes; `at` is a multiple of 4."""
    if kind == FLOAT32:
        return load_16(memory, at * 4)
    return load_8(memory, at * 2), np.uint64(0)


@routine
def store_words(memory, at, words, kind):
    """Set elements `at` to `at` + 3; `at` is a multiple of 4."""
    if kind == FLOAT32:
        store_16(memory, at * 4, words[0], words[1])
    else:
        store_8(memory, at * 2, words[0])


@routine
def four_of(words, kind):
    """Return the numbers of words as float32; a NaN stays one, whatever its bits."""
    if kind == FLOAT32:
        a, b = from_float32_word(words[0])
        c, d = from_float32_word(words[1])
        return a, b, c, d
    if kind == BFLOAT16:
        return from_bfloat16(words[0])
    return from_float16_any_nan(words[0])


@routine
def words_of(a, b, c, d, kind):
    """Return the words of four numbers that arithmetic gave, rounded as a state of `kind` keeps them."""
    if kind == FLOAT32:
        return float32_of(result(a), result(b)), float32_of(result(c), result(d))
    if kind == BFLOAT16:
        return bfloat16_results(a, b, c, d), np.uint64(0)
    return float16_results(a, b, c, d), np.uint64(0)


@routine
def load_tile(memory, at, size, kind):
    """Return the words of a tile's rows; rows of the state have `size` elements."""
    return (
        load_words(memory, at, kind),
        load_words(memory, at + size, kind),
        load_words(memory, at + 2 * size, kind),
        load_words(memory, at + 3 * size, kind),
        load_words(memory, at + 4 * size, kind),
        load_words(memory, at + 5 * size, kind),
        load_words(memory, at + 6 * size, kind),
        load_words(memory, at + 7 * size, kind),
    )


@routine
def store_tile(memory, at, size, words, kind):
    """Set a tile's rows."""
    store_words(memory, at, words[0], kind)
    store_words(memory, at + size, words[1], kind)
    store_words(memory, at + 2 * size, words[2], kind)
    store_words(memory, at + 3 * size, words[3], kind)
    store_words(memory, at + 4 * size, words[4], kind)
    store_words(memory, at + 5 * size, words[5], kind)
    store_words(memory, at + 6 * size, words[6], kind)
    store_words(memory, at + 7 * size, words[7], kind)


@routine
def load_four(memory, at, kind):
    """Return elements `at` to `at` + 3 as float32; `at` is a multiple of 4."""
    return four_of(load_words(memory, at, kind), kind)


@routine
def load_one(memory, at, kind):
    """Return element `at` of a memory that is given as bytes, as float32."""
    if kind == FLOAT32:
        return float_of(load_4(memory, at * 4))
    return float_of(to_float32(load_2(memory, at * 2), kind))


@routine
def store_one(memory, at, value, kind):
    """Set element `at` to what arithmetic gave, rounded as a state of `kind` keeps it."""
    word = words_of(value, value, value, value, kind)[0]
    if kind == FLOAT32:
        store_4(memory, at * 4, word)
    else:
        store_2(memory, at * 2, word)
