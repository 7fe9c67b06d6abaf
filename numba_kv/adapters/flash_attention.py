"""FlashAttention over a batch's pages: the keyword arguments of its functions, for each of its versions.

A window layer is given the row's whole table, in which the ring repeats: its kernels begin at the tile that the window reaches,
and whatever entry they load on the way is a page of the row. W counts the query, their ``window_size`` does not: (W - 1, 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba_kv.adapters.flash_versions import function_of, version_of
from numba_kv.adapters.paged_reading import PagedReader, SeenKeys
from numba_kv.batch import Batch, StepView
from numba_kv.cache import KVIO
from numba_kv.device import Tensor
from numba_kv.errors import ConfigError, InputError, InteropError, StateError
from numba_kv.geometry import INT32_MAX

__all__ = ["FlashAttention", "FlashStep", "is_installed"]

_FLOAT8 = "float8_e4m3"


def is_installed(version: str) -> bool:
    """Return whether the functions of a version can be imported here; versions as in `FlashAttention`."""
    try:
        function_of(version_of(version), even=False)
    except InteropError:
        return False
    return True


class FlashAttention:
    """Arguments of one version of FlashAttention for the steps of a batch. Borrows pools, tables and scales.

    Pools are given as [N, P, H, D]; those of layout HND by their strides, without a copy.

    Parameters
    ----------
    batch : Batch
        Whose steps are attended.
    version : {"fa2", "fa3", "fa4", "torch", "vllm_fa2", "vllm_fa3"}
        FlashAttention 2, 3 or 4 as published (P = 256 for 2, any for 3 and 4), ``varlen_attn`` of torch itself (P = 256), or
        vLLM's builds (2: P from 16 on; 3: any).
    io : KVIO, optional
        Holds the scales of float8 pools; needed for those.
    compact : bool
        Give sliding windows tables that begin with the first mapped page, for kernels that walk a row from its beginning.
    arrays : callable, optional
        What makes the library's array of a Tensor; default: torch's, without a copy.

    Attributes
    ----------
    needs_host_lengths : bool
        False: lengths are read on the device; the host gives bounds.

    Raises
    ------
    InputError
        If an argument is something else.
    StateError
        If the batch is closed.

    Notes
    -----
    Layers are checked when they are first asked for; what the version cannot read (page size, head size, element type) is a
    ConfigError that names it, what it cannot mask an InputError.

    Stream: the library runs on torch's current stream. Make that the resources' own (``create_for_llm(..., stream=)``), or
    let it wait.
    """

    needs_host_lengths = False

    def __init__(
        self,
        batch: Batch,
        version: str,
        *,
        io: KVIO | None = None,
        compact: bool = False,
        arrays: Callable[[Any], Any] | None = None,
    ) -> None:
        self._version = version_of(version)
        self._reader = reader = PagedReader(batch, self._version.consumer, arrays)
        if io is not None and (not isinstance(io, KVIO) or io.caches is not reader.caches):
            raise InputError(f"io: {io!r} is not a KVIO of this batch's caches; KVIO(caches) makes one")
        self._io = io
        self._compact = bool(compact)
        config = reader.caches.plan.config
        if version == "fa2" and config.max_batch_size * config.max_kv_cache_capacity > INT32_MAX:
            raise ConfigError("max_batch_size: FlashAttention 2 adds up the lengths of all rows in 32 bits; take fewer rows")

    def step(self, view: StepView, *, captured: bool = False, stream: object | None = None) -> FlashStep:
        """Return the arguments of a step. Make it after `Batch.step` and use it before the batch's next call.

        Parameters
        ----------
        view : StepView
            Of the current step.
        captured : bool
            For a graph that runs again: all rows of the batch, and bounds that hold for all its steps, instead of this step's.
            The graph's steps append as many tokens a row as `view` has. Ask for every layer once before the capture, so that
            the forms that they need are there.
        stream : stream, optional
            Where derived forms are enqueued: one that is being captured, or the resources' stream (default).

        Raises
        ------
        InputError, StateError
            See `PagedReader.check_view`.
        """
        return FlashStep(self, view, captured, stream)

    def function(self, *, even: bool = False) -> Any:
        """Return the library's function for `FlashStep.ragged`, or for `FlashStep.even`.

        Raises
        ------
        InteropError
            If the library is not installed, or is older than its paged attention.
        """
        return function_of(self._version, even=even)

    def _scales(self, layer: int, rows: int) -> dict[str, Any]:
        """Return a float8 layer's scales of K and V, float32 [rows, H] without a copy for each row."""
        if self._reader.caches.plan.config.kv_cache_dtype != _FLOAT8:
            return {}
        if self._io is None:
            raise StateError(f"layer {layer} is stored as {_FLOAT8}, whose scales are in KVIO: give FlashAttention its io=")
        factors, heads = self._io.scales(layer), self._reader.storage(layer).num_kv_heads
        if factors is None:
            return {}
        found = {}
        for name, at in (("k_descale", 0), ("v_descale", heads)):
            half = factors[at : at + heads]
            offset = half.address - half._memory.address
            rows_of_it = Tensor(half._memory, half.device, half.dtype, (rows, heads), offset_nbytes=offset, strides=(0, 1))
            found[name] = self._reader.arrays(rows_of_it)
        return found


