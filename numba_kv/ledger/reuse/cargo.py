"""Cargo: part of one kept prefix on its way from one store to another, and how it is stowed there. Moves no byte.

Stores are those of `KeptStore`: the device's, and the host's. A block that is stowed gets ids of the new store for what is
wanted of it and is not there; the pairs of old and new ids are what somebody has to copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError
from numba_kv.ledger.reuse.content import MediaPart, MediaSpan, TokenContent
from numba_kv.ledger.reuse.groups import SNAPSHOTS
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.path import Path
from numba_kv.ledger.reuse.run import Run, Tail

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from numba_kv.ledger.reuse.store import KeptStore

__all__ = ["Cargo", "Moved", "TailCargo", "content_of", "settled", "spans_of", "stow"]

#: (line, ids where they were, ids where they are now), int32
Moved = tuple[int, "NDArray[np.int32]", "NDArray[np.int32]"]


@dataclass(frozen=True, slots=True, eq=False)
class TailCargo:
    """A tail: the first `tokens` of the block behind a cargo's blocks, as `Tail` has them; -1: not wanted."""

    key: bytes
    tokens: int
    lines: NDArray[np.int32]
    snapshot: int = -1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cargo:
    """Consecutive blocks of one prefix, and perhaps a tail behind the last of them.

    Attributes
    ----------
    identity, content : ContextIdentity, TokenContent
        Whose they are; the tokens of the prefix from its first one to the end of the blocks at least.
    start : int
        The first block.
    lines : int32 [lines, n]
        Where the blocks are in the store that they come from; -1: not wanted.
    tail : TailCargo or None
        What comes along behind block ``start + n - 1``.
    priority : int
        What they are worth.
    """

    identity: ContextIdentity
    content: TokenContent
    start: int
    lines: NDArray[np.int32]
    tail: TailCargo | None = None
    priority: int = 0

    @property
    def stop(self) -> int:
        """End of the blocks."""
        return self.start + len(self.lines[0])


def content_of(run: Run, size: int) -> TokenContent:
    """Return the tokens and media of the first `size` blocks of a run, and of all before it. Cost: O(tokens)."""
    parts, node = [(run, size)], run
    while node.parent is not None:
        parts.append((node.parent, node.at))
        node = node.parent
    parts.reverse()
    page = run.tokens.shape[1]
    tokens = np.concatenate([part.tokens[:count].reshape(-1) for part, count in parts])
    media = [(part.start + b, part.media[b]) for part, count in parts for b in sorted(part.media) if b < count]
    return TokenContent(page, tokens, spans_of(media, page))


def spans_of(blocks: Iterable[tuple[int, tuple[MediaPart, ...]]], page: int) -> list[MediaSpan]:
    """Put the parts of items in several blocks together; an item of which the end is not kept is as long as what is.

    Raises
    ------
    InvariantError
        If a part does not follow what is before it of its item.
    """
    found: list[MediaSpan] = []
    for block, parts in blocks:
        for place, length, offset, digest in parts:
            start = block * page + place
            if offset and (not found or found[-1].stop != start or found[-1].digest != digest or found[-1].length != offset):
                raise InvariantError(f"media: block {block} has a part of an item whose beginning is not kept")
            begun = found.pop() if offset else MediaSpan(start, length, digest)
            found.append(MediaSpan(begun.start, length + offset, digest))
    return found


