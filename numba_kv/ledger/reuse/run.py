"""Run, Tail, Branch: the parts of the tree of kept blocks.

A run is consecutive blocks in arrays, so that a prompt is compared and its pages are gathered without a loop over blocks. Other
runs and tails hang behind any of its blocks; a run is never split. ::

    root ─┬─ run  [b0 b1 b2 b3 b4]          branches of this run: behind 2 blocks a run, behind 5 a tail
          │          └─ run [b2' b3']
          │                    tail (r < P tokens)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.ledger.reuse.content import MediaPart, TokenContent, block_key, common_tokens
from numba_kv.ledger.reuse.recency import Rank, Recency

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Branch", "Run", "Tail"]


class Tail:
    """The first r < P tokens of a block, and what is kept of exactly that length. Nothing hangs behind a tail.

    Attributes
    ----------
    run, offset : Run, int
        It hangs behind the first `offset` blocks of `run`.
    key : bytes
        Its tokens, as `TokenContent.key` writes them.
    tokens : int
        r; 0 for a snapshot at the end of a block.
    lines : int32 [lines]
        Pages of the block, one a group, of which the first r tokens are valid; -1: none. All -1 where r is 0.
    snapshot : int
        Slot of the states of recurrent layers at that length; -1: none.
    """

    __slots__ = ("is_queued", "key", "lines", "offset", "priority", "run", "snapshot", "stamp", "time", "tokens", "uid")

    def __init__(self, uid: int, run: Run, offset: int, key: bytes, tokens: int, lines: NDArray[np.int32]) -> None:
        self.uid = uid
        self.run = run
        self.offset = offset
        self.key = key
        self.tokens = tokens
        self.lines = lines
        self.snapshot = -1
        self.priority = 0
        self.time = 0
        self.is_queued = False
        self.stamp = 0

    @property
    def holds_pages(self) -> bool:
        """Whether evicting it frees a page of a pool that rows use; then nothing before it is evicted first."""
        return bool(self.lines[0] >= 0)

    def rank(self) -> Rank:
        """Return what decides when it goes."""
        return self.priority, self.time


class Branch:
    """What hangs behind one block of a run, beside the run's own next block; sorted by tokens.

    Attributes
    ----------
    runs : dict of bytes to Run
        The runs, by their first block as `TokenContent.exact` writes it.
    blockers : int
        Nodes that keep the block before them from being evicted: runs, and tails with pages.
    """

    __slots__ = ("blockers", "keys", "nodes", "runs")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.nodes: list[Run | Tail] = []
        self.runs: dict[bytes, Run] = {}
        self.blockers = 0

    def find(self, key: bytes) -> Run | Tail | None:
        """Return the node whose first tokens are exactly `key`."""
        at = bisect_left(self.keys, key)
        return self.nodes[at] if at < len(self.keys) and self.keys[at] == key else None

    def add(self, key: bytes, node: Run | Tail) -> None:
        """Hang a node here."""
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.nodes.insert(at, node)
        if isinstance(node, Run):
            self.runs[node.first] = node

    def remove(self, key: bytes) -> None:
        """Take a node off."""
        at = bisect_left(self.keys, key)
        node = self.nodes[at]
        if isinstance(node, Run):
            del self.runs[node.first]
        del self.keys[at], self.nodes[at]

    def closest(self, key: bytes) -> tuple[int, Run | Tail | None]:
        """Return the node that has the most tokens in common with `key`, and how many.

        In a sorted list it is a neighbour of the place where `key` would stand.
        """
        at = bisect_left(self.keys, key)
        best: tuple[int, Run | Tail | None] = (0, None)
        for place in (at, at - 1):
            if 0 <= place < len(self.keys):
                count = common_tokens(key, self.keys[place])
                if count > best[0]:
                    best = (count, self.nodes[place])
        return best


class Run:
    """Consecutive kept blocks of one prefix.

    Parameters
    ----------
    uid : int
        Its number; decides between equal ranks.
    parent, at : Run or None, int
        It hangs behind the first `at` blocks of `parent`; None: a root, which has no block of its own.
    start : int
        Place of its first block in a sequence.
    page_tokens, lines : int
        P; arrays of `lines`.

    Attributes
    ----------
    first, key : bytes
        Its first block, as `TokenContent.exact` and `TokenContent.key` write it.
    size : int
        Blocks.
    tokens : int32 [capacity, P]
        Their tokens; a view of `raw`.
    raw : bytearray
        The same as bytes, which are compared with those of a sequence at the speed of memory, and without an array for it.
    lines : int32 [lines, capacity]
        Line 0 the page of the full group, then a page for each further line; -1: none.
    names : list of bytes
        Chained names of the blocks; empty if nothing names them.
    media : dict of int to tuple
        Parts of items, of blocks that have any.
    branches : dict of int to Branch
        What hangs behind how many blocks.
    snapshots : list of int
        Where in `branches` tails with a snapshot hang, sorted; once for each.
    version : int
        Raised each time blocks are cut off.
    """

    __slots__ = (
        "at", "blocking", "branches", "first", "is_queued", "key", "lines", "media", "names", "page_tokens", "parent", "raw",
        "recency", "size", "snapshots", "stamp", "start", "tokens", "uid", "variants", "version",
    )  # fmt: skip

    def __init__(self, uid: int, parent: Run | None, at: int, start: int, page_tokens: int, lines: int) -> None:
        self.uid = uid
        self.parent = parent
        self.at = at
        self.start = start
        self.size = 0
        self.first = self.key = b""
        self.page_tokens = page_tokens
        self._hold(bytearray())
        self.lines = np.zeros((lines, 0), np.int32)
        self.names: list[bytes] = []
        self.media: dict[int, tuple[MediaPart, ...]] = {}
        self.variants: dict[tuple[int, int], int] = {}  # (block, next token) -> another page of the draft
        self.branches: dict[int, Branch] = {}
        self.blocking: list[int] = []  # offsets of branches with blockers, sorted
        self.snapshots: list[int] = []
        self.recency = Recency()
        self.version = 0
        self.is_queued = False
        self.stamp = 0

    def __repr__(self) -> str:
        return f"Run({self.uid}, blocks {self.start}..{self.start + self.size})"

    @property
    def is_root(self) -> bool:
        """Whether it stands before the first block of every sequence of an identity."""
        return self.parent is None

    def append(self, blocks: NDArray[np.int32], lines: NDArray[np.int32], media: dict[int, tuple[MediaPart, ...]]) -> None:
        """Add blocks at the end: tokens int32 [n, P], lines int32 [lines, n], parts of items by place in `blocks`."""
        count, old = len(blocks), self.size
        if old + count > len(self.tokens):
            room = max(old + count, 2 * len(self.tokens), 4)
            raw = bytearray(4 * self.page_tokens * room)
            raw[: len(self.raw)] = self.raw
            table = np.full((len(self.lines), room), -1, np.int32)
            table[:, :old] = self.lines[:, :old]
            self._hold(raw)
            self.lines = table
        self.tokens[old : old + count] = blocks
        self.lines[:, old : old + count] = lines
        self.size = old + count
        for place, parts in media.items():
            self.media[old + place] = parts

    def cut(self, size: int) -> None:
        """Forget the blocks from `size` on. What they held is given up by the caller."""
        for block in [b for b in self.media if b >= size] if self.media else ():
            del self.media[block]
        for place in [p for p in self.variants if p[0] >= size] if self.variants else ():
            del self.variants[place]
        del self.names[size:]
        self.lines[:, size : self.size] = -1
        self.recency.cut(size)
        self.size = size
        self.version += 1

    def same_blocks(self, content: TokenContent, block: int, count: int) -> int:
        """Return how many of its first blocks equal those of `content` from `block` on, at most `count`."""
        size = 4 * self.page_tokens
        if not self.raw.startswith(content.raw[size * block : size * (block + count)]):
            same = self.tokens[:count] == content.blocks(block, block + count)
            count = int(same.argmin()) // self.page_tokens
        if self.media or content.has_media:
            its_media = content.media_blocks(block, block + count)
            places = {b - block for b in its_media} | {b for b in self.media if b < count}
            for place in sorted(places):
                if self.media.get(place) != its_media.get(place + block):
                    return place
        return count

    def key_of(self, offset: int) -> bytes:
        """Return the key of one block."""
        return block_key(self.tokens[offset], self.media.get(offset, ()))

    def common_tokens(self, offset: int, content: TokenContent, start: int, limit: int) -> int:
        """Return how many tokens of a block equal those of `content` in [start, limit)."""
        stop = min(start + self.page_tokens, limit)
        if self.media or content.has_media:
            return common_tokens(content.key(start, stop), self.key_of(offset))
        same = content.tokens[start:stop] == self.tokens[offset, : stop - start]
        return len(same) if same.all() else int(same.argmin())

    def _hold(self, raw: bytearray) -> None:
        self.raw = raw
        self.tokens = np.frombuffer(raw, np.int32).reshape(-1, self.page_tokens)

    def last_blocker(self, removed: dict[tuple[Run, int], int]) -> int:
        """Return how many blocks must stay for what hangs behind them, if `removed` of it is gone."""
        for offset in reversed(self.blocking):
            if self.branches[offset].blockers > removed.get((self, offset), 0):
                return offset
        return 0

    def hang(self, offset: int, key: bytes, node: Run | Tail, is_blocker: bool) -> None:
        """Hang a run or a tail behind the first `offset` blocks."""
        branch = self.branches.get(offset)
        if branch is None:
            branch = self.branches[offset] = Branch()
        branch.add(key, node)
        if is_blocker:
            if not branch.blockers:
                insort(self.blocking, offset)
            branch.blockers += 1

    def take_off(self, offset: int, key: bytes, is_blocker: bool) -> None:
        """Undo `hang`."""
        branch = self.branches[offset]
        branch.remove(key)
        if is_blocker:
            branch.blockers -= 1
            if not branch.blockers:
                del self.blocking[bisect_left(self.blocking, offset)]
        if not branch.keys:
            del self.branches[offset]
