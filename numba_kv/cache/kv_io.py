"""KVIO: K and V of tokens into and out of a model's pools, and pages within them.

Knows layers, tables and which launches are bound. Does not know who owns a page: slots and tables come from the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from numba_kv.cache.hybrid import HybridCacheManager
from numba_kv.cache.kv_launch import RowLaunch, Shape
from numba_kv.cache.kv_operands import bind_rows, check_aligned, dense, unowned
from numba_kv.cache.kv_pages import PageCopies
from numba_kv.cache.kv_rotation import HeadNorm, bind_rotation, rotation_of
from numba_kv.cache.kv_scales import KVScales
from numba_kv.device import Tensor
from numba_kv.device.guard import CallGuard
from numba_kv.device.interop import as_tensor
from numba_kv.device.unique import Unique
from numba_kv.dtypes import DType, dtype
from numba_kv.errors import InputError, InteropError, ShapeError
from numba_kv.geometry import RESERVED_PAGES
from numba_kv.kernels.kv_read import find_slots

if TYPE_CHECKING:
    from numba_kv.device import Stream

__all__ = ["KVIO"]

#: Bound launches that are kept: every layer of a large model with a few arrays each.
_MAX_LAUNCHES = 512
_INT32, _INT64 = dtype("int32"), dtype("int64")


class _Step(Protocol):
    """What is read of a step: a StepView."""

    num_tokens: int

    @property
    def slot_mapping(self) -> tuple[Tensor, ...]:
        """Slots of each group: int64 [T]."""

    @property
    def positions(self) -> Tensor:
        """Position of each token: int32 [T]."""


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
        self._launches: OrderedDict[tuple[Any, ...], RowLaunch] = OrderedDict()
        self._scales = KVScales(device, caches.kv_cache)
        self._pages = PageCopies(device, caches.kv_cache)
        rows = caches.step_buffers.plan.config.max_batch_size
        self._every_row = device.tensor((rows,), _INT32)
        self._every_row.fill_from(np.arange(rows, dtype=np.int32))
        self._from_start = device.tensor((rows,), _INT32)
        self._found = device.tensor((0,), _INT64)

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
            self._own(layer)
            self._scales.set(self._caches.attention_index(layer), k_scale, v_scale)

    def write(self, layer: int, k: Any, v: Any, view: _Step, *, stream: object | None = None) -> None:
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
            group = self._caches.storage(layer).group
            self._check_step(view)
            try:
                slots, tokens = view.slot_mapping[group], view.num_tokens
            except (AttributeError, IndexError):
                raise InputError(f"view: {view!r} is not a step of this model; Batch.step returns one") from None
            self._move(layer, k, v, slots, tokens, True, stream)

    def write_rotated(
        self,
        layer: int,
        q: Any,
        k: Any,
        v: Any,
        view: _Step,
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
        with self._guard:
            storage, pool = self._caches.storage(layer), self._caches.kv(layer)
            self._check_step(view)
            try:
                slots, tokens, rows = view.slot_mapping[storage.group], view.num_tokens, view.positions
            except (AttributeError, IndexError):
                raise InputError(f"view: {view!r} is not a step of this model; Batch.step returns one") from None
            where: Stream = self._device.stream if stream is None else self._device.as_capturing_stream(stream)
            norm = HeadNorm() if norm is None else norm
            if not isinstance(norm, HeadNorm):
                raise InputError(f"norm: {type(norm).__name__} is not a HeadNorm")
            positions, q_out = rows if positions is None else positions, q if q_out is None else q_out
            given = {"q": q, "k": k, "v": v, "q_out": q_out, "k_out": k_out, "table": table, "positions": positions}
            given |= {"norm.q": norm.q, "norm.k": norm.k}
            places = [
                None if value is None else _place(self._tensor(value, name, not name.endswith("_out")))
                for name, value in given.items()
            ]
            key = ("rotate", layer, bool(interleaved), norm.bits(), slots.address, *places)
            bound = self._launches.get(key)
            if bound is None:
                if k is not None or v is not None:
                    self._own(layer)
                elif storage.owner == self._caches.attention_index(layer):
                    raise InputError(f"k, v: None given, but layer {layer} has K and V of its own")
                call = rotation_of(self._device, pool.shape, given, slots, bool(interleaved))
                factors = None if call.k is None else self._factors(layer, call.k.dtype, True)
                bound = self._keep(key, bind_rotation(pool, call, factors, norm.bits()))
            else:
                self._launches.move_to_end(key)
            self._run(bound, tokens, where)

    def write_slots(self, layer: int, k: Any, v: Any, slots: Any, *, stream: object | None = None) -> None:
        """Write tokens to slots, int64 [T] on the device; those outside of the pool's usable pages are dropped.

        No slot may be there twice. Raises as `write` does.
        """
        with self._guard:
            found = self._slots(slots)
            self._move(layer, k, v, found, found.size, True, stream)

    def gather_slots(self, layer: int, k: Any, v: Any, slots: Any, *, stream: object | None = None) -> None:
        """Read tokens of slots, int64 [T] on the device, to `k` and `v`; zeros for slots outside of the pool's usable pages.

        `slots` may have more axes, as carry slots do; the tokens follow each other. Raises as `write` does.
        """
        with self._guard:
            found = self._slots(slots)
            self._move(layer, k, v, found, found.size, False, stream)

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
            tokens = self._find(layer, k, lengths, rows, starts, low)
            self._move(layer, k, v, self._found, tokens, False, None)

    def scatter(self, layer: int, k: Any, v: Any, lengths: Any, *, rows: Any = None, starts: Any = None, low: int = 0) -> None:
        """Write dense arrays to neighbouring positions of rows: the reverse of `gather`, with its arguments.

        What `gather` would read as zeros is left out. No two rows may name the same positions.
        """
        with self._guard:
            self._own(layer)
            tokens = self._find(layer, k, lengths, rows, starts, low)
            self._move(layer, k, v, self._found, tokens, True, None)

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
        self._scales.close()
        for tensor in (self._every_row, self._from_start, self._found):
            tensor._memory.close(self._device.stream)

    def _check_step(self, view: object) -> None:
        """Refuse the step of another model; what is no StepView, but has its arrays, is taken at its word."""
        if getattr(view, "_buffers", self._caches.step_buffers) is not self._caches.step_buffers:
            raise InputError(f"view: {view!r} is not a step of this model; Batch.step returns one")

    def _own(self, layer: int) -> None:
        owner = self._caches.storage(layer).owner
        if owner != self._caches.attention_index(layer):
            raise InputError(f"layer: {layer} borrows K and V of attention layer {owner}, and writes none")

    def _factors(self, layer: int, moved: DType, write: bool) -> Tensor | None:
        return self._scales.factors(self._caches.attention_index(layer), moved, write)

    def _slots(self, slots: Any) -> Tensor:
        tensor = as_tensor(self._device, slots, "slots")
        if tensor.dtype is not _INT64 or not tensor.is_contiguous:
            raise ShapeError(f"slots: {tensor.dtype} with strides {list(tensor.strides)} given, dense int64 wanted")
        check_aligned(tensor, "slots")
        return _reshaped(unowned(tensor), (tensor.size,))

    def _move(self, layer: int, k: Any, v: Any, slots: Tensor, tokens: int, write: bool, stream: object | None) -> None:
        """Enqueue the write or the read of the first `tokens` tokens."""
        device = self._device
        pool = self._caches.kv(layer)  # first: it knows whether there are pools and such a layer
        where: Stream = device.stream if stream is None else device.as_capturing_stream(stream)
        k_tensor, v_tensor = self._tensor(k, "k", write), self._tensor(v, "v", write)
        key = (write, layer, *_place(k_tensor), *_place(v_tensor), slots.address, slots.size)
        bound = self._launches.get(key)
        if bound is None:
            if write:
                self._own(layer)
            heads, dim = pool.shape[3:]
            ks, vs = dense(device, k, "k", heads, dim), dense(device, v, "v", heads, dim)
            factors = self._factors(layer, ks.dtype, write)
            bound = self._keep(key, bind_rows(pool, ks, vs, slots, factors, write=write))
        else:
            self._launches.move_to_end(key)
        self._run(bound, tokens, where)

    @staticmethod
    def _run(bound: RowLaunch, tokens: int, where: Stream) -> None:
        if bound.tokens < tokens:
            raise ShapeError(f"k, v: {bound.tokens} tokens given, {tokens} wanted")
        bound.run(tokens, where)

    def _tensor(self, value: Any, name: str, read: bool) -> Tensor:
        tensor = as_tensor(self._device, value, name)
        tensor.check_open()
        if not read and value is not tensor and getattr(getattr(value, "flags", None), "writeable", True) is False:
            raise InteropError(f"{name}: the array is read-only, and is to be written")
        return tensor

    def _find(self, layer: int, k: Any, lengths: Any, rows: Any, starts: Any, low: int) -> int:
        """Enqueue the search for the slots of [B, n] positions, and return how many they are."""
        device, storage = self._device, self._caches.storage(layer)
        shape = as_tensor(device, k, "k").shape
        if len(shape) != 4:
            raise ShapeError(f"k: {len(shape)} axes given, [B, n, H, D] wanted")
        count = shape[0]
        if rows is None and count > self._every_row.size:
            raise ShapeError(f"k: {count} rows given, but there are {self._every_row.size}; `rows` can name one more than once")
        if starts is None:
            self._from_start = self._grown(self._from_start, count)
        given = {
            "lengths": as_tensor(device, lengths, "lengths"),
            "rows": self._every_row[:count] if rows is None else as_tensor(device, rows, "rows"),
            "starts": self._from_start[:count] if starts is None else as_tensor(device, starts, "starts"),
        }
        for name, tensor in given.items():
            tensor.check_open()
            if tensor.dtype is not _INT32 or tensor.ndim != 1 or tensor.size < count or not tensor.is_contiguous:
                raise ShapeError(f"{name}: {tensor!r} given, dense int32 of at least {count} elements wanted")
            check_aligned(tensor, name)
        first = _integer("low", low)
        tokens = count * shape[1]
        self._found = self._grown(self._found, tokens)
        key = ("find", storage.group, shape[:2], self._found.address, *(tensor.address for tensor in given.values()))
        bound = self._launches.get(key)
        if bound is None:
            values: dict[str, Tensor | int] = {
                "slots": _reshaped(self._found, shape[:2]),
                "page_table": self._caches.step_buffers.page_tables[storage.group],
                "low": 0,
                "shift": storage.page_tokens.bit_length() - 1,
                "num_pages": storage.num_pages - RESERVED_PAGES,
            }
            lent = {name: unowned(tensor) for name, tensor in given.items()}
            bound = self._keep(key, RowLaunch(find_slots, device, {**lent, **values}, 1, tokens, Shape(0, 1, 128)))
        bound.run(tokens, device.stream, low=first)
        return tokens

    def _grown(self, tensor: Tensor, size: int) -> Tensor:
        """Return a tensor of our own that has room for `size` elements: the one given, or a larger one in its place."""
        if tensor.size >= size:
            return tensor
        larger = self._device.tensor((size,), tensor.dtype)
        for key in [key for key in self._launches if tensor.address in key]:
            del self._launches[key]
        tensor._memory.close(self._device.stream)
        return larger

    def _keep(self, key: tuple[Any, ...], launch: RowLaunch) -> RowLaunch:
        """Keep a launch, instead of the one that was not used for longest if they are many."""
        self._launches[key] = launch
        if len(self._launches) > _MAX_LAUNCHES:
            self._launches.popitem(last=False)
        return launch


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    """Return all that a bound launch depends on."""
    return tensor.address, tensor.shape, tensor.strides, tensor.dtype.name


def _reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    memory = tensor._memory
    return Tensor(memory, tensor.device, tensor.dtype, shape, offset_nbytes=tensor.address - memory.address)


def _integer(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{name}: {value!r} is not an integer") from None
