"""StateRows: which resident slot holds the recurrent states of each row.

Rows move, states do not, unless they are told to (`StateRows.align`). Every row has a slot of its own, in use or not, so that
none is lost; the host's copy is the truth and the device's follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.batch.permutation import cycles_of
from numba_kv.errors import InvariantError, RewindTooFar
from numba_kv.kernels.state_copy import permute_state_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.cache.mamba_cache import MambaCacheManager
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.config import LLMEngineConfig
    from numba_kv.device import Memory

__all__ = ["StateRows", "check_state_rewind"]


def check_state_rewind(config: LLMEngineConfig, call: str, tokens: int = 0) -> None:
    """Refuse to take back part of a sequence whose recurrent states nobody can take back.

    A state cannot go back. After a verification step it need not: the step leaves it alone, and the caller commits what stays.

    Raises
    ------
    RewindTooFar
        If the model has recurrent layers, and `tokens` are more than a verification step runs, or none does.
    """
    most = config.max_verify_tokens
    if config.num_recurrent_layers and (not most or tokens > most):
        asked = f"{tokens} tokens are" if tokens else "the device decides how many tokens are"
        raise RewindTooFar(
            f"{call}: {asked} to be taken back, but recurrent states cannot go back; at most max_verify_tokens ({most}) can, "
            "whose states the caller commits, or a whole sequence"
        )


class StateRows:
    """Follows the rows of a batch. Borrows states and step arrays.

    Attributes
    ----------
    slots : int64 [B]
        Slot of each row: a permutation.
    """

    def __init__(self, states: MambaCacheManager, buffers: StepBuffers) -> None:
        self._states = states
        self._buffers = buffers
        self._device = buffers.device
        self.slots = np.arange(buffers.plan.config.max_batch_size)
        places = buffers.edits, buffers.state_slots, buffers.state_index
        self._start = states.bind_fresh(*places)
        self._align = states.bind_permute(*places)
        self._permute = permute_state_rows.bind(
            self._device,
            {"edits": buffers.edits, "state_slots": buffers.state_slots, "state_index": buffers.state_index},
        )

    def change(self, records: int) -> None:
        """Follow the records of a composition change that the device has: states of rows that start become zero.

        Stream: enqueues one kernel.
        """
        self._start(records)

    def permute(self, cycles: list[list[int]]) -> None:
        """Follow rows along cycles r0 <- r1 <- ... <- r0 that the device has. Stream: enqueues one kernel."""
        self._permute(len(cycles), self._device.stream)
        for cycle in cycles:
            self.slots[cycle] = self.slots[[*cycle[1:], cycle[0]]]

    @property
    def strays(self) -> list[list[int]]:
        """Cycles s0 <- s1 <- ... <- s0 of slots that hold the states of other rows than their own."""
        return cycles_of(self.slots)

    def align(self, cycles: list[list[int]]) -> None:
        """Move the states of row i to slot i, along those `strays` that the device has. Stream: enqueues one kernel."""
        self._align(len(cycles))
        self.slots = np.arange(len(self.slots))

    def prepare(self) -> None:
        """Make what `fork` needs, so that it cannot run out of memory halfway. Stream: host only."""
        self._states.prepare_copies()

    def fork(self, parent: int, rows: Sequence[int]) -> None:
        """Copy the states of row `parent` to `rows`. Stream: enqueues one copy, and one kernel for each pool."""
        self._states.copy_slots([(int(self.slots[parent]), int(self.slots[row])) for row in rows])

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row's states in memory of the caller."""
        return self._states.slot_nbytes

    def move(self, row: int, memory: Memory, at: int, *, out: bool) -> None:
        """Copy the states of a row to memory of the caller, or back. Stream: enqueues one kernel for each pool."""
        self._states.move_slot(int(self.slots[row]), memory, at, out=out)

    def bind_move(self, memory: Memory, at: int, *, out: bool) -> Callable[[int], None]:
        """Return `move` as a call that takes a row, bound already. Stream of the call: one kernel for each pool."""
        move = self._states.bind_move(memory, at, out=out)
        return lambda row: move(int(self.slots[row]))

    def clear(self, rows: Sequence[int]) -> None:
        """Set the states of rows to zero. Stream: enqueues one kernel for each run of neighbouring slots."""
        self._states.clear_slots([int(self.slots[row]) for row in rows])

    def audit(self, live: NDArray[np.bool_]) -> None:
        """Check that every slot has one row, and that the device finds what the host expects. Waits.

        Raises
        ------
        InvariantError
            Naming the first difference.
        """
        if not np.array_equal(np.sort(self.slots), np.arange(len(self.slots))):
            raise InvariantError("slots of recurrent states: two rows have one slot")
        expected = {"state_slots": self.slots, "state_index": np.where(live, self.slots, -1)}
        for name, slots in expected.items():
            found = getattr(self._buffers, name).to_host()
            if not np.array_equal(found, slots):
                row = int(np.flatnonzero(found != slots)[0])
                raise InvariantError(f"{name}[{row}]: the device holds {found[row]}, the host expects {slots[row]}")
