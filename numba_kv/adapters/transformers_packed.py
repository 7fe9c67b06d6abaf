"""PackedCache: a transformers model on the packed steps of a Batch, in which sequences join and leave as they like.

A step's tokens, of any mix of prompts and decode, are one row ``[1, T]`` without a pad. The caller drives the batch; a forward
writes K and V of the step and attends over the pages of all its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numba_kv.adapters.frameworks import torch
from numba_kv.adapters.transformers_attention import AttentionChoice
from numba_kv.adapters.transformers_cache import ModelCache
from numba_kv.adapters.transformers_device import follow_stream, open_resources
from numba_kv.adapters.transformers_hooks import decoder_of
from numba_kv.adapters.transformers_inputs import step_ids
from numba_kv.adapters.transformers_model import read_model
from numba_kv.adapters.transformers_packed_steps import PackedSteps
from numba_kv.adapters.transformers_paged import PagedKV
from numba_kv.errors import InputError, StateError

if TYPE_CHECKING:
    from typing import NoReturn

    from numba_kv.adapters.transformers_model import ModelLayers
    from numba_kv.batch.sequence import Sequence
    from numba_kv.batch.view import StepView
    from numba_kv.shared_resources import SharedResources

__all__ = ["PackedCache"]


class PackedCache(ModelCache):
    """Lends a batch to a model, step by step. Owns the memory; `close` gives it back.

    Made by `for_model`. A step of the model::

        view = cache.batch.step({chat: 512, other: 1})
        logits = model(**cache.model_inputs(view, {chat: ids, other: last})).logits  # [1, rows, vocabulary]
        next_token = logits[0, chat.row].argmax()

    Of a forward that fails, the step's tokens have no K and V: rewind them, or retire their sequences.

    Attributes
    ----------
    resources : SharedResources
        The pools and tables.
    batch : Batch
        The sequences; the caller's to admit, step, rewind, fork and retire.
    """

    def __init__(self, model: Any, layers: ModelLayers, resources: SharedResources, choice: AttentionChoice) -> None:
        kv = PagedKV(resources, layers.donors)
        super().__init__(resources, kv, choice)
        owners = frozenset(index for index, owns in enumerate(layers.owners) if owns)
        self._forward = PackedSteps(self.batch, kv, owners)
        self._buffers = resources.cache_managers[0].step_buffers
        self._positions, self._starts = (
            torch.from_dlpack(tensor) for tensor in (self._buffers.positions, self._buffers.cu_seqlens_q)
        )
        self._join(model, layers, self._forward)

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        max_batch: int,
        max_tokens: int,
        page_tokens: int = 16,
        max_rewind_tokens: int = 0,
        max_batch_tokens: int | None = None,
        num_kv_pages: int | None = None,
        target: str | None = None,
        memory_bytes: int | None = None,
    ) -> PackedCache:
        """Allocate the cache of a model whose attention can be chosen by name.

        Parameters
        ----------
        model, max_batch, max_tokens, page_tokens, max_rewind_tokens, max_batch_tokens, num_kv_pages, target, memory_bytes
            As in `PagedCache.for_model`; `max_batch_tokens` is the most tokens of a step.

        Raises
        ------
        InputError, ConfigError, UnsupportedModelError, PlanError, CapacityError, TargetError
            As `PagedCache.for_model`; nothing stays allocated.
        """
        layers = read_model(
            model,
            max_batch=max_batch,
            max_tokens=max_tokens,
            page_tokens=page_tokens,
            max_rewind_tokens=max_rewind_tokens,
            max_batch_tokens=max_batch_tokens,
            num_kv_pages=num_kv_pages,
            reads_pages=True,
            is_packed=True,
        )
        choice = AttentionChoice(decoder_of(model))
        resources = open_resources(layers.config, model.device, target, memory_bytes)
        try:
            return cls(model, layers, resources, choice)
        except BaseException:
            resources.close()
            raise

    def model_inputs(self, view: StepView, tokens: Mapping[Sequence, Any]) -> dict[str, Any]:
        """Return what the model's forward is called with for a step.

        Parameters
        ----------
        view : StepView
            What `Batch.step` has just returned.
        tokens : mapping of Sequence to integers or torch.Tensor [n]
            The tokens that each sequence of the step appends.

        Returns
        -------
        dict
            ``input_ids`` and ``position_ids`` [1, T], ``cache``, ``use_cache``, and ``logits_to_keep`` int64 [rows]: the last
            token of each row up to the last one in use, so that the logits of a sequence are ``logits[0, sequence.row]``; of
            rows without a token in the step they mean nothing.

        Raises
        ------
        InputError
            If `view` is not a step of this batch, or the tokens are not integers, for just the sequences of the step, and as
            many as each appended.
        StateError
            If the step has had its forward, rows of the batch have changed since, or after `close`.

        Stream: enqueues on torch's current one.
        """
        self._check_open()
        if getattr(view, "buffers", None) is not self._buffers:
            raise InputError(f"view: {view!r} is not a step of this cache's batch; cache.batch.step returns one")
        self._forward.check(view)
        place = self._positions.device
        if not isinstance(tokens, Mapping):
            raise InputError(f"tokens: {type(tokens).__name__} given, a mapping of sequences to their tokens wanted")
        counts = self._counts(view)
        for given in tokens:
            if given not in counts:
                raise InputError(f"tokens: {given!r} is none of the {len(counts)} sequences of this batch that are in the step")
        for sequence, count in counts.items():
            if sequence not in tokens:
                raise InputError(f"tokens: none given, the step has {count} for {sequence!r}")
        parts = [step_ids(sequence, tokens[sequence], count, place) for sequence, count in counts.items()]
        count = view.num_tokens
        if place.type == "cuda":
            follow_stream(self.resources, place)
        positions = self._positions[:count].long()
        self._forward.announce(view, positions - torch.arange(count, device=place))
        return {
            "input_ids": torch.cat(parts)[None],
            "position_ids": positions[None],
            "cache": self,
            "use_cache": True,
            "logits_to_keep": (self._starts[1 : view.num_rows + 1].long() - 1).clamp(0),
        }

    # -- what is the batch's own affair --------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: rows are sequences of `batch`."""
        self._refuse("crop", "rewind")

    def reorder_cache(self, beam_idx: Any) -> None:
        """Refuse: rows are sequences of `batch`."""
        self._refuse("reorder_cache", "reorder")

    def batch_select_indices(self, indices: Any) -> None:
        """Refuse: rows are sequences of `batch`."""
        self._refuse("batch_select_indices", "update")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: rows are sequences of `batch`."""
        self._refuse("batch_repeat_interleave", "fork")

    def reset(self) -> None:
        """Retire all sequences. Memory and addresses stay."""
        self._check_open()
        self._attend_as_before()
        self._forward.forget()
        self.batch.clear()

    def _counts(self, view: StepView) -> dict[Sequence, int]:
        """Return the sequences of the current step in the order of their rows, and how many tokens each appended.

        Raises
        ------
        StateError
            If the batch has changed since `view`.
        """
        counts = self.batch.stepper.step_counts
        found = {sequence: int(counts[sequence.row]) for sequence in self.batch.sequences if counts[sequence.row] > 0}
        if sum(found.values()) != view.num_tokens:
            raise StateError("view: the batch has made another step since, or rows of this one have gone or moved")
        return found

    def _state(self) -> str:
        return f"{len(self.batch.sequences)} sequences"

    def _refuse(self, call: str, instead: str) -> NoReturn:
        raise StateError(f"{call}: rows of a PackedCache are sequences of its batch; use cache.batch.{instead}")
