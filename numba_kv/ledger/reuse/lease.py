"""Lease: a reuse plan made true: pages that a row reads, and copies that it still has to make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import StateError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.ledger.reuse.kept_pages import SharedPages
    from numba_kv.ledger.reuse.prefix_cache import PrefixCache
    from numba_kv.ledger.reuse.reuse_plan import ReusePlan

__all__ = ["HeldPages", "Lease", "hold"]

#: A pool's `shares`, and the pages that are held of it.
HeldPages = tuple["NDArray[np.int32]", "NDArray[np.intp]"]
#: One holder, in the type of `shares`: a Python integer would be converted at each use.
_ONE = np.int32(1)


def hold(pool: SharedPages, pages: NDArray[np.int32]) -> HeldPages:
    """Note one more holder of each page."""
    shares, places = pool.shares, pages.astype(np.intp)  # converted once, for all uses as an index
    shares[places] += _ONE
    return shares, places


class Lease:
    """Holds the pages of a plan as a row does, and keeps the sources of its copies from being given up.

    ::

        held ── copied() ──> copied ── handed_over() ──> the row holds the pages and drops them as it drops its own
          └──────── release() ─────┘

    Attributes
    ----------
    plan : ReusePlan
        What is leased.
    """

    __slots__ = ("_cache", "_has_sources", "_held", "_holds_pages", "_holds_sources", "plan")

    def __init__(self, cache: PrefixCache, plan: ReusePlan, held: Sequence[HeldPages], has_sources: bool) -> None:
        self.plan = plan
        self._cache = cache
        self._held = held
        self._has_sources = has_sources
        self._holds_sources = True
        self._holds_pages = True

    @property
    def is_open(self) -> bool:
        """Whether anything is held."""
        return self._holds_sources or self._holds_pages

    def copied(self) -> None:
        """Let go of the sources: every copy is enqueued, and what overwrites them later is enqueued behind.

        Raises
        ------
        StateError
            If this was said before.
        """
        if not self._holds_sources:
            raise StateError("lease: its copies are made already, or it was released")
        self._holds_sources = False
        if self._has_sources:
            self._cache.unpin_sources(self.plan)

    def handed_over(self) -> None:
        """Leave the pages to a row, which drops them when it retires.

        Raises
        ------
        StateError
            If copies are not made yet, or the pages are not held any more.
        """
        if self._holds_sources or not self._holds_pages:
            raise StateError("lease: pages are handed over once, after the copies were enqueued")
        self._holds_pages = False

    def release(self) -> None:
        """Give everything back.

        Raises
        ------
        StateError
            If it was released or handed over.
        """
        if not self._holds_pages:
            raise StateError("lease: its pages were given back or handed over already")
        if self._holds_sources and self._has_sources:
            self.copied()
        self._holds_sources = self._holds_pages = False
        for shares, pages in self._held:
            shares[pages] -= _ONE  # none becomes free: what is leased stays kept
