"""Accesses of 2 to 16 bytes to memory that is given as bytes: on a GPU one instruction each.

A place `at` counts bytes and is a multiple of the access. Values are uint64; bytes lie in the order of little endian, as on
every machine that has a GPU.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.gpu_intrinsics import load_bytes, store_bytes
from numba_kv.kernels.routines import primitive, routine

__all__ = [
    "load_2",
    "load_4",
    "load_8",
    "load_16",
    "load_16_kept",
    "store_2",
    "store_4",
    "store_8",
    "store_8_if",
    "store_16",
    "store_16_if",
]

#: Compute capability from which on accesses say what is to stay in the cache.
_CACHE_HINTS = (8, 0)


@routine
def _two(memory, i):
    return np.int64(memory[i]) | np.int64(memory[i + np.uint64(1)]) << 8


@routine
def _four(memory, i):
    return _two(memory, i) | _two(memory, i + np.uint64(2)) << 16


@primitive(gpu=lambda architecture: load_bytes(2))
def load_2(memory, at):
    """Return 2 bytes."""
    return np.uint64(_two(memory, np.uint64(at)))


@primitive(gpu=lambda architecture: load_bytes(4))
def load_4(memory, at):
    """Return 4 bytes."""
    return np.uint64(_four(memory, np.uint64(at)))


@routine
def _eight(memory, i):
    return np.uint64(_four(memory, i)) | np.uint64(_four(memory, i + np.uint64(4))) << np.uint64(32)


@primitive(gpu=lambda architecture: load_bytes(8))
def load_8(memory, at):
    """Return 8 bytes."""
    return _eight(memory, np.uint64(at))


@primitive(gpu=lambda architecture: load_bytes(16))
def load_16(memory, at):
    """Return 16 bytes as two words, the lower address first."""
    i = np.uint64(at)
    return _eight(memory, i), _eight(memory, i + np.uint64(8))


@primitive(gpu=lambda architecture: load_bytes(16, kept=architecture >= _CACHE_HINTS))
def load_16_kept(memory, at):
    """Return 16 bytes that are read again when much else has passed."""
    i = np.uint64(at)
    return _eight(memory, i), _eight(memory, i + np.uint64(8))


@routine
def _put(memory, i, word, count):
    for n in range(count):
        memory[i + np.uint64(n)] = np.uint8(word >> np.uint64(8 * n) & np.uint64(0xFF))


@primitive(gpu=lambda architecture: store_bytes(2))
def store_2(memory, at, word):
    """Set 2 bytes; the rest of the word is not looked at."""
    _put(memory, np.uint64(at), word, 2)


@primitive(gpu=lambda architecture: store_bytes(4))
def store_4(memory, at, word):
    """Set 4 bytes; the rest of the word is not looked at."""
    _put(memory, np.uint64(at), word, 4)


@primitive(gpu=lambda architecture: store_bytes(8))
def store_8(memory, at, word):
    """Set 8 bytes."""
    _put(memory, np.uint64(at), word, 8)


@primitive(gpu=lambda architecture: store_bytes(16))
def store_16(memory, at, low, high):
    """Set 16 bytes to two words."""
    _put(memory, np.uint64(at), low, 8)
    _put(memory, np.uint64(at) + np.uint64(8), high, 8)


@primitive(gpu=lambda architecture: store_bytes(8, guarded=True))
def store_8_if(memory, at, word, is_wanted):
    """Set 8 bytes, or nothing."""
    if is_wanted:
        _put(memory, np.uint64(at), word, 8)


@primitive(gpu=lambda architecture: store_bytes(16, guarded=True))
def store_16_if(memory, at, low, high, is_wanted):
    """Set 16 bytes to two words, or nothing."""
    if is_wanted:
        _put(memory, np.uint64(at), low, 8)
        _put(memory, np.uint64(at) + np.uint64(8), high, 8)
