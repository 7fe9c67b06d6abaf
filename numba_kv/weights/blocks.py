"""Blocks: host memory that reader threads fill and copies read, each guarded by an event.

Knows which block is idle, or will be next. Does not know what goes through it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from numba_kv.device.locked_pages import large_pages
from numba_kv.errors import InvariantError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device import Device, Event, Memory, Stream

__all__ = ["Block", "Blocks", "host_bytes"]


class Block:
    """One block, for one thread at a time: `wait`, fill `bytes`, `send`. Owns its memory.

    The pages are made by the first filling, on the thread that fills, and locked by the first `send`: so the first copies run
    while later blocks are being made.

    Attributes
    ----------
    bytes : uint8 array
        What is copied; not to be written between `send` and `wait`.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._memory: Memory | None = None
        self._event: Event | None = None
        self.bytes: NDArray[np.uint8] = large_pages(nbytes)

    @property
    def locked_nbytes(self) -> int:
        """Page-locked bytes held."""
        return 0 if self._memory is None else self._memory.nbytes

    def wait(self) -> None:
        """Wait until the last copy has run."""
        if self._event is not None:
            self._event.synchronize()

    def send(self, destination: int, nbytes: int, stream: Stream) -> None:
        """Copy the first bytes to a device address. Stream: enqueues the copy and an event."""
        if self._memory is None:
            self._memory = self._device.lock_pages(self.bytes)
            self.bytes = host_bytes(self._memory)
        self._event = self._device.copy_and_record(destination, self._memory.address, nbytes, stream, self._event)

    def close(self) -> None:
        """Give the memory back; a second call does nothing. No copy may be under way."""
        memory, self._memory = self._memory, None
        self.bytes = self.bytes[:0].copy()
        if memory is not None:
            memory.close(self._device.stream)


class Blocks:
    """Up to a number of blocks, made when they are needed. Owns them.

    Idle ones, and those with copies under way in the order of these copies, stand in a line: who takes the first one waits
    for the oldest copy.
    """

    def __init__(self, device: Device, nbytes: int, most: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._most = most
        self._line: deque[Block | None] = deque()  # None: one that is not made yet
        self._blocks: list[Block] = []

    @property
    def nbytes(self) -> int:
        """Page-locked bytes held now."""
        return sum(block.locked_nbytes for block in self._blocks)

    def prepare(self, wanted: int) -> None:
        """Line up the blocks that there are, and places for up to `wanted`, or as many as there may be. All are idle."""
        missing = min(wanted, self._most) - len(self._blocks)
        self._line = deque([*self._blocks, *[None] * missing])

    def take(self) -> Block:
        """Return the first block, whose last copy may be under way. There have to be at least as many as takers."""
        block = self._line.popleft()
        if block is None:
            block = Block(self._device, self._nbytes)
            self._blocks.append(block)
        return block

    def give_back(self, block: Block) -> None:
        """Put a block at the end of the line."""
        self._line.append(block)

    def drain(self) -> None:
        """Wait for every copy."""
        for block in self._blocks:
            block.wait()

    def close(self) -> None:
        """Give the memory back; a second call does nothing. No copy may be under way."""
        self._line.clear()
        while self._blocks:
            self._blocks.pop().close()


def host_bytes(memory: Memory) -> NDArray[np.uint8]:
    """Return the bytes of memory that the host can reach."""
    if memory.array is None:
        raise InvariantError("this memory is not host memory")
    return memory.array
