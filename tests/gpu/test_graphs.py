"""Steps without the host on a GPU: captured by a batch or with cuda.core, counted call by call, on the streams they may use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.device.stream import CudaStream, Event
from numba_kv.dtypes import dtype
from numba_kv.kernels.driver_calls import DriverCalls
from tests.helpers.captured import PROMPTS, addresses, admitted, model, prefilled
from tests.helpers.models import tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("steps", [1, 500])
def test_500_captured_steps_leave_what_the_model_says(steps: int) -> None:
    """Windows rotate over a hundred times; the row in the middle is retired and writes nothing. vllm#56734, numba-cuda#832."""
    with kv.SharedResources.create_for_llm(model(), target="cuda") as resources:
        batch, naive, sequences = prefilled(resources, PROMPTS)
        batch.retire(sequences[1])
        naive.retired(sequences[1])
        graph = batch.capture(steps=steps)
        graph.reserve(500)
        sent, before = resources.device.bytes_to_device, addresses(batch)
        for _ in range(500 // steps):
            graph.launch()
        graph.advanced()
        assert resources.device.bytes_to_device == sent
        assert [s.length for s in batch.sequences] == [505, 501, 517]
        naive.replayed(1, 500)
        naive.check_tables()
        assert addresses(batch) == before
        graph.close()


def test_captured_steps_of_several_tokens_equal_plain_ones() -> None:
    """Up to 8 tokens a row are one kernel, more are two; both forms are captured."""
    with kv.SharedResources.create_for_llm(model(max_step_tokens=12), target="cuda") as resources:
        batch, naive, _ = prefilled(resources, PROMPTS)
        for tokens in (3, 8, 12):
            graph = batch.capture(tokens, steps=2)
            graph.reserve(10)
            for _ in range(5):
                graph.launch()
            graph.advanced()
            naive.replayed(tokens, 10)
            naive.check_tables()


def test_a_graph_builder_of_cuda_core_captures_steps() -> None:
    """The same work, twice, into a graph that the caller builds. numba-cuda#832, numba-cuda#836."""
    with kv.SharedResources.create_for_llm(model(), target="cuda") as resources:
        batch, naive, _ = prefilled(resources, PROMPTS)
        form = batch.derived.csr(0)
        builder = resources.device.native.create_graph_builder()
        builder.begin_building("thread_local")
        batch.enqueue_step(builder)
        batch.enqueue_step(builder.stream)
        batch.derived.csr(0, builder)
        graph = builder.end_building().complete()
        builder.close()
        batch.reserve(60)
        for _ in range(30):
            graph.launch(resources.stream.native)
        batch.advanced(60)
        naive.replayed(1, 60)
        naive.check_tables()
        assert form.kv_indptr.to_host().tolist() == np.cumsum([0, *(-(-(n + 60) // 4) for n in PROMPTS)]).tolist()
        graph.close()


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count calls that copy, fill, allocate, free or wait: of the driver, compiled ones too, of streams and events."""
    from cuda.bindings import driver

    calls: Counter[str] = Counter()

    def wrap(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    starts = ("cuMemcpy", "cuMemAlloc", "cuMemFree", "cuMemHost", "cuMemset", "cuModule", "cuLibrary")
    waits = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuEventQuery", "cuStreamQuery")
    for name in dir(driver):
        if (name.startswith(starts) or name in waits) and callable(getattr(driver, name)):
            wrap(driver, name)
    made = DriverCalls.__call__

    def compiled(self: DriverCalls) -> None:
        calls.update(name for name in self._names if name not in ("cuLaunchKernelEx", "cuStreamIsCapturing"))
        made(self)

    monkeypatch.setattr(DriverCalls, "__call__", compiled)
    for owner in (CudaStream, Event):
        wrap(owner, "synchronize")
    for name in ("record", "wait"):
        wrap(CudaStream, name)
    return calls


def test_steady_steps_send_allocate_and_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with kv.SharedResources.create_for_llm(model(lookahead_pages=40), target="cuda") as resources:
        batch, naive, _ = prefilled(resources, PROMPTS)
        device = resources.device
        batch.step(1)
        graph = batch.capture(steps=3)
        for g in (0, 1):
            batch.derived.csr(g)
        calls = counted(monkeypatch)
        batch.rewind({batch.sequences[0]: 1})
        assert calls["cuMemcpyHtoDAsync"] == 1, "the counter sees the copy of a rewind"
        batch.step({batch.sequences[0]: 1})
        batch.step(1)

        def steady() -> tuple[int, ...]:
            return device.bytes_to_device, device.memory.allocations, device.memory.frees, device.pinned.allocations

        before = steady()
        calls.clear()
        for _ in range(60):
            batch.step(1)
            batch.derived.csr(0)
            batch.derived.csr(1)
        assert not calls
        assert steady() == before
        graph.reserve(60)
        before = steady()
        calls.clear()
        for _ in range(20):
            graph.launch()
        graph.advanced()
        assert not calls
        assert steady() == before
        batch.reserve(30)
        before = steady()
        calls.clear()
        for _ in range(30):
            batch.enqueue_step(resources.stream)
        batch.advanced(30)
        assert not calls
        assert steady() == before
        assert batch.stats.steady_bytes_to_device == 0
        assert [s.length for s in batch.sequences] == [n + 152 for n in PROMPTS]
        batch.audit()


def test_streams_without_order_are_refused() -> None:
    with kv.SharedResources.create_for_llm(model(), target="cuda") as resources:
        batch, naive, _ = prefilled(resources, PROMPTS)
        graph, foreign = batch.capture(), resources.device.as_stream(None)
        batch.derived.csr(0)
        batch.reserve(2)
        for stream in (foreign, foreign.native, foreign.handle):
            for call in (
                batch.enqueue_step,
                graph.launch,
                lambda s: batch.derived.csr(0, s),
                lambda s: batch.derived.csr(1, s),
            ):
                with pytest.raises(kv.StateError, match="stream"):
                    call(stream)
        for nonsense in ("stream", 1.5, [1]):
            with pytest.raises(kv.InputError, match="stream"):
                batch.enqueue_step(nonsense)
        for _ in range(2):
            batch.enqueue_step(resources.stream)
        batch.advanced(2)
        naive.replayed(1, 2)
        naive.check_tables()
        foreign.close()


def test_a_form_without_buffers_is_refused_inside_a_capture() -> None:
    """Its buffers would be allocated in the graph; the capture itself goes on."""
    with kv.SharedResources.create_for_llm(model(), target="cuda") as resources:
        batch, naive, _ = prefilled(resources, PROMPTS)
        builder = resources.device.native.create_graph_builder()
        builder.begin_building("thread_local")
        requests: list[Callable[[int, object], object]] = [
            batch.derived.csr, batch.derived.compact, batch.derived.kv_block_tables,
        ]  # fmt: skip
        for request in requests:
            with pytest.raises(kv.StateError, match="request it once before the capture"):
                request(1, builder)
        batch.enqueue_step(builder)
        graph = builder.end_building().complete()
        builder.close()
        batch.reserve(1)
        graph.launch(resources.stream.native)
        batch.advanced(1)
        naive.replayed(1, 1)
        naive.check_tables()
        graph.close()
        for request in requests:
            request(1, resources.stream)


def test_captured_steps_outlive_every_change_of_composition() -> None:
    """Nothing that a graph reads moves or is replaced, and no staging block belongs to it. ApxInf#89, onnxruntime#32121."""
    with kv.SharedResources.create_for_llm(model(), target="cuda") as resources:
        batch, naive, sequences = prefilled(resources, PROMPTS)
        graph, before = batch.capture(), addresses(batch)

        def replay(steps: int) -> None:
            graph.reserve(steps)
            for _ in range(steps):
                graph.launch()
            graph.advanced()
            naive.replayed(1, steps)
            naive.check_tables()

        replay(30)
        for leaving in (sequences[2], sequences[0]):
            batch.retire(leaving)
            naive.retired(leaving)
            replay(20)
        batch.compact()
        replay(20)
        (new,) = admitted(batch, naive, [33])
        replay(20)
        batch.rewind({new: 1})
        naive.rewound(new, 1)
        replay(20)
        for sequence in batch.sequences:
            naive.sequences.pop(sequence)
        batch.clear()
        naive.check_tables()
        admitted(batch, naive, [64, 2, 3, 5])
        replay(300)
        assert addresses(batch) == before
        batch.close()
        with pytest.raises(kv.StateError, match="Batch is closed"):
            graph.launch()
        again, naive, _ = prefilled(resources, [7, 9])
        fresh = again.capture()
        fresh.reserve(40)
        for _ in range(40):
            with pytest.raises(kv.StateError, match="Batch is closed"):
                graph.launch()
            fresh.launch()
        fresh.advanced()
        naive.replayed(1, 40)
        naive.check_tables()
    for closed in (graph, fresh):
        with pytest.raises(kv.StateError, match="Batch is closed"):
            closed.launch()
        closed.close()
        closed.close()


def test_a_closed_step_is_refused_and_harms_nothing() -> None:
    with kv.SharedResources.create_for_llm(model(), target="cuda") as resources:
        batch, naive, _ = prefilled(resources, PROMPTS)
        graph = batch.capture()
        graph.close()
        batch.reserve(1)
        with pytest.raises(kv.StateError, match="captured step is closed"):
            graph.launch()
        naive.stepped(batch.step(1), dict.fromkeys(batch.sequences, 1))
        naive.check_tables()


def test_two_resources_on_one_device_do_not_disturb_each_other() -> None:
    with (
        kv.SharedResources.create_for_llm(model(), target="cuda") as one,
        kv.SharedResources.create_for_llm(tiny_config(7, max_batch_size=3, max_kv_cache_capacity=300), target="cuda") as other,
    ):
        assert one.stream.handle != other.stream.handle
        opened = [prefilled(one, PROMPTS), prefilled(other, [3, 30])]
        graphs = [batch.capture() for batch, _, _ in opened]
        for steps in (1, 17, 60):
            for graph in graphs:
                graph.reserve(steps)
            for _ in range(steps):
                for graph in graphs:
                    graph.launch()
            for graph, (batch, naive, _) in zip(graphs, opened, strict=True):
                graph.advanced()
                naive.replayed(1, steps)
                naive.check_tables()
                naive.stepped(batch.step(1), dict.fromkeys(batch.sequences, 1))
        for graph, (batch, naive, _), theirs in zip(graphs, opened, (other, one), strict=True):
            naive.check_tables()
            batch.reserve(1)
            with pytest.raises(kv.StateError, match="stream"):
                graph.launch(theirs.stream)
            with pytest.raises(kv.InteropError, match="counts"):
                batch.step(1, counts=theirs.device.tensor((batch.plan.config.max_batch_size,), dtype("int32")))
