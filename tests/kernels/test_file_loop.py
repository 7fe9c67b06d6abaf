"""The compiled loop of readers: which bytes it writes, what it leaves to its caller, and where it stops."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
    """Files, blocks and a destination on the host, with functions of Python in the places of the driver's."""

    def __init__(self, descriptor: int, readers: int = 1, **functions: Callable[..., int]) -> None:
        self.calls: list[tuple[str, int]] = []
        self.out = np.full(NBYTES + 256, 0xEE, np.uint8)
        self.staging = np.full((readers, 2, BLOCK), 0xEE, np.uint8)
        names = {"copy": self.copy, "record": self.record, "query": self.query} | functions
        self._kept = [CALL(names[name]) for name in ("copy", "record", "query")]
        read = functions.get("read")
        self._kept += [CALL(read)] if read else []
        pread = address(self._kept[3] if read else ctypes.CDLL(None).pread)
        make_current = CALL(functions.get("make_current", lambda context, *rest: 0 if context == 99 else 201))
        self._kept.append(make_current)
        words = [0, BLOCK, NBYTES, self.out.ctypes.data, pread, *map(address, self._kept[:3]), address(make_current), 99, 0, 0]
        self.job = np.array(words, np.int64)
        self.words = np.zeros((readers, loop.READER_WORDS), np.int64)
        self.words[:, loop.STREAM] = 77
        self.blocks = [
            np.array([[self.staging[r, i].ctypes.data, 100 * r + i] for i in range(2)], np.int64) for r in range(readers)
        ]
        self.words[:, loop.JOB], self.words[:, loop.RESULT] = self.job.ctypes.data, loop.NONE_LEFT
        for row, table in zip(self.words, self.blocks, strict=True):
            row[loop.BLOCKS], row[loop.NUM_BLOCKS] = table.ctypes.data, len(table)
        self.file = descriptor

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        assert stream == 77
        ctypes.memmove(to, source, nbytes)
        return 0

    def record(self, event: int, stream: int, *rest: int) -> int:
        self.calls.append(("record", event))
        return 0

    def query(self, event: int, *rest: int) -> int:
        """Say once that the work has not run, then that it has."""
        done = self.calls[-1:] == [("query", event)]
        self.calls.append(("query", event))
        return 0 if done else 600 | 7 << 32

    def run(self, pieces: list[list[int]], filled: int = -1, reader: int = 0) -> int:
        table = np.array(pieces, np.int64).reshape(-1, 4)
        return int(loop.load_windows(self.job, self.words[reader], self.blocks[reader], table, filled))

    def run_on_threads(self, pieces: list[list[int]], create: object = None) -> list[int]:
        """Return what the loop of each reader returned."""
        table = np.array(pieces, np.int64).reshape(-1, 4)
        self.job[loop.PIECES], self.job[loop.NUM_PIECES] = table.ctypes.data, len(table)
        system = ctypes.CDLL(None)
        loop.load_on_threads(self.words, address(create or system.pthread_create), address(system.pthread_join))
        return [int(result) for result in self.words[:, loop.RESULT]]


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
def test_every_byte_arrives(file: int, places: list[tuple[int, int, int]], readers: int) -> None:
    pieces = [[begin, end, file, offset] for begin, end, offset in places]
    host = Host(file, readers)
    with ThreadPoolExecutor(readers) as threads:
        assert set(threads.map(lambda r: host.run(pieces, reader=r), range(readers))) == {loop.NONE_LEFT}
    assert np.array_equal(host.out[:NBYTES], wanted(pieces))
    assert (host.out[NBYTES:] == 0xEE).all()
    assert host.words[:, loop.SENT].sum() == NBYTES


