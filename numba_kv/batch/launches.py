"""StepLaunches: the bound kernels of a batch and the staging through which changes travel."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.device import Staging
from numba_kv.kernels import layout
from numba_kv.kernels.advance import advance
from numba_kv.kernels.edit import apply_edits, permute_rows
from numba_kv.kernels.place import place_rows
from numba_kv.kernels.sent_launch import SentLaunch
from numba_kv.kernels.slots import fill_carry, fill_slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.edits import EditBlock
    from numba_kv.batch.state_rows import StateRows
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device import Stream, Tensor
    from numba_kv.kernels.jit import Launch

__all__ = ["ADVANCE_THREADS", "SHORT_STEP_TOKENS", "DeviceCounts", "StepLaunches"]

#: Up to here `advance` itself writes a row's slots and positions.
SHORT_STEP_TOKENS = 8
#: Threads of a block of `advance`: rows are latency-bound, so small blocks spread them over the device.
ADVANCE_THREADS = 32
#: Bound launches kept for counts of callers.
_MAX_DRIVEN = 8


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """Counts of a step that lie on the device.

    Attributes
    ----------
    counts : Tensor or None
        int32 [B]: tokens that each row appends, at most what the step's layout gives it.
    back : Tensor or None
        int32 [B]: see `back_mode`.
    back_mode : int
        `NO_BACK`, `TAKE_BACK` or `ACCEPTED` of `kernels/layout.py`.
    """

    counts: Tensor | None
    back: Tensor | None
    back_mode: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Addresses and mode: what a bound launch depends on."""
        return (
            0 if self.counts is None else self.counts.address,
            0 if self.back is None else self.back.address,
            self.back_mode,
        )


