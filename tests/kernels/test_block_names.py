"""Names of blocks from compiled code are those of `hashlib`, whatever the size of a block and whatever it holds."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.kernels.block_names import chain_names, with_compiled_chain
from numba_kv.ledger.reuse.block_hash import Blake2bHash, chain_hashes, prefix_digest
from numba_kv.ledger.reuse.content import MediaSpan, TokenContent
from numba_kv.ledger.reuse.fnv import ReferenceHash
from numba_kv.ledger.reuse.identity import ContextIdentity

PLAIN, COMPILED = Blake2bHash(), with_compiled_chain(Blake2bHash())


def named(parent: bytes, tokens: np.ndarray) -> list[bytes]:
    """Return what the names are defined to be."""
    found = []
    for block in tokens:
        parent = hashlib.blake2b(parent + block.astype("<i4").tobytes(), digest_size=16).digest()
        found.append(parent)
    return found


# One compression takes 128 bytes, a name and 28 tokens: sizes around one, two and more of them, and odd ones.
@pytest.mark.parametrize("size", [1, 2, 3, 16, 27, 28, 29, 32, 59, 60, 61, 92, 128, 256])
def test_blocks_of_every_size_have_the_names_of_hashlib(size: int) -> None:
    random = np.random.default_rng(size)
    tokens = random.integers(0, 2**31, (5, size)).astype(np.int32)
    tokens[3] = 0
    tokens[4] = 2**31 - 1
    for parent in (bytes(16), b"\xff" * 16, random.bytes(16)):
        names = chain_names(parent, tokens)
        assert names == named(parent, tokens)
        assert all(type(name) is bytes for name in names)
        assert chain_names(names[1], tokens[2:]) == names[2:]
    assert chain_names(bytes(16), tokens[:0]) == []


@given(st.integers(1, 40), st.lists(st.integers(0, 2**31 - 1), max_size=200), st.data())
def test_sequences_have_the_same_names_with_media_and_without(page: int, tokens: list[int], data: st.DataObject) -> None:
    media, at = [], 0
    while at < len(tokens) and data.draw(st.booleans()):
        start = data.draw(st.integers(at, len(tokens) - 1))
        at = data.draw(st.integers(start + 1, len(tokens)))
        media.append(MediaSpan(start, at - start, data.draw(st.binary(min_size=16, max_size=64))))
    content, identity = TokenContent(page, tokens, media), ContextIdentity(page_tokens=page, salt=b"tenant")
    names = chain_hashes(COMPILED, identity, content, 0, content.num_blocks)
    assert names == chain_hashes(PLAIN, identity, content, 0, content.num_blocks)
    cut = data.draw(st.integers(0, content.num_blocks))
    assert names[cut:] == chain_hashes(COMPILED, identity, content, cut, content.num_blocks, names[cut - 1] if cut else None)
    length = data.draw(st.integers(0, len(tokens)))
    assert prefix_digest(COMPILED, identity, content, length) == prefix_digest(PLAIN, identity, content, length)


def test_only_what_has_compiled_code_is_replaced() -> None:
    class Other(Blake2bHash):
        """Names blocks in a way of its own, perhaps."""

    reference, other, own = ReferenceHash(), Other(), Blake2bHash(named)
    assert [with_compiled_chain(naming) for naming in (None, reference, other, own)] == [None, reference, other, own]
    assert isinstance(COMPILED, Blake2bHash)
    assert COMPILED.chain is chain_names
    assert with_compiled_chain(COMPILED) is COMPILED
