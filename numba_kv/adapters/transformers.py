"""PagedCache: a transformers ``Cache`` whose K and V live in numba_kv's pages, and whose recurrent states in its slots.

``model.generate(..., cache=PagedCache.for_model(model, ...))`` gives the tokens that transformers' own cache gives, with any
attention implementation: K and V of each layer are gathered from the pages into a dense array before its attention. With
``attention="paged"`` nothing is gathered: the layers attend over the pages.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from numba_kv.adapters.frameworks import torch
from numba_kv.adapters.transformers_attention import AttentionChoice, chooses_by_name
from numba_kv.adapters.transformers_cache import ModelCache
from numba_kv.adapters.transformers_device import open_resources
from numba_kv.adapters.transformers_forward import ForwardSteps
from numba_kv.adapters.transformers_hooks import decoder_of
from numba_kv.adapters.transformers_inputs import row_numbers
from numba_kv.adapters.transformers_kv import DenseKV
from numba_kv.adapters.transformers_model import read_model
from numba_kv.adapters.transformers_op import number_of
from numba_kv.adapters.transformers_paged import PagedKV
from numba_kv.adapters.transformers_rows import ModelRows
from numba_kv.adapters.transformers_states import ModelStates
from numba_kv.batch.arguments import integer
from numba_kv.errors import InputError, RewindTooFar, StateError
from numba_kv.geometry import check_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numba_kv.adapters.transformers_layer_kv import LayerKV
    from numba_kv.adapters.transformers_model import ModelLayers
    from numba_kv.shared_resources import SharedResources

__all__ = ["PagedCache"]

#: Who reads K and V: the model's own attention, dense, or ours, in the pages.
_ATTENTIONS = ("gather", "paged")


class PagedCache(ModelCache):
    """Keeps K and V of a model's batch in pages, recurrent states in slots. Owns the memory; `close` gives it back.

    Made by `for_model`. Rows are started by the first forward and stay until `reset`. Pads on the left of a prompt, as the 2-D
    attention mask shows them, are not stored. What `update` returns is valid until the next layer's update. torch tells nobody
    of the end of a forward that was interrupted (Ctrl-C): behind it, `reset` comes before anything else.

    Attributes
    ----------
    resources : SharedResources
        The pools and tables.
    batch : Batch
        The rows; for questions (`Batch.audit`, `Batch.stats`), not to be changed.
    """

    def __init__(self, model: Any, layers: ModelLayers, resources: SharedResources, choice: AttentionChoice | None) -> None:
        kv: LayerKV
        if choice is None:  # attention that has no name to be called by takes K and V apart as it likes
            kv = DenseKV(resources, layers, is_contiguous=not chooses_by_name(decoder_of(model)))
        else:
            kv = PagedKV(resources, layers.donors)
        super().__init__(resources, kv, choice)
        states = ModelStates(resources, layers.states) if layers.states else None
        self._forward = ForwardSteps(ModelRows(self.batch), self._kv, layers, states)
        self._join(model, layers, self._forward, states)

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        max_batch: int = 1,
        max_tokens: int,
        page_tokens: int = 16,
        max_rewind_tokens: int = 0,
        max_batch_tokens: int | None = None,
        num_kv_pages: int | None = None,
        attention: str = "gather",
        target: str | None = None,
        memory_bytes: int | None = None,
    ) -> PagedCache:
        """Allocate the cache of a model.

        Parameters
        ----------
        model : PreTrainedModel
            Of layers with full, sliding or chunked attention, with a recurrent state instead or besides in some, on one device.
            Its decoder gets two hooks, which `close` removes.
        max_batch : int
            Rows; beams count.
        max_tokens : int
            Tokens of a row, prompt and answer.
        page_tokens : int
            Tokens of a page, a power of two from 1 to 256.
        max_rewind_tokens : int
            How many tokens can be taken back from layers with a window: the draft length, for assisted generation. From states
            of recurrent layers none can.
        max_batch_tokens : int, optional
            Most tokens of all rows in one forward; default ``max_batch * max_tokens``. Fewer take less memory, if prompts are
            prefilled in chunks.
        num_kv_pages : int, optional
            Pages of full attention; default every row at full length.
        attention : {"gather", "paged"}
            "gather": K and V are gathered for the attention that the model has; bit for bit what transformers' own cache gives,
            but for gradients: to K and V of earlier forwards there are none. The only way for models that cache latents
            (multi-head latent attention) or whose V has other channels than K.
            "paged": `PagedAttention` reads the pages, which makes no dense copy and no mask, and gives the same up to rounding,
            without gradients. The model attends so in forwards with this cache alone, one at a time; masks can hide pads on
            the left of a prompt and nothing else.
        target : {"cuda", "cpu", "sim"}, optional
            Default: `cuda` for a model on a GPU, else `cpu` (or `sim` where that is switched on).
        memory_bytes : int, optional
            Budget; see `plan_memory`.

        Raises
        ------
        InputError, ConfigError, UnsupportedModelError
            If an argument is wrong, or the model's layers cannot be cached here.
        PlanError, CapacityError, TargetError
            If memory or target do not suffice; nothing stays allocated.

        Stream: the current one of torch; the resources follow it from forward to forward. Waits once.
        """
        if attention not in _ATTENTIONS:
            raise InputError(f"attention: {attention!r} given, one of {', '.join(map(repr, _ATTENTIONS))} wanted")
        layers = read_model(
            model,
            max_batch=max_batch,
            max_tokens=max_tokens,
            page_tokens=page_tokens,
            max_rewind_tokens=max_rewind_tokens,
            max_batch_tokens=max_batch_tokens,
            num_kv_pages=num_kv_pages,
            reads_pages=attention == "paged",
        )
        choice = AttentionChoice(decoder_of(model)) if attention == "paged" else None
        resources = open_resources(layers.config, model.device, target, memory_bytes)
        try:
            return cls(model, layers, resources, choice)
        except BaseException:
            resources.close()
            raise

    # -- what a forward asks, beside `update` ----------------------------------------------------------------------

    @contextmanager
    def _traced(self) -> Iterator[dict[str, int]]:
        """Let the forward inside be one that torch compiles; give the arguments that it needs besides."""
        self._steps.start(None, None)
        has_failed = True
        try:
            if self._choice is not None:
                self._choice.start(is_traced=True)
            self._is_traced = True
            yield {"numba_kv_cache": number_of(self)}
            has_failed = False
        finally:
            self._is_traced = False
            self._attend_as_before()
            self._steps.stop(has_failed)

    def _store_and_attend(self, layer: int, query: Any, key: Any, value: Any, *options: Any) -> Any:
        """Store K and V of a layer that has its own, and return the attention of its queries; for the operator."""
        if layer in self._forward.owners:
            self._update(layer, key, value)
        kv = self._kv
        if not isinstance(kv, PagedKV):
            raise StateError("attention: the operator works on caches with attention='paged'")
        return kv.attend(kv.current(layer), query, *options)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return the inputs that a layer's convolution keeps.

        Parameters
        ----------
        layer_idx : int
            Number of the layer, which has a state.
        state_idx : int
            0: a layer has one.

        Returns
        -------
        torch.Tensor [B, C, columns] or None
            The newest input in the last column; None before the first forward. While a forward of the model runs, it is the
            pool itself, which the layer may change until the forward ends; else a copy.

        Raises
        ------
        InputError
            If `state_idx` is another number.
        ValueError
            If the layer has no state.
        StateError
            After `close`.
        """
        self._check_state(state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return the states [B, H, D, S] of a layer ([B, D, S] in Mamba-1), as `get_conv_state` does its inputs.

        None also for a layer that has a convolution alone.
        """
        self._check_state(state_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """Keep the last of a layer's inputs, and return them behind those that were kept before.

        Parameters
        ----------
        conv_states : torch.Tensor [B, C, n]
            The inputs of the forward's columns, of the model's element type.
        layer_idx, state_idx : int
            As in `get_conv_state`.
        conv_kernel_size : int, optional
            Columns that are kept; default n.

        Returns
        -------
        torch.Tensor [B, C, m]
            Where nothing was kept: `conv_states`, behind zeros if they are fewer than `conv_kernel_size`.

        Raises
        ------
        InputError, ValueError
            As `get_conv_state`.
        StateError
            After `close`, or if no forward of the model is running.
        ShapeError, InteropError
            If the inputs are not those of this layer and forward.

        Stream: enqueues on torch's current one.
        """
        self._check_state(state_idx)
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Any:
        """Store the states [B, H, D, S] behind a forward, float32, and return where they are. Raises as `update_conv_state`.

        Stream: enqueues on torch's current one.
        """
        self._check_state(state_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def _check_state(self, state_idx: int) -> None:
        self._check_open()
        if state_idx != 0:
            raise InputError(f"state_idx: {state_idx!r} given; a layer has one state, number 0")

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens of all rows back.

        Parameters
        ----------
        tokens_to_remove : int
            Minus their number, pads included; 0 removes none.

        Raises
        ------
        InputError
            If it is positive or no integer, or there are not as many tokens.
        RewindTooFar
            If a layer with a window no longer holds what is then seen: never up to `max_rewind_tokens`. Or if a layer has a
            recurrent state or a convolution, unless all tokens are taken back. Nothing was changed.
        """
        self._check_open()
        number = integer(tokens_to_remove)
        if number is None:
            raise InputError(
                f"tokens_to_remove: {tokens_to_remove!r} is no integer; 0, or minus the number of tokens to remove, is wanted"
            )
        self._forward.crop(number)

    def activate_past_recording(self) -> None:
        """Agree that tokens will be taken back; nothing changes.

        Raises
        ------
        RewindTooFar
            If that is impossible: a layer has a window, and the cache was made without `max_rewind_tokens`; or a layer has a
            recurrent state or a convolution.
        """
        if self._states is not None:
            raise RewindTooFar("recurrent states cannot be taken back; a model that has some generates without drafts")
        if not self.is_croppable:
            raise RewindTooFar(
                "max_rewind_tokens: 0 given to for_model, but drafts are to be taken back from layers with a window; "
                "give at least the draft length (20 for an assistant model by default)"
            )

    def reorder_cache(self, beam_idx: Any) -> None:
        """Make row i what row ``beam_idx[i]`` was, as `ModelRows.select`. Nothing happens to a cache without rows.

        Raises
        ------
        InputError
            If `beam_idx` does not hold numbers of rows along one axis.
        CapacityError
            If there are not as many rows, or the pool has too few pages; nothing was changed.

        Stream: waits for `beam_idx`.
        """
        self._check_open()
        self._forward.select(row_numbers("beam_idx", beam_idx))

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows that `indices` (numbers, or a mask of all rows) names, in that order. Raises as `reorder_cache`."""
        self._check_open()
        rows = len(self._forward.rows)
        if getattr(indices, "dtype", None) is torch.bool and indices.shape == (rows or len(indices),):
            indices = indices.nonzero().flatten()
        self._forward.select(row_numbers("indices", indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make every row `repeats` rows that follow each other. Raises as `reorder_cache`."""
        self._check_open()
        check_count("repeats", repeats)
        rows = self._forward.rows
        rows.check_number(repeats * len(rows))
        self._forward.select([row for row in range(len(rows)) for _ in range(repeats)])

    def reset(self) -> None:
        """Forget all tokens and rows. Memory and addresses stay."""
        self._check_open()
        self._forward.reset()
        self._attend_as_before()

    # -- what people ask -----------------------------------------------------------------------------------------

    @property
    def stored_tokens(self) -> list[int]:
        """Tokens that are stored of each row: those of `get_seq_length` without the pads on the left."""
        return [int(length) for length in self._forward.rows.lengths]

    def _state(self) -> str:
        return f"{len(self._forward.rows)} rows of {self.get_seq_length()} tokens"
