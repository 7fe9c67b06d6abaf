"""PageCopies: pages to pages of the same pools."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.cache.kv_operands import flat_slab
from numba_kv.device import Staging, Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError
from numba_kv.geometry import RESERVED_PAGES, ceil_div
from numba_kv.kernels.kv_copy import copy_page_bytes, copy_page_units, copy_page_words
from numba_kv.kernels.wide_rows import reciprocal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.cache.kv_cache import KVCacheManager
    from numba_kv.device import Device
    from numba_kv.kernels.jit import Launch
    from numba_kv.plan import GroupPlan, SlabPlan

__all__ = ["PageCopies"]

#: Pairs of one launch.
MAX_PAIRS = 1024
#: Bytes of a page that one block copies, and its threads: two accesses each.
PART_NBYTES, _THREADS = 1 << 12, 128
_WORD, _WIDE = 8, 16


class PageCopies:
    """Copies pages of the groups of one model. Owns the list of pairs, made on first use."""

    def __init__(self, device: Device, pools: KVCacheManager) -> None:
        self._device = device
        self._pools = pools
        self._list: tuple[Staging, Tensor] | None = None
        self._launches: dict[int, list[tuple[Launch, int]]] = {}

    def copy(self, group: int, pairs: Sequence[tuple[int, int]] | NDArray[Any]) -> None:
        """Copy ``pairs`` of (source, target) pages of a group in all its layers; see `KVIO.copy_pages`."""
        groups = self._pools.plan.groups
        try:
            plan = None if isinstance(group, bool) or index(group) < 0 else groups[index(group)]
        except (TypeError, IndexError):
            plan = None
        if plan is None:
            raise InputError(f"group: {group!r} is not one of the {len(groups)} groups")
        checked = _checked(pairs, plan)
        if not plan.slabs or not len(checked):
            return
        self._pools.kv(plan.slabs[0].layers[0])  # raises if the pools are gone
        staging, on_device = self.prepare()
        for first in range(0, len(checked), MAX_PAIRS):
            part = checked[first : first + MAX_PAIRS]
            staging.acquire()[: 2 * len(part)] = part.reshape(-1)
            staging.send([(0, 2 * len(part), on_device, 0)], self._device.stream)
            count = {"num_pairs": len(part), "by_pairs": reciprocal(len(part))}
            for launch, items in self._launches[plan.index]:
                scalars = {name: n for name, n in count.items() if name in launch.values}
                launch(items * len(part), self._device.stream, **scalars)

    def prepare(self) -> tuple[Staging, Tensor]:
        """Return the list of pairs. The first call makes it and binds every group: all that can fail."""
        if self._list is None:
            on_device = self._device.tensor((MAX_PAIRS, 2), dtype("int32"))
            self._list = Staging(self._device, 2 * MAX_PAIRS), on_device
        if not self._launches:
            groups = self._pools.plan.groups
            self._launches = {g.index: [self._bind(g, slab, self._list[1]) for slab in g.slabs] for g in groups}
        return self._list

    def close(self) -> None:
        """Forget the launches and give the list back. Stream: waits for copies in flight."""
        self._launches.clear()
        if self._list is not None:
            staging, on_device = self._list
            staging.close()
            on_device._memory.close(self._device.stream)

    def _bind(self, group: GroupPlan, slab: SlabPlan, pairs: Tensor) -> tuple[Launch, int]:
        """Return the launch over a slab and its items for each pair."""
        pool = self._pools.kv(slab.layers[0])
        itemsize = pool.dtype.itemsize
        page = group.page_tokens * slab.num_kv_heads * slab.head_dim * itemsize
        half = group.num_pages * page
        parts = ceil_div(page, PART_NBYTES)
        layers, halves = len(slab.layers), slab.shape[1]
        is_wide = not any(n % _WIDE for n in (page, slab.layer_nbytes, pool.address))
        unit = 1 if is_wide or page % _WORD else _WORD
        values: dict[str, Tensor | int] = {
            "slab": flat_slab(pool, slab.nbytes, unit),
            "pairs": pairs,
            "num_pairs": 1,
            "halves": halves,
            "parts": parts,
            "part_size": PART_NBYTES // unit,
            "page_size": page // unit,
            "layer_stride": slab.layer_nbytes // unit,
            "half_stride": half // unit,
            "num_pages": group.num_pages,
            "num_targets": group.num_pages - RESERVED_PAGES,
        }
        kernel = copy_page_bytes if unit == 1 else copy_page_words
        if is_wide:
            kernel = copy_page_units
            values |= {"by_pairs": reciprocal(1), "by_halves": reciprocal(halves), "by_parts": reciprocal(parts)}
        launch = kernel.bind(self._device, values, threads=_THREADS)
        return launch, layers * halves * parts


def _checked(pairs: Any, group: GroupPlan) -> NDArray[np.int32]:
    """Return the pairs as int32 [n, 2]."""
    try:
        given = pairs if isinstance(pairs, np.ndarray) else list(pairs)
        found = np.asarray(given)
        if found is not given and any(isinstance(page, (bool, np.bool_)) for pair in given for page in pair):
            raise TypeError
        if found.size == 0:
            return np.empty((0, 2), np.int32)
        if found.ndim != 2 or found.shape[1] != 2 or found.dtype.kind not in "iu":
            raise TypeError
    except (TypeError, ValueError):
        raise InputError("pairs: (source, target) pairs of page ids are wanted") from None
    usable = group.num_pages - RESERVED_PAGES
    sources, targets = found[:, 0], found[:, 1]
    if ((sources < 0) | (sources > usable)).any():
        wrong = int(sources[(sources < 0) | (sources > usable)][0])
        raise InputError(f"pairs: source {wrong} is not in 0..{usable} (the null page) of group {group.index}")
    if ((targets < 0) | (targets >= usable)).any():
        wrong = int(targets[(targets < 0) | (targets >= usable)][0])
        raise InputError(f"pairs: target {wrong} is not in 0..{usable - 1} of group {group.index}")
    is_target = np.zeros(usable + 1, bool)
    is_target[targets] = True
    if int(is_target.sum()) != len(targets):
        raise InputError("pairs: a page is a target twice")
    if is_target[sources].any():
        both = int(sources[is_target[sources]].min())
        raise InputError(f"pairs: page {both} is both source and target; copy in two calls")
    return found.astype(np.int32)
