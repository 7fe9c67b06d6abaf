"""``numba-kv bench step``: what a decode step's bookkeeping costs, on the host and on the GPU.

Every point is measured in four ways: `step` (the public call), `bound` (the launch alone), `captured` (steps inside a
graph), `dispatcher` (the same kernel through Numba's own launch path); `plain` is the work in plain Python.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from numba_kv.batch import Batch, Sequence
from numba_kv.config import AttentionLayer, LLMEngineConfig
from numba_kv.dtypes import dtype
from numba_kv.geometry import FULL, Window, ceil_div
from numba_kv.replay.plain_manager import PlainManager
from numba_kv.shared_resources import SharedResources

if TYPE_CHECKING:
    from numba_kv.batch.capture import CapturedStep
    from numba_kv.device import Stream

__all__ = ["StepPoint", "measure_point", "median_us", "step_points"]

_STEPS = 100  # of a captured graph, and of each measured loop
_LONG = 10  # graphs of a long loop: 1,000 steps
_WARM_UP = 8  # graphs launched before those that count: the driver and the caches settle over the first ones
_GRAPHS = 20
_LONG_LOOPS = 7
_UPDATES = 48
_WINDOWS = (Window("sliding", 512), Window("sliding", 1024), Window("sliding", 2048))


@dataclass(frozen=True, kw_only=True)
class StepPoint:
    """One point of the sweep: rows, tokens of each row, groups (full and windows), page size."""

    rows: int = 256
    context: int = 4096
    groups: int = 2
    page_tokens: int = 16


def step_points(largest_context: int) -> Iterator[StepPoint]:
    """Yield the sweep: one axis at a time around 256 rows, 4,096 tokens, full and one window, pages of 16."""
    base = StepPoint()
    seen = set()
    points = [base]
    points += [replace(base, rows=n) for n in (1, 16, 64, 1024)]
    points += [replace(base, context=n) for n in (1024, 16384, 65536, 262144, 1048576) if n <= largest_context]
    points += [replace(base, groups=n) for n in (1, 3, 4)]
    points += [replace(base, page_tokens=n) for n in (1, 64, 128, 256)]
    for point in points:
        if point not in seen:
            seen.add(point)
            yield point


def measure_point(point: StepPoint, target: str | None) -> dict[str, object]:
    """Measure one point; microseconds, medians."""
    with _resources(point, target) as resources, Batch(resources) as batch:
        _fill(batch, point)
        found: dict[str, object] = {**vars(point), "target": resources.device.target}
        found["step_host_us"] = median_us(lambda: batch.step(1), _STEPS)
        found["bound_host_us"] = _bound_us(batch)
        found |= _captured(batch)
        if resources.device.target == "cuda":
            found["dispatcher_host_us"] = _dispatcher_us(batch)
        found["update_16_host_us"] = _update_us(batch, point.context)
        batch.audit()
        if point.context <= 16384:
            found["plain_host_us"] = _plain_us(point, resources)
    return found


def _plain_us(point: StepPoint, resources: SharedResources) -> float:
    """Host time of the same step in plain Python, with the one upload of its arrays.

    Lengths are such that in every step as many rows cross a page as on average: all steps cost the same.
    """
    lengths = [point.context + row % point.page_tokens for row in range(point.rows)]
    plain = PlainManager(lengths, max(lengths) + 1024, _window_tokens(point), point.page_tokens)
    device = resources.device
    target = device.tensor(plain.step().shape, dtype("int64"))

    def step() -> None:
        block = plain.step()
        device.copy_to_device(target.address, block.ctypes.data, block.nbytes, device.stream)

    with device.active():
        return median_us(step, 2 * _STEPS)


def _resources(point: StepPoint, target: str | None) -> SharedResources:
    windows = (FULL, *_WINDOWS[: point.groups - 1])
    capacity = point.context + (_WARM_UP + _GRAPHS + 4 + (_LONG_LOOPS + 1) * _LONG) * _STEPS
    config = LLMEngineConfig(
        layers=tuple(AttentionLayer(num_kv_heads=1, head_dim=8, window=w) for w in windows),
        max_batch_size=point.rows,
        max_kv_cache_capacity=capacity,
        page_tokens=point.page_tokens,
        max_batch_tokens=max(8192, 4 * point.rows, min(point.rows * point.context, 1 << 20)),
        num_kv_pages=point.rows * ceil_div(capacity, point.page_tokens),
        lookahead_pages=ceil_div(2 * _STEPS, point.page_tokens),
    )
    return SharedResources.create_for_llm(config, target=target)


def _window_tokens(point: StepPoint) -> list[int]:
    return [w.tokens for w in _WINDOWS[: point.groups - 1]]


def _fill(batch: Batch, point: StepPoint) -> None:
    """Bring every row to about the context; lengths differ, so that rows cross pages in different steps."""
    sequences = batch.update(admit=[point.context] * point.rows)
    _prefill(batch, sequences, point.context)
    for i in range(0, point.rows, 4):
        batch.step({s: 1 + k * 5 for k, s in enumerate(sequences[i : i + 4])})
    batch.step(1)


def _prefill(batch: Batch, sequences: list[Sequence], tokens: int) -> None:
    """Append `tokens` tokens to each sequence, in as few steps as the plan allows."""
    most = max(1, batch.plan.config.max_batch_tokens // len(sequences))
    for first in range(0, tokens, most):
        batch.step(dict.fromkeys(sequences, min(most, tokens - first)))


def median_us(work: Callable[[], object], repeat: int) -> float:
    """Return the median host time of `work` in microseconds, after five calls to warm up."""
    for _ in range(5):
        work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 3)


def _bound_us(batch: Batch) -> float:
    """Host time of the bound launch alone, steps reserved and noted as a caller of `enqueue_step` does."""
    batch.reserve(_STEPS)
    stream, stepper = batch.resources.stream, batch.stepper
    times = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        stepper.enqueue(1, None, stream)
        times.append(time.perf_counter() - start)
    batch.advanced(_STEPS)
    stream.synchronize()
    return round(statistics.median(times) * 1e6, 3)


def _captured(batch: Batch) -> dict[str, float]:
    """Host time a step of a graph of many steps, alone and with making room and noting, and GPU time a step inside it."""
    stream = batch.resources.stream
    graph = batch.capture(steps=_STEPS)
    host, loop, device = [], [], []
    for _ in range(_WARM_UP + _GRAPHS):
        stream.synchronize()
        start = time.perf_counter()
        graph.reserve(_STEPS)
        loop.append((time.perf_counter() - start) * 1e6 / _STEPS)
        stream.synchronize()
        begin = stream.record(timing=True)
        start = time.perf_counter()
        graph.launch()
        host.append((time.perf_counter() - start) * 1e6 / _STEPS)
        device.append(stream.record(timing=True).microseconds_since(begin) / _STEPS)
        start = time.perf_counter()
        graph.advanced()
        loop[-1] += host[-1] + (time.perf_counter() - start) * 1e6 / _STEPS
    long = [_loop_us(graph, stream) for _ in range(_LONG_LOOPS)]
    graph.close()
    found = {
        "captured_host_us": round(statistics.median(host[_WARM_UP:]), 4),
        "captured_loop_host_us": round(statistics.median(loop[_WARM_UP:]), 4),
        "captured_1000_loop_host_us": round(statistics.median(long), 4),
    }
    if batch.resources.device.target == "cuda":
        found["captured_gpu_us"] = round(statistics.median(device[_WARM_UP:]), 3)
    return found


def _loop_us(graph: CapturedStep, stream: Stream) -> float:
    """Host time a step of a long loop: room for all steps at once, graph after graph, and the steps noted."""
    stream.synchronize()
    start = time.perf_counter()
    graph.reserve(_LONG * _STEPS)
    reserved = time.perf_counter() - start
    launched = 0.0
    for _ in range(_LONG):
        stream.synchronize()  # or the host would wait for room in the driver's queue, which is GPU time
        start = time.perf_counter()
        graph.launch()
        launched += time.perf_counter() - start
    start = time.perf_counter()
    graph.advanced()
    return (reserved + launched + time.perf_counter() - start) * 1e6 / (_LONG * _STEPS)


def _dispatcher_us(batch: Batch) -> float:
    from numba_kv.kernels.on_cuda import dispatcher_launch

    batch.reserve(_STEPS)
    stepper, stream = batch.stepper, batch.resources.stream
    launch = dispatcher_launch(stepper.launches.short_step, stepper.launches.items, stream)
    launch()
    times = []
    for _ in range(_STEPS - 1):
        start = time.perf_counter()
        launch()
        times.append(time.perf_counter() - start)
    batch.advanced(_STEPS)
    stream.synchronize()
    return round(statistics.median(times) * 1e6, 3)


def _update_us(batch: Batch, context: int) -> float:
    """Host time of a composition change: a sixteenth of the rows leaves, with all their pages, and as many join.

    Every row is replaced once a round; between rounds all get as long again as they were.
    """
    rows = batch.plan.config.max_batch_size
    count = max(1, rows // 16)
    groups, times = rows // count, []
    for _ in range(1 + ceil_div(_UPDATES, groups)):
        for i in range(groups):
            leaving, prompts = batch.sequences[i::groups][:count], [context] * count
            batch.resources.stream.synchronize()
            start = time.perf_counter()
            batch.update(retire=leaving, admit=prompts)
            times.append(time.perf_counter() - start)
        _prefill(batch, [s for s in batch.sequences if s.pending_tokens], context)
    return round(statistics.median(times[groups:]) * 1e6, 2)  # without the first round, in which code and memory are cold
