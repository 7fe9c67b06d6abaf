"""PageScrubber: what a pool's pages hold when they become free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.cache.kv_operands import flat_slab
from numba_kv.errors import InputError
from numba_kv.geometry import RESERVED_PAGES, ceil_div
from numba_kv.kernels.scrub import FINITE, NAN, ZERO, scrub_8, scrub_16, scrub_32, scrub_64

if TYPE_CHECKING:
    from numba_kv.cache.kv_cache import KVCacheManager
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.kernels.jit import Launch
    from numba_kv.plan import GroupPlan, SlabPlan

__all__ = ["SCRUB_POLICIES", "PageScrubber"]

#: What can be asked for, and what it does.
SCRUB_POLICIES = {"never": None, "on_nonfinite": FINITE, "always": ZERO, "poison": NAN}
#: Bits that are set in every number of a type that is not finite.
_EXPONENT = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80, "float8_e4m3": 0x7F}
_KERNELS = {8: scrub_8, 16: scrub_16, 32: scrub_32, 64: scrub_64}
#: Bytes of a page that one block scrubs.
_PART_NBYTES = 1 << 14


class PageScrubber:
    """Scrubs pages of rows of one model. Owns nothing.

    Parameters
    ----------
    policy : {"on_nonfinite", "always", "poison"}
        Elements that are not finite become zero; all do; all become NaN.

    Raises
    ------
    InputError
        If it is something else.
    """

    def __init__(self, buffers: StepBuffers, pools: KVCacheManager, policy: str) -> None:
        mode = SCRUB_POLICIES.get(policy) if isinstance(policy, str) else None
        if mode is None:
            raise InputError(f"scrub: {policy!r} is not one of {', '.join(SCRUB_POLICIES)}")
        self._buffers = buffers
        self._pools = pools
        self._mode = mode
        self._bound: dict[int, list[tuple[Launch, int]]] = {}

    def scrub(self, group: GroupPlan, row: int, first: int, count: int) -> int:
        """Scrub logical pages [first, first + count) of a row; return the launches. Stream: one kernel for each slab."""
        if count <= 0 or not group.slabs:
            return 0
        if group.index not in self._bound:
            self._bound[group.index] = [self._bind(group, slab) for slab in group.slabs]
        tables = self._buffers.arena["block_tables"]
        row_at = (self._buffers.block_tables[group.index][row].address - tables.address) // 4
        for launch, items in self._bound[group.index]:
            launch(items * count, self._buffers.device.stream, row_at=row_at, first=first, count=count)
        return len(group.slabs)

    def _bind(self, group: GroupPlan, slab: SlabPlan) -> tuple[Launch, int]:
        pool, device = self._pools.kv(slab.layers[0]), self._buffers.device
        size, halves = pool.dtype.itemsize, slab.shape[1]
        page = group.page_tokens * slab.num_kv_heads * slab.head_dim * size
        unit = size if page % 8 else 8
        parts = ceil_div(page, _PART_NBYTES)
        launch = _KERNELS[8 * unit].bind(
            device,
            {
                "slab": flat_slab(pool, slab.nbytes, unit),
                "block_tables": self._buffers.arena["block_tables"],
                "row_at": 0,
                "first": 0,
                "count": 1,
                "halves": halves,
                "parts": parts,
                "part_size": _PART_NBYTES // unit,
                "page_size": page // unit,
                "layer_stride": slab.layer_nbytes // unit,
                "half_stride": pool.strides[0] * size // unit,
                "num_pages": group.num_pages - RESERVED_PAGES,
                "size": 8 * size,
                "exponent": _EXPONENT[pool.dtype.name],
                "mode": self._mode,
            },
        )
        return launch, len(slab.layers) * halves * parts
