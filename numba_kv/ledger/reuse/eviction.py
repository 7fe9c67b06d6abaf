"""What has to go so that pages become free: planned first, then done, all or nothing.

The node used longest ago goes first, by the rank of its last block, and only as much of it as is needed. A block stays while
something hangs behind it, and while a row reads its page: then it would free nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.ledger.reuse.kept_pages import KeptPages
from numba_kv.ledger.reuse.run import Run, Tail
from numba_kv.ledger.reuse.tree import PrefixTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    IsRead = Callable[[Run | Tail, int, int], NDArray[np.bool_]]

__all__ = ["EvictionPlan", "Wanted", "plan_eviction"]


def _nobody_reads(node: Run | Tail, begin: int, stop: int) -> NDArray[np.bool_]:
    return np.zeros(stop - begin, bool)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an eviction is to free: pages of the full group, pages of the draft; and blocks to be kept no more."""

    pages: int = 0
    draft_pages: int = 0
    blocks: int = 0

    @property
    def is_nothing(self) -> bool:
        """Whether nothing is wanted."""
        return self.pages <= 0 and self.draft_pages <= 0 and self.blocks <= 0


@dataclass(frozen=True, slots=True, eq=False)
class EvictionPlan:
    """Blocks and tails that go.

    Attributes
    ----------
    cuts : tuple of (Run, int)
        Runs, children before parents, and how many blocks they keep.
    tails : tuple of Tail
        Tails with pages.
    frees : Wanted
        What becomes free at least.
    in_use : tuple
        Nodes that rows read: they were met on the way, and are used now.
    version : int
        Of the tree it was planned for.
    """

    cuts: tuple[tuple[Run, int], ...]
    tails: tuple[Tail, ...]
    frees: Wanted
    in_use: tuple[Run | Tail, ...]
    version: int


