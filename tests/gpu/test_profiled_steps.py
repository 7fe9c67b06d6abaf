"""What a GPU is given in steady steps, as CUPTI sees it through torch's profiler: kernels, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import numba_kv as kv
from tests.helpers.captured import PROMPTS, model, prefilled

pytestmark = pytest.mark.gpu

STEPS = 40


def work_on_the_gpu(torch: Any, stream: Any, work: Callable[[], None]) -> Counter[str]:
    """Return what ran on the GPU during `work`, by name."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as found:
        work()
        stream.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return Counter(event.name for event in found.events() if event.device_type == on_gpu)


def test_steady_steps_copy_and_clear_nothing() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    with kv.SharedResources.create_for_llm(model(lookahead_pages=4 * STEPS), target="cuda") as resources:
        batch, _, _ = prefilled(resources, PROMPTS)
        for _ in range(3):
            batch.step(1)
        before = batch.stats
        stepped = work_on_the_gpu(torch, resources.stream, lambda: [batch.step(1) for _ in range(STEPS)] and None)
        after = batch.stats
        assert after.decode_steps - before.decode_steps == STEPS
        assert after.bytes_to_device == before.bytes_to_device
        assert sum(stepped.values()) == STEPS, stepped
        assert not [name for name in stepped if "mem" in name.lower()], stepped

        captured = batch.capture()
        captured.reserve(STEPS)
        captured.launch()

        def replay() -> None:
            for _ in range(STEPS - 1):
                captured.launch()

        replayed = work_on_the_gpu(torch, resources.stream, replay)
        captured.advanced()
        assert sum(replayed.values()) == STEPS - 1, replayed
        assert not [name for name in replayed if "mem" in name.lower()], replayed
        batch.audit()
