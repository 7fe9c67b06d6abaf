"""``numba-kv bench host``: pages to page-locked memory and back, beside a plain copy of as many bytes between the same places.

Times are of the host, from one synchronisation to the next; each moves so much that launches do not count. Does not know what
a good figure is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.config import AttentionLayer, LLMEngineConfig

if TYPE_CHECKING:
    from numba_kv.batch import Batch
    from numba_kv.cache.host_pages import HostPages
    from numba_kv.device import Device

__all__ = ["HostPoint", "measure_host", "measure_point"]


@dataclass(frozen=True, kw_only=True)
class HostPoint:
    """Pages of one model.

    Attributes
    ----------
    layers, heads, dim, page_tokens : int
        Attention layers, H, D and P; elements are bfloat16.
    pages : int
        Pages that are moved.
    """

    layers: int
    heads: int
    dim: int
    page_tokens: int
    pages: int

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page in all layers, K and V."""
        return self.layers * 2 * self.page_tokens * self.heads * self.dim * 2

    @property
    def nbytes(self) -> int:
        """Bytes that are moved."""
        return self.pages * self.page_nbytes


def measure_host(target: str | None) -> dict[str, object]:
    """Measure moves of 1 GiB (a sixteenth elsewhere than on a GPU) in large and in small pages, out and back; GB/s, medians."""
    from numba_kv.device import resolve_target

    share = 1 if resolve_target(target) == "cuda" else 16
    large = HostPoint(layers=32, heads=8, dim=128, page_tokens=16, pages=512 // share)
    small = HostPoint(layers=3, heads=1, dim=256, page_tokens=16, pages=21_845 // share)
    return {"target": resolve_target(target), "points": [measure_point(point, target) for point in (large, small)]}


def measure_point(point: HostPoint, target: str | None) -> dict[str, object]:
    """Measure one model's pages, and how they compare with a plain copy in the same run."""
    from numba_kv.batch import Batch
    from numba_kv.cache.host_pages import HostPages, HostRooms
    from numba_kv.shared_resources import SharedResources

    config = LLMEngineConfig(
        layers=(AttentionLayer(num_kv_heads=point.heads, head_dim=point.dim),) * point.layers,
        max_batch_size=1,
        max_kv_cache_capacity=point.pages * point.page_tokens,
        page_tokens=point.page_tokens,
        max_batch_tokens=point.pages * point.page_tokens,
    )
    with SharedResources.create_for_llm(config, target=target) as resources, resources.device.active():
        device, pools = resources.device, resources.cache_managers[0].kv_cache
        found = {"page_kib": point.page_nbytes >> 10, "mib": point.nbytes >> 20, **_plain(device, point.nbytes)}
        pages = HostPages(device, pools, HostRooms((point.pages,)))
        found |= _moved(device, pages, point)
        pages.close()
        with Batch(resources) as batch:
            found |= _swapped(device, batch, point)
    for way in ("out", "back"):
        for what in ("pages", "swap"):
            found[f"{what}_{way}_of_plain"] = round(found[f"{what}_{way}_gb_per_s"] / found[f"plain_{way}_gb_per_s"], 3)
    return dict(found)


def _plain(device: Device, nbytes: int) -> dict[str, float]:
    """Time plain copies between page-locked memory and the device."""
    host, there, stream = device.allocate_staging(nbytes), device.allocate(nbytes), device.stream
    out = _seconds(device, lambda: device.copy_to_host(host.address, there.address, nbytes, stream))
    back = _seconds(device, lambda: device.copy_to_device(there.address, host.address, nbytes, stream))
    stream.synchronize()
    host.close(stream)
    there.close(stream)
    return {"plain_out_gb_per_s": _speed(nbytes, out), "plain_back_gb_per_s": _speed(nbytes, back)}


def _moved(device: Device, pages: HostPages, point: HostPoint) -> dict[str, float]:
    """Time the moves of kept pages, which lie in any order on either side."""
    import numpy as np

    random = np.random.default_rng(0)
    pairs = np.stack([random.permutation(point.pages), random.permutation(point.pages)], axis=1).astype(np.int32)
    out = _seconds(device, lambda: pages.move(0, pairs, out=True))
    back = _seconds(device, lambda: pages.move(0, pairs, out=False))
    return {"pages_out_gb_per_s": _speed(point.nbytes, out), "pages_back_gb_per_s": _speed(point.nbytes, back)}


def _swapped(device: Device, batch: Batch, point: HostPoint) -> dict[str, float]:
    """Time a sequence that is swapped out and in, all bookkeeping included."""
    tokens = point.pages * point.page_tokens
    sequence = batch.admit(num_tokens=tokens)
    batch.step({sequence: tokens})
    times: dict[str, list[float]] = {"out": [], "back": []}
    for _ in range(5):
        start = _now(device)
        swapped = batch.swap_out(sequence)
        middle = _now(device)
        sequence = batch.swap_in(swapped)
        times["out"].append(middle - start)
        times["back"].append(_now(device) - middle)
    return {f"swap_{way}_gb_per_s": _speed(point.nbytes, statistics.median(found[1:])) for way, found in times.items()}


def _now(device: Device) -> float:
    device.stream.synchronize()
    return time.perf_counter()


def _seconds(device: Device, work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(7):
        start = _now(device)
        work()
        times.append(_now(device) - start)
    return statistics.median(times)


def _speed(nbytes: int, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 2)
