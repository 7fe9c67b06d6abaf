"""Publisher: does what a publish plan says, and tells what is left for the device to copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import CapacityError
from numba_kv.ledger.reuse.events import BlocksStored
from numba_kv.ledger.reuse.eviction import Wanted
from numba_kv.ledger.reuse.path import Path
from numba_kv.ledger.reuse.publish_plan import PublishPlan, PublishRequest, WindowWish, plan_publish
from numba_kv.ledger.reuse.run import Run, Tail
from numba_kv.ledger.reuse.store import KeptStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PageCopy", "Published", "publish"]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """One page to copy inside a group's pools: group 0 is the full one, g > 0 window g - 1. `tokens` of it are valid."""

    group: int
    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Published:
    """What publishing did, and what the device has to do.

    Attributes
    ----------
    blocks : int
        Blocks of the sequence that are kept now, from its first on; fewer than it has if there was no room.
    new_blocks : int
        Those that nobody had published; the row shares their pages with the cache now and must not write them any more.
    duplicates, canonical : int64 [m], int32 [m]
        Blocks that are kept in another page than the row's. The row may take that page and free its own.
    copies : tuple of PageCopy
        To be enqueued before the row's next step.
    snapshot : int
        Slot into which the states are to be captured; -1: none.
    """

    blocks: int
    new_blocks: int
    duplicates: NDArray[np.int64]
    canonical: NDArray[np.int32]
    copies: tuple[PageCopy, ...]
    snapshot: int


def publish(store: KeptStore, request: PublishRequest, max_blocks: int | None) -> Published:
    """Keep what a request names, all that there is room for.

    Parameters
    ----------
    max_blocks : int or None
        Most blocks that may be kept in all.

    Raises
    ------
    InputError, StateError
        If the request does not fit; nothing was changed.
    """
    kept = None if store.full is None else store.full.kept
    plan = plan_publish(store.tree, store.groups, request, kept)
    now = store.tree.tick()
    store.tree.touch(plan.path, request.priority, now)
    lines = plan.lines[:, : _affordable(store, plan, max_blocks)]
    figures, path = store.figures, plan.path
    figures.duplicate_blocks += len(plan.duplicates)
    figures.skipped_blocks += plan.lines.shape[1] - lines.shape[1]
    _upgrade_drafts(store, plan)
    new = lines.shape[1]
    if new:
        _extend(store, request, path, lines, now)
    is_whole = new == plan.lines.shape[1]
    copies: list[PageCopy] = []
    tail, snapshot = plan.tail, -1
    if is_whole:
        figures.skipped_copies += len(plan.unreachable)
        tail, snapshot = _keep_tail(store, request, plan, copies, now)
        # Of a model with states, copies are of use only beside a snapshot.
        is_usable = not store.groups.is_recurrent or (tail is not None and tail.snapshot >= 0)
        for wish in plan.windows if is_usable else ():
            _keep_copies(store, request, path, wish, tail, copies)
    return Published(path.blocks, new, plan.duplicates, plan.canonical, tuple(copies), snapshot)


def _affordable(store: KeptStore, plan: PublishPlan, max_blocks: int | None) -> int:
    """Return how many new blocks can be kept, after making room for them."""
    count = int(plan.lines.shape[1])
    if max_blocks is None:
        return count
    over = store.tree.num_blocks + count - max_blocks
    if over <= 0:
        return count
    eviction = store.plan_room(Wanted(blocks=over))
    if eviction is None or any(run is node and size < end for run, size in eviction.cuts for node, end in plan.path.segments):
        return max(0, count - over)  # nothing else could go but the sequence's own beginning
    store.evict(eviction)
    return count


def _extend(store: KeptStore, request: PublishRequest, path: Path, lines: NDArray[np.int32], now: int) -> None:
    start, parent = path.blocks, path.name
    names = store.tree.extend(request.identity, path, request.content, lines, request.priority, now)
    if store.full is not None:
        store.full.keep(lines[0])
    if store.draft is not None:
        pages = lines[store.groups.draft_line]
        store.draft.keep(pages[pages >= 0])
    store.figures.published_blocks += lines.shape[1]
    if store.on_event is not None:
        tokens = request.content.blocks(start, path.blocks).copy()
        store.on_event(BlocksStored(request.identity, parent, tuple(names), tokens))


