"""HybridCacheManager: all caches of one model behind its decoder-layer numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from numba_kv.cache.kv_cache import KVCacheManager, LayerStorage
from numba_kv.cache.step_buffers import StepBuffers

if TYPE_CHECKING:
    from numba_kv.device import Device, Memory, Tensor
    from numba_kv.plan import MemoryPlan

__all__ = ["HybridCacheManager"]


class HybridCacheManager:
    """The caches of one model: KV pools and the device arrays of a step. Owns both.

    Attributes
    ----------
    kv_cache : KVCacheManager
        The pools of the attention layers.
    step_buffers : StepBuffers
        Tables, lengths and step data.
    """

    def __init__(self, device: Device, plan: MemoryPlan, take: Callable[[str, int], Memory]) -> None:
        self.device = device
        self.plan = plan
        self.kv_cache = KVCacheManager(device, plan, take)
        self.step_buffers = StepBuffers(device, plan, take)

    @property
    def num_layers(self) -> int:
        """Layers that keep a cache."""
        return self.kv_cache.num_layers

    @property
    def lengths(self) -> Tensor:
        """Tokens of each row: int32 [B] on the device."""
        return self.step_buffers.lengths[0]

    def kv(self, layer: int) -> Tensor:
        """Return the KV pool of a layer: [2, N, P, H, D]; see `KVCacheManager.kv`."""
        return self.kv_cache.kv(layer)

    def storage(self, layer: int) -> LayerStorage:
        """Return how a layer is stored."""
        return self.kv_cache.storage(layer)

    def close(self) -> None:
        """Forget all arrays; their owner gives the memory back."""
        self.kv_cache.close()

    def __repr__(self) -> str:
        return f"HybridCacheManager({self.num_layers} layers, {self.plan.nbytes} bytes)"
