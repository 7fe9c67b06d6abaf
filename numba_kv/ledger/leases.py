"""Which pages a step needs, which of them run ahead, and which can be taken back for it.

Plans are pure. `find_leases` and `find_room` ask whoever keeps pages for reuse to let some go where a plan has too few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from numba_kv.errors import CapacityError
from numba_kv.ledger.sharing import freed_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.ledger.rows import RowLedger

__all__ = ["KeptRoom", "LeasePlan", "find_leases", "find_room", "plan_leases", "plan_room"]


_Plan = TypeVar("_Plan")


class KeptRoom(Protocol):
    """Pages that no row holds and that somebody keeps for reuse."""

    @property
    def evictable(self) -> int:
        """Most pages that could become free."""
        ...

    def can_free(self, pages: int) -> bool:
        """Return whether so many pages can become free; changes nothing."""
        ...

    def free(self, pages: int) -> None:
        """Let so many pages go; `can_free` said that it can."""
        ...


@dataclass(frozen=True, slots=True)
class LeasePlan:
    """New page counts of rows.

    Attributes
    ----------
    rows : int64 array
        Rows whose pages change.
    targets : int64 [B]
        Pages that every row holds afterwards.
    """

    rows: NDArray[np.int64]
    targets: NDArray[np.int64]


def plan_leases(ledger: RowLedger, counts: NDArray[np.int64]) -> LeasePlan:
    """Return how the full group's pages change so that every row can append its count, where the pool has hardly enough.

    Rows get just what they need (where there is more, `kernels/row_growth.py` decides); if the pool lacks even that, pages that
    run ahead of other rows are taken back.

    Raises
    ------
    CapacityError
        If the rows hold too much in earnest; carries needed, free and reclaimable pages.
    """
    full = ledger.plan.groups[0]
    page = full.page_tokens
    needed = -(-(ledger.hi + counts) // page)
    missing = np.where(counts > 0, np.maximum(needed - ledger.leased, 0), 0)
    shortage, free = int(missing.sum()), ledger.pool.free_pages
    targets = ledger.leased + missing
    if shortage > free:
        surplus = np.where(ledger.live, ledger.leased - np.minimum(ledger.leased, needed), 0)
        if shortage > free + int(surplus.sum()):
            raise CapacityError(
                f"pages: the step needs {shortage} more of {page} tokens, {free} are free and {int(surplus.sum())} run ahead "
                f"of other rows; retire or shorten a sequence, or plan with more num_kv_pages ({full.usable_pages})",
                needed=shortage,
                free=free,
                evictable=int(surplus.sum()),
            )
        targets = _take_back(targets, surplus, shortage - free)
    return LeasePlan(np.flatnonzero(targets != ledger.leased), targets)


def plan_room(
    ledger: RowLedger, wanted: int, purpose: str, keep: tuple[int, int] = (0, 0), leaving: Sequence[int] = ()
) -> LeasePlan | None:
    """Return which pages that run ahead go back to the pool so that `wanted` are free; None if they are.

    ``keep = (row, pages)``: that row needs so many of its pages. `leaving`: rows that become empty before.

    Raises
    ------
    CapacityError
        If even that is not enough; carries needed, free and reclaimable pages.
    """
    free = ledger.pool.free_pages
    if wanted <= free:
        return None
    free += freed_pages(ledger, list(leaving))
    if wanted <= free:
        return None
    full = ledger.plan.groups[0]
    needed = -(-ledger.hi // full.page_tokens)
    needed[keep[0]] = max(int(needed[keep[0]]), keep[1])
    surplus = np.where(ledger.live, np.maximum(ledger.leased - needed, 0), 0)
    surplus[list(leaving)] = 0
    if wanted > free + int(surplus.sum()):
        raise CapacityError(
            f"pages: {purpose} needs {wanted} of {full.page_tokens} tokens, {free} are free and {int(surplus.sum())} run ahead "
            f"of rows; retire or shorten a sequence, or plan with more num_kv_pages ({full.usable_pages})",
            needed=wanted,
            free=free,
            evictable=int(surplus.sum()),
        )
    targets = _take_back(ledger.leased, surplus, wanted - free)
    return LeasePlan(np.flatnonzero(targets != ledger.leased), targets)


def find_leases(ledger: RowLedger, counts: NDArray[np.int64]) -> LeasePlan:
    """Return what `plan_leases` does, after kept pages were let go if rows alone have too few.

    Raises
    ------
    CapacityError
        If even those are not enough; nothing was changed.
    """
    return _found(ledger, lambda: plan_leases(ledger, counts))


def find_room(
    ledger: RowLedger, wanted: int, purpose: str, keep: tuple[int, int] = (0, 0), leaving: Sequence[int] = ()
) -> LeasePlan | None:
    """Return what `plan_room` does, after kept pages were let go if rows alone have too few.

    Raises
    ------
    CapacityError
        If even those are not enough; nothing was changed.
    """
    return _found(ledger, lambda: plan_room(ledger, wanted, purpose, keep, leaving))


def _found(ledger: RowLedger, plan: Callable[[], _Plan]) -> _Plan:
    try:
        return plan()
    except CapacityError as error:
        kept = ledger.kept
        if kept is None:
            raise
        missing = error.needed - error.free - error.evictable
        if not kept.can_free(missing):
            raise CapacityError(
                f"{error}; {kept.evictable} pages are kept for reuse and read by no row, which is not enough either",
                needed=error.needed,
                free=error.free,
                evictable=error.evictable + kept.evictable,
            ) from None
        kept.free(missing)
    return plan()


def _take_back(targets: NDArray[np.int64], surplus: NDArray[np.int64], wanted: int) -> NDArray[np.int64]:
    """Lower `targets` by `wanted` pages, from the rows that run furthest ahead."""
    result: NDArray[np.int64] = targets.copy()
    for row in np.argsort(-surplus, kind="stable"):
        taken = min(wanted, int(surplus[row]))
        result[row] -= taken
        wanted -= taken
        if not wanted:
            break
    return result
