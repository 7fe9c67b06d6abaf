"""Upload: bytes from a source into device memory, through page-locked blocks, with reading and copying overlapped.

Knows blocks, reader threads and events. Does not know files or tensors: a `Segment` fills host memory with its bytes. ::

    memory    | segment 0 | gap | segment 1 ...      | segment 2 |
    windows   |     0     |     1     |     2     |     3     |   one block each, whatever the segments are

    reader 0    fill 0   fill 2        ...         each takes the next window that nobody has, fills a block of its own,
    reader 1    fill 1     fill 3                  enqueues the copy, and goes on with its other block
    stream             copy 0 copy 1 copy 2 ...

A block is filled again only after the event behind its last copy. No window passes from thread to thread: a wake-up costs
as much as a small copy. On the host targets there is nothing to stage: the readers fill the memory itself.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from numba_kv.errors import InputError, InvariantError, StateError

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device import Device, Event, Memory

__all__ = ["BLOCK_NBYTES", "STAGING_NBYTES", "Fill", "Progress", "Segment", "Uploader"]

#: Page-locked bytes of an uploader at most, unless it is told otherwise.
STAGING_NBYTES = 64 << 20
#: Bytes of a block: large enough that a copy runs at full rate, small enough that every reader has one.
BLOCK_NBYTES = 4 << 20
_MAX_READERS = 16
#: Seconds between two reports of progress.
_REPORT_EVERY = 0.05
#: Windows are cut at multiples of this, so that no element is ever split.
_GRAIN = 256

#: `fill(out, begin)` writes the segment's bytes from `begin` on into the uint8 array `out`. Runs on any thread.
Fill = Callable[["NDArray[np.uint8]", int], None]
#: `progress(done_nbytes, total_nbytes)`, called on the caller's thread; the first call has 0 done, the last one all.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of the destination and what fills it.

    Attributes
    ----------
    begin, nbytes : int
        Where in the destination, a multiple of 256, and how much.
    fill : callable
        See `Fill`.
    """

    begin: int
    nbytes: int
    fill: Fill

    @property
    def end(self) -> int:
        """First byte after the segment."""
        return self.begin + self.nbytes


class _Block:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.bytes = _host_bytes(memory)
        self.event: Event | None = None


