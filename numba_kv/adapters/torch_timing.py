"""Times of work that torch enqueues, on the GPU: for what is measured beside ours."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

__all__ = ["captured_us", "is_installed", "median_us"]


def is_installed() -> bool:
    """Return whether torch with a usable GPU, and Triton, are here."""
    if find_spec("torch") is None or find_spec("triton") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def median_us(work: Callable[[], object], repeat: int = 15, inner: int = 5) -> float:
    """Return the median time of `work`: several between two events, the first of them behind work that is not timed."""
    import torch

    for _ in range(2):
        work()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        work()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(inner):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / inner)
    return float(sorted(times)[repeat // 2])


def captured_us(work: Callable[[], None], steps: int) -> float:
    """Return microseconds of `work` inside a graph of `steps` times it."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(steps):
            work()
    return median_us(graph.replay, inner=1) / steps
