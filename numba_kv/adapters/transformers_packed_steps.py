"""Forward passes of a model over packed steps: each has its view announced, stores K and V once a layer, and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.adapters.transformers_rows import RowStep
from numba_kv.errors import InputError, ShapeError, StateError

if TYPE_CHECKING:
    from numba_kv.adapters.transformers_paged import PagedKV
    from numba_kv.batch import Batch
    from numba_kv.batch.view import StepView

__all__ = ["PackedSteps"]


class PackedSteps:
    """The step of a forward pass and its layers. Borrows the batch and K/V.

    Parameters
    ----------
    batch : Batch
        Makes the steps.
    kv : PagedKV
        Stores and attends.
    owners : frozenset of int
        Layers that store K and V.
    """

    def __init__(self, batch: Batch, kv: PagedKV, owners: frozenset[int]) -> None:
        self._batch = batch
        self._kv = kv
        self._owners = owners
        self._view: StepView | None = None  # of the last forward
        self._step: RowStep | None = None  # announced, and not over yet
        self._made = 0  # steps of the batch until then
        self._offsets: Any = 0
        self._done: set[int] = set()
        self._running = False

    def check(self, view: StepView) -> None:
        """Refuse a step that has had its forward: a second one would read what the first has written over.

        Raises
        ------
        StateError
            If it has.
        """
        if view is self._view:
            raise StateError("view: this step has had its forward; rewind its tokens, or retire its sequences, if that failed")

    def announce(self, view: StepView, offsets: Any) -> None:
        """Say whose step the next forward is, and what its columns lack to the positions of their tokens: int64 [T]."""
        self._offsets = offsets
        self._step, self._view = RowStep(view, 1, view.num_tokens, 0, None), None
        self._made = self._batch.stepper.stats.steps
        self._done.clear()

    def forget(self) -> None:
        """Forget what was announced, and that a forward was running."""
        self._step, self._running = None, False
        self._offsets = 0

    def start(self, mask: Any, shape: tuple[int, int] | None) -> None:
        """Note that the model's decoder begins.

        Raises
        ------
        InputError
            If it was given a mask.
        """
        self._running = True
        if mask is not None:
            raise InputError("attention_mask: packed steps have no pads, so none is wanted")

    def stop(self, has_failed: bool) -> None:
        """Note that the decoder has ended.

        Raises
        ------
        StateError
            If its layers did not attend over what they stored.
        """
        unread = [] if has_failed or self._step is None else self._kv.unread(self._owners)
        self.forget()
        self._kv.end()
        if unread:
            raise StateError(
                f"attention: layers {unread} did not attend over their pages, and what they computed is wrong; such a model "
                "cannot be packed"
            )

    def update(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Store K and V [1, H, T, D] of a layer and return what its attention is handed.

        Raises
        ------
        InputError, ShapeError, InteropError
            If K and V are not those of this model and step.
        StateError
            If the forward is not the one that was announced.
        """
        step = self._step
        if layer not in self._owners:
            raise InputError(f"layer_idx: {layer} stores no K and V; the layers that do are {sorted(self._owners)}")
        if step is None or not self._running or layer in self._done:
            raise StateError("update: this is not the forward of a step; call the model with model_inputs(view, tokens), once")
        if self._batch.stepper.stats.steps != self._made:
            raise StateError("update: the batch has made another step since model_inputs; each has its forward before the next")
        self._kv.check(layer, k, v)
        if (k.shape[0], k.shape[2]) != (1, step.tokens):
            raise ShapeError(f"key_states: rows and tokens {[k.shape[0], k.shape[2]]} given, {[1, step.tokens]} announced")
        if not self._done:
            self._view = step.view
            self._kv.begin(step, np.zeros(1, np.int64))
        moved = self._kv.move(layer, k, v, step)
        self._done.add(layer)
        return moved

    def length(self, layer: int) -> Any:
        """Return what models add to a token's column to get its position: torch.Tensor int64 [T]; outside of forwards 0."""
        return self._offsets

    def mask_length(self, layer: int) -> int:
        """Return 0: a packed row has no length of its own, and no mask."""
        return 0