class FlashStep:
    """Arguments of a step, layer by layer. Made by `FlashAttention.step`."""

    def __init__(self, owner: FlashAttention, view: StepView, captured: bool, stream: object | None) -> None:
        self._owner = owner
        self._reader = reader = owner._reader
        reader.check_view(view)
        self._view = view
        self._captured = captured
        self._stream = stream
        plan = reader.caches.plan.config
        self._rows = plan.max_batch_size if captured else view.num_rows
        self._longest = plan.max_kv_cache_capacity if captured else view.kv_len_upper
        self._shared: dict[tuple[int, bool], dict[str, Any]] = {}

    def ragged(self, layer: int) -> dict[str, Any]:
        """Return the arguments of a layer for q [T, Hq, D] in the step's order, rows of any number of tokens.

        Parameters
        ----------
        layer : int
            Decoder layer with attention; one that borrows K and V reads its donor's.

        Returns
        -------
        dict
            All arguments of `FlashAttention.function` but q and what is the model's: ``softmax_scale``, ``softcap``, sinks.

        Raises
        ------
        ConfigError, InputError
            If the version cannot read the layer, or the step's keys are not all in pages.
        StateError
            If a float8 pool has no scales.

        Stream: enqueues nothing, but the first time in a step what the group's tables are derived with: one kernel.
        """
        return self._arguments(layer, even=False)

    def even(self, layer: int) -> dict[str, Any]:
        """Return the arguments of a layer for q [rows, tokens, Hq, D]: a step in which every row appended as many tokens.

        Parameters and errors as in `ragged`; InputError also if a row has no token, or fewer, or for a captured step, whose
        rows may empty while the graph runs, or if the version has no such function.
        """
        view, version = self._view, self._owner._version
        if version.even is None:
            raise InputError(f"even: {version.consumer.name} has no function for rows of equal tokens; ragged serves them")
        if self._captured or view.num_tokens != view.num_rows * view.max_query_tokens:
            what = "a captured step" if self._captured else f"{view.num_tokens} tokens in {view.num_rows} rows"
            raise InputError(f"view: {what}; rows of {view.max_query_tokens} tokens each are wanted (compact() fills holes)")
        return self._arguments(layer, even=True)

    def attend(self, layer: int, q: Any, **options: Any) -> Any:
        """Return the attention of q [T, Hq, D] over a layer's pages, by the library.

        Parameters
        ----------
        layer : int
            As in `ragged`.
        q : array [T, Hq, D]
            Queries of the step's tokens, of the pool's element type.
        **options
            What is the model's: ``softmax_scale``, ``softcap`` and whatever else the version takes.

        Raises
        ------
        InteropError
            If the library is not installed.
        ConfigError, InputError, StateError
            As `ragged`.
        """
        return self._owner.function()(q, **self.ragged(layer), **options)

    def _arguments(self, layer: int, *, even: bool) -> dict[str, Any]:
        owner, reader = self._owner, self._reader
        key = (reader.storage(layer).group, even)
        if key not in self._shared:
            seen = reader.seen(layer, self._view)
            if owner._compact and seen.left >= 0:
                seen = SeenKeys(seen.left, is_compact=True)
            self._shared[key] = self._group_arguments(key[0], seen, even)
        k_name, v_name = ("k_cache", "v_cache") if even else owner._version.pools
        k, v = reader.pools(layer)
        return {k_name: k, v_name: v, **self._shared[key], **owner._scales(layer, self._rows)}

    def _group_arguments(self, group: int, seen: SeenKeys, even: bool) -> dict[str, Any]:
        """Return the arguments that all layers of a group share."""
        version, reader, view, rows = self._owner._version, self._reader, self._view, self._rows
        derived = reader.batch.derived
        table, lengths, longest = view.block_tables[group], view.seq_lens, self._longest
        if seen.is_compact:
            form = derived.compact(group, self._stream)
            table, lengths = form.window_tables, form.window_seq_lens
            longest = table.shape[1] * reader.caches.plan.groups[group].page_tokens
        found: dict[str, Any] = {
            version.table: reader.made(table)[:rows],
            "window_size": version.no_window if seen.left < 0 else (seen.left, 0),
            **version.options,
        }
        if seen.chunk:
            found["attention_chunk"] = seen.chunk
        if even:
            return found | {"cache_seqlens": reader.made(lengths)[:rows]}
        if version.lengths == "cu_seqlens_k":
            sums = derived.cu_seqlens_k(group if seen.is_compact else 0, self._stream)
            found[version.lengths] = reader.made(sums)[: rows + 1]
        else:
            found[version.lengths] = reader.made(lengths)[:rows]
        queries = view.max_query_tokens
        if version.swaps_rows and (self._captured or view.num_tokens != rows):
            queries = max(2, queries)  # with 1 row r would be given query r, and rows without a query push the others up
        found[version.starts] = reader.made(view.cu_seqlens_q)[: rows + 1]
        return found | dict(zip(version.maxima, (queries, longest), strict=False))  # some take none, or one