def test_a_block_is_waited_for_before_it_is_filled_again(file: int) -> None:
    host = Host(file)
    host.run([[0, NBYTES, file, 0]])
    windows = -(-NBYTES // BLOCK)
    expected = [(name, window % 2) for window in range(windows) for name in ("query", "query", "record")]
    last = (windows - 1) % 2  # which has run when the loop has ended
    assert host.calls == [*expected, ("query", last), ("query", last)]


def test_what_no_file_gives_is_the_callers(file: int) -> None:
    host = Host(file)
    pieces = [[0, 1500, file, 0], [1536, 4096, -1, 0], [4096, 20_000, file, 69_000]]  # the file ends within the last
    asked, window = [], host.run(pieces)
    while window >= 0:
        asked.append(window)
        host.staging[0, host.words[0, loop.TURN]] = 7
        window = host.run(pieces, window)
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
    assert host.run([[0, NBYTES, file, 3]]) == loop.NONE_LEFT
    assert np.array_equal(host.out[:NBYTES], CONTENT[3 : NBYTES + 3])


@pytest.mark.parametrize("call", ["copy", "record", "query"])
def test_a_status_ends_the_loop(file: int, call: str) -> None:
    left = [1, 1, 1]
    host = Host(file, **{call: lambda *arguments: 0 if left and left.pop() else 719 | 5 << 32})
    assert host.run([[0, NBYTES, file, 0]]) == loop.NONE_LEFT - 719
    assert host.words[0, loop.SENT] == 3 * BLOCK


def test_without_windows_readers_end(file: int) -> None:
    def copy(to: int, source: int, nbytes: int, stream: int) -> int:
        host.job[loop.NEXT] = -(-NBYTES // BLOCK)  # whoever stops the run
        return 0

    host = Host(file, copy=copy)
    assert host.run([[0, NBYTES, file, 0]]) == loop.NONE_LEFT
    assert host.words[0, loop.SENT] == BLOCK


# --- threads of the system


@pytest.mark.parametrize("places", PIECES, ids=["one", "several", "none"])
@pytest.mark.parametrize("readers", [1, 2, 5])
def test_readers_on_threads_of_the_system(file: int, places: list[tuple[int, int, int]], readers: int) -> None:
    seen: set[int] = set()

    def copy(*words: int) -> int:
        seen.add(threading.get_native_id())
        time.sleep(1e-3)
        return host.copy(*words)

    host, known = Host(file, readers, copy=copy), threading.active_count()
    pieces = [[begin, end, file, offset] for begin, end, offset in places]
    assert host.run_on_threads(pieces) == [loop.NONE_LEFT] * readers
    assert np.array_equal(host.out[:NBYTES], wanted(pieces))
    assert (host.out[NBYTES:] == 0xEE).all()
    assert host.words[:, loop.SENT].sum() == NBYTES
    assert len(seen) == readers
    assert threading.active_count() == known


def test_a_reader_that_the_driver_refuses_ends_all(file: int) -> None:
    def copy(*words: int) -> int:
        calls.append(words)
        return 719 if len(calls) == 4 else host.copy(*words)

    calls: list[tuple[int, ...]] = []
    host = Host(file, 3, copy=copy)
    assert sorted(host.run_on_threads([[0, NBYTES, file, 0]])) == [loop.NONE_LEFT - 719, loop.NONE_LEFT, loop.NONE_LEFT]
    assert len(calls) < 15
    host = Host(file, 3, make_current=lambda *words: 4)
    assert host.run_on_threads([[0, NBYTES, file, 0]]) == [loop.NONE_LEFT - 4] * 3
    assert (host.out == 0xEE).all()


def test_a_refused_reader_ends_those_of_the_largest_uploads(file: int) -> None:
    host = Host(file, 2, make_current=lambda *words: 4, query=lambda *words: 719)
    host.job[[loop.WINDOW_NBYTES, loop.NBYTES]] = 48 << 20, 200 << 30  # their product has more than 63 bits
    assert host.run_on_threads([]) == [loop.NONE_LEFT - 4] * 2
    assert host.run([[0, 200 << 30, file, 0]]) == loop.NONE_LEFT
    assert (host.staging == 0xEE).all()
    assert (host.out == 0xEE).all()


def test_a_window_that_no_file_gives_is_left_in_the_result(file: int) -> None:
    host, left = Host(file, 2), 20_000 // BLOCK
    pieces = [[0, 20_000, file, 0], [20_000, 20_400, file, 1 << 40], [20_480, NBYTES, file, 20_480]]
    results = host.run_on_threads(pieces)
    assert sorted(results) == [loop.NONE_LEFT, left]
    assert host.words[:, loop.SENT].sum() == NBYTES - BLOCK
    reader = results.index(left)
    host.staging[reader, host.words[reader, loop.TURN]] = 7
    assert host.run(pieces, left, reader) == loop.NONE_LEFT
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

    host = Host(file, 4)
    assert host.run_on_threads([[0, NBYTES, file, 0]], create) == [loop.NONE_LEFT] * 4
    assert np.array_equal(host.out[:NBYTES], CONTENT[:NBYTES])
    assert [bool(sent) for sent in host.words[:, loop.SENT]].count(True) <= 1 + most
