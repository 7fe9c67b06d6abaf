"""KeptStore: the tree together with the pools that its entries point into; the only place that lets go of anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.errors import CapacityError, InputError, StateError
from numba_kv.ledger.reuse.block_hash import BlockHash
from numba_kv.ledger.reuse.events import BlockEvent, BlocksRemoved, BlocksStored, Medium, ReuseFigures
from numba_kv.ledger.reuse.eviction import EvictionPlan, Wanted, plan_eviction
from numba_kv.ledger.reuse.groups import SNAPSHOTS, ReuseGroups
from numba_kv.ledger.reuse.kept_pages import KeptPages, SharedPages
from numba_kv.ledger.reuse.run import Run, Tail
from numba_kv.ledger.reuse.slots import SlotPool
from numba_kv.ledger.reuse.store_check import check_store
from numba_kv.ledger.reuse.tree import PrefixTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.ledger.reuse.content import TokenContent
    from numba_kv.ledger.reuse.host_tier import HostTier
    from numba_kv.ledger.reuse.identity import ContextIdentity
    from numba_kv.ledger.reuse.path import Path

__all__ = ["KeptStore"]


class KeptStore:
    """Blocks, tails, copies and snapshots, and what they hold.

    Parameters
    ----------
    groups : ReuseGroups
        The model.
    pool, draft_pool : SharedPages or None
        Pages of the full group and of the draft, where the model has them.
    window_slots : sequence of (int, int)
        First id and number of the pages that each window group has for copies.
    snapshot_slots : int
        Slots for recurrent states, from 0.
    naming : BlockHash or None
        Names blocks.
    on_event : callable or None
        Is told of blocks that come and go.
    medium : {"device", "host"}
        Where the pools are, for events. A store on the host has gaps: a block may stand in its tree without a page, because it
        is on the device.

    Attributes
    ----------
    lower : HostTier or None
        Takes what is given up for something else.
    """

    def __init__(
        self,
        groups: ReuseGroups,
        *,
        pool: SharedPages | None = None,
        draft_pool: SharedPages | None = None,
        window_slots: Sequence[tuple[int, int]] = (),
        snapshot_slots: int = 0,
        naming: BlockHash | None = None,
        on_event: Callable[[BlockEvent], None] | None = None,
        medium: Medium = "device",
    ) -> None:
        if groups.has_full != (pool is not None) or groups.has_draft != (draft_pool is not None):
            raise InputError("pool, draft_pool: give them if the model has full attention, and a draft with its own pages")
        if len(window_slots) != len(groups.windows):
            raise InputError(f"window_slots: {len(window_slots)} given, the model has {len(groups.windows)} window groups")
        self.groups = groups
        self.full = None if pool is None else KeptPages(pool)
        self.draft = None if draft_pool is None else KeptPages(draft_pool)
        self.windows: list[SlotPool[tuple[Run | Tail, int]]] = [SlotPool(first, count) for first, count in window_slots]
        self.snapshots: SlotPool[Tail] = SlotPool(0, snapshot_slots)
        self.tree = PrefixTree(groups.page_tokens, groups.num_lines, naming)
        self.figures = ReuseFigures(misses={})
        self.on_event = on_event
        self.medium: Medium = medium
        self.has_gaps = medium == "host"
        self.lower: HostTier | None = None
        self._loose: list[Run] = []  # runs that perhaps end with blocks of which nothing is held

    def epochs(self) -> tuple[int, ...]:
        """Return the epochs of all pools: what is planned now is current as long as they are these."""
        full = 0 if self.full is None else self.full.epoch
        draft = 0 if self.draft is None else self.draft.epoch
        windows = [pool.epoch for pool in self.windows] if self.windows else ()
        return full, draft, self.snapshots.epoch, *windows

    # -- room ----------------------------------------------------------------------------------------------------------

    def plan_room(self, wanted: Wanted) -> EvictionPlan | None:
        """Return what goes so that `wanted` becomes free; None if it cannot. Changes nothing."""
        return plan_eviction(self.tree, wanted, self.full, self.draft, self.groups.draft_line, self._is_read)

    def make_room(self, wanted: Wanted, purpose: str) -> None:
        """Evict until so many pages are free, or change nothing.

        Raises
        ------
        CapacityError
            If not enough can go; carries needed, free and evictable pages.
        """
        short = Wanted(
            wanted.pages - (self.full.pool.free_pages if self.full else 0),
            wanted.draft_pages - (self.draft.pool.free_pages if self.draft else 0),
            wanted.blocks,
        )
        if short.is_nothing:
            return
        plan = self.plan_room(short)
        if plan is not None:
            self.evict(plan)
            return
        kept, number = (self.full, wanted.pages) if short.pages > 0 or self.draft is None else (self.draft, wanted.draft_pages)
        free = kept.pool.free_pages if kept else 0
        most = kept.most_evictable if kept else 0
        raise CapacityError(
            f"pages: {purpose} needs {number}, {free} are free and at most {most} can be evicted; retire a sequence or "
            "plan with more pages",
            needed=number,
            free=free,
            evictable=most,
        )

    def evict(self, plan: EvictionPlan) -> None:
        """Do what an eviction plan says.

        Raises
        ------
        StateError
            If blocks came or went since it was made.
        """
        if plan.version != self.tree.version:
            raise StateError("eviction: the plan is stale, blocks came or went since; plan again")
        now = self.tree.tick()
        for node in plan.in_use:
            if isinstance(node, Tail):
                self.tree.touch_tail(node, node.priority, now)
            else:
                node.recency.touch(node.size, node.recency.last(node.size)[0][0], now)
        for tail in plan.tails:
            self.drop_tail(tail)
            self.figures.evicted_tails += 1
        for run, size in plan.cuts:
            self._cut(run, size)
        self._settle()
        self.tree.forget_empty_roots()

    def make_most_room(self, pages: int, new_blocks: int, max_blocks: int | None) -> bool:
        """Evict until `pages` are free, and `new_blocks` more can be kept; return whether they are, and can.

        If not all can become free, a store with gaps evicts what it can, another one nothing.
        """
        pool = None if self.full is None else self.full.pool
        over = 0 if max_blocks is None else self.tree.num_blocks + new_blocks - max_blocks
        short = Wanted(pages - (0 if pool is None else pool.free_pages), 0, over)
        if short.is_nothing:
            return True
        plan = self.plan_room(short)
        is_enough = plan is not None
        if plan is None and self.has_gaps:
            args = (self.full, self.draft, self.groups.draft_line, self._is_read)
            plan = plan_eviction(self.tree, short, *args, or_less=True)
        if plan is not None:
            self.evict(plan)
        return is_enough

    def clear(self) -> None:
        """Give up everything that no row reads; a tier below too."""
        lower, self.lower = self.lower, None
        try:
            self._clear()
        finally:
            self.lower = lower
        if lower is not None:
            lower.store.clear()

    def _clear(self) -> None:
        wanted = Wanted(blocks=self.tree.num_blocks + 1)
        args = (self.tree, wanted, self.full, self.draft, self.groups.draft_line, self._is_read)
        plan = plan_eviction(*args, or_less=True)
        if plan is not None:
            self.evict(plan)
        for tail in [tail for _, tail in self.snapshots.kept()]:
            if not self._is_pinned(tail):
                self.drop_tail(tail)
        for tail in [tail for tail in self.tree.tails() if not self._is_pinned(tail) and not self._is_leased(tail)]:
            self.drop_tail(tail)
        self._settle()
        self.tree.forget_empty_roots()

    def take_window_slots(self, window: int, count: int, protected: set[int]) -> bool:
        """See to it that `count` slots for copies are free; False, and nothing changed, if they cannot be."""
        pool = self.windows[window]
        missing = count - pool.num_free
        if missing > 0:
            victims = pool.oldest(missing, protected)
            if len(victims) < missing:
                return False
            if self.lower is not None:
                self.lower.take_copies(self, window, victims)
            for slot in victims:
                self._forget_copy(window, slot)
                self.figures.evicted_copies += 1
            self._settle()
        return True

    def take_snapshot_slot(self, protected: Tail | None) -> bool:
        """See to it that a slot for a snapshot is free; False, and nothing changed, if it cannot be."""
        if self.snapshots.num_free:
            return True
        kept = {protected.snapshot} if protected is not None else set()
        victims = self.snapshots.oldest(1, kept)
        if not victims:
            return False
        tail = self.snapshots.owner(victims[0])
        self.figures.evicted_snapshots += 1
        if self._is_leased(tail):
            if self.lower is not None:
                self.lower.take_tail(self, tail)
            self._forget_snapshot(tail)
        else:
            self.drop_tail(tail)
        self._settle()
        return True

    def hold(self, ids: Mapping[int, Sequence[int]], count: int) -> None:
        """Hold pages, copies and snapshots, by line, against eviction (1), or no more (-1)."""
        for line, held in ids.items():
            if line == 0 and self.full is not None:
                self.full.pool.share(np.array(held, np.int32), count)
                continue
            pool: SlotPool[Any] = self.snapshots if line == SNAPSHOTS else self.windows[line - 1]
            pool.pin(held) if count > 0 else pool.unpin(held)

    # -- letting go ----------------------------------------------------------------------------------------------------

    def drop_tail(self, tail: Tail) -> None:
        """Forget a tail and give up what it holds."""
        if self.lower is not None:
            self.lower.take_tail(self, tail)
        if tail.snapshot >= 0:
            self._forget_snapshot(tail)
        self.tree.remove_tail(tail)
        self._let_go(tail.lines[:, None])
        self._loose.append(tail.run)

    def _cut(self, run: Run, size: int) -> None:
        if self.lower is not None:
            self.lower.take_blocks(self, run, size)
        lines = run.lines[:, size : run.size].copy()
        variants = [page for (block, _), page in run.variants.items() if block >= size]
        is_held = (lines[0] if self.full is not None else lines.max(axis=0)) >= 0
        names = tuple(name for name, held in zip(run.names[size:], is_held.tolist(), strict=False) if held or not self.has_gaps)
        self.figures.evicted_blocks += run.size - size
        for tail in self.tree.cut(run, size):
            if tail.snapshot >= 0:
                self.snapshots.give_up(tail.snapshot)
                self.figures.evicted_snapshots += 1
            self._let_go(tail.lines[:, None])
        self._let_go(lines)
        if variants and self.draft is not None:
            self.draft.let_go(np.array(variants, np.int32))
        self._tell_removed(names)
        self._loose += [run] if size or run.parent is None else [run.parent]

    def _let_go(self, lines: NDArray[np.int32]) -> None:
        if self.full is not None:
            self.full.let_go(lines[0][lines[0] >= 0])
        for w, pool in enumerate(self.windows):
            for slot in lines[1 + w][lines[1 + w] >= 0].tolist():
                pool.give_up(slot)
        if self.draft is not None:
            pages = lines[self.groups.draft_line]
            self.draft.let_go(pages[pages >= 0])

    def _forget_copy(self, window: int, slot: int) -> None:
        node, block = self.windows[window].give_up(slot)
        if isinstance(node, Tail):
            node.lines[1 + window] = -1
            if self.has_gaps and node.snapshot < 0 and (node.lines < 0).all():
                self.drop_tail(node)
        else:
            node.lines[1 + window, block] = -1
            if self.has_gaps and self.full is None and (node.lines[:, block] < 0).all():
                self._tell_removed(tuple(node.names[block : block + 1]))
            self._loose.append(node)

    def _forget_snapshot(self, tail: Tail) -> None:
        self.snapshots.give_up(tail.snapshot)
        self.tree.set_snapshot(tail, -1)

    def _settle(self) -> None:
        """End a change: what is below gets its bytes, and nothing stands in the tree for nothing."""
        if self.lower is not None:
            self.lower.flush()
        loose, self._loose = self._loose, []
        while loose and self.has_gaps:
            run = loose.pop()
            size = run.size
            while size and size not in run.branches and (run.lines[:, size - 1] < 0).all():
                size -= 1
            if size < run.size:
                self.tree.cut(run, size)
                loose += [run.parent] if not size and run.parent is not None else []
        if self.has_gaps:
            self.tree.forget_empty_roots()

    def trim(self, run: Run) -> None:
        """Forget the blocks at the end of a run, and of those before it, of which nothing is held."""
        self._loose.append(run)
        self._settle()

    # -- what is told ------------------------------------------------------------------------------------------------

    def _tell_removed(self, names: tuple[bytes, ...]) -> None:
        if names and self.on_event is not None:
            self.on_event(BlocksRemoved(names, self.medium))

    def tell_stored(self, identity: ContextIdentity, content: TokenContent, path: Path, start: int, stop: int) -> None:
        """Tell that the blocks [start, stop) of a path are here now."""
        if self.on_event is None:
            return
        names = [name for run, size in path.segments for name in run.names[:size]]
        parent = names[start - 1] if names and start else None
        self.on_event(BlocksStored(identity, parent, tuple(names[start:stop]), content.blocks(start, stop).copy(), self.medium))

    # -- state ---------------------------------------------------------------------------------------------------------

    def _is_read(self, node: Run | Tail, begin: int, stop: int) -> NDArray[np.bool_]:
        """Return which blocks copies are being made from, or restored to."""
        found = np.zeros(stop - begin, bool)
        for w, pool in enumerate(self.windows):
            if pool.num_pinned:
                slots = node.lines[1 + w : 2 + w] if isinstance(node, Tail) else node.lines[1 + w, begin:stop]
                found |= np.array([pool.is_pinned(slot) for slot in slots.tolist()], bool)
        if self.snapshots.num_pinned:
            if isinstance(node, Tail):
                found[0] |= self.snapshots.is_pinned(node.snapshot)
            else:
                for offset in node.snapshots:
                    tails = [n for n in node.branches[offset].nodes if isinstance(n, Tail)] if begin < offset <= stop else []
                    if any(self._is_pinned(tail) for tail in tails):
                        found[offset - begin - 1] = True
        return found

    def _is_leased(self, tail: Tail) -> bool:
        return bool(self.full is not None and tail.lines[0] >= 0 and self.full.pool.shares[tail.lines[0]] > 0)

    def _is_pinned(self, tail: Tail) -> bool:
        slots = ((pool, int(tail.lines[1 + w])) for w, pool in enumerate(self.windows))
        return self.snapshots.is_pinned(tail.snapshot) or any(pool.is_pinned(slot) for pool, slot in slots)

    def check(self) -> None:
        """Check that the tree and the pools agree, block by block, and those of the tier below.

        Raises
        ------
        InvariantError
            Naming what does not.
        """
        check_store(self)
        if self.lower is not None:
            self.lower.check(self)
