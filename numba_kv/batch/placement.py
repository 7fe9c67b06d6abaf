"""RowPlacement: rows that get tokens from elsewhere than a step: the pages they need, their K and V, their lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.batch.permutation import completed
from numba_kv.cache.kv_pages import MAX_PAIRS, PageCopies
from numba_kv.geometry import ceil_div
from numba_kv.kernels import layout
from numba_kv.ledger.leases import LeasePlan, find_room
from numba_kv.ledger.sharing import ForkPlan, held_ring, note_fork, plan_fork

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.stepper import Stepper
    from numba_kv.cache.kv_cache import KVCacheManager

__all__ = ["RowPlacement"]


class RowPlacement:
    """Fills rows of a batch without a step.

    Attributes
    ----------
    copies : PageCopies
        Copies pages; owned, with its list, which is made on first use.
    """

    def __init__(self, stepper: Stepper, pools: KVCacheManager) -> None:
        self._stepper = stepper
        self._groups = stepper.plan.groups
        self.copies = PageCopies(stepper.device, pools)

    def fork(self, parent: int, count: int) -> list[int]:
        """Start `count` sequences that have the tokens of row `parent`; return their rows.

        Raises
        ------
        CapacityError
            If the pool has too few pages for the copies of the last page.
        """
        self._stepper.begin()
        ledger = self._stepper.ledger
        self._prepare_forks()
        fresh = count * plan_fork(ledger, parent).is_partial
        self._free_pages(find_room(ledger, fresh, f"a fork of {int(ledger.hi[parent])} tokens"))
        rows = self._stepper.update([], [int(ledger.prompt[parent])] * count)
        self._fill([(parent, row) for row in rows])
        return rows

    def reorder(self, parents: dict[int, int]) -> None:
        """Make each row what ``parents[row]`` was; every row in use is there.

        A parent's own pages go to one of its rows, to itself if it can, else to the lowest, the others become forks; rows whose
        tokens nobody takes over leave first. Only table rows move, but for the pages that a fork copies.

        Raises
        ------
        CapacityError
            If the pool has too few pages for the copies of last pages.
        """
        self._stepper.begin()
        ledger = self._stepper.ledger
        heirs: dict[int, int] = {}
        for row, parent in sorted(parents.items(), key=lambda pair: (pair[0] != pair[1], pair[0])):
            heirs.setdefault(parent, row)
        forks = [(parent, row) for row, parent in parents.items() if heirs[parent] != row]
        sources = {row: parent for parent, row in heirs.items()}
        if forks:
            self._prepare_forks()
            leaving = [row for row in parents if row not in heirs]
            fresh = sum(plan_fork(ledger, parent).is_partial for parent, _ in forks)
            self._free_pages(find_room(ledger, fresh, "the new order", leaving=leaving))
            made = self._stepper.update(leaving, [int(ledger.prompt[parent]) for parent, _ in forks])
            self._fill([(parent, row) for (parent, _), row in zip(forks, made, strict=True)])
            sources |= {row: source for (_, row), source in zip(forks, made, strict=True)}
        order = completed(sources, len(ledger.live))
        if (order != np.arange(len(order))).any():
            self._stepper.permute(order)

    def _prepare_forks(self) -> None:
        """Make what copies of pages and of states need, before anything changes."""
        self.copies.prepare()
        if self._stepper.launches.states is not None:
            self._stepper.launches.states.prepare()

    def _fill(self, forks: list[tuple[int, int]]) -> None:
        """Make fresh rows what their parents are: (parent, row) pairs. The pool has the pages."""
        ledger, stats = self._stepper.ledger, self._stepper.stats
        children: dict[int, list[int]] = {}
        for parent, row in forks:
            children.setdefault(parent, []).append(row)
        records: list[NDArray[np.int32]] = []
        pairs: list[list[tuple[int, int]]] = [[] for _ in self._groups]
        for parent, rows in children.items():
            plan = plan_fork(ledger, parent)
            own = ledger.pool.acquire(len(rows) * plan.is_partial)
            note_fork(ledger, parent, rows, plan, own)
            inherited = int(ledger.mapped_begin[1:, parent].sum())
            stats.rotated_pages -= len(rows) * inherited  # pages that the parent's windows left, not the children's
            records.append(self._fork_records(parent, rows, plan, own))
            for found, more in zip(pairs, self._page_pairs(parent, rows, plan), strict=True):
                found += more
        self._stepper.place(np.concatenate(records))
        for g in range(len(self._groups)):
            self.copy(g, pairs[g])
        if self._stepper.launches.states is not None:
            for parent, rows in children.items():
                self._stepper.launches.states.fork(parent, rows)
        stats.forked += len(forks)

    def start(self, prompt_tokens: int, pages: int, purpose: str) -> int:
        """Start a sequence with `pages` full-group pages; return its row. A row is free.

        Raises
        ------
        CapacityError
            If the pool has too few pages.
        """
        self._stepper.begin()
        self._free_pages(find_room(self._stepper.ledger, pages, purpose))
        row = self._stepper.update([], [prompt_tokens])[0]
        self.extend(row, pages, purpose)
        return row

    def extend(self, row: int, pages: int, purpose: str) -> None:
        """Bring a row to `pages` full-group pages at least.

        Raises
        ------
        CapacityError
            If the pool has too few.
        """
        ledger = self._stepper.ledger
        wanted = max(0, pages - int(ledger.leased[row]))
        self._free_pages(find_room(ledger, wanted, purpose, (row, pages)))
        most = self._stepper.buffers.edits.size - layout.RECORD_WORDS  # of one block
        while ledger.leased[row] < pages:
            targets = ledger.leased.copy()
            targets[row] = min(pages, int(targets[row]) + most)
            self._stepper.move_pages(LeasePlan(np.array([row]), targets))

    def copy(self, group: int, pairs: list[tuple[int, int]]) -> None:
        """Copy pages inside the pools of a group. Stream: enqueues one copy, and one kernel for each slab."""
        self._stepper.start_copies()
        self.copies.copy(group, pairs)
        stats = self._stepper.stats
        stats.copied_pages += len(pairs)
        stats.launches += len(self._groups[group].slabs) * ceil_div(len(pairs), MAX_PAIRS)

    def map_pages(self, maps: Mapping[int, tuple[int, NDArray[np.int32]]]) -> None:
        """Make ids the last full-group pages of rows; their holders are noted by the caller.

        Parameters
        ----------
        maps : mapping of int to (int, int32 array)
            Row to the logical page of its first id, and the ids.

        Stream: enqueues one copy and one kernel for each block of ids.
        """
        most = self._stepper.buffers.edits.size
        block: list[tuple[int, int, NDArray[np.int32]]] = []
        words = 0
        for row, (first, ids) in maps.items():
            at = 0
            while True:
                if block and words + layout.RECORD_WORDS >= most:
                    self._stepper.map_pages(block)
                    block, words = [], 0
                part = ids[at : at + most - words - layout.RECORD_WORDS]
                block.append((row, first + at, part))
                words += layout.RECORD_WORDS + len(part)
                at += len(part)
                if at == len(ids):
                    break
        if block:
            self._stepper.map_pages(block)

    def place(self, places: Sequence[tuple[int, int, int, NDArray[np.int64]]]) -> None:
        """Give rows their lengths; their pages are there.

        Parameters
        ----------
        places : sequence of (int, int, int, int64 [G])
            Row, length, longest length so far, and the first mapped page of each group.

        Stream: enqueues one copy and one kernel.
        """
        ledger = self._stepper.ledger
        self._stepper.place(np.stack([self.record(*place) for place in places]))
        for row, length, high_water, begins in places:
            ledger.lo[row] = ledger.hi[row] = length
            ledger.high_water[row] = high_water
            ledger.mapped_begin[:, row] = begins

    def record(self, row: int, length: int, high_water: int, begins: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the record of a row without a parent; `begins` are the first mapped pages of each group."""
        ledger = self._stepper.ledger
        words = np.zeros(layout.PLACE_WORDS + len(self._groups), np.int32)
        words[layout.PLACE_ROW] = row
        words[layout.PLACE_PARENT] = words[layout.PLACE_LAST] = -1
        words[layout.PLACE_LEASED] = ledger.leased[row]
        words[layout.PLACE_OLD_LENGTH] = ledger.hi[row]
        words[layout.PLACE_LENGTH] = length
        words[layout.PLACE_HIGH_WATER] = high_water
        words[layout.PLACE_FLOOR] = ledger.floor[row]
        words[layout.PLACE_WORDS :] = begins
        return words

    def make_room(self, pages: int, purpose: str) -> None:
        """Give pages that run ahead back, or let kept ones go, so that so many are free.

        Raises
        ------
        CapacityError
            If they are too few.
        """
        self._free_pages(find_room(self._stepper.ledger, pages, purpose))

    def _free_pages(self, leases: LeasePlan | None) -> None:
        """Give pages that run ahead back to the pool."""
        if leases is not None:
            self._stepper.move_pages(leases)

    def close(self) -> None:
        """Give the list of copies back. Waits for copies in flight."""
        self.copies.close()

    def _fork_records(self, parent: int, rows: list[int], plan: ForkPlan, own: NDArray[np.int32]) -> NDArray[np.int32]:
        ledger = self._stepper.ledger
        length, peak = int(ledger.hi[parent]), int(ledger.high_water[parent])
        records = np.stack([self.record(row, length, peak, ledger.mapped_begin[:, parent]) for row in rows])
        records[:, layout.PLACE_OLD_LENGTH] = 0
        records[:, layout.PLACE_PARENT] = parent
        records[:, layout.PLACE_SHARED] = plan.shared
        if plan.is_partial:
            records[:, layout.PLACE_LAST] = own
        return records

    def _page_pairs(self, parent: int, rows: list[int], plan: ForkPlan) -> Iterator[list[tuple[int, int]]]:
        """Yield for each group what is copied from `parent` to `rows`: the partial last page, or what a ring holds."""
        ledger = self._stepper.ledger
        for g, group in enumerate(self._groups):
            if group.window.is_full:
                first, stop = plan.shared, plan.shared + plan.is_partial
                held = ledger.pages
                places = np.arange(first, stop)
            else:
                first, stop = held_ring(group, int(ledger.hi[parent]), int(ledger.high_water[parent]))
                held = ledger.rings[g]
                places = np.arange(first, stop) % group.ring
            pairs: list[tuple[int, int]] = []
            for row in rows:
                pairs += zip(held[parent, places].tolist(), held[row, places].tolist(), strict=True)
            yield pairs
