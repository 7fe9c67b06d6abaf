"""Blocks: host memory that reader threads fill and copies read, one behind the other, and as many events.

Knows who makes the pages of which block. Does not know what goes through it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.device.locked_pages import large_pages
from numba_kv.errors import InvariantError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device import Device, Event, Memory

__all__ = ["Blocks", "host_bytes"]

#: At most the bytes of a page: pages are made by a write to each.
_PAGE_NBYTES = 4096


class Blocks:
    """Up to `each` blocks a reader, in one piece of large pages. Owns it.

    The pages are made by the readers, several at a time, and locked in one call behind that: the driver locks one piece at a
    time, and pages that nobody has written to slowly. Reader r of n makes those of the blocks r, r + n, and so on.
    """

    def __init__(self, device: Device, nbytes: int, *, num_readers: int, each: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._num_readers = num_readers
        self.most = num_readers * each
        self._memory: Memory | None = None  # once they are locked
        self._blocks: list[NDArray[np.uint8]] = []
        self._pages: NDArray[np.uint8] | None = None  # until then
        self._events: list[Event] = []

    @property
    def nbytes(self) -> int:
        """Page-locked bytes held now."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def is_locked(self) -> bool:
        """Whether copies can run."""
        return self._memory is not None

    def prepare(self, wanted: int) -> None:
        """Have `wanted` blocks, or as many as there may be. No copy may be under way."""
        wanted = min(wanted, self.most)
        if self._memory is not None and wanted <= len(self._blocks):
            return
        self.close()
        self._pages = large_pages(wanted * self._nbytes)
        self._show(self._pages)

    def make_pages(self, reader: int) -> None:
        """Give a reader's blocks memory. On any thread."""
        for block in self._blocks[reader :: self._num_readers]:
            block[::_PAGE_NBYTES] = 0

    def lock(self) -> None:
        """Lock the pages, unless they are. No thread may look at a block meanwhile. The device is current."""
        if self._pages is None:
            return
        events = [self._device.stream.record() for _ in self._blocks]
        self._memory = self._device.lock_pages(self._pages)
        self._pages, self._events = None, events
        self._show(host_bytes(self._memory))

    @property
    def address(self) -> int:
        """Where the first block begins, once they are locked."""
        return int(self._blocks[0].ctypes.data)

    @property
    def events(self) -> list[int]:
        """Handles of events, as many as there are blocks, once they are locked."""
        return [event.handle for event in self._events]

    def block(self, number: int) -> NDArray[np.uint8]:
        """Return the bytes of a block."""
        return self._blocks[number]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._blocks)

    def close(self) -> None:
        """Give the memory back; a second call does nothing. No copy may be under way."""
        self._blocks, self._pages, self._events = [], None, []
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close(self._device.stream)

    def _show(self, array: NDArray[np.uint8]) -> None:
        self._blocks = [array[at : at + self._nbytes] for at in range(0, len(array), self._nbytes)]


def host_bytes(memory: Memory) -> NDArray[np.uint8]:
    """Return the bytes of memory that the host can reach."""
    if memory.array is None:
        raise InvariantError("this memory is not host memory")
    return memory.array
