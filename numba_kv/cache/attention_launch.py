"""How attention runs on a target: tiles, queries of a work, splits, and the memory that its launches share.

Knows sizes alone. Does not know layers, views or addresses of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.dtypes import dtype
from numba_kv.geometry import ceil_div, round_up
from numba_kv.kernels.attention import MAX_QUERIES, NEAR_PARTS, NEAR_TILE, NOTES, worker_floats
from numba_kv.kernels.attention_units import UNIT
from numba_kv.kernels.block_memory import NEAR_FLOATS, NEAR_LANES

if TYPE_CHECKING:
    from numba_kv.device import Device, Tensor

__all__ = ["AttentionMemory", "Cut", "LayerCut", "Target", "target_of"]

#: Blocks of 128 lanes that keep a large GPU busy: fewer are split.
_BUSY_BLOCKS = 512
#: Keys below which a split is not worth a block: a part of a tile, as blocks of few rows have the GPU for themselves.
_SPLIT_KEYS = 64
#: Floats that the parts of split queries may take.
_PARTIAL_FLOATS = 1 << 21


@dataclass(frozen=True, slots=True)
class Target:
    """How a target runs the kernel.

    Attributes
    ----------
    threads : int
        Lanes of a block on `cuda`.
    tile : int
        Keys that are taken at once.
    max_parts : int
        Most groups of lanes that share the keys of one query's V.
    workers : int
        Blocks that have memory in an array: all of them, unless it is near.
    has_near : bool
        Whether blocks have memory of their own.
    """

    threads: int
    tile: int
    max_parts: int
    workers: int
    has_near: bool

    def queries(self, group: int, dim: int, decodes: bool) -> tuple[int, bool]:
        """Return the queries of a work, and whether its memory is near."""
        wanted = min(group, MAX_QUERIES) if decodes else MAX_QUERIES
        if not self.has_near:
            return wanted, False
        pitch = round_up(dim, UNIT)
        found = min(wanted, NEAR_FLOATS // worker_floats(1, pitch, pitch, self.max_parts, self.tile))
        return (found, True) if found else (wanted, False)


def target_of(name: str) -> Target:
    """Return how a target runs the kernel."""
    if name == "cuda":
        return Target(threads=NEAR_LANES, tile=NEAR_TILE, max_parts=NEAR_PARTS, workers=256, has_near=True)
    if name == "sim":
        return Target(threads=4, tile=8, max_parts=2, workers=2, has_near=False)
    return Target(threads=1, tile=64, max_parts=1, workers=1, has_near=False)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a step's queries and keys are cut: the scalars of a launch. Items of the launch are `workers`."""

    num_tokens: int
    works: int
    workers: int
    splits: int
    queries: int


class AttentionMemory:
    """Arrays that all launches of one model share, used in stream order. Owns them.

    Attributes
    ----------
    floats, integers : Tensor
        Memory of the workers, where it is not near.
    partial : Tensor float32
        Parts of split queries.
    """

    def __init__(self, device: Device, dims: list[int]) -> None:
        self.target = target_of(device.target)
        self._device = device
        tile = self.target.tile
        sizes = [
            worker_floats(MAX_QUERIES, round_up(dim, UNIT), round_up(dim, UNIT), self.target.max_parts, tile)
            for dim in dims
            if not self.target.queries(MAX_QUERIES, dim, True)[1]
        ]
        workers = self.target.workers if sizes else 0
        self.floats: Tensor = device.tensor((workers * max(sizes, default=0),), dtype("float32"))
        self.integers: Tensor = device.tensor((workers * (2 * tile + NOTES),), dtype("int64"))
        self.partial: Tensor = device.tensor((_PARTIAL_FLOATS if self.target.has_near else 0,), dtype("float32"))

    def cut(self, num_tokens: int, heads: int, group: int, queries: int, dim: int, near: bool, keys: int) -> Cut:
        """Return how a step of `num_tokens` tokens, whose queries see at most `keys` keys, is cut."""
        few = min(queries, group)
        blocks = ceil_div(num_tokens, queries // few) * heads * ceil_div(group, few)
        splits = 1
        if blocks and self.partial.size:
            room = self.partial.size // (num_tokens * heads * group * (2 + dim))
            splits = max(1, min(_BUSY_BLOCKS // blocks, ceil_div(keys, _SPLIT_KEYS), room))
        works = blocks * splits
        return Cut(num_tokens, works, works if near else min(works, self.target.workers), splits, queries)

    def close(self) -> None:
        """Give the arrays back. Stream: enqueues."""
        for tensor in (self.floats, self.integers, self.partial):
            tensor._memory.close(self._device.stream)


@dataclass(frozen=True, slots=True)
class LayerCut:
    """How steps of one layer are cut.

    Attributes
    ----------
    memory : AttentionMemory
        What launches share.
    heads, group, dim : int
        KV heads, query heads of each, channels.
    window_tokens : int or None
        Most keys that a query sees; None: all.
    """

    memory: AttentionMemory
    heads: int
    group: int
    dim: int
    window_tokens: int | None

    def of(self, num_tokens: int, longest: int, decodes: bool) -> Cut:
        """Return the cut of a step whose longest row has `longest` tokens; `decodes`: no row appends more than one."""
        keys = longest if self.window_tokens is None else min(longest, self.window_tokens)
        queries, is_near = self.memory.target.queries(self.group, self.dim, decodes)
        return self.memory.cut(num_tokens, self.heads, self.group, queries, self.dim, is_near, keys)
