"""Host blocks on a stand-in for the driver: when pages are locked, what follows a copy, and who gives the lock back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from numba_kv.device.cuda_device import CudaDevice
from numba_kv.device.locked_pages import large_pages
from numba_kv.errors import CapacityError, DeviceError
from numba_kv.weights import Uploader
from numba_kv.weights.blocks import Blocks
from numba_kv.weights.windows import Segment
from tests.helpers.fake_driver import MINE, OTHER, FakeDriver, FakeNative, cuda_device

Fake = tuple[CudaDevice, FakeDriver, FakeNative]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    with cuda_device(monkeypatch) as fake:
        yield fake


def names(driver: FakeDriver) -> list[str]:
    found = [name for name, _ in driver.calls]
    driver.calls.clear()
    return found


def prepared(device: CudaDevice, count: int = 2) -> Blocks:
    blocks = Blocks(device, 4096, num_readers=1, each=count)
    blocks.prepare(count)
    return blocks


def locked(device: CudaDevice) -> tuple[Blocks, np.ndarray]:
    blocks = prepared(device)
    blocks.lock()
    return blocks, blocks.block(1)


def test_all_pages_are_locked_in_one_call_after_they_were_made(fake: Fake) -> None:
    device, driver, _ = fake
    blocks = prepared(device)
    blocks.make_pages(0)
    first = blocks.block(0).ctypes.data
    assert names(driver) == []
    assert (blocks.is_locked, device.pinned.current_bytes) == (False, 0)
    blocks.lock()
    blocks.lock()
    assert names(driver) == ["record", "record", "cuMemHostRegister"]
    assert driver.arguments["cuMemHostRegister"][:2] == (first, 8192)
    assert (blocks.is_locked, blocks.nbytes, device.pinned.current_bytes) == (True, 8192, 8192)
    assert [blocks.block(number).nbytes for number in range(len(blocks))] == [4096, 4096]
    assert [blocks.block(number).ctypes.data for number in range(2)] == [first, first + 4096]
    assert (blocks.address, blocks.events) == (first, [0xE, 0xE])
    blocks.prepare(2)
    assert blocks.block(0).ctypes.data == first
    blocks.close()
    blocks.close()
    gc.collect()
    assert names(driver) == ["cuMemHostUnregister"]
    assert device.pinned.current_bytes == 0


@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_event_follows_each_copy_and_is_asked_before_its_block_is_filled_again(fake: Fake, count: int) -> None:
    device, driver, _ = fake
    sent: list[tuple[int, ...]] = []

    def copy(*words: int) -> tuple[int]:
        sent.append(words)
        return (0,)

    driver.results["cuMemcpyHtoDAsync"] = copy
    memory = device.allocate(5 * 1024)
    with Uploader(device, staging_nbytes=1024 * count, block_nbytes=1024, num_readers=1) as uploader:
        uploader.prepare()
        names(driver)
        uploader.upload([Segment(begin=0, nbytes=4500, fill=lambda out, at: out.fill(1))], memory)
        first = uploader._blocks.address
    calls = [name for name in names(driver) if name in ("cuMemcpyHtoDAsync", "cuEventRecord", "cuEventQuery")]
    copies, asked = 0, 0
    for number, name in enumerate(calls):
        if name == "cuMemcpyHtoDAsync":
            assert calls[number + 1] == "cuEventRecord"
            assert copies - asked < count, "the block of a copy that may not have run"
            copies += 1
        asked += name == "cuEventQuery"
    assert (copies, asked) == (5, 5)
    assert driver.arguments["cuEventRecord"][:2] == (0xE, device.stream.handle)
    assert sent == [
        (memory.address + 1024 * i, first + 1024 * (i % count), min(1024, 4500 - 1024 * i), device.stream.handle)
        for i in range(5)
    ]


def test_copies_that_have_not_run_are_asked_for_again(fake: Fake) -> None:
    device, driver, _ = fake
    answers = iter([600, 600, 0])
    driver.results["cuEventQuery"] = lambda *words: (next(answers),)
    with Uploader(device, staging_nbytes=1024, block_nbytes=1024, num_readers=1) as uploader:
        uploader.upload([Segment(begin=0, nbytes=1024, fill=lambda out, at: out.fill(1))], device.allocate(1024))
    assert next(answers, None) is None
    assert device.bytes_to_device == 1024


def test_the_lock_goes_with_the_last_array_that_shows_the_pages(fake: Fake) -> None:
    device, driver, _ = fake
    blocks, block = locked(device)
    shown = block[:10]
    blocks.close()
    del block
    gc.collect()
    assert "cuMemHostUnregister" not in names(driver)
    driver.stack[:] = [OTHER]
    del shown
    gc.collect()
    assert driver.calls == [("cuMemHostUnregister", MINE)]
    assert driver.stack == [OTHER]


def test_locks_that_outlive_the_driver_are_left_to_the_process(fake: Fake) -> None:
    device, driver, _ = fake
    blocks, block = locked(device)
    names(driver)
    driver.cuCtxGetCurrent = lambda: (driver.CUresult.CUDA_ERROR_DEINITIALIZED, 0)  # type: ignore[method-assign]
    driver.cuCtxPushCurrent = lambda context: (driver.CUresult.CUDA_ERROR_DEINITIALIZED,)  # type: ignore[method-assign]
    del blocks, block
    gc.collect()  # an error here would be an unraisable one
    assert names(driver) == []


def test_pages_that_cannot_be_locked_are_copied_to_those_of_the_driver(fake: Fake) -> None:
    device, driver, native = fake
    driver.results["cuMemHostRegister"] = (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,)
    blocks = prepared(device)
    block = blocks.block(1)
    block[:] = np.arange(4096).astype(np.uint8)
    blocks.lock()
    assert names(driver) == ["record", "record", "cuMemHostRegister", "pinned allocate"]
    block = blocks.block(1)
    assert np.array_equal(block, np.arange(4096).astype(np.uint8))
    assert block.ctypes.data == blocks.address + 4096
    blocks.close()
    del block
    gc.collect()
    assert names(driver)[-1] == "buffer close"
    native.failure = RuntimeError("none is left")
    blocks = prepared(device)
    with pytest.raises(RuntimeError, match="none is left"):
        blocks.lock()
    assert (device.pinned.current_bytes, blocks.is_locked) == (0, False)
    native.failure = None
    blocks.prepare(2)
    blocks.lock()
    assert blocks.is_locked
    blocks.close()


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuMemHostRegister"])
def test_an_upload_that_the_driver_refuses_leaves_nothing(fake: Fake, call: str) -> None:
    device, driver, native = fake
    failed = (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
    destination = device.allocate(1 << 16)
    if call == "cuMemHostRegister":
        driver.results[call], native.failure = failed, DeviceError("no pages either")
    else:
        left = [1, 1, 1]
        driver.results[call] = lambda *arguments: (driver.CUresult.CUDA_SUCCESS,) if left and left.pop() else failed
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=1) as uploader:
        segment = Segment(begin=0, nbytes=1 << 16, fill=lambda out, at: out.fill(1))
        with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS|no pages either"):
            uploader.upload([segment], destination)
    del uploader
    gc.collect()
    found = names(driver)
    assert found.count("cuMemHostUnregister") == found.count("cuMemHostRegister") - (call == "cuMemHostRegister")
    assert device.pinned.current_bytes == 0
    assert driver.stack == []


def test_large_pages_are_aligned_zeros() -> None:
    pages = large_pages(5000)
    assert pages.ctypes.data % (2 << 20) == 0
    assert (pages.nbytes, pages.any()) == (5000, False)
    with pytest.raises(CapacityError, match="cannot be mapped"):
        large_pages(1 << 62)
