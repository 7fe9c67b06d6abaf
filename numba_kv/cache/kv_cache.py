"""KVCacheManager: the KV page pools of a model's attention layers.

Owns bytes only. Which page belongs to whom is the tables' and the batch's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, StateError

if TYPE_CHECKING:
    from numba_kv.device import Device, Memory
    from numba_kv.geometry import Window
    from numba_kv.plan import GroupPlan, MemoryPlan

__all__ = ["KVCacheManager", "LayerStorage"]


@dataclass(frozen=True, slots=True)
class LayerStorage:
    """How one attention layer is stored.

    Attributes
    ----------
    group : int
        Window group whose tables address it.
    window : Window
        What its queries see.
    num_pages : int
        N, reserved pages included: V id = K id + N.
    logical_pages : int
        Pages of a row; windows keep absolute positions.
    page_tokens, num_kv_heads, head_dim : int
        P, H, D.
    kv_layout : str
        How a page lies: "NHD" [P, H, D] or "HND" [H, P, D].
    owner : int
        The layer whose pool it uses: itself, or the donor it borrows from.
    """

    group: int
    window: Window
    num_pages: int
    logical_pages: int
    page_tokens: int
    num_kv_heads: int
    head_dim: int
    owner: int
    kv_layout: str = "NHD"


class KVCacheManager:
    """The pools: one slab per (window group, H, D), zeroed at construction. Owns them.

    Parameters
    ----------
    device : Device
        Where the pools are.
    plan : MemoryPlan
        Their geometry.
    take : callable
        ``take(name, nbytes) -> Memory``: allocation, so that the owner of all memory can count and undo.
    """

    def __init__(self, device: Device, plan: MemoryPlan, take: Callable[[str, int], Memory]) -> None:
        self.plan = plan
        self._closed = False
        self._layers: list[Tensor | None] = [None] * len(plan.config.layers)
        self._by_token = list(self._layers)
        self._storage: list[LayerStorage] = []
        kind = dtype(plan.config.kv_cache_dtype)
        for group in plan.groups:
            for slab in group.slabs:
                memory = take(f"kv.{group.index}.{slab.num_kv_heads}x{slab.head_dim}", slab.nbytes)
                for place, layer in enumerate(slab.layers):
                    offset = place * slab.layer_nbytes
                    pool = Tensor(memory, device, kind, slab.shape[1:], offset_nbytes=offset)
                    self._layers[layer] = pool
                    self._by_token[layer] = pool if group.kv_layout == "NHD" else _tokens_first(pool)
        home = {layer: group for group in plan.groups for layer in group.layers}
        for place, attention in enumerate(plan.config.layers):
            owner = place if attention.kv_donor is None else attention.kv_donor
            self._layers[place], self._by_token[place] = self._layers[owner], self._by_token[owner]
            self._storage.append(_storage(home[place], attention.num_kv_heads, attention.head_dim, owner))

    @property
    def num_layers(self) -> int:
        """Attention layers, borrowers included."""
        return len(self._layers)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have equal heads and head size."""
        return len({(s.num_kv_heads, s.head_dim) for s in self._storage}) <= 1

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return self.plan.pool_nbytes

    def kv(self, layer: int) -> Tensor:
        """Return the pool of attention layer `layer` as it lies: [2, N, P, H, D], K in half 0, V in half 1.

        In a group of layout HND it is [2, N, H, P, D]. A layer that borrows KV returns its donor's pool.

        Raises
        ------
        InputError
            If there is no such layer.
        StateError
            After `close`.
        """
        return self._there(self._layers[self._check(layer)])

    def by_token(self, layer: int) -> Tensor:
        """Return the pool of a layer as [2, N, P, H, D] in every layout, which its strides tell. Raises as `kv`."""
        return self._there(self._by_token[self._check(layer)])

    def k(self, layer: int) -> Tensor:
        """Return K of a layer: [N, P, H, D], or [N, H, P, D]."""
        return self.kv(layer)[0]

    def v(self, layer: int) -> Tensor:
        """Return V of a layer: [N, P, H, D], or [N, H, P, D]; same strides as K."""
        return self.kv(layer)[1]

    def storage(self, layer: int) -> LayerStorage:
        """Return how a layer is stored."""
        return self._storage[self._check(layer)]

    def close(self) -> None:
        """Forget the pools; their owner gives the memory back."""
        self._closed = True
        self._layers = [None] * len(self._layers)
        self._by_token = list(self._layers)

    @staticmethod
    def _there(pool: Tensor | None) -> Tensor:
        if pool is None:
            raise StateError("KVCacheManager is closed")
        return pool

    def _check(self, layer: int) -> int:
        if self._closed:
            raise StateError("KVCacheManager is closed")
        try:
            number = -1 if isinstance(layer, bool) else index(layer)
        except TypeError:
            number = -1
        if not 0 <= number < len(self._layers):
            known = f"one of the {len(self._layers)} attention layers" if self._layers else "an attention layer; there are none"
            raise InputError(f"layer: {layer!r} is not {known}")
        return number

    def __repr__(self) -> str:
        return f"KVCacheManager({self.num_layers} layers, {len(self.plan.groups)} groups, {self.nbytes} bytes)"


def _tokens_first(pool: Tensor) -> Tensor:
    """Return a pool [2, N, H, P, D] as [2, N, P, H, D], by its strides."""
    shape, strides = (tuple(axes[i] for i in (0, 1, 3, 2, 4)) for axes in (pool.shape, pool.strides))
    at = pool.address - pool._memory.address
    return Tensor(pool._memory, pool.device, pool.dtype, shape, offset_nbytes=at, strides=strides)


def _storage(group: GroupPlan, heads: int, dim: int, owner: int) -> LayerStorage:
    return LayerStorage(
        group=group.index,
        window=group.window,
        num_pages=group.num_pages,
        logical_pages=group.row_pages,
        page_tokens=group.page_tokens,
        num_kv_heads=heads,
        head_dim=dim,
        owner=owner,
        kv_layout=group.kv_layout,
    )
