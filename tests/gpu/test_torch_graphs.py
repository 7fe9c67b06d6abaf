"""Steps beside torch: in a graph that torch captures, driven by a sampler in torch, on a stream of torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.dtypes import dtype
from tests.helpers.captured import PROMPTS, ROWS, model, prefilled

pytestmark = pytest.mark.gpu


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
                first_seen = PROMPTS[sequence.row] if g == 0 else naive.lowest(g, sequence.length - 1)
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
        total.add_(torch.stack([starts[-1].long(), lens.sum()]))
        total.zero_()
        graph = torch.cuda.CUDAGraph()
        batch.reserve(20)
        with torch.cuda.graph(graph):
            stream = torch.cuda.current_stream()
            batch.enqueue_step(stream)
            assert batch.derived.csr(1, stream) is form
            assert batch.derived.compact(1, stream) is window
            total.add_(torch.stack([starts[-1].long(), lens.sum()]))
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


def test_hand_over_orders_all_work_behind_an_event() -> None:
    """A busy stream is left; torch reads on the new one what the old one was told to compute, and nobody waits."""
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    with kv.SharedResources.create_for_llm(model(), target="cuda") as resources:
        device, old = resources.device, resources.stream
        batch, naive, _ = prefilled(resources, PROMPTS)
        graph, stream = batch.capture(steps=5), torch.cuda.Stream()
        graph.reserve(15)
        with torch.cuda.stream(stream):  # what torch needs for the first time is there before the delay
            torch.from_dlpack(batch._buffers.seq_lens).clone().tolist()
        busy = device.tensor((1 << 28,), dtype("int32"))
        for value in range(500):
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
