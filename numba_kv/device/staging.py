"""Staging: page-locked blocks through which the host sends small changes without waiting.

Each block is guarded by an event: it is written again only after its last copy has run. Blocks are made in advance; only
when all of them are in flight a new one is, up to a limit, so that uploads back to back do not stall the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InvariantError, ShapeError, StateError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device.device import Device
    from numba_kv.device.memory import Memory
    from numba_kv.device.stream import Event, Stream
    from numba_kv.device.tensor import Tensor

__all__ = ["Staging", "StagingBlock"]

_INT32 = dtype("int32")


class StagingBlock:
    """One block, and whether its last copy may still be running.

    Attributes
    ----------
    address : int
        Host address.
    words : int32 array
        The block.
    event : Event or None
        Behind the last copy out of it; None before the first.
    stream : Stream or None
        Of that copy; None if it is known to have run.
    """

    __slots__ = ("address", "event", "memory", "stream", "words")

    def __init__(self, memory: Memory, words: NDArray[np.int32]) -> None:
        self.memory = memory
        self.address = memory.address
        self.words = words
        self.event: Event | None = None
        self.stream: Stream | None = None


class Staging:
    """A ring of staging blocks of int32 words. Owns them.

    Parameters
    ----------
    device : Device
        Where the copies go.
    num_words : int
        Words of a block.
    max_blocks : int
        Blocks after which a further upload waits for the oldest.
    initial_blocks : int
        Blocks that are made now: uploads of which at most so many are in flight never allocate.

    Raises
    ------
    InputError
        If a number is too small, or `initial_blocks` is more than `max_blocks`.
    CapacityError
        If the host has not enough memory.

    Cost: ``4 * num_words`` page-locked bytes a block.
    """

    def __init__(self, device: Device, num_words: int, max_blocks: int = 16, *, initial_blocks: int = 1) -> None:
        if num_words < 0 or max_blocks < 1:
            raise InputError(f"staging: {max_blocks} blocks of {num_words} words; at least 1 block of 0 words is wanted")
        if not 1 <= initial_blocks <= max_blocks:
            raise InputError(f"staging: initial_blocks {initial_blocks} is not in 1..{max_blocks} (max_blocks)")
        self._device = device
        self._num_words = num_words
        self._max_blocks = max_blocks
        self._blocks: list[StagingBlock] = []
        self._next = 0
        for _ in range(initial_blocks):
            self._grow()

    @property
    def num_blocks(self) -> int:
        """Blocks made so far."""
        return len(self._blocks)

    def acquire(self) -> NDArray[np.int32]:
        """Return a block to write: int32 [num_words], until the next `send`.

        Raises
        ------
        StateError
            After `close`.

        Stream: host only, unless `max_blocks` copies are in flight; then it waits for the oldest. Cost: no allocation, unless
        every block made so far is in flight.
        """
        return self.acquire_block().words

    def acquire_block(self) -> StagingBlock:
        """Do what `acquire` does; return the block with its address."""
        block = self._current()
        if not self._is_free(block):
            if len(self._blocks) < self._max_blocks:
                return self._grow()
            if block.event is not None:
                block.event.synchronize()
            block.stream = None
        return block

    def _is_free(self, block: StagingBlock) -> bool:
        """Return whether the copy out of `block`, the oldest, has run.

        The newest is asked first: if its copy has run, so have all others on that stream, and the next uploads need not ask.
        """
        stream, newest = block.stream, self._blocks[self._next - 1]
        if stream is None or block.event is None:
            return True
        if newest.stream is stream and newest.event is not None and newest.event.is_done:
            for each in self._blocks:
                if each.stream is stream:
                    each.stream = None
            return True
        if newest is block or not block.event.is_done:
            return False
        block.stream = None
        return True

    def send(self, parts: list[tuple[int, int, Tensor, int]], stream: Stream) -> None:
        """Copy ranges of the acquired block to the device.

        Parameters
        ----------
        parts : list of (first_word, num_words, destination, destination_word)
            Ranges; the destinations are dense int32 tensors.
        stream : Stream
            Enqueues the copies and an event on it.

        Raises
        ------
        InputError, ShapeError
            If a range or a destination does not fit; nothing is copied then.
        StateError
            After `close`.
        """
        block = self._current()
        for first, count, destination, at in parts:
            if first < 0 or count < 0 or first + count > self._num_words or at < 0 or at + count > destination.size:
                raise InputError(f"staging: words {first}..{first + count} to {at} do not fit the block or the destination")
            if destination.dtype is not _INT32 or not destination.is_contiguous:
                raise ShapeError(f"staging: {destination!r} is not a dense int32 tensor")
        base = block.address
        for first, count, destination, at in parts:
            if count:
                self._device.copy_to_device(destination.address + 4 * at, base + 4 * first, 4 * count, stream)
        self.sent(stream.record(again=block.event), stream)

    def send_to(self, address: int, num_words: int, stream: Stream) -> None:
        """Copy the first words of the acquired block to a device address with room for a whole block.

        For a path on which looking at a tensor takes as long as the copy.

        Raises
        ------
        InputError
            If there are none, or the block has fewer; nothing is copied then.
        StateError
            After `close`.

        Stream: enqueues the copy and an event.
        """
        block = self.ready(num_words)
        self.sent(self._device.copy_and_record(address, block.address, 4 * num_words, stream, block.event), stream)

    def ready(self, num_words: int) -> StagingBlock:
        """Return the acquired block, for a caller that enqueues the copy of its first words, and an event, itself; then `sent`.

        Raises
        ------
        InputError
            If there are no words, or the block has fewer.
        StateError
            After `close`.

        Stream: host only.
        """
        block = self._current()
        if not 0 < num_words <= self._num_words:
            raise InputError(f"staging: num_words {num_words} is not in 1..{self._num_words} (words of a block)")
        return block

    def sent(self, event: Event, stream: Stream) -> None:
        """Note that a copy out of the acquired block was enqueued, with `event` behind it; the next block is acquired next."""
        block = self._blocks[self._next]
        block.event, block.stream = event, stream
        self._next = (self._next + 1) % len(self._blocks)

    def close(self) -> None:
        """Wait for copies in flight and give the blocks back; a second call does nothing."""
        for block in self._blocks:
            if block.event is not None:
                block.event.synchronize()
            block.memory.close(self._device.stream)
        self._blocks = []

    def _current(self) -> StagingBlock:
        if not self._blocks:
            raise StateError("staging is closed")
        return self._blocks[self._next]

    def _grow(self) -> StagingBlock:
        """Put a new block before the one that is next, which is the oldest in flight."""
        memory = self._device.allocate_staging(4 * max(1, self._num_words))
        if memory.array is None:
            raise InvariantError("staging memory is not host memory")
        words = memory.array.view("int32")[: self._num_words]
        block = StagingBlock(memory, words)
        self._blocks.insert(self._next, block)
        return block
