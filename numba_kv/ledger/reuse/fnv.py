"""Names of blocks by the rules of TensorRT Edge-LLM 0.11, for exchange with what speaks them: chained 128-bit FNV-1a.

FNV is not collision-resistant. A name is a pair of 64-bit words; as bytes both are little-endian, the high word first, which
is how a name is fed into the next one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.ledger.reuse.content import MediaPart
from numba_kv.ledger.reuse.identity import ContextIdentity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["CHAIN_ROOT", "MediaEntry", "ReferenceExtras", "ReferenceHash", "fnv_block", "fnv_opaque", "pack_name"]

_START = 0x6C62272E07BB014262B821756295C58D
_PRIME = (1 << 88) + (1 << 8) + 0x3B
_MASK = (1 << 128) - 1
_CHUNKS = 2048
#: Parent of the first block of every sequence: high and low word.
CHAIN_ROOT = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)

(_PARENT, _TOKENS, _MEDIA_LIST, _MEDIA_ENTRY, _CONTENT, _PLACEMENT, _OFFSET, _ORDER, _MODALITY) = range(1, 10)
(_ADAPTER, _ADAPTER_ID, _GENERATION, _POSITION, _EMBEDDING, _ISOLATION) = range(10, 16)
(_ABSENT, _PRESENT, _OPAQUE, _MEDIA_TOKEN) = range(16, 20)

Name = tuple[int, int]


def pack_name(name: Name) -> bytes:
    """Return a name as the 16 bytes it is fed as."""
    return struct.pack("<QQ", *name)


@dataclass(frozen=True, slots=True)
class MediaEntry:
    """An item of the list that a block's name may cover."""

    content: Name
    placement: Name
    offset: int
    order: int
    modality: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceExtras:
    """What the reference names a block by, beside its parent and tokens.

    Attributes
    ----------
    media_tokens : mapping of int to pair
        Content of the item that a position stands for; (0, 0) is a text token.
    media : sequence of MediaEntry
        The media list.
    adapter : (pair, int) or None
        Identity of the adapter and its generation.
    position, embedding, isolation : pair or None
        Further identities; one of zeros differs from None.
    """

    media_tokens: dict[int, Name] | None = None
    media: Sequence[MediaEntry] = ()
    adapter: tuple[Name, int] | None = None
    position: Name | None = None
    embedding: Name | None = None
    isolation: Name | None = None


def fnv_block(parent: Name, tokens: Sequence[int], extras: ReferenceExtras | None = None) -> Name:
    """Return the name of a block.

    Cost: 0.1 us a byte.
    """
    extra = extras or ReferenceExtras()
    special = extra.media_tokens or {}
    data = bytearray((_PARENT,)) + pack_name(parent) + struct.pack("<BQ", _TOKENS, len(tokens))
    for i, token in enumerate(tokens):
        item = special.get(i, (0, 0))
        data += struct.pack("<i", token) if item == (0, 0) else bytes((_MEDIA_TOKEN,)) + pack_name(item)
    data += struct.pack("<BQ", _MEDIA_LIST, len(extra.media))
    for entry in extra.media:
        data += bytes((_MEDIA_ENTRY, _CONTENT)) + pack_name(entry.content)
        data += bytes((_PLACEMENT,)) + pack_name(entry.placement)
        data += struct.pack("<BiBiBB", _OFFSET, entry.offset, _ORDER, entry.order, _MODALITY, entry.modality)
    data.append(_ADAPTER)
    if extra.adapter is None:
        data.append(_ABSENT)
    else:
        name, generation = extra.adapter
        data += bytes((_PRESENT, _ADAPTER_ID)) + pack_name(name) + struct.pack("<BQ", _GENERATION, generation)
    for tag, value in ((_POSITION, extra.position), (_EMBEDDING, extra.embedding), (_ISOLATION, extra.isolation)):
        data += bytes((tag, _ABSENT)) if value is None else bytes((tag, _PRESENT)) + pack_name(value)
    return _fnv(data)


def fnv_opaque(data: bytes) -> Name:
    """Return the name of any bytes: an adapter's name, an image, sound.

    Cost: 0.1 us a byte.
    """
    size = -(-len(data) // _CHUNKS)
    names = bytearray(struct.pack("<BQ", _OPAQUE, len(data)))
    for i in range(_CHUNKS):
        names += pack_name(_fnv(data[i * size : (i + 1) * size]))
    return _fnv(names)


def _fnv(data: bytes | bytearray) -> Name:
    value = _START
    for byte in data:
        value = ((value ^ byte) * _PRIME) & _MASK
    return value >> 64, value & (1 << 64) - 1


class ReferenceHash:
    """Names of the reference for `BlockHash`: a common root, and the identity in each block.

    The reference knows an adapter and a tenant, and the content of media; what else is in an identity (model, element type,
    page size, rotary table) it does not name, so use it only between processes that agree on them. Digests of other than 16
    bytes are named by `fnv_opaque`.
    """

    def root(self, identity: ContextIdentity) -> bytes:
        """Return the chain's root, the same for all."""
        return pack_name(CHAIN_ROOT)

    def blocks(
        self,
        identity: ContextIdentity,
        parent: bytes,
        tokens: NDArray[np.int32],
        media: dict[int, tuple[MediaPart, ...]],
    ) -> list[bytes]:
        """Return the names of consecutive blocks."""
        name: Name = struct.unpack("<QQ", parent)
        adapter = None if identity.adapter is None else (_word_pair(identity.adapter), 0)
        position, embedding, isolation = (
            None if value is None else _word_pair(value) for value in (identity.position, identity.embedding, identity.salt)
        )
        found = []
        for i, block in enumerate(tokens.tolist()):
            special = {place + k: _word_pair(digest) for place, count, _, digest in media.get(i, ()) for k in range(count)}
            extras = ReferenceExtras(
                media_tokens=special, adapter=adapter, position=position, embedding=embedding, isolation=isolation
            )
            name = fnv_block(name, block, extras)
            found.append(pack_name(name))
        return found


def _word_pair(value: bytes) -> Name:
    if len(value) != 16:
        return fnv_opaque(value)
    high, low = struct.unpack("<QQ", value)
    return high, low
