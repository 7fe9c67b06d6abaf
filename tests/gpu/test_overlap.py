"""Kernels whose blocks start while the kernel before still runs see all of what it has done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.device import Device, Stream, Tensor, create_device
from numba_kv.device.driver_functions import driver_version
from numba_kv.dtypes import dtype
from numba_kv.kernels.jit import Kernel, Launch, kernel
from numba_kv.kernels.launch_words import overlaps
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
        other = (item + 77) % 200
        target[np.uint64(item)] = source[np.uint64(other)] + 1 + spent // seven


ARGUMENTS = {"source": array("int32"), "target": array("int32"), "turns": scalar(), "seven": scalar()}
EARLY = kernel(block_form=True, **ARGUMENTS)(count_up)
KEEPS = kernel(block_form=True, keeps_next=True, **ARGUMENTS)(count_up)


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


@pytest.mark.parametrize("made", [EARLY, KEEPS], ids=["early", "late"])
@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
def test_each_kernel_sees_the_one_before(device: Device, made: Kernel, captured: bool) -> None:
    a, _, launches = chain(device, made)

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
    a, b, (there, back) = chain(device, EARLY)
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
    a, b, (there, back) = chain(device, EARLY)
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


def edges(device: Device, work: Callable[[Stream], None]) -> list[bool]:
    """Return for each edge of a captured graph whether its kernel may start before the other ends."""
    from cuda.bindings import driver

    stream = device.as_stream(None)
    handle = driver.CUstream(stream.handle)
    with device.active():
        (status,) = driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        assert int(status) == 0
        work(stream)
        status, graph = driver.cuStreamEndCapture(handle)
        assert int(status) == 0
        get: Any = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)
        status, *_, count = get(graph)
        assert int(status) == 0
        status, _, _, data, _ = get(graph, count)
        assert int(status) == 0
        found = [int(each.type) == 1 for each in data[:count]]
        driver.cuGraphDestroy(graph)
    stream.close()
    return found


def test_kernels_overlap_in_graphs_and_nothing_else_does(device: Device) -> None:
    a, b, (there, back) = chain(device, EARLY)
    for launch in (there, back):
        launch(BLOCKS, device.stream)
    there_is = overlaps(device.compute_capability) and driver_version() >= 12030  # type: ignore[attr-defined]

    def work(stream: Stream) -> None:
        there(BLOCKS, stream)
        back(BLOCKS, stream)
        device.fill(b, 3, stream)
        back(BLOCKS, stream)

    assert edges(device, work) == [there_is, False, False]
