"""StepLaunches: the bound kernels of a batch and the staging through which changes travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.device import Staging
from numba_kv.kernels.advance import advance
from numba_kv.kernels.edit import apply_edits, permute_rows
from numba_kv.kernels.slots import fill_carry, fill_slots

if TYPE_CHECKING:
    from numba_kv.batch.edits import EditBlock
    from numba_kv.cache.step_buffers import StepBuffers

__all__ = ["SHORT_STEP_TOKENS", "StepLaunches"]

#: Up to here `advance` itself writes a row's slots and positions.
SHORT_STEP_TOKENS = 8


class StepLaunches:
    """Binds every kernel of the step path once. Owns the staging blocks."""

    def __init__(self, buffers: StepBuffers) -> None:
        self._buffers = buffers
        self._device = buffers.device
        config = buffers.plan.config
        self._rows = config.max_batch_size
        self._max_step_tokens = config.max_step_tokens
        self._windows = sum(not g.window.is_full for g in buffers.plan.groups)
        self._staging = Staging(self._device, buffers.edits.size)
        self._tile = 1 if self._device.target == "cuda" else 256
        arena = buffers.arena
        state = {
            name: getattr(buffers, name)
            for name in ("lengths", "high_water", "floors", "leased", "status", "mapped_begin", "groups")
        }
        tables = {name: arena[name] for name in ("page_tables", "block_tables")}
        self._advance = advance.bind(
            self._device,
            {
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
                "use_take_back": 0,
                "write_slots": 1,
            },
            threads=32,
        )
        self._apply = apply_edits.bind(
            self._device,
            {
                **state,
                **tables,
                "edits": buffers.edits,
                "counts": buffers.counts,
                "cu_seqlens_q": buffers.cu_seqlens_q,
                "take_back": buffers.take_back,
                "num_records": 0,
                "layout_at": -1,
                "take_back_at": -1,
            },
        )
        self._permute = permute_rows.bind(self._device, {**state, **tables, "edits": buffers.edits})
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

    def step(self, num_tokens: int, longest: int, is_long: bool) -> int:
        """Enqueue a step whose layout the device already has. Returns the number of kernels."""
        stream = self._device.stream
        short = longest <= SHORT_STEP_TOKENS
        self._advance(self._rows, stream, use_counts=1, use_take_back=0, write_slots=int(short))
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
        self._advance(self._rows, self._device.stream, use_counts=0, use_take_back=1, write_slots=0)

    def apply(self, block: EditBlock) -> None:
        """Send a composition change: one copy, one kernel."""
        words = self._staging.acquire()
        num_words, layout_at, take_back_at = block.write(words)
        stream = self._device.stream
        self._staging.send([(0, num_words, self._buffers.edits, 0)], stream)
        records = block.num_records
        self._apply(records + block.has_layout, stream, num_records=records, layout_at=layout_at, take_back_at=take_back_at)

    def permute(self, cycles: list[list[int]]) -> None:
        """Move rows along cycles: one copy, one kernel."""
        words = self._staging.acquire()
        starts = len(cycles) + 1 + np.cumsum([0, *map(len, cycles)])
        rows = [row for cycle in cycles for row in cycle]
        words[: len(starts)] = starts
        words[len(starts) : len(starts) + len(rows)] = rows
        stream = self._device.stream
        self._staging.send([(0, len(starts) + len(rows), self._buffers.edits, 0)], stream)
        self._permute(len(cycles), stream)

    def close(self) -> None:
        """Give the staging blocks back. Stream: waits for copies in flight."""
        self._staging.close()
