"""TokenMoves: tokens of the last step move together within their pages, in all layers."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from numba_kv.cache.kv_operands import flat_slab, unowned
from numba_kv.device import Tensor
from numba_kv.geometry import RESERVED_PAGES
from numba_kv.kernels.path_move import move_token_bytes, move_token_words

if TYPE_CHECKING:
    from numba_kv.cache.kv_cache import KVCacheManager
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.kernels.jit import Launch
    from numba_kv.plan import GroupPlan, SlabPlan

__all__ = ["TokenMoves"]

#: Arrays of ids whose launches stay bound.
_MAX_BOUND = 8
_WORD = 8


class TokenMoves:
    """Moves tokens of the rows of one model. Owns nothing."""

    def __init__(self, buffers: StepBuffers, pools: KVCacheManager) -> None:
        self._buffers = buffers
        self._pools = pools
        self._bound: OrderedDict[tuple[int, tuple[int, ...]], list[tuple[Launch, int]]] = OrderedDict()

    def bound(self, nodes: Tensor) -> list[tuple[Launch, int]]:
        """Return what moves tokens as ``nodes`` int32 [B, A] say: a launch and its items for each slab. Enqueues nothing."""
        key = (nodes.address, nodes.shape)
        launches = self._bound.get(key)
        if launches is None:
            lent = unowned(nodes)
            launches = [self._bind(group, slab, lent) for group in self._buffers.plan.groups for slab in group.slabs]
            self._bound[key] = launches
            if len(self._bound) > _MAX_BOUND:
                self._bound.popitem(last=False)
        else:
            self._bound.move_to_end(key)
        return launches

    def _bind(self, group: GroupPlan, slab: SlabPlan, nodes: Tensor) -> tuple[Launch, int]:
        buffers, pool = self._buffers, self._pools.by_token(slab.layers[0])
        itemsize, halves = pool.dtype.itemsize, slab.shape[1]
        heads, dim = slab.num_kv_heads, slab.head_dim
        if pool.strides[3] == dim:  # heads of a token lie together
            heads, dim = 1, heads * dim
        sizes = [dim * itemsize, slab.layer_nbytes, *(stride * itemsize for stride in pool.strides[:4])]
        unit = 1 if any(size % _WORD for size in sizes) else _WORD
        width, layer_stride, half_stride, page_stride, token_stride, head_stride = (size // unit for size in sizes)
        launch = (move_token_bytes if unit == 1 else move_token_words).bind(
            buffers.device,
            {
                "slab": flat_slab(pool, slab.nbytes, unit),
                "nodes": nodes,
                "page_tables": buffers.arena["page_tables"],
                "groups": buffers.groups,
                "lengths": buffers.lengths,
                "appended": buffers.appended,
                "floors": buffers.floors,
                "group": group.index,
                "layers": len(slab.layers),
                "halves": halves,
                "heads": heads,
                "dim": width,
                "layer_stride": layer_stride,
                "half_stride": half_stride,
                "page_stride": page_stride,
                "token_stride": token_stride,
                "head_stride": head_stride,
                "num_pages": group.num_pages - RESERVED_PAGES,
            },
        )
        return launch, nodes.shape[0] * len(slab.layers) * halves
