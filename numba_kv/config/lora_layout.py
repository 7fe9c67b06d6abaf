"""Where adapters lie in device memory: pure numbers, for building and for planning.

One block of memory, a slot an adapter. A slot holds every matrix of every target at the same place, padded to the rank
that the target has room for. ::

    slot      0           1 .. max_adapters + 1       last
              zeros       adapters                    view: a copy of the adapter that the whole batch uses

    in a slot | scalings float32 [T] | A of target 0 [k, R] | B of target 0 [R, n] | A of target 1 | ...

One slot more than adapters, so that new bytes of an adapter are complete before its old ones are let go.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from numba_kv.config.lora_target import LoRATarget
from numba_kv.dtypes import DType
from numba_kv.geometry import round_up

__all__ = ["LoRALayout"]

_ALIGNMENT = 256


@dataclass(frozen=True, kw_only=True)
class LoRALayout:
    """Memory of a `LoRAManager`.

    Attributes
    ----------
    targets : tuple of LoRATarget
        T, in the engine's order.
    max_rank, max_adapters : int
        Limits.
    dtype : DType
        Element type of A and B.
    max_batch_size : int
        B, rows.
    has_view : bool
        Whether there is a view.
    """

    targets: tuple[LoRATarget, ...]
    max_rank: int
    max_adapters: int
    dtype: DType
    max_batch_size: int
    has_view: bool = True

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """R of each target."""
        return tuple(target.rank_room(self.max_rank) for target in self.targets)

    @cached_property
    def _ends(self) -> tuple[tuple[int, int], ...]:
        """First byte of A and of B of each target in a slot."""
        found, at = [], round_up(4 * len(self.targets), _ALIGNMENT)
        for target, rank in zip(self.targets, self.ranks, strict=True):
            b_at = at + round_up(target.k * rank * self.dtype.itemsize, _ALIGNMENT)
            found.append((at, b_at))
            at = b_at + round_up(rank * target.n * self.dtype.itemsize, _ALIGNMENT)
        return (*found, (at, at))

    @property
    def a_offsets(self) -> tuple[int, ...]:
        """First byte of A of each target in a slot."""
        return tuple(a for a, _ in self._ends[:-1])

    @property
    def b_offsets(self) -> tuple[int, ...]:
        """First byte of B of each target in a slot."""
        return tuple(b for _, b in self._ends[:-1])

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot."""
        return self._ends[-1][0]

    @property
    def num_slots(self) -> int:
        """S: slots that a row can be given, the zero adapter and the spare one included."""
        return self.max_adapters + 2

    @property
    def num_blocks(self) -> int:
        """Slots of the memory, the view included."""
        return self.num_slots + self.has_view

    @property
    def slots_shape(self) -> tuple[int, int]:
        """Slots and bytes of one: uint8, allocated as ``lora.slots``."""
        return self.num_blocks, self.slot_nbytes

    @property
    def slots_nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_blocks * self.slot_nbytes

    @property
    def ids_nbytes(self) -> int:
        """Bytes of the slot of each row, int32 [B], allocated as ``lora.adapter_ids``."""
        return round_up(4 * self.max_batch_size, _ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory in all."""
        return self.slots_nbytes + self.ids_nbytes
