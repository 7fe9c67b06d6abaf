"""What a block is: identities, contents, and the names that others know blocks by."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.errors import InputError, ShapeError
from numba_kv.ledger.reuse.block_hash import Blake2bHash, chain_hashes, prefix_digest
from numba_kv.ledger.reuse.content import MediaSpan, TokenContent, common_tokens
from numba_kv.ledger.reuse.fnv import (
    CHAIN_ROOT,
    MediaEntry,
    ReferenceExtras,
    ReferenceHash,
    fnv_block,
    fnv_opaque,
    pack_name,
)
from numba_kv.ledger.reuse.identity import ContextIdentity


def pair(text: str) -> tuple[int, int]:
    high, low = text.split("/")
    return int(high, 16), int(low, 16)


FIRST = tuple(range(1, 129))
GOLDEN = ReferenceExtras(
    media=(
        MediaEntry(pair("1112131415161718/2122232425262728"), pair("3132333435363738/4142434445464748"), 3, 5, 2),
        MediaEntry(pair("D1D2D3D4D5D6D7D8/E1E2E3E4E5E6E7E8"), pair("F1F2F3F4F5F6F7F8/0102030405060708"), -4, 9, 3),
    ),
    adapter=(pair("5152535455565758/6162636465666768"), 7),
    position=pair("7172737475767778/8182838485868788"),
    embedding=pair("9192939495969798/A1A2A3A4A5A6A7A8"),
    isolation=pair("B1B2B3B4B5B6B7B8/C1C2C3C4C5C6C7C8"),
)


@pytest.mark.parametrize(
    ("parent", "tokens", "extras", "wanted"),
    [
        (pair("1020304050607080/90A0B0C0D0E0F001"), (17, -3, 42, 0), GOLDEN, "BA9FE04E33CEF5BD/D4A509A375759518"),
        (CHAIN_ROOT, (), None, "6a361d71ff096fc2/cfbbcfbd49538c08"),
        (CHAIN_ROOT, (1, 2, 3, 4), None, "0ec7deb0e398286a/0914822596977088"),
        (CHAIN_ROOT, tuple(range(128)), None, "d1ef1dff7a410153/0a6da924c9f20888"),
        (CHAIN_ROOT, FIRST, None, "de51e78befc190aa/6b22ffe6f2847a08"),
        (pair("de51e78befc190aa/6b22ffe6f2847a08"), tuple(range(129, 257)), None, "29cfe326cd9a4811/ebf8bceffb22820b"),
        (pair("de51e78befc190aa/6b22ffe6f2847a08"), (129,), None, "ecaff785ff4ac622/97f93369156add8a"),
        (
            CHAIN_ROOT, FIRST, ReferenceExtras(adapter=(pair("8b092f606a21dcec/e8229dd22f7aee45"), 0)),
            "21ea4e477cb6e789/a077caddb87db6ef",
        ),
        (CHAIN_ROOT, (1, 2, 3, 4), ReferenceExtras(media_tokens={2: (0x1234, 0x5678)}), "eed77ac78d989e7e/b29a180a92e18f1e"),
        (CHAIN_ROOT, (1, 2, 3, 4), ReferenceExtras(adapter=((0, 0), 0)), "f9842d26416ff670/418761fc5823741c"),
        (CHAIN_ROOT, (1, 2, 3, 4), ReferenceExtras(isolation=(0, 0)), "b6d9428818d24560/07ab066d4ee8c503"),
    ],
)  # fmt: skip
def test_blocks_have_the_names_of_the_reference(parent: tuple, tokens: tuple, extras: ReferenceExtras, wanted: str) -> None:
    assert fnv_block(parent, tokens, extras) == pair(wanted)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", "36bf7ba17e0ab85e/74dd056fe4911a05"),
        (b"adapter-a", "8b092f606a21dcec/e8229dd22f7aee45"),
        (bytes(range(256)), "5814dc1d71c9a259/92f83a037085854f"),
        (bytes((7 * i + 13) % 256 for i in range(1 << 20)), "230b6f9cf0536df8/82e4866c0b1a1175"),
        (bytes(2049), "7cd65679a2786eaa/07e67b2a8701df63"),
        (np.array([0.5, -1], "<f4").tobytes(), "430d25d15ce0067b/f7a12b4bb77a053d"),
    ],
)
def test_bytes_have_the_names_of_the_reference(data: bytes, wanted: str) -> None:
    assert fnv_opaque(data) == pair(wanted)


def test_the_reference_names_serve_a_chain() -> None:
    naming, identity = ReferenceHash(), ContextIdentity(page_tokens=128)
    content = TokenContent(128, range(1, 258))
    names = chain_hashes(naming, identity, content, 0, 2)
    assert names == [pack_name(pair(n)) for n in ("de51e78befc190aa/6b22ffe6f2847a08", "29cfe326cd9a4811/ebf8bceffb22820b")]
    assert prefix_digest(naming, identity, content, 129) == pack_name(pair("ecaff785ff4ac622/97f93369156add8a"))
    assert prefix_digest(naming, identity, content, 0) == pack_name(CHAIN_ROOT)
    with_adapter = replace(identity, adapter=pack_name(fnv_opaque(b"adapter-a")))
    assert chain_hashes(naming, with_adapter, content, 0, 1) == [pack_name(pair("21ea4e477cb6e789/a077caddb87db6ef"))]
    short = ContextIdentity(page_tokens=4)
    item = MediaSpan(2, 1, pack_name((0x1234, 0x5678)))
    seen = chain_hashes(naming, short, TokenContent(4, [1, 2, 3, 4], [item]), 0, 1)
    assert seen == [pack_name(pair("eed77ac78d989e7e/b29a180a92e18f1e"))]


FIELDS = {
    "model": b"m",
    "kv_cache_dtype": "float16",
    "page_tokens": 8,
    "scales": b"s",
    "rope": b"long",
    "adapter": b"a",
    "salt": b"t",
    "position": b"p",
    "embedding": b"e",
}


def test_every_field_of_an_identity_changes_every_name() -> None:
    content, naming = TokenContent(4, range(8)), Blake2bHash()
    variants = [ContextIdentity(page_tokens=4)]
    variants += [replace(variants[0], **{field: value}) for field, value in FIELDS.items()]
    optional = [field for field, value in FIELDS.items() if isinstance(value, bytes) and field != "model"]
    variants += [replace(variants[0], **{field: b""}) for field in optional]
    names = [tuple(chain_hashes(naming, identity, content, 0, 2)) for identity in variants]
    assert len({name for both in names for name in both}) == 2 * len(variants)
    assert len(set(variants)) == len(variants)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 5), st.data())
def test_a_sequence_that_grows_hashes_each_token_once(tokens: list[int], page: int, data: st.DataObject) -> None:
    for naming in (Blake2bHash(), ReferenceHash()):
        identity = ContextIdentity(page_tokens=page)
        content = TokenContent(page, tokens)
        whole = chain_hashes(naming, identity, content, 0, content.num_blocks)
        cut = data.draw(st.integers(0, content.num_blocks))
        first = chain_hashes(naming, identity, content, 0, cut)
        assert first + chain_hashes(naming, identity, content, cut, content.num_blocks, first[-1] if first else None) == whole
        assert len(set(whole)) == len(whole)


UNITS = st.lists(st.tuples(st.integers(0, 300), st.sampled_from([None, b"x" * 16, b"x" * 17, b"\xff" * 20])), max_size=8)


def grown(units: list[tuple[int, bytes | None]]) -> TokenContent:
    media = [MediaSpan(i, 1, digest) for i, (_, digest) in enumerate(units) if digest is not None]
    return TokenContent(4, [token for token, _ in units], media)


@given(UNITS, UNITS, st.integers(0, 8))
def test_keys_have_the_tokens_in_common_that_contents_have(one: list, other: list, shared: int) -> None:
    other = one[:shared] + other
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    keys = [grown(units).key(0, len(units)) for units in (one, other)]
    assert common_tokens(*keys) == expected
    assert (keys[0] == keys[1]) == (one == other)


@given(UNITS, UNITS, st.integers(0, 8))
def test_blocks_are_exact_where_their_keys_are(one: list, other: list, shared: int) -> None:
    contents = [grown(units) for units in (one, one[:shared] + other)]
    blocks = [(content.exact(b), content.key(4 * b, 4 * b + 4)) for content in contents for b in range(content.num_blocks)]
    for exact, key in blocks:
        assert [exact == other for other, _ in blocks] == [key == other for _, other in blocks]


def test_an_item_is_its_content_and_the_place_in_it() -> None:
    tokens, x, y = [7] * 8, b"x" * 16, b"y" * 16
    contents = [
        TokenContent(4, tokens, media)
        for media in (
            [],
            [MediaSpan(0, 8, x)],
            [MediaSpan(0, 8, y)],
            [MediaSpan(0, 4, x), MediaSpan(4, 4, x)],
            [MediaSpan(1, 7, x)],
        )
    ]
    identity = ContextIdentity(page_tokens=4)
    assert len({content.key(0, 8) for content in contents}) == len(contents)
    assert len({tuple(chain_hashes(Blake2bHash(), identity, content, 0, 2)) for content in contents}) == len(contents)
    assert contents[1].media_blocks(0, 2) == {0: ((0, 4, 0, x),), 1: ((0, 4, 4, x),)}
    assert contents[3].media_blocks(1, 2) == {1: ((0, 4, 0, x),)}


X = b"x" * 16


@pytest.mark.parametrize(
    ("tokens", "media", "message"),
    [
        ([1, 9, 9], [], "token 1 .9. is a placeholder without an item"),
        ([1, 9, 2], [MediaSpan(1, 2, X)], "token 2 .2. is no placeholder"),
        ([9, 9], [MediaSpan(1, 2, X)], "not inside 0..2"),
        ([9, 9, 9], [MediaSpan(1, 2, X), MediaSpan(0, 1, X)], "come in their order"),
        ([9, 9, 9], [MediaSpan(0, 2, X), MediaSpan(1, 2, X)], "do not overlap"),
        ([9], ["x"], "is not a MediaSpan"),
    ],
)
def test_media_that_do_not_match_the_tokens_are_refused(tokens: list, media: list, message: str) -> None:
    content = TokenContent(4, [3], [], placeholders=[9])
    with pytest.raises(InputError, match="media"):
        content.extend(tokens, [replace(m, start=m.start + 1) if isinstance(m, MediaSpan) else m for m in media])
    assert content.num_tokens == 1
    assert content.media == ()
    with pytest.raises(InputError, match=message):
        TokenContent(4, tokens, media, placeholders=[9])


def test_tokens_are_taken_as_they_are_now() -> None:
    given = np.arange(9, dtype=np.int32)
    content = TokenContent(4, given)
    before = content.exact(0), content.key(0, 9), content.raw[:36].tobytes()
    given[:] = 7
    content.extend(given[:3])
    given[:] = 8
    assert content.tokens.tolist() == [*range(9), 7, 7, 7]
    assert (content.exact(0), content.key(0, 9), content.raw[:36].tobytes()) == before
    empty = TokenContent(4)
    empty.extend([])
    empty.extend(given[:1])
    assert empty.tokens.tolist() == [8]


@pytest.mark.parametrize("tokens", [[-1], [2**31], [1.5], ["a"], np.array([True])])
def test_what_is_no_token_id_is_refused(tokens: list) -> None:
    with pytest.raises(InputError, match="token"):
        TokenContent(4, tokens)


@pytest.mark.parametrize("tokens", [[[1]], np.zeros((2, 2), int), 7])
def test_tokens_are_one_sequence(tokens: list) -> None:
    with pytest.raises(ShapeError, match="tokens"):
        TokenContent(4, tokens)


@pytest.mark.parametrize("digest", [b"short", b"x" * 65, "x" * 16])
def test_a_digest_has_enough_bytes(digest: bytes) -> None:
    with pytest.raises(InputError, match="16 to 64 bytes"):
        MediaSpan(0, 1, digest)


@pytest.mark.parametrize("change", [{"adapter": "fr"}, {"model": None}, {"salt": 3}, {"page_tokens": 0}, {"kv_cache_dtype": 1}])
def test_an_identity_is_made_of_bytes(change: dict) -> None:
    with pytest.raises(InputError):
        ContextIdentity(**change)
