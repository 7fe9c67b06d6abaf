"""KeptStates: snapshots of recurrent states in device memory of the plan's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.errors import InvariantError

if TYPE_CHECKING:
    from numba_kv.batch.stepper import Stepper
    from numba_kv.device import Memory

__all__ = ["KeptStates"]


class KeptStates:
    """Copies states of rows to slots behind each other, and back. Borrows the memory.

    Parameters
    ----------
    stepper : Stepper
        Of a batch whose model has recurrent layers.
    memory : Memory
        Room for the slots.
    """

    def __init__(self, stepper: Stepper, memory: Memory | None) -> None:
        states = stepper.launches.states
        if states is None or memory is None:
            raise InvariantError("the model has no recurrent states, or no room is planned for snapshots of them")
        self._stepper = stepper
        self._states = states
        self._memory = memory

    def capture(self, row: int, slot: int) -> None:
        """Copy the states of a row to a slot. Stream: enqueues one kernel for each pool."""
        self._move(row, slot, out=True)

    def restore(self, row: int, slot: int) -> None:
        """Copy the states in a slot to a row. Stream: enqueues one kernel for each pool."""
        self._move(row, slot, out=False)

    def _move(self, row: int, slot: int, *, out: bool) -> None:
        self._stepper.start_copies()
        self._states.move(row, self._memory, slot * self._states.row_nbytes, out=out)
        self._stepper.stats.launches += 2
