"""Memory: counted, zeroed, aligned, given back once; tensors of closed memory refuse."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

from numba_kv.device import Device, Memory, MemoryStats, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import CapacityError, StateError


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def test_bytes_are_counted() -> None:
    device = create_device()
    first, second = device.allocate(1000), device.allocate(3 << 20)
    assert device.memory.current_bytes == 1000 + (3 << 20)
    first.close(device.stream)
    third = device.allocate(24)
    assert device.memory == MemoryStats(
        current_bytes=24 + (3 << 20),
        peak_bytes=1000 + (3 << 20),
        total_bytes=1024 + (3 << 20),
        allocations=3,
        frees=1,
    )
    for memory in (second, third):
        memory.close(device.stream)
    assert device.memory.current_bytes == 0
    assert device.pinned == MemoryStats()


@pytest.mark.parametrize("nbytes", [1, 255, 4096, 1 << 20, (1 << 20) + 1])
def test_memory_is_zero_and_aligned(device: Device, nbytes: int) -> None:
    for _ in range(3):
        memory = device.allocate(nbytes)
        assert memory.address % 256 == 0
        tensor = Tensor(memory, device, dtype("uint8"), (nbytes,))
        assert not tensor.to_host().any()
        device.fill(tensor, 255, device.stream)
        memory.close(device.stream)


def test_memory_is_given_back_once() -> None:
    device = create_device()
    memory = device.allocate(512)
    memory.close(device.stream)
    memory.close(device.stream)
    assert memory.is_closed
    assert (device.memory.current_bytes, device.memory.frees) == (0, 1)


def test_device_memory_that_is_lent_is_freed_by_the_last_who_uses_it() -> None:
    class Native:
        freed = 0

        def close(self, stream: object) -> None:
            Native.freed += 1

    class Holder:
        memory = None

    class Stream:
        native = None
        is_closed = False
        active = staticmethod(nullcontext)

    stats = MemoryStats()
    memory = Memory(256, 64, None, Native(), stats)
    holders = [Holder() for _ in range(3)]
    for holder in holders:
        memory.lend(holder)
    alive = weakref.ref(memory._native)
    del holders[1]
    memory.close(Stream())
    assert memory.is_closed
    assert (stats.current_bytes, Native.freed) == (0, 0)
    del holders[0], holder
    assert alive() is not None
    holders.clear()
    gc.collect()
    assert alive() is None  # the buffer's own finalizer gives it back
    other = Memory(256, 64, None, Native(), stats)
    other.lend(gone := Holder())
    del gone
    other.close(Stream())
    assert Native.freed == 1


def test_dropped_memory_is_counted_as_given_back() -> None:
    device = create_device()
    for _ in range(1000):
        device.tensor((64,), dtype("int32"))
    gc.collect()
    assert (device.memory.current_bytes, device.memory.frees) == (0, 1000)


USES = {
    "index": lambda t: t[0],
    "to_host": lambda t: t.to_host(),
    "fill_from": lambda t: t.fill_from(np.zeros(4, np.int32)),
    "fill": lambda t: t.device.fill(t, 0, t.device.stream),
    "numpy": lambda t: t.numpy(),
    "dlpack": lambda t: t.__dlpack__(),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_close_is_an_error(device: Device, use: str) -> None:
    memory: Memory = device.allocate(16)
    tensor = Tensor(memory, device, dtype("int32"), (4,))
    memory.close(device.stream)
    with pytest.raises(StateError, match="has been given back"):
        USES[use](tensor)


def test_more_memory_than_there_is_is_a_typed_error(device: Device) -> None:
    with pytest.raises(CapacityError, match="bytes") as caught:
        device.allocate(1 << 62)
    assert caught.value.needed == 1 << 62
    assert device.memory.current_bytes < 1 << 62
