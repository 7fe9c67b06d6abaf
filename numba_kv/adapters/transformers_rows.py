"""Rows of a transformers batch in a Batch: which tokens of a padded rectangle are stored, and where.

transformers counts *padded* tokens: every row has the same length, and a short prompt has pads on its left, which a mask hides
for ever. They are not stored::

    padded index   0 ..... offset ............ length            position = padded index - offset
                   pads    tokens

Once a row has a token, everything behind it is stored: rows that have ended go on with pads that nobody hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.batch.view import StepView
from numba_kv.errors import CapacityError, InputError, RewindTooFar

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch import Batch
    from numba_kv.batch.sequence import Sequence

__all__ = ["ModelRows", "RowStep"]


@dataclass(frozen=True, slots=True)
class RowStep:
    """One forward pass.

    Attributes
    ----------
    view : StepView
        Its tables.
    rows, tokens : int
        B and n of the rectangle [B, n].
    before : int
        Padded length before it.
    pads : int64 [B] or None
        Columns on the left of each row that are not stored; None if all are.
    """

    view: StepView
    rows: int
    tokens: int
    before: int
    pads: NDArray[np.int64] | None

    @property
    def length(self) -> int:
        """Padded length after it."""
        return self.before + self.tokens


class ModelRows:
    """Row i of the model's batch is sequence i, in row i of every table. Borrows the batch.

    Attributes
    ----------
    length : int
        Padded length of every row.
    lengths, offsets : int64 [B]
        Tokens that are stored of each row, and its pads.
    """

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._capacity = batch.plan.config.max_kv_cache_capacity
        self._most = batch.plan.config.max_batch_size
        self._sequences: list[Sequence] = []
        self.length = 0
        self.lengths = np.zeros(0, np.int64)
        self.offsets = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def has_open_rows(self) -> bool:
        """Whether some row has no token yet, so that pads would still be on its left."""
        return not len(self._sequences) or not self.lengths.all()

    def step(self, rows: int, tokens: int, pads: NDArray[np.int64] | None) -> RowStep:
        """Append a rectangle of `tokens` columns; rows are started with the first one.

        Parameters
        ----------
        rows, tokens : int
            B and n.
        pads : int64 [B], optional
            Pads on the left of each row of this rectangle. Only those of rows without a token are left out.

        Raises
        ------
        InputError
            If `rows` is not what it was before.
        CapacityError
            If there are not as many rows, or a row or the pool has no room; nothing was changed.
        """
        is_first = not self._sequences
        if not is_first and rows != len(self._sequences):
            raise InputError(
                f"batch: {rows} rows given, the cache holds {len(self._sequences)}; call reset() before another batch"
            )
        lengths = np.zeros(rows, np.int64) if is_first else self.lengths
        dropped = self._dropped(lengths, tokens, pads)
        counts = tokens - dropped
        self._check_room(lengths, counts)
        before = self.length
        sequences = self.batch.update(admit=[1] * rows) if is_first else self._sequences
        try:
            if is_first:
                self.batch.align_states()  # row i has its states in slot i from now on
            if lengths.all() and not dropped.any():
                view = self.batch.step(tokens)
            else:
                view = self.batch.step({s: int(n) for s, n in zip(sequences, counts, strict=True) if n})
        except BaseException:
            if is_first:
                self._give_up(sequences)
            raise
        if is_first:
            self._sequences, self.offsets = sequences, np.zeros(rows, np.int64)
        self.lengths = lengths + counts
        self.offsets = self.offsets + dropped
        self.length += tokens
        return RowStep(view, rows, tokens, before, dropped if dropped.any() else None)

    def decode_step(self, already: int) -> RowStep:
        """Return a step of one token a row that the host does not enqueue; `already` of its tokens (0 or 1) are noted."""
        rows, batch = len(self), self.batch
        buffers = batch.resources.cache_managers[0].step_buffers
        view = StepView(buffers, rows, rows, 1, self._capacity, kv_len_is_exact=False, is_long=False)
        return RowStep(view, rows, 1, self.length - already, None)

    def passed(self, steps: int) -> None:
        """Note `steps` steps of one token a row that ran without the host, here and in the batch."""
        self.batch.advanced(steps)
        self.lengths = self.lengths + steps
        self.length += steps

    def offsets_after(self, rows: int, tokens: int, pads: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Return the pads of each row as they would be after `step` with the same arguments: int64 [B]."""
        if not self._sequences:
            return self._dropped(np.zeros(rows, np.int64), tokens, pads)
        return self.offsets + self._dropped(self.lengths, tokens, pads)

    def check_rewind(self, tokens: int) -> None:
        """Refuse a number of padded tokens that cannot be taken back."""
        if not 0 <= tokens <= self.length:
            raise InputError(f"tokens_to_remove: {-tokens} given, -{self.length} to 0 is possible now")

    def rewind(self, tokens: int) -> None:
        """Take back the last `tokens` columns.

        Raises
        ------
        InputError
            If there are not as many.
        RewindTooFar
            If a window no longer holds what is then seen; nothing was changed.
        """
        self.check_rewind(tokens)
        if not tokens:
            return
        target = self.length - tokens
        kept = np.clip(target - self.offsets, 0, self.lengths)
        back = self.lengths - kept
        asked = {s: int(n) for s, n in zip(self._sequences, back, strict=True) if n}
        if asked:
            try:
                self.batch.rewind(asked)
            except RewindTooFar as error:
                if self.batch.plan.config.num_recurrent_layers:
                    raise RewindTooFar("crop: states of recurrent layers cannot be taken back, unless all tokens are") from None
                raise RewindTooFar(f"crop: {error}; a larger max_rewind_tokens of for_model keeps more") from None
        self.lengths = kept
        self.offsets = np.minimum(self.offsets, target)
        self.length = target

    def check_parents(self, parents: list[int]) -> None:
        """Refuse rows that are not there (while there are none, those that never can be), or more than there can be."""
        rows = f"{len(self)} rows of the cache" if len(self) else f"{self._most} rows that the cache was made for"
        there = len(self) or self._most
        wrong = next((parent for parent in parents if not 0 <= parent < there), None)
        if wrong is not None:
            raise InputError(f"rows: {wrong} is not one of the {rows}")
        self.check_number(len(parents))

    def check_number(self, rows: int) -> None:
        """Refuse more rows than the cache was made for."""
        if rows > self._most:
            message = f"rows: {rows} wanted, the cache was made for max_batch {self._most}"
            raise CapacityError(message, needed=rows, free=self._most)

    def select(self, parents: list[int]) -> None:
        """Make row i what row ``parents[i]`` was; rows may be named several times, or not at all.

        Full pages of a row that is named twice are shared (`Batch.reorder`); recurrent states of row i move to slot i.

        Raises
        ------
        InputError
            If a row is not there, or none is named.
        CapacityError
            If there are not as many rows, or the pool has too few pages; nothing was changed.
        """
        old = self._sequences
        self.check_parents(parents)
        if not parents:
            raise InputError(f"rows: none is named of the {len(old)} rows of the cache")
        more = self.batch.update(admit=[1] * max(0, len(parents) - len(old)))
        rows = [*old, *more][: len(parents)]
        try:
            self.batch.reorder({row: old[parent] for row, parent in zip(rows, parents, strict=True)})
            self.batch.align_states()
        except BaseException:
            self._give_up(more)
            raise
        self.batch.update(retire=old[len(parents) :])
        chosen = np.array(parents, np.int64)
        self._sequences = rows
        self.lengths, self.offsets = self.lengths[chosen], self.offsets[chosen]

    def clear(self) -> None:
        """Forget all rows."""
        self.batch.clear()
        self._sequences = []
        self.length = 0
        self.lengths = self.offsets = np.zeros(0, np.int64)

    def _give_up(self, sequences: list[Sequence]) -> None:
        """Retire sequences of a call that failed, unless the batch failed with it: it says so itself."""
        if not self.batch.guard.is_closed and self.batch.guard.poison is None:
            self.batch.update(retire=sequences)

    def _dropped(self, lengths: NDArray[np.int64], tokens: int, pads: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Return how many columns on the left of each row are not stored."""
        if pads is None:
            return np.zeros(len(lengths), np.int64)
        dropped = np.where(lengths == 0, np.clip(pads, 0, tokens), 0)
        if dropped.min(initial=tokens) == tokens:  # a step without a token is none: keep a pad, as if it were one
            dropped = np.full(len(lengths), tokens - 1, np.int64)
        return dropped

    def _check_room(self, lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        if len(lengths) > self._most:
            raise CapacityError(
                f"batch: {len(lengths)} rows given, the cache was made for max_batch {self._most}",
                needed=len(lengths),
                free=self._most,
            )
        longest = int((lengths + counts).max())
        if longest > self._capacity:
            raise CapacityError(
                f"tokens: a row would have {longest} tokens, the cache was made for max_tokens {self._capacity}",
                needed=longest,
                free=self._capacity,
            )