def stow(store: KeptStore, cargo: Cargo, max_blocks: int | None = None, spare: int = 0) -> list[Moved]:
    """Keep what a cargo brings, as far as there is room; return what has to be copied.

    A store that must have every block (`KeptStore.has_gaps` is False) keeps all of the blocks or nothing.

    Parameters
    ----------
    max_blocks : int or None
        Most blocks that the store may keep in all.
    spare : int
        Free pages that are promised to somebody else.
    """
    page, tree = cargo.content.page_tokens, store.tree
    has_room = _make_room(store, cargo, max_blocks, spare)
    path = tree.match(cargo.identity, cargo.content, cargo.stop * page)
    stop = _reach(store, cargo, path, spare)
    if stop < cargo.start or not (has_room or store.has_gaps):
        return []
    now, before = tree.tick(), _present(store, path, cargo.start, stop)
    if stop > path.blocks:
        new = np.full((store.groups.num_lines, stop - path.blocks), -1, np.int32)
        tree.extend(cargo.identity, path, cargo.content, new, cargo.priority, now)
    tree.touch(path, cargo.priority, now)
    found = _fill_pages(store, cargo, path, stop)
    for window in range(len(store.windows)):
        found += _fill_slots(store, cargo, path, stop, window)
    added = np.flatnonzero(_present(store, path, cargo.start, stop) & ~before)
    for part in np.split(added, np.flatnonzero(np.diff(added) > 1) + 1) if len(added) else ():
        store.tell_stored(cargo.identity, cargo.content, path, cargo.start + int(part[0]), cargo.start + int(part[-1]) + 1)
    if cargo.tail is not None and stop == cargo.stop:
        path.root = tree.root_of(cargo.identity)
        found += _stow_tail(store, cargo, cargo.tail, path, now, spare)
    if path.root is not None:
        store.trim(path.end[0])
    return found


def _missing(store: KeptStore, cargo: Cargo, path: Path, line: int) -> NDArray[np.bool_]:
    """Return which blocks of a cargo bring something that the store does not have."""
    missing: NDArray[np.bool_] = cargo.lines[line] >= 0
    held = path.line(line, cargo.start, min(cargo.stop, path.blocks))
    missing[: len(held)] &= held < 0
    return missing


def _make_room(store: KeptStore, cargo: Cargo, max_blocks: int | None, spare: int) -> bool:
    """Let others go for what a cargo brings; return whether all its blocks find room."""
    page, tail = cargo.content.page_tokens, cargo.tail
    path = store.tree.match(cargo.identity, cargo.content, cargo.stop * page)
    pages = 0
    if store.full is not None:
        pages = int(_missing(store, cargo, path, 0).sum()) + (tail is not None and tail.lines[0] >= 0)
    has_room = store.make_most_room(pages + spare, max(0, cargo.stop - path.blocks), max_blocks)
    for w, pool in enumerate(store.windows):
        protected = {slot for slot in path.line(1 + w, 0, path.blocks).tolist() if slot >= 0}
        slots = int(_missing(store, cargo, path, 1 + w).sum()) + (tail is not None and tail.lines[1 + w] >= 0)
        store.take_window_slots(w, min(slots, pool.count), protected)
    if tail is not None and tail.snapshot >= 0:
        store.take_snapshot_slot(None)
    return has_room


def _reach(store: KeptStore, cargo: Cargo, path: Path, spare: int) -> int:
    """Return up to which block there is room; below `cargo.start` if for none."""
    if not store.has_gaps and path.blocks < cargo.start:
        return -1
    if store.full is None:
        return cargo.stop
    free = max(0, store.full.pool.free_pages - spare)
    return cargo.start + int(np.searchsorted(np.cumsum(_missing(store, cargo, path, 0)), free, side="right"))


def _parts(path: Path, start: int, stop: int) -> Iterator[tuple[Run, int, int]]:
    """Yield the runs that have the blocks [start, stop) of a path, and which of their own blocks these are."""
    for run, size in path.segments:
        low, high = max(start - run.start, 0), min(stop - run.start, size)
        if low < high:
            yield run, low, high


def _present(store: KeptStore, path: Path, start: int, stop: int) -> NDArray[np.bool_]:
    """Return which blocks of a path others are told to be in a store: with gaps, those that have a page."""
    found = np.zeros(stop - start, bool)
    count = max(0, min(stop, path.blocks) - start)
    if not store.has_gaps:
        found[:count] = True
        return found
    for line in (0,) if store.full is not None else range(1, store.groups.num_lines):
        found[:count] |= path.line(line, start, start + count) >= 0
    return found


def _fill_pages(store: KeptStore, cargo: Cargo, path: Path, stop: int) -> list[Moved]:
    """Keep pages of the full group."""
    found: list[Moved] = []
    for run, low, high in _parts(path, cargo.start, stop) if store.full is not None else ():
        at = run.start - cargo.start
        brought = cargo.lines[0, low + at : high + at]
        places = low + np.flatnonzero((run.lines[0, low:high] < 0) & (brought >= 0))
        if store.full is not None and len(places):
            ids = store.full.pool.acquire(len(places))
            store.full.adopt(ids)
            run.lines[0, places] = ids
            found.append((0, cargo.lines[0, places + at], ids))
    return found


