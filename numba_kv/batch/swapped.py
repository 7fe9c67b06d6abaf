"""SwappedSequence: a sequence whose K and V wait in page-locked host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.device.unique import Unique
from numba_kv.geometry import round_up

if TYPE_CHECKING:
    from numba_kv.device import Device, Memory
    from numba_kv.plan import GroupPlan, SlabPlan
    from numba_kv.weights.lora_slots import LoRAAdapter

__all__ = ["HostBlocks", "Piece", "SwappedSequence"]

#: Page-locked memory is taken in multiples of this: making it is slow, so a block has to fit the next sequence too.
_BLOCK_NBYTES = 1 << 20
#: Blocks that are kept for the next sequence.
_MOST_UNUSED = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages of one slab in a dense array: logical pages [first, first + count) from byte `at` on."""

    group: GroupPlan
    slab: SlabPlan
    first: int
    count: int
    at: int


class SwappedSequence(Unique):
    """A sequence without a row. Made by `Batch.swap_out`; `Batch.swap_in` gives it a row again. Owns its host memory.

    The memory goes back when it is swapped in, with `close`, or when the batch is closed.

    Attributes
    ----------
    length : int
        Its tokens.
    prompt_tokens : int
        Tokens it was admitted with.
    nbytes : int
        Bytes of K and V that were moved.
    state : {"swapped", "resumed", "closed"}
        Whether it waits, has a row again, or is lost.
    adapter : LoRAAdapter or None
        The adapter of the sequence.
    """

    def __init__(
        self, numbers: list[int], length: int, prompt_tokens: int, nbytes: int, pieces: list[Piece], memory: Memory,
        forget: Callable[[SwappedSequence], None],
    ) -> None:  # fmt: skip
        self.length = length
        self.prompt_tokens = prompt_tokens
        self.nbytes = nbytes
        self.state = "swapped"
        self.adapter: LoRAAdapter | None = None
        self.numbers = numbers  # longest length, reused tokens, then the first mapped page of each group
        self.pieces = pieces
        self.memory = memory
        self._forget = forget

    def close(self) -> None:
        """Give the host memory back; what was in it is lost. A second call does nothing. Stream: may wait for the copy."""
        if self.state == "swapped":
            self._forget(self)

    def __repr__(self) -> str:
        return f"SwappedSequence({self.length} tokens, {self.nbytes} bytes, {self.state})"


class HostBlocks:
    """Page-locked blocks of one batch, kept for reuse: making one takes longer than filling it. Owns them.

    A block is used on one stream only, so one that was given back can be taken while its last copy is in flight.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._unused: list[Memory] = []
        self._taken: list[Memory] = []

    def take(self, nbytes: int) -> Memory:
        """Return a block of at least `nbytes`.

        Raises
        ------
        CapacityError
            If the host has not enough memory.
        """
        wanted = round_up(max(nbytes, 1), _BLOCK_NBYTES)
        fitting = [block for block in self._unused if wanted <= block.nbytes <= 2 * wanted]
        if fitting:
            block = min(fitting, key=lambda memory: memory.nbytes)
            self._unused.remove(block)
        else:
            block = self._device.allocate_staging(wanted)
        self._taken.append(block)
        return block

    def give_back(self, block: Memory) -> None:
        """Take a block back. Stream: waits, if too many are unused already."""
        self._taken.remove(block)
        self._unused.append(block)
        if len(self._unused) > _MOST_UNUSED:
            self._device.stream.synchronize()
            self._unused.pop(0).close(self._device.stream)

    def close(self) -> None:
        """Give all blocks back, those in use too. Stream: waits."""
        if self._unused or self._taken:
            self._device.stream.synchronize()
        for block in (*self._unused, *self._taken):
            block.close(self._device.stream)
        self._unused.clear()
        self._taken.clear()
