"""``numba-kv bench kv``: K and V into pages and out of them, beside a plain copy of as many bytes.

Every point counts the bytes that have to move: what is read once and what is written once. Where torch and Triton are
installed, the same work in both of them runs on the same arrays. Does not know what a good figure is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from numba_kv.adapters import torch_kv, torch_timing
from numba_kv.cache.kv_bound import BoundCall
from numba_kv.cache.kv_io import KVIO
from numba_kv.config import AttentionLayer, LLMEngineConfig
from numba_kv.dtypes import dtype
from numba_kv.geometry import FULL
from numba_kv.replay.bench_step import median_us
from numba_kv.shared_resources import SharedResources

if TYPE_CHECKING:
    from numba_kv.device import Device, Stream, Tensor

__all__ = ["KVSizes", "measure_kv", "plain_copy_us", "stream_us"]

#: Layers, so that a copy of pages is larger than what the host does for it, and the one that is written and read.
_LAYERS, _LAYER = 8, 0
_GROUP = 0


@dataclass(frozen=True, kw_only=True)
class KVSizes:
    """What is moved.

    Attributes
    ----------
    tokens, decode_tokens : int
        T of a large and of a small call.
    query_heads, heads, dim : int
        Hq, H and D.
    page_tokens : int
        P.
    """

    tokens: int = 65536
    decode_tokens: int = 256
    query_heads: int = 32
    heads: int = 8
    dim: int = 128
    page_tokens: int = 16

    @property
    def num_pages(self) -> int:
        """Pages of the pool: those that a large call touches, in any order."""
        return self.tokens // self.page_tokens


def measure_kv(target: str | None) -> dict[str, object]:
    """Measure writes, reads and page copies of a bfloat16 and of a float8 pool; microseconds, medians."""
    from numba_kv.device import resolve_target

    on_gpu = resolve_target(target) == "cuda"
    sizes = KVSizes() if on_gpu else KVSizes(tokens=4096)
    points: list[dict[str, object]] = []
    for kind, layout in (("bfloat16", "NHD"), ("float8_e4m3", "NHD"), ("bfloat16", "HND")):
        resources = SharedResources.create_for_llm(_config(kind, layout, sizes), target=target)
        with resources, KVIO(resources.cache_managers[0]) as io:
            points += _Bench(resources, io, kind, layout, sizes).points()
    return {"target": resolve_target(target), **vars(sizes), "points": points}


def _config(kind: str, layout: str, sizes: KVSizes) -> LLMEngineConfig:
    """Return a model of a few attention layers."""
    return LLMEngineConfig(
        layers=(AttentionLayer(num_kv_heads=sizes.heads, head_dim=sizes.dim, window=FULL),) * _LAYERS,
        max_batch_size=1,
        max_kv_cache_capacity=sizes.tokens,
        page_tokens=sizes.page_tokens,
        max_batch_tokens=sizes.tokens,
        num_kv_pages=sizes.num_pages,
        kv_cache_dtype=kind,
        kv_layout=layout,
    )


class _Bench:
    """One model, and arrays of a step's tokens. Borrows both."""

    def __init__(self, resources: SharedResources, io: KVIO, kind: str, layout: str, sizes: KVSizes) -> None:
        import numpy as np

        self.resources, self.io, self.kind, self.layout, self.sizes = resources, io, kind, layout, sizes
        self.device: Device = resources.device
        if kind == "float8_e4m3":
            self.io.set_scales(_LAYER, 0.5, 0.5)
        random = np.random.default_rng(0)
        shape = (sizes.tokens, sizes.heads, sizes.dim)
        self.q = self.device.tensor((sizes.tokens, sizes.query_heads, sizes.dim), dtype("bfloat16"))
        self.k, self.v, self.k_out, self.v_out = (self.device.tensor(shape, dtype("bfloat16")) for _ in range(4))
        values = random.integers(0x3C00, 0x4000, shape, np.uint16)
        for tensor in (self.k, self.v):
            tensor.fill_from(values.view(tensor.to_host().dtype))
        self.pages = random.permutation(sizes.num_pages)
        used = self.pages[: sizes.tokens // sizes.page_tokens].astype(np.int64)
        slots = used[:, None] * sizes.page_tokens + np.arange(sizes.page_tokens)
        self.slots = self.device.tensor((sizes.tokens,), dtype("int64"))
        self.slots.fill_from(slots.reshape(-1))
        few = random.choice(slots.reshape(-1), sizes.decode_tokens, replace=False)
        self.few_slots = self.device.tensor((sizes.decode_tokens,), dtype("int64"))
        self.few_slots.fill_from(few)
        self.positions = self.device.tensor((sizes.tokens,), dtype("int32"))
        self.positions.fill_from(np.arange(sizes.tokens, dtype=np.int32) % 8192)  # rows of 8,192 tokens
        self.table = self.device.tensor((1, sizes.tokens, sizes.dim), dtype("float32"))
        self.table.fill_from(random.uniform(-1, 1, self.table.shape).astype(np.float32))

    def points(self) -> list[dict[str, object]]:
        """Measure everything, or of another layout than the usual one what depends on it."""
        if self.layout != "NHD":
            return [self._write(), self._rotate(None), self._gather()]
        points = [self._write(), self._rotate(None), self._rotate(self.q), self._gather(), self._copy_pages()]
        few = [("write_decode", self._write_few, self._bind_write), ("rotate_decode", self._rotate_few, self._bind_rotate)]
        return points + [self._decode(*each) for each in few]

    def _write(self) -> dict[str, object]:
        found = self._point("write", self._moved(), lambda: self.io.write_slots(_LAYER, self.k, self.v, self.slots))
        if self._has_others():
            found |= self._beside("write")
        return found

    def _rotate(self, q: Tensor | None) -> dict[str, object]:
        """Time the rotation of k, and of q if it is given, and the write of k and v in one pass."""
        sizes = self.sizes
        nbytes = self._moved() + (0 if q is None else 2 * 2 * sizes.tokens * sizes.query_heads * sizes.dim)
        step = self._step(sizes.tokens, self.slots)
        what = "rotate k" if q is None else "rotate q, k"
        found = self._point(what, nbytes, lambda: self.io.write_rotated(_LAYER, q, self.k, self.v, step, self.table))
        if self._has_others():
            two_passes = self._others().rotate_then_write(q, self.table, self.positions, self.slots)
            found["triton_us"] = round(torch_timing.median_us(two_passes), 2)
        return found

    def _step(self, tokens: int, slots: Tensor) -> Any:
        """Return what `KVIO` reads of a step."""
        return SimpleNamespace(num_tokens=tokens, slot_mapping=(slots,), positions=self.positions)

    def _gather(self) -> dict[str, object]:
        work = self.io.gather_slots
        found = self._point("gather", self._moved(), lambda: work(_LAYER, self.k_out, self.v_out, self.slots))
        if self._has_others():
            found |= self._beside("gather")
        return found

    def _copy_pages(self) -> dict[str, object]:
        count = min(1024, len(self.pages) // 2)
        pairs = self.pages[: 2 * count].reshape(2, count).T
        page = _LAYERS * self.sizes.page_tokens * self.sizes.heads * self.sizes.dim * dtype(self.kind).itemsize
        found = self._point("copy_pages", 2 * 2 * count * page, lambda: self.io.copy_pages(_GROUP, pairs))
        if self._has_others():
            pools = [self.resources.cache_managers[0].kv(layer) for layer in range(_LAYERS)]
            others = torch_kv.PageCopy(pools, pairs).times()
            found |= {f"{name}_us": round(us, 2) for name, us in others.items()}
        return found | {"pages": count}

    def _bind_write(self) -> BoundCall:
        n = self.sizes.decode_tokens
        return self.io.bind_write_slots(_LAYER, self.k[:n], self.v[:n], self.few_slots)

    def _bind_rotate(self) -> BoundCall:
        n = self.sizes.decode_tokens
        step = self._step(n, self.few_slots)
        return self.io.bind_write_rotated(_LAYER, self.q[:n], self.k[:n], self.v[:n], step, self.table)

    def _write_few(self, stream: Stream | None = None) -> None:
        n = self.sizes.decode_tokens
        self.io.write_slots(_LAYER, self.k[:n], self.v[:n], self.few_slots, stream=stream)

    def _rotate_few(self, stream: Stream | None = None) -> None:
        n = self.sizes.decode_tokens
        step = self._step(n, self.few_slots)
        self.io.write_rotated(_LAYER, self.q[:n], self.k[:n], self.v[:n], step, self.table, stream=stream)

    def _decode(self, what: str, work: Callable[..., None], bind: Callable[[], BoundCall]) -> dict[str, object]:
        """Time a small call: on the host, as it is and bound, and on the GPU as one of many in a graph."""
        n, steps = self.sizes.decode_tokens, 100
        found: dict[str, object] = {"what": what, "pool": self.kind, "layout": self.layout, "tokens": n}
        found["host_us"] = median_us(work, 200)
        found["bound_host_us"] = _loop_us(self.device, bind(), n)
        found |= _captured(self.device, work, steps)
        if self._has_others():
            others = self._others()
            if what == "write_decode":
                triton = others.write_few(self.few_slots)
            else:
                triton = others.rotate_then_write(self.q, self.table, self.positions, self.few_slots)
            found["triton_us"] = round(torch_timing.captured_us(triton, steps), 3)
        return found

    def _moved(self) -> int:
        """Bytes that a large call reads and writes."""
        sizes = self.sizes
        return 2 * sizes.tokens * sizes.heads * sizes.dim * (2 + dtype(self.kind).itemsize)

    def _point(self, what: str, nbytes: int, work: Callable[[], object]) -> dict[str, object]:
        copy = plain_copy_us(self.device, nbytes)
        us = stream_us(self.device, work)
        found: dict[str, object] = {"what": what, "pool": self.kind, "layout": self.layout, "tokens": self.sizes.tokens}
        found["us"] = round(us, 2)
        found["gb_per_s"] = round(nbytes / us / 1e3, 1)
        if copy is not None:
            found |= {"copy_us": round(copy, 2), "of_copy": round(copy / us, 3)}
        return found

    def _others(self) -> torch_kv.TorchKV:
        return torch_kv.TorchKV(self.resources.cache_managers[0].kv(_LAYER), self.k, self.v, self.slots)

    def _has_others(self) -> bool:
        """Whether the same work is there in torch and in Triton."""
        ours = self.kind == "bfloat16" and self.layout == "NHD" and self.device.target == "cuda"
        return ours and torch_timing.is_installed()

    def _beside(self, what: str) -> dict[str, object]:
        """Time the same work in torch and in Triton."""
        return {f"{name}_us": round(us, 2) for name, us in self._others().times(what).items()}


def stream_us(device: Device, work: Callable[[], object], repeat: int = 15, inner: int = 5) -> float:
    """Return the median time of `work` on the device's stream: several between two events, so that no launch is waited for.

    The first event lies behind work that is not timed: between it and the first launch the stream would be idle.
    """
    stream = device.stream
    for _ in range(2):
        work()
    times = []
    for _ in range(repeat):
        stream.synchronize()
        work()
        begin = stream.record(timing=True)
        for _ in range(inner):
            work()
        times.append(stream.record(timing=True).microseconds_since(begin) / inner)
    return statistics.median(times)


def _loop_us(device: Device, bound: BoundCall, tokens: int) -> float:
    """Return the host time of one call in a model's loop over 32 layers."""
    layers, times = range(32), []
    for _ in range(50):
        device.stream.synchronize()
        start = time.perf_counter()
        for _ in layers:
            bound(tokens)
        times.append((time.perf_counter() - start) * 1e6 / len(layers))
    return round(statistics.median(times), 3)


def _captured(device: Device, work: Callable[[Stream], None], steps: int) -> dict[str, object]:
    """Time `work` as one of many in a graph, on the GPU and on the host; nothing elsewhere."""
    if device.target != "cuda":
        return {}

    def many(stream: Stream) -> None:
        for _ in range(steps):
            work(stream)

    with device.active():
        graph = device.capture(many)
        us = stream_us(device, lambda: graph.launch(device.stream), inner=1) / steps
        host = []
        for _ in range(20):
            device.stream.synchronize()
            start = time.perf_counter()
            graph.launch(device.stream)
            host.append((time.perf_counter() - start) * 1e6 / steps)
        device.stream.synchronize()
        graph.close()
    return {"captured_us": round(us, 3), "captured_host_us": round(statistics.median(host), 3)}


def plain_copy_us(device: Device, nbytes: int) -> float | None:
    """Return the time of a plain copy that moves `nbytes`, read and written together: torch's on a GPU, NumPy's elsewhere."""
    if device.target == "cuda":
        return torch_kv.copy_us(nbytes // 2) if torch_timing.is_installed() else None
    import numpy as np

    source, target = np.ones(nbytes // 2, np.uint8), np.zeros(nbytes // 2, np.uint8)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)