def _fill_slots(store: KeptStore, cargo: Cargo, path: Path, stop: int, window: int) -> list[Moved]:
    """Keep copies of a window's pages, the last ones first: a window is of use only from its end."""
    line, pool, found = 1 + window, store.windows[window], list[Moved]()
    for run, low, high in reversed(list(_parts(path, cargo.start, stop))):
        at = run.start - cargo.start
        brought = cargo.lines[line, low + at : high + at]
        places = low + np.flatnonzero((run.lines[line, low:high] < 0) & (brought >= 0))
        places = places[max(0, len(places) - pool.num_free) :]
        if len(places):
            slots = np.array([pool.keep((run, place)) for place in places.tolist()], np.int32)
            run.lines[line, places] = slots
            found.append((line, cargo.lines[line, places + at], slots))
    return found


def _one(line: int, old: int, new: int) -> Moved:
    return line, np.array([old], np.int32), np.array([new], np.int32)


def _stow_tail(store: KeptStore, cargo: Cargo, brought: TailCargo, path: Path, now: int, spare: int) -> list[Moved]:
    tree, found = store.tree, list[Moved]()
    run, offset = path.end
    branch = run.branches.get(offset)
    tail = None if branch is None else branch.find(brought.key)
    if tail is not None and not isinstance(tail, Tail):
        raise InvariantError(f"{run}: a run hangs behind block {offset} where a tail of its tokens is stowed")
    lines = np.full(store.groups.num_lines, -1, np.int32) if tail is None else tail.lines.copy()
    if store.full is not None and brought.lines[0] >= 0 > lines[0] and store.full.pool.free_pages > spare:
        lines[:1] = store.full.pool.acquire(1)
        store.full.adopt(lines[:1])
        found.append(_one(0, int(brought.lines[0]), int(lines[0])))
    if store.full is not None and brought.tokens and lines[0] < 0:
        return []  # states are of no use without the tokens of the block before them
    wants_state = brought.snapshot >= 0 and (tail is None or tail.snapshot < 0) and store.snapshots.num_free > 0
    if tail is None:
        if not found and not wants_state and (brought.snapshot >= 0 or (brought.lines[1:] < 0).all()):
            return []  # nothing of it would be here
        tail = tree.add_tail(run, offset, brought.key, brought.tokens, lines)
    elif found:  # with a page it keeps the block before it
        run.take_off(offset, tail.key, is_blocker=False)
        tail.lines[0] = lines[0]
        run.hang(offset, tail.key, tail, is_blocker=True)
        tree.version += 1
    for w, pool in enumerate(store.windows):
        if brought.lines[1 + w] >= 0 > tail.lines[1 + w] and pool.num_free:
            tail.lines[1 + w] = pool.keep((tail, 0))
            found.append(_one(1 + w, int(brought.lines[1 + w]), int(tail.lines[1 + w])))
    if wants_state:
        tree.set_snapshot(tail, store.snapshots.keep(tail))
        found.append(_one(SNAPSHOTS, brought.snapshot, tail.snapshot))
    tree.touch_tail(tail, cargo.priority, now)
    tree.queue(tail)
    return found


def settled(moved: Iterable[Moved]) -> dict[int, NDArray[np.int32]]:
    """Return what has to be copied, by line: pairs of ids, int32 [n, 2]. Of a place that several went to, the last stays."""
    lines: dict[int, tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]] = {}
    for line, olds, news in moved:
        both = lines.setdefault(line, ([], []))
        both[0].append(olds)
        both[1].append(news)
    found = {}
    for line, (olds_of, news_of) in lines.items():
        old, new = np.concatenate(olds_of), np.concatenate(news_of)
        _, last = np.unique(new[::-1], return_index=True)
        keep = len(new) - 1 - last
        found[line] = np.stack([old[keep], new[keep]], axis=1)
    return found
