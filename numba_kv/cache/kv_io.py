"""KVIO: K and V of tokens into and out of a model's pools, and pages within them.

Knows layers, tables and which launches are bound. Does not know who owns a page: slots and tables come from the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numba_kv.cache.hybrid import HybridCacheManager
from numba_kv.cache.kv_bound import BoundCall
from numba_kv.cache.kv_calls import Call, LayerCalls, Step
from numba_kv.cache.kv_launch import RowLaunch
from numba_kv.cache.kv_operands import reshaped
from numba_kv.cache.kv_pages import PageCopies
from numba_kv.cache.kv_rotation import HeadNorm
from numba_kv.cache.launch_cache import LaunchCache
from numba_kv.cache.slot_search import SlotSearch
from numba_kv.device import Tensor
from numba_kv.device.guard import CallGuard
from numba_kv.device.interop import as_tensor
from numba_kv.device.unique import Unique
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError

if TYPE_CHECKING:
    from numba_kv.device import Stream

__all__ = ["KVIO"]

_FLOAT32 = dtype("float32")


class KVIO(Unique):
    """Writes, reads and copies K and V of one model. Borrows its pools and tables.

    Arrays of K and V are ``[T, H, D]``, or ``[B, n, H, D]`` whose rows follow each other: tensors, or arrays of other libraries
    where the pools are (`numba_kv.device.interop.as_tensor`). Heads and tokens may lie apart (K and V packed with Q), channels
    may not. Elements are float32, float16 or bfloat16, converted as they move; equal types move bit by bit. A float8 pool wants
    `set_scales` first, unless float8 itself is moved. A foreign array is used without being kept: hold it until the stream has
    passed the call.

    Parameters
    ----------
    caches : HybridCacheManager
        The model's caches, ``resources.cache_managers[0]``. Close the object, or leave its ``with`` block, before they close.

    Raises
    ------
    InputError
        If `caches` is something else.
    StateError
        From every call after `close`, or after the resources were closed.

    Stream: every call enqueues on the device's own stream, or on the one that it is given. Cost: one launch a call, bound once
    for its layer and addresses; `gather` and `scatter` two.
    """

    def __init__(self, caches: HybridCacheManager) -> None:
        if not isinstance(caches, HybridCacheManager):
            raise InputError(f"caches: {type(caches).__name__} is no HybridCacheManager; pass resources.cache_managers[0]")
        caches.kv_cache.kv(0)  # raises if the pools are gone
        self._caches = caches
        self._device = device = caches.device
        self._guard = CallGuard(device, "KVIO", poisons=False)
        self._launches: LaunchCache[RowLaunch] = LaunchCache()
        self._calls = LayerCalls(caches)
        self._pages = PageCopies(device, caches.kv_cache)
        self._search = SlotSearch(caches, self._launches)

    @property
    def caches(self) -> HybridCacheManager:
        """Whose pools it reads and writes."""
        return self._caches

    def scales(self, layer: int) -> Tensor | None:
        """Return what a layer's stored K and V are multiplied by: float32 [2 * H] of a float8 pool, else None.

        Raises
        ------
        StateError
            If the pool is float8 and has no scales yet.
        """
        with self._guard.host:
            return self._calls.factors(layer, _FLOAT32, False)

    def set_scales(self, layer: int, k_scale: object, v_scale: object) -> None:
        """Set the scales of a float8 layer: stored x scale is the value.

        Parameters
        ----------
        layer : int
            Decoder layer with attention; it must own its pool.
        k_scale, v_scale : float or array of H floats
            For the layer, or for each head; on the host.

        Raises
        ------
        InputError
            If the pool is not float8, or a scale or its inverse is zero, negative or not finite in float32.

        Stream: waits.
        """
        with self._guard:
            self._calls.check_own(layer)
            self._calls.scales.set(layer, k_scale, v_scale)

    def write(self, layer: int, k: Any, v: Any, view: Step, *, stream: object | None = None) -> None:
        """Write K and V of a step's tokens to where the step put them; tokens of slot -1 are dropped.

        Parameters
        ----------
        layer : int
            Decoder layer with attention; one that borrows K and V writes none.
        k, v : array [at least view.num_tokens, H, D]
            In the step's order. Rows behind the step's tokens are not read.
        view : StepView
            Of the current step.
        stream : optional
            The device's own, or one that is being captured.

        Raises
        ------
        InputError, ShapeError, InteropError
            If an argument does not fit; nothing was enqueued.
        StateError
            If a float8 pool has no scales.
        """
        with self._guard:
            self._run(self._calls.moved_step(layer, k, v, view), stream)

    def write_rotated(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        view: Step,
        table: Any,
        *,
        positions: Any = None,
        interleaved: bool = False,
        q_out: Any = None,
        k_out: Any = None,
        norm: HeadNorm | None = None,
        stream: object | None = None,
    ) -> None:
        """Rotate Q and K of a step's tokens, and write K and V to where the step put them: one pass over the data.

        Arithmetic is float32, each operation rounded by itself, the result once to its type: the same bits on every target.

        Parameters
        ----------
        layer : int
            Decoder layer with attention. For one that borrows K and V, `k` and `v` are None and only Q is rotated.
        q : array [at least view.num_tokens, Hq, D], optional
            Rotated in place, or to `q_out`.
        k, v : array [at least view.num_tokens, H, D]
            Of q's type. Parts of one array ``[T, Hq + 2H, D]`` are fine, as in `write`.
        view : StepView
            Of the current step. Tokens of slot -1 are rotated too, and written nowhere in the pool.
        table : array float32 [S, R] or [1, S, R], optional
            Cosines of all pairs, then their sines, as in `RopeTable.tensor`; R up to D, the channels behind stay as they are.
            None rotates nothing.
        positions : array int32 [at least view.num_tokens], optional
            Row of the table for each token; default ``view.positions``. A row outside of the table: K and V are not written,
            and zeros go to where Q and `k_out` go. With rows that were gathered for the tokens, 0, 1, 2, ...
        interleaved : bool
            Neighbouring channels are a pair (GPT-J); default the halves of the R channels are (Llama).
        q_out, k_out : array, optional
            As q and k, which they may be. Default: Q in place, and K as it becomes goes to the pool alone.
        norm : HeadNorm, optional
            Norm of the heads before the rotation.
        stream : optional
            The device's own, or one that is being captured.

        Raises
        ------
        InputError, ShapeError, InteropError, StateError
            As `write` does, or if what is written lies over what is read; nothing was enqueued.
        """
        arrays = {"q": q, "k": k, "v": v, "q_out": q_out, "k_out": k_out}
        with self._guard:
            self._run(self._calls.rotated(layer, arrays, view, table, positions, interleaved, norm), stream)

    def write_slots(self, layer: int, k: Any, v: Any, slots: Any, *, stream: object | None = None) -> None:
        """Write tokens to slots, int64 [T] on the device; those outside of the pool's usable pages are dropped.

        No slot may be there twice. Raises as `write` does.
        """
        with self._guard:
            self._run(self._calls.moved_slots(layer, k, v, slots, write=True), stream)

    def gather_slots(self, layer: int, k: Any, v: Any, slots: Any, *, stream: object | None = None) -> None:
        """Read tokens of slots, int64 [T] on the device, to `k` and `v`; zeros for slots outside of the pool's usable pages.

        `slots` may have more axes, as carry slots do; the tokens follow each other. Raises as `write` does.
        """
        with self._guard:
            self._run(self._calls.moved_slots(layer, k, v, slots, write=False), stream)

    def bind_write(self, layer: int, k: Any, v: Any, view: Step) -> BoundCall:
        """Return `write` bound to these arrays and to the slots of `view`'s model, for `view`'s number of tokens at first.

        Raises as `write` does. Cost: compiles on first use. Enqueues nothing.
        """
        with self._guard:
            return self._bound(self._calls.moved_step(layer, k, v, view))

    def bind_write_rotated(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        view: Step,
        table: Any,
        *,
        positions: Any = None,
        interleaved: bool = False,
        q_out: Any = None,
        k_out: Any = None,
        norm: HeadNorm | None = None,
    ) -> BoundCall:
        """Return `write_rotated` bound to these arrays; see `bind_write`."""
        arrays = {"q": q, "k": k, "v": v, "q_out": q_out, "k_out": k_out}
        with self._guard:
            return self._bound(self._calls.rotated(layer, arrays, view, table, positions, interleaved, norm))

    def bind_write_slots(self, layer: int, k: Any, v: Any, slots: Any) -> BoundCall:
        """Return `write_slots` bound to these arrays; see `bind_write`."""
        with self._guard:
            return self._bound(self._calls.moved_slots(layer, k, v, slots, write=True))

    def bind_gather_slots(self, layer: int, k: Any, v: Any, slots: Any) -> BoundCall:
        """Return `gather_slots` bound to these arrays; see `bind_write`."""
        with self._guard:
            return self._bound(self._calls.moved_slots(layer, k, v, slots, write=False))

    def gather(self, layer: int, k: Any, v: Any, lengths: Any, *, rows: Any = None, starts: Any = None, low: int = 0) -> None:
        """Read neighbouring positions of rows to dense arrays; zeros where no page is mapped or the row is not that long.

        Parameters
        ----------
        layer : int
            Decoder layer with attention.
        k, v : array [B, n, H, D]
            Written: column i of row b is position ``starts[b] + low + i``.
        lengths : array int32 [B]
            Length of each row, on the device.
        rows : array int32 [B], optional
            Row of the page table of each row; default 0..B-1. Those outside of the table are zeros.
        starts : array int32 [B], optional
            On the device; default 0.
        low : int, optional
            First position, or what is added to `starts`.

        Raises
        ------
        InputError, ShapeError, InteropError, StateError
            If an argument does not fit; no K or V was moved.
        """
        with self._guard:
            found = self._find_rows(layer, k, lengths, rows, starts, low)
            self._run(self._calls.moved_slots(layer, k, v, found, write=False), None)

    def gather_ragged(
        self, layer: int, k: Any, v: Any, cu_seqlens: Any, lengths: Any, *, rows: Any = None, starts: Any = None, low: int = 0
    ) -> None:
        """Read neighbouring positions of rows to packed arrays, one row behind the other; zeros as in `gather`.

        Of a window, positions are mapped from its `begin` on: give `starts` to leave the others out, else they are zeros.

        Parameters
        ----------
        layer, lengths, rows, starts, low
            As in `gather`.
        k, v : array [T, H, D]
            Written: token t of row b, ``cu_seqlens[b] <= t < cu_seqlens[b + 1]``, is its position
            ``starts[b] + low + t - cu_seqlens[b]``. Tokens behind those of the last row become zeros.
        cu_seqlens : array int32 [B + 1]
            On the device: 0, then the tokens of all rows up to each; never decreasing.

        Raises as `gather` does.
        """
        with self._guard:
            tokens = self._axes_of(k, "[T, H, D]")[0]
            slots = self._search.own(tokens)
            self._search.find(layer, slots, lengths, rows, starts, low, cu_seqlens=cu_seqlens)
            self._run(self._calls.moved_slots(layer, k, v, slots, write=False), None)

    def find_slots(
        self,
        layer: int,
        slots: Any,
        lengths: Any,
        *,
        cu_seqlens: Any = None,
        rows: Any = None,
        starts: Any = None,
        low: int = 0,
        stream: object | None = None,
    ) -> None:
        """Find what `gather` or, with `cu_seqlens`, `gather_ragged` reads, once for all layers of a group.

        The slots are for `gather_slots` and `write_slots`, on every layer that has the group of this one.

        Parameters
        ----------
        layer, lengths, rows, starts, low
            As in `gather`.
        slots : array int64 [B, n], with `cu_seqlens` [T]
            Written; -1 where `gather` writes zeros. Dense.
        cu_seqlens : array int32 [B + 1], optional
            As in `gather_ragged`.
        stream : optional
            The device's own, or one that is being captured.

        Raises
        ------
        InputError, ShapeError, InteropError, StateError
            If an argument does not fit; nothing was enqueued.

        Cost: one launch.
        """
        with self._guard:
            where = None if stream is None else self._device.as_capturing_stream(stream)
            found = self._calls.slots(slots, written=True)
            axes = 2 if cu_seqlens is None else 1
            if found.ndim != axes:
                raise ShapeError(f"slots: {found.ndim} axes given, {'[B, n]' if axes == 2 else '[T]'} wanted")
            self._search.find(layer, found, lengths, rows, starts, low, cu_seqlens=cu_seqlens, stream=where)

    def scatter(self, layer: int, k: Any, v: Any, lengths: Any, *, rows: Any = None, starts: Any = None, low: int = 0) -> None:
        """Write dense arrays to neighbouring positions of rows: the reverse of `gather`, with its arguments.

        What `gather` would read as zeros is left out. No two rows may name the same positions.
        """
        with self._guard:
            self._calls.check_own(layer)
            found = self._find_rows(layer, k, lengths, rows, starts, low)
            self._run(self._calls.moved_slots(layer, k, v, found, write=True), None)

    def copy_pages(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages of a window group in all its layers.

        Parameters
        ----------
        group : int
            g of the plan.
        pairs : sequence of (source, target), or integer array [n, 2]
            Page ids on the host; an array is checked faster. The null page can be a source.

        Raises
        ------
        InputError
            If there is no such group or page, a target is there twice, or a target is a source too.

        Cost: one copy to the device and one launch for every slab and 1,024 pairs.
        """
        with self._guard:
            self._pages.copy(group, pairs)

    def __enter__(self) -> KVIO:
        self._guard.check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the launches and give the arrays back; a second call does nothing. Stream: waits for copies in flight."""
        self._guard.close()
        self._launches.clear()
        self._pages.close()
        self._calls.scales.close()
        self._search.close()

    def _run(self, call: Call, stream: object | None) -> None:
        """Enqueue a call; its launch stays bound for the next one over the same arrays."""
        where: Stream = self._device.stream if stream is None else self._device.as_capturing_stream(stream)
        launch = self._launches.get(call.key) or self._launches.keep(call.key, call.bind())
        launch.check(call.tokens)
        launch.run(call.tokens, where)

    def _bound(self, call: Call) -> BoundCall:
        return BoundCall(self._device, self._guard, call)

    def _find_rows(self, layer: int, k: Any, lengths: Any, rows: Any, starts: Any, low: int) -> Tensor:
        """Enqueue the search for the slots of dense K [B, n, H, D]."""
        count, columns, *_ = self._axes_of(k, "[B, n, H, D]")
        slots = reshaped(self._search.own(count * columns), (count, columns))
        return self._search.find(layer, slots, lengths, rows, starts, low, named="k")

    def _axes_of(self, k: Any, wanted: str) -> tuple[int, ...]:
        shape = as_tensor(self._device, k, "k").shape
        if len(shape) != wanted.count(",") + 1:
            raise ShapeError(f"k: {len(shape)} axes given, {wanted} wanted")
        return shape
