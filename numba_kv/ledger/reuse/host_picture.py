"""What a sequence could reuse if all that is on the host were on the device. Pure.

A picture of both: a tree of one branch, the sequence's own, in which a block is where the device has it, else where the host
does. A lookup in the picture says which prefix is the longest, and what of it has to come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.ledger.reuse.cargo import Cargo, TailCargo
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.groups import SNAPSHOTS, ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.lookup import Found, PrefixLookup, longest_kept
from numba_kv.ledger.reuse.path import Path, entry
from numba_kv.ledger.reuse.run import Run, Tail
from numba_kv.ledger.reuse.tree import PrefixTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.ledger.reuse.store import KeptStore

__all__ = ["HOST", "Return", "find_return"]

#: Added to ids of the host, so that one number says where a page is.
HOST = 1 << 30


@dataclass(slots=True)
class Return:
    """What is to come back to the device for one sequence.

    Attributes
    ----------
    before : int
        Tokens that can be reused without it.
    start : int
        First block that needs anything.
    lines : int32 [lines, n]
        Blocks from there on: `HOST` and the id on the host; -1: it is on the device, or not wanted.
    tail : TailCargo or None
        The same of a tail behind `tail_block` blocks.
    device, host : dict of int to list of int
        Ids by line that must stay meanwhile, on either side.
    """

    before: int
    start: int
    lines: NDArray[np.int32]
    tail: TailCargo | None = None
    tail_block: int = 0
    device: dict[int, list[int]] = field(default_factory=dict)
    host: dict[int, list[int]] = field(default_factory=dict)

    def cargoes(self, identity: ContextIdentity, content: TokenContent, priority: int) -> Iterator[Cargo]:
        """Yield what is to be stowed on the device, in this order."""
        if self.lines.shape[1]:
            yield Cargo(identity=identity, content=content, start=self.start, lines=self.lines, priority=priority)
        if self.tail is not None:
            none = np.full((len(self.lines), 0), -1, np.int32)
            tail, start = self.tail, self.tail_block
            yield Cargo(identity=identity, content=content, start=start, lines=none, tail=tail, priority=priority)

    def gained(
        self, groups: ReuseGroups, device: KeptStore, identity: ContextIdentity, content: TokenContent, *, whole_pages: bool
    ) -> int:
        """Return how many tokens more can be reused now."""
        _, (tokens, _) = _longest(groups, content, device.tree.match(identity, content), whole_pages)
        return tokens - self.before

    def note(self, line: int, ids: list[int]) -> None:
        """Note what has to stay."""
        for code in ids:
            if code >= HOST:
                self.host.setdefault(line, []).append(code - HOST)
            elif code >= 0:
                self.device.setdefault(line, []).append(code)


def find_return(
    groups: ReuseGroups,
    device: KeptStore,
    host: KeptStore,
    identity: ContextIdentity,
    content: TokenContent,
    *,
    whole_pages: bool,
) -> Return | None:
    """Return what has to come back so that the longest prefix can be reused; None if nothing would be gained."""
    here, there = device.tree.match(identity, content), host.tree.match(identity, content)
    _, (before, _) = _longest(groups, content, here, whole_pages)
    has_more = there.blocks > here.blocks or (there.blocks == here.blocks and there.partial_tokens > here.partial_tokens)
    matched = here.blocks * groups.page_tokens + here.partial_tokens
    if before >= content.num_tokens - 1 or (not has_more and before >= matched):
        return None
    picture, path = _picture(groups, identity, content, here, there)
    look, (tokens, tail) = _longest(groups, content, path, whole_pages)
    if tokens <= before:
        return None
    lines = _used_lines(groups, look, path, tokens, tail)
    whole = lines.shape[1]
    found = Return(before, 0, np.where(lines >= HOST, lines, -1).astype(np.int32))
    for line in range(groups.num_lines):
        found.note(line, lines[line].tolist())
    partial = path.partial[0] if path.partial is not None and tokens > path.blocks * groups.page_tokens else None
    last = tail or partial
    if isinstance(last, Tail):
        found.tail_block = last.offset + last.run.start
        found.tail = _wanted_tail(found, last)
    wanted = np.flatnonzero((found.lines >= 0).any(axis=0) | (np.arange(whole) >= here.blocks))
    found.start = int(wanted[0]) if len(wanted) else whole
    found.lines = found.lines[:, found.start :]
    return found


def _longest(groups: ReuseGroups, content: TokenContent, path: Path, whole_pages: bool) -> tuple[PrefixLookup, Found]:
    """Return the longest prefix of a path that can be used, and the lookup that found it."""
    whole = whole_pages and not groups.is_recurrent
    _, top, _ = longest_kept(path, content.num_tokens, groups.page_tokens, whole_pages=whole)
    look = PrefixLookup(groups, content, path, whole_pages=whole_pages)
    return look, look.find(top)[0]


def _used_lines(groups: ReuseGroups, look: PrefixLookup, path: Path, tokens: int, tail: Tail | None) -> NDArray[np.int32]:
    """Return where the blocks of a prefix are that it uses, int32 [lines, n]; -1: not used.

    A last block that is used in part comes whole, if it is there whole; else it is a tail's.
    """
    page = groups.page_tokens
    blocks = -(-tokens // page)
    whole = min(blocks, path.blocks)
    lines = np.full((groups.num_lines, whole), -1, np.int32)
    if groups.has_full:
        lines[0] = path.line(0, 0, whole)
    for w in range(len(groups.windows)):
        first, slots = look.slots(w, tokens, tail)
        has_part = len(slots) == blocks - first and tokens % page > 0
        is_of_tail = has_part and tail is not None and tail.lines[1 + w] >= 0
        inside = slots[: max(0, whole - is_of_tail * (whole == blocks) - first)]
        lines[1 + w, first : first + len(inside)] = inside
    return lines


def _wanted_tail(found: Return, tail: Tail) -> TailCargo | None:
    """Return what of a tail of the picture is on the host."""
    for line, code in enumerate(tail.lines.tolist()):
        found.note(line, [code])
    found.note(SNAPSHOTS, [tail.snapshot])
    lines = np.where(tail.lines >= HOST, tail.lines, -1).astype(np.int32)
    snapshot = tail.snapshot if tail.snapshot >= HOST else -1
    if snapshot < 0 and (lines < 0).all():
        return None
    return TailCargo(tail.key, tail.tokens, lines, snapshot)


def _picture(
    groups: ReuseGroups, identity: ContextIdentity, content: TokenContent, here: Path, there: Path
) -> tuple[PrefixTree, Path]:
    """Return a tree with all that either side has of a sequence, and where the sequence leads in it."""
    size = max(here.blocks, there.blocks)
    if groups.has_full:
        missing = np.flatnonzero(there.line(0, here.blocks, there.blocks) < 0)
        size = here.blocks + int(missing[0]) if len(missing) else size
    lines = np.full((groups.num_lines, size), -1, np.int32)
    for line in range(groups.num_lines):
        mine, its = here.line(line, 0, here.blocks), there.line(line, 0, min(size, there.blocks))
        lines[line, : len(mine)] = mine
        fill = np.flatnonzero((lines[line, : len(its)] < 0) & (its >= 0))
        lines[line, fill] = its[fill] + np.int32(HOST)
    tree = PrefixTree(groups.page_tokens, groups.num_lines)
    path = Path()
    if size:
        tree.extend(identity, path, content, lines, 0, 0)
    root = tree.root_of(identity)
    run = path.segments[-1][0] if path.segments else root
    for block, tail in _tails(groups, content, here, there, size):
        _hang(tree, root if not block else run, block, tail)
    return tree, tree.match(identity, content)


def _hang(tree: PrefixTree, run: Run, block: int, brought: TailCargo) -> None:
    """Hang a tail into the picture, or add to one that hangs there what it lacks."""
    branch = run.branches.get(block)
    tail = None if branch is None else branch.find(brought.key)
    if not isinstance(tail, Tail):
        tail = tree.add_tail(run, block, brought.key, brought.tokens, brought.lines.copy())
    elif tail.lines[0] < 0 <= brought.lines[0]:  # the picture is never evicted, so nobody asks who blocks whom
        tail.lines[0] = brought.lines[0]
    fill = np.flatnonzero((tail.lines < 0) & (brought.lines >= 0))
    tail.lines[fill] = brought.lines[fill]
    if tail.snapshot < 0 <= brought.snapshot:
        tree.set_snapshot(tail, brought.snapshot)


def _tails(groups: ReuseGroups, content: TokenContent, here: Path, there: Path, size: int) -> Iterator[tuple[int, TailCargo]]:
    """Yield tails that a sequence may begin with, by the blocks before them; those of the device first."""
    for path, shift in ((here, 0), (there, HOST)):
        if path.root is None:
            continue
        if groups.is_recurrent:
            yield from _snapshots(content, path, shift, size, has_full=groups.has_full)
        elif path.blocks == size and path.partial is not None and path.partial_tokens:
            node, place = path.partial
            lines = np.array([entry((node, place), line) for line in range(groups.num_lines)], np.int32)
            if lines[0] >= 0 or not groups.has_full:
                start, count = size * groups.page_tokens, path.partial_tokens
                yield size, TailCargo(content.key(start, start + count), count, _shifted(lines, shift))


def _snapshots(content: TokenContent, path: Path, shift: int, size: int, *, has_full: bool) -> Iterator[tuple[int, TailCargo]]:
    """Yield the tails with snapshots that a sequence begins with."""
    root = path.root
    for run, count in [*path.segments, *([] if root is None else [(root, 0)])]:
        for offset in sorted({o for o in run.snapshots if o <= count and run.start + o <= size}):
            start = (run.start + offset) * content.page_tokens
            for node in run.branches[offset].nodes:
                if not isinstance(node, Tail) or node.snapshot < 0 or (has_full and node.tokens and node.lines[0] < 0):
                    continue
                stop = start + node.tokens
                if stop <= content.num_tokens and node.key == content.key(start, stop):
                    cargo = TailCargo(node.key, node.tokens, _shifted(node.lines, shift), node.snapshot + shift)
                    yield run.start + offset, cargo


def _shifted(lines: NDArray[np.int32], shift: int) -> NDArray[np.int32]:
    return np.where(lines >= 0, lines + np.int32(shift), -1).astype(np.int32)
