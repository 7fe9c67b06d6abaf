"""DenseCopies: K and V of a row of the tables to dense arrays and back, bit by bit.

Knows slabs, block tables and strides. Does not know how long rows are, or whose pages they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.cache.kv_operands import flat_slab
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.geometry import RESERVED_PAGES, ceil_div
from numba_kv.kernels.kv_dense import copy_dense_bytes, copy_dense_words

if TYPE_CHECKING:
    from numba_kv.cache.kv_cache import KVCacheManager
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device import Memory
    from numba_kv.kernels.jit import Launch
    from numba_kv.plan import GroupPlan, SlabPlan

__all__ = ["DenseCopies", "DenseCopy", "page_nbytes", "token_nbytes"]

#: Bytes that one block copies.
PART_NBYTES = 1 << 14
_WORD = 8


def token_nbytes(slab: SlabPlan, itemsize: int) -> int:
    """Return the bytes of one position in all layers of a slab, K and V."""
    return len(slab.layers) * slab.shape[1] * slab.num_kv_heads * slab.head_dim * itemsize


def page_nbytes(group: GroupPlan, slab: SlabPlan, itemsize: int) -> int:
    """Return the bytes of one page in all layers of a slab, K and V."""
    return group.page_tokens * token_nbytes(slab, itemsize)


@dataclass(frozen=True, slots=True)
class DenseCopy:
    """A bound copy of positions, or pages, of any row: all that can fail for want of anything is behind it."""

    launch: Launch
    items: int
    first_row: int
    row_width: int

    def __call__(self, row: int) -> None:
        """Enqueue it for a row. Stream: one kernel."""
        self.launch(self.items, self.launch.device.stream, row_at=self.first_row + row * self.row_width)


class DenseCopies:
    """Binds copies of rows of one model. Owns nothing, enqueues nothing."""

    def __init__(self, buffers: StepBuffers, pools: KVCacheManager) -> None:
        self._device = buffers.device
        self._buffers = buffers
        self._pools = pools

    def pages(
        self, group: GroupPlan, slab: SlabPlan, dense: Memory, at: int, first: int, count: int, *, out: bool
    ) -> DenseCopy | None:
        """Return the copy of logical pages [first, first + count) of a row to `dense` from byte `at` on, or back.

        The dense form is ``[layers, 2, count, P, H, D]``, a page as the pool lays it out. None if there is nothing to copy.
        """
        pool = self._pools.by_token(slab.layers[0])
        size = group.page_tokens * slab.num_kv_heads * slab.head_dim
        strides = (pool.strides[0], pool.strides[1], 0, 0)
        return self._bind(group, slab, dense, at, (first, count, 0), (1, size), strides, out)

    def tokens(
        self, group: GroupPlan, slab: SlabPlan, dense: Memory, at: int, first: int, count: int, *, out: bool
    ) -> DenseCopy | None:
        """Return the copy of positions [first, first + count) of a row to `dense` from byte `at` on, or back.

        The dense form is ``[layers, 2, count, H, D]``. None if there is nothing to copy.
        """
        pool = self._pools.by_token(slab.layers[0])
        heads, dim = slab.num_kv_heads, slab.head_dim
        if pool.strides[3] == dim:  # heads of a token lie together
            heads, dim = 1, heads * dim
        shift = group.page_tokens.bit_length() - 1
        return self._bind(group, slab, dense, at, (first, count, shift), (heads, dim), pool.strides[:4], out)

    def _bind(
        self,
        group: GroupPlan,
        slab: SlabPlan,
        dense: Memory,
        at: int,
        positions: tuple[int, int, int],
        extents: tuple[int, int],
        strides: tuple[int, ...],
        out: bool,
    ) -> DenseCopy | None:
        first, count, shift = positions
        if not count or not slab.layers:
            return None
        pool, device = self._pools.by_token(slab.layers[0]), self._device
        itemsize, halves = pool.dtype.itemsize, slab.shape[1]
        heads, dim = extents
        sizes = [dim * itemsize, slab.layer_nbytes, *(stride * itemsize for stride in strides)]
        unit = 1 if any(size % _WORD for size in sizes) else _WORD
        part, layer_stride, half_stride, page_stride, token_stride, head_stride = (size // unit for size in sizes)
        parts = ceil_div(part * unit, PART_NBYTES)
        total = len(slab.layers) * halves * count * heads * part
        target = Tensor(dense, device, dtype("uint8" if unit == 1 else "uint64"), (total,), offset_nbytes=at)
        tables, own = self._buffers.arena["block_tables"], self._buffers.block_tables[group.index]
        launch = (copy_dense_bytes if unit == 1 else copy_dense_words).bind(
            device,
            {
                "slab": flat_slab(pool, slab.nbytes, unit),
                "dense": target,
                "block_tables": tables,
                "row_at": 0,
                "first": first,
                "count": count,
                "shift": shift,
                "halves": halves,
                "parts": parts,
                "part_size": PART_NBYTES // unit,
                "heads": heads,
                "dim": part,
                "layer_stride": layer_stride,
                "half_stride": half_stride,
                "page_stride": page_stride,
                "token_stride": token_stride,
                "head_stride": head_stride,
                "num_pages": group.num_pages - RESERVED_PAGES,
                "to_dense": int(out),
            },
        )
        first_row = (own.address - tables.address) // own.dtype.itemsize
        return DenseCopy(launch, len(slab.layers) * halves * count * parts, first_row, own.strides[0])
