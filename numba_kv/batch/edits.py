"""EditBlock: the pages and the layout of a step as one block of words, sent by one copy and applied by one launch.

Blocks of rows that come and go are written by `kernels/row_changes.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError
from numba_kv.kernels import layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["EditBlock"]


class EditBlock:
    """Collects records and lays them out in staging words (`kernels/layout.py`)."""

    def __init__(self) -> None:
        self._records = np.zeros((0, layout.RECORD_WORDS), np.int32)
        self._ids = np.zeros(0, np.int32)  # page ids that records point at
        self._layout: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._take_back: NDArray[np.int64] | None = None
        self.old_tokens = 0

    def __bool__(self) -> bool:
        return self.num_records > 0 or self._layout is not None or self._take_back is not None

    @property
    def num_records(self) -> int:
        """Rows that change."""
        return len(self._records)

    @property
    def has_layout(self) -> bool:
        """Whether counts of a step or of a rewind are part of the block."""
        return self._layout is not None or self._take_back is not None

    def set_pages(
        self,
        rows: NDArray[np.int64],
        firsts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        ids: NDArray[np.int32],
        held: NDArray[np.int64],
    ) -> None:
        """Give full-group pages to several rows.

        Row ``rows[i]`` gets the next ``sizes[i]`` of `ids` from logical page ``firsts[i]`` on; its pages beyond them, up to
        ``held[i]``, become unmapped.
        """
        ends = firsts + sizes
        records = np.zeros((len(rows), layout.RECORD_WORDS), np.int32)
        records[:, layout.ROW] = rows
        records[:, layout.FIRST] = firsts
        records[:, layout.COUNT] = sizes
        records[:, layout.IDS_AT] = np.cumsum(sizes) - sizes
        records[:, layout.CLEAR_FROM] = ends
        records[:, layout.CLEAR_TO] = np.maximum(ends, held)
        self._records, self._ids = records, ids

    def lower_floors(
        self, rows: NDArray[np.int64], floors: NDArray[np.int64], keep: NDArray[np.int64], held: NDArray[np.int64]
    ) -> None:
        """Give rows a lower floor; of their ``held[i]`` pages the first ``keep[i]`` stay mapped."""
        self.set_pages(rows, keep, np.zeros_like(keep), np.zeros(0, np.int32), held)
        self._records[:, layout.FLAGS] = layout.FLOOR
        self._records[:, layout.LOW_TOKENS] = floors

    def set_layout(self, counts: NDArray[np.int64], cu_seqlens: NDArray[np.int64], old_tokens: int = 0) -> None:
        """Set the counts of the next step and where each row's tokens start; the layout before had `old_tokens` tokens."""
        self._layout = (counts, cu_seqlens)
        self.old_tokens = old_tokens

    def set_take_back(self, tokens: NDArray[np.int64]) -> None:
        """Set how many tokens each row gives back."""
        self._take_back = tokens

    def write(self, words: NDArray[np.int32]) -> tuple[int, int, int]:
        """Lay the block out in `words`.

        Returns
        -------
        num_words, layout_at, take_back_at : int
            Words written, and first words of the two arrays (-1: absent).
        """
        at = self._records.size
        self._room(words, at + len(self._ids))
        self._records[:, layout.IDS_AT] += at
        words[:at] = self._records.ravel()
        words[at : at + len(self._ids)] = self._ids
        at += len(self._ids)
        layout_at = take_back_at = -1
        if self._layout is not None:
            counts, cu_seqlens = self._layout
            layout_at, rows = at, len(counts)
            self._room(words, at + 2 * rows + 1)
            words[at : at + rows] = counts
            words[at + rows : at + 2 * rows + 1] = cu_seqlens
            at += 2 * rows + 1
        if self._take_back is not None:
            take_back_at, rows = at, len(self._take_back)
            self._room(words, at + rows)
            words[at : at + rows] = self._take_back
            at += rows
        return at, layout_at, take_back_at

    @staticmethod
    def _room(words: NDArray[np.int32], needed: int) -> None:
        if needed > len(words):
            raise InvariantError(f"a composition change takes {needed} words, {len(words)} were planned")
