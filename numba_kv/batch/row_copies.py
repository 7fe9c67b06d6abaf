"""RowCopies: copies between one row and memory of the caller, bound together before the first of them runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numba_kv.batch.state_rows import StateRows
    from numba_kv.cache.kv_dense import DenseCopy
    from numba_kv.device import Memory

__all__ = ["RowCopies"]


class RowCopies:
    """Copies of pages, or positions, and states of one row. What can fail for want of a compiler has been done."""

    def __init__(self) -> None:
        self._copies: list[tuple[Callable[[int], None], int]] = []

    def add(self, copy: DenseCopy | None) -> None:
        """Add the copy of a slab; None is nothing."""
        if copy is not None:
            self._copies.append((copy, 1))

    def add_states(self, states: StateRows | None, memory: Memory, at: int, *, out: bool) -> None:
        """Add the copy of recurrent states to `memory` from byte `at` on, or back, if the model has any."""
        if states is not None:
            self._copies.append((states.bind_move(memory, at, out=out), 2))

    def run(self, row: int) -> int:
        """Enqueue all for a row; return the number of kernels."""
        for copy, _ in self._copies:
            copy(row)
        return sum(kernels for _, kernels in self._copies)
