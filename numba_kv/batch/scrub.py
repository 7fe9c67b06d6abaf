"""RowScrubs: which pages become free, so that they are scrubbed before anybody else gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numba_kv.cache.kv_scrub import PageScrubber
    from numba_kv.ledger.leases import LeasePlan
    from numba_kv.ledger.rows import RowLedger
    from numba_kv.ledger.sharing import FloorPlan

__all__ = ["RowScrubs"]


class RowScrubs:
    """Scrubs what rows give up, while the device's tables still say what that is: call it before the change is enqueued.

    Every method returns the launches. Stream: enqueues one kernel for each slab and row.
    """

    def __init__(self, ledger: RowLedger, scrubber: PageScrubber) -> None:
        self._ledger = ledger
        self._scrubber = scrubber

    def leaving(self, rows: list[int]) -> int:
        """Scrub the pages of rows that become empty, their rings too; not those that others hold."""
        launches, groups = 0, self._ledger.plan.groups
        for row, first, stop in self._freed([(row, 0) for row in rows]):
            launches += self._scrubber.scrub(groups[0], row, first, stop - first)
            for group in groups[1:]:
                launches += self._scrubber.scrub(group, row, 0, group.ring)
        return launches

    def shrinking(self, leases: LeasePlan) -> int:
        """Scrub pages that ran ahead and are taken back: a rewind may have left something in them."""
        launches, full = 0, self._ledger.plan.groups[0]
        for row in leases.rows.tolist():
            target, held = int(leases.targets[row]), int(self._ledger.leased[row])
            launches += self._scrubber.scrub(full, row, target, held - target)
        return launches

    def emptied(self, plan: FloorPlan) -> int:
        """Scrub the pages that rows give up because others hold some of them."""
        launches, full = 0, self._ledger.plan.groups[0]
        for row, first, stop in self._freed(list(zip(plan.rows.tolist(), plan.keep.tolist(), strict=True))):
            launches += self._scrubber.scrub(full, row, first, stop - first)
        return launches

    def _freed(self, rows: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Return the logical pages [first, stop) of each row that become free when it keeps only its first ones."""
        ledger, shares, found = self._ledger, self._ledger.pool.shares, []
        if any(ledger.floor[row] for row, _ in rows):
            shares = shares.copy()  # the last of several rows that leave together frees what they share
        for row, keep in rows:
            held = ledger.pages[row, keep : ledger.leased[row]]
            others = np.flatnonzero(shares[held])
            shares[held[others]] -= 1
            found.append((row, keep + len(others), int(ledger.leased[row])))  # shared pages are a row's first
        return found
