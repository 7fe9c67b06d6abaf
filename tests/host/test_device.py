"""Streams, events and staging on the target under test, and staging behind a stream that runs late."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kv.device import Device, Staging, Stream, Tensor, create_device
from numba_kv.device.stream import HostStream, stream_handle
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError, StateError
from tests.helpers.late_device import LateDevice
from tests.helpers.threads import in_a_thread

INT32 = dtype("int32")


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


# -- streams


def test_an_event_of_a_finished_stream_is_done(device: Device) -> None:
    other = device.as_stream(None)
    event = device.stream.record()
    other.wait(event)
    other.synchronize()
    device.stream.synchronize()
    event.synchronize()
    assert event.is_done
    other.close()
    other.close()


def test_a_stream_stays_what_it_is(device: Device) -> None:
    assert device.as_stream(device.stream) is device.stream
    assert isinstance(device.stream, Stream)
    assert repr(device.stream).endswith(f"(0x{device.stream.handle:x})")


def test_the_abstract_stream_does_nothing() -> None:
    for call in (Stream().record, Stream().synchronize, lambda: Stream().wait(HostStream().record())):
        with pytest.raises(StateError, match="abstract"):
            call()


@pytest.mark.parametrize("stream", [0, 7, "s", object()])
def test_host_targets_take_no_foreign_stream(stream: object) -> None:
    with pytest.raises(InputError, match="cannot be used on the 'cpu' target; pass None"):
        create_device("cpu", 0, stream)


class Foreign:
    """A stream object with the given attributes."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


