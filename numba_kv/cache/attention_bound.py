"""BoundAttention: attention of one layer over arrays that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from numba_kv.device.unique import Unique
from numba_kv.errors import InputError, ShapeError, StateError

if TYPE_CHECKING:
    from numba_kv.cache.attention_launch import Cut, LayerCut
    from numba_kv.cache.attention_operands import Bound
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device import Stream, Tensor
    from numba_kv.device.guard import CallGuard

__all__ = ["BoundAttention"]


class BoundAttention(Unique):
    """`PagedAttention.attend` of one layer, whose arrays and numbers were looked at once. Keeps the arrays alive.

    `PagedAttention.bind_attend` makes it. It does not take long steps on layers that keep a window.

    Attributes
    ----------
    max_tokens : int
        Tokens for which its arrays have room.

    Stream: enqueues. Cost: one launch, two where few queries see many keys; some microseconds more when the step is cut in
    another way than the one before.
    """

    __slots__ = (
        "_again", "_bound", "_buffers", "_cut", "_guard", "_layer_cut", "_lock", "_memories", "_numbers", "_starts",
        "_tensors", "_why_long", "max_tokens",
    )  # fmt: skip

    def __init__(
        self,
        guard: CallGuard,
        buffers: StepBuffers,
        starts: Tensor,
        bound: Bound,
        layer_cut: LayerCut,
        numbers: tuple[float, float],
        why_long: str | None,
        tensors: Sequence[Tensor],
    ) -> None:
        self.max_tokens = bound.tokens
        self._guard, self._lock = guard, guard.lock
        self._buffers, self._starts = buffers, starts
        self._bound = bound
        self._layer_cut = layer_cut
        self._numbers = numbers
        self._why_long = why_long
        self._tensors = tensors
        self._memories = [tensor._memory for tensor in tensors]
        self._cut: Cut | None = None
        self._again: list[Callable[[Stream], None]] = []

    def __call__(self, view: Any, stream: object | None = None) -> None:
        """Enqueue the attention of a step.

        Parameters
        ----------
        view : StepView
            Of the current step.
        stream : optional
            The device's own, or one that is being captured.

        Raises
        ------
        InputError, ShapeError
            If the view is of another model or in another layout than the one that was bound, has more tokens than there is
            room for, or is of a long step of a window layer.
        StateError
            As of `BoundCall`.
        """
        lock, buffers = self._lock, self._buffers
        if not lock.acquire(False):
            self._guard.take()  # says why not
        try:
            self._check(view)
            longest = view.kv_len_upper if stream is None else buffers.plan.config.max_kv_cache_capacity
            cut = self._layer_cut.of(view.num_tokens, longest, view.max_query_tokens == 1)
            if cut != self._cut:
                self._again = self._bound.repeated(cut, *self._numbers)
                self._cut = cut
            if stream is None:
                for again in self._again:
                    again(buffers.device.stream)
                return
            with buffers.device.active():
                where = buffers.device.as_capturing_stream(stream)
                for again in self._again:
                    again(where)
        finally:
            lock.release()

    def _check(self, view: Any) -> None:
        if self._guard.is_closed:
            self._guard.check_open()
        for memory in self._memories:
            if memory.is_closed:
                raise StateError("pools, scales or arrays are gone; SharedResources or KVIO was closed")
        if getattr(view, "buffers", None) is not self._buffers:
            raise InputError(f"view: {view!r} is not a step of this model; Batch.step returns one")
        if view.cu_seqlens_q is not self._starts:
            raise InputError(f"view: the tokens of {view!r} lie in another layout than was bound; bind_attend(..., view=view)")
        if view.is_long and self._why_long is not None:
            raise InputError(self._why_long)
        if view.num_tokens > self.max_tokens:
            raise ShapeError(f"q, out: {self.max_tokens} tokens given, {view.num_tokens} wanted")

    def __repr__(self) -> str:
        return f"BoundAttention(at most {self.max_tokens} tokens)"
