"""The upload pipeline: every byte in its place, blocks guarded by events, and nothing left behind when it fails."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.device import Device, Memory, create_device
from numba_kv.device.host_device import HostDevice
from numba_kv.errors import DeviceError, InputError, StateError, WeightError
from numba_kv.weights import SafetensorsFile, Uploader, staged_run
from numba_kv.weights.assembly import FileRange
from numba_kv.weights.blocks import Blocks
from numba_kv.weights.windows import Segment, Windows
from tests.helpers.batches import opened
from tests.helpers.late_device import LateDevice, staged_device
from tests.helpers.models import tiny_config
from tests.helpers.weight_files import write

RANDOM = np.random.default_rng(1)


def host_device(direct: bool) -> HostDevice:
    """Return a device to which readers write themselves, or one with staging."""
    return HostDevice("cpu") if direct else LateDevice()


def of_bytes(begin: int, content: np.ndarray) -> Segment:
    def fill(out: np.ndarray, at: int) -> None:
        out[:] = content[at : at + len(out)]

    return Segment(begin=begin, nbytes=len(content), fill=fill)


def contents(sizes: list[int], gap: int = 0) -> tuple[list[Segment], np.ndarray]:
    segments, whole, at = [], [], 0
    for size in sizes:
        content = RANDOM.integers(1, 256, size).astype(np.uint8)
        padding = -size % 256 + gap
        segments.append(of_bytes(at, content))
        whole += [content, np.zeros(padding, np.uint8)]
        at += size + padding
    found = np.concatenate(whole) if whole else np.zeros(0, np.uint8)
    return segments, found[: segments[-1].end if segments else 0]


def received(device: Device, memory: Memory, nbytes: int) -> np.ndarray:
    out = np.empty(nbytes, np.uint8)
    device.copy_to_host(out.ctypes.data, memory.address, nbytes, device.stream)
    return out


def dirty(device: Device, nbytes: int) -> Memory:
    memory = device.allocate(nbytes)
    noise = np.full(nbytes, 0xEE, np.uint8)
    device.copy_to_device(memory.address, noise.ctypes.data, nbytes, device.stream)
    device.stream.synchronize()
    return memory


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


# -- files, which the compiled loop reads


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[SafetensorsFile]]:
    """Three files of one tensor each."""
    with ExitStack() as opened:
        arrays = [RANDOM.integers(1, 256, 30_000).astype(np.uint8) for _ in range(3)]
        paths = [write(tmp_path / f"{i}.safetensors", {"t": array}) for i, array in enumerate(arrays)]
        yield [opened.enter_context(SafetensorsFile(path)) for path in paths]


def of_files(files: list[SafetensorsFile]) -> tuple[list[Segment], np.ndarray]:
    """Return parts of files, in turns with other bytes and gaps, and what they are together."""
    sizes = [(0, 0, 20_000), (1, 7, 256), (None, 0, 700), (2, 29_000, 1000), (None, 0, 3000), (1, 263, 10_000), (0, 256, 256)]
    segments, whole, at = [], np.zeros(60_000, np.uint8), 0
    for number, offset, size in sizes:
        if number is None:
            segment = of_bytes(at, RANDOM.integers(1, 256, size).astype(np.uint8))
            segment.fill(whole[at : at + size], 0)
        else:
            file = files[number]
            segment = Segment(begin=at, nbytes=size, fill=FileRange(file, file.tensors["t"].offset + offset))
            whole[at : at + size] = file.array("t")[offset : offset + size]
        segments.append(segment)
        at += -(-size // 256) * 256 + 256 * (size % 3)
    return segments, whole[: segments[-1].end]


def of_a_file(files: list[SafetensorsFile]) -> tuple[Segment, np.ndarray]:
    """Return all of a file's tensor, and what it is."""
    fill = FileRange(files[0], files[0].tensors["t"].offset)
    return Segment(begin=0, nbytes=30_000, fill=fill), files[0].array("t")


@pytest.mark.parametrize("make", [create_device, LateDevice])
@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("window", [256, 1024, 65_536])
def test_files_and_other_sources_are_mixed(
    files: list[SafetensorsFile], make: Callable[[], Device], readers: int, window: int
) -> None:
    device, (segments, whole) = make(), of_files(files)
    memory = dirty(device, len(whole) + 512)
    with Uploader(device, staging_nbytes=8 * window, block_nbytes=window, num_readers=readers) as uploader:
        for _ in range(2):
            uploader.upload(segments, memory)
            found = received(device, memory, len(whole) + 512)
            assert np.array_equal(found[: len(whole)], whole)
            assert (found[len(whole) :] == 0xEE).all()