def _upgrade_drafts(store: KeptStore, plan: PublishPlan) -> None:
    line = store.groups.draft_line
    for block, page, following in plan.drafts:
        node, place = plan.path.place(block)
        if store.draft is None or isinstance(node, Tail):
            continue
        current = int(node.lines[line, place])
        if current == page:
            if node.lines[line + 1, place] < 0:
                node.lines[line + 1, place] = following
        elif not store.draft.kept[page]:
            if current < 0:
                node.lines[line : line + 2, place] = page, following
            elif following >= 0:
                node.variants[place, following] = page
            else:
                continue
            store.draft.keep(np.array([page], np.int32))


def _keep_tail(
    store: KeptStore, request: PublishRequest, plan: PublishPlan, copies: list[PageCopy], now: int
) -> tuple[Tail | None, int]:
    """Keep the last tokens and the states behind them; returns the tail and the slot that is to be filled."""
    tree, tail, count = store.tree, plan.tail, plan.tail_tokens
    wants_state = plan.wants_state
    if wants_state and not store.take_snapshot_slot(tail):
        store.figures.skipped_snapshots += 1
        wants_state = False
    if tail is None and (wants_state or (count and not store.groups.is_recurrent)):
        tail = _new_tail(store, request, plan, copies)
    if tail is None:
        return None, -1
    tree.touch_tail(tail, request.priority, now)
    tree.queue(tail)
    if not wants_state:
        return tail, -1
    slot = store.snapshots.keep(tail)
    tree.set_snapshot(tail, slot)
    return tail, slot


def _new_tail(store: KeptStore, request: PublishRequest, plan: PublishPlan, copies: list[PageCopy]) -> Tail | None:
    count, path = plan.tail_tokens, plan.path
    lines = np.full(store.groups.num_lines, -1, np.int32)
    start = path.blocks * store.groups.page_tokens
    if count and store.full is not None:
        pinned = _path_pages(path)
        store.full.pool.share(pinned, 1)  # what the tail hangs behind must not go for it
        try:
            store.make_room(Wanted(pages=1), "the last page of a prompt")
            lines[0] = store.full.pool.acquire(1)[0]
        except CapacityError:
            store.figures.skipped_copies += 1
            return None
        finally:
            store.full.pool.share(pinned, -1)
        store.full.adopt(lines[:1])
        copies.append(PageCopy(0, int(request.pages[path.blocks]), int(lines[0]), count))
    path.root = store.tree.root_of(request.identity)
    run, offset = path.end
    key = request.content.key(start, start + count)
    return store.tree.add_tail(run, offset, key, count, lines)


def _path_pages(path: Path) -> NDArray[np.int32]:
    return path.line(0, 0, path.blocks)


def _keep_copies(
    store: KeptStore, request: PublishRequest, path: Path, wish: WindowWish, tail: Tail | None, copies: list[PageCopy]
) -> None:
    """Copy what a window group lacks, all or nothing."""
    line, page = 1 + wish.window, store.groups.page_tokens
    pool = store.windows[wish.window]
    kept = {slot for slot in path.line(line, min(wish.first_block, path.blocks), path.blocks).tolist() if slot >= 0}
    has_partial = wish.partial_source >= 0 and tail is not None
    if not store.take_window_slots(wish.window, len(wish.blocks) + has_partial, kept):
        store.figures.skipped_copies += 1
        return
    owners: list[tuple[Run | Tail, int, int, int]] = []
    for block, source in zip(wish.blocks.tolist(), wish.sources.tolist(), strict=True):
        owners.append((*path.place(block), source, page))
    if has_partial and tail is not None:
        owners.append((tail, 0, wish.partial_source, tail.tokens))
    for node, place, source, tokens in owners:
        slot = pool.keep((node, place))
        if isinstance(node, Tail):
            node.lines[line] = slot
        else:
            node.lines[line, place] = slot
        copies.append(PageCopy(line, source, slot, tokens))
    pool.touch(sorted(kept))
