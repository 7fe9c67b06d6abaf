"""The device arrays of a step: tables, row state, and what a forward pass reads.

Everything is allocated once, at addresses that never change. Arrays of one kind over all groups lie in one arena, so that
a kernel takes one address and a row of offsets a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.dtypes import dtype
from numba_kv.kernels import layout

if TYPE_CHECKING:
    from numba_kv.device import Device, Memory, Tensor
    from numba_kv.plan import GroupPlan, MemoryPlan

__all__ = ["StepBuffers"]

_GROUP_STATE = ("lengths", "high_water", "appended", "mapped_begin")
_ROW_STATE = ("floors", "leased", "live", "status", "counts", "take_back", "seq_lens", "context_lens")
_STATE_ROWS = ("state_slots", "state_index")
_ARENAS = ("page_tables", "block_tables", "slot_mapping", "carry_slots")


class StepBuffers:
    """Owns the step arrays of one model. int32 on the device unless said otherwise.

    Attributes
    ----------
    page_tables : tuple of Tensor [B, 2, L], one a group
        K and V page ids; -1 where nothing is mapped.
    block_tables : tuple of Tensor [B, L], one a group
        Page ids, always valid.
    slot_mapping : tuple of Tensor int64 [T], one a group
        page * P + offset of each token of the step; -1 drops it.
    carry_slots : tuple of Tensor int64 [B, W - 1] or None, one a group
        Slots of the tokens before a long step.
    lengths, high_water, appended, mapped_begin : Tensor [G, B]
        State of a row, one copy a group: its length, the longest it has been, tokens of its last step, first mapped page.
    floors, leased, live, status, counts, take_back, seq_lens, context_lens : Tensor [B]
        Row state and step data.
    state_slots : Tensor [B]
        Resident slot of each row's recurrent states: a permutation. Rows move, states stay where they are.
    state_index : Tensor [B]
        The same for rows in use, -1 for the others: what a forward pass finds states by. Without recurrent layers the row.
    cu_seqlens_q : Tensor [B + 1]
        First token of each row in the step.
    positions : Tensor [T]
        Position of each token of the step.
    edits : Tensor [words]
        Block of a composition change.
    groups : Tensor int64 [G, GROUP_COLUMNS]
        What kernels know of the groups (`kernels/layout.py`).
    arena : dict of str to Tensor
        The flat arrays behind the tuples.
    """

    lengths: Tensor
    high_water: Tensor
    appended: Tensor
    floors: Tensor
    leased: Tensor
    live: Tensor
    status: Tensor
    counts: Tensor
    take_back: Tensor
    seq_lens: Tensor
    context_lens: Tensor
    state_slots: Tensor
    state_index: Tensor

    def __init__(self, device: Device, plan: MemoryPlan, take: Callable[[str, int], Memory]) -> None:
        from numba_kv.device import Tensor

        self.device = device
        self.plan = plan
        self.arena: dict[str, Tensor] = {}
        views: dict[str, list[Tensor | None]] = {name: [] for name in _ARENAS}
        offsets: dict[str, list[int]] = {name: [] for name in _ARENAS}
        for name in _ARENAS:
            regions = [next((r for r in plan.regions if r.name == f"{name}.{g.index}"), None) for g in plan.groups]
            kind = dtype("int64" if name in ("slot_mapping", "carry_slots") else "int32")
            total = sum(r.nbytes for r in regions if r)
            if total:  # without a window nothing is carried: an empty arena on somebody else's memory
                memory = take(name, total)
            at = 0
            self.arena[name] = Tensor(memory, device, kind, (total // kind.itemsize,))
            for region in regions:
                offsets[name].append(at // kind.itemsize)
                views[name].append(Tensor(memory, device, kind, region.shape, offset_nbytes=at) if region else None)
                at += region.nbytes if region else 0
        self.page_tables = tuple(t for t in views["page_tables"] if t is not None)
        self.block_tables = tuple(t for t in views["block_tables"] if t is not None)
        self.slot_mapping = tuple(t for t in views["slot_mapping"] if t is not None)
        self.carry_slots = tuple(views["carry_slots"])
        for name in (*_GROUP_STATE, *_ROW_STATE, *_STATE_ROWS, "cu_seqlens_q", "positions", "edits", "groups"):
            region = plan.region(name)
            setattr(self, name, Tensor(take(name, region.nbytes), device, dtype(region.dtype), region.shape))
        self.mapped_begin: Tensor = self.mapped_begin
        self.cu_seqlens_q: Tensor = self.cu_seqlens_q
        self.positions: Tensor = self.positions
        self.edits: Tensor = self.edits
        self.groups: Tensor = self.groups
        described = np.zeros(self.groups.shape, np.int64)
        for group in plan.groups:
            described[group.index] = _describe(group, {name: offsets[name][group.index] for name in _ARENAS})
        self.groups.fill_from(described)
        self.reset()

    def reset(self) -> None:
        """Empty every row: nothing mapped, null pages, lengths 0, slots -1. Stream: enqueues on the device's, and waits."""
        stream = self.device.stream
        self.device.fill(self.arena["page_tables"], -1, stream)
        for group, table in zip(self.plan.groups, self.block_tables, strict=True):
            self.device.fill(table, group.null_page, stream)
        for name in (*_GROUP_STATE, *_ROW_STATE):
            self.device.fill(getattr(self, name), 0, stream)
        slots = np.arange(self.state_slots.size, dtype=np.int32)
        self.state_slots.fill_from(slots)
        # without states to be found every row may have its own place
        self.state_index.fill_from(np.full_like(slots, -1) if self.plan.config.num_recurrent_layers else slots)
        for tensor in (self.cu_seqlens_q, self.positions):
            self.device.fill(tensor, 0, stream)
        for name in ("slot_mapping", "carry_slots"):
            self.device.fill(as_words(self.arena[name]), -1, stream)


def as_words(tensor: Tensor) -> Tensor:
    """Return a dense int64 tensor as int32 words: what a memset of -1 needs."""
    from numba_kv.device import Tensor

    return Tensor(
        tensor._memory, tensor.device, dtype("int32"), (2 * tensor.size,), offset_nbytes=tensor.address - tensor._memory.address
    )


def _describe(group: GroupPlan, offsets: dict[str, int]) -> list[int]:
    kinds = {"full": layout.FULL, "sliding": layout.SLIDING, "chunked": layout.CHUNKED}
    row = [0] * layout.GROUP_COLUMNS
    row[layout.SHIFT] = group.page_tokens.bit_length() - 1
    row[layout.KIND] = layout.EMPTY if group.is_empty else kinds[group.window.kind]
    row[layout.WINDOW] = group.window.tokens
    row[layout.RING] = group.ring
    row[layout.WIDTH] = group.table_width
    row[layout.NUM_PAGES] = group.num_pages
    row[layout.TABLE_AT] = offsets["page_tables"]
    row[layout.BLOCK_AT] = offsets["block_tables"]
    row[layout.SLOT_AT] = offsets["slot_mapping"]
    row[layout.CARRY_AT] = offsets["carry_slots"]
    row[layout.CARRY_WIDTH] = group.carry_width
    return row
