"""Page ids of one pool: which are free, which are owned, and that each is exactly one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import CapacityError, InputError, InvariantError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PageIdPool", "PoolFigures"]

_FREE, _OWNED = 0, 1


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Pages of a pool by what they are; they sum to all pages.

    Attributes
    ----------
    free, owned, reserved : int
        Usable and unused; held by a row; the null and trash page.
    peak_owned : int
        Most pages ever held at once.
    """

    free: int
    owned: int
    reserved: int
    peak_owned: int

    @property
    def total(self) -> int:
        """All pages of the pool."""
        return self.free + self.owned + self.reserved


class PageIdPool:
    """Free list of page ids: a stack, so that the page returned last is used first.

    Parameters
    ----------
    usable_pages : int
        Ids 0 .. usable_pages - 1 can be owned.
    reserved_pages : int
        Ids behind them that nobody owns.
    """

    def __init__(self, usable_pages: int, reserved_pages: int) -> None:
        self._stack = np.arange(usable_pages - 1, -1, -1, dtype=np.int32)
        self._top = usable_pages
        self._state = np.zeros(usable_pages, np.uint8)
        self._stamp = np.zeros(usable_pages, np.int32)
        self._reserved = reserved_pages
        self._peak = 0

    @property
    def usable_pages(self) -> int:
        """Pages that can be owned."""
        return len(self._stack)

    @property
    def free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._top

    @property
    def owned_pages(self) -> int:
        """Pages that rows own."""
        return len(self._stack) - self._top

    def peek(self, count: int) -> NDArray[np.int32]:
        """Return the ids that `acquire(count)` would return, without taking them."""
        if count < 0:
            raise InputError(f"pages: {count} are wanted; a count is not negative")
        if count > self._top:
            raise CapacityError(f"pages: {count} are wanted, {self._top} free", needed=count, free=self._top)
        ids: NDArray[np.int32] = self._stack[self._top - count : self._top][::-1].copy()
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
        self._top -= count
        self._state[ids] = _OWNED
        self._peak = max(self._peak, self.owned_pages)
        return ids

    def release(self, ids: NDArray[np.int32]) -> None:
        """Give pages back.

        Raises
        ------
        InvariantError
            If one is not owned, or named twice; nothing is changed then.
        """
        if not len(ids):
            return
        known = int(ids.min()) >= 0 and int(ids.max()) < len(self._stack)
        if known:
            order = np.arange(len(ids), dtype=np.int32)
            self._stamp[ids] = order  # of an id that is named twice only the last place stays
            known = bool((self._stamp[ids] == order).all()) and int(self._state[ids].min()) == _OWNED
        if not known:
            raise InvariantError(f"pages: {ids.tolist()} are given back, but not all of them are owned once")
        self._state[ids] = _FREE
        self._stack[self._top : self._top + len(ids)] = ids
        self._top += len(ids)

    def figures(self) -> PoolFigures:
        """Return the counts."""
        return PoolFigures(self._top, self.owned_pages, self._reserved, self._peak)

    def check(self, owned: NDArray[np.int32]) -> None:
        """Check that `owned` (the ids that rows hold) and the free list are all usable pages, each once.

        Raises
        ------
        InvariantError
            Naming the first page that is lost or held twice.
        """
        if len(owned) and int(owned.min()) < 0:
            raise InvariantError(f"page {int(owned.min())} is held by a row, but ids are not negative")
        seen = np.bincount(np.concatenate([owned, self._stack[: self._top]]), minlength=len(self._stack))
        if len(seen) > len(self._stack) or np.any(seen != 1):
            page = int(np.flatnonzero(seen != 1)[0]) if len(seen) <= len(self._stack) else int(owned.max())
            raise InvariantError(f"page {page} is accounted for {int(seen[page])} times, 1 expected")
        if not np.array_equal(np.flatnonzero(self._state == _OWNED), np.sort(owned)):
            raise InvariantError("the pool's owned marks and the rows' pages differ")
