"""ContextIdentity: everything beside tokens that changes K and V. Two sequences share pages only if theirs are equal."""

from __future__ import annotations

from dataclasses import dataclass, fields

from numba_kv.errors import InputError
from numba_kv.geometry import check_count

__all__ = ["ContextIdentity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextIdentity:
    """What a sequence is computed with. Compared field by field, so no hash can make two of them equal.

    An empty value differs from an absent one.

    Attributes
    ----------
    model : bytes
        Digest of configuration and weights; `numba_kv.context.engine_identity` makes one.
    kv_cache_dtype : str
        Element type of the pools.
    page_tokens : int
        P.
    scales : bytes or None
        Digest of scales that lie outside the pages; None: there are none.
    rope : bytes or None
        Which rotary table positions are turned by, where a model has several for the same layers (short or long factors).
    adapter : bytes or None
        Content hash of the LoRA adapter, never its name: other bytes under the same name are another adapter.
    salt : bytes or None
        A tenant's secret: sequences with different salts never share a page.
    position, embedding : bytes or None
        Identity of positions and of embeddings that tokens do not tell.
    """

    model: bytes = b""
    kv_cache_dtype: str = "bfloat16"
    page_tokens: int = 16
    scales: bytes | None = None
    rope: bytes | None = None
    adapter: bytes | None = None
    salt: bytes | None = None
    position: bytes | None = None
    embedding: bytes | None = None

    def __post_init__(self) -> None:
        check_count("page_tokens", self.page_tokens)
        if not isinstance(self.kv_cache_dtype, str):
            raise InputError(f"kv_cache_dtype: {self.kv_cache_dtype!r} is not the name of an element type")
        if not isinstance(self.model, bytes):
            raise InputError(f"model: {type(self.model).__name__} given, bytes wanted (a digest)")
        for name in ("scales", "rope", "adapter", "salt", "position", "embedding"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bytes):
                raise InputError(f"{name}: {type(value).__name__} given, bytes or None wanted")

    def encode(self) -> bytes:
        """Return all fields as bytes: names, presence and lengths included, so that no two identities have the same."""
        parts = []
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None:
                parts.append(item.name.encode() + b"\0-")
                continue
            raw = value if isinstance(value, bytes) else str(value).encode()
            parts.append(item.name.encode() + b"\0+" + len(raw).to_bytes(8, "little") + raw)
        return b"".join(parts)
