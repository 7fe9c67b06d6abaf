"""What only a GPU shows: copies behind a busy stream, foreign streams, exchange with torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from numba_kv.device import Device, Staging, Stream, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InteropError

pytestmark = pytest.mark.gpu

INT32 = dtype("int32")


@pytest.fixture
def device() -> Iterator[Device]:
    device = create_device("cuda")
    yield device
    device.stream.synchronize()


def delay(device: Device, fills: int = 300) -> Tensor:
    """Keep the device's stream busy for some tens of milliseconds."""
    busy = device.tensor((1 << 28,), INT32)
    for value in range(fills):
        device.fill(busy, value, device.stream)
    return busy


def test_staging_behind_a_delay_keeps_every_block(device: Device) -> None:
    staging, to = Staging(device, 4), device.tensor((8, 4), INT32)
    busy = delay(device)
    for row in range(8):
        staging.acquire()[:] = np.arange(4) + 10 * row
        staging.send([(0, 4, to, 4 * row)], device.stream)
    assert not device.stream.record().is_done, "the delay was too short to show anything"
    assert staging.num_blocks == 8
    assert to.to_host().tolist() == [[10 * row + i for i in range(4)] for row in range(8)]
    staging.close()
    busy[0].to_host()


def test_at_the_limit_staging_waits(device: Device) -> None:
    staging, to = Staging(device, 1, max_blocks=2), device.tensor((50,), INT32)
    busy = delay(device, 50)
    for place in range(50):
        staging.acquire()[0] = place
        staging.send([(0, 1, to, place)], device.stream)
    assert staging.num_blocks == 2
    assert to.to_host().tolist() == list(range(50))
    staging.close()
    busy[0].to_host()


class Garbage:
    """A cycle that holds device memory: nothing but the collector gives it back."""

    def __init__(self, device: Device) -> None:
        self.tensor = device.tensor((1 << 20,), INT32)
        self.itself = self


@pytest.mark.parametrize("asks", [False, True], ids=["by itself", "asked for"])
def test_garbage_waits_for_the_end_of_a_capture(device: Device, asks: bool) -> None:
    """A collection would give its memory back and end the capture; one that the work asks for does."""
    to, alive = device.tensor((4,), INT32), []
    before = gc.get_threshold()
    held = [Garbage(device)]
    seen = weakref.ref(held[0])

    def work(stream: Stream) -> None:
        device.fill(to, 5, stream)
        held.clear()
        kept = [[i] for i in range(5000)]  # new objects, on which the collector starts
        if asks:
            gc.collect()
        alive.append(seen() is not None and len(kept) == 5000)
        device.fill(to, 5, stream)

    gc.set_threshold(1)
    try:
        if asks:
            with pytest.raises(Exception, match="CAPTURE"):
                device.capture(work)
        else:
            device.capture(work).launch(device.stream)
            assert to.to_host().tolist() == [5] * 4
            gc.collect()
            assert seen() is None
    finally:
        gc.set_threshold(*before)
    assert alive == [not asks]
    assert gc.isenabled()


def test_another_stream_waits_for_an_event(device: Device) -> None:
    other, to = device.as_stream(None), device.tensor((4,), INT32)
    busy = delay(device)
    device.fill(to, 5, device.stream)
    event = device.stream.record()
    assert not event.is_done
    other.wait(event)
    assert to.to_host(other).tolist() == [5, 5, 5, 5]
    assert event.is_done
    other.close()
    busy[0].to_host()


def test_foreign_streams_are_borrowed(device: Device) -> None:
    native = device.native.create_stream()  # type: ignore[attr-defined]
    handle = int(native.handle)
    for foreign in (native, handle, device.as_stream(native)):
        stream = device.as_stream(foreign)
        assert stream.handle == handle
        assert stream.__cuda_stream__() == (0, handle)  # type: ignore[attr-defined]
        to = device.tensor((2,), INT32)
        device.stream.synchronize()
        device.fill(to, 3, stream)
        assert to.to_host(stream).tolist() == [3, 3]
        stream.close()
    native.sync()  # close left it alone
    with pytest.raises(InputError, match="0 is the legacy default stream"):
        device.as_stream(0)


def test_a_device_on_a_foreign_stream() -> None:
    first = create_device("cuda")
    second = create_device("cuda", 0, first.stream.handle)
    assert second.stream.handle == first.stream.handle
    assert second.tensor((3,), INT32).to_host().tolist() == [0, 0, 0]


def test_consumers_of_dlpack_are_ordered(device: Device) -> None:
    tensor, other = device.tensor((4,), INT32), device.as_stream(None)
    for stream in (None, 1, 2, -1, other.handle, device.stream.handle):
        assert tensor.__dlpack__(stream=stream) is not None
    with pytest.raises(InteropError, match="0 no meaning"):
        tensor.__dlpack__(stream=0)
    busy = delay(device)
    device.fill(tensor, 9, device.stream)
    tensor.__dlpack__(stream=other.handle)
    assert tensor.to_host(other).tolist() == [9, 9, 9, 9]
    other.close()
    busy[0].to_host()


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "float8_e4m3", "int64", "int32", "int8", "uint8"])
def test_torch_shares_the_memory(device: Device, kind: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    values = np.arange(20).reshape(4, 5).astype(dtype(kind).numpy())
    tensor = device.tensor((4, 5), dtype(kind))
    tensor.fill_from(values)
    for index in ((slice(1, None), slice(None, None, 2)), (2,), (slice(None),)):
        shared = torch.from_dlpack(tensor[index])
        assert shared.data_ptr() == tensor[index].address
        assert shared.is_cuda
        assert np.array_equal(shared.to(torch.float32).cpu().numpy(), values[index].astype(np.float32))
    shared = torch.from_dlpack(tensor)
    del tensor
    assert np.array_equal(shared.to(torch.float32).cpu().numpy(), values.astype(np.float32))


def test_a_torch_stream_is_taken(device: Device) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    stream = torch.cuda.Stream()
    assert device.as_stream(stream).handle == stream.cuda_stream
    to = device.tensor((2,), INT32)
    device.stream.synchronize()
    device.fill(to, 3, device.as_stream(stream))
    assert to.to_host(device.as_stream(stream)).tolist() == [3, 3]
