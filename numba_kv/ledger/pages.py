"""Page ids of one pool: which are free, which one row owns, which several rows share, and that each is exactly one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import CapacityError, InputError, InvariantError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PageIdPool", "PoolFigures"]


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Pages of a pool by what they are; they sum to all pages.

    Attributes
    ----------
    free, owned, reserved : int
        Usable and unused; held by one row; the null and trash page.
    peak_owned : int
        Most pages ever held at once, by one row or several.
    shared : int
        Held by several rows, which only read them.
    cached, leased : int
        Kept for reuse: held by no row; held by rows too, which only read them.
    """

    free: int
    owned: int
    reserved: int
    peak_owned: int
    shared: int = 0
    cached: int = 0
    leased: int = 0

    @property
    def total(self) -> int:
        """All pages of the pool."""
        return self.free + self.owned + self.shared + self.cached + self.leased + self.reserved


class PageIdPool:
    """Free list of page ids: a stack, so that pages returned last are used first.

    That every page is free or owned, and once, is proven by `check`; giving pages back only looks at their number.

    Parameters
    ----------
    usable_pages : int
        Ids 0 .. usable_pages - 1 can be owned.
    reserved_pages : int
        Ids behind them that nobody owns.

    Attributes
    ----------
    stack : int32 [usable_pages]
        The first `free_pages` are the free ids; the last of these is used first.
    shares : int32 [usable_pages]
        Rows that hold a page, less one; 0 for a free page.
    """

    def __init__(self, usable_pages: int, reserved_pages: int) -> None:
        self.usable_pages = usable_pages
        self.free_pages = usable_pages
        self.stack = np.arange(usable_pages - 1, -1, -1, dtype=np.int32)
        self.shares = np.zeros(usable_pages, np.int32)
        self._reserved = reserved_pages
        self._peak = 0

    @property
    def owned_pages(self) -> int:
        """Pages that rows hold, those that several share counted once."""
        return self.usable_pages - self.free_pages

    def peek(self, count: int) -> NDArray[np.int32]:
        """Return the ids that `acquire(count)` would return, without taking them."""
        if count < 0:
            raise InputError(f"pages: {count} are wanted; a count is not negative")
        if count > self.free_pages:
            raise CapacityError(f"pages: {count} are wanted, {self.free_pages} free", needed=count, free=self.free_pages)
        ids: NDArray[np.int32] = self.stack[self.free_pages - count : self.free_pages][::-1].copy()
        return ids

    def acquire(self, count: int) -> NDArray[np.int32]:
        """Take `count` pages; all or none.

        Raises
        ------
        CapacityError
            If fewer are free.
        InputError
            If `count` is negative.
        """
        ids = self.peek(count)
        self.take(count)
        return ids

    def take(self, count: int) -> None:
        """Take `count` pages, at most those that are free, whose ids the caller has read from the top of the stack."""
        self.free_pages -= count
        self._peak = max(self._peak, self.owned_pages)

    def share(self, ids: NDArray[np.int32], holders: int) -> None:
        """Note `holders` more rows, or less if it is negative, that hold the pages `ids`, each of them owned."""
        self.shares[ids.astype(np.intp, copy=False)] += holders  # or they are converted twice

    def drop(self, ids: NDArray[np.int32]) -> None:
        """Note that one row holds its pages `ids` no more; those that nobody else holds become free."""
        places = ids.astype(np.intp, copy=False)
        others = self.shares[places]
        if np.count_nonzero(others) == len(others):  # as with pages that are kept for reuse
            self.shares[places] = others - 1
            return
        alone = others == 0
        self.release(ids[alone])
        self.shares[places[~alone]] -= 1

    def release(self, ids: NDArray[np.int32]) -> None:
        """Give pages back that one row held alone.

        Raises
        ------
        InvariantError
            If more are given back than are owned; nothing is changed then.
        """
        if len(ids) > self.owned_pages:
            raise InvariantError(f"pages: {len(ids)} are given back, {self.owned_pages} are owned")
        self.stack[self.free_pages : self.free_pages + len(ids)] = ids
        self.free_pages += len(ids)

    def figures(self) -> PoolFigures:
        """Return the counts."""
        shared = int(np.count_nonzero(self.shares))
        return PoolFigures(self.free_pages, self.owned_pages - shared, self._reserved, self._peak, shared)

    def check(self, owned: NDArray[np.int32]) -> None:
        """Check that `owned` (the ids that rows hold) and the free list are all usable pages.

        A free page is there once, another once for each row that holds it.

        Raises
        ------
        InvariantError
            Naming the first page that is lost, or held more or less often than noted.
        """
        free = self.stack[: self.free_pages]
        for name, ids in (("held by a row", owned), ("in the free list", free)):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.usable_pages:
                page = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
                raise InvariantError(f"page {page} is {name}, but pages are 0..{self.usable_pages - 1}")
        is_free = np.bincount(free, minlength=self.usable_pages)
        seen = np.bincount(owned, minlength=self.usable_pages) + is_free
        expected = 1 + self.shares
        wrong = (seen != expected) | ((is_free > 0) & (expected != 1))
        if np.any(wrong):
            page = int(np.flatnonzero(wrong)[0])
            free_too = ", and it is free" if is_free[page] else ""
            raise InvariantError(f"page {page} is accounted for {int(seen[page])} times, {expected[page]} expected{free_too}")
