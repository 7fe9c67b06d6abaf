"""CatchUp: a step in which each row of a draft appends what its base has and it has not, as the device finds.

Its layout is its own: every row, in use or not, has `width` places, so that it stands beside the draft's other steps in one
captured round without a change of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.batch.launches import ADVANCE_THREADS
from numba_kv.batch.view import StepView
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.kernels.advance import advance
from numba_kv.kernels.round_steps import count_behind

if TYPE_CHECKING:
    from numba_kv.batch.stepper import Stepper
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device import Memory, Stream

__all__ = ["CatchUp", "CatchUpView"]


class CatchUpView(StepView):
    """The tensors of a step that catches up: those of `StepView`, with places of its own for tokens.

    Rows append fewer tokens than they have places (`counts_from_device`), so it is for what looks at slots and layout of a
    view: `KVIO` writes it and `PagedAttention` attends it. What takes a row's last place for its last token cannot: adapters of
    FlashAttention and FlashInfer refuse it, and so do `StepRope` and bindings, which know the draft's other steps.
    """

    __slots__ = ("_own",)

    _own: CatchUp

    @property
    def slot_mapping(self) -> tuple[Tensor, ...]:
        """Where each token is written: int64 [B * width] a group; -1 drops it."""
        return self._own.slot_mapping

    @property
    def positions(self) -> Tensor:
        """Position of each token: int32 [B * width]."""
        return self._own.positions

    @property
    def cu_seqlens_q(self) -> Tensor:
        """First token of each row: int32 [B + 1], multiples of `width`."""
        return self._own.cu_seqlens_q


class CatchUp:
    """Owns the layout, the places and the bound launches.

    Parameters
    ----------
    base : StepBuffers
        Whose lengths are caught up with.
    draft : Stepper
        Of the draft's batch.
    width : int
        Most tokens that a row can be behind.
    take : callable
        ``take(name, nbytes) -> Memory``: allocation.

    Attributes
    ----------
    width : int
        As above.
    slot_mapping, positions, cu_seqlens_q, counts : Tensor
        Of the step; `counts` int32 [B] are the tokens that rows append.
    """

    def __init__(self, base: StepBuffers, draft: Stepper, width: int, take: Callable[[str, int], Memory]) -> None:
        buffers, launches = draft.buffers, draft.launches
        device, rows = draft.device, buffers.counts.size
        self._rows, self._items, self.width = rows, launches.items, width
        self._draft = draft

        def made(name: str, kind: str, count: int) -> Tensor:
            element = dtype(kind)
            return Tensor(take(f"catch_up.{width}.{name}", count * element.itemsize), device, element, (count,))

        arena = buffers.arena["slot_mapping"]  # groups lie in one as in the other
        places = made("slot_mapping", "int64", arena.size)
        self.positions = made("positions", "int32", rows * width)
        self.counts = made("counts", "int32", rows)
        self.cu_seqlens_q = made("cu_seqlens_q", "int32", rows + 1)
        self.cu_seqlens_q.fill_from(np.arange(rows + 1, dtype=np.int32) * np.int32(width))
        self.slot_mapping = tuple(
            Tensor(places._memory, device, places.dtype, (rows * width,), offset_nbytes=one.address - arena.address)
            for one in buffers.slot_mapping
        )
        self._count = count_behind.bind(
            device,
            {
                "counts": self.counts,
                "lengths": base.lengths,
                "draft_lengths": buffers.lengths,
                "live": base.live,
                "ahead": 0,
            },
        )
        bound = {name: launches.short_step.values[name] for name in advance.arguments}
        own = {"counts": self.counts, "cu_seqlens_q": self.cu_seqlens_q, "slot_mapping": places, "positions": self.positions}
        self._advance = advance.bind(device, {**bound, **own}, threads=ADVANCE_THREADS)

    def enqueue(self, ahead: int, stream: Stream) -> int:
        """Enqueue the step; return its kernels."""
        self._count(self._rows, stream, ahead=ahead)
        self._advance(self._items, stream)
        return 2

    def view(self) -> CatchUpView:
        """Return what a forward pass reads."""
        ledger = self._draft.ledger
        rows, upper = int(np.flatnonzero(ledger.live)[-1]) + 1, int(ledger.hi.max())
        view = CatchUpView(self._draft.buffers, rows, self._rows * self.width, self.width, upper, False, False, True)
        view._own = self
        return view
