"""LayerCalls: what a call on a layer is given becomes tensors, a key, and on demand a bound launch.

Knows layers, steps and scales. Enqueues nothing and keeps nothing but scales: `KVIO` runs a call, or keeps it bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from numba_kv.cache.kv_launch import RowLaunch
from numba_kv.cache.kv_operands import bind_rows, check_aligned, dense, reshaped, unowned
from numba_kv.cache.kv_rotation import HeadNorm, bind_rotation, rotation_of
from numba_kv.cache.kv_scales import KVScales, owner_of
from numba_kv.cache.launch_cache import place
from numba_kv.device import Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import DType, dtype
from numba_kv.errors import InputError, InteropError, ShapeError

if TYPE_CHECKING:
    from numba_kv.cache.hybrid import HybridCacheManager

__all__ = ["Call", "LayerCalls", "Step"]

_INT64 = dtype("int64")


class Step(Protocol):
    """What is read of a step: a StepView."""

    num_tokens: int

    @property
    def slot_mapping(self) -> tuple[Tensor, ...]:
        """Slots of each group: int64 [T]."""

    @property
    def positions(self) -> Tensor:
        """Position of each token: int32 [T]."""


class Call(NamedTuple):
    """One call on a layer; a tuple, because one is made in every call.

    Attributes
    ----------
    key : tuple
        All that a bound launch depends on.
    bind : callable
        Checks the rest and returns the launch; compiles on first use, enqueues nothing.
    pool : Tensor
        The layer's.
    slots : Tensor int64
        Where the tokens go, or come from.
    tokens : int
        How many of them.
    tensors : tuple of Tensor or None
        What the caller gave, kept alive.
    """

    key: tuple[Any, ...]
    bind: Callable[[], RowLaunch]
    pool: Tensor
    slots: Tensor
    tokens: int
    tensors: tuple[Tensor | None, ...]


class LayerCalls:
    """Calls on the layers of one model. Borrows its pools; owns the scales."""

    def __init__(self, caches: HybridCacheManager) -> None:
        self.caches = caches
        self.scales = KVScales(caches)
        self._device = caches.device

    def check_own(self, layer: int) -> None:
        """Refuse a layer that borrows K and V.

        Raises
        ------
        InputError
            Naming the layer that it borrows from.
        """
        if self.caches.attention_index(layer) != self.caches.storage(layer).owner:
            raise InputError(f"layer: {layer} borrows K and V of layer {owner_of(self.caches, layer)}, and writes none")

    def factors(self, layer: int, moved: DType, write: bool) -> Tensor | None:
        """Return what elements of type `moved` are multiplied by on their way; see `KVScales.factors`."""
        return self.scales.factors(layer, moved, write)

    def slots(self, value: Any, *, written: bool = False) -> Tensor:
        """Return slots as a tensor.

        Raises
        ------
        ShapeError, InteropError
            If they are no dense int64 on the device, or read-only and to be written.
        """
        tensor = self._tensor(value, "slots", not written)
        if tensor.dtype is not _INT64 or not tensor.is_contiguous:
            raise ShapeError(f"slots: {tensor.dtype} with strides {list(tensor.strides)} given, dense int64 wanted")
        check_aligned(tensor, "slots")
        return tensor

    def moved_step(self, layer: int, k: Any, v: Any, view: Step) -> Call:
        """Return the write of a step's K and V; raises as `moved`, or if the step is of another model."""
        group = self.caches.storage(layer).group
        slots, tokens, _ = self._arrays_of(view)
        return self.moved(layer, k, v, slots[group], tokens, write=True)

    def moved_slots(self, layer: int, k: Any, v: Any, slots: Any, *, write: bool) -> Call:
        """Return the write of K and V to slots, or the read, of all of them; raises as `moved` and `slots`."""
        found = self.slots(slots)
        return self.moved(layer, k, v, reshaped(found, (found.size,)), found.size, write=write)

    def moved(self, layer: int, k: Any, v: Any, slots: Tensor, tokens: int, *, write: bool) -> Call:
        """Return the write of K and V to slots, or the read.

        Raises
        ------
        InputError, InteropError
            If there is no such layer, or an array is not on the device.
        """
        pool = self.caches.by_token(layer)  # first: it knows whether there are pools and such a layer
        tensors = (self._tensor(k, "k", write), self._tensor(v, "v", write))

        def bind() -> RowLaunch:
            if write:
                self.check_own(layer)
            heads, dim = pool.shape[3:]
            ks, vs = dense(self._device, k, "k", heads, dim), dense(self._device, v, "v", heads, dim)
            return bind_rows(pool, ks, vs, unowned(slots), self.factors(layer, ks.dtype, write), write=write)

        key = (write, layer, *map(place, tensors), slots.address, slots.size)
        return Call(key, bind, pool, slots, tokens, (*tensors, slots))

    def rotated(
        self, layer: int, arrays: dict[str, Any], view: Step, table: Any, positions: Any, interleaved: bool, norm: Any
    ) -> Call:
        """Return the rotation of a step's Q and K, and the write of its K and V; `arrays` are q, k, v, q_out and k_out.

        Raises
        ------
        InputError, InteropError
            If there is no such layer, the view is of another model, or an array is not on the device.
        """
        pool = self.caches.by_token(layer)
        all_slots, tokens, rows = self._arrays_of(view)
        slots = all_slots[self.caches.storage(layer).group]
        norm = HeadNorm() if norm is None else norm
        if not isinstance(norm, HeadNorm):
            raise InputError(f"norm: {type(norm).__name__} is not a HeadNorm")
        bits, q = norm.bits(), arrays["q"]
        given = {**arrays, "q_out": q if arrays["q_out"] is None else arrays["q_out"], "table": table}
        given |= {"positions": rows if positions is None else positions, "norm.q": norm.q, "norm.k": norm.k}
        tensors = [
            None if value is None else self._tensor(value, name, not name.endswith("_out")) for name, value in given.items()
        ]

        def bind() -> RowLaunch:
            if given["k"] is not None or given["v"] is not None:
                self.check_own(layer)
            elif self.caches.storage(layer).owner == self.caches.attention_index(layer):
                raise InputError(f"k, v: None given, but layer {layer} has K and V of its own")
            call = rotation_of(self._device, pool.shape, given, slots, bool(interleaved))
            factors = None if call.k is None else self.factors(layer, call.k.dtype, True)
            return bind_rotation(pool, call, factors, bits)

        key = ("rotate", layer, bool(interleaved), bits, slots.address, *map(place, tensors))
        return Call(key, bind, pool, slots, tokens, (*tensors, slots))

    def _arrays_of(self, view: Step) -> tuple[tuple[Tensor, ...], int, Tensor | None]:
        """Return slots of each group, tokens and positions of a step.

        What is no StepView, but has them, is taken at its word.
        """
        slots, tokens = getattr(view, "slot_mapping", ()), getattr(view, "num_tokens", None)
        is_ours = getattr(view, "buffers", self.caches.step_buffers) is self.caches.step_buffers
        if tokens is None or len(slots) != len(self.caches.plan.groups) or not is_ours:
            raise InputError(f"view: {view!r} is not a step of this model; Batch.step returns one")
        return slots, tokens, getattr(view, "positions", None)

    def _tensor(self, value: Any, name: str, read: bool) -> Tensor:
        tensor = as_tensor(self._device, value, name)
        tensor.check_open()
        if not read and value is not tensor and getattr(getattr(value, "flags", None), "writeable", True) is False:
            raise InteropError(f"{name}: the array is read-only, and is to be written")
        return tensor
