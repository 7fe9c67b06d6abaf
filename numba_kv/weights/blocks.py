"""Blocks: page-locked memory that reader threads fill and copies read, each guarded by an event.

Knows which block is idle. Does not know what goes through it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from numba_kv.errors import DeviceError, InvariantError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device import Device, Event, Memory

__all__ = ["Block", "Blocks", "host_bytes"]


class Block:
    """One block: its memory, and the event behind the last copy out of it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.bytes: NDArray[np.uint8] = host_bytes(memory)
        self.event: Event | None = None

    def wait(self) -> None:
        """Wait for the last copy out of the block."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None


class Blocks:
    """Up to `each` blocks a reader. Owns them; a reader's are made on its own thread, when it first needs them."""

    def __init__(self, device: Device, nbytes: int, *, num_readers: int, each: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._each = each
        self._blocks: list[list[Block]] = [[] for _ in range(num_readers)]
        self._events: dict[Block, int] = {}
        self._turns = [0] * num_readers
        self._counting = Lock()  # the device counts what it gives out, one thread at a time

    @property
    def nbytes(self) -> int:
        """Page-locked bytes held now."""
        return sum(block.memory.nbytes for blocks in self._blocks for block in blocks)

    @contextmanager
    def idle(self, reader: int) -> Iterator[Block]:
        """Lend the reader's block whose turn it is, once its last copy has run; record an event when it is given back."""
        blocks, place = self._blocks[reader], self._turns[reader] % self._each
        if place >= len(blocks):
            blocks.append(self._make())
        block = blocks[place]
        block.wait()
        yield block
        block.event = self._device.stream.record()
        self._turns[reader] += 1

    def of(self, reader: int) -> tuple[list[int], list[int]]:
        """Return addresses and driver events of all blocks of a reader, idle."""
        from numba_kv.kernels.pump import make_event

        blocks = self._blocks[reader]
        while len(blocks) < self._each:
            blocks.append(self._make())
        for block in blocks:
            block.wait()
            if block not in self._events:
                self._events[block] = make_event()
        return [block.memory.address for block in blocks], [self._events[block] for block in blocks]

    def used(self, reader: int) -> None:
        """Wait for the driver events of a reader's blocks, so that they are idle."""
        from numba_kv.kernels.pump import wait_event

        for block in self._blocks[reader]:
            wait_event(self._events[block])

    def drain(self) -> None:
        """Wait for every copy."""
        for blocks in self._blocks:
            for block in blocks:
                block.wait()

    def close(self) -> None:
        """Give the blocks back; a second call does nothing. No copy may be under way."""
        with self._device.active():
            if self._events:
                from numba_kv.kernels.pump import destroy_event

                while self._events:
                    destroy_event(self._events.popitem()[1])
            for blocks in self._blocks:
                while blocks:
                    blocks.pop().memory.close(self._device.stream)

    def _make(self) -> Block:
        if self._device.target == "cuda":
            from numba_kv.device.locked_pages import LockedPages

            try:
                pages = LockedPages(self._device, self._nbytes)  # type: ignore[arg-type]
            except DeviceError:  # the system does not let ordinary memory be locked; the driver's own may be
                pass
            else:
                with self._counting:
                    return Block(pages.as_memory(self._device.pinned))
        with self._counting:
            return Block(self._device.allocate_staging(self._nbytes))


def host_bytes(memory: Memory) -> NDArray[np.uint8]:
    """Return the bytes of memory that the host can reach."""
    if memory.array is None:
        raise InvariantError("this memory is not host memory")
    return memory.array