class Protocol:
    """A stream object with the CUDA stream protocol."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 77)


class Handle:
    """What Numba keeps a stream address in."""

    value = 77


@pytest.mark.parametrize(
    "stream",
    [77, Protocol(), Foreign(cuda_stream=77), Foreign(ptr=77), Foreign(handle=77), Foreign(handle=Handle())],
    ids=["int", "protocol", "torch", "cupy", "handle", "numba"],
)
def test_the_address_of_a_foreign_stream(stream: object) -> None:
    assert stream_handle(stream) == 77


@pytest.mark.parametrize("stream", [True, "77", 7.0, object()])
def test_what_is_no_stream_is_refused(stream: object) -> None:
    with pytest.raises(InputError, match="is not a stream"):
        stream_handle(stream)


# -- staging


def send(staging: Staging, destination: Tensor, values: list[int], stream: Stream, at: int = 0) -> None:
    staging.acquire()[: len(values)] = values
    staging.send([(0, len(values), destination, at)], stream)


def test_sends_back_to_back_keep_both_contents(device: Device) -> None:
    staging = Staging(device, 4)
    first, second = device.tensor((4,), INT32), device.tensor((4,), INT32)
    send(staging, first, [10, 11, 12, 13], device.stream)
    send(staging, second, [20, 21, 22, 23], device.stream)
    assert first.to_host().tolist() == [10, 11, 12, 13]
    assert second.to_host().tolist() == [20, 21, 22, 23]
    staging.close()


def test_several_ranges_of_one_block(device: Device) -> None:
    staging, to = Staging(device, 8), device.tensor((2, 4), INT32)
    staging.acquire()[:] = range(8)
    before = device.bytes_to_device
    staging.send([(0, 2, to, 6), (4, 1, to, 0), (7, 0, to, 8), (5, 3, to, 1)], device.stream)
    assert to.to_host().reshape(-1).tolist() == [4, 5, 6, 7, 0, 0, 0, 1]
    assert device.bytes_to_device - before == 4 * 6
    staging.close()


def test_the_first_words_of_a_block_go_to_an_address(device: Device) -> None:
    staging, to = Staging(device, 4), device.tensor((6,), INT32)
    for block in range(3):
        staging.acquire()[:] = range(10 * block, 10 * block + 4)
        before = device.bytes_to_device
        staging.send_to(to.address + 4 * block, 3, device.stream)
        assert device.bytes_to_device - before == 4 * 3
    assert to.to_host().tolist() == [0, 10, 20, 21, 22, 0]
    for wrong in (-1, 0, 5):
        with pytest.raises(InputError, match=f"staging: num_words {wrong} is not in 1..4"):
            staging.send_to(to.address, wrong, device.stream)
    assert to.to_host().tolist() == [0, 10, 20, 21, 22, 0]
    staging.close()
    with pytest.raises(StateError, match="staging is closed"):
        staging.send_to(to.address, 1, device.stream)


@pytest.mark.parametrize("part", [(-1, 1, 0), (0, -1, 0), (3, 2, 0), (0, 2, 3), (0, 1, -1), (0, 5, 0)])
def test_ranges_are_checked_before_anything_is_copied(device: Device, part: tuple[int, int, int]) -> None:
    staging, to = Staging(device, 4), device.tensor((4,), INT32)
    staging.acquire()[:] = 9
    first, count, at = part
    before = device.bytes_to_device
    with pytest.raises(InputError, match="do not fit the block or the destination"):
        staging.send([(0, 1, to, 0), (first, count, to, at)], device.stream)
    assert device.bytes_to_device == before
    assert to.to_host().tolist() == [0, 0, 0, 0]
    staging.close()


def test_destinations_are_checked(device: Device) -> None:
    staging = Staging(device, 4)
    staging.acquire()
    for wrong in (device.tensor((4,), dtype("int64")), device.tensor((4, 2), INT32)[:, 0]):
        with pytest.raises(ShapeError, match="is not a dense int32 tensor"):
            staging.send([(0, 1, wrong, 0)], device.stream)
    staging.close()


def test_use_of_closed_staging_is_an_error(device: Device) -> None:
    before = device.pinned.current_bytes
    staging, to = Staging(device, 4), device.tensor((4,), INT32)
    assert device.pinned.current_bytes == before + 16
    staging.close()
    staging.close()
    assert device.pinned.current_bytes == before
    with pytest.raises(StateError, match="staging is closed"):
        staging.acquire()
    with pytest.raises(StateError, match="staging is closed"):
        staging.send([(0, 1, to, 0)], device.stream)


@pytest.mark.parametrize(("words", "blocks"), [(-1, 2), (4, 0)])
def test_impossible_staging_is_refused(device: Device, words: int, blocks: int) -> None:
    with pytest.raises(InputError, match="at least 1 block"):
        Staging(device, words, blocks)


def test_blocks_are_added_while_copies_are_in_flight() -> None:
    device = LateDevice()
    staging, to = Staging(device, 1), device.tensor((10,), INT32)
    for place in range(10):
        send(staging, to, [100 + place], device.stream, place)
    assert staging.num_blocks == 10
    assert device.stream.waits == 0
    device.stream.synchronize()
    assert to.numpy().tolist() == list(range(100, 110))


def test_a_finished_block_is_used_again() -> None:
    device = LateDevice()
    staging, to = Staging(device, 1), device.tensor((10,), INT32)
    for place in range(10):
        send(staging, to, [place], device.stream, place)
        device.stream.run(1)
    assert staging.num_blocks == 1
    assert to.numpy().tolist() == list(range(10))


def test_at_the_limit_the_oldest_copy_is_waited_for() -> None:
    device = LateDevice()
    staging, to = Staging(device, 1, max_blocks=3), device.tensor((40,), INT32)
    for place in range(40):
        send(staging, to, [place + 1], device.stream, place)
        assert len(device.stream.queue) <= 3
    assert staging.num_blocks == 3
    assert device.stream.waits == 37
    assert to.numpy().tolist() == [*range(1, 38), 0, 0, 0]
    staging.close()
    assert to.numpy().tolist() == list(range(1, 41))


def test_no_block_is_written_before_its_copy_has_run() -> None:
    device, rng = LateDevice(), np.random.default_rng(1)
    staging, to = Staging(device, 1, max_blocks=4), device.tensor((300,), INT32)
    for place in range(300):
        send(staging, to, [place + 1], device.stream, place)
        device.stream.run(min(int(rng.integers(3)), len(device.stream.queue)))
    device.stream.synchronize()
    assert to.numpy().tolist() == list(range(1, 301))


@pytest.mark.parametrize("initial", [1, 4])
def test_blocks_made_in_advance_are_all_that_ordinary_use_takes(initial: int) -> None:
    """So many uploads may be in flight without an allocation."""
    device = LateDevice()
    staging, to = Staging(device, 1, initial_blocks=initial), device.tensor((60,), INT32)
    assert (staging.num_blocks, device.pinned.allocations) == (initial, initial)
    for place in range(60):
        send(staging, to, [place], device.stream, place)
        if len(device.stream.queue) == initial:
            device.stream.run(1)
    assert (staging.num_blocks, device.pinned.allocations) == (initial, initial)
    assert device.stream.waits == 0
    device.stream.synchronize()
    assert to.numpy().tolist() == list(range(60))


def test_blocks_made_in_advance_are_not_the_limit() -> None:
    device = LateDevice()
    staging, to = Staging(device, 1, 6, initial_blocks=4), device.tensor((20,), INT32)
    for place in range(20):
        send(staging, to, [place], device.stream, place)
    assert staging.num_blocks == 6
    assert device.stream.waits == 14
    staging.close()
    assert device.pinned.current_bytes == 0
    assert to.numpy().tolist() == list(range(20))


@pytest.mark.parametrize("initial", [0, -1, 5])
def test_an_impossible_number_of_first_blocks_is_refused(device: Device, initial: int) -> None:
    with pytest.raises(InputError, match=rf"initial_blocks {initial} is not in 1\.\.4"):
        Staging(device, 4, 4, initial_blocks=initial)


# -- threads


def test_every_call_works_from_a_fresh_thread(device: Device) -> None:
    """Each in a thread that never saw the device, and without `active`."""
    values = np.array([1, 2, 3, 4], np.int32)
    tensor = in_a_thread(lambda: device.tensor((4,), INT32))
    in_a_thread(lambda: tensor.fill_from(values))
    assert in_a_thread(tensor.to_host).tolist() == values.tolist()
    in_a_thread(lambda: tensor[::2].fill_from(np.array([7, 8], np.int32)))
    assert in_a_thread(tensor[::2].to_host).tolist() == [7, 8]
    in_a_thread(lambda: device.fill(tensor, 5, device.stream))
    assert in_a_thread(lambda: tensor.__dlpack__(stream=None if device.target == "cuda" else 1)) is not None
    staging = in_a_thread(lambda: Staging(device, 4, initial_blocks=2))
    for _ in range(3):
        in_a_thread(lambda: send(staging, tensor, values.tolist(), device.stream))
    assert in_a_thread(tensor.to_host).tolist() == values.tolist()
    in_a_thread(staging.close)
    memory = in_a_thread(lambda: device.allocate(16))
    in_a_thread(lambda: memory.close(device.stream))
    pages = in_a_thread(lambda: device.allocate_staging(16))
    in_a_thread(lambda: pages.close(device.stream))


def test_streams_and_events_work_from_fresh_threads(device: Device) -> None:
    other = in_a_thread(lambda: device.as_stream(None))
    first = in_a_thread(lambda: device.stream.record(timing=True))
    in_a_thread(lambda: other.wait(first))
    last = in_a_thread(lambda: other.record(timing=True))
    in_a_thread(other.synchronize)
    in_a_thread(last.synchronize)
    assert in_a_thread(lambda: last.is_done)
    assert in_a_thread(lambda: last.microseconds_since(first)) >= 0
    in_a_thread(other.close)


def test_a_device_can_be_made_in_a_thread_that_ends(device: Device) -> None:
    made = in_a_thread(create_device)
    tensor = made.tensor((3,), INT32)
    tensor.fill_from(np.array([1, 2, 3], np.int32))
    assert in_a_thread(tensor.to_host).tolist() == [1, 2, 3]


def test_a_graph_is_captured_and_launched_from_fresh_threads(device: Device) -> None:
    tensor = device.tensor((4,), INT32)
    graph = in_a_thread(lambda: device.capture(lambda stream: device.fill(tensor, 6, stream)))
    in_a_thread(lambda: graph.launch(device.stream))
    assert in_a_thread(tensor.to_host).tolist() == [6] * 4
    in_a_thread(graph.close)
