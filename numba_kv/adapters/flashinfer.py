"""FlashInfer over a batch's pages: what the ``plan()`` and ``run()`` of its wrappers take.

A window layer is given the mapped pages of its rows alone: lengths count from the first of them, and masks from the end. W
counts the query, ``window_left`` does not: W - 1. ``plan()`` is work of the host: where rows begin is given to it there, as the
batch knows it, so that nothing is read back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba_kv.adapters.paged_reading import Consumer, PagedReader
from numba_kv.batch import Batch, StepView
from numba_kv.cache import KVIO
from numba_kv.device import Tensor
from numba_kv.device.graph import is_capturing
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, StateError

if TYPE_CHECKING:
    from numba_kv.batch.derived import HostIndices, KvIndices

__all__ = ["FlashInfer", "FlashInferStep"]

_CONSUMER = Consumer("FlashInfer", ("float16", "bfloat16", "float8_e4m3"), head_dims=(64, 128, 256))
_FLOAT8 = "float8_e4m3"


class FlashInfer:
    """Inputs of FlashInfer's ``BatchDecodeWithPagedKVCacheWrapper`` and ``BatchPrefillWithPagedKVCacheWrapper``.

    Borrows pools, tables and scales. Pages of any size; heads of 64, 128 or 256 channels.

    Parameters
    ----------
    batch : Batch
        Whose steps are attended.
    kv_layout : {"NHD", "HND"}
        What the wrappers were made for. Pools of the other layout are given with two axes exchanged, without a copy.
    io : KVIO, optional
        Holds the scales of float8 pools; needed for those.
    arrays : callable, optional
        What makes the library's array of a Tensor, or of a NumPy array; default: torch's, without a copy.

    Attributes
    ----------
    needs_host_lengths : bool
        True: ``plan()`` wants lengths on the host, exactly. After device counts call `Batch.sync_lengths` first; a step inside
        a captured graph has no plan of its own.

    Raises
    ------
    InputError
        If an argument is something else.
    StateError
        If the batch is closed.

    Notes
    -----
    Stream: the library runs on torch's current stream. Make that the resources' own (``create_for_llm(..., stream=)``), or
    let it wait.
    """

    needs_host_lengths = True

    def __init__(
        self,
        batch: Batch,
        *,
        kv_layout: str = "NHD",
        io: KVIO | None = None,
        arrays: Callable[[Any], Any] | None = None,
    ) -> None:
        if kv_layout not in ("NHD", "HND"):
            raise InputError(f"kv_layout: {kv_layout!r} is neither 'NHD' nor 'HND'")
        self._reader = reader = PagedReader(batch, _CONSUMER, arrays)
        if io is not None and (not isinstance(io, KVIO) or io.caches is not reader.caches):
            raise InputError(f"io: {io!r} is not a KVIO of this batch's caches; KVIO(caches) makes one")
        self._io = io
        self.kv_layout = kv_layout
        self._turned: dict[int, tuple[Any, Any]] = {}

    def step(self, view: StepView) -> FlashInferStep:
        """Return the inputs of a step. Make it after `Batch.step` and use it before the batch's next call.

        Parameters
        ----------
        view : StepView
            Of the current step.

        Raises
        ------
        InputError
            See `PagedReader.check_view`.
        StateError
            If the resources' stream is being captured.

        Stream: host only.
        """
        if is_capturing(self._reader.batch.resources.stream):
            raise StateError("FlashInfer's plan() is work of the host and cannot be captured; plan before the capture")
        return FlashInferStep(self, view)

    def kv(self, layer: int) -> tuple[Any, Any]:
        """Return the pools (K, V) of a layer for ``run()``: [N, P, H, D] each, for HND [N, H, P, D]; made once.

        Raises
        ------
        ConfigError
            If FlashInfer cannot read the layer.
        """
        if self.kv_layout == "NHD":
            return self._reader.pools(layer)
        self._reader.storage(layer)  # raises if it cannot be read
        if layer not in self._turned:
            pool, arrays = self._reader.caches.by_token(layer), self._reader.arrays
            self._turned[layer] = arrays(_exchanged(pool[0])), arrays(_exchanged(pool[1]))
        return self._turned[layer]

    def scales(self, layer: int) -> dict[str, float]:
        """Return what ``run()`` is told of a float8 layer: ``k_scale`` and ``v_scale``; nothing for other layers.

        Read them once: the scales of a running model do not change.

        Raises
        ------
        InputError
            If heads have scales of their own: FlashInfer has one number for all.
        StateError
            If there are no scales.

        Stream: waits.
        """
        if self._io is None:
            if self._reader.caches.kv(layer).dtype.name != _FLOAT8:
                return {}
            raise StateError(f"layer {layer} is stored as {_FLOAT8}, whose scales are in KVIO: give FlashInfer its io=")
        factors = self._io.scales(layer)
        if factors is None:
            return {}
        found = factors.to_host().reshape(2, -1).tolist()
        if any(len(set(heads)) > 1 for heads in found):
            raise InputError(f"layer: heads of layer {layer} have scales of their own, and FlashInfer takes one for all")
        return {"k_scale": found[0][0], "v_scale": found[1][0]}


class FlashInferStep:
    """Inputs of a step. Made by `FlashInfer.step`.

    Layers of one window, head count and head size share a plan: one wrapper for each of these.
    """

    def __init__(self, owner: FlashInfer, view: StepView) -> None:
        self._owner = owner
        self._reader = owner._reader
        self._reader.check_view(view)
        self._view = view
        self._groups: dict[int, tuple[KvIndices, HostIndices]] = {}

    def decode_plan(self, layer: int, num_qo_heads: int, q_data_type: str | None = None) -> dict[str, Any]:
        """Return the arguments of the decode wrapper's ``plan()``: a step in which every row appended one token.

        Parameters
        ----------
        layer : int
            Any of the layers that share the plan.
        num_qo_heads : int
            Hq, a multiple of the layer's KV heads.
        q_data_type : str, optional
            Element type of q; default: the pool's.

        Returns
        -------
        dict
            All that describes the batch; the model's own (``sm_scale``, ``logits_soft_cap``) comes on top. q is [rows, Hq, D].

        Raises
        ------
        ConfigError, InputError
            If FlashInfer cannot read the layer, has no mask for its window, or a row has no token or several (`prefill_plan`).
        StateError
            If the host only knows bounds of the lengths.

        Stream: enqueues, the first time for a group in a step, two kernels. Waits for nothing.
        """
        view = self._view
        if view.max_query_tokens != 1 or view.num_tokens != view.num_rows:
            raise InputError(
                f"view: {view.num_tokens} tokens in {view.num_rows} rows; the decode wrapper takes one query of every row: "
                "prefill_plan takes any number, and compact() fills holes"
            )
        indptr, indices, last_page_len, shared = self._shared(layer, num_qo_heads, q_data_type)
        return {"indptr": indptr, "indices": indices, "last_page_len": last_page_len, "head_dim": shared.pop("dim"), **shared}

    def prefill_plan(self, layer: int, num_qo_heads: int, q_data_type: str | None = None) -> dict[str, Any]:
        """Return the arguments of the prefill wrapper's ``plan()``: rows of any number of tokens, q is [T, Hq, D].

        Parameters, result and errors as in `decode_plan`.
        """
        indptr, indices, last_page_len, shared = self._shared(layer, num_qo_heads, q_data_type)
        _, host = self._indices(self._reader.storage(layer).group)
        return {
            "qo_indptr": self._reader.arrays(host.cu_seqlens_q[: self._view.num_rows + 1]),
            "paged_kv_indptr": indptr,
            "paged_kv_indices": indices,
            "paged_kv_last_page_len": last_page_len,
            "head_dim_qk": shared.pop("dim"),
            "causal": True,
            **shared,
        }

    def kv(self, layer: int) -> tuple[Any, Any]:
        """Return what ``run()`` reads: see `FlashInfer.kv`."""
        return self._owner.kv(layer)

    def _shared(self, layer: int, num_qo_heads: int, q_data_type: str | None) -> tuple[Any, Any, Any, dict[str, Any]]:
        reader, rows = self._reader, self._view.num_rows
        storage, seen = reader.storage(layer), reader.seen(layer, self._view)
        heads = storage.num_kv_heads
        if isinstance(num_qo_heads, bool) or not isinstance(num_qo_heads, int) or num_qo_heads < 1 or num_qo_heads % heads:
            raise InputError(f"num_qo_heads: {num_qo_heads!r} is not a multiple of the {heads} KV heads of layer {layer}")
        kind = reader.caches.kv(layer).dtype.numpy_name
        form, host = self._indices(storage.group)
        indices = reader.made(form.kv_indices)[: int(host.kv_indptr[rows])]
        shared = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": heads,
            "dim": storage.head_dim,
            "page_size": storage.page_tokens,
            "window_left": seen.left,
            "q_data_type": kind if q_data_type is None else dtype(q_data_type).numpy_name,
            "kv_data_type": kind,
        }
        return reader.arrays(host.kv_indptr[: rows + 1]), indices, reader.arrays(host.last_page_len[:rows]), shared

    def _indices(self, group: int) -> tuple[KvIndices, HostIndices]:
        if group not in self._groups:
            derived = self._reader.batch.derived
            host = derived.csr_on_host(group)  # first: it may refuse
            self._groups[group] = derived.csr(group), host
        return self._groups[group]


def _exchanged(pool: Tensor) -> Tensor:
    """Return a pool [N, P, H, D] as [N, H, P, D]."""
    (pages, tokens, heads, dim), (page, token, head, one) = pool.shape, pool.strides
    offset = pool.address - pool._memory.address
    shape, strides = (pages, heads, tokens, dim), (page, head, token, one)
    return Tensor(pool._memory, pool.device, pool.dtype, shape, offset_nbytes=offset, strides=strides)
