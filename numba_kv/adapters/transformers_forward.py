"""Forward passes of a model that writes into a paged cache: when a step begins, which layers it has reached, how it ended.

Nothing tells a cache of transformers that a forward begins or ends. A step begins when a layer brings K and V that has brought
them in the step before; hooks of the model's decoder add what is not seen from there: the mask, and how the forward ended.
Where layers have recurrent states, it is the hook that begins the step: such a layer may be the first, and does not say how
many tokens come.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.errors import InputError, RewindTooFar, ShapeError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from numba_kv.adapters.transformers_layer_kv import LayerKV
    from numba_kv.adapters.transformers_model import ModelLayers
    from numba_kv.adapters.transformers_rows import ModelRows, RowStep
    from numba_kv.adapters.transformers_states import ModelStates

__all__ = ["ForwardSteps"]


class ForwardSteps:
    """The step of a forward pass and its layers. Borrows rows, K/V and states.

    Attributes
    ----------
    rows : ModelRows
        Rows of the model's batch.
    owners : frozenset of int
        Layers that store K and V.
    """

    def __init__(self, rows: ModelRows, kv: LayerKV, layers: ModelLayers, states: ModelStates | None = None) -> None:
        self.rows = rows
        self._kv = kv
        self._states = states
        self._layers = layers
        self.owners = frozenset(index for index, owns in enumerate(layers.owners) if owns)
        self._step: RowStep | None = None
        self._done: set[int] = set()
        self._running = False
        self._has_begun = False  # a step, in the forward that runs
        self._mask: Any = None
        self._is_of_model: bool | None = None
        self._problem = ""
        self._is_recorded = False
        self._ahead: Any = None

    # -- what the hooks say --------------------------------------------------------------------------------------

    def start(self, mask: Any, shape: tuple[int, int] | None) -> None:
        """Note that the model's decoder begins, with its 2-D attention mask if it has one, and its rows and columns.

        Raises
        ------
        InputError
            If there is no token, or attention reads pages and the mask is of another kind; or as `update`.
        StateError, CapacityError
            As `update`, where layers have states.
        """
        self._note_interrupt()
        self._running, self._has_begun = True, self._ahead is not None
        if self._ahead is not None:
            self._check_complete(1)
        self._mask = mask if getattr(mask, "ndim", 0) == 2 else None
        if self._kv.reads_pages and self._mask is None and _has_mask(mask):
            raise InputError(
                "attention_mask: one of [B, tokens] or none is wanted by attention over pages, which knows no other; use "
                "attention='gather'"
            )
        if shape is not None and not shape[1]:
            raise InputError(
                f"input_ids: no new token given, the cache holds {self.rows.length} already; call reset() before another "
                "prompt, or pass the whole chat and what is new"
            )
        if self._states is not None and self._ahead is None:
            if shape is None:
                raise InputError("input_ids: none given, nor inputs_embeds; rows and columns of the forward are not known")
            self._begin(*shape)

    def stop(self, has_failed: bool) -> None:
        """Note that the decoder has ended. The tokens of a forward that failed are taken back, where that is possible.

        Raises
        ------
        StateError
            If its layers did not attend over what they stored.
        """
        has_begun, self._has_begun = self._has_begun, False
        self._running, self._mask = False, None
        unread = [] if has_failed or self._step is None else self._kv.unread(self.owners)
        self._kv.end()
        if self._states is not None:
            self._states.end()
        step, is_complete = self._step, not self._is_incomplete
        has_failed = has_failed and has_begun
        is_spoiled = has_failed and self._states is not None  # of a state that is changed in place nobody knows how far
        if is_complete and not is_spoiled:
            if unread:
                self._problem = f"layers {unread} did not attend over their pages, and what they computed is wrong"
                raise StateError(f"attention: {self._problem}; use attention='gather' for this model")
            return
        if self._is_recorded:
            self._step = None
            return
        if has_failed and step is not None:
            try:
                self._take_back(step)
                return
            except RewindTooFar:
                pass
        found = "a forward failed that had changed recurrent states" if is_spoiled else self._shortfall
        self._problem = self._problem or found

    # -- what the layers do --------------------------------------------------------------------------------------

    def update(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Store K and V [B, H, n, D] of a layer and return those that its attention reads.

        Raises
        ------
        InputError, ShapeError, InteropError
            If the layer has none, or K and V do not fit.
        StateError
            If an earlier forward did not reach all layers, or was of another model.
        CapacityError
            If rows or tokens have run out; nothing was changed.
        """
        if layer not in self.owners:
            raise InputError(f"layer_idx: {layer} stores no K and V; the layers of the cache that do are {sorted(self.owners)}")
        self._kv.check(layer, k, v)
        if not self._running and (self._kv.reads_pages or self._states is not None):
            what = "attention over pages" if self._kv.reads_pages else "a cache with recurrent states"
            raise StateError(
                f"update: {what} works in forwards of the model that the cache was made for, not in another model or in layers "
                "that are called one by one"
            )
        step = self._step
        if step is None or layer in self._done:
            if self._kv.stream is not None or self._states is not None:
                raise StateError(f"update: layer {layer} has brought K and V twice in one forward")
            step = self._begin(k.shape[0], k.shape[2])
        if (k.shape[0], k.shape[2]) != (step.rows, step.tokens):
            given, wanted = [k.shape[0], k.shape[2]], [step.rows, step.tokens]
            raise ShapeError(f"key_states: rows and tokens {given} in layer {layer}, {wanted} in the layers before it")
        moved = self._kv.move(layer, k, v, step)
        self._done.add(layer)
        return moved

    def length(self, layer: int) -> Any:
        """Return the padded length of a layer: less in those that the current forward has yet to reach.

        A tensor int64 [] in decode steps, whose graph outlives what the host knows now.
        """
        if self._ahead is not None:
            return self._ahead + 1 if layer in self._done else self._ahead
        return self.mask_length(layer)

    def mask_length(self, layer: int) -> int:
        """Return the same as a number; without a meaning in decode steps, whose masks are empty."""
        if self._step is not None and layer not in self._done:
            return self._step.before
        return self.rows.length

    @contextmanager
    def decode(self, stream: object, length: Any, *, is_recorded: bool) -> Iterator[None]:
        """Let the forward inside be a step of one token a row, whose bookkeeping the caller has enqueued on `stream`.

        `length` is the padded length before it, torch.Tensor int64 []. With `is_recorded` a graph is captured: nothing has been
        appended, and nothing is taken back if it fails.
        """
        step = self.rows.decode_step(0 if is_recorded else 1)
        self._note(step)
        self._is_recorded = is_recorded
        try:
            self._kv.begin(step, self.rows.offsets)
            self._kv.stream, self._ahead = stream, length
            yield
        finally:
            self._kv.stream = self._ahead = None
            self._is_recorded = False
            if is_recorded:
                self._step = None

    def check_ready(self) -> None:
        """Raise StateError behind a forward that not all layers have seen."""
        self._note_interrupt()
        self._check_complete(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Take ``-tokens_to_remove`` tokens back; see `ModelRows.rewind`."""
        if tokens_to_remove > 0:
            raise InputError(
                f"tokens_to_remove: {tokens_to_remove} given; 0, or minus the number of tokens to remove, is wanted"
            )
        self._note_interrupt()
        self._check_complete(-tokens_to_remove)
        self.rows.rewind(-tokens_to_remove)
        self._step = None
        if self._states is not None and not self.rows.length:
            self._states.forget()

    def select(self, parents: list[int]) -> None:
        """Make row i what row ``parents[i]`` was; nothing while the cache is empty. Raises as `ModelRows.select`."""
        self.rows.check_parents(parents)
        self._note_interrupt()
        self._check_complete(0)
        if len(self.rows):
            self.rows.select(parents)
            self._step = None
            if self._states is not None:
                self._states.resize(len(parents))

    def reset(self) -> None:
        """Forget all tokens, and what went wrong."""
        self._forget_rows()
        self._kv.end()
        if self._states is not None:
            self._states.end()
        self._step = self._mask = None
        self._has_begun = False
        self._done.clear()
        self._running = False  # no hook has said so behind an interrupt
        self._is_of_model = None
        self._problem = ""

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def _is_incomplete(self) -> bool:
        """Whether some layer has not brought what the step adds to it."""
        lacks_states = self._states is not None and self._states.reached != self._states.layers
        return self._step is not None and (self._done != self.owners or lacks_states)

    @property
    def _shortfall(self) -> str:
        """What is wrong behind a forward that has not reached all layers."""
        reached = max(self._done if self._states is None else self._done | self._states.reached, default=-1)
        return f"a forward ended behind layer {reached}, and the layers after it lack its tokens"

    def _note_interrupt(self) -> None:
        """Note that a forward has not ended which must have: torch calls no hook behind an interrupt."""
        if self._running:
            self._problem = self._problem or "a forward was interrupted"

    def _note(self, step: RowStep) -> None:
        """Note that a step begins, which no layer has reached."""
        self._step, self._has_begun = step, True
        self._done.clear()
        if self._states is not None:
            self._states.begin(step)

    def _forget_rows(self) -> None:
        self.rows.clear()
        if self._states is not None:
            self._states.forget()

    def _begin(self, rows: int, tokens: int) -> RowStep:
        self._check_complete(0)
        if self._is_of_model is not None and self._is_of_model != self._running:
            raise StateError(
                "update: the cache holds tokens of another model, or of layers that were called one by one; "
                "call reset(), and make a cache for each model"
            )
        self._check_hidden(rows, tokens)
        pads = self._pads(rows, tokens)
        if self._kv.reads_pages:
            self._check_visible(rows, tokens, pads)
        step = self.rows.step(rows, tokens, pads)
        self._is_of_model = self._running
        self._note(step)
        try:
            self._kv.begin(step, self.rows.offsets)
        except BaseException:
            self.stop(has_failed=True)
            raise
        return step

    def _pads(self, rows: int, tokens: int) -> NDArray[np.int64] | None:
        """Return the pads on the left of each row of the next `tokens` columns. Stream: waits, if some row has no token yet."""
        before, mask = self.rows.length, self._mask
        if mask is None or not self.rows.has_open_rows or tuple(mask.shape) != (rows, before + tokens):
            return None
        is_token = mask[:, before:].ne(0).cpu().numpy()
        pads: NDArray[np.int64] = np.where(is_token.any(axis=1), is_token.argmax(axis=1), tokens)
        return pads

    def _check_hidden(self, rows: int, tokens: int) -> None:
        """Refuse a mask that shows pads which were not stored. Stream: waits, unless a single token follows."""
        mask, offsets = self._mask, self.rows.offsets
        if mask is None or tokens == 1 or not offsets.any() or tuple(mask.shape) != (rows, self.rows.length + tokens):
            return
        most = int(offsets.max())
        is_shown = mask[:, :most].ne(0).cpu().numpy() & (np.arange(most) < offsets[:, None])
        if is_shown.any():
            row = int(is_shown.any(axis=1).argmax())
            raise InputError(
                f"attention_mask: row {row} shows some of its first {int(offsets[row])} columns, which were pads and are not "
                "stored; call reset() before another mask"
            )

    def _check_visible(self, rows: int, tokens: int, pads: NDArray[np.int64] | None) -> None:
        """Refuse a mask that hides tokens which are stored, now or with this step: attention over pages sees them. Waits."""
        mask, length = self._mask, self.rows.length + tokens
        if mask is None:
            return
        columns = mask.shape[1]
        is_hidden = np.ones((mask.shape[0], max(columns, length)), bool)  # transformers hides what lies behind a mask
        is_hidden[:, :columns] = mask.eq(0).cpu().numpy()
        if tuple(mask.shape) == (rows, length):
            is_hidden &= np.arange(length) >= self.rows.offsets_after(rows, tokens, pads)[:, None]
        if is_hidden.any():
            row, column = np.argwhere(is_hidden)[0].tolist()
            of = f" (it has {columns} of {length})" if columns < length else ""
            raise InputError(
                f"attention_mask: hides column {column} of row {row}{of}, which is stored; attention over pages hides nothing "
                "but pads on the left of a prompt (and of those all but one of a forward that has no token); use "
                "attention='gather'"
            )

    def _take_back(self, step: RowStep) -> None:
        """Undo a step that not all layers have seen."""
        if step.before:
            self.rows.rewind(step.tokens)
        else:
            self._forget_rows()
            self._is_of_model = None
        self._step = None
        self._done.clear()

    def _check_complete(self, removed: int) -> None:
        """Refuse to go on behind a forward that not all layers have seen, unless its tokens are among the `removed` ones."""
        problem, step = self._problem, self._step
        if not problem and step is not None and self._is_incomplete and removed < step.tokens:
            problem = self._shortfall
        if problem:
            raise StateError(f"the cache cannot go on: {problem}; call reset()")


def _has_mask(mask: Any) -> bool:
    """Return whether there is a mask, also in the form of one for each kind of layer."""
    return any(each is not None for each in mask.values()) if isinstance(mask, dict) else mask is not None
