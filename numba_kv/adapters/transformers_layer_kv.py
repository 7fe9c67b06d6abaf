"""LayerKV: what storing K and V of a transformers model needs, whichever way its attention reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from numba_kv.adapters.torch_arrays import as_kv_tensor
from numba_kv.adapters.transformers_device import place_of
from numba_kv.cache import KVIO
from numba_kv.errors import InteropError, ShapeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.adapters.transformers_rows import RowStep
    from numba_kv.adapters.transformers_sizes import KVSizes
    from numba_kv.device import Tensor
    from numba_kv.shared_resources import SharedResources

__all__ = ["LayerKV"]


class LayerKV(ABC):
    """Moves K and V of one model into its pages. Owns the launches; borrows the pools.

    Parameters
    ----------
    resources : SharedResources
        Of the model.
    sizes : KVSizes, optional
        Of K and V, if they differ.

    Attributes
    ----------
    reads_pages : bool
        Whether attention sees all that is stored, whatever a mask says.
    stream : stream or None
        Where work is enqueued; None: on the resources' own.
    """

    reads_pages = False
    stream: object | None = None

    def __init__(self, resources: SharedResources, sizes: KVSizes | None = None) -> None:
        import torch

        self._torch = torch
        self._device = device = resources.device
        self._caches = caches = resources.cache_managers[0]
        self._place = place_of(device)
        self._kind = getattr(torch, caches.plan.config.kv_cache_dtype)
        self._io = KVIO(caches)
        self._sizes = sizes

    def check(self, layer: int, k: Any, v: Any) -> None:
        """Refuse K and V that are not [B, H, n, channels] of this layer, of the model's element type and on its device.

        Raises
        ------
        ShapeError, InteropError
            Naming what came and what is wanted.
        """
        storage, sizes = self._caches.storage(layer), self._sizes
        channels = (storage.head_dim,) * 2 if sizes is None else (sizes.keys, sizes.values)
        for name, array, dim in (("key_states", k, channels[0]), ("value_states", v, channels[1])):
            if not isinstance(array, torch.Tensor):
                raise InteropError(f"{name}: {type(array).__name__} given, a tensor wanted")
            shape = tuple(array.shape)
            if len(shape) != 4 or shape[1] != storage.num_kv_heads or shape[3] != dim or not all(shape):
                wanted = f"[B, {storage.num_kv_heads}, n, {dim}]"
                raise ShapeError(
                    f"{name}: {list(shape)} given, {wanted} wanted in layer {layer}; the cache is of another model"
                )
            if array.dtype is not self._kind:
                raise InteropError(f"{name}: {array.dtype} given, the cache was made for {self._kind}")
            if array.device.type != self._place.type or (array.device.index or 0) != (self._place.index or 0):
                raise InteropError(
                    f"{name}: on {array.device}, the cache is on {self._place}; one model on one device is wanted"
                )
        if k.shape[:3] != v.shape[:3]:
            raise ShapeError(f"value_states: {list(v.shape)} given, {[*k.shape[:3], channels[1]]} wanted, as key_states")

    @abstractmethod
    def begin(self, step: RowStep, offsets: NDArray[np.int64]) -> None:
        """Prepare what all layers of a step share; `offsets` are the pads of each row."""

    @abstractmethod
    def move(self, layer: int, k: Any, v: Any, step: RowStep) -> tuple[Any, Any]:
        """Store K and V of a step and return what the layer's attention is handed.

        Parameters
        ----------
        layer : int
            It has K and V of its own.
        k, v : torch.Tensor [B, H, n, D]
            Of any strides; each with channels of its own, where K and V differ.
        step : RowStep
            The current one.

        Stream: enqueues.
        """

    @abstractmethod
    def end(self) -> None:
        """Let go of what a step has left: its forward has ended."""

    def unread(self, layers: frozenset[int]) -> list[int]:
        """Return those of `layers` whose K and V nobody has read in the current step, as far as that is known."""
        return []

    def close(self) -> None:
        """Give the launches back; a second call does nothing."""
        self._io.close()

    def _tokens_first(self, array: Any, name: str) -> Tensor:
        """Return [B, H, n, D] as [B, n, H, D] with rows that follow each other, copied only if they do not."""
        array = array.detach().transpose(1, 2)
        rows, tokens = array.shape[:2]
        strides = array.stride()
        follows = rows == 1 or strides[0] == tokens * (strides[0] if tokens == 1 else strides[1])
        if strides[3] != 1 or not follows:
            array = array.contiguous()
        return as_kv_tensor(self._device, array, name)
