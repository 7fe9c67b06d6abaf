"""PagedAttention: attention that reads a model's pages, for prefill and decode in one call.

The way to run a model without another attention library, and what other libraries are compared with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from numba_kv.cache.attention_bound import BoundAttention
from numba_kv.cache.attention_launch import AttentionMemory, LayerCut
from numba_kv.cache.attention_operands import (
    Bound,
    StepKV,
    bind_attention,
    checked_number,
    checked_sinks,
    checked_step_kv,
    rows_of,
)
from numba_kv.cache.hybrid import HybridCacheManager
from numba_kv.cache.kv_io import KVIO
from numba_kv.cache.launch_cache import LaunchCache, place
from numba_kv.device.guard import CallGuard
from numba_kv.device.interop import as_tensor
from numba_kv.device.unique import Unique
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError, StateError

if TYPE_CHECKING:
    from numba_kv.device import Stream, Tensor

__all__ = ["PagedAttention"]

_FLOAT8 = dtype("float8_e4m3")


class _Step(Protocol):
    """What is read of a step: a StepView."""

    num_tokens: int
    max_query_tokens: int
    kv_len_upper: int
    is_long: bool

    @property
    def seq_lens(self) -> Tensor:
        """Length of each row after the step: int32 [B]."""

    @property
    def cu_seqlens_q(self) -> Tensor:
        """First token of each row: int32 [B + 1]."""

    @property
    def carry_slots(self) -> tuple[Tensor | None, ...]:
        """Slots of the tokens before a long step: int64 [B, W - 1] a window group."""


class PagedAttention(Unique):
    """Attention over the pages of one model. Borrows its pools, tables and scales.

    Queries and outputs are ``[T, Hq, D]`` in the step's order, float32, float16 or bfloat16, heads in groups of ``Hq / H`` that
    share a KV head; tokens and heads may lie apart (Q packed with K and V), channels may not. The softmax is float32. What a
    query sees is the layer's business: all keys up to its own, a sliding window, or its chunk; keys of unmapped pages do not
    count. Lengths, rows and tables are read on the device, so a step may be driven from there. A token that the device did not
    append (its slot is -1) gets zeros; rows of `out` behind the step's tokens are left alone.

    Parameters
    ----------
    caches : HybridCacheManager
        The model's caches, ``resources.cache_managers[0]``. Close the object, or leave its ``with`` block, before they close.
    io : KVIO, optional
        Holds the scales of float8 pools; needed for those, and for `gather_carry`.

    Raises
    ------
    InputError
        If `caches` or `io` is something else.
    StateError
        From every call after `close`, or after the resources were closed.

    Notes
    -----
    *Long steps.* When a row appends more than `max_step_tokens`, a window's ring cannot hold all that its queries see. Then a
    model calls, for layers that `needs_step_kv` names and in this order::

        attention.gather_carry(layer, carry_k, carry_v, view)   # the tokens before the step, before they are overwritten
        io.write(layer, k, v, view)
        attention.attend_long(layer, q, k, v, carry_k, carry_v, out, view)

    Layers that borrow K and V take their donor's `k`, `v`, `carry_k` and `carry_v`.

    Stream: every call enqueues on the device's own stream, or on the one that it is given. Cost: one launch a call, bound once
    for its layer and addresses; two where few queries see many keys.
    """

    def __init__(self, caches: HybridCacheManager, io: KVIO | None = None) -> None:
        if not isinstance(caches, HybridCacheManager):
            raise InputError(f"caches: {type(caches).__name__} is no HybridCacheManager; pass resources.cache_managers[0]")
        if io is not None and (not isinstance(io, KVIO) or io.caches is not caches):
            raise InputError(f"io: {io!r} is not a KVIO of these caches; KVIO(caches) makes one")
        caches.kv_cache.kv(0)  # raises if the pools are gone
        self._caches = caches
        self._io = io
        self._device = caches.device
        self._buffers = caches.step_buffers
        self._guard = CallGuard(self._device, "PagedAttention", poisons=False)
        self._launches: LaunchCache[Bound] = LaunchCache()
        self._memory = AttentionMemory(self._device, [layer.head_dim for layer in caches.plan.config.layers])

    def needs_step_kv(self, layer: int, view: _Step) -> bool:
        """Return whether queries of this step see keys that are not in pages: `attend_long` is wanted then. Host only."""
        self._guard.check_open()
        self._check_view(view)
        return view.is_long and not self._keeps_all(layer)

    def gather_carry(self, layer: int, carry_k: Any, carry_v: Any, view: _Step, *, stream: object | None = None) -> None:
        """Read the tokens that a long step's first queries see, before the step's K and V are written over them.

        Parameters
        ----------
        layer : int
            Decoder layer with attention for which `needs_step_kv` is true.
        carry_k, carry_v : array [B, W - 1, H, D]
            Written; W - 1 is the width of ``view.carry_slots``. Without any (a window of one token) nothing is done.
        view : StepView
            Of the current step.
        stream : optional
            The device's own, or one that is being captured.

        Raises
        ------
        InputError, ShapeError, InteropError, StateError
            As `KVIO.gather_slots`, or if there is no `io` or the layer does not need it.
        """
        with self._guard:
            if self._io is None:
                raise StateError("gather_carry reads through KVIO: PagedAttention(caches, io)")
            if not self.needs_step_kv(layer, view):
                raise InputError(f"layer: {layer} finds all keys of this step in pages; attend reads them there")
            slots = view.carry_slots[self._caches.storage(layer).group]
            if slots is not None and slots.size:
                self._io.gather_slots(layer, carry_k, carry_v, slots, stream=stream)

    def attend(
        self,
        layer: int,
        q: Any,
        out: Any,
        view: _Step,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Any = None,
        stream: object | None = None,
    ) -> None:
        """Write the attention of a step's tokens over the pages, in which the step's own K and V already are.

        Parameters
        ----------
        layer : int
            Decoder layer with attention; one that borrows K and V reads its donor's.
        q : array [at least view.num_tokens, Hq, D]
            Queries.
        out : array [at least view.num_tokens, Hq, D]
            Written. Its element type may be another than that of `q`.
        view : StepView
            Of the current step.
        scale : float, optional
            What products are multiplied by; default ``D ** -0.5``.
        soft_cap : float, optional
            Bends scaled products: ``soft_cap * tanh(product / soft_cap)``.
        sinks : array float32 [Hq], optional
            A logit for each query head that takes its share of the weights and has no V.
        stream : optional
            The device's own, or one that is being captured.

        Raises
        ------
        InputError, ShapeError, InteropError
            If an argument does not fit, or a long step's keys are not all in pages (`attend_long`); nothing was enqueued.
        StateError
            If a float8 pool has no scales.
        """
        with self._guard:
            if self.needs_step_kv(layer, view):
                raise InputError(self._why_long(layer))
            self._attend(layer, q, out, view, scale, soft_cap, sinks, None, stream)

    def bind_attend(
        self,
        layer: int,
        q: Any,
        out: Any,
        *,
        view: _Step | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Any = None,
    ) -> BoundAttention:
        """Return `attend` bound to these arrays and numbers: a call that takes the view of a step.

        Parameters
        ----------
        layer, q, out, scale, soft_cap, sinks
            As in `attend`.
        view : StepView, optional
            One of those that it will be called with, where their tokens lie in a layout of their own
            (`SpeculativeBatch.catch_up`). Default: those of `Batch.step`.

        Raises as `attend` does. Cost: compiles on first use. Enqueues nothing.
        """
        with self._guard:
            if view is not None:
                self._check_view(view)
            starts = self._buffers.cu_seqlens_q if view is None else view.cu_seqlens_q
            tensors = [as_tensor(self._device, q, "q"), as_tensor(self._device, out, "out")]
            if sinks is not None:
                tensors.append(as_tensor(self._device, sinks, "sinks"))
            pool, factors = self._caches.by_token(layer), self._factors(layer)
            bound = self._bind(layer, pool, q, out, starts, sinks, None)
            return BoundAttention(
                self._guard,
                self._buffers,
                starts,
                bound,
                self._cut(layer, bound),
                self._numbers(layer, scale, soft_cap),
                None if self._keeps_all(layer) else self._why_long(layer),
                [pool, *tensors, *([] if factors is None else [factors])],
            )

    def attend_long(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        carry_k: Any,
        carry_v: Any,
        out: Any,
        view: _Step,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Any = None,
        stream: object | None = None,
    ) -> None:
        """Write the attention of a step's tokens; keys of rows whose step is long are taken from `k`, `v` and the carry.

        Other rows of the step read pages as in `attend`; so do all rows where `needs_step_kv` is false, and `k`, `v` and the
        carry are not looked at then.

        Parameters
        ----------
        layer, q, out, view, scale, soft_cap, sinks, stream
            As in `attend`.
        k, v : array [at least view.num_tokens, H, D]
            What was written: the step's own. float32, float16 or bfloat16; a float8 pool's rounding is not in it.
        carry_k, carry_v : array [B, W - 1, H, D]
            From `gather_carry`, of the same element type; anything for a window of one token.

        Raises
        ------
        InputError, ShapeError, InteropError, StateError
            As `attend`.
        """
        with self._guard:
            given = (k, v, carry_k, carry_v) if self.needs_step_kv(layer, view) else None
            self._attend(layer, q, out, view, scale, soft_cap, sinks, given, stream)

    def __enter__(self) -> PagedAttention:
        self._guard.check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the launches and give the arrays back; a second call does nothing. Stream: enqueues."""
        self._guard.close()
        self._launches.clear()
        self._memory.close()

    def _attend(
        self,
        layer: int,
        q: Any,
        out: Any,
        view: _Step,
        scale: float | None,
        soft_cap: float | None,
        sinks: Any,
        step_kv: tuple[Any, Any, Any, Any] | None,
        stream: object | None,
    ) -> None:
        device, caches = self._device, self._caches
        pool, storage = caches.by_token(layer), caches.storage(layer)
        where: Stream = device.stream if stream is None else device.as_capturing_stream(stream)
        product, cap = self._numbers(layer, scale, soft_cap)
        tensors = [as_tensor(device, q, "q"), as_tensor(device, out, "out")]
        if sinks is not None:
            tensors.append(as_tensor(device, sinks, "sinks"))
        if step_kv is not None:
            tensors += [as_tensor(device, a, n) for a, n in zip(step_kv, _names(storage.window.tokens), strict=False)]
        for tensor in tensors:
            tensor.check_open()
        starts = view.cu_seqlens_q
        key = (layer, sinks is None, starts.address, *map(place, tensors))
        bound = self._launches.get(key)
        if bound is None:
            bound = self._launches.keep(key, self._bind(layer, pool, q, out, starts, sinks, step_kv))
        else:
            self._factors(layer)
        if bound.tokens < view.num_tokens:
            names = "q, out" if step_kv is None else "q, out, k, v"
            raise ShapeError(f"{names}: {bound.tokens} tokens given, {view.num_tokens} wanted")
        longest = caches.plan.config.max_kv_cache_capacity if stream is not None else view.kv_len_upper
        cut = self._cut(layer, bound).of(view.num_tokens, longest, view.max_query_tokens == 1)
        bound.run(cut, where, product, cap)

    def _keeps_all(self, layer: int) -> bool:
        """Return whether queries of every step find their keys in pages."""
        group = self._caches.plan.groups[self._caches.storage(layer).group]
        return group.window.is_full or group.ring >= group.row_pages

    def _why_long(self, layer: int) -> str:
        return (
            f"view: a row appended more than max_step_tokens ({self._caches.plan.config.max_step_tokens}), and layer "
            f"{layer} keeps a window ({self._caches.storage(layer).window}): not all keys are in pages; use attend_long"
        )

    def _numbers(self, layer: int, scale: float | None, soft_cap: float | None) -> tuple[float, float]:
        """Return what products are multiplied by, and the soft cap; 0 for none."""
        dim = self._caches.storage(layer).head_dim
        product = dim**-0.5 if scale is None else checked_number("scale", scale, positive=False)
        return product, 0.0 if soft_cap is None else checked_number("soft_cap", soft_cap, positive=True)

    def _cut(self, layer: int, bound: Bound) -> LayerCut:
        storage = self._caches.storage(layer)
        heads, window = storage.num_kv_heads, storage.window
        most = None if window.is_full else window.tokens
        return LayerCut(self._memory, heads, bound.q_heads // heads, storage.head_dim, most)

    def _bind(
        self, layer: int, pool: Tensor, q: Any, out: Any, starts: Tensor, sinks: Any, step_kv: tuple[Any, Any, Any, Any] | None
    ) -> Bound:
        device, storage = self._device, self._caches.storage(layer)
        heads, dim = storage.num_kv_heads, storage.head_dim
        queries = rows_of(device, q, "q", heads, dim)
        outputs = rows_of(device, out, "out", heads, dim, written=True)
        logits = None if sinks is None else checked_sinks(device, sinks, queries.shape[1])
        dense: StepKV | None = None
        if step_kv is not None:
            rows, carry = self._caches.plan.config.max_batch_size, self._caches.plan.groups[storage.group].carry_width
            dense = checked_step_kv(device, *step_kv, storage, rows, carry)
        factors = self._factors(layer)
        return bind_attention(
            pool, queries, outputs, storage, self._buffers, starts, self._memory, step_kv=dense, factors=factors, sinks=logits
        )

    def _factors(self, layer: int) -> Tensor | None:
        """Return the scales of a float8 pool, or raise if there are none (any more)."""
        if self._caches.kv(layer).dtype is not _FLOAT8:
            return None
        if self._io is None:
            raise StateError(f"layer {layer} is stored as {_FLOAT8}, whose scales are in KVIO: PagedAttention(caches, io)")
        return self._io.scales(layer)

    def _check_view(self, view: _Step) -> None:
        if getattr(view, "seq_lens", None) is not self._buffers.seq_lens:
            raise InputError(f"view: {view!r} is not a step of this model; Batch.step returns one")


def _names(window_tokens: int) -> tuple[str, ...]:
    """Return the names of the arrays that are read: a window of one token has no carry."""
    return ("k", "v", "carry_k", "carry_v") if window_tokens > 1 else ("k", "v")
