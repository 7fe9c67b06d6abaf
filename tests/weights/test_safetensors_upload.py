"""The upload pipeline: every byte in its place, blocks guarded by events, and nothing left behind when it fails."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.device import Device, Memory, create_device
from numba_kv.errors import DeviceError, InputError, StateError, WeightError
from numba_kv.weights import SafetensorsFile, Uploader
from numba_kv.weights.assembly import FileRange
from numba_kv.weights.blocks import Blocks
from numba_kv.weights.windows import Segment, Windows
from tests.helpers.batches import opened
from tests.helpers.late_device import LateDevice, staged_device
from tests.helpers.models import tiny_config
from tests.helpers.uploads import RANDOM, contents, dirty, host_device, of_bytes, received
from tests.helpers.weight_files import write

SIZES = [[], [1], [0, 5, 0], [256], [255, 257, 1], [1000, 3, 4096, 70_000], [300] * 50]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("make", [create_device, LateDevice])
def test_every_byte_arrives(sizes: list[int], readers: int, make: Callable[[], Device]) -> None:
    device = make()
    segments, whole = contents(sizes, gap=256)
    memory = dirty(device, len(whole) + 512)
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=readers) as uploader:
        for _ in range(2):  # the second time over used blocks
            before = device.bytes_to_device
            uploader.upload(segments, memory)
            assert device.bytes_to_device - before == len(whole)
    found = received(device, memory, len(whole) + 512)
    assert np.array_equal(found[: len(whole)], whole)
    assert (found[len(whole) :] == 0xEE).all()
    assert device.pinned.current_bytes == 0
    assert device.pinned.peak_bytes <= 8192


@pytest.mark.parametrize("readers", [1, 3])
def test_staging_can_be_made_in_advance(readers: int) -> None:
    device, (segments, whole) = staged_device(), contents([1000, 3, 4096, 70_000])
    memory = dirty(device, len(whole))
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=readers) as uploader:
        for _ in range(2):  # the second time there is nothing to do
            uploader.prepare()
            made = device.pinned.current_bytes
            assert uploader.staged_nbytes == made == readers * min(4, 8 // readers) * 1024
        uploader.upload(segments, memory)
        assert device.pinned.current_bytes == device.pinned.peak_bytes == made
    assert np.array_equal(received(device, memory, len(whole)), whole)
    with pytest.raises(StateError, match="closed"):
        uploader.prepare()


@given(st.lists(st.integers(0, 3000), max_size=8), st.integers(1, 5), st.integers(0, 2))
def test_windows_are_the_segments(sizes: list[int], grains: int, gaps: int) -> None:
    segments, whole = contents(sizes, gap=256 * gaps)
    windows = Windows(segments, grains * 256)
    found = np.full(windows.nbytes, 0xEE, np.uint8)
    ranges = [windows.range(window) for window in range(windows.count)]
    assert [begin for begin, _ in ranges] + [windows.nbytes] == [0, *(end for _, end in ranges)]
    for begin, end in ranges:
        windows.fill(found[begin:end], begin)
    assert np.array_equal(found, whole)


def test_neighbours_in_a_file_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {
        f"t{i:02}": RANDOM.integers(1, 256, size).astype(np.uint8) for i, size in enumerate([256, 512, 0, 256, 100, 256, 300])
    }
    at, segments = 0, []
    with SafetensorsFile(write(tmp_path / "a.safetensors", arrays)) as file, SafetensorsFile(file.path) as same:
        for name, array in arrays.items():
            source = same if name == "t03" else file
            segments.append(Segment(begin=at, nbytes=array.size, fill=FileRange(source, file.tensors[name].offset)))
            at += -(-array.size // 256) * 256
        reads, read = [], SafetensorsFile.read_into

        def noted(self: SafetensorsFile, out: np.ndarray, offset: int) -> None:
            reads.append(len(out))
            read(self, out, offset)

        monkeypatch.setattr(SafetensorsFile, "read_into", noted)
        windows = Windows(segments, 1 << 20)
        found = np.full(windows.nbytes, 0xEE, np.uint8)
        windows.fill(found, 0)
    assert reads == [256 + 512, 256, 100, 256 + 300]  # another file object ends a run, and so does a gap
    for segment, array in zip(segments, arrays.values(), strict=True):
        assert np.array_equal(found[segment.begin : segment.end], array)


def test_a_block_is_not_filled_before_its_copy_has_run() -> None:
    device = LateDevice()
    segments, whole = contents([20_000])
    memory = dirty(device, len(whole))
    with Uploader(device, staging_nbytes=2048, block_nbytes=1024, num_readers=1) as uploader:
        uploader.upload(segments, memory)
    assert device.stream.waits > 5  # with two blocks, the reader waited again and again
    assert np.array_equal(memory.array, whole)


def test_reading_runs_ahead_of_copying() -> None:
    device, begun = LateDevice(), []

    def fill(out: np.ndarray, at: int) -> None:
        begun.append((at, device.stream.num_run))
        out[:] = 1

    with Uploader(device, staging_nbytes=4096, block_nbytes=1024, num_readers=1) as uploader:
        uploader.upload([Segment(begin=0, nbytes=8192, fill=fill)], device.allocate(8192))
    assert begun[1] == (1024, 0)  # the second window was read while the copy of the first had not run


def test_another_stream_in_the_middle_parts_no_copy_from_its_event() -> None:
    device = LateDevice()
    first = device.stream

    def fill(out: np.ndarray, at: int) -> None:
        device.stream = first if at % 2048 else device.as_stream(None)  # as a hand-over in another thread does
        out[:] = at // 1024

    memory = device.allocate(8192)
    with Uploader(device, staging_nbytes=2048, block_nbytes=1024, num_readers=1) as uploader:
        uploader.upload([Segment(begin=0, nbytes=8192, fill=fill)], memory)
    assert memory.array is not None
    assert np.array_equal(memory.array, np.repeat(np.arange(8, dtype=np.uint8), 1024))


def test_a_failed_upload_keeps_nothing_of_its_source() -> None:
    class Source:
        def fill(self, out: np.ndarray, at: int) -> None:
            raise WeightError("the disk is gone")

    device, source = LateDevice(), Source()
    gone = weakref.ref(source)
    gc.collect()
    gc.disable()
    try:
        with Uploader(device, block_nbytes=1024, num_readers=2) as uploader:
            with pytest.raises(WeightError):
                uploader.upload([Segment(begin=0, nbytes=4096, fill=source.fill)], device.allocate(4096))
            del source
            assert gone() is None  # no cycle of an error and its traceback
    finally:
        gc.enable()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("readers", [1, 4])
def test_a_source_that_fails_ends_everything(direct: bool, readers: int) -> None:
    device = host_device(direct)
    before = threading.active_count()

    def fill(out: np.ndarray, at: int) -> None:
        if at >= 4096:
            raise WeightError("the disk is gone")
        out[:] = 7

    memory = device.allocate(65_536)
    uploader = Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=readers)
    with pytest.raises(WeightError, match="the disk is gone"):
        uploader.upload([Segment(begin=0, nbytes=65_536, fill=fill)], memory)
    segments, whole = contents([5000])
    uploader.upload(segments, memory)  # and it can be used again
    assert np.array_equal(memory.array[: len(whole)], whole)
    uploader.close()
    assert device.pinned.current_bytes == 0
    assert threading.active_count() == before


def test_a_copy_that_fails_ends_everything() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-python, which knows the names of failures, is not installed")
    device, before = LateDevice(), threading.active_count()
    segments, whole = contents([50_000])
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024) as uploader:
        device.status = 719
        with pytest.raises(DeviceError, match="copy to the device: the driver reports CUDA_ERROR_LAUNCH_FAILED"):
            uploader.upload(segments, device.allocate(len(whole)))
        assert threading.active_count() == before
        assert device.bytes_to_device == 0
        device.status = 0
        assert np.array_equal(received(device, uploader.upload(segments, device.allocate(50_000)), 50_000), whole)
    assert device.pinned.current_bytes == 0


class NoThirdEvent(LateDevice):
    """The driver refuses what is to stand behind the third copy."""

    num_asked = 0

    def _record_block(self, event: int, stream: int, *rest: int) -> int:
        self.num_asked += 1
        return 719 if self.num_asked == 3 else super()._record_block(event, stream, *rest)


def test_a_copy_without_its_event_is_waited_for_too() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-python, which knows the names of failures, is not installed")
    device, (segments, _) = NoThirdEvent(), contents([50_000])
    with Uploader(device, staging_nbytes=2048, block_nbytes=1024, num_readers=1) as uploader:
        with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"):
            uploader.upload(segments, device.allocate(50_000))
        assert device.stream.num_run == 3
        assert device.stream.queue == []


@pytest.mark.parametrize("direct", [True, False])
def test_what_others_send_meanwhile_is_counted_once_and_apart(direct: bool) -> None:
    device, (segments, whole) = host_device(direct), contents([5000, 3000])
    other, word = device.allocate(256), np.zeros(100, np.uint8)
    sent: list[int] = []

    def fill(out: np.ndarray, at: int) -> None:  # meanwhile another call is at work
        device.copy_to_device(other.address, word.ctypes.data, 100, device.stream)
        sent.append(100)
        out[:] = 7

    end = len(whole) + -len(whole) % 256
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=1) as uploader:
        uploader.upload([*segments, Segment(begin=end, nbytes=2048, fill=fill)], device.allocate(16_384))
    assert len(sent) >= 2
    assert device.bytes_to_device == sum(sent) + end + 2048
    assert device.bytes_sent == sum(sent)


def test_a_steady_step_sends_nothing_while_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny_config(None, max_batch_size=2), "cpu") as batch:
        device, launches = batch.resources.device, batch.stepper.launches
        batch.step({batch.admit(num_tokens=3): 3})
        for _ in range(2):
            batch.step(1)
        segments, whole = contents([5000])
        step, memory = launches.step, device.allocate(len(whole))

        def beside(*args: Any) -> int:
            uploader.upload(segments, memory)
            return step(*args)

        before = vars(batch.stats)
        with Uploader(device, staging_nbytes=8192, block_nbytes=1024) as uploader:
            monkeypatch.setattr(launches, "step", beside)
            batch.step(1)
        assert batch.stats.decode_steps == before["decode_steps"] + 1
        assert batch.stats.steady_bytes_to_device == before["steady_bytes_to_device"] == 0
        assert np.array_equal(received(device, memory, len(whole)), whole)
        memory.close(device.stream)


def test_progress_goes_from_nothing_to_all() -> None:
    device, seen = create_device(), []
    segments, whole = contents([5000, 70_000])
    with Uploader(device, staging_nbytes=4096, block_nbytes=512) as uploader:
        uploader.upload(segments, device.allocate(len(whole)), lambda done, total: seen.append((done, total)))
        assert seen[0] == (0, len(whole))
        assert seen[-1] == (len(whole), len(whole))
        assert seen == sorted(seen)
        seen.clear()
        uploader.upload([], device.allocate(1), lambda done, total: seen.append((done, total)))
        assert seen == [(0, 0)]


@pytest.mark.parametrize("direct", [True, False])
def test_slow_loads_report_on_the_way(direct: bool) -> None:
    device, seen, callers = host_device(direct), [], set()

    def fill(out: np.ndarray, at: int) -> None:
        threading.Event().wait(0.03)
        out[:] = 0

    def report(done: int, total: int) -> None:
        seen.append(done)
        callers.add(threading.get_ident())

    with Uploader(device, staging_nbytes=1024, block_nbytes=512, num_readers=1) as uploader:
        uploader.upload([Segment(begin=0, nbytes=5120, fill=fill)], device.allocate(5120), report)
    assert len(set(seen)) > 3
    assert callers == {threading.get_ident()}


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_progress_raises_ends_the_upload(error: type[BaseException], direct: bool) -> None:
    device = host_device(direct)

    def fill(out: np.ndarray, at: int) -> None:
        threading.Event().wait(0.03)

    def report(done: int, total: int) -> None:
        if done:
            raise error

    with Uploader(device, block_nbytes=256, num_readers=2) as uploader, pytest.raises(error):
        uploader.upload([Segment(begin=0, nbytes=1 << 20, fill=fill)], device.allocate(1 << 20), report)


# -- where it goes


def test_staging_is_made_while_the_destination_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device, begun, calls = LateDevice(), threading.Event(), []
    segments, whole = contents([5000])
    make_pages = Blocks.make_pages

    def noted(self: Blocks, reader: int) -> None:
        begun.set()
        calls.append(reader)
        make_pages(self, reader)

    def make() -> Memory:
        assert begun.wait(10)
        return device.allocate(8192)

    monkeypatch.setattr(Blocks, "make_pages", noted)
    with Uploader(device, staging_nbytes=4096, block_nbytes=1024, num_readers=2) as uploader:
        memory = uploader.upload(segments, make)
        uploader.upload(segments, lambda: device.allocate(8192))
    assert sorted(calls) == [0, 1]  # once
    assert np.array_equal(memory.array[:5000], whole)  # type: ignore[index]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    ("error", "says"),
    [(DeviceError("none is left"), "none is left"), (KeyboardInterrupt("stop"), "stop"), (None, "the destination has 256")],
)
def test_a_destination_that_fails_ends_everything(direct: bool, error: BaseException | None, says: str) -> None:
    device = host_device(direct)
    before = threading.active_count()
    memory = device.allocate(256)

    def make() -> Memory:
        if error is not None:
            raise error
        return memory

    segments, whole = contents([50_000])
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=3) as uploader:
        for destination in (make, make) if error is not None else (make, memory):
            with pytest.raises(InputError if error is None else type(error), match=says):
                uploader.upload(segments, destination)
            assert device.bytes_to_device == 0
            assert threading.active_count() == before
        assert not memory.array.any()  # type: ignore[union-attr]
        assert np.array_equal(received(device, uploader.upload(segments, device.allocate(50_000)), 50_000), whole)


# -- threads and blocks


@pytest.mark.parametrize("direct", [True, False])
def test_threads_stay_for_the_next_upload_and_end_with_the_uploader(direct: bool) -> None:
    device, before = host_device(direct), threading.active_count()
    segments, whole = contents([50_000])
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=4) as uploader:
        for _ in range(3):
            uploader.upload(segments, device.allocate(len(whole)))
            assert threading.active_count() <= before + 4
    assert threading.active_count() == before


def test_an_interrupt_while_threads_start_ends_those_that_have(monkeypatch: pytest.MonkeyPatch) -> None:
    device, before = LateDevice(), threading.active_count()
    submit, calls = ThreadPoolExecutor.submit, []

    def interrupted(self: ThreadPoolExecutor, *work: object) -> object:
        calls.append(work)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return submit(self, *work)  # type: ignore[arg-type]

    segments, whole = contents([50_000])
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=4) as uploader:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadPoolExecutor, "submit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                uploader.upload(segments, device.allocate(len(whole)))
        assert threading.active_count() == before
        assert np.array_equal(received(device, uploader.upload(segments, device.allocate(50_000)), 50_000), whole)


def test_no_more_blocks_are_made_than_windows_need() -> None:
    device, small = LateDevice(), contents([2000])[0]
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=4) as uploader:
        assert device.pinned.peak_bytes == uploader.staged_nbytes == 0
        uploader.upload(small, device.allocate(2048))
        assert device.pinned.current_bytes == uploader.staged_nbytes == 2048
        uploader.upload(contents([50_000])[0], device.allocate(50_176))
        assert device.pinned.current_bytes == uploader.staged_nbytes == 8192
        uploader.upload(small, device.allocate(2048))
        assert device.pinned.peak_bytes == 8192
    assert device.pinned.current_bytes == 0


def test_uploads_of_two_threads_take_turns() -> None:
    device, running = LateDevice(), []
    pieces = [contents([30_000]) for _ in range(4)]
    memories = [device.allocate(30_000) for _ in pieces]
    most = []

    def watched(segment: Segment) -> Segment:
        def fill(out: np.ndarray, at: int) -> None:
            running.append(id(segment))
            most.append(len(set(running)))
            segment.fill(out, at)
            running.remove(id(segment))

        return Segment(begin=0, nbytes=segment.nbytes, fill=fill)

    uploader = Uploader(device, staging_nbytes=4096, block_nbytes=1024, num_readers=2)
    with uploader, ThreadPoolExecutor(len(pieces)) as threads:
        wholes = [[watched(segments[0])] for segments, _ in pieces]
        assert list(threads.map(uploader.upload, wholes, memories)) == memories
    assert set(most) == {1}
    for (_, whole), memory in zip(pieces, memories, strict=True):
        assert np.array_equal(memory.array, whole)


def test_an_upload_that_runs_is_neither_closed_nor_nested() -> None:
    device, refused = LateDevice(), []
    segments, whole = contents([5000])
    memory = device.allocate(5000)
    uploader = Uploader(device, staging_nbytes=4096, block_nbytes=1024)

    def report(done: int, total: int) -> None:
        for call in (uploader.close, uploader.check_idle, lambda: uploader.upload(segments, memory)):
            with pytest.raises(StateError, match="are being loaded|is running in this thread"):
                call()
            refused.append(call)

    uploader.upload(segments, memory, report)
    assert len(refused) >= 6
    assert np.array_equal(memory.array, whole)
    uploader.check_idle()
    uploader.close()


def test_wrong_segments_copy_nothing() -> None:
    device = create_device()
    content = np.ones(300, np.uint8)
    memory = dirty(device, 1024)
    with Uploader(device) as uploader:
        for begins in ([0, 256], [512, 0], [100]):
            with pytest.raises(InputError, match="overlap, or do not start at a multiple of 256"):
                uploader.upload([of_bytes(begin, content) for begin in begins], memory)
        with pytest.raises(InputError, match="end at byte 1068, the destination has 1024"):
            uploader.upload([of_bytes(768, content)], memory)
    assert (received(device, memory, 1024) == 0xEE).all()
    with pytest.raises(StateError, match="closed"):
        uploader.upload([], memory)
    uploader.close()


@pytest.mark.parametrize("options", [{"staging_nbytes": 255}, {"block_nbytes": 0}, {"num_readers": 0}, {"staging_nbytes": -1}])
def test_wrong_options(options: dict[str, int]) -> None:
    with pytest.raises(InputError, match="_nbytes|num_readers"):
        Uploader(create_device(), **options)  # type: ignore[arg-type]
