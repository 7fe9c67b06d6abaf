"""GreedyDecoder: decode steps of a transformers model that run without the host.

Tables, lengths, positions, K and V keep their addresses, so one decode step (bookkeeping, forward, choice of the next token) is
captured as a CUDA graph and replayed. On the host the same step is called again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba_kv.adapters.frameworks import torch
from numba_kv.adapters.transformers import PagedCache
from numba_kv.adapters.transformers_device import follow_stream
from numba_kv.adapters.transformers_inputs import check_ids, check_mask
from numba_kv.device.collection import collection_paused
from numba_kv.errors import CapacityError, InputError, ShapeError, StateError, UnsupportedModelError
from numba_kv.geometry import check_count

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

__all__ = ["GreedyDecoder"]


@dataclass(slots=True)
class _Loop:
    """What the steps of as many rows read and write, at fixed addresses.

    Attributes
    ----------
    ids, positions : torch.Tensor int64 [B, 1]
        Token of each row, and its position.
    found : torch.Tensor int64 [B, max_tokens]
        Tokens that were chosen, a column for each step.
    column : torch.Tensor int64 [1]
        The next column.
    length : torch.Tensor int64 []
        Padded length of the rows.
    steps : int
        Steps that ran without a graph.
    graph : torch.cuda.CUDAGraph or None
        A step.
    """

    ids: Any
    positions: Any
    found: Any
    column: Any
    length: Any
    steps: int = 0
    graph: Any = None


class GreedyDecoder:
    """Generates the likeliest tokens of all rows of a cache. Borrows model and cache; owns the graphs.

    On a GPU the first step runs as any other forward, and the second is captured; a graph serves as long as the number of rows
    stays the same, also after `PagedCache.reset`. Rows do not stop at an end-of-sequence token.

    Parameters
    ----------
    model : PreTrainedModel
        The one that the cache was made for. Its forward must not wait for the device, or the capture fails.
    cache : PagedCache
        Made with ``attention="paged"``. Close it after the decoder.
    compile_with : mapping, optional
        Arguments of `torch.compile`, with which the forwards of decode steps are compiled: one graph without a break, in which
        attention is an operator. Default: they run as they are.

    Raises
    ------
    InputError
        If `cache` is something else.
    UnsupportedModelError
        If the model has recurrent layers, and its forwards are to be compiled.
    """

    def __init__(self, model: Any, cache: PagedCache, *, compile_with: Mapping[str, Any] | None = None) -> None:
        if not isinstance(cache, PagedCache) or not cache._kv.reads_pages:
            raise InputError(f"cache: {cache!r} given, a PagedCache with attention='paged' wanted")
        cache._check_open()
        if compile_with is not None and cache._states is not None:
            raise UnsupportedModelError(
                "compile_with: layers with recurrent states change them in place, which is not traced here yet; leave it out, "
                "and on a GPU the steps are captured as a graph all the same"
            )
        self._model = model
        self._compiled: Any = None
        if compile_with is not None:
            self._compiled = torch.compile(model, **{"fullgraph": True, "dynamic": False, **compile_with})
        self._cache = cache
        self._loops: dict[int, _Loop] = {}
        self._positions = torch.from_dlpack(cache.resources.cache_managers[0].step_buffers.positions)

    def generate(self, input_ids: Any, attention_mask: Any = None, *, max_new_tokens: int) -> Any:
        """Return ids and what follows them, as ``model.generate(..., do_sample=False)`` does without an end.

        Parameters
        ----------
        input_ids : torch.Tensor int64 [B, n]
            All tokens, those that the cache already holds included; at least one is new.
        attention_mask : torch.Tensor [B, n], optional
            0 for pads on the left; needed as long as the cache knows of some.
        max_new_tokens : int
            Tokens to append.

        Returns
        -------
        torch.Tensor int64 [B, n + max_new_tokens]

        Raises
        ------
        InputError, ShapeError, StateError
            As `PagedCache.update`; or if ids or mask are of another kind or shape, no token is new, or a row has only pads.
        CapacityError
            If a row would have more than `max_tokens`, and nothing was changed; or if the pages do not suffice.

        Stream: enqueues, and waits for the mask; the first call captures a graph.
        """
        self._cache._check_open()
        check_count("max_new_tokens", max_new_tokens)
        check_ids("input_ids", input_ids)
        before = self._cache.get_seq_length()
        if before >= input_ids.shape[1]:
            raise InputError(
                f"input_ids: {input_ids.shape[1]} tokens given, the cache holds {before}; call "
                "cache.reset() before another prompt, or give all ids and new ones"
            )
        options = {}
        if attention_mask is None and self._cache._forward.rows.offsets.any():
            raise InputError("attention_mask: None given, but rows of the cache have pads on their left; give that of all ids")
        longest = input_ids.shape[1] if attention_mask is None else check_mask(attention_mask, input_ids)
        self._check_room(longest + max_new_tokens - 1)
        if attention_mask is not None:
            positions = (attention_mask.long().cumsum(-1) - 1).clamp(0)
            options = {"attention_mask": attention_mask, "position_ids": positions[:, before:]}
        with torch.no_grad():
            logits = self._model(input_ids=input_ids[:, before:], cache=self._cache, use_cache=True, **options).logits
            first = logits[:, -1:].argmax(-1)
        parts = [input_ids, first]
        if max_new_tokens > 1:
            parts.append(self.decode(first, max_new_tokens - 1))
        return torch.cat(parts, dim=1)

    def decode(self, tokens: Any, steps: int) -> Any:
        """Append tokens and those that follow, one a step and row.

        Parameters
        ----------
        tokens : torch.Tensor int64 [B, 1]
            The first to be appended to each row of the cache.
        steps : int
            Forwards. The token that the last one chooses is returned, not stored.

        Returns
        -------
        torch.Tensor int64 [B, steps]
            What each step chose.

        Raises
        ------
        ShapeError, InputError
            If an argument is wrong.
        StateError
            If the cache has no rows yet, is closed, or cannot go on; or if the model cannot be captured.
        CapacityError
            If rows or pages do not hold as many tokens; nothing was changed.

        Stream: enqueues on torch's current one. Cost: with a graph, one launch a step and nothing else from the host.
        """
        cache, forward = self._cache, self._cache._forward
        cache._check_open()
        forward.check_ready()
        check_count("steps", steps)
        rows = len(forward.rows)
        if not rows:
            raise StateError("decode: the cache has no rows; run the prompt first")
        check_ids("tokens", tokens)
        if tuple(tokens.shape) != (rows, 1):
            raise ShapeError(f"tokens: shape {list(tokens.shape)} given, {[rows, 1]} wanted: a token for each row of the cache")
        has_graphs = cache.resources.device.target == "cuda"
        if has_graphs:
            follow_stream(cache.resources, self._positions.device)
        cache.batch.reserve(steps)
        loop = self._loops.get(rows)
        if loop is None:
            loop = self._loops[rows] = self._new_loop(rows)
        replayed = 0
        try:
            with torch.no_grad():
                loop.ids.copy_(tokens)
                loop.column.zero_()
                loop.length.fill_(forward.rows.length)
                for _ in range(steps):
                    if has_graphs and loop.steps and loop.graph is None:
                        self._capture(loop)
                    if loop.graph is not None:
                        loop.graph.replay()
                        replayed += 1
                    else:
                        self._step(loop, cache.resources.stream, is_recorded=False)
                        loop.steps += 1
        finally:  # an interrupt does not take back what was launched
            if replayed:
                forward.rows.passed(replayed)
        return loop.found[:, :steps].clone()

    def close(self) -> None:
        """Give the graphs back; a second call does nothing."""
        self._loops.clear()

    def __enter__(self) -> GreedyDecoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_room(self, tokens: int) -> None:
        most = self._cache.resources.plan.config.max_kv_cache_capacity
        if tokens > most:
            raise CapacityError(
                f"max_new_tokens: a row would have {tokens} tokens, the cache was made for max_tokens {most}",
                needed=tokens,
                free=most,
            )

    def _new_loop(self, rows: int) -> _Loop:
        place, longest = self._positions.device, self._cache.resources.plan.config.max_kv_cache_capacity
        with torch.inference_mode(False):
            sizes = ((rows, 1), (rows, 1), (rows, longest), (1,), ())
            return _Loop(*(torch.zeros(size, dtype=torch.int64, device=place) for size in sizes))

    def _step(self, loop: _Loop, stream: object, *, is_recorded: bool) -> None:
        """Enqueue one step on `stream`, on which torch enqueues too."""
        rows, forward = len(loop.ids), self._cache._forward
        self._cache.batch.enqueue_step(stream)
        if not is_recorded:
            forward.rows.passed(1)
        loop.positions.copy_(self._positions[:rows, None])
        with forward.decode(stream, loop.length, is_recorded=is_recorded):
            inputs = {"input_ids": loop.ids, "position_ids": loop.positions, "cache": self._cache, "use_cache": True}
            if self._compiled is None:
                found = self._model(**inputs)
            else:
                with self._cache._traced() as more:
                    found = self._compiled(**inputs, **more)
        loop.ids.copy_(found.logits[:, -1:].argmax(-1))
        loop.found.index_copy_(1, loop.column, loop.ids)
        loop.column.add_(1)
        loop.length.add_(1)

    def _capture(self, loop: _Loop) -> None:
        """Capture a step; nothing runs."""
        graph = torch.cuda.CUDAGraph()
        try:
            with collection_paused(), torch.cuda.graph(graph):
                self._step(loop, torch.cuda.current_stream(self._positions.device), is_recorded=True)
        except RuntimeError as error:
            kind = type(self._model).__name__
            raise StateError(
                f"decode: a step of {kind} cannot be captured, because its forward waits for the device or the host ({error}); "
                "choose other parts for it (experts: model.set_experts_implementation('batched_mm')), or use model.generate"
            ) from error
        loop.graph = graph
