"""Uploads of what files give, which the compiled loop reads: beside other sources, on its threads, and to their end."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_kv.device import Device, Memory, create_device
from numba_kv.errors import CapacityError, StateError, WeightError
from numba_kv.weights import SafetensorsFile, Uploader, staged_run
from numba_kv.weights.assembly import FileRange
from numba_kv.weights.windows import Segment
from tests.helpers.late_device import LateDevice, staged_device
from tests.helpers.uploads import RANDOM, dirty, host_device, of_bytes, received
from tests.helpers.weight_files import write


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


def num_open() -> int:
    """Return how many descriptors this process has, where the system tells; none of what nobody holds any more."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


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


def test_interrupts_while_readers_end_wait_for_them(files: list[SafetensorsFile], monkeypatch: pytest.MonkeyPatch) -> None:
    device, segment, wanted = LateDevice(), *of_a_file(files)
    reads, left, open_before = [0], [2], num_open()
    stop = staged_run.StagedRun.stop

    def before() -> None:
        reads[0] += 1
        threading.Event().wait(0.005)

    def interrupted(memory: Memory) -> None:
        raise KeyboardInterrupt

    def stop_late(self: staged_run.StagedRun) -> None:
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        stop(self)

    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=3) as uploader:
        kept = reads_through(monkeypatch, before)
        with monkeypatch.context() as patch:
            patch.setattr(staged_run.StagedRun, "stop", stop_late)
            with pytest.raises(KeyboardInterrupt):
                uploader.upload([segment], device.allocate(segment.nbytes), meanwhile=interrupted)
            ended = reads[0]
            threading.Event().wait(0.05)
            assert (reads[0], left[0], uploader._running) == (ended, 0, None)
        memory = uploader.upload([segment], device.allocate(segment.nbytes))
        assert np.array_equal(received(device, memory, segment.nbytes), wanted)
    assert num_open() == open_before
    del kept


@pytest.mark.parametrize("direct", [True, False])
def test_interrupts_while_a_pool_ends_wait_for_it(monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Of sources that need Python: a read that takes its time is not left behind."""
    device, written, left = host_device(direct), [0], [2]
    shutdown, known = ThreadPoolExecutor.shutdown, threading.active_count()

    def fill(out: np.ndarray, at: int) -> None:
        threading.Event().wait(0.05)
        out[:] = 7
        written[0] += 1

    def shutdown_late(self: ThreadPoolExecutor, *args: Any, **options: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        shutdown(self, *args, **options)

    def interrupted(memory: Memory) -> None:
        raise KeyboardInterrupt

    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=2) as uploader:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadPoolExecutor, "shutdown", shutdown_late)
            with pytest.raises(KeyboardInterrupt):
                uploader.upload([Segment(begin=0, nbytes=8192, fill=fill)], device.allocate(8192), meanwhile=interrupted)
        ended = written[0]
        assert (left[0], threading.active_count()) == (0, known)
        threading.Event().wait(0.1)
        assert written[0] == ended < 8


def test_too_many_files_are_refused(files: list[SafetensorsFile], monkeypatch: pytest.MonkeyPatch) -> None:
    device, (given, wanted), left = LateDevice(), of_files(files), [1]
    open_before, dup = num_open(), os.dup

    def few(file: int) -> int:
        if not left[0]:
            raise OSError(errno.EMFILE, "Too many open files")
        left[0] -= 1
        return dup(file)

    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=2) as uploader:
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", few)
            with pytest.raises(CapacityError, match="are to be read at once, the process can open 1 more") as refused:
                uploader.upload(given, device.allocate(len(wanted)))
        assert refused.value.free == 1
        memory = uploader.upload(given, device.allocate(len(wanted)))
        assert np.array_equal(received(device, memory, len(wanted)), wanted)
    assert num_open() == open_before


@pytest.mark.parametrize("then", ["close", "upload", "prepare"])
def test_readers_are_ended_later_if_their_end_fails(
    files: list[SafetensorsFile], monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    device, segment, wanted = LateDevice(), *of_a_file(files)
    reads, open_before = [0], num_open()

    def before() -> None:
        reads[0] += 1
        threading.Event().wait(0.005)

    def fail(_: object) -> None:
        raise SystemExit

    with Uploader(device, staging_nbytes=8192, block_nbytes=1024, num_readers=3) as uploader:
        kept = reads_through(monkeypatch, before)
        with monkeypatch.context() as patch:
            patch.setattr(staged_run.StagedRun, "stop", fail)
            with pytest.raises(SystemExit):
                uploader.upload([segment], device.allocate(segment.nbytes), meanwhile=fail)
        if then != "upload":
            getattr(uploader, then)()
            ended = reads[0]
            threading.Event().wait(0.02)
            assert reads[0] == ended
        else:
            memory = uploader.upload([segment], device.allocate(segment.nbytes))
            assert np.array_equal(received(device, memory, segment.nbytes), wanted)
    assert device.pinned.current_bytes == 0
    assert num_open() == open_before
    del kept


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
    memory, before = dirty(device, len(whole)), num_open()
    with Uploader(device, block_nbytes=1024, num_readers=2) as uploader:
        uploader.upload([segment], memory)
    assert np.array_equal(received(device, memory, len(whole)), whole)
    assert num_open() == before
    os.close(taken[0])
