"""Upload: bytes from a source into device memory, through page-locked blocks, with reading and copying overlapped.

Knows reader threads and whose turn it is. Does not know files or tensors. ::

    memory    | segment 0 | gap | segment 1 ...      | segment 2 |
    windows   |     0     |     1     |     2     |     3     |   one block each, whatever the segments are

    reader 0    fill 0   fill 2        ...         each takes the next window that nobody has, fills its block, and enqueues
    reader 1    fill 1     fill 3                  the copy of what is filled by then
    stream             copy 0 copy 1 and 2 ...     in order: neighbours may be one copy

A block is filled again only after the event behind its last copy. On the host targets there is nothing to stage: the readers
fill the memory itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from numba_kv.errors import InputError, StateError
from numba_kv.weights.blocks import Blocks
from numba_kv.weights.direct_run import DirectRun
from numba_kv.weights.windows import GRAIN, Fill, Segment, Windows

if TYPE_CHECKING:
    from types import TracebackType

    from numba_kv.device import Device, Memory
    from numba_kv.weights.staged_run import StagedRun

__all__ = ["BLOCK_NBYTES", "STAGING_NBYTES", "Fill", "Progress", "Segment", "Uploader", "lent_uploader"]

#: Page-locked bytes of an uploader at most, unless it is told otherwise.
STAGING_NBYTES = 48 << 20
#: Bytes of a block, four for each of 12 readers. With larger ones the first copy begins later, and the last reader ends later.
BLOCK_NBYTES = 1 << 20
_BLOCKS_A_READER = 4
#: More readers than this are no faster.
_MAX_READERS = 12
#: Seconds between two reports of progress.
_REPORT_EVERY = 0.05

_BUSY = "weights or an adapter are being loaded; wait until that has ended"

#: `progress(done_nbytes, total_nbytes)`, called on the caller's thread; the first call has 0 done, the last one all.
Progress = Callable[[int, int], None]


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
        Threads that fill, at most one a block; None: as many as the machine has cores, at most 12.

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
        self._functions = device.copy_functions()  # None: nothing is staged
        each = min(_BLOCKS_A_READER, max_blocks // self._num_readers)
        self._blocks = Blocks(device, block, num_readers=self._num_readers, each=each)
        self._threads: ThreadPoolExecutor | None = None
        self._running: DirectRun | StagedRun | None = None  # whose readers may be at work
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

        Cost: `staging_nbytes` of page-locked memory, some milliseconds; on a machine's first time a second of compiling.
        """
        with self._turn:
            self._begin()
            if self._functions is None:
                return
            try:
                self._lock(self._make_pages(self._have_threads(), self._blocks.most))
            except BaseException:
                self._end_threads()
                raise

    def upload(
        self,
        segments: Sequence[Segment],
        destination: Memory | Callable[[], Memory],
        progress: Progress | None = None,
        *,
        meanwhile: Callable[[Memory], None] | None = None,
    ) -> Memory:
        """Fill memory with the segments; bytes between them become 0.

        Parameters
        ----------
        segments : sequence of Segment
            By rising `begin`, not overlapping.
        destination : Memory or callable
            Memory of the device, or what makes it: called on this thread, while staging is made if there is none.
        progress : callable, optional
            See `Progress`; what it raises ends the upload.
        meanwhile : callable, optional
            Called once with the destination, on this thread, as soon as readers are at work; what it raises ends the upload.

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
            After `close`; from a `progress` or `meanwhile` of an upload that runs.
        CapacityError
            If the process cannot open as many files.

        Stream: enqueues on the device's stream and waits. Cost: copies of up to 8 MiB, a quarter of the staging at most.
        Ctrl-C: raised once no reader and no copy is left, that is behind the reads which run then.
        """
        if self._caller == threading.get_ident():
            raise StateError("an upload is running in this thread; what it calls back cannot start another")
        with self._turn:
            self._begin()
            windows = Windows(segments, self._block_nbytes)

            def start() -> Memory:
                memory = destination() if callable(destination) else destination
                if windows.nbytes > memory.nbytes:
                    raise InputError(f"segments: they end at byte {windows.nbytes}, the destination has {memory.nbytes}")
                return memory

            report, note = progress or _silent, meanwhile or _idle
            self._caller = threading.get_ident()
            try:
                report(0, windows.nbytes)
                if not windows.nbytes:
                    memory = start()
                    note(memory)
                    return memory
                memory = self._run(windows, start, report, note)
                report(windows.nbytes, windows.nbytes)
                return memory
            finally:
                self._caller = 0

    def _run(
        self, windows: Windows, start: Callable[[], Memory], report: Progress, meanwhile: Callable[[Memory], None]
    ) -> Memory:
        stream, threads = self._device.stream, self._have_threads()
        run: DirectRun | StagedRun | None = None
        work: list[Future[None]] = []

        def tell() -> None:
            report(run.done_nbytes if run else 0, windows.nbytes)

        try:
            if self._functions is None:
                memory = start()
                stream.synchronize()  # nothing earlier may still write there
                run = DirectRun(windows, memory, self._num_readers)
            else:
                work += self._make_pages(threads, windows.count)
                memory = start()
                self._lock(work)
                run = _staged_run()(
                    self._device,
                    self._functions,
                    stream,
                    windows=windows,
                    blocks=self._blocks,
                    memory=memory,
                    num_readers=self._num_readers,
                )
            self._running = run
            work[:] = [threads.submit(part) for part in run.parts]
            run.start()
            meanwhile(memory)
            _watch(work, tell)
            _read(run, tell)
            self._running = None
            run.close()
        except BaseException:  # whatever happened: no reader is left behind, and no copy
            try:
                self._end_threads()
            finally:
                if run is not None and self._running is None:
                    run.close()
                stream.synchronize()  # a copy has no event yet if the driver refused that
            raise
        finally:
            work.clear()  # see `_watch`
            if run is not None:
                self._device.count_upload(run.done_nbytes)
        return memory

    def _make_pages(self, threads: ThreadPoolExecutor, num_windows: int) -> list[Future[None]]:
        """Have blocks for so many windows; return the readers at work on their pages, until `_lock`."""
        self._blocks.prepare(num_windows)
        if self._blocks.is_locked:
            return []
        begun = threading.Event()  # threads start slowly beside others that are making pages

        def make(reader: int) -> None:
            begun.wait()
            self._blocks.make_pages(reader)

        try:
            return [threads.submit(make, reader) for reader in range(min(self._num_readers, num_windows))]
        finally:
            begun.set()

    def _lock(self, making: Sequence[Future[None]]) -> None:
        """Have the loop, and blocks that copies can read."""
        if self._blocks.is_locked:
            return
        _staged_run()  # while pages are made
        _watch(making, lambda: None)
        with self._device.active():
            self._blocks.lock()

    def _have_threads(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_readers, "numba_kv-weights")
        return self._threads

    def _begin(self) -> None:
        """Raise StateError after `close`; end the readers of an upload whose end has failed."""
        if self._closed:
            raise StateError("the uploader is closed")
        if self._running is not None:
            self._end_threads()

    def _end_threads(self) -> None:
        """Let every reader return, and wait for that; an interrupt is raised behind it: readers write to memory of others."""
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                if self._running is not None:
                    self._running.stop()
                if self._threads is not None:
                    self._threads.shutdown(cancel_futures=True)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        self._threads = None
        if self._running is not None:
            self._running.close()
            self._running = None
        if interrupt is not None:
            raise interrupt

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


def _staged_run() -> type[StagedRun]:
    """Return the class. The first time its loop is compiled, or read from the disk."""
    from numba_kv.weights.staged_run import StagedRun

    return StagedRun


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


def _read(run: DirectRun | StagedRun, report: Callable[[], None]) -> None:
    """Be a reader until all is read, reporting now and then."""
    reported = time.monotonic()
    while not run.go_on():
        if time.monotonic() - reported >= _REPORT_EVERY:
            report()
            reported = time.monotonic()


def _idle(memory: Memory) -> None:
    """Do nothing."""


def _silent(done_nbytes: int, total_nbytes: int) -> None:
    """Report nothing."""
