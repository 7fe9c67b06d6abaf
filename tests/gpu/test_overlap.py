"""Kernels whose blocks start while the kernel before still runs see all of what it has done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.device import Device, Stream, Tensor, create_device
from numba_kv.device.driver import check_driver
from numba_kv.device.driver_functions import driver_version
from numba_kv.dtypes import dtype
from numba_kv.kernels import on_cuda
from numba_kv.kernels.jit import Kernel, Launch, kernel
from numba_kv.kernels.launch_words import FOLLOWED, can_overlap
from numba_kv.kernels.spec import array, scalar

pytestmark = pytest.mark.gpu

INT32 = dtype("int32")
BLOCKS, STEPS = 200, 40


def count_up(item, lane, lanes, source, target, turns, seven):  # type: ignore[no-untyped-def]
    """Set an element of `target` to one more than that of another block in `source`, after a while that differs by block."""
    if lane == 0:
        spent = np.int64(0)
        for turn in range(turns * (item % 5)):
            spent = (spent * 5 + turn) % seven
        other = (item + 77) % 200  # BLOCKS
        target[np.uint64(item)] = source[np.uint64(other)] + 1 + spent // seven


ARGUMENTS = {"source": array("int32"), "target": array("int32"), "turns": scalar(), "seven": scalar()}
MADE = {followed: kernel(block_form=True, followed=followed, **ARGUMENTS)(count_up) for followed in FOLLOWED}


@pytest.fixture
def device() -> Iterator[Device]:
    device = create_device("cuda")
    yield device
    device.stream.synchronize()


def chain(device: Device, made: Kernel) -> tuple[Tensor, Tensor, list[Launch]]:
    """Return two arrays, and the launches that count up from one to the other and back."""
    a, b = device.tensor((BLOCKS,), INT32), device.tensor((BLOCKS,), INT32)
    launches = [
        made.bind(device, {"source": s, "target": t, "turns": 200, "seven": 7}, threads=32) for s, t in ((a, b), (b, a))
    ]
    return a, b, launches


@pytest.mark.parametrize("followed", FOLLOWED)
@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
def test_each_kernel_sees_the_one_before(device: Device, followed: str, captured: bool) -> None:
    a, _, launches = chain(device, MADE[followed])

    def work(stream: Stream) -> None:
        for step in range(STEPS):
            launches[step % 2](BLOCKS, stream)

    graph = device.capture(work) if captured else None
    for turn in range(1, 6):
        if graph is None:
            work(device.stream)
        else:
            graph.launch(device.stream)
        assert a.to_host().tolist() == [turn * STEPS] * BLOCKS


def test_copies_and_fills_between_kernels_keep_their_place(device: Device) -> None:
    a, b, (there, back) = chain(device, MADE["early"])
    held = np.full(BLOCKS, 1000, np.int32)
    for _ in range(20):
        device.fill(a, 5, device.stream)
        there(BLOCKS, device.stream)
        device.fill(a, 0, device.stream)  # behind the kernel that reads it
        back(BLOCKS, device.stream)
        assert a.to_host().tolist() == [7] * BLOCKS
        b.fill_from(held)
        back(BLOCKS, device.stream)
        assert a.to_host().tolist() == [1001] * BLOCKS


def test_a_kernel_waits_for_an_event_of_another_stream(device: Device) -> None:
    a, b, (there, back) = chain(device, MADE["early"])
    other = device.as_stream(None)
    turns = 20
    for _ in range(turns):
        there(BLOCKS, device.stream)
        other.wait(device.stream.record())
        back(BLOCKS, other)
        device.stream.wait(other.record())
    assert a.to_host().tolist() == [2 * turns] * BLOCKS
    assert b.to_host().tolist() == [2 * turns - 1] * BLOCKS
    other.close()


def test_without_the_wait_the_chain_goes_wrong(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above show nothing."""
    if not may_overlap(device):
        pytest.skip("no kernel of this GPU or driver starts early")
    control = on_cuda.grid_control
    monkeypatch.setattr(on_cuda, "grid_control", lambda what: control("launch_dependents"))
    monkeypatch.setattr(on_cuda, "read_product", lambda *place: None)
    monkeypatch.setattr(on_cuda, "write_product", lambda *place: None)
    a, _, launches = chain(device, kernel(block_form=True, followed="early", **ARGUMENTS)(count_up))
    for step in range(STEPS):
        launches[step % 2](BLOCKS, device.stream)
    assert a.to_host().min() < STEPS