def test_without_a_function_that_reads_at_an_offset_python_reads(
    files: list[SafetensorsFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, (segments, whole) = staged_device(), of_files(files)
    monkeypatch.setattr("numba_kv.weights.staged_run.pread_address", lambda: 0)
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024) as uploader:
        memory = uploader.upload(segments, device.allocate(len(whole)))
    assert np.array_equal(received(device, memory, len(whole)), whole)


@pytest.mark.parametrize("system_threads", [True, False])
def test_windows_of_files_need_no_python(
    files: list[SafetensorsFile], monkeypatch: pytest.MonkeyPatch, system_threads: bool
) -> None:
    device, segment, wanted = staged_device(), *of_a_file(files)
    monkeypatch.setattr(SafetensorsFile, "read_into", None)
    if not system_threads:
        monkeypatch.setattr(staged_run, "_thread_functions", staged_run.ThreadFunctions)
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024) as uploader:
        memory = uploader.upload([segment], device.allocate(segment.nbytes))
    assert np.array_equal(received(device, memory, segment.nbytes), wanted)


READ = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)


def reads_through(monkeypatch: pytest.MonkeyPatch, before: Callable[[], int | None]) -> object:
    """Have files read by a function that returns what `before` does, unless that is None. It is returned, to be kept."""

    @READ
    def read(file: int, to: int, nbytes: int, offset: int) -> int:
        result = before()
        return os.preadv(file, [(ctypes.c_char * nbytes).from_address(to)], offset) if result is None else result

    monkeypatch.setattr(staged_run, "pread_address", lambda: ctypes.cast(read, ctypes.c_void_p).value)
    return read


@pytest.mark.parametrize("system_threads", [True, False])
def test_readers_of_files_are_threads_that_python_never_hears_of(
    files: list[SafetensorsFile], monkeypatch: pytest.MonkeyPatch, system_threads: bool
) -> None:
    device, segment, wanted = staged_device(), *of_a_file(files)
    seen, known, has_two = set(), set(), threading.Event()

    def before() -> None:
        known.update(thread.native_id for thread in threading.enumerate())
        seen.add(threading.get_native_id())
        if len(seen) > 1:
            has_two.set()
        has_two.wait(10)

    kept = reads_through(monkeypatch, before)
    if not system_threads:
        monkeypatch.setattr(staged_run, "_thread_functions", staged_run.ThreadFunctions)
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=3) as uploader:
        memory = uploader.upload([segment], device.allocate(segment.nbytes))
    assert np.array_equal(received(device, memory, segment.nbytes), wanted)
    assert len(seen) > 1
    assert bool(seen - known) == system_threads
    assert (threading.get_native_id() in seen) == system_threads  # the caller's reads too
    del kept


@pytest.mark.parametrize("refusing", [1, 3])
def test_reads_that_fail_once_are_made_again(
    files: list[SafetensorsFile], monkeypatch: pytest.MonkeyPatch, refusing: int
) -> None:
    """A signal may end a read of any thread."""
    device, segment, wanted = staged_device(), *of_a_file(files)
    refused: set[int] = set()
    all_there = threading.Event()

    def before() -> int | None:
        thread = threading.get_native_id()
        if thread == threading.main_thread().native_id:
            all_there.wait(10)
            return None
        refused.add(thread)
        if len(refused) == refusing:
            all_there.set()
        return -1

    kept = reads_through(monkeypatch, before)
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=1 + refusing) as uploader:
        for _ in range(2):
            memory = uploader.upload([segment], device.allocate(segment.nbytes))
            assert np.array_equal(received(device, memory, segment.nbytes), wanted)
    assert len(refused) >= refusing
    del kept


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_progress_raises_ends_readers_of_files(
    files: list[SafetensorsFile], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    device, segment, wanted = staged_device(), *of_a_file(files)
    reads = [0]

    def before() -> None:
        reads[0] += 1
        threading.Event().wait(0.02)

    def report(done: int, total: int) -> None:
        if done:
            raise error

    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=3) as uploader:
        with monkeypatch.context() as patch:
            kept = reads_through(patch, before)
            with pytest.raises(error):
                uploader.upload([segment], device.allocate(segment.nbytes), report)
            ended = reads[0]
            threading.Event().wait(0.05)
            assert 0 < reads[0] == ended < 30
            del kept
        memory = uploader.upload([segment], device.allocate(segment.nbytes))
    assert np.array_equal(received(device, memory, segment.nbytes), wanted)