class _Run:
    """One upload: the windows that are left, and whether to go on."""

    def __init__(self, windows: Sequence[tuple[int, int]], fill: _Filler, destination: Memory) -> None:
        self.left: Iterator[tuple[int, int]] = iter(windows)  # taking the next one of a list is atomic
        self.fill = fill
        self.destination = destination
        self.stopped = False


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
        Threads that fill, at most one a block; None: as many as the machine has cores, at most 16.
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
        block = min(block_nbytes, staging_nbytes) // _GRAIN * _GRAIN
        if block < _GRAIN:
            raise InputError(f"staging_nbytes, block_nbytes: {staging_nbytes}, {block_nbytes}; at least {_GRAIN} are wanted")
        if num_readers is not None and num_readers < 1:
            raise InputError(f"num_readers: {num_readers} is not a positive number of threads")
        self._device = device
        self._block_nbytes = block
        max_blocks = staging_nbytes // block
        self._num_readers = min(num_readers or min(_MAX_READERS, os.cpu_count() or 1), max_blocks)
        self._blocks_each = min(2, max_blocks // self._num_readers)
        self._direct = device.target != "cuda" if direct is None else direct
        self._blocks: list[list[_Block]] = [[] for _ in range(self._num_readers)]
        self._making = Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    @property
    def staged_nbytes(self) -> int:
        """Page-locked bytes held now."""
        return sum(block.memory.nbytes for blocks in self._blocks for block in blocks)

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
        _check(segments, destination)
        total = max((s.end for s in segments), default=0)
        report = progress or _silent
        report(0, total)
        if total:
            windows = [(begin, min(begin + self._block_nbytes, total)) for begin in range(0, total, self._block_nbytes)]
            self._run(_Run(windows, _Filler(segments), destination), len(windows), total, report)
            report(total, total)

    def _run(self, run: _Run, num_windows: int, total: int, report: Progress) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_readers, "numba_kv-weights")
        device, before = self._device, self._device.bytes_to_device
        done = [0] * min(self._num_readers, num_windows)
        if self._direct:
            device.stream.synchronize()  # nothing earlier may still write there
        readers = [self._threads.submit(self._read, run, reader, done) for reader in range(len(done))]
        try:
            _watch(readers, lambda: report(sum(done), total))
        finally:  # whatever happened: no reader and no copy is left behind
            run.stopped = True
            wait(readers)
            device.bytes_to_device = before + sum(done)  # the readers counted at the same time, and may have lost some
            self._drain()

    def _read(self, run: _Run, reader: int, done: list[int]) -> None:
        """Take windows until there are none. Runs on a thread of its own."""
        device, stream, turn = self._device, self._device.stream, 0
        with device.active():
            for begin, end in run.left:
                if run.stopped:
                    return
                if self._direct:
                    run.fill(_host_bytes(run.destination)[begin:end], begin)
                else:
                    block = self._take_block(self._blocks[reader], turn)
                    run.fill(block.bytes[: end - begin], begin)
                    device.copy_to_device(run.destination.address + begin, block.memory.address, end - begin, stream)
                    block.event = stream.record()
                    turn += 1
                done[reader] += end - begin

    def _take_block(self, blocks: list[_Block], turn: int) -> _Block:
        """Return the reader's block whose turn it is, once its last copy has run."""
        place = turn % self._blocks_each
        if place == len(blocks):
            with self._making:  # the device counts what it gives out, and one thread at a time may count
                blocks.append(_Block(self._device.allocate_staging(self._block_nbytes)))
        block = blocks[place]
        if block.event is not None:
            block.event.synchronize()
            block.event = None
        return block

    def _drain(self) -> None:
        with self._device.active():
            for blocks in self._blocks:
                for block in blocks:
                    if block.event is not None:
                        block.event.synchronize()
                        block.event = None

    def close(self) -> None:
        """Give threads and blocks back; a second call does nothing."""
        self._closed = True
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
        with self._device.active():
            for blocks in self._blocks:
                while blocks:
                    blocks.pop().memory.close(self._device.stream)

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _watch(readers: Sequence[Future[None]], report: Callable[[], None]) -> None:
    """Wait for the readers, reporting now and then; raise what the first one that failed raised."""
    left: set[Future[None]] = set(readers)
    while True:
        finished, left = wait(left, _REPORT_EVERY, FIRST_EXCEPTION)
        for future in finished:
            future.result()
        if not left:
            return
        report()


def _host_bytes(memory: Memory) -> NDArray[np.uint8]:
    if memory.array is None:
        raise InvariantError("this memory is not host memory")
    return memory.array


class _Filler:
    """Fills any range of the destination from the segments that reach into it."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = [s for s in segments if s.nbytes]
        self._begins = [s.begin for s in self._segments]

    def __call__(self, out: NDArray[np.uint8], begin: int) -> None:
        at, end = begin, begin + len(out)
        place = max(0, bisect_right(self._begins, begin) - 1)
        for segment in self._segments[place:]:
            if segment.begin >= end:
                break
            low, high = max(begin, segment.begin), min(end, segment.end)
            if low >= high:
                continue
            out[at - begin : low - begin] = 0
            segment.fill(out[low - begin : high - begin], low - segment.begin)
            at = high
        out[at - begin :] = 0


def _check(segments: Sequence[Segment], destination: Memory) -> None:
    end = 0
    for segment in segments:
        if segment.begin < end or segment.begin % _GRAIN or segment.nbytes < 0:
            raise InputError(
                f"segments: {segment.nbytes} bytes at {segment.begin} overlap, or do not start at a multiple of {_GRAIN}"
            )
        end = segment.end
    if end > destination.nbytes:
        raise InputError(f"segments: they end at byte {end}, the destination has {destination.nbytes}")


def _silent(done_nbytes: int, total_nbytes: int) -> None:
    """Report nothing."""
