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

__all__ = ["Staging"]

_INT32 = dtype("int32")


class _Block:
    def __init__(self, memory: Memory, words: NDArray[np.int32]) -> None:
        self.memory = memory
        self.address = memory.address
        self.words = words
        self.event: Event | None = None


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
        self._blocks: list[_Block] = []
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
        block = self._current()
        event = block.event
        if event is not None and not event.is_done:
            if len(self._blocks) < self._max_blocks:
                return self._grow().words
            event.synchronize()
        return block.words

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
        block.event = stream.record(again=block.event)
        self._next = (self._next + 1) % len(self._blocks)

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
        block = self._current()
        if not 0 < num_words <= self._num_words:
            raise InputError(f"staging: num_words {num_words} is not in 1..{self._num_words} (words of a block)")
        block.event = self._device.copy_and_record(address, block.address, 4 * num_words, stream, block.event)
        self._next = (self._next + 1) % len(self._blocks)

    def close(self) -> None:
        """Wait for copies in flight and give the blocks back; a second call does nothing."""
        for block in self._blocks:
            if block.event is not None:
                block.event.synchronize()
            block.memory.close(self._device.stream)
        self._blocks = []

    def _current(self) -> _Block:
        if not self._blocks:
            raise StateError("staging is closed")
        return self._blocks[self._next]

    def _grow(self) -> _Block:
        """Put a new block before the one that is next, which is the oldest in flight."""
        memory = self._device.allocate_staging(4 * max(1, self._num_words))
        if memory.array is None:
            raise InvariantError("staging memory is not host memory")
        words = memory.array.view("int32")[: self._num_words]
        block = _Block(memory, words)
        self._blocks.insert(self._next, block)
        return block
