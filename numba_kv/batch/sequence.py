"""Sequence: one request in a batch, from admission to retirement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.device.unique import Unique
from numba_kv.errors import StateError

if TYPE_CHECKING:
    from numba_kv.batch.batch import Batch

__all__ = ["Sequence"]


class Sequence(Unique):
    """Handle of a sequence. Made by `Batch.admit`; host only.

    Attributes
    ----------
    generation : int
        Its number, counted over all admissions of the batch: no two sequences share it.
    prompt_tokens : int
        Tokens it was admitted with.
    state : {"active", "retired"}
        Whether it still has a row.
    """

    __slots__ = ("_batch", "_row", "generation", "prompt_tokens", "state")

    def __init__(self, batch: Batch, row: int, generation: int, prompt_tokens: int) -> None:
        self._batch = batch
        self._row = row
        self.generation = generation
        self.prompt_tokens = prompt_tokens
        self.state = "active"

    @property
    def row(self) -> int:
        """Its row in every table; only `Batch.compact` changes it."""
        return self._row

    def move(self, row: int) -> None:
        """Note another row (for `Batch.compact`)."""
        self._row = row

    @property
    def length(self) -> int:
        """Tokens in its row.

        Raises
        ------
        StateError
            If it is retired, or if device counts decided and `Batch.sync_lengths` was not called since.
        """
        if self.state != "active":
            raise StateError(f"{self!r} is retired and has no length")
        return self._batch.length_of(self._row)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that no step has appended yet."""
        return max(0, self.prompt_tokens - self.length)

    def __repr__(self) -> str:
        return f"Sequence(row {self.row}, generation {self.generation}, {self.state})"
