"""KeptPages: which pages of a pool the cache holds, beside the rows that do; their generation; what each page is.

The cache is one more holder of a page, as a row is: the pool's `shares` counts both, so a page is free when the last row and
the cache have let go of it, in either order. ::

    shares   kept   class
    0        no     free, or owned by one row
    n > 0    no     shared by n + 1 rows
    0        yes    cached: nobody but the cache holds it, so it can be evicted
    n > 0    yes    leased: n rows read it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from numba_kv.errors import InvariantError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["KeptPages", "PageClasses", "SharedPages"]


class SharedPages(Protocol):
    """What the cache wants of a pool; `numba_kv.ledger.pages.PageIdPool` has it.

    Attributes
    ----------
    usable_pages, free_pages : int
        Ids that can be held; those that nobody holds.
    stack : int32 [usable_pages]
        The first `free_pages` are the free ids.
    shares : int32 [usable_pages]
        Holders of a page, less one.
    """

    usable_pages: int
    free_pages: int
    stack: NDArray[np.int32]
    shares: NDArray[np.int32]

    def acquire(self, count: int) -> NDArray[np.int32]:
        """Take free pages; all or none."""
        ...

    def share(self, ids: NDArray[np.int32], holders: int) -> None:
        """Note more holders of pages."""
        ...

    def drop(self, ids: NDArray[np.int32]) -> None:
        """Note one holder less of each page."""
        ...


@dataclass(frozen=True, slots=True)
class PageClasses:
    """Usable pages of a pool by what they are; every page is exactly one of them.

    Attributes
    ----------
    free : int
        Held by nobody.
    owned : int
        Held by one row, which may write it.
    shared : int
        Held by several rows.
    cached : int
        Held by the cache alone.
    leased : int
        Held by the cache and by rows, which only read it.
    """

    free: int
    owned: int
    shared: int
    cached: int
    leased: int

    @property
    def total(self) -> int:
        """All usable pages."""
        return self.free + self.owned + self.shared + self.cached + self.leased


class KeptPages:
    """The cache's part in a pool of pages.

    Parameters
    ----------
    pool : SharedPages
        The pool whose pages rows hold.

    Attributes
    ----------
    kept : bool [usable_pages]
        Whether the cache holds a page.
    epoch : int
        Raised each time the cache lets go of pages.
    generation : int64 [usable_pages]
        Epoch in which the cache last let go of a page, so that an id in an older plan is seen to be stale.
    """

    def __init__(self, pool: SharedPages) -> None:
        self.pool = pool
        self.kept = np.zeros(pool.usable_pages, bool)
        self.generation = np.zeros(pool.usable_pages, np.int64)
        self.num_kept = 0
        self.epoch = 0

    @property
    def most_evictable(self) -> int:
        """Pages that only the cache holds; some may have to stay for what lies behind them. Cost: O(pages), vectorised."""
        return int(np.count_nonzero(self.kept & (self.pool.shares == 0)))

    def keep(self, ids: NDArray[np.int32]) -> None:
        """Hold pages that a row holds too."""
        self.kept[ids] = True
        self.num_kept += len(ids)
        self.pool.share(ids, 1)

    def adopt(self, ids: NDArray[np.int32]) -> None:
        """Hold pages that were just acquired for the cache alone."""
        self.kept[ids] = True
        self.num_kept += len(ids)

    def let_go(self, ids: NDArray[np.int32]) -> None:
        """Hold pages no more; those that no row holds become free."""
        self.kept[ids] = False
        self.num_kept -= len(ids)
        self.epoch += 1
        self.generation[ids] = self.epoch
        self.pool.drop(ids)

    def are_current(self, ids: NDArray[np.int32], epoch: int) -> bool:
        """Return whether the cache has held pages, which it held in `epoch`, ever since."""
        return epoch == self.epoch or bool((self.generation[ids] <= epoch).all())

    def classes(self) -> PageClasses:
        """Return the counts. Cost: O(pages), vectorised."""
        several = self.pool.shares > 0
        leased = int(np.count_nonzero(several & self.kept))
        shared = int(np.count_nonzero(several)) - leased
        cached = self.num_kept - leased
        free = self.pool.free_pages
        return PageClasses(free, self.pool.usable_pages - free - shared - cached - leased, shared, cached, leased)

    def check(self, ids: NDArray[np.int32], purpose: str = "pages") -> None:
        """Check that the cache holds exactly `ids`, each once, and none that is free.

        Raises
        ------
        InvariantError
            Naming the first page that is wrong.
        """
        seen = np.bincount(ids, minlength=len(self.kept))
        wrong = np.flatnonzero(seen != self.kept)
        if len(wrong):
            page = int(wrong[0])
            raise InvariantError(f"{purpose}: page {page} is in the index {seen[page]} times, {int(self.kept[page])} expected")
        free = self.pool.stack[: self.pool.free_pages]
        if np.any(self.kept[free]):
            raise InvariantError(f"{purpose}: page {int(free[self.kept[free]][0])} is kept and free")
        classes = self.classes()
        if min(classes.free, classes.owned, classes.shared, classes.cached, classes.leased) < 0:
            raise InvariantError(f"{purpose}: a class of pages has a negative count: {classes}")
