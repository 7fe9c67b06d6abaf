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

    from numba_kv.device import Device, Event, Memory

__all__ = ["Blocks", "host_bytes"]

#: At most the bytes of a page: pages are made by a write to each.
_PAGE_NBYTES = 4096


class Blocks:
    """Up to `each` blocks a reader, in one piece of large pages. Owns it.

    The pages are made by the readers, several at a time, and locked in one call behind that: the driver locks one piece at a
    time, and pages that nobody has written to slowly. Reader r of n has the blocks r, r + n, and so on.
    """

    def __init__(self, device: Device, nbytes: int, *, num_readers: int, each: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._num_readers = num_readers
        self.most = num_readers * each
        self._memory: Memory | None = None  # once they are locked
        self._blocks: list[NDArray[np.uint8]] = []
        self._pages: NDArray[np.uint8] | None = None  # until then
        self._events: list[Event] = []  # tables have their handles alone
        self._tables: list[NDArray[np.int64]] = []
        self._places: list[tuple[int, int]] = []

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
        for block in self.of(reader):
            block[::_PAGE_NBYTES] = 0

    def lock(self) -> None:
        """Lock the pages, unless they are. No thread may look at a block meanwhile. The device is current."""
        if self._pages is None:
            return
        import numpy as np

        events = [self._device.stream.record() for _ in self._blocks]
        self._memory = self._device.lock_pages(self._pages)
        self._pages, self._events = None, events
        self._show(host_bytes(self._memory))
        rows = [(block.ctypes.data, event.handle) for block, event in zip(self._blocks, events, strict=True)]
        self._tables = [np.array(rows[r :: self._num_readers], np.int64) for r in range(self._num_readers)]
        self._places = [(table.ctypes.data, len(table)) for table in self._tables]

    def of(self, reader: int) -> list[NDArray[np.uint8]]:
        """Return the bytes of a reader's blocks."""
        return self._blocks[reader :: self._num_readers]

    def table(self, reader: int) -> NDArray[np.int64]:
        """Return address and event of a reader's blocks, once they are locked: int64 [blocks, 2]."""
        return self._tables[reader]

    def place(self, reader: int) -> tuple[int, int]:
        """Return the address of a reader's table, and its number of blocks."""
        return self._places[reader]

    def close(self) -> None:
        """Give the memory back; a second call does nothing. No copy may be under way."""
        self._blocks, self._pages, self._events, self._tables, self._places = [], None, [], [], []
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
