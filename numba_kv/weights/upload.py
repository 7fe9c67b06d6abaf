"""Upload: bytes from a source into device memory, through page-locked blocks, with reading and copying overlapped.

Knows blocks, reader threads and events. Does not know files or tensors. ::

    memory    | segment 0 | gap | segment 1 ...      | segment 2 |
    windows   |     0     |     1     |     2     |     3     |   one block each, whatever the segments are

    reader 0    fill 0   fill 2        ...         each takes the next window that nobody has, fills a block of its own,
    reader 1    fill 1     fill 3                  enqueues the copy, and goes on with its other block
    stream             copy 0 copy 1 copy 2 ...

A block is filled again only after the event behind its last copy. Windows that are the bytes of files alone go through the
compiled loop of `kernels.pump`, where that is; the others are filled from Python. On the host targets there is nothing to
stage: the readers fill the memory itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from numba_kv.errors import InputError, StateError
from numba_kv.weights.blocks import Blocks, host_bytes
from numba_kv.weights.windows import GRAIN, Fill, Segment, Windows

if TYPE_CHECKING:
    from types import TracebackType

    from numba_kv.device import Device, Memory, Stream
    from numba_kv.kernels.pump import Pump, PumpJob

__all__ = ["BLOCK_NBYTES", "STAGING_NBYTES", "Fill", "Progress", "Segment", "Uploader"]

#: Page-locked bytes of an uploader at most, unless it is told otherwise.
STAGING_NBYTES = 64 << 20
#: Bytes of a block: two for each of 8 readers.
BLOCK_NBYTES = 4 << 20
#: With more readers than this the memory is the limit, and each upload has more threads to wake.
_MAX_READERS = 8
#: Seconds between two reports of progress.
_REPORT_EVERY = 0.05

#: `progress(done_nbytes, total_nbytes)`, called on the caller's thread; the first call has 0 done, the last one all.
Progress = Callable[[int, int], None]


class _Run:
    """One upload: what is left of it, and whether to go on."""

    def __init__(self, windows: Windows, destination: Memory, num_readers: int, stream: Stream) -> None:
        self.windows = windows
        self.destination = destination
        self.stream = stream  # a hand-over meanwhile must not part a copy from its event
        self.num_readers = min(num_readers, len(windows.ranges))
        self.left = iter(windows.ranges)  # taking the next one of a list is atomic
        self.done = [0] * self.num_readers  # bytes of each reader
        self.stopped = False
        self.job: PumpJob | None = None

    @property
    def done_nbytes(self) -> int:
        """Bytes that are on their way or there."""
        return sum(self.done) + (0 if self.job is None else int(self.job.done.sum()))

    def stop(self) -> None:
        """Let every reader return after the window that it is at."""
        self.stopped = True
        if self.job is not None:
            self.job.stop()


class Uploader:
    """Staging blocks and the readers that run over them. Owns both; they are made when they are first needed.

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
    compiled : bool
        Whether files may be read by the compiled loop, on `cuda`.

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
        compiled: bool = True,
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
        self._compiled = compiled and not self._direct and device.target == "cuda"
        self._blocks = Blocks(device, block, num_readers=self._num_readers, each=min(2, max_blocks // self._num_readers))
        self._pump: Pump | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    @property
    def staged_nbytes(self) -> int:
        """Page-locked bytes held now."""
        return self._blocks.nbytes

    def upload(self, segments: Sequence[Segment], destination: Memory, progress: Progress | None = None) -> None:
        """Fill `destination` with the segments; bytes between them become 0.

        Parameters
        ----------
        segments : sequence of Segment
            By rising `begin`, not overlapping.
        destination : Memory
            Of the device.
        progress : callable, optional
            See `Progress`; what it raises ends the upload.

        Raises
        ------
        InputError
            If the segments overlap, are not sorted or aligned, or reach past the destination; nothing is copied then.
        WeightError, DeviceError
            If a source or a copy fails; what the destination holds then is undefined, but nothing writes to it any more.
        StateError
            After `close`.

        Stream: enqueues on the device's stream and waits. Cost: one copy a block.
        """
        if self._closed:
            raise StateError("the uploader is closed")
        windows = Windows(segments, self._block_nbytes)
        total = windows.nbytes
        if total > destination.nbytes:
            raise InputError(f"segments: they end at byte {total}, the destination has {destination.nbytes}")
        report = progress or _silent
        report(0, total)
        if total:
            self._run(_Run(windows, destination, self._num_readers, self._device.stream), lambda done: report(done, total))
            report(total, total)

    def _run(self, run: _Run, report: Callable[[int], None]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_readers, "numba_kv-weights")
        device, before = self._device, self._device.bytes_to_device
        if self._direct:
            run.stream.synchronize()  # nothing earlier may still write there
        if self._compiled:
            self._plan_pump(run)
        if not self._direct:
            self._blocks.prepare(len(run.windows.ranges), self._threads)
        readers = [self._threads.submit(self._read, run, reader) for reader in range(run.num_readers)]
        try:
            _watch(readers, lambda: report(run.done_nbytes))
        finally:  # whatever happened: no reader and no copy is left behind
            run.stop()
            wait(readers)
            device.bytes_to_device = before + run.done_nbytes  # readers that counted at the same time may have lost some
            self._blocks.drain()
            readers.clear()  # see `_watch`

    def _plan_pump(self, run: _Run) -> None:
        """Split the windows into those that are bytes of files alone, for the compiled loop, and the rest."""
        from numba_kv.kernels.pump import Pump, PumpJob, cuda_functions

        windows = run.windows
        if self._pump is None:
            functions = cuda_functions()
            if functions is None:
                self._compiled = False
                return
            self._pump = Pump(functions)
        segments, others = windows.file_ranges()
        run.left = iter([windows.ranges[place] for place in others])
        run.job = PumpJob(
            segments,
            others,
            window_nbytes=self._block_nbytes,
            total_nbytes=windows.nbytes,
            destination=run.destination.address,
            stream=run.stream.handle,
            num_readers=run.num_readers,
        )

    def _read(self, run: _Run, reader: int) -> None:
        """Take windows until there are none. Runs on a thread of its own."""
        with self._device.active():
            if run.job is not None and self._pump is not None:
                failed: int | None = 0
                while failed is not None:
                    try:
                        failed = self._pump.run(run.job, reader, *self._blocks.native(reader))
                    finally:
                        self._blocks.wait_native(reader)
                    if failed is not None:  # once more, by the reader that says what is wrong
                        self._copy(run, reader, *run.windows.ranges[failed])
            for begin, end in run.left:
                if run.stopped:
                    return
                self._copy(run, reader, begin, end)

    def _copy(self, run: _Run, reader: int, begin: int, end: int) -> None:
        if self._direct:
            run.windows.fill(host_bytes(run.destination)[begin:end], begin)
        else:
            with self._blocks.idle(reader, run.stream) as block:
                run.windows.fill(block.bytes[: end - begin], begin)
                address = run.destination.address + begin
                self._device.copy_to_device(address, block.address, end - begin, run.stream)
        run.done[reader] += end - begin

    def close(self) -> None:
        """Give threads and blocks back; a second call does nothing."""
        self._closed = True
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        self._blocks.close()

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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
