"""Steps without the host on a GPU: captured by a batch, by torch, by cuda.core; driven by a sampler; on other streams."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.device.stream import CudaStream, Event
from numba_kv.dtypes import dtype
from tests.helpers.models import chunked, tiny_config
from tests.helpers.naive_batch import NaiveBatch

pytestmark = pytest.mark.gpu

ROWS = 4
PROMPTS = [5, 40, 1, 17]


def model(**limits: Any) -> kv.LLMEngineConfig:
    """Return a model with a full, a sliding and a chunked group: 4 rows of 640 tokens, pages of 4."""
    return tiny_config(
        None, 10, chunked(24), **{"max_batch_size": ROWS, "max_kv_cache_capacity": 640, "max_batch_tokens": 64, **limits}
    )


def prefilled(resources: kv.SharedResources, prompts: list[int]) -> tuple[kv.Batch, NaiveBatch, list[kv.Sequence]]:
    """Open a batch with its model and append the prompts."""
    batch = kv.Batch(resources)
    naive = NaiveBatch(batch)
    return batch, naive, admitted(batch, naive, prompts)


def admitted(batch: kv.Batch, naive: NaiveBatch, prompts: list[int]) -> list[kv.Sequence]:
    """Admit sequences and append their prompts, one after the other."""
    sequences = batch.update(admit=prompts)
    naive.admitted(sequences)
    for sequence in sequences:
        counts = {sequence: sequence.pending_tokens}
        naive.stepped(batch.step(counts), counts)
    return sequences


def addresses(batch: kv.Batch) -> list[int]:
    """Return where every device array of a batch is."""
    return [getattr(t, "address", 0) for t in vars(batch._buffers).values()]


@contextmanager
def on_torch(**limits: Any) -> Iterator[tuple[Any, Any, kv.SharedResources]]:
    """Give torch, a stream of it that is current, and resources on that stream."""
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    stream = torch.cuda.Stream()
    with (
        torch.cuda.stream(stream),
        kv.SharedResources.create_for_llm(model(**limits), target="cuda", stream=stream) as resources,
    ):
        yield torch, stream, resources


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


def test_torch_captures_the_step_beside_its_own_work() -> None:
    """torch captures in global mode, in which a first allocation anywhere would end the capture. cuda-python#2834.

    A torch kernel in the same graph writes what it is told by the slots of the step before it; at the end every key that the
    next query sees must lie where the block tables say.
    """
    with on_torch() as (torch, _, resources):
        batch, naive, _ = prefilled(resources, PROMPTS)
        buffers = batch._buffers
        slots = [torch.from_dlpack(t)[:ROWS] for t in buffers.slot_mapping]
        positions = torch.from_dlpack(buffers.positions)[:ROWS]
        row_codes = torch.arange(ROWS, device="cuda") * 1000
        # place 0 takes what is dropped
        logs = [torch.full((g.num_pages * g.page_tokens + 1,), -1, dtype=torch.int64, device="cuda") for g in batch.plan.groups]

        def write() -> None:
            for log, where in zip(logs, slots, strict=True):
                log.index_copy_(0, where + 1, row_codes + positions)

        for _ in range(3):  # torch loads its kernels before the capture
            counts = dict.fromkeys(batch.sequences, 1)
            naive.stepped(batch.step(1), counts)
            write()
        graph = torch.cuda.CUDAGraph()
        batch.reserve(150)
        with torch.cuda.graph(graph):
            batch.enqueue_step(torch.cuda.current_stream())
            write()
        assert batch.sequences[0].length == 8, "capturing appends nothing"
        for _ in range(150):
            graph.replay()
        batch.advanced(150)
        naive.replayed(1, 150)
        naive.check_tables()
        for g, log in enumerate(logs):
            found, blocks = log.cpu().numpy(), buffers.block_tables[g].to_host()
            page = batch.plan.groups[g].page_tokens
            for sequence in batch.sequences:
                first_seen = PROMPTS[sequence.row] + 1 if g == 0 else naive.lowest(g, sequence.length - 1)
                for position in range(first_seen, sequence.length):
                    slot = int(blocks[sequence.row, position // page]) * page + position % page
                    assert found[slot + 1] == 1000 * sequence.row + position
        del graph


def test_torch_graphs_read_derived_forms() -> None:
    """A form that was requested before is refreshed inside the graph, at the same addresses."""
    with on_torch() as (torch, _, resources):
        batch, naive, sequences = prefilled(resources, PROMPTS)
        form = batch.derived.csr(1)
        window = batch.derived.compact(1)
        starts, lens = torch.from_dlpack(form.kv_indptr), torch.from_dlpack(window.window_seq_lens)
        total = torch.zeros(2, dtype=torch.int64, device="cuda")
        total.add_(torch.stack([starts[-1], lens.sum()]))
        total.zero_()
        graph = torch.cuda.CUDAGraph()
        batch.reserve(20)
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream()
            batch.enqueue_step(stream)
            assert batch.derived.csr(1, stream) is form
            assert batch.derived.compact(1, stream) is window
            total.add_(torch.stack([starts[-1], lens.sum()]))
        expected = np.zeros(2, np.int64)
        for _ in range(20):
            graph.replay()
            for sequence in sequences:
                tokens = naive.sequences[sequence].tokens
                begin = naive.lowest(1, len(tokens)) // 4
                expected += [-(-(len(tokens) + 1) // 4) - begin, len(tokens) + 1 - 4 * begin]
                naive.sequences[sequence].tokens = [*tokens, 0]
        batch.advanced(20)
        assert total.tolist() == expected.tolist()
        batch.audit()
        del graph


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
    """Count calls that copy, fill, allocate, free or wait: in the driver's Python face and in streams and events."""
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
        assert calls["record"] == 1
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


