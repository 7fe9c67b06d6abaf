"""Pages that several rows read: which of a row's pages are shared, and what a row may rewrite. Pure.

Only whole pages at the beginning of a row are shared, so the shared pages of a row are always its first ones::

    logical page     0 ........ s ......... e ......... leased
                     shared     its own     run ahead              floor = s * P at least

A page that others have left belongs to its last row again. The floor, of which the device has a copy, stays where it was
until the host rewinds the row below it: then it drops to the pages that are still shared. So nothing has to be sent when a
row retires, and tokens that the device takes back are never below the floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError
from numba_kv.geometry import ceil_div

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.ledger.rows import RowLedger
    from numba_kv.plan import GroupPlan

__all__ = [
    "FloorPlan",
    "ForkPlan",
    "check_shared",
    "filled_ring",
    "freed_pages",
    "held_ring",
    "lower_floors",
    "lowest_floor",
    "note_fork",
    "plan_floors",
    "plan_fork",
    "shared_pages",
    "whole_ring",
]


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """What a fork of a row takes.

    Attributes
    ----------
    shared : int
        Full-group pages that parent and child both read.
    is_partial : bool
        Whether the child needs a page of its own for the tokens behind them.
    floor : int
        End of what neither may rewrite.
    """

    shared: int
    is_partial: bool
    floor: int


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """How floors drop before a rewind.

    Attributes
    ----------
    rows, floors, keep : int64 [n]
        Rows, their new floors, and how many of their full-group pages they keep.
    """

    rows: NDArray[np.int64]
    floors: NDArray[np.int64]
    keep: NDArray[np.int64]


def plan_fork(ledger: RowLedger, row: int) -> ForkPlan:
    """Return what a fork of `row` shares. The row's length is exact."""
    full, length = ledger.plan.groups[0], int(ledger.hi[row])
    if full.is_empty:
        return ForkPlan(0, False, int(ledger.floor[row]))
    shared, rest = divmod(length, full.page_tokens)
    return ForkPlan(shared, rest > 0, max(int(ledger.floor[row]), shared * full.page_tokens))


def note_fork(ledger: RowLedger, parent: int, rows: list[int], plan: ForkPlan, own: NDArray[np.int32]) -> None:
    """Make fresh `rows` what `parent` is; `own` are their pages behind the shared ones, one a row or none at all."""
    shared = plan.shared
    ids = ledger.pages[parent, :shared]
    ledger.pool.share(ids, len(rows))
    ledger.floor[parent] = plan.floor
    ledger.base[rows] = ledger.base[parent]
    for i, row in enumerate(rows):
        ledger.numbers[2:, row] = ledger.numbers[2:, parent]
        ledger.leased[row] = shared + plan.is_partial
        ledger.pages[row, :shared] = ids
        if plan.is_partial:
            ledger.pages[row, shared] = own[i]


def shared_pages(ledger: RowLedger, row: int) -> int:
    """Return how many of a row's pages other rows hold too: its first ones."""
    held = ledger.pages[row, : ledger.leased[row]]
    places = np.flatnonzero(ledger.pool.shares[held])
    return int(places[-1]) + 1 if len(places) else 0


def lowest_floor(ledger: RowLedger, row: int) -> int:
    """Return the tokens of a row that lie in pages which other rows read too."""
    return shared_pages(ledger, row) * ledger.plan.groups[0].page_tokens


def plan_floors(ledger: RowLedger, rows: NDArray[np.int64], targets: NDArray[np.int64]) -> FloorPlan | None:
    """Return how floors drop so that `rows` can go back to ``targets[i]`` tokens; None if they need not.

    A row that becomes empty gives up all its pages if it shares any.
    """
    below = np.flatnonzero(targets < ledger.floor[rows])
    if not len(below):
        return None
    found = FloorPlan(rows[below], np.zeros(len(below), np.int64), ledger.leased[rows[below]])
    for i, row in enumerate(found.rows.tolist()):
        floor = lowest_floor(ledger, row)
        if targets[below[i]] == 0 and floor:
            found.keep[i] = 0
        else:
            found.floors[i] = max(floor, int(ledger.base[row])) if targets[below[i]] else 0
    return found


def lower_floors(ledger: RowLedger, plan: FloorPlan) -> None:
    """Note what `plan` says."""
    for row, floor, keep in zip(plan.rows.tolist(), plan.floors.tolist(), plan.keep.tolist(), strict=True):
        ledger.pool.drop(ledger.pages[row, keep : ledger.leased[row]])
        ledger.leased[row] = keep
        ledger.floor[row] = floor


def freed_pages(ledger: RowLedger, rows: list[int]) -> int:
    """Return how many pages become free when `rows` leave together."""
    held = np.concatenate([np.zeros(0, np.int32), *(ledger.pages[row, : ledger.leased[row]] for row in rows)])
    ids, holders = np.unique(held, return_counts=True)
    return int(np.count_nonzero(holders == ledger.pool.shares[ids] + 1))


def held_ring(group: GroupPlan, length: int, high_water: int) -> tuple[int, int]:
    """Return the logical pages [begin, end) of a row that its ring holds: those that are mapped, or would be after a rewind."""
    end = ceil_div(length, group.page_tokens)
    return min(end, max(0, ceil_div(high_water, group.page_tokens) - group.ring)), end


def filled_ring(ledger: RowLedger, group: GroupPlan, row: int, length: int) -> tuple[int, int]:
    """Return what `held_ring` does for a row of `length` tokens, without what a reused beginning never had."""
    first, end = held_ring(group, length, int(ledger.high_water[row]))
    base = int(ledger.base[row])
    if base:
        first = max(first, min(group.window.lowest_key(base), base) // group.page_tokens)
    return min(first, end), end


def whole_ring(ledger: RowLedger, group: GroupPlan, row: int, length: int) -> tuple[int, int]:
    """Return what `filled_ring` does, without a page of which the ring has only what was computed in it.

    A row whose reused tokens end where a chunk of attention ends begins with no copies; a page that the chunk begins in is
    then without the tokens before it.
    """
    first, end = filled_ring(ledger, group, row, length)
    base = int(ledger.base[row])
    if base and group.window.lowest_key(base) >= base:
        first = max(first, ceil_div(base, group.page_tokens))
    return min(first, end), end


def check_shared(ledger: RowLedger) -> None:
    """Check that rows only read what they share.

    Raises
    ------
    InvariantError
        Naming the first row whose floor is inside a shared page.
    """
    page = ledger.plan.groups[0].page_tokens
    for row in np.flatnonzero(ledger.live):
        shared = shared_pages(ledger, int(row))
        if shared * page > ledger.floor[row]:
            raise InvariantError(
                f"row {row}: {shared} pages are shared, but only {ledger.floor[row]} tokens may not be rewritten"
            )
