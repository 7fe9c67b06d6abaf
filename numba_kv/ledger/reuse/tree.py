"""PrefixTree: all kept blocks by identity and tokens, and the order in which they would go.

Closed under prefixes: a block is kept only while the one before it is. Found by comparing tokens, those of a run in one go, so
names of blocks play no part in it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError
from numba_kv.ledger.reuse.block_hash import BlockHash, chain_hashes
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.path import Path
from numba_kv.ledger.reuse.run import Run, Tail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["PrefixTree"]


class PrefixTree:
    """Kept blocks and tails.

    Parameters
    ----------
    page_tokens, lines : int
        P; entries that each block has, the page of the full group first.
    naming : BlockHash, optional
        Names new blocks; None: they have no names.

    Attributes
    ----------
    roots : dict of ContextIdentity to Run
        One for each identity of which anything is kept.
    num_blocks : int
        Kept blocks.
    version : int
        Raised each time blocks or tails come or go.
    heap : list
        ``(priority, time, uid, stamp, node)`` of every node at the end of a branch, perhaps with an old rank that is too low.
        An entry with another stamp than its node is void.
    """

    def __init__(self, page_tokens: int, lines: int, naming: BlockHash | None = None) -> None:
        self.page_tokens = page_tokens
        self.num_lines = lines
        self.naming = naming
        self.roots: dict[ContextIdentity, Run] = {}
        self.num_blocks = 0
        self.version = 0
        self.heap: list[tuple[int, int, int, int, Run | Tail]] = []
        self._clock = 0
        self._uids = 0

    def tick(self) -> int:
        """Return a time later than all before."""
        self._clock += 1
        return self._clock

    # -- looking -------------------------------------------------------------------------------------------------------

    def match(self, identity: ContextIdentity, content: TokenContent, tokens: int | None = None) -> Path:
        """Walk as far as the tokens of a sequence are kept, or the first `tokens` of them. Changes nothing.

        Cost: one look into a table and one comparison of bytes for each run on the way.
        """
        run = self.roots.get(identity)
        path = Path(run)
        if run is None:
            return path
        limit = content.num_tokens if tokens is None else tokens
        offset, blocks, total = 0, 0, limit // self.page_tokens
        while blocks < total and offset in run.branches:
            child = run.branches[offset].runs.get(content.exact(blocks))
            if child is None:
                break
            run, left = child, total - blocks
            offset = run.same_blocks(content, blocks, left if left < run.size else run.size)
            blocks += offset
            path.segments.append((run, offset))
        path.blocks = blocks
        if offset < run.size or offset in run.branches:
            path.has_siblings = True
            self._look_behind(path, content, run, offset, limit)
        return path

    def _look_behind(self, path: Path, content: TokenContent, run: Run, offset: int, limit: int) -> None:
        """Find what has the most in common with the block behind the path, which ends in a run."""
        at = path.blocks * self.page_tokens
        if at == limit:
            return
        branch = run.branches.get(offset)
        if branch is not None:
            count, node = branch.closest(content.key(at, min(at + self.page_tokens, limit)))
            if node is not None:
                path.partial, path.partial_tokens = (node, 0), count
        if offset < run.size:
            count = run.common_tokens(offset, content, at, limit)
            if count and count >= path.partial_tokens:
                path.partial, path.partial_tokens = (run, offset), count

    def runs(self) -> Iterator[Run]:
        """Return every run, roots too."""
        waiting = list(self.roots.values())
        while waiting:
            run = waiting.pop()
            yield run
            for branch in run.branches.values():
                waiting += [node for node in branch.nodes if isinstance(node, Run)]

    def tails(self) -> Iterator[Tail]:
        """Return every tail."""
        for run in self.runs():
            for branch in run.branches.values():
                yield from (node for node in branch.nodes if isinstance(node, Tail))

    # -- use -----------------------------------------------------------------------------------------------------------

    def touch(self, path: Path, priority: int, now: int) -> None:
        """Note that the blocks of a path are used now."""
        for run, size in path.segments:
            run.recency.touch(size, priority, now)

    def touch_tail(self, tail: Tail, priority: int, now: int) -> None:
        """Note that a tail is used now."""
        tail.priority, tail.time = max(tail.priority, priority), now

    def queue(self, node: Run | Tail) -> None:
        """See to it that a node at the end of a branch is in the heap."""
        if not node.is_queued and self.can_go(node):
            self.push(node)

    def push(self, node: Run | Tail) -> None:
        """Put a node into the heap by its rank now; what is there of it is void."""
        node.is_queued = True
        node.stamp += 1
        rank = node.rank() if isinstance(node, Tail) else node.recency.last(node.size)[0]
        heapq.heappush(self.heap, (*rank, node.uid, node.stamp, node))

    @staticmethod
    def can_go(node: Run | Tail) -> bool:
        """Return whether nothing that has to go before hangs behind a node's end."""
        if isinstance(node, Tail):
            return node.holds_pages
        return not node.is_root and node.size > 0 and (not node.blocking or node.blocking[-1] < node.size)

    # -- change --------------------------------------------------------------------------------------------------------

    def root_of(self, identity: ContextIdentity) -> Run:
        """Return the root of an identity, made if there is none."""
        root = self.roots.get(identity)
        if root is None:
            root = self.roots[identity] = Run(self._uid(), None, 0, 0, self.page_tokens, self.num_lines)
        return root

    def extend(
        self, identity: ContextIdentity, path: Path, content: TokenContent, lines: NDArray[np.int32], priority: int, now: int
    ) -> list[bytes]:
        """Keep the blocks of a sequence that follow a path (of `match`); int32 [lines, n] are their entries.

        The path then leads to the last of them. Returns their names.
        """
        path.root = self.root_of(identity)
        start, count = path.blocks, lines.shape[1]
        run, offset = path.end
        names = self._names(identity, content, start, start + count, path.name)
        if run.is_root or offset < run.size:
            child = Run(self._uid(), run, offset, start, self.page_tokens, self.num_lines)
            at = start * self.page_tokens
            child.first = content.exact(start)
            child.key = content.key(at, at + self.page_tokens)
            run.hang(offset, child.key, child, is_blocker=True)
            run = child
            path.segments.append((run, 0))
        blocks = content.blocks(start, start + count)
        media = {b - start: parts for b, parts in content.media_blocks(start, start + count).items()}
        run.append(blocks, lines, media)
        run.names += names
        path.segments[-1] = (run, run.size)
        path.blocks += count
        path.partial, path.partial_tokens = None, 0
        self.num_blocks += count
        self.version += 1
        self.touch(path, priority, now)
        if self.can_go(run):
            self.push(run)  # anew: blocks of less worth than the last one may have been added
        return names

    def add_tail(self, run: Run, offset: int, key: bytes, tokens: int, lines: NDArray[np.int32]) -> Tail:
        """Keep the first tokens of the block behind the first `offset` blocks of a run."""
        tail = Tail(self._uid(), run, offset, key, tokens, lines)
        run.hang(offset, key, tail, is_blocker=tail.holds_pages)
        self.version += 1
        return tail

    def remove_tail(self, tail: Tail) -> None:
        """Forget a tail."""
        if tail.snapshot >= 0:
            self.set_snapshot(tail, -1)
        tail.run.take_off(tail.offset, tail.key, is_blocker=tail.holds_pages)
        self.version += 1
        self._unblocked(tail.run)

    def set_snapshot(self, tail: Tail, slot: int) -> None:
        """Note in which slot the states at a tail's length are; -1: in none."""
        places = tail.run.snapshots
        if tail.snapshot < 0 <= slot:
            places.append(tail.offset)
            places.sort()
        elif slot < 0 <= tail.snapshot:
            places.remove(tail.offset)
        tail.snapshot = slot

    def cut(self, run: Run, size: int) -> list[Tail]:
        """Forget the blocks of a run from `size` on, and tails without pages behind them; returns those tails.

        What hangs behind them otherwise must be gone already.
        """
        dropped = []
        for offset in [o for o in run.branches if o > size or (o == size == 0)]:
            branch = run.branches[offset]
            if branch.blockers:
                raise InvariantError(f"{run} is cut to {size} blocks, but something hangs behind {offset}")
            dropped += [node for node in branch.nodes if isinstance(node, Tail)]
        for tail in dropped:
            if tail.snapshot >= 0:
                run.snapshots.remove(tail.offset)
            run.take_off(tail.offset, tail.key, is_blocker=False)
        self.num_blocks -= run.size - size
        run.cut(size)
        self.version += 1
        if size:
            self.queue(run)
        elif run.parent is not None:
            run.parent.take_off(run.at, run.key, is_blocker=True)
            self._unblocked(run.parent)
        return dropped

    def forget_empty_roots(self) -> None:
        """Drop identities of which nothing is kept any more."""
        for identity in [i for i, root in self.roots.items() if not root.branches]:
            del self.roots[identity]

    def _unblocked(self, run: Run) -> None:
        if not run.is_root:
            self.queue(run)

    def _names(
        self, identity: ContextIdentity, content: TokenContent, start: int, stop: int, parent: bytes | None
    ) -> list[bytes]:
        if self.naming is None:
            return []
        return chain_hashes(self.naming, identity, content, start, stop, parent)

    def _uid(self) -> int:
        self._uids += 1
        return self._uids
