"""HybridCacheManager: all caches of one model behind its decoder-layer numbers."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.cache.kv_cache import KVCacheManager, LayerStorage
from numba_kv.cache.mamba_cache import MambaCacheManager
from numba_kv.cache.step_buffers import StepBuffers
from numba_kv.errors import InputError

if TYPE_CHECKING:
    from numba_kv.device import Device, Memory, Tensor
    from numba_kv.plan import MemoryPlan

__all__ = ["HybridCacheManager"]


class HybridCacheManager:
    """The caches of one model: KV pools, recurrent states and the device arrays of a step. Owns them.

    Layers are decoder layers here; the managers behind it count those of their own kind.

    Attributes
    ----------
    kv_cache : KVCacheManager
        The pools of the attention layers.
    mamba_cache : MambaCacheManager
        The states of the recurrent layers.
    step_buffers : StepBuffers
        Tables, lengths and step data.
    kept_states : Memory or None
        Room for snapshots of recurrent states that are kept for reuse, one behind the other; None: the plan has none.
    """

    def __init__(self, device: Device, plan: MemoryPlan, take: Callable[[str, int], Memory]) -> None:
        self.device = device
        self.plan = plan
        self.kv_cache = KVCacheManager(device, plan, take)
        self.mamba_cache = MambaCacheManager(device, plan, take)
        self.step_buffers = StepBuffers(device, plan, take)
        self.kept_states: Memory | None = None
        for region in plan.regions:
            if region.name == "kept_states":
                self.kept_states = take(region.name, region.nbytes)

    @property
    def num_layers(self) -> int:
        """Decoder layers, those without a cache included."""
        return len(self.plan.config.attention_indices)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row: int32 [B] on the device."""
        return self.step_buffers.lengths[0]

    def layer_type(self, layer: int) -> str:
        """Return what a layer keeps: "attention", "recurrent", "both" or "none".

        Raises
        ------
        InputError
            If there is no such layer.
        """
        number = self._checked(layer)
        types = self.plan.config.layer_types
        return types[number] if types else "attention"

    def attention_index(self, layer: int) -> int:
        """Return the place of a layer among the attention layers: what `KVCacheManager` and the names of bindings count.

        Raises
        ------
        InputError
            If there is no such layer, or it has no attention.
        """
        place = self.plan.config.attention_indices[self._checked(layer)]
        if place < 0:
            kind = self.layer_type(layer)
            states = "; conv_state(layer) and recurrent_state(layer) are its states" if kind == "recurrent" else ""
            raise InputError(f"layer: decoder layer {layer} has no attention; it is {kind!r}{states}")
        return place

    def recurrent_index(self, layer: int) -> int:
        """Return the place of a layer among the recurrent ones: what `MambaCacheManager` and the names of bindings count.

        Raises
        ------
        InputError
            If there is no such layer, or it has no state.
        """
        place = self.plan.config.recurrent_indices[self._checked(layer)]
        if place < 0:
            raise InputError(f"layer: decoder layer {layer} has no recurrent state; it is {self.layer_type(layer)!r}")
        return place

    def kv(self, layer: int) -> Tensor:
        """Return the KV pool of a layer: [2, N, P, H, D]; see `KVCacheManager.kv`. Raises as `attention_index`."""
        return self.kv_cache.kv(self.attention_index(layer))

    def by_token(self, layer: int) -> Tensor:
        """Return the KV pool of a layer as [2, N, P, H, D] in every layout, which its strides tell. Raises as `kv`."""
        return self.kv_cache.by_token(self.attention_index(layer))

    def k(self, layer: int) -> Tensor:
        """Return K of a layer: [N, P, H, D], or [N, H, P, D] where the layout is HND. Raises as `attention_index`."""
        return self.kv(layer)[0]

    def v(self, layer: int) -> Tensor:
        """Return V of a layer, shaped as K and with its strides. Raises as `attention_index`."""
        return self.kv(layer)[1]

    def storage(self, layer: int) -> LayerStorage:
        """Return how a layer is stored; its `owner` counts attention layers. Raises as `attention_index`."""
        return self.kv_cache.storage(self.attention_index(layer))

    def recurrent_state(self, layer: int) -> Tensor:
        """Return the recurrent states of a layer by slot: [B, H, D, S]. Raises as `recurrent_index`, if there are none too."""
        return self.mamba_cache.recurrent_state(self.recurrent_index(layer))

    def conv_state(self, layer: int) -> Tensor:
        """Return the convolution states of a layer by slot: [B, C, columns]. Raises as `recurrent_index`."""
        return self.mamba_cache.conv_state(self.recurrent_index(layer))

    def clear_resident_slot(self, slot: int) -> None:
        """Set the states of a slot to zero in all recurrent layers; pages and lengths stay.

        Raises
        ------
        InputError
            If there is no such slot.

        Stream: enqueues one kernel.
        """
        self.mamba_cache.clear_slot(slot)

    def _checked(self, layer: int) -> int:
        try:
            number = -1 if isinstance(layer, (bool, np.ndarray)) else index(layer)  # an array is no key of bound launches
        except TypeError:
            number = -1
        if not 0 <= number < self.num_layers:
            raise InputError(f"layer: {layer!r} is not one of the {self.num_layers} decoder layers")
        return number

    def close(self) -> None:
        """Forget all arrays; their owner gives the memory back."""
        self.kv_cache.close()
        self.mamba_cache.close()

    def __repr__(self) -> str:
        return f"HybridCacheManager({self.num_layers} layers, {self.plan.nbytes} bytes)"
