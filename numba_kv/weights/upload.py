"""Upload: bytes from a source into device memory, through page-locked blocks, with reading and copying overlapped.

Knows blocks, reader threads and events. Does not know files or tensors: a `Segment` fills host memory with its bytes. ::

    memory    | segment 0 | gap | segment 1 ...      | segment 2 |
    windows   |     0     |     1     |     2     |     3     |   one block each, whatever the segments are
    readers       fill          fill        fill
    stream               copy 0      copy 1      copy 2

A block is filled again only after the event behind its last copy. On the host targets there is nothing to stage: the
readers fill the memory itself.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
#: Bytes of a block: large enough that a copy runs at full rate, small enough that several are in flight.
BLOCK_NBYTES = 4 << 20
_MAX_READERS = 12
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
        if memory.array is None:
            raise InvariantError("staging memory is not host memory")
        self.memory = memory
        self.bytes: NDArray[np.uint8] = memory.array
        self.event: Event | None = None


class Uploader:
    """Staging blocks and the pipeline that runs over them. Owns the blocks, which are made when they are first needed.

    Parameters
    ----------
    device : Device
        Where the bytes go.
    staging_nbytes : int
        Page-locked bytes at most.
    block_nbytes : int
        Bytes of a block, rounded down to a multiple of 256; at most `staging_nbytes`.
    num_readers : int, optional
        Threads that fill; None: as many as the machine's cores and the blocks allow.
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
        self._max_blocks = staging_nbytes // block
        self._num_readers = num_readers or min(_MAX_READERS, os.cpu_count() or 1, self._max_blocks)
        self._direct = device.target != "cuda" if direct is None else direct
        self._blocks: list[_Block] = []
        self._closed = False

    @property
    def staged_nbytes(self) -> int:
        """Page-locked bytes held now."""
        return sum(block.memory.nbytes for block in self._blocks)

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
        if not total:
            return
        run = self._fill_directly if self._direct else self._stage
        windows = [(begin, min(begin + self._block_nbytes, total)) for begin in range(0, total, self._block_nbytes)]
        readers = ThreadPoolExecutor(min(self._num_readers, len(windows)), "numba_kv-weights")
        with self._device.active():
            try:
                run(readers, windows, _Filler(segments), destination, report)
            finally:  # whatever happened: no thread and no copy is left behind
                readers.shutdown(wait=True, cancel_futures=True)
                self._drain()
        report(total, total)

    def _fill_directly(
        self, readers: ThreadPoolExecutor, windows: list[tuple[int, int]], fill: _Filler, destination: Memory, report: Progress
    ) -> None:
        if destination.array is None:
            raise InvariantError("the destination is not host memory")
        self._device.stream.synchronize()  # nothing earlier may still write here
        pending = [readers.submit(fill, destination.array[begin:end], begin) for begin, end in windows]
        for (_, end), future in zip(windows[:-1], pending, strict=False):
            future.result()
            report(end, windows[-1][1])
        pending[-1].result()
        self._device.bytes_to_device += windows[-1][1]

    def _stage(
        self, readers: ThreadPoolExecutor, windows: list[tuple[int, int]], fill: _Filler, destination: Memory, report: Progress
    ) -> None:
        stream, total = self._device.stream, windows[-1][1]
        ahead = min(self._max_blocks, self._num_readers + 2)  # what is left of the blocks is for copies in flight
        idle = deque(self._blocks)  # the one used longest ago is first
        reading: deque[tuple[int, int, _Block, Future[None]]] = deque()

        def send() -> None:
            begin, end, block, future = reading.popleft()
            future.result()
            self._device.copy_to_device(destination.address + begin, block.memory.address, end - begin, stream)
            block.event = stream.record()
            idle.append(block)
            if end < total:
                report(end, total)

        for begin, end in windows:
            while reading and (reading[0][3].done() or len(reading) == ahead):
                send()
            block = self._take_block(idle)
            reading.append((begin, end, block, readers.submit(fill, block.bytes[: end - begin], begin)))
        while reading:
            send()

    def _take_block(self, idle: deque[_Block]) -> _Block:
        """Return a block whose last copy has run: an idle one, a new one, or the oldest once its copy has run."""
        busy = not idle or (idle[0].event is not None and not idle[0].event.is_done)
        if busy and len(self._blocks) < self._max_blocks:
            self._blocks.append(_Block(self._device.allocate_staging(self._block_nbytes)))
            return self._blocks[-1]
        block = idle.popleft()
        if block.event is not None:
            block.event.synchronize()
            block.event = None
        return block

    def _drain(self) -> None:
        for block in self._blocks:
            if block.event is not None:
                block.event.synchronize()
                block.event = None

    def close(self) -> None:
        """Give the blocks back; a second call does nothing."""
        self._closed = True
        with self._device.active():
            while self._blocks:
                self._blocks.pop().memory.close(self._device.stream)

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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