class _Search:
    """One walk over nodes by rank, on a picture of the tree in which victims are gone."""

    def __init__(
        self, tree: PrefixTree, wanted: Wanted, full: KeptPages | None, draft: KeptPages | None, draft_line: int,
        is_read: IsRead,
    ) -> None:  # fmt: skip
        self.tree = tree
        self.left = [wanted.pages, wanted.draft_pages, wanted.blocks]
        self.pools = ((0, full), (draft_line, draft))
        self.is_read = is_read
        self.sizes: dict[Run, int] = {}
        self.removed: dict[tuple[Run, int], int] = {}
        self.tails: list[Tail] = []
        self.in_use: list[Run | Tail] = []
        self.freed = [0, 0, 0]
        self._next: list[tuple[int, int, int, int, Run]] = []  # runs as they are in the picture
        self._pushed = 0
        self._handled: set[Run | Tail] = set()

    @property
    def is_done(self) -> bool:
        return all(freed >= left for freed, left in zip(self.freed, self.left, strict=True))

    def walk(self) -> bool:
        """Take nodes until all is found that is wanted; False if there are too few."""
        heap, seen = self.tree.heap, []
        while not self.is_done and (heap or self._next):
            if self._next and (not heap or self._next[0][:3] < heap[0][:3]):
                self._take_again(heapq.heappop(self._next))
                continue
            item = heapq.heappop(heap)
            node = item[4]
            if item[3] != node.stamp:
                continue
            if not self.tree.can_go(node) or self._is_gone(node):
                node.is_queued = False
                continue
            rank = node.rank() if isinstance(node, Tail) else node.recency.last(node.size)[0]
            if rank > item[:2]:
                self.tree.push(node)  # used since it was put there
                continue
            seen.append(item)
            if node not in self._handled:
                self._handled.add(node)
                self._take(node)
        for item in seen:
            heapq.heappush(heap, item)
        return self.is_done

    def _take_again(self, item: tuple[int, int, int, int, Run]) -> None:
        """Take more of a run that lost blocks or what hung behind it, if it still stands as it was put there."""
        run = item[4]
        size = self.sizes.get(run, run.size)
        if size and run.last_blocker(self.removed) < size and run.recency.last(size)[0] == item[:2]:
            self._handled.add(run)
            self._take(run)

    @staticmethod
    def _is_gone(node: Run | Tail) -> bool:
        """Whether a node has left the tree since it was queued."""
        if isinstance(node, Run):
            return node.size == 0
        branch = node.run.branches.get(node.offset)
        return branch is None or branch.find(node.key) is not node

    def _take(self, node: Run | Tail) -> None:
        if isinstance(node, Tail):
            gains, reads = self._gains(node.lines[:, None], self.is_read(node, 0, 1))
            if reads[0]:
                self.in_use.append(node)
                return
            gains[2] = 0  # not a block
            self.tails.append(node)
            self._count(gains)
            self._unhang(node.run, node.offset)
            return
        size = self.sizes.get(node, node.size)
        begin = max(node.recency.last(size)[1], node.last_blocker(self.removed))
        gains, reads = self._gains(node.lines[:, begin:size], self.is_read(node, begin, size))
        held = np.flatnonzero(reads)
        low = int(held[-1]) + 1 if len(held) else 0
        count = self._needed(gains[:, low:])
        if not count:
            self.in_use.append(node)
            return
        self._count(gains[:, size - begin - count :])
        size -= count
        self.sizes[node] = size
        if self.is_done:
            return
        if size == 0 and node.parent is not None:
            self._unhang(node.parent, node.at)
        else:
            self._look_again(node)

    def _gains(self, lines: NDArray[np.int32], reads: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return what each block would free, [3, n], and whether a row or something else reads it."""
        gains = np.ones((3, lines.shape[1]), np.int64)
        for i, (line, pool) in enumerate(self.pools):
            if pool is None:
                gains[i] = 0
                continue
            pages = lines[line]
            gains[i] = pages >= 0
            reads = reads | ((pages >= 0) & (pool.pool.shares[pages] > 0))
        return gains, reads

    def _needed(self, gains: NDArray[np.int64]) -> int:
        """Return how many of the last blocks are needed; all, if they are not enough."""
        total = gains.shape[1]
        sums = np.cumsum(gains[:, ::-1], axis=1)
        need = np.array(self.left) - np.array(self.freed)
        enough = np.flatnonzero((sums >= need[:, None]).all(axis=0))
        return int(enough[0]) + 1 if len(enough) else total

    def _count(self, gains: NDArray[np.int64]) -> None:
        sums = gains.sum(axis=1).tolist()
        self.freed = [before + more for before, more in zip(self.freed, sums, strict=True)]

    def _unhang(self, run: Run, offset: int) -> None:
        self.removed[run, offset] = self.removed.get((run, offset), 0) + 1
        self._look_again(run)

    def _look_again(self, run: Run) -> None:
        """Put a run where its last block, as it now is, belongs."""
        size = self.sizes.get(run, run.size)
        if not run.is_root and size and run.last_blocker(self.removed) < size:
            self._pushed += 1
            heapq.heappush(self._next, (*run.recency.last(size)[0], run.uid, self._pushed, run))

    def cuts(self) -> tuple[tuple[Run, int], ...]:
        """Return the runs that lose blocks, children before parents."""
        return tuple(sorted(self.sizes.items(), key=lambda item: -item[0].start))


def plan_eviction(
    tree: PrefixTree,
    wanted: Wanted,
    full: KeptPages | None,
    draft: KeptPages | None = None,
    draft_line: int = 0,
    is_read: IsRead | None = None,
    *,
    or_less: bool = False,
) -> EvictionPlan | None:
    """Return what goes so that `wanted` becomes free, or None if not enough can go. Changes nothing.

    Parameters
    ----------
    full, draft : KeptPages or None
        Pools of the pages in line 0 and in `draft_line`.
    is_read : callable, optional
        Says of blocks [begin, stop) of a run, or of a tail (0, 1), which of them something reads, beside rows.
    or_less : bool
        Whether to return what can go if it is not enough, instead of None.

    Cost: O(log nodes) and a few array operations for each victim, and for each node met on the way that rows read.
    """
    for pool, count in ((full, wanted.pages), (draft, wanted.draft_pages)):
        if not or_less and count > 0 and (pool is None or pool.most_evictable < count):
            return None
    search = _Search(tree, wanted, full, draft, draft_line, is_read or _nobody_reads)
    if not search.walk() and not or_less:
        return None
    return EvictionPlan(search.cuts(), tuple(search.tails), Wanted(*search.freed), tuple(search.in_use), tree.version)
