"""StepView: the tensors that one forward pass reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.device.unique import Unique

if TYPE_CHECKING:
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device import Tensor

__all__ = ["StepView"]


class StepView(Unique):
    """What a forward pass reads after `Batch.step`. Borrows tensors at fixed addresses; the next step overwrites them.

    Symbols: B rows, G window groups (0 is full attention), L table width, T tokens of a step at most, W window.

    Attributes
    ----------
    buffers : StepBuffers
        Where the tensors are: those of the model that took the step.
    num_rows, num_tokens : int
        Rows up to the last one in use (retired rows below it append nothing); tokens of the step.
    max_query_tokens : int
        Most tokens that one row appends.
    kv_len_upper : int
        No row is longer than this after the step.
    kv_len_is_exact : bool
        Whether the longest row has just that length.
    is_long : bool
        Whether a row appended more than `max_step_tokens`.
    counts_from_device : bool
        Whether the device decided how many of its tokens a row really appended: those behind them have no place.
    """

    __slots__ = (
        "buffers",
        "counts_from_device",
        "is_long",
        "kv_len_is_exact",
        "kv_len_upper",
        "max_query_tokens",
        "num_rows",
        "num_tokens",
    )

    def __init__(
        self,
        buffers: StepBuffers,
        num_rows: int,
        num_tokens: int,
        max_query_tokens: int,
        kv_len_upper: int,
        kv_len_is_exact: bool,
        is_long: bool,
        counts_from_device: bool = False,
    ) -> None:
        self.buffers = buffers
        self.num_rows = num_rows
        self.num_tokens = num_tokens
        self.max_query_tokens = max_query_tokens
        self.kv_len_upper = kv_len_upper
        self.kv_len_is_exact = kv_len_is_exact
        self.is_long = is_long
        self.counts_from_device = counts_from_device

    @property
    def page_tables(self) -> tuple[Tensor, ...]:
        """K and V page ids of each group: int32 [B, 2, L]; -1 where nothing is mapped, V = K + N."""
        return self.buffers.page_tables

    @property
    def block_tables(self) -> tuple[Tensor, ...]:
        """Page ids of each group: int32 [B, L], every entry valid; windows repeat their ring over all columns."""
        return self.buffers.block_tables

    @property
    def slot_mapping(self) -> tuple[Tensor, ...]:
        """Where each token of the step is written in each group: int64 [T]; page * P + offset, -1 drops the token."""
        return self.buffers.slot_mapping

    @property
    def carry_slots(self) -> tuple[Tensor | None, ...]:
        """Slots of the tokens before a long step, to be read before it is written: int64 [B, W - 1] a window group.

        Column j is the token at position ``context_lens - (W - 1) + j``; -1 where the step's first query does not see it,
        and in rows whose step was not long. All None if no row's step was long.
        """
        return self.buffers.carry_slots if self.is_long else (None,) * len(self.buffers.carry_slots)

    @property
    def seq_lens(self) -> Tensor:
        """Length of each row after the step: int32 [B]."""
        return self.buffers.seq_lens

    @property
    def context_lens(self) -> Tensor:
        """Length of each row before the step: int32 [B]."""
        return self.buffers.context_lens

    @property
    def positions(self) -> Tensor:
        """Position of each token of the step: int32 [T]; 0 for dropped tokens."""
        return self.buffers.positions

    @property
    def state_index(self) -> Tensor:
        """Slot of each row's recurrent states: int32 [B]; -1 in rows that are not in use. Rows move, states stay."""
        return self.buffers.state_index

    @property
    def cu_seqlens_q(self) -> Tensor:
        """First token of each row: int32 [B + 1], never decreasing; retired rows have none."""
        return self.buffers.cu_seqlens_q

    def __repr__(self) -> str:
        return f"StepView({self.num_rows} rows, {self.num_tokens} tokens)"