@pytest.mark.parametrize("of", [of_a_file, of_files])
@pytest.mark.parametrize("direct", [True, False])
def test_meanwhile_is_called_once_beside_the_readers(
    files: list[SafetensorsFile], of: Callable[..., tuple[Any, np.ndarray]], direct: bool
) -> None:
    device, (given, wanted), known = host_device(direct), of(files), threading.active_count()
    segments = given if isinstance(given, list) else [given]
    seen: list[tuple[Memory, int]] = []

    def fails(memory: Memory) -> None:
        raise KeyError("beside")

    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=2) as uploader:
        with pytest.raises(KeyError, match="beside"):
            uploader.upload(segments, device.allocate(len(wanted)), meanwhile=fails)
        assert threading.active_count() == known
        memory = uploader.upload(
            segments,
            lambda: device.allocate(len(wanted)),
            meanwhile=lambda memory: seen.append((memory, threading.get_ident())),
        )
        uploader.upload([], memory, meanwhile=lambda memory: seen.append((memory, threading.get_ident())))
    assert seen == [(memory, threading.get_ident())] * 2
    assert np.array_equal(received(device, memory, len(wanted)), wanted)


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("nbytes", [1, 1023, 1024, 1025, 29_697])
def test_copies_are_in_order_and_take_neighbours(files: list[SafetensorsFile], readers: int, nbytes: int) -> None:
    class Noting(LateDevice):
        def _copy_block(self, destination: int, source: int, nbytes: int, stream: int) -> int:
            copies.append((destination, nbytes))
            return super()._copy_block(destination, source, nbytes, stream)

    device, copies = Noting(), []
    segment, whole = of_a_file(files)
    with Uploader(device, staging_nbytes=12_288, block_nbytes=1024, num_readers=readers) as uploader:
        for _ in range(2):
            memory = dirty(device, 30_720)
            copies.clear()
            uploader.upload([Segment(begin=0, nbytes=nbytes, fill=segment.fill)], memory)
            found = received(device, memory, 30_720)
            assert np.array_equal(found[:nbytes], whole[:nbytes])
            assert (found[nbytes:] == 0xEE).all()
            ends = [memory.address + sum(size for _, size in copies[:i]) for i in range(len(copies) + 1)]
            assert [begin for begin, _ in copies] + [memory.address + nbytes] == ends
            assert max(size for _, size in copies) <= 1024 * readers  # a quarter of the blocks
            if readers == 1:
                assert {size for _, size in copies[:-1]} <= {1024}


def test_threads_that_are_made_have_small_stacks_and_share_no_memory() -> None:
    made = [staged_run._thread_functions.__wrapped__() for _ in range(2)]  # as two threads do that come first together
    assert len({ctypes.addressof(functions.attributes) for functions in made}) == 2
    for functions in made:
        nbytes = ctypes.c_size_t()
        assert ctypes.CDLL(None).pthread_attr_getstacksize(functions.attributes, ctypes.byref(nbytes)) == 0
        assert nbytes.value == 1 << 20
        assert len({functions.create, functions.join, functions.let_others, 0}) == 4


@pytest.mark.parametrize("readers", [1, 4])
def test_a_file_that_becomes_shorter_ends_everything(files: list[SafetensorsFile], readers: int) -> None:
    device, (segments, whole), before = staged_device(), of_files(files), threading.active_count()
    content = Path(files[1].path).read_bytes()
    Path(files[1].path).write_bytes(content[:9000])
    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=readers) as uploader:
        for _ in range(2):
            with pytest.raises(WeightError, match=r"1.safetensors: the file ends at byte \d+, .* truncated while it was read"):
                uploader.upload(segments, device.allocate(len(whole)))
            assert threading.active_count() == before
        Path(files[1].path).write_bytes(content)
        memory = uploader.upload(segments, device.allocate(len(whole)))
    assert np.array_equal(received(device, memory, len(whole)), whole)


def test_a_closed_file_is_not_read(files: list[SafetensorsFile]) -> None:
    device, (segments, whole) = staged_device(), of_files(files)
    files[2].close()
    with Uploader(device, block_nbytes=1024) as uploader, pytest.raises(StateError, match="the file is closed"):
        uploader.upload(segments, device.allocate(len(whole)))


def test_a_file_that_is_closed_meanwhile_is_read_to_its_end(
    files: list[SafetensorsFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another file's by then. No descriptor is left behind."""
    device, (segment, whole) = LateDevice(), of_a_file(files)
    other = tmp_path / "other"
    other.write_bytes(bytes(100_000))
    taken: list[int] = []

    class Closing(staged_run.StagedRun):
        @property
        def parts(self) -> list[Callable[[], None]]:
            number = files[0].descriptor
            files[0].close()
            taken.append(os.open(other, os.O_RDONLY))
            assert taken[0] == number
            return super().parts

    monkeypatch.setattr(staged_run, "StagedRun", Closing)
    memory, before = dirty(device, len(whole)), len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with Uploader(device, block_nbytes=1024, num_readers=2) as uploader:
        uploader.upload([segment], memory)
    assert np.array_equal(received(device, memory, len(whole)), whole)
    assert not before or len(os.listdir("/proc/self/fd")) == before
    os.close(taken[0])


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