@pytest.mark.parametrize("captured", [False, True])
def test_a_sampler_on_the_device_drives_steps(captured: bool) -> None:
    """torch writes counts and accepted counts between steps, on the same stream; nobody waits."""
    rng = np.random.default_rng(5)
    with on_torch(max_step_tokens=3) as (torch, _, resources):
        batch, _, sequences = prefilled(resources, PROMPTS)
        batch.step(3)
        steps, lengths, last = 60, np.array(PROMPTS) + 3, np.full(ROWS, 3)
        drawn = np.zeros((steps, 2, ROWS), np.int32)
        for step in drawn:
            step[0], step[1] = rng.integers(0, 4, ROWS), rng.integers(0, last + 1)
            lengths, last = lengths - last + step[1] + step[0], step[0].astype(np.int64)
        samples = torch.from_numpy(drawn).cuda()
        counts, accepted = (torch.zeros(ROWS, dtype=torch.int32, device="cuda") for _ in range(2))
        graph = batch.capture(3, counts=counts, accepted=accepted) if captured else None
        if graph is not None:
            graph.reserve(steps)
        for step in range(steps):
            counts.copy_(samples[step, 0])
            accepted.copy_(samples[step, 1])
            if graph is not None:
                graph.launch()
            else:
                batch.step(3, counts=counts, accepted=accepted)
        if graph is not None:
            graph.advanced()
        with pytest.raises(kv.StateError, match="sync_lengths"):
            _ = sequences[0].length
        batch.sync_lengths()
        assert [s.length for s in sequences] == lengths.tolist()
        batch.audit()
        batch.step(1)
        batch.audit()


def test_a_captured_step_keeps_its_arrays_alive() -> None:
    """The caller drops the counts, other captures push them out of every cache; they are still read. aiter#4587."""
    with on_torch(max_step_tokens=2) as (torch, _, resources):
        batch, _, sequences = prefilled(resources, PROMPTS)
        counts = torch.tensor([1, 2, 0, 2], dtype=torch.int32, device="cuda")
        alive = weakref.ref(counts)
        graph = batch.capture(2, counts=counts)
        del counts
        others = [torch.zeros(ROWS, dtype=torch.int32, device="cuda") for _ in range(12)]
        for other in others:
            batch.capture(2, counts=other).close()
        gc.collect()
        assert alive() is not None
        torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
        graph.reserve(5)
        for _ in range(5):
            graph.launch()
        graph.advanced()
        batch.sync_lengths()
        assert [s.length for s in sequences] == [n + 5 * k for n, k in zip(PROMPTS, (1, 2, 0, 2), strict=True)]
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


def test_a_capture_of_the_resources_own_stream() -> None:
    """The stream that everything is enqueued on may be the one that torch captures."""
    with on_torch() as (torch, stream, resources):
        batch, naive, _ = prefilled(resources, PROMPTS)
        graph = torch.cuda.CUDAGraph()
        batch.reserve(30)
        made = resources.device.memory.allocations
        with torch.cuda.graph(graph, stream=stream):
            with pytest.raises(kv.StateError, match="request it once before the capture"):
                batch.derived.compact(1)
            batch.enqueue_step(stream)
        assert resources.device.memory.allocations == made
        for _ in range(30):
            graph.replay()
        batch.advanced(30)
        naive.replayed(1, 30)
        naive.check_tables()
        batch.derived.compact(1)
        del graph


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


def test_hand_over_orders_all_work_behind_an_event() -> None:
    """A busy stream is left; torch reads on the new one what the old one was told to compute, and nobody waits."""
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    with kv.SharedResources.create_for_llm(model(), target="cuda") as resources:
        device, old = resources.device, resources.stream
        batch, naive, _ = prefilled(resources, PROMPTS)
        graph, stream = batch.capture(steps=5), torch.cuda.Stream()
        graph.reserve(15)
        busy = device.tensor((1 << 28,), dtype("int32"))
        for value in range(200):
            device.fill(busy, value, old)
        graph.launch()
        resources.hand_over(stream)
        assert resources.stream.handle == stream.cuda_stream
        with torch.cuda.stream(stream):
            seen = torch.from_dlpack(batch._buffers.seq_lens).clone()
            assert not old.record().is_done, "the delay was too short to show anything"
            graph.launch()
            graph.launch(stream)
            after = torch.from_dlpack(batch._buffers.seq_lens).clone()
            assert seen.tolist() == [n + 5 for n in PROMPTS]
            assert after.tolist() == [n + 15 for n in PROMPTS]
        graph.advanced()
        naive.replayed(1, 15)
        graph.reserve(5)
        for refused in (graph.launch, batch.enqueue_step):
            with pytest.raises(kv.StateError, match="hand_over"):
                refused(old)
        naive.stepped(batch.step(1), dict.fromkeys(batch.sequences, 1))
        naive.check_tables()
        del busy


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
