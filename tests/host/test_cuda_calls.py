"""CudaDevice on a stand-in for the driver: contexts of any thread, failures, and what is asked before arrays are exchanged."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from numba_kv.device import Staging
from numba_kv.device.cuda_device import CudaDevice
from numba_kv.device.driver import raise_allocation_error
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import CapacityError, DeviceError, InputError, InteropError, StateError
from tests.helpers.fake_driver import MINE, OTHER, FakeDriver, FakeNative, cuda_device, fakes

INT32 = dtype("int32")
Fake = tuple[CudaDevice, FakeDriver, FakeNative]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    with cuda_device(monkeypatch) as fake:
        yield fake


# -- contexts


def use_staging(device: CudaDevice) -> None:
    staging, tensor = Staging(device, 4, initial_blocks=2), device.tensor((4,), INT32)
    for _ in range(3):
        staging.acquire()[:] = 7
        staging.send([(0, 4, tensor, 0)], device.stream)
    staging.close()


def use_blocks(device: CudaDevice) -> None:
    staging = Staging(device, 4, initial_blocks=2)
    for _ in range(5):
        staging.acquire()[:] = 7
        staging.send_to(0xA000, 4, device.stream)
    staging.close()


def use_event(device: CudaDevice) -> None:
    event = device.stream.record(timing=True)
    event.synchronize()
    assert event.is_done
    assert event.microseconds_since(device.stream.record(timing=True)) == 1e3


def use_stream(device: CudaDevice) -> None:
    stream = device.as_stream(None)
    stream.wait(device.stream.record())
    stream.synchronize()
    stream.close()


USES: dict[str, tuple[Callable[[CudaDevice], Any], set[str]]] = {
    "streams": (use_stream, {"create_stream", "record", "wait", "sync", "stream close"}),
    "events": (use_event, {"record", "event sync", "is_done", "elapsed"}),
    "memory": (lambda d: d.allocate(16).close(d.stream), {"allocate", "cuMemsetD8Async", "buffer close"}),
    "staging": (use_staging, {"pinned allocate", "cuMemcpyHtoDAsync", "record", "is_done", "event sync", "buffer close"}),
    "blocks": (use_blocks, {"pinned allocate", "cuMemcpyHtoDAsync", "record", "is_done", "event sync", "buffer close"}),
    "capture query": (lambda d: d.stream.is_capturing, {"cuStreamIsCapturing"}),
    "fill": (lambda d: d.fill(d.tensor((4,), INT32), 1, d.stream), {"cuMemsetD32Async"}),
    "fill_from": (lambda d: d.tensor((4,), INT32).fill_from(np.zeros(4, np.int32)), {"cuMemcpyHtoDAsync", "sync"}),
    "to_host": (lambda d: d.tensor((4,), INT32).to_host(), {"cuMemcpyDtoHAsync", "sync"}),
    "copy_to_device": (lambda d: d.copy_to_device(1, 2, 4, d.stream), {"cuMemcpyHtoDAsync"}),
    "copy_to_host": (lambda d: d.copy_to_host(2, 1, 4, d.stream), {"cuMemcpyDtoHAsync", "sync"}),
    "dlpack": (lambda d: d.tensor((4,), INT32).__dlpack__(stream=0x99), {"cuStreamIsCapturing", "record", "cuStreamWaitEvent"}),
    "interop": (lambda d: d.foreign_place(0x10), {"cuPointerGetAttribute"}),
}


def say_nothing_is_captured(driver: FakeDriver) -> None:
    driver.results["cuStreamIsCapturing"] = (0, driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)
    driver.results["cuPointerGetAttribute"] = (0, 1)


@pytest.mark.parametrize("before", [[], [OTHER], [OTHER, MINE]], ids=["no context", "another one", "the device's"])
@pytest.mark.parametrize("use", USES)
def test_every_call_has_the_device_current_and_leaves_the_thread_as_it_was(fake: Fake, use: str, before: list[int]) -> None:
    device, driver, _ = fake
    call, wanted = USES[use]
    say_nothing_is_captured(driver)
    driver.stack[:] = before
    call(device)
    gc.collect()
    assert driver.stack == before
    assert wanted <= {name for name, _ in driver.calls}
    assert {context for _, context in driver.calls} == {MINE}, driver.calls


@pytest.mark.parametrize("before", [[], [OTHER]])
def test_a_failed_call_leaves_the_thread_as_it_was(fake: Fake, before: list[int]) -> None:
    device, driver, native = fake
    driver.stack[:] = before
    failed = (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    driver.results = {name: failed for name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemsetD8Async")}
    native.failure = RuntimeError("no stream")
    for call in (
        lambda: device.copy_to_device(1, 2, 4, device.stream),
        lambda: device.copy_to_host(1, 2, 4, device.stream),
        lambda: device.as_stream(None),
        lambda: device.as_stream(0),
    ):
        with pytest.raises((DeviceError, RuntimeError, InputError)):
            call()
        assert driver.stack == before
    native.failure = None
    with pytest.raises(DeviceError, match="zeroing new memory"):
        device.allocate(16)
    assert driver.stack == before


@pytest.mark.parametrize("before", [[], [OTHER]])
def test_a_block_that_cannot_be_copied_leaves_the_thread_as_it_was(fake: Fake, before: list[int]) -> None:
    """The first use of a block makes its event, a later one records it anew: both end alike."""
    device, driver, _ = fake
    driver.stack[:] = before
    staging = Staging(device, 4)
    for _ in range(2):
        driver.results["cuMemcpyHtoDAsync"] = (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        with pytest.raises(DeviceError, match="copy to the device: the driver reports CUDA_ERROR_ILLEGAL_ADDRESS"):
            staging.send_to(0xA000, 4, device.stream)
        assert driver.stack == before
        assert device.bytes_to_device == 0
        del driver.results["cuMemcpyHtoDAsync"]
        staging.send_to(0xA000, 4, device.stream)
        assert device.bytes_to_device == 16
        device.bytes_sent = 0


def test_a_block_is_one_copy_and_one_event(fake: Fake) -> None:
    """What a composition change asks of the driver besides its kernel. A query tells whether the block is free again."""
    device, driver, _ = fake
    say_nothing_is_captured(driver)
    staging = Staging(device, 4)
    staging.send_to(0xA000, 4, device.stream)
    driver.calls.clear()
    staging.acquire()
    assert not device.stream.is_capturing
    staging.send_to(0xA000, 4, device.stream)
    assert [name for name, _ in driver.calls] == ["is_done", "cuStreamIsCapturing", "cuMemcpyHtoDAsync", "record"]


@pytest.mark.parametrize(("status", "found"), [("NONE", False), ("ACTIVE", True), ("INVALIDATED", True)])
@pytest.mark.parametrize("before", [[], [OTHER], [MINE]])
def test_a_stream_says_whether_it_is_captured(fake: Fake, before: list[int], status: str, found: bool) -> None:
    device, driver, _ = fake
    driver.stack[:] = before
    answer = getattr(driver.CUstreamCaptureStatus, f"CU_STREAM_CAPTURE_STATUS_{status}")
    driver.results["cuStreamIsCapturing"] = (driver.CUresult.CUDA_SUCCESS, answer)
    assert device.stream.is_capturing is found
    driver.results["cuStreamIsCapturing"] = (driver.CUresult.CUDA_ERROR_INVALID_HANDLE, answer)
    with pytest.raises(DeviceError, match="capture query: the driver reports CUDA_ERROR_INVALID_HANDLE"):
        _ = device.stream.is_capturing
    assert driver.stack == before


def test_page_locked_pages_go_back_with_the_last_array_of_them(fake: Fake) -> None:
    device, driver, _ = fake
    memory = device.allocate_staging(16)
    shown = memory.array
    memory.close(device.stream)
    del memory
    gc.collect()
    assert "buffer close" not in {name for name, _ in driver.calls}
    driver.stack[:] = [OTHER]
    del shown
    gc.collect()
    assert ("buffer close", MINE) in driver.calls
    assert driver.stack == [OTHER]


def test_pages_that_outlive_the_driver_are_left_to_the_process(fake: Fake) -> None:
    device, driver, _ = fake
    memory = device.allocate_staging(16)
    driver.cuCtxGetCurrent = lambda: (driver.CUresult.CUDA_ERROR_DEINITIALIZED, 0)  # type: ignore[method-assign]
    driver.cuCtxPushCurrent = lambda context: (driver.CUresult.CUDA_ERROR_DEINITIALIZED,)  # type: ignore[method-assign]
    del memory
    gc.collect()  # an error here would be an unraisable one
    assert "buffer close" not in {name for name, _ in driver.calls}


@pytest.mark.parametrize(("before", "after"), [([], [MINE]), ([OTHER], [OTHER]), ([MINE], [MINE])])
def test_a_new_device_leaves_the_caller_s_choice(monkeypatch: pytest.MonkeyPatch, before: list[int], after: list[int]) -> None:
    with fakes(monkeypatch) as (driver, _):
        driver.stack[:] = before
        CudaDevice(0)
        assert driver.stack == after


@pytest.mark.parametrize("before", [[], [OTHER]])
@pytest.mark.parametrize("stream", [0, "main", None])
def test_a_device_that_cannot_be_made_leaves_the_caller_s_choice(
    monkeypatch: pytest.MonkeyPatch, stream: object, before: list[int]
) -> None:
    with fakes(monkeypatch) as (driver, native):
        driver.stack[:] = before
        native.failure = RuntimeError("no stream")
        with pytest.raises((InputError, RuntimeError)):
            CudaDevice(0, stream)
        assert driver.stack == before


# -- memory that is not there


class ForeignError(Exception):
    """What cuda.core raises; its class has no public name."""


@pytest.mark.parametrize("status", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_VALUE"])
def test_memory_that_is_not_there_is_a_capacity_error(fake: Fake, status: str) -> None:
    device, driver, native = fake
    driver.results["cuMemGetInfo"] = (0, 1000, 5000)
    native.failure = ForeignError(f"{status}: the call failed")
    with pytest.raises(CapacityError, match=f"memory of device 0: 1234 bytes are wanted, 1000 are free .{status}") as caught:
        device.allocate(1234)
    assert (caught.value.needed, caught.value.free) == (1234, 1000)
    assert caught.value.__cause__ is native.failure
    with pytest.raises(CapacityError, match="page-locked host memory: 1234 bytes are wanted"):
        device.allocate_staging(1234)
    assert device.memory.current_bytes == device.pinned.current_bytes == 0


def test_other_failures_of_an_allocation_stay_what_they_are(fake: Fake) -> None:
    device, _, native = fake
    native.failure = ForeignError("CUDA_ERROR_ILLEGAL_ADDRESS: an earlier kernel")
    for allocate in (device.allocate, device.allocate_staging):
        with pytest.raises(DeviceError, match="allocating 16 bytes, the driver reports CUDA_ERROR_ILLEGAL_ADDRESS"):
            allocate(16)
    native.failure = RuntimeError("the stream is captured")
    for allocate in (device.allocate, device.allocate_staging):
        with pytest.raises(RuntimeError, match="the stream is captured") as caught:
            allocate(16)
        assert caught.value is native.failure


def test_an_error_of_cuda_core_is_told_by_its_text() -> None:
    """The text of the installed version is what is relied on."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed (pip install 'numba-kv[cu13]')")
    utils = pytest.importorskip("cuda.core._utils.cuda_utils", reason="cuda-core keeps its errors elsewhere")
    try:
        utils._check_driver_error(driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    except utils.CUDAError as error:
        with pytest.raises(CapacityError):
            raise_allocation_error(error, "memory", 1, lambda: 0)
    except Exception as error:
        pytest.skip(f"without a driver there is no text ({type(error).__name__})")


# -- exchange


def array_at(address: int, typestr: str = "<i4", size: int = 4) -> Any:
    shown = {"shape": (size,), "typestr": typestr, "data": (address, False), "strides": None, "version": 3}
    return SimpleNamespace(__cuda_array_interface__=shown)


def lies(driver: FakeDriver, kind: str, ordinal: int, managed: bool = False) -> None:
    """Let every pointer lie there."""
    attribute = driver.CUpointer_attribute
    found = {
        attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: getattr(driver.CUmemorytype, f"CU_MEMORYTYPE_{kind}"),
        attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: ordinal,
        attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED: managed,
    }
    driver.results["cuPointerGetAttribute"] = lambda which, address: (driver.CUresult.CUDA_SUCCESS, found[which])


@pytest.mark.parametrize(("kind", "ordinal", "managed"), [("DEVICE", 0, False), ("DEVICE", 1, True), ("HOST", 0, True)])
def test_arrays_of_the_device_are_taken(fake: Fake, kind: str, ordinal: int, managed: bool) -> None:
    device, driver, _ = fake
    lies(driver, kind, ordinal, managed)
    tensor = as_tensor(device, array_at(0x5000), "counts")
    assert (tensor.address, tensor.shape, tensor.dtype) == (0x5000, (4,), INT32)


@pytest.mark.parametrize(
    ("kind", "ordinal", "place"),
    [("DEVICE", 1, "the memory of device 1"), ("HOST", 0, "host memory"), ("UNIFIED", 0, "host memory")],
)
def test_arrays_elsewhere_are_refused(fake: Fake, kind: str, ordinal: int, place: str) -> None:
    device, driver, _ = fake
    lies(driver, kind, ordinal)
    with pytest.raises(InteropError, match=f"counts: the array lies in {place}, not in that of device 0; move it there"):
        as_tensor(device, array_at(0x5000), "counts")


def test_pointers_that_the_driver_does_not_know_are_refused(fake: Fake) -> None:
    device, driver, _ = fake
    driver.results["cuPointerGetAttribute"] = (driver.CUresult.CUDA_ERROR_INVALID_VALUE, None)
    with pytest.raises(InteropError, match="lies in memory that the driver does not know"):
        as_tensor(device, array_at(0x5000), "counts")
    driver.results["cuPointerGetAttribute"] = (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, None)
    with pytest.raises(DeviceError, match="memory type of a pointer: the driver reports CUDA_ERROR_ILLEGAL_ADDRESS"):
        as_tensor(device, array_at(0x5000), "counts")


def test_an_array_without_elements_lies_nowhere(fake: Fake) -> None:
    device, driver, _ = fake
    assert as_tensor(device, array_at(0, size=0), "counts").shape == (0,)
    assert "cuPointerGetAttribute" not in driver.arguments


def test_the_other_byte_order_is_refused(fake: Fake) -> None:
    device, driver, _ = fake
    lies(driver, "DEVICE", 0)
    with pytest.raises(InteropError, match="counts: elements of type '>i4' have the other byte order; convert them to '<i4'"):
        as_tensor(device, array_at(0x5000, ">i4"), "counts")


# -- consumers of DLPack


@pytest.mark.parametrize(("stream", "handle"), [(None, 1), (1, 1), (2, 2), (0x99, 0x99)])
@pytest.mark.parametrize("status", ["CUDA_SUCCESS", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_HANDLE"])
def test_a_consumer_waits_even_if_the_capture_query_fails(fake: Fake, status: str, stream: object, handle: int) -> None:
    device, driver, _ = fake
    none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    driver.results["cuStreamIsCapturing"] = (getattr(driver.CUresult, status), none)
    device.order_consumer(stream)
    consumer, event, flags = driver.arguments["cuStreamWaitEvent"]
    assert (int(consumer), event, flags) == (handle, 0xE, 0)


@pytest.mark.parametrize("status", ["ACTIVE", "INVALIDATED"])
def test_a_captured_consumer_does_not_wait(fake: Fake, status: str) -> None:
    device, driver, _ = fake
    found = getattr(driver.CUstreamCaptureStatus, f"CU_STREAM_CAPTURE_STATUS_{status}")
    driver.results["cuStreamIsCapturing"] = (driver.CUresult.CUDA_SUCCESS, found)
    device.order_consumer(0x99)
    assert "cuStreamWaitEvent" not in driver.arguments


def test_the_legacy_stream_does_not_wait_while_it_would_end_a_capture(fake: Fake) -> None:
    device, driver, _ = fake
    driver.results["cuStreamIsCapturing"] = (driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, None)
    device.order_consumer(None)
    assert "cuStreamWaitEvent" not in driver.arguments


def test_a_consumer_s_stream_that_cannot_wait_is_an_error(fake: Fake) -> None:
    device, driver, _ = fake
    driver.results["cuStreamIsCapturing"] = (driver.CUresult.CUDA_ERROR_INVALID_HANDLE,)
    driver.results["cuStreamWaitEvent"] = (driver.CUresult.CUDA_ERROR_INVALID_HANDLE,)
    with pytest.raises(DeviceError, match="ordering the consumer's stream: the driver reports CUDA_ERROR_INVALID_HANDLE"):
        device.order_consumer(0x99)


def test_some_consumers_ask_for_no_order(fake: Fake) -> None:
    device, driver, _ = fake
    device.order_consumer(-1)
    device.order_consumer(device.stream.handle)
    with pytest.raises(InteropError, match="0 no meaning"):
        device.order_consumer(0)
    assert driver.calls == []


def test_a_stream_that_is_not_captured_takes_no_work(fake: Fake) -> None:
    device, driver, _ = fake
    say_nothing_is_captured(driver)
    assert device.as_capturing_stream(device.stream.handle) is device.stream
    with pytest.raises(StateError, match="neither the resources' stream nor being captured"):
        device.as_capturing_stream(0x99)
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    driver.results["cuStreamIsCapturing"] = (driver.CUresult.CUDA_SUCCESS, active)
    assert device.as_capturing_stream(0x99).handle == 0x99
    assert {context for _, context in driver.calls} == {MINE}


def test_memory_outlives_a_closed_stream(fake: Fake) -> None:
    """What is closed after the stream is counted out, and goes back with its last reference."""
    device, driver, _ = fake
    memory, other = device.allocate(64), device.allocate(64)
    other.close(device.stream)
    assert ("buffer close", MINE) in driver.calls
    device.stream.close()
    driver.calls.clear()
    memory.close(device.stream)
    assert driver.calls == []
    assert (memory.is_closed, device.memory.current_bytes) == (True, 0)


def test_one_query_frees_every_block_whose_copy_ran_before(fake: Fake) -> None:
    device, driver, _ = fake
    staging = Staging(device, 4, initial_blocks=4)
    for _ in range(4):
        staging.acquire()
        staging.send_to(0xA000, 4, device.stream)
    driver.calls.clear()
    for _ in range(4):  # the newest of the four was asked once; then each is free until it is sent again
        staging.acquire()
        staging.send_to(0xA000, 4, device.stream)
    assert [name for name, _ in driver.calls].count("is_done") == 1
    assert staging.num_blocks == 4
