"""The chain of BLAKE2b names of a sequence's blocks, compiled: bit for bit what `hashlib` gives, without a call for each block.

Each name needs the one before it, so blocks are named one after the other, on the host, on every target.

Source: RFC 7693.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from numba_kv.kernels.host_code import compiled
from numba_kv.ledger.reuse.block_hash import HASH_BYTES, Blake2bHash, BlockHash

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["chain_names", "with_compiled_chain"]

_BYTES_AT_ONCE = 128  # that one compression takes in
_WORDS_AT_ONCE = _BYTES_AT_ONCE // 8
_NAME_WORDS = HASH_BYTES // 8
_NAME = np.dtype(f"V{HASH_BYTES}")

_I0, _I1 = np.uint64(0x6A09E667F3BCC908), np.uint64(0xBB67AE8584CAA73B)
_I2, _I3 = np.uint64(0x3C6EF372FE94F82B), np.uint64(0xA54FF53A5F1D36F1)
_I4, _I5 = np.uint64(0x510E527FADE682D1), np.uint64(0x9B05688C2B3E6C1F)
_I6, _I7 = np.uint64(0x1F83D9ABFB41BD6B), np.uint64(0x5BE0CD19137E2179)
#: The first word of the state: no key, one lane, and the bytes of a name.
_START = _I0 ^ np.uint64(0x01010000 | HASH_BYTES)
_ALL_BITS, _NO_BITS = np.uint64((1 << 64) - 1), np.uint64(0)

_inlined: Any = numba.njit(forceinline=True, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_inlined
def _turned(word, bits):
    return (word >> np.uint64(bits)) | (word << np.uint64(64 - bits))


@_inlined
def _mixed(a, b, c, d, x, y):
    a = a + b + x
    d = _turned(d ^ a, 32)
    c = c + d
    b = _turned(b ^ c, 24)
    a = a + b + y
    d = _turned(d ^ a, 16)
    c = c + d
    b = _turned(b ^ c, 63)
    return a, b, c, d


@_inlined
def _round(v, m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15):
    """Mix columns, then diagonals, of the 4 x 4 words `v`."""
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = v
    a0, b0, c0, d0 = _mixed(a0, b0, c0, d0, m0, m1)
    a1, b1, c1, d1 = _mixed(a1, b1, c1, d1, m2, m3)
    a2, b2, c2, d2 = _mixed(a2, b2, c2, d2, m4, m5)
    a3, b3, c3, d3 = _mixed(a3, b3, c3, d3, m6, m7)
    a0, b1, c2, d3 = _mixed(a0, b1, c2, d3, m8, m9)
    a1, b2, c3, d0 = _mixed(a1, b2, c3, d0, m10, m11)
    a2, b3, c0, d1 = _mixed(a2, b3, c0, d1, m12, m13)
    a3, b0, c1, d2 = _mixed(a3, b0, c1, d2, m14, m15)
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3


@_inlined
def _compressed(h, message, at, count, last):
    """Return the state `h` after the 16 words of `message` from `at` on; `count` bytes are taken in with them."""
    m0, m1, m2, m3 = message[at], message[at + 1], message[at + 2], message[at + 3]
    m4, m5, m6, m7 = message[at + 4], message[at + 5], message[at + 6], message[at + 7]
    m8, m9, m10, m11 = message[at + 8], message[at + 9], message[at + 10], message[at + 11]
    m12, m13, m14, m15 = message[at + 12], message[at + 13], message[at + 14], message[at + 15]
    h0, h1, h2, h3, h4, h5, h6, h7 = h
    v = h0, h1, h2, h3, h4, h5, h6, h7, _I0, _I1, _I2, _I3, _I4 ^ count, _I5, _I6 ^ last, _I7
    v = _round(v, m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15)
    v = _round(v, m14, m10, m4, m8, m9, m15, m13, m6, m1, m12, m0, m2, m11, m7, m5, m3)
    v = _round(v, m11, m8, m12, m0, m5, m2, m15, m13, m10, m14, m3, m6, m7, m1, m9, m4)
    v = _round(v, m7, m9, m3, m1, m13, m12, m11, m14, m2, m6, m5, m10, m4, m0, m15, m8)
    v = _round(v, m9, m0, m5, m7, m2, m4, m10, m15, m14, m1, m11, m12, m6, m8, m3, m13)
    v = _round(v, m2, m12, m6, m10, m0, m11, m8, m3, m4, m13, m7, m5, m15, m14, m1, m9)
    v = _round(v, m12, m5, m1, m15, m14, m13, m4, m10, m0, m7, m6, m3, m9, m2, m8, m11)
    v = _round(v, m13, m11, m7, m14, m12, m1, m3, m9, m5, m0, m15, m4, m8, m6, m2, m10)
    v = _round(v, m6, m15, m14, m9, m11, m3, m0, m8, m12, m2, m13, m7, m1, m4, m10, m5)
    v = _round(v, m10, m2, m8, m4, m7, m6, m1, m5, m15, m11, m9, m14, m3, m12, m13, m0)
    v = _round(v, m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10, m11, m12, m13, m14, m15)
    v = _round(v, m14, m10, m4, m8, m9, m15, m13, m6, m1, m12, m0, m2, m11, m7, m5, m3)
    v0, v1, v2, v3, v4, v5, v6, v7, w0, w1, w2, w3, w4, w5, w6, w7 = v
    return (
        h0 ^ v0 ^ w0, h1 ^ v1 ^ w1, h2 ^ v2 ^ w2, h3 ^ v3 ^ w3, h4 ^ v4 ^ w4, h5 ^ v5 ^ w5, h6 ^ v6 ^ w6, h7 ^ v7 ^ w7,
    )  # fmt: skip


@compiled("void(uint64[:, ::1], int64, uint64[::1], uint64[:, ::1])")
def _chain(words: NDArray[np.uint64], nbytes: int, message: NDArray[np.uint64], names: NDArray[np.uint64]) -> None:
    """Name blocks.

    `words` uint64 [n, words of a block], `nbytes` of them tokens. `message` uint64 [a multiple of 16]: the name before the
    first block, room for a block, zeros. `names` uint64 [n, 2] is filled.
    """
    total = _NAME_WORDS * 8 + nbytes
    for block in range(words.shape[0]):
        for i in range(words.shape[1]):
            message[_NAME_WORDS + i] = words[block, i]
        h = _START, _I1, _I2, _I3, _I4, _I5, _I6, _I7
        at = 0
        while 8 * at + _BYTES_AT_ONCE < total:
            h = _compressed(h, message, at, np.uint64(8 * at + _BYTES_AT_ONCE), _NO_BITS)
            at += _WORDS_AT_ONCE
        h = _compressed(h, message, at, np.uint64(total), _ALL_BITS)
        names[block, 0] = message[0] = h[0]
        names[block, 1] = message[1] = h[1]


def chain_names(parent: bytes, tokens: NDArray[np.int32]) -> list[bytes]:
    """Return the names of consecutive blocks of text; `Blake2bHash` describes them.

    Parameters
    ----------
    parent : bytes
        Name of the block before them.
    tokens : int32 [n, P]
        Their tokens.

    Cost: 0.2 us a block of 16 tokens; importing this module compiles (a second or two; cached on disk).
    """
    blocks, size = tokens.shape
    padded = np.zeros((blocks, size + size % 2), "<i4")
    padded[:, :size] = tokens
    nbytes = 4 * size
    message = np.zeros(-(-(HASH_BYTES + nbytes) // _BYTES_AT_ONCE) * _WORDS_AT_ONCE, np.uint64)
    message[:_NAME_WORDS] = np.frombuffer(parent, np.uint64)
    names = np.empty((blocks, _NAME_WORDS), np.uint64)
    _chain(padded.view(np.uint64), nbytes, message, names)
    found: list[bytes] = names.view(_NAME).ravel().tolist()
    return found


def with_compiled_chain(naming: BlockHash | None) -> BlockHash | None:
    """Return what names blocks as `naming` does, with compiled code; `naming` itself if there is none for it."""
    if type(naming) is not Blake2bHash or naming.chain is not None:
        return naming
    return Blake2bHash(chain_names)
