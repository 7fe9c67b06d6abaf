"""The compiled loop of readers: which bytes it writes, what it leaves to its caller, and where it stops."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from numba_kv.kernels import file_loop as loop

CONTENT = np.random.default_rng(1).integers(1, 256, 70_000).astype(np.uint8)
CALL = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
NBYTES, BLOCK = 50_000, 1024


def address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class Host:
    """Files, blocks and a destination on the host, with functions of Python in the places of the driver's.

    Copies read their source once somebody asks for the event behind them, and are said to have run from the next time on.
    """

    def __init__(
        self, descriptor: int, readers: int = 1, *, blocks: int = 2, most: int = 1, **functions: Callable[..., int]
    ) -> None:
        self.copies: list[tuple[int, int]] = []  # where in the destination, and bytes
        self.late: list[tuple[int, int, int]] = []
        self.behind: dict[int, int] = {}  # event -> copies before it
        self.num_run = 0
        self.out = np.full(NBYTES + 256, 0xEE, np.uint8)
        self.staging = np.full((blocks, BLOCK), 0xEE, np.uint8)
        self.events = np.arange(100, 100 + blocks)
        self.tables = np.zeros((2, blocks), np.int64)
        names = {
            loop.COPY: functions.get("copy", self.copy),
            loop.RECORD: functions.get("record", self.record),
            loop.QUERY: functions.get("query", self.query),
            loop.MAKE_CURRENT: functions.get("make_current", lambda context, *rest: 0 if context == 99 else 201),
            loop.READ: functions.get("read", ctypes.CDLL(None).pread),
            loop.YIELD: functions.get("let_others", ctypes.CDLL(None).sched_yield),
        }
        self._kept = {word: call if hasattr(call, "argtypes") else CALL(call) for word, call in names.items()}
        self.job = np.zeros(loop.JOB_WORDS, np.int64)
        for word, function in self._kept.items():
            self.job[word] = address(function)
        self.job[[loop.WINDOW_NBYTES, loop.NBYTES, loop.DESTINATION]] = BLOCK, NBYTES, self.out.ctypes.data
        self.job[[loop.STREAM, loop.CONTEXT, loop.MOST]] = 77, 99, most
        self.job[[loop.STAGING, loop.NUM_BLOCKS]] = self.staging.ctypes.data, blocks
        self.job[[loop.FILLED, loop.ENDS]] = [table.ctypes.data for table in self.tables]
        self.job[loop.EVENTS] = self.events.ctypes.data
        self.words = np.zeros((readers, loop.READER_WORDS), np.int64)
        self.words[:, loop.WINDOW], self.words[:, loop.JOB] = -1, self.job.ctypes.data
        self.words[:, loop.RESULT] = loop.NONE_LEFT
        self.file = descriptor

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        assert stream == 77
        begin = to - self.out.ctypes.data
        assert begin == sum(size for _, size in self.copies)  # one behind the other
        assert self.staging.ctypes.data <= source <= source + nbytes <= self.staging.ctypes.data + self.staging.size
        self.copies.append((begin, nbytes))
        self.late.append((to, source, nbytes))
        return 0

    def record(self, event: int, stream: int, *rest: int) -> int:
        assert self.behind.get(event, 0) <= self.num_run  # nobody waits for what it stood for
        self.behind[event] = len(self.copies)
        return 0

    def query(self, event: int, *rest: int) -> int:
        if self.behind[event] <= self.num_run:
            return 0
        while self.num_run < self.behind[event]:
            ctypes.memmove(*self.late[self.num_run])
            self.num_run += 1
        return 600 | 7 << 32  # of when it was asked

    def give(self, pieces: list[list[int]]) -> None:
        self.pieces = np.array(pieces, np.int64).reshape(-1, 4)
        self.job[loop.PIECES], self.job[loop.NUM_PIECES] = self.pieces.ctypes.data, len(self.pieces)

    def run(self, filled: int = -1, reader: int = 0, most: int = loop.ENDLESS) -> int:
        return loop.load_windows(self.job, self.words[reader], filled, most, 1)

    def fill(self, window: int) -> None:
        """Write 7s to a window's block."""
        self.staging[window % len(self.staging)] = 7

    @property
    def sizes(self) -> list[int]:
        """Windows of each copy."""
        return [-(-nbytes // BLOCK) for _, nbytes in self.copies]


@contextmanager
def threads_of(host: Host, create: object = None) -> Iterator[None]:
    """Have threads of the system for all readers but the first; join them."""
    system = ctypes.CDLL(None)
    loop.start_threads(host.words, address(create or system.pthread_create))
    try:
        yield
    finally:
        loop.join_threads(host.words, address(system.pthread_join))
    assert not host.words[:, loop.IS_MADE].any()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "content").write_bytes(CONTENT.tobytes())
    descriptor = os.open(tmp_path / "content", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def wanted(pieces: list[list[int]]) -> np.ndarray:
    out = np.zeros(NBYTES, np.uint8)
    for begin, end, _, offset in pieces:
        out[begin:end] = CONTENT[offset : offset + end - begin]
    return out


PIECES = [
    [(0, NBYTES, 17)],
    [(300, 700, 0), (1024, 1025, 5), (2048, 2200, 9), (2200, 2300, 900), (2303, 30_000, 1), (40_000, NBYTES - 1, 60_001)],
    [],
]


@pytest.mark.parametrize("places", PIECES, ids=["one", "several", "none"])
@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize(("blocks", "most"), [(1, 1), (2, 1), (3, 2), (7, 3), (64, 8)])
def test_every_byte_arrives(file: int, places: list[tuple[int, int, int]], readers: int, blocks: int, most: int) -> None:
    pieces = [[begin, end, file, offset] for begin, end, offset in places]
    host = Host(file, readers, blocks=blocks, most=most)
    host.give(pieces)
    with ThreadPoolExecutor(readers) as threads:
        assert set(threads.map(lambda r: host.run(reader=r), range(readers))) == {loop.NONE_LEFT}
    assert np.array_equal(host.out[:NBYTES], wanted(pieces))
    assert (host.out[NBYTES:] == 0xEE).all()
    assert sum(host.sizes) == host.job[loop.SENT] == host.job[loop.ARRIVED] == -(-NBYTES // BLOCK)
    assert max(host.sizes) <= most


@pytest.mark.parametrize("nbytes", [1, 255, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK, 7 * BLOCK + 13])
@pytest.mark.parametrize("blocks", [1, 3, 16])
def test_small_uploads_end_at_their_last_byte(file: int, nbytes: int, blocks: int) -> None:
    host = Host(file, blocks=blocks, most=4)
    host.job[loop.NBYTES] = nbytes
    host.give([[0, nbytes, file, 3]])
    assert host.run() == loop.NONE_LEFT
    assert np.array_equal(host.out[:nbytes], CONTENT[3 : 3 + nbytes])
    assert (host.out[nbytes:] == 0xEE).all()


def test_copies_are_larger_while_the_device_is_busy(file: int) -> None:
    busy = [True]
    host = Host(file, blocks=16, most=4, query=lambda *words: 600 if busy[0] else host.query(*words))
    host.give([[0, NBYTES, file, 0]])
    for _ in range(16):  # as many as there are blocks
        assert host.run(most=1) == loop.PAUSED
    assert host.sizes == [1, 1, 4, 4, 4, 2]  # two as soon as they are there, then what is worth a copy, up to the last block
    busy[0] = False
    assert host.run() == loop.NONE_LEFT
    assert np.array_equal(host.out[:NBYTES], CONTENT[:NBYTES])


def test_the_window_that_is_next_is_waited_for(file: int) -> None:
    """Others fill the windows behind it, and none overtakes it."""
    slow, others = threading.Event(), threading.Event()

    def read(descriptor: int, to: int, nbytes: int, offset: int) -> int:
        if offset == 0 and not slow.is_set():
            assert others.wait(10)
            time.sleep(0.02)
            slow.set()
        if offset == 3 * BLOCK:  # as far as four blocks reach
            assert not host.copies
            others.set()
        return os.preadv(descriptor, [(ctypes.c_char * nbytes).from_address(to)], offset)

    host = Host(file, 3, blocks=4, most=4, read=read)
    host.give([[0, NBYTES, file, 0]])
    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(lambda r: host.run(reader=r), range(3))) == {loop.NONE_LEFT}
    assert np.array_equal(host.out[:NBYTES], CONTENT[:NBYTES])


def test_a_caller_is_back_after_its_windows_and_holds_none(file: int) -> None:
    host = Host(file, blocks=5, most=2)
    host.give([[0, NBYTES, file, 0]])
    results = [host.run(most=3)]
    while results[-1] == loop.PAUSED:
        assert host.words[0, loop.WINDOW] == -1
        assert host.job[loop.NEXT] == 3 * len(results)
        results.append(host.run(most=3))
    assert results[-1] == loop.NONE_LEFT
    assert len(results) == -(-NBYTES // BLOCK) // 3 + 1
    assert np.array_equal(host.out[:NBYTES], CONTENT[:NBYTES])


def test_what_no_file_gives_is_the_callers(file: int) -> None:
    host = Host(file)
    pieces = [[0, 1500, file, 0], [1536, 4096, -1, 0], [4096, 20_000, file, 69_000]]  # the file ends within the last
    host.give(pieces)
    asked, window = [], host.run()
    while window >= 0:
        asked.append(window)
        host.fill(window)
        window = host.run(window)
    assert window == loop.NONE_LEFT
    assert asked == [1, 2, 3, *range(4 + 1000 // BLOCK, -(-20_000 // BLOCK))]
    out = wanted([pieces[0]])
    for filled in asked:
        out[filled * BLOCK : (filled + 1) * BLOCK] = 7
    assert np.array_equal(host.out[:1024], out[:1024])
    assert np.array_equal(host.out[4 * BLOCK : NBYTES], out[4 * BLOCK :])


def test_short_reads_go_on_where_they_ended(file: int) -> None:
    def few(descriptor: int, to: int, nbytes: int, offset: int) -> int:
        return os.preadv(descriptor, [(ctypes.c_char * min(nbytes, 100)).from_address(to)], offset)

    host = Host(file, read=few)
    host.give([[0, NBYTES, file, 3]])
    assert host.run() == loop.NONE_LEFT
    assert np.array_equal(host.out[:NBYTES], CONTENT[3 : NBYTES + 3])


@pytest.mark.parametrize("call", ["copy", "record", "query"])
def test_a_status_ends_all(file: int, call: str) -> None:
    left = [1, 1, 1]
    host = Host(file, 2, **{call: lambda *words: getattr(host, call)(*words) if left and left.pop() else 719 | 5 << 32})
    host.give([[0, NBYTES, file, 0]])
    assert host.run() == loop.NONE_LEFT - 719
    assert host.job[loop.IS_STOPPED] == 1
    assert host.job[loop.SENT] == len(host.copies) - (call == "record") <= 4
    assert host.run(reader=1) == loop.NONE_LEFT
    assert host.job[loop.IS_TAKEN] == 0


def test_readers_that_are_stopped_end(file: int) -> None:
    def copy(*words: int) -> int:
        host.job[loop.IS_STOPPED] = 1  # whoever stops the run
        return host.copy(*words)

    host = Host(file, copy=copy)
    host.give([[0, NBYTES, file, 0]])
    assert host.run() == loop.NONE_LEFT
    assert host.job[loop.SENT] == 1


def test_a_reader_that_waits_for_a_block_can_be_stopped(file: int) -> None:
    def let_others(*words: int) -> int:
        asked.append(words)
        host.job[loop.IS_STOPPED] = len(asked) > 5
        return 0

    asked: list[tuple[int, ...]] = []
    host = Host(file, query=lambda *words: 600, let_others=let_others)
    host.give([[0, NBYTES, file, 0]])
    assert host.run() == loop.NONE_LEFT
    assert len(asked) == 6
    assert host.sizes == [1, 1]


# --- threads of the system


@pytest.mark.parametrize("places", PIECES, ids=["one", "several", "none"])
@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize(("blocks", "most"), [(2, 1), (12, 3)])
def test_readers_on_threads_of_the_system(
    file: int, places: list[tuple[int, int, int]], readers: int, blocks: int, most: int
) -> None:
    host, known = Host(file, readers, blocks=blocks, most=most), threading.active_count()
    pieces = [[begin, end, file, offset] for begin, end, offset in places]
    host.give(pieces)
    with threads_of(host):
        result = host.run(most=1)
        while result == loop.PAUSED:
            result = host.run(most=1)
    assert [result, *host.words[1:, loop.RESULT]] == [loop.NONE_LEFT] * readers
    assert np.array_equal(host.out[:NBYTES], wanted(pieces))
    assert (host.out[NBYTES:] == 0xEE).all()
    assert sum(host.sizes) == host.job[loop.ARRIVED] == -(-NBYTES // BLOCK)
    assert threading.active_count() == known


def test_each_reader_has_a_thread(file: int) -> None:
    def read(descriptor: int, to: int, nbytes: int, offset: int) -> int:
        seen.add(threading.get_native_id())
        if len(seen) == 4:
            all_there.set()
        all_there.wait(10)
        return os.preadv(descriptor, [(ctypes.c_char * nbytes).from_address(to)], offset)

    seen: set[int] = set()
    all_there = threading.Event()
    host = Host(file, 4, blocks=8, read=read)
    host.give([[0, NBYTES, file, 0]])
    with threads_of(host):
        assert host.run() == loop.NONE_LEFT
    assert len(seen) == 4
    assert np.array_equal(host.out[:NBYTES], CONTENT[:NBYTES])


def test_a_reader_that_the_driver_refuses_ends_all(file: int) -> None:
    def copy(*words: int) -> int:
        calls.append(words)
        return 719 if len(calls) == 4 else host.copy(*words)

    calls: list[tuple[int, ...]] = []
    host = Host(file, 3, copy=copy)
    host.give([[0, NBYTES, file, 0]])
    with threads_of(host):
        result = host.run()
    assert sorted([result, *host.words[1:, loop.RESULT]]) == [loop.NONE_LEFT - 719, loop.NONE_LEFT, loop.NONE_LEFT]
    assert len(calls) == 4
    host = Host(file, 3, make_current=lambda *words: 4)
    host.give([[0, NBYTES, file, 0]])
    with threads_of(host):
        pass
    assert host.words[1:, loop.RESULT].tolist() == [loop.NONE_LEFT - 4] * 2
    assert host.run() == loop.NONE_LEFT
    assert (host.out == 0xEE).all()


def test_a_refused_reader_ends_those_of_the_largest_uploads(file: int) -> None:
    host = Host(file, 2, make_current=lambda *words: 4, query=lambda *words: 719)
    host.job[[loop.WINDOW_NBYTES, loop.NBYTES]] = 48 << 20, 200 << 30  # their product has more than 63 bits
    host.give([[0, 200 << 30, file, 0]])
    with threads_of(host):
        pass
    assert host.words[1, loop.RESULT] == loop.NONE_LEFT - 4
    assert host.run() == loop.NONE_LEFT
    assert (host.staging == 0xEE).all()
    assert (host.out == 0xEE).all()


def test_a_window_at_which_a_thread_is_stuck_is_the_callers(file: int) -> None:
    """The caller is back although all blocks wait for that window."""
    host, left = Host(file, 2, blocks=4, most=2), 20_000 // BLOCK
    host.give([[0, 20_000, file, 0], [20_000, 20_400, file, 1 << 40], [20_480, NBYTES, file, 20_480]])
    with threads_of(host):
        while not host.job[loop.IS_STUCK]:  # it reads all windows before that one
            time.sleep(1e-3)
        assert host.words[1, loop.RESULT] == left
        result = host.run(most=1)
        while host.words[0, loop.WINDOW] < 0:
            assert result == loop.PAUSED
            result = host.run(most=1)
        assert result == loop.PAUSED
        assert host.job[loop.SENT] <= left
        assert left < host.words[0, loop.WINDOW] <= left + 4  # for which it has no block yet
        host.job[loop.IS_STUCK] = 0
        host.fill(left)
        assert host.run(left, 1, most=1) == loop.PAUSED
        assert host.run() == loop.NONE_LEFT
    expected = CONTENT[:NBYTES].copy()
    expected[left * BLOCK : (left + 1) * BLOCK] = 7
    assert np.array_equal(host.out[:NBYTES], expected)


@pytest.mark.parametrize("most", [0, 1])
def test_without_more_threads_those_that_there_are_do_it(file: int, most: int) -> None:
    made: list[int] = []
    system = ctypes.CDLL(None).pthread_create
    system.argtypes = [ctypes.c_void_p] * 4

    @CALL
    def create(*words: int) -> int:
        if len(made) == most:
            return 11
        made.append(words[0])
        return int(system(*words))

    host = Host(file, 4, blocks=8)
    host.give([[0, NBYTES, file, 0]])
    with threads_of(host, create):
        assert host.words[:, loop.IS_MADE].sum() == most
        assert host.run() == loop.NONE_LEFT
    assert host.words[:, loop.RESULT].tolist() == [loop.NONE_LEFT] * 4
    assert np.array_equal(host.out[:NBYTES], CONTENT[:NBYTES])
