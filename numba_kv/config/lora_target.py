"""A projection of an engine that adapters may change: names and sizes, no files, no device."""

from __future__ import annotations

from dataclasses import dataclass

from numba_kv.errors import InputError
from numba_kv.geometry import check_count

__all__ = ["LoRATarget"]


@dataclass(frozen=True, kw_only=True)
class LoRATarget:
    """A projection that takes an adapter: ``y += x @ A @ B``.

    Attributes
    ----------
    name : str
        Path of the module, as ``model.layers.0.self_attn.q_proj``.
    k, n : int
        Input and output channels: A is [k, r], B [r, n].
    parts : tuple of (str, int)
        For a fused projection: names and columns of what it is made of, in order. Adapters of the parts then fit too.
    max_rank : int or None
        Rank that a slot of this target has room for; None: the manager's for each part. The adapters of two parts share a
        fused target by lying side by side, which adds their ranks.
    a_name, b_name : str
        Names of the engine's inputs; empty: `name` and ``.lora_A.weight``, ``.lora_B.weight``.
    """

    name: str
    k: int
    n: int
    parts: tuple[tuple[str, int], ...] = ()
    max_rank: int | None = None
    a_name: str = ""
    b_name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"target: {self.name!r} is not the name of a module")
        for field in ("k", "n") if self.max_rank is None else ("k", "n", "max_rank"):
            check_count(f"{field} of target {self.name!r}", getattr(self, field))
        set_ = object.__setattr__
        set_(self, "parts", tuple((name, columns) for name, columns in self.parts))
        set_(self, "a_name", self.a_name or f"{self.name}.lora_A.weight")
        set_(self, "b_name", self.b_name or f"{self.name}.lora_B.weight")
        for part, columns in self.parts:
            check_count(f"columns of part {part!r} of target {self.name!r}", columns)
        if self.parts and (sum(c for _, c in self.parts) != self.n or len({p for p, _ in self.parts}) < len(self.parts)):
            raise InputError(
                f"parts of target {self.name!r}: {self.parts} are not different parts of together {self.n} columns"
            )

    def rank_room(self, max_rank: int) -> int:
        """Return the rank that a slot of this target has room for."""
        return self.max_rank if self.max_rank is not None else max_rank * max(1, len(self.parts))