def test_lines_that_blocks_share_are_read_as_they_are(device: Device) -> None:
    """Each step reads, through the cache of its multiprocessor, what blocks elsewhere wrote in the step before."""
    a, _, _ = chain(device, MADE["early"])
    again = MADE["early"].bind(device, {"source": a, "target": a, "turns": 0, "seven": 7}, threads=32)
    one_at_a_time = device.tensor((BLOCKS,), INT32)
    copy = MADE["early"].bind(device, {"source": one_at_a_time, "target": a, "turns": 0, "seven": 7}, threads=32)
    for _ in range(30):
        device.fill(one_at_a_time, 4, device.stream)
        copy(BLOCKS, device.stream)  # all 5
        again(1, device.stream)  # element 0 becomes 6, of 77
        assert a.to_host().tolist() == [6] + [5] * (BLOCKS - 1)


def test_a_capture_that_forks_and_joins(device: Device) -> None:
    a, b, (there, back) = chain(device, MADE["early"])
    side = device.as_stream(None)

    def work(stream: Stream) -> None:
        device.fill(a, 10, stream)
        there(BLOCKS, stream)
        side.wait(stream.record())
        back(BLOCKS, side)  # a = 12
        stream.wait(side.record())
        there(BLOCKS, stream)

    there(BLOCKS, device.stream)
    graph = device.capture(work)
    for _ in range(10):
        device.fill(b, 0, device.stream)
        graph.launch(device.stream)
        assert (a.to_host().tolist(), b.to_host().tolist()) == ([12] * BLOCKS, [13] * BLOCKS)
    side.close()


def test_kernels_of_torch_between_ours(device: Device) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    a, b, (there, back) = chain(device, MADE["early"])
    seen_a, seen_b = torch.from_dlpack(a), torch.from_dlpack(b)
    with torch.cuda.stream(torch.cuda.ExternalStream(device.stream.handle)):
        for _ in range(20):
            seen_a.fill_(3)
            there(BLOCKS, device.stream)
            seen_b.mul_(10)
            back(BLOCKS, device.stream)
            assert (seen_a.cpu() == 41).all()


def may_overlap(device: Device) -> bool:
    return can_overlap(device.compute_capability) and driver_version() >= 12030  # type: ignore[attr-defined]


def programmatic_edges(device: Device, work: Callable[[Stream], None]) -> tuple[int, int]:
    """Return how many edges a captured graph has, and in how many of them a kernel may start before the other ends."""
    from cuda.bindings import driver

    stream = device.as_stream(None)
    handle = driver.CUstream(stream.handle)
    get: Any = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with device.active():
        check_driver(driver.cuStreamBeginCapture(handle, mode), "begin")
        try:
            work(stream)
        finally:
            graph = check_driver(driver.cuStreamEndCapture(handle), "end")
        try:
            count = check_driver(get(graph), "edges")[-1]
            found = check_driver(get(graph, count), "edges")[2]
        finally:
            driver.cuGraphDestroy(graph)
    stream.close()
    return count, sum(int(each.type) == 1 for each in found[:count])


def test_kernels_overlap_in_graphs_and_nothing_else_does(device: Device) -> None:
    a, b, (there, back) = chain(device, MADE["early"])
    for launch in (there, back):
        launch(BLOCKS, device.stream)
    if driver_version() < 12030:
        pytest.skip("edges of this driver's graphs have no types")

    def work(stream: Stream) -> None:
        there(BLOCKS, stream)
        back(BLOCKS, stream)
        device.fill(b, 3, stream)
        back(BLOCKS, stream)

    assert programmatic_edges(device, work) == (3, int(may_overlap(device)))
