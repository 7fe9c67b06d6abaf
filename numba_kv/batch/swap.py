"""RowSwaps: rows to page-locked host memory and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.batch.row_copies import RowCopies
from numba_kv.batch.swapped import HostBlocks, Piece, SwappedSequence
from numba_kv.cache.kv_dense import DenseCopies, page_nbytes
from numba_kv.dtypes import dtype
from numba_kv.geometry import ceil_div, round_up
from numba_kv.ledger.sharing import held_ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from numba_kv.batch.placement import RowPlacement
    from numba_kv.batch.stepper import Stepper

__all__ = ["RowSwaps"]

_ALIGNMENT = 256


class RowSwaps:
    """Moves K and V of rows to host memory and back, whole pages by one launch for each slab. Owns the host memory."""

    def __init__(self, stepper: Stepper, placement: RowPlacement, copies: DenseCopies) -> None:
        self._stepper = stepper
        self._placement = placement
        self._copies = copies
        self._blocks = HostBlocks(stepper.device)
        self._itemsize = dtype(stepper.plan.config.kv_cache_dtype).itemsize
        self._swapped: list[SwappedSequence] = []

    def out(self, row: int, prompt_tokens: int, forget: Callable[[SwappedSequence], None]) -> SwappedSequence:
        """Copy a row's pages to the host and empty the row.

        Raises
        ------
        CapacityError
            If the host has not enough memory.
        """
        stepper, ledger = self._stepper, self._stepper.ledger
        stepper.begin()
        length, peak = int(ledger.hi[row]), int(ledger.high_water[row])
        pieces, end = self._pieces(length, peak)
        numbers = [peak, int(ledger.base[row]), *ledger.mapped_begin[:, row].tolist()]
        nbytes = sum(piece.count * page_nbytes(piece.group, piece.slab, self._itemsize) for piece in pieces)
        nbytes += self._state_nbytes
        block = self._blocks.take(end)
        swapped = SwappedSequence(numbers, length, prompt_tokens, nbytes, pieces, block, forget)
        self._swapped.append(swapped)
        try:
            copies = self._bound(swapped, out=True)
            stepper.start_copies()
        except BaseException:
            self.forget(swapped)
            raise
        stepper.stats.launches += copies.run(row)
        stepper.update([row], [])
        stepper.stats.swapped_out += 1
        stepper.stats.swapped_out_bytes += nbytes
        return swapped

    def back(self, swapped: SwappedSequence) -> int:
        """Give a swapped sequence a row again; return it.

        Raises
        ------
        CapacityError
            If the pool has too few pages; a row is free.
        """
        stepper, full = self._stepper, self._stepper.plan.groups[0]
        peak, base, *begins = swapped.numbers
        pages = 0 if full.is_empty else ceil_div(swapped.length, full.page_tokens)
        copies = self._bound(swapped, out=False)
        row = self._placement.start(swapped.prompt_tokens, pages, f"a sequence of {swapped.length} tokens that comes back")
        stepper.ledger.set_base(row, base)
        self._placement.place([(row, swapped.length, peak, np.array(begins, np.int64))])
        stepper.stats.launches += copies.run(row)
        stepper.stats.rotated_pages -= sum(begins[1:])  # counted when it was swapped out
        stepper.stats.swapped_in += 1
        stepper.stats.swapped_in_bytes += swapped.nbytes
        self.forget(swapped)
        swapped.state = "resumed"
        return row

    @property
    def waiting(self) -> tuple[SwappedSequence, ...]:
        """Swapped sequences without a row."""
        return tuple(self._swapped)

    def holds(self, swapped: object) -> bool:
        """Return whether a swapped sequence waits here."""
        return any(swapped is waiting for waiting in self._swapped)

    def forget(self, swapped: SwappedSequence) -> None:
        """Take the memory of a swapped sequence back."""
        self._swapped.remove(swapped)
        swapped.state = "closed"
        self._blocks.give_back(swapped.memory)

    def close(self) -> None:
        """Give all host memory back. Stream: waits, if there is any."""
        for swapped in self._swapped:
            swapped.state = "closed"
        self._swapped.clear()
        self._blocks.close()

    def _pieces(self, length: int, peak: int) -> tuple[list[Piece], int]:
        """Return which pages of a row are to be kept and where, and the bytes up to the last; recurrent states come first."""
        found, at = [], round_up(self._state_nbytes, _ALIGNMENT)
        for group in self._stepper.plan.groups:
            first, end = (0, ceil_div(length, group.page_tokens)) if group.window.is_full else held_ring(group, length, peak)
            for slab in group.slabs:
                found.append(Piece(group, slab, first, end - first, at))
                at += round_up((end - first) * page_nbytes(group, slab, self._itemsize), _ALIGNMENT)
        return found, at

    def _bound(self, swapped: SwappedSequence, *, out: bool) -> RowCopies:
        """Return the copies of a swapped sequence's pages and states; nothing is enqueued."""
        copies = RowCopies()
        for piece in swapped.pieces:
            copies.add(self._copies.pages(piece.group, piece.slab, swapped.memory, piece.at, piece.first, piece.count, out=out))
        copies.add_states(self._stepper.launches.states, swapped.memory, 0, out=out)
        return copies

    @property
    def _state_nbytes(self) -> int:
        states = self._stepper.launches.states
        return 0 if states is None else states.row_nbytes
