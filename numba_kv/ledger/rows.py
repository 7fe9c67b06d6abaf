"""Rows of a batch on the host: who lives where, how long it is, which pages it holds.

The device holds the same numbers; this mirror lets the host decide without asking. Where counts come from the device the
host knows a range [lo, hi] for a length; leases use hi.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError
from numba_kv.geometry import ceil_div, rewind_is_allowed
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.sharing import lowest_floor
from numba_kv.plan import MemoryPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.ledger.leases import KeptRoom

__all__ = ["FIRST_WINDOW", "RowLedger"]

#: Lines of `RowLedger.numbers` before those of `mapped_begin`, the full group's own included.
FIRST_WINDOW = 8


class RowLedger:
    """Rows, lengths and pages of one batch, in plain arrays indexed by row.

    Attributes
    ----------
    live : bool [B]
        Whether a sequence is in the row.
    generation, prompt : int64 [B]
        Number of the sequence in the row, counted over all admissions; its prompt tokens.
    lo, hi : int64 [B]
        Bounds of the row's length; equal unless counts came from the device.
    high_water, floor : int64 [B]
        Longest length since the row was last empty; end of what may not be rewritten.
    leased : int64 [B]
        Pages of the full group that the row holds; `pages[row, :leased]` are their ids.
    ring_pages : int32 [B, ring pages of all groups]
        Ring pages of each row; `rings` is a view [B, R] of it for each group (entry 0 is empty).
    numbers : int64 [7 + G, B]
        The arrays above and below, one a line, in the order of `kernels/row_changes.py`: generation and prompt, then what an
        empty row has 0 of.
    free_rows, peak_rows, admitted : int
        Rows without a sequence; most rows ever in use; sequences admitted so far.
    is_exact : bool
        Whether the device made no decision since its numbers were last read.
    mapped_begin : int64 [G, B]
        First mapped logical page of each window group.
    base : int64 [B]
        Of a row that began with reused tokens, if there are windows: how many. Its rings have only what the token behind them
        sees, so it cannot become shorter, except 0.
    has_bases : bool
        Whether any row ever had one.
    kept : KeptRoom or None
        Pages that are kept for reuse beside those of rows. Set by the batch.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        rows = plan.config.max_batch_size
        full = plan.groups[0]
        self.plan = plan
        self.live = np.zeros(rows, bool)
        self.numbers = np.zeros((7 + len(plan.groups), rows), np.int64)  # one array: a row is emptied or moved at once
        self.generation, self.prompt, self.leased, self.lo, self.hi, self.high_water, self.floor = self.numbers[:7]
        self.mapped_begin = self.numbers[7:]
        self.pages = np.zeros((rows, 0 if full.is_empty else full.row_pages), np.int32)
        sizes = [group.ring for group in plan.groups]
        self.ring_pages = np.zeros((rows, sum(sizes)), np.int32)
        self.rings = np.split(self.ring_pages, np.cumsum(sizes)[:-1], axis=1)
        for ring in self.rings:
            ring[:] = np.arange(ring.size).reshape(ring.shape)
        self.pool = PageIdPool(full.usable_pages, full.num_pages - full.usable_pages)
        self.free_rows = rows
        self.admitted = 0
        self.peak_rows = 0
        self.is_exact = True
        self.base = np.zeros(rows, np.int64)
        self.has_bases = False
        self.kept: KeptRoom | None = None

    @property
    def room(self) -> NDArray[np.int64]:
        """Tokens that each row can take without a new page, at its longest."""
        full = self.plan.groups[0]
        limit = np.full(len(self.hi), self.plan.config.max_kv_cache_capacity)
        if not full.is_empty:
            np.minimum(limit, self.leased * full.page_tokens, out=limit)
        room: NDArray[np.int64] = np.maximum(limit - self.hi, 0)
        return room

    def note_change(self, leaving: int, joining: int, free_pages: int) -> None:
        """Note what `kernels/row_changes.py` did to the arrays: rows that left and joined, pages that are free now."""
        self.pool.free_pages = free_pages
        self.admitted += joining
        self.free_rows = free = self.free_rows + leaving - joining
        self.peak_rows = max(self.peak_rows, len(self.live) - free)

    def peek_pages(self, rows: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the ids that `move_pages` will map, row after row, without moving anything."""
        wanted = int(np.maximum(targets[rows] - self.leased[rows], 0).sum())
        dropped = self._dropped(rows, targets)
        fresh = self.pool.peek(min(wanted, self.pool.free_pages))
        return np.concatenate([fresh, dropped[: wanted - len(fresh)]])

    def move_pages(self, rows: NDArray[np.int64], targets: NDArray[np.int64], ids: NDArray[np.int32]) -> None:
        """Bring the pages that `rows` hold to `targets[row]`: `ids` (of `peek_pages`) are added, the rest goes back."""
        held, wanted = self.leased[rows], targets[rows]
        dropped = self._dropped(rows, targets)
        fresh = self.pool.acquire(min(len(ids), self.pool.free_pages))
        self.pool.release(dropped[len(ids) - len(fresh) :])
        sizes = np.maximum(wanted - held, 0)
        place = np.arange(len(ids)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        self.pages[np.repeat(rows, sizes), np.repeat(held, sizes) + place] = ids
        self.leased[rows] = wanted

    def _dropped(self, rows: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the pages that rows lose when they shrink to their targets."""
        shrinking = rows[targets[rows] < self.leased[rows]]
        return np.concatenate([np.zeros(0, np.int32), *(self.pages[r, targets[r] : self.leased[r]] for r in shrinking)])

    def note_steps(self, counts: NDArray[np.int64], steps: int) -> None:
        """Note steps that ran without the host, where lengths have bounds: a row that cannot take one stops there."""
        room = self.room
        possible = np.minimum(room // np.maximum(counts, 1), steps)
        self.lo += np.where(possible == steps, steps, 0) * counts  # a shorter row may have gone on where a longer one stopped
        self.hi += np.minimum(steps * counts, room)
        np.maximum(self.high_water, self.hi, out=self.high_water)

    def note_uncertain_step(self, most: NDArray[np.int64], least: NDArray[np.int64], back: NDArray[np.int64]) -> None:
        """Widen the bounds of lengths: the device takes back up to `back` and appends `least` to `most` tokens, or refuses."""
        self.is_exact = False
        self.lo[:] = np.minimum(self.lo, np.maximum(self.lo - back, 0) + least)
        self.hi += np.minimum(most, self.room)
        np.maximum(self.high_water, self.hi, out=self.high_water)

    def widen(self, lowest: NDArray[np.int64], highest: NDArray[np.int64] | None = None) -> None:
        """Widen the bounds of lengths to `lowest` and, as far as rows have pages, `highest`: the device decides."""
        self.is_exact = False
        np.minimum(self.lo, lowest, out=self.lo)
        if highest is not None:
            self.hi += np.minimum(np.maximum(highest - self.hi, 0), self.room)
            np.maximum(self.high_water, self.hi, out=self.high_water)

    def doubt(self, rows: NDArray[np.int64]) -> None:
        """Note that the device refused a step of some rows: any shorter length is possible until it is asked."""
        self.is_exact = False
        self.lo[rows] = 0

    def learn(self, lengths: NDArray[np.int64], high_water: NDArray[np.int64], mapped_begin: NDArray[np.int64]) -> None:
        """Take the device's numbers over.

        Raises
        ------
        InvariantError
            If a length is outside its bounds.
        """
        outside = np.flatnonzero((lengths < self.lo) | (lengths > self.hi))
        if len(outside):
            row = int(outside[0])
            raise InvariantError(
                f"row {row}: length {int(lengths[row])} on the device, {self.lo[row]}..{self.hi[row]} expected"
            )
        self.is_exact = True
        self.lo[:] = self.hi[:] = lengths
        self.high_water[:] = high_water
        self.mapped_begin[:] = mapped_begin

    def rewind_problem(self, row: int, target: int, can_copy: bool = False) -> str | None:
        """Return why a row cannot be rewound to `target` tokens, or None; `can_copy`: shared pages are no reason."""
        if target == 0:
            return None
        if target < self.base[row]:
            return f"its first {self.base[row]} tokens were not computed here, and rings hold what the token behind them sees"
        if not can_copy and target < self.floor[row] and target < (floor := lowest_floor(self, row)):
            return f"its first {floor} tokens lie in pages that other sequences read too"
        peak = int(self.high_water[row])
        for group in self.plan.groups[1:]:
            if not rewind_is_allowed(group.window, group.page_tokens, group.ring, peak, target):
                return (
                    f"the {group.window} ring of {group.ring} pages no longer holds the tokens that position {target} sees "
                    f"(the row has been {peak} tokens long; max_step_tokens {self.plan.config.max_step_tokens} decides how far)"
                )
        return None

    def note_rewind(self, row: int, target: int) -> None:
        """Set a row's length back to `target`."""
        for g, group in enumerate(self.plan.groups):
            if not group.window.is_full:
                end = ceil_div(target, group.page_tokens)
                self.mapped_begin[g, row] = min(int(self.mapped_begin[g, row]), end)
        self.lo[row] = self.hi[row] = target
        if target == 0:
            self.high_water[row] = self.base[row] = 0

    def set_base(self, row: int, tokens: int) -> None:
        """Note that a row has its first `tokens` tokens from elsewhere; it must not be rewritten or rewound below them."""
        if tokens and len(self.plan.groups) > 1:
            self.has_bases = True
            self.base[row] = max(int(self.base[row]), tokens)
            self.floor[row] = max(int(self.floor[row]), tokens)

    def permute(self, sources: NDArray[np.int64]) -> None:
        """Move rows: row i becomes what row `sources[i]` was. Arrays keep their place."""
        for values in (self.live, self.pages, self.ring_pages, self.base):
            values[:] = values[sources]
        self.numbers[:] = self.numbers[:, sources]
