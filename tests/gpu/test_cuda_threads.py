"""Threads and contexts on a real driver: calls where no context is current, and callers whose own choice stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.device import Device, create_device
from numba_kv.device.cuda_device import CudaDevice
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import CapacityError, InputError, InteropError
from numba_kv.kernels import on_cuda
from numba_kv.kernels.gather import gather_rows
from tests.helpers.threads import in_a_thread

pytestmark = pytest.mark.gpu

INT32 = dtype("int32")


@pytest.fixture
def device() -> Iterator[Device]:
    device = create_device("cuda")
    yield device
    device.stream.synchronize()


def current_context() -> int:
    from cuda.bindings import driver

    status, context = driver.cuCtxGetCurrent()
    assert not int(status)
    return int(context)


def without_context(call: Callable[[], Any]) -> Any:
    """Call in a fresh thread, where no context is current, and check that none is afterwards."""

    def run() -> Any:
        assert current_context() == 0
        value = call()
        assert current_context() == 0
        return value

    return in_a_thread(run)


def test_a_fresh_thread_keeps_having_no_context(device: Device) -> None:
    tensor = without_context(lambda: device.tensor((4,), INT32))
    without_context(lambda: tensor.fill_from(np.arange(4, dtype=np.int32)))
    assert without_context(tensor.to_host).tolist() == [0, 1, 2, 3]
    without_context(lambda: device.fill(tensor, 5, device.stream))
    other = without_context(lambda: device.as_stream(None))
    event = without_context(lambda: device.stream.record(timing=True))
    without_context(lambda: other.wait(event))
    last = without_context(lambda: other.record(timing=True))
    without_context(other.synchronize)
    without_context(last.synchronize)
    assert without_context(lambda: last.is_done)
    assert without_context(lambda: last.microseconds_since(event)) >= 0
    for stream in (None, 1, 2, -1, other.handle):
        without_context(lambda stream=stream: tensor.__dlpack__(stream=stream))
    without_context(lambda: as_tensor(device, Shown(tensor), "counts"))
    pages = without_context(lambda: device.allocate_staging(64))
    without_context(lambda: pages.close(device.stream))
    memory = without_context(lambda: device.allocate(64))
    without_context(lambda: memory.close(device.stream))
    without_context(other.close)
    assert tensor.to_host().tolist() == [5] * 4


def test_page_locked_pages_go_back_in_a_thread_without_a_context(device: Device, recwarn: pytest.WarningsRecorder) -> None:
    held = [device.allocate_staging(1 << 20)]
    held[0].array[:] = 1  # type: ignore[index]
    without_context(held.clear)
    assert device.pinned.current_bytes == 0
    assert not recwarn.list


def test_a_device_made_in_a_thread_works_in_others() -> None:
    device = in_a_thread(lambda: create_device("cuda"))
    tensor = without_context(lambda: device.tensor((3,), INT32))
    assert without_context(tensor.to_host).tolist() == [0, 0, 0]
    assert tensor.to_host().tolist() == [0, 0, 0]


def test_a_device_that_cannot_be_made_leaves_no_context() -> None:
    def refused() -> None:
        with pytest.raises(InputError, match="0 is the legacy default stream"):
            create_device("cuda", 0, 0)

    without_context(refused)


def test_a_kernel_is_loaded_in_a_thread_without_a_context(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded belongs to the device's context, and is kept for other threads."""
    monkeypatch.setattr(on_cuda, "_functions", {})
    source, slots = device.tensor((4,), INT32), device.tensor((2,), INT32)
    source.fill_from(np.array([1, 2, 3, 4], np.int32))
    slots.fill_from(np.array([1, 0], np.int32))
    found = device.tensor((4,), INT32)
    values = {"destination": found, "table": source, "slots": slots, "num_slots": 2, "row_words": 2, "missing": -1}
    launch = without_context(lambda: gather_rows.bind(device, values))
    with device.active():
        launch(2, device.stream)
    assert found.to_host().tolist() == [3, 4, 1, 2]


def test_another_current_device_stays_current(device: Device) -> None:
    from cuda.bindings import driver

    if driver.cuDeviceGetCount()[1] < 2:
        pytest.skip("needs two devices")

    def work() -> list[int]:
        other = create_device("cuda", 1)
        assert isinstance(other, CudaDevice)
        mine = current_context()
        tensor = device.tensor((4,), INT32)
        tensor.fill_from(np.arange(4, dtype=np.int32))
        foreign = other.tensor((4,), INT32)
        with pytest.raises(InteropError, match="counts: the array lies in the memory of device 1, not in that of device 0"):
            as_tensor(device, Shown(foreign), "counts")
        assert current_context() == mine
        return tensor.to_host().tolist()  # type: ignore[no-any-return]

    assert in_a_thread(work) == [0, 1, 2, 3]


class Shown:
    """Somebody else's array at a tensor's memory, or at any address."""

    def __init__(self, tensor: Any = None, address: int = 0) -> None:
        data = tensor.address if tensor is not None else address
        self.owner = tensor
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<i4", "data": (data, False), "strides": None, "version": 3}


def test_arrays_in_host_memory_are_refused(device: Device) -> None:
    pages, plain = device.allocate_staging(64), np.zeros(4, np.int32)
    with pytest.raises(InteropError, match="counts: the array lies in host memory, not in that of device 0"):
        as_tensor(device, Shown(address=pages.address), "counts")
    with pytest.raises(InteropError, match="counts: the array lies in .*memory.*, not in that of device 0"):
        as_tensor(device, Shown(address=plain.ctypes.data), "counts")
    assert as_tensor(device, Shown(device.tensor((4,), INT32)), "counts").shape == (4,)
    pages.close(device.stream)


@pytest.mark.parametrize("nbytes", [1 << 45, 1 << 50])
def test_memory_that_is_not_there_is_a_capacity_error(device: Device, nbytes: int) -> None:
    held = device.memory.current_bytes
    with pytest.raises(CapacityError, match=f"memory of device 0: {nbytes} bytes are wanted") as caught:
        device.allocate(nbytes)
    assert 0 < caught.value.free < nbytes == caught.value.needed
    assert device.memory.current_bytes == held
    assert device.tensor((4,), INT32).to_host().tolist() == [0] * 4


def test_a_consumer_inside_a_capture_is_not_made_to_wait(device: Device) -> None:
    tensor = device.tensor((4,), INT32)

    def work(stream: Any) -> None:
        tensor.__dlpack__(stream=stream.handle)
        device.fill(tensor, 3, stream)

    graph = device.capture(work)
    graph.launch(device.stream)
    assert tensor.to_host().tolist() == [3] * 4
    graph.close()
