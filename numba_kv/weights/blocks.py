"""Blocks: host memory that reader threads fill and copies read, each guarded by an event.

Knows which block is whose. Does not know what goes through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.device.locked_pages import large_pages
from numba_kv.errors import InvariantError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device import Device, Event, Memory, Stream

__all__ = ["Block", "Blocks", "host_bytes"]


class Block:
    """One block, for one thread: `wait`, fill `bytes`, `send`. Borrows its memory.

    Attributes
    ----------
    bytes : uint8 array
        What is copied; not to be written between `send` and `wait`.
    """

    def __init__(self, device: Device, array: NDArray[np.uint8]) -> None:
        self._device = device
        self._event: Event | None = None
        self.show(array)

    def show(self, array: NDArray[np.uint8]) -> None:
        """Let the block be these bytes."""
        self.bytes = array
        self._address = int(array.ctypes.data)

    def wait(self) -> None:
        """Wait until the last copy has run."""
        if self._event is not None:
            self._device.wait_block(self._event)

    def send(self, destination: int, nbytes: int, stream: Stream) -> None:
        """Copy the first bytes to a device address. Stream: enqueues the copy and an event."""
        self._event = self._device.copy_block(destination, self._address, nbytes, stream, self._event)


class Blocks:
    """Up to `each` blocks a reader, in one piece of large pages. Owns it.

    The pages are made by those who first write to them, several at a time, and locked in one call behind that: the driver
    locks one piece at a time, and pages that nobody has written to slowly. Reader r of n has the blocks r, r + n, and so on.
    """

    def __init__(self, device: Device, nbytes: int, *, num_readers: int, each: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._num_readers = num_readers
        self.most = num_readers * each
        self._pages: NDArray[np.uint8] | None = None  # until they are locked
        self._memory: Memory | None = None
        self._blocks: list[Block] = []

    @property
    def nbytes(self) -> int:
        """Page-locked bytes held now."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def is_locked(self) -> bool:
        """Whether copies can run."""
        return self._memory is not None

    def prepare(self, wanted: int) -> None:
        """Have `wanted` blocks, or as many as there may be. Every block is idle."""
        wanted = min(wanted, self.most)
        if self._memory is not None and wanted <= len(self._blocks):
            return
        self.close()
        self._pages = large_pages(wanted * self._nbytes)
        self._blocks = [Block(self._device, part) for part in self._parts(self._pages, wanted)]

    def of(self, reader: int) -> list[Block]:
        """Return the blocks of a reader."""
        return self._blocks[reader :: self._num_readers]

    def lock(self) -> None:
        """Lock the pages; what is in them stays. No thread may look at a block meanwhile. The device is current."""
        if self._pages is None:
            return
        self._memory = self._device.lock_pages(self._pages)
        self._pages = None
        for block, part in zip(self._blocks, self._parts(host_bytes(self._memory), len(self._blocks)), strict=True):
            block.show(part)

    def drain(self) -> None:
        """Wait for every copy."""
        for block in self._blocks:
            block.wait()

    def close(self) -> None:
        """Give the memory back; a second call does nothing. No copy may be under way."""
        self._blocks, self._pages = [], None
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close(self._device.stream)

    def _parts(self, array: NDArray[np.uint8], count: int) -> list[NDArray[np.uint8]]:
        return [array[i * self._nbytes : (i + 1) * self._nbytes] for i in range(count)]


def host_bytes(memory: Memory) -> NDArray[np.uint8]:
    """Return the bytes of memory that the host can reach."""
    if memory.array is None:
        raise InvariantError("this memory is not host memory")
    return memory.array
