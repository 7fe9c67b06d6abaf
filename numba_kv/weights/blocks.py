"""Blocks: page-locked memory that reader threads fill and copies read, each guarded by an event.

Knows which block is idle. Does not know what goes through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from numba_kv.errors import DeviceError, InvariantError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device import Device, Event, Memory, Stream

__all__ = ["Block", "Blocks", "host_bytes"]


class Block:
    """One block: its bytes, and the event behind the last copy out of it."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.bytes = array
        self.address = int(array.ctypes.data)
        self.event: Event | None = None
        self.native_event = 0

    def wait(self) -> None:
        """Wait for the last copy out of the block."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None


class Blocks:
    """Up to `each` blocks a reader, in one piece of page-locked memory. Owns it.

    Blocks go round the readers: reader r of n has blocks r, r + n, and so on.
    """

    def __init__(self, device: Device, nbytes: int, *, num_readers: int, each: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._num_readers = num_readers
        self._most = num_readers * each
        self._memory: Memory | None = None
        self._blocks: list[Block] = []
        self._turns = [0] * num_readers

    @property
    def nbytes(self) -> int:
        """Page-locked bytes held now."""
        return 0 if self._memory is None else self._memory.nbytes

    def prepare(self, wanted: int, threads: ThreadPoolExecutor) -> None:
        """Have `wanted` blocks, or as many as there may be; every block is idle."""
        wanted = min(wanted, self._most)
        if wanted <= len(self._blocks):
            return
        self.close()
        self._memory = self._make(wanted * self._nbytes, threads)
        array = host_bytes(self._memory)
        self._blocks = [Block(array[i * self._nbytes : (i + 1) * self._nbytes]) for i in range(wanted)]

    @contextmanager
    def idle(self, reader: int, stream: Stream) -> Iterator[Block]:
        """Lend the reader's block whose turn it is, once its last copy has run; an event on `stream` follows its use."""
        mine = self._of(reader)
        block = mine[self._turns[reader] % len(mine)]
        block.wait()
        yield block
        block.event = stream.record()
        self._turns[reader] += 1

    def native(self, reader: int) -> tuple[list[int], list[int]]:
        """Return addresses and driver events of all blocks of a reader, idle."""
        from numba_kv.kernels.pump import make_event

        mine = self._of(reader)
        for block in mine:
            block.wait()
            block.native_event = block.native_event or make_event()
        return [block.address for block in mine], [block.native_event for block in mine]

    def wait_native(self, reader: int) -> None:
        """Wait for the driver events of a reader's blocks, so that they are idle."""
        from numba_kv.kernels.pump import wait_event

        for block in self._of(reader):
            if block.native_event:
                wait_event(block.native_event)

    def drain(self) -> None:
        """Wait for every copy."""
        for block in self._blocks:
            block.wait()

    def close(self) -> None:
        """Give the memory back; a second call does nothing. No copy may be under way."""
        with self._device.active():
            while self._blocks:
                event = self._blocks.pop().native_event
                if event:
                    from numba_kv.kernels.pump import destroy_event

                    destroy_event(event)
            memory, self._memory = self._memory, None
            if memory is not None:
                memory.close(self._device.stream)

    def _of(self, reader: int) -> list[Block]:
        return self._blocks[reader :: self._num_readers]

    def _make(self, nbytes: int, threads: ThreadPoolExecutor) -> Memory:
        if self._device.target == "cuda":
            from numba_kv.device.locked_pages import locked_pages

            try:
                return locked_pages(self._device, nbytes, threads.map)  # type: ignore[arg-type]
            except DeviceError:  # the system does not let ordinary memory be locked; the driver's own may be
                pass
        return self._device.allocate_staging(nbytes)


def host_bytes(memory: Memory) -> NDArray[np.uint8]:
    """Return the bytes of memory that the host can reach."""
    if memory.array is None:
        raise InvariantError("this memory is not host memory")
    return memory.array
