"""Sequence: one request in a batch, from admission to retirement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba_kv.device.unique import Unique
from numba_kv.errors import StateError

if TYPE_CHECKING:
    from numba_kv.batch.batch import Batch
    from numba_kv.weights.lora_slots import LoRAAdapter

__all__ = ["Sequence", "end_sequences", "rows_of", "start_sequences"]


class Sequence(Unique):
    """Handle of a sequence. Made by `Batch.admit` (through `start_sequences`); host only.

    Attributes
    ----------
    generation : int
        Its number, counted over all admissions of the batch: no two sequences share it.
    prompt_tokens : int
        Tokens it was admitted with.
    adapter : LoRAAdapter or None
        The adapter it was admitted with: those bytes, whatever is loaded under the name later.
    reused_tokens : int
        First tokens of its prompt that were not computed for it, but reused.
    """

    __slots__ = ("__dict__", "_batch", "_row", "generation", "prompt_tokens")  # the rest is seldom anything else than here

    _batch: Batch
    _row: int  # once it is retired the complement of its row: one word is set faster than two
    generation: int
    prompt_tokens: int
    adapter: LoRAAdapter | None = None
    reused_tokens: int = 0

    @property
    def row(self) -> int:
        """Its row in every table, or the last that it had; only `Batch.compact` changes it."""
        return self._row if self._row >= 0 else ~self._row

    @property
    def state(self) -> str:
        """Whether it has a row: ``"active"`` or ``"retired"``."""
        return "active" if self._row >= 0 else "retired"

    def move(self, row: int) -> None:
        """Note another row (for `Batch.compact`)."""
        self._row = row

    def end(self) -> None:
        """Note that it has no row any more (for its batch)."""
        if self._row >= 0:
            self._row = ~self._row

    @property
    def length(self) -> int:
        """Tokens in its row.

        Raises
        ------
        StateError
            If it is retired, or if device counts decided and `Batch.sync_lengths` was not called since.
        """
        if self._row < 0:
            raise StateError(f"{self!r} is retired and has no length")
        return self._batch.length_of(self._row)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens that no step has appended yet."""
        return max(0, self.prompt_tokens - self.length)

    def __repr__(self) -> str:
        return f"Sequence(row {self.row}, generation {self.generation}, {self.state})"


def start_sequences(
    batch: Batch, active: dict[int, Sequence], rows: list[int], prompts: list[int], first: int
) -> list[Sequence]:
    """Put new sequences of `batch`, numbered from `first` on, into `active` by their rows; return them."""
    made = []
    for row, prompt_tokens in zip(rows, prompts, strict=True):
        active[row] = sequence = Sequence()  # without an __init__, which would double its cost: a model waits for these
        sequence._batch = batch
        sequence._row = row
        sequence.generation = first
        sequence.prompt_tokens = prompt_tokens
        made.append(sequence)
        first += 1
    return made


def end_sequences(active: dict[int, Sequence], sequences: list[Sequence], rows: list[int]) -> None:
    """Take sequences out of `active`, where they are by these rows."""
    for sequence, row in zip(sequences, rows, strict=True):
        sequence._row = ~row  # as `Sequence.end`, without its call
        del active[row]


def rows_of(sequences: list[Any], active: dict[int, Sequence]) -> list[int] | None:
    """Return the rows of `sequences` if each is what `active` has in its row, and named once; else None."""
    try:
        rows = [sequence._row for sequence in sequences]
        found = list(map(active.get, rows)) == sequences  # one call, which compares by identity
    except (AttributeError, TypeError):  # something else than a sequence
        return None
    return rows if found and len(rows) == len(set(rows)) else None