class StepLaunches:
    """Binds every kernel of the step path once. Owns the staging blocks.

    Attributes
    ----------
    short_step : Launch
        The launch of a decode step.
    items : int
        Items of `advance`: one a row and group.
    acquire, acquire_block : callable
        Return the words of the next block to send, and the block.
    states : StateRows or None
        Where rows find their recurrent states; None if the model has none. Set by the batch.
    """

    states: StateRows | None = None

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._device = buffers.device
        config = buffers.plan.config
        self._rows = config.max_batch_size
        self.items = self._rows * len(buffers.plan.groups)  # of `advance`
        self._max_step_tokens = config.max_step_tokens
        self._windows = sum(not g.window.is_full for g in buffers.plan.groups)
        self._edits = buffers.edits.address
        self._staging = Staging(self._device, buffers.edits.size, initial_blocks=4)
        self.acquire, self.acquire_block = self._staging.acquire, self._staging.acquire_block
        self._tile = 1 if self._device.target == "cuda" else 256
        arena = buffers.arena
        state = {
            name: getattr(buffers, name)
            for name in ("lengths", "high_water", "appended", "mapped_begin", "floors", "leased", "live", "status", "groups")
        }
        tables = {name: arena[name] for name in ("page_tables", "block_tables")}
        self._advance_values: dict[str, Tensor | int] = {
            **state,
            **tables,
            "counts": buffers.counts,
            "take_back": buffers.take_back,
            "cu_seqlens_q": buffers.cu_seqlens_q,
            "slot_mapping": arena["slot_mapping"],
            "positions": buffers.positions,
            "seq_lens": buffers.seq_lens,
            "context_lens": buffers.context_lens,
            "capacity": config.max_kv_cache_capacity,
            "use_counts": 1,
            "back_mode": layout.NO_BACK,
            "write_slots": 1,
        }
        self.short_step = self._bind_advance(write_slots=1)
        self._long = self._bind_advance(write_slots=0)
        self._rewind = self._bind_advance(use_counts=0, back_mode=layout.TAKE_BACK, write_slots=0)
        self._driven: OrderedDict[tuple[int, int, int, bool], Launch] = OrderedDict()
        edits: dict[str, Tensor | int] = {
            **state,
            **tables,
            "edits": buffers.edits,
            "counts": buffers.counts,
            "cu_seqlens_q": buffers.cu_seqlens_q,
            "take_back": buffers.take_back,
            "slot_mapping": arena["slot_mapping"],
            "num_records": 0,
            "layout_at": -1,
            "take_back_at": -1,
            "old_tokens": 0,
        }
        self._apply = apply_edits.bind(self._device, edits)
        records = apply_edits.bind(self._device, {**edits, "num_records": -1})  # no item is a layout
        self._records = SentLaunch(records, self._staging, self._edits)
        self._permute = permute_rows.bind(self._device, {**state, **tables, "edits": buffers.edits})
        placed = {name: state[name] for name in state if name not in ("live", "status")}
        self._place_values: dict[str, Tensor | int] = {**placed, **tables, "edits": buffers.edits}
        self._place: Launch | None = None
        step_data = {
            "context_lens": buffers.context_lens,
            "seq_lens": buffers.seq_lens,
            "groups": buffers.groups,
            "block_tables": arena["block_tables"],
        }
        self._fill_slots = fill_slots.bind(
            self._device,
            {
                **step_data,
                "cu_seqlens_q": buffers.cu_seqlens_q,
                "mapped_begin": buffers.mapped_begin,
                "slot_mapping": arena["slot_mapping"],
                "positions": buffers.positions,
                "num_tokens": 0,
                "tile": self._tile,
            },
        )
        self._fill_carry = fill_carry.bind(
            self._device,
            {
                **step_data,
                "carry_slots": arena["carry_slots"],
                "num_rows": self._rows,
                "max_step_tokens": config.max_step_tokens,
            },
        )

    def step(self, num_tokens: int, longest: int, is_long: bool, stream: Stream, driven: DeviceCounts | None = None) -> int:
        """Enqueue a step whose layout the device already has. Returns the number of kernels."""
        short = longest <= SHORT_STEP_TOKENS
        if driven is None:
            (self.short_step if short else self._long)(self.items, stream)
        else:
            self._advance_driven(driven, short)(self.items, stream)
        launches = 1
        if not short:
            self._fill_slots(-(-num_tokens // self._tile), stream, num_tokens=num_tokens)
            launches += 1
        if is_long and self._windows:
            self._fill_carry(self._rows * self._windows, stream)
            launches += 1
        return launches

    def rewind(self) -> None:
        """Enqueue a rewind by the take-back counts that the device already has."""
        self._rewind(self.items, self._device.stream)

    def _bind_advance(self, **changes: Tensor | int) -> Launch:
        return advance.bind(self._device, {**self._advance_values, **changes}, threads=ADVANCE_THREADS)

    def _advance_driven(self, driven: DeviceCounts, short: bool) -> Launch:
        """Return the launch that reads the caller's counts in place; the last few stay bound."""
        key = (*driven.key, short)
        launch = self._driven.get(key)
        if launch is not None:
            self._driven.move_to_end(key)
        else:
            changes: dict[str, Tensor | int] = {"back_mode": driven.back_mode, "write_slots": int(short)}
            if driven.counts is not None:
                changes["counts"] = driven.counts
            if driven.back is not None:
                changes["take_back"] = driven.back
            launch = self._driven[key] = self._bind_advance(**changes)
            if len(self._driven) > _MAX_DRIVEN:
                self._driven.popitem(last=False)
        return launch

    def apply(self, block: EditBlock) -> None:
        """Send the pages and the layout of a step: one copy, one kernel."""
        num_words, layout_at, take_back_at = block.write(self.acquire())
        self._send(num_words)
        records = block.num_records
        self._apply(
            records + block.has_layout,
            self._device.stream,
            num_records=records,
            layout_at=layout_at,
            take_back_at=take_back_at,
            old_tokens=block.old_tokens,
        )

    def send(self, num_words: int, records: int) -> None:
        """Send records of rows that come and go, which are in the acquired words: one copy, one kernel."""
        self._records(num_words, records, self._device.stream)
        if self.states is not None:
            self.states.change(records)

    def send_pages(self, num_words: int, records: int) -> None:
        """Send records of rows that get pages, which are in the acquired words: one copy, one kernel."""
        self._records(num_words, records, self._device.stream)

    def _send(self, num_words: int) -> None:
        self._staging.send_to(self._edits, num_words, self._device.stream)

    def permute(self, cycles: list[list[int]]) -> None:
        """Move rows along cycles: one copy, one kernel."""
        self._send_cycles(cycles)
        self._permute(len(cycles), self._device.stream)
        if self.states is not None:
            self.states.permute(cycles)

    def align_states(self, states: StateRows, cycles: list[list[int]]) -> None:
        """Move states along their strays: one copy, one kernel."""
        self._send_cycles(cycles)
        states.align(cycles)

    def _send_cycles(self, cycles: list[list[int]]) -> None:
        words = self._staging.acquire()
        starts = len(cycles) + 1 + np.cumsum([0, *map(len, cycles)])
        members = [member for cycle in cycles for member in cycle]
        words[: len(starts)] = starts
        words[len(starts) : len(starts) + len(members)] = members
        self._send(len(starts) + len(members))

    def place(self, records: NDArray[np.int32]) -> None:
        """Send records of `place_rows`: one copy, one kernel. Bound on first use."""
        if self._place is None:
            self._place = place_rows.bind(self._device, self._place_values)
        self._staging.acquire()[: records.size] = records.ravel()
        self._send(records.size)
        self._place(len(records), self._device.stream)

    def close(self) -> None:
        """Give the staging blocks back. Stream: waits for copies in flight."""
        self._staging.close()
