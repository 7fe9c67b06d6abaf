"""Upload: bytes from a source into device memory, through page-locked blocks, with reading and copying overlapped.

Knows blocks, reader threads and windows. Does not know files or tensors. ::

    memory    | segment 0 | gap | segment 1 ...      | segment 2 |
    windows   |     0     |     1     |     2     |     3     |   one block each, whatever the segments are

    reader 0    fill 0   fill 2        ...         each takes the next window that nobody has, fills a block of its own,
    reader 1    fill 1     fill 3                  enqueues the copy, and goes on with its other block
    stream             copy 0 copy 1 copy 2 ...

A block is filled again only after the event behind its last copy. On the host targets there is nothing to stage: the readers
fill the memory itself.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from numba_kv.errors import InputError, StateError
from numba_kv.weights.blocks import Blocks, host_bytes
from numba_kv.weights.windows import GRAIN, Fill, Segment, Windows

if TYPE_CHECKING:
    from types import TracebackType

    from numba_kv.device import Device, Memory, Stream

__all__ = ["BLOCK_NBYTES", "STAGING_NBYTES", "Fill", "Progress", "Segment", "Uploader", "lent_uploader"]

#: Page-locked bytes of an uploader at most, unless it is told otherwise.
STAGING_NBYTES = 48 << 20
#: Bytes of a block, two for each of 8 readers: a smaller one is copied before the interpreter has served the next reader.
BLOCK_NBYTES = 3 << 20
#: With more readers than this the memory is the limit, and each upload has more threads to wake.
_MAX_READERS = 8
#: Seconds between two reports of progress.
_REPORT_EVERY = 0.05

_BUSY = "weights or an adapter are being loaded; wait until that has ended"

#: `progress(done_nbytes, total_nbytes)`, called on the caller's thread; the first call has 0 done, the last one all.
Progress = Callable[[int, int], None]

#: Begin and end of a window.
Range = tuple[int, int]


class _Run:
    """One upload: what is left of it, and whether to go on."""

    def __init__(self, windows: Windows, num_readers: int, stream: Stream) -> None:
        self.windows = windows
        self.stream = stream  # a hand-over meanwhile must not part a copy from its event
        self.num_readers = min(num_readers, len(windows.ranges))
        self.done = [0] * self.num_readers  # bytes of each reader
        self.stopped = False
        self.begun = threading.Event()
        self._left = deque(windows.ranges)

    def stop(self) -> None:
        """Let every reader return after the window that it is at."""
        self.stopped = True
        self.begun.set()

    def take(self) -> Range | None:
        """Return the next window that nobody has; None: there is none, or the run was stopped."""
        try:
            return None if self.stopped else self._left.popleft()
        except IndexError:
            return None


class Uploader:
    """Staging blocks and the readers that run over them. Owns both; they are made when they are first needed, and kept.

    Uploads of several threads take turns.

    Parameters
    ----------
    device : Device
        Where the bytes go.
    staging_nbytes : int
        Page-locked bytes at most.
    block_nbytes : int
        Bytes of a block, rounded down to a multiple of 256; at most `staging_nbytes`.
    num_readers : int, optional
        Threads that fill, at most one a block; None: as many as the machine has cores, at most 8.
    direct : bool, optional
        Whether the readers write to the destination itself; None: where the host can reach it.

    Raises
    ------
    InputError
        If a number is not positive, or a block is smaller than 256 bytes.
    """

    def __init__(
        self,
        device: Device,
        *,
        staging_nbytes: int = STAGING_NBYTES,
        block_nbytes: int = BLOCK_NBYTES,
        num_readers: int | None = None,
        direct: bool | None = None,
    ) -> None:
        block = min(block_nbytes, staging_nbytes) // GRAIN * GRAIN
        if block < GRAIN:
            raise InputError(f"staging_nbytes, block_nbytes: {staging_nbytes}, {block_nbytes}; at least {GRAIN} are wanted")
        if num_readers is not None and num_readers < 1:
            raise InputError(f"num_readers: {num_readers} is not a positive number of threads")
        self._device = device
        self._block_nbytes = block
        max_blocks = staging_nbytes // block
        self._num_readers = min(num_readers or min(_MAX_READERS, os.cpu_count() or 1), max_blocks)
        self._direct = device.target != "cuda" if direct is None else direct
        self._blocks = Blocks(device, block, num_readers=self._num_readers, each=min(2, max_blocks // self._num_readers))
        self._threads: ThreadPoolExecutor | None = None
        self._turn = threading.Lock()
        self._caller = 0  # the thread whose upload runs
        self._closed = False

    @property
    def staged_nbytes(self) -> int:
        """Page-locked bytes held now."""
        return self._blocks.nbytes

    def prepare(self) -> None:
        """Make all staging and threads now, where anything is staged: the first upload is then as fast as later ones.

        Raises
        ------
        StateError
            After `close`.
        CapacityError
            If the host has not enough memory.

        Cost: `staging_nbytes` of page-locked memory, some milliseconds.
        """
        with self._turn:
            if self._closed:
                raise StateError("the uploader is closed")
            if self._direct or self._threads is not None:
                return
            self._threads = ThreadPoolExecutor(self._num_readers, "numba_kv-weights")
            try:
                self._blocks.prepare(self._blocks.most)
                list(self._threads.map(self._make_pages, range(self._num_readers)))
                with self._device.active():
                    self._blocks.lock()
            except BaseException:
                self._end_threads()
                raise

    def upload(
        self, segments: Sequence[Segment], destination: Memory | Callable[[], Memory], progress: Progress | None = None
    ) -> Memory:
        """Fill memory with the segments; bytes between them become 0.

        Parameters
        ----------
        segments : sequence of Segment
            By rising `begin`, not overlapping.
        destination : Memory or callable
            Memory of the device, or what makes it: called on this thread while the first blocks are being filled.
        progress : callable, optional
            See `Progress`; what it raises ends the upload.

        Returns
        -------
        Memory
            The destination.

        Raises
        ------
        InputError
            If the segments overlap, are not sorted or aligned, or reach past the destination; nothing is copied then.
        WeightError, DeviceError
            If a source or a copy fails; what the destination holds then is undefined, but nothing writes to it any more.
        StateError
            After `close`; from a `progress` of an upload that runs.

        Stream: enqueues on the device's stream and waits. Cost: one copy a block.
        """
        if self._caller == threading.get_ident():
            raise StateError("an upload is running in this thread; its progress callback cannot start another")
        with self._turn:
            if self._closed:
                raise StateError("the uploader is closed")
            windows = Windows(segments, self._block_nbytes)
            run = _Run(windows, self._num_readers, self._device.stream)

            def start() -> Memory:
                memory = destination() if callable(destination) else destination
                if windows.nbytes > memory.nbytes:
                    raise InputError(f"segments: they end at byte {windows.nbytes}, the destination has {memory.nbytes}")
                return memory

            report = progress or _silent
            self._caller = threading.get_ident()
            try:
                report(0, windows.nbytes)
                if not windows.nbytes:
                    return start()
                memory = self._run(run, start, lambda: report(sum(run.done), windows.nbytes))
                report(windows.nbytes, windows.nbytes)
                return memory
            finally:
                self._caller = 0

    def _run(self, run: _Run, start: Callable[[], Memory], report: Callable[[], None]) -> Memory:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_readers, "numba_kv-weights")
        else:
            run.begun.set()
        device, everyone = self._device, range(run.num_readers)
        work: list[Future[Any]] = []
        try:
            if self._direct:
                memory = start()
                run.stream.synchronize()  # nothing earlier may still write there
                work += [self._threads.submit(self._fill_memory, run, reader, memory) for reader in everyone]
            else:
                self._blocks.prepare(len(run.windows.ranges))
                work += [self._threads.submit(self._fill_first, run, reader) for reader in everyone]
                run.begun.set()
                memory = start()
                _watch(work, report)
                firsts = [one.result() for one in work]
                with device.active():
                    self._blocks.lock()
                work[:] = [self._threads.submit(self._fill_blocks, run, reader, firsts[reader], memory) for reader in everyone]
            _watch(work, report)
        except BaseException:  # whatever happened: no reader is left behind
            run.stop()
            self._end_threads()
            raise
        finally:  # and no copy
            self._blocks.drain()
            work.clear()  # see `_watch`
        return memory

    def _make_pages(self, reader: int) -> None:
        """Write to a reader's blocks, which gives them memory. Runs on a thread of its own, as the next three."""
        for block in self._blocks.of(reader):
            block.bytes.fill(0)

    def _fill_memory(self, run: _Run, reader: int, memory: Memory) -> None:
        """Write windows where they belong until there are none."""
        while window := run.take():
            begin, end = window
            run.windows.fill(host_bytes(memory)[begin:end], begin)
            self._device.count_upload(end - begin)
            run.done[reader] += end - begin

    def _fill_first(self, run: _Run, reader: int) -> Range | None:
        """Write a window to a reader's first block and return it; make the pages of the others."""
        run.begun.wait()  # threads start slowly beside others that are making pages
        blocks, window = self._blocks.of(reader), run.take()
        if window is not None:
            run.windows.fill(blocks[0].bytes[: window[1] - window[0]], window[0])
        if not self._blocks.is_locked:
            for block in blocks[1:]:
                block.bytes.fill(0)
        return window

    def _fill_blocks(self, run: _Run, reader: int, window: Range | None, memory: Memory) -> None:
        """Copy the window in a reader's first block, then write windows to its blocks in turn and copy them."""
        blocks, stream, address, fill = self._blocks.of(reader), run.stream, memory.address, run.windows.fill
        turn = 0
        with self._device.active():
            while window is not None:
                begin, end = window
                block = blocks[turn % len(blocks)]
                if turn:
                    block.wait()
                    fill(block.bytes[: end - begin], begin)
                block.send(address + begin, end - begin, stream)
                run.done[reader] += end - begin
                turn += 1
                window = run.take()

    def _end_threads(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(cancel_futures=True)

    def check_idle(self) -> None:
        """Raise StateError if an upload is running."""
        if self._turn.locked():
            raise StateError(_BUSY)

    def close(self) -> None:
        """Give blocks and threads back; a second call does nothing.

        Raises
        ------
        StateError
            If an upload is running; nothing is given back then.
        """
        if not self._turn.acquire(blocking=False):
            raise StateError(_BUSY)
        self._closed = True
        try:
            self._end_threads()
            with self._device.active():
                self._blocks.close()
        finally:
            self._turn.release()

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def lent_uploader(
    shared: Uploader | None, device: Device, staging_nbytes: int = STAGING_NBYTES
) -> AbstractContextManager[Uploader]:
    """Return a context with `shared`, which stays open, or with an uploader of its own if that is None."""
    return nullcontext(shared) if shared is not None else Uploader(device, staging_nbytes=staging_nbytes)


def _watch(readers: Sequence[Future[None]], report: Callable[[], None]) -> None:
    """Wait for the readers, reporting now and then; raise what the first one that failed raised."""
    left: set[Future[None]] = set(readers)
    future: Future[None] | None = None
    while True:
        finished, left = wait(left, _REPORT_EVERY, FIRST_EXCEPTION)
        try:
            for future in finished:
                future.result()
        finally:  # an error holds this frame: without the futures, which hold the error, no cycle keeps files and blocks
            future = None
            finished.clear()
        if not left:
            return
        report()


def _silent(done_nbytes: int, total_nbytes: int) -> None:
    """Report nothing."""
