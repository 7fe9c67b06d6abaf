"""KeptStore: the tree together with the pools that its entries point into; the only place that lets go of anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import CapacityError, InputError, InvariantError, StateError
from numba_kv.ledger.reuse.block_hash import BlockHash
from numba_kv.ledger.reuse.events import BlockEvent, BlocksRemoved, ReuseFigures
from numba_kv.ledger.reuse.eviction import EvictionPlan, Wanted, plan_eviction
from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.kept_pages import KeptPages, SharedPages
from numba_kv.ledger.reuse.run import Run, Tail
from numba_kv.ledger.reuse.slots import SlotPool
from numba_kv.ledger.reuse.tree import PrefixTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
        self.tree.forget_empty_roots()

    def clear(self) -> None:
        """Give up everything that no row reads."""
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
        self.tree.forget_empty_roots()

    def take_window_slots(self, window: int, count: int, protected: set[int]) -> bool:
        """See to it that `count` slots for copies are free; False, and nothing changed, if they cannot be."""
        pool = self.windows[window]
        missing = count - pool.num_free
        if missing > 0:
            victims = pool.oldest(missing, protected)
            if len(victims) < missing:
                return False
            for slot in victims:
                self._forget_copy(window, slot)
                self.figures.evicted_copies += 1
        return True

    def take_snapshot_slot(self, protected: Tail | None) -> bool:
        """See to it that a slot for a snapshot is free; False, and nothing changed, if it cannot be."""
        if self.snapshots.num_free:
            return True
        kept = {protected.snapshot} if protected is not None else set()
        victims = self.snapshots.oldest(1, kept)
        if not victims:
            return False
        tail = dict(self.snapshots.kept())[victims[0]]
        self.figures.evicted_snapshots += 1
        if self._is_leased(tail):
            self._forget_snapshot(tail)
        else:
            self.drop_tail(tail)
        return True

    # -- letting go ----------------------------------------------------------------------------------------------------

    def drop_tail(self, tail: Tail) -> None:
        """Forget a tail and give up what it holds."""
        if tail.snapshot >= 0:
            self._forget_snapshot(tail)
        self.tree.remove_tail(tail)
        self._let_go(tail.lines[:, None])

    def _cut(self, run: Run, size: int) -> None:
        lines = run.lines[:, size : run.size].copy()
        variants = [page for (block, _), page in run.variants.items() if block >= size]
        names = tuple(run.names[size:])
        self.figures.evicted_blocks += run.size - size
        for tail in self.tree.cut(run, size):
            if tail.snapshot >= 0:
                self.snapshots.give_up(tail.snapshot)
                self.figures.evicted_snapshots += 1
            self._let_go(tail.lines[:, None])
        self._let_go(lines)
        if variants and self.draft is not None:
            self.draft.let_go(np.array(variants, np.int32))
        if names and self.on_event is not None:
            self.on_event(BlocksRemoved(names))

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
        else:
            node.lines[1 + window, block] = -1

    def _forget_snapshot(self, tail: Tail) -> None:
        self.snapshots.give_up(tail.snapshot)
        self.tree.set_snapshot(tail, -1)

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
        """Check that the tree and the pools agree, block by block.

        Raises
        ------
        InvariantError
            Naming what does not.
        """
        pages: list[list[int]] = [[] for _ in range(self.groups.num_lines)]
        blocks, held = 0, {}
        for run in self.tree.runs():
            blocks += run.size
            self._check_run(run)
            for line in range(self.groups.num_lines):
                pages[line] += [p for p in run.lines[line, : run.size].tolist() if p >= 0]
            if self.draft is not None:
                pages[self.groups.draft_line] += run.variants.values()
        for tail in self.tree.tails():
            for line in range(self.groups.num_lines):
                pages[line] += [page for page in [int(tail.lines[line])] if page >= 0]
            if tail.snapshot >= 0:
                held[tail.snapshot] = tail
        if blocks != self.tree.num_blocks:
            raise InvariantError(f"index: {blocks} blocks are kept, {self.tree.num_blocks} counted")
        if self.full is not None:
            self.full.check(np.array(pages[0], np.int32), "full pages")
        if self.draft is not None:
            self.draft.check(np.array(pages[self.groups.draft_line], np.int32), "draft pages")
        for w, pool in enumerate(self.windows):
            pool.check()
            if sorted(pages[1 + w]) != sorted(slot for slot, _ in pool.kept()):
                raise InvariantError(f"window {w}: the index and the pool disagree on which copies are kept")
        self.snapshots.check()
        if held != dict(self.snapshots.kept()):
            raise InvariantError("snapshots: the index and the pool disagree on which are kept")

    def _check_run(self, run: Run) -> None:
        if not run.is_root and not run.size:
            raise InvariantError(f"{run} is empty and still hangs in the tree")
        if self.full is not None and (run.lines[0, : run.size] < 0).any():
            raise InvariantError(f"{run}: a block has no page")
        if self.tree.naming is not None and len(run.names) != run.size:
            raise InvariantError(f"{run}: {len(run.names)} names for {run.size} blocks")
        for offset, branch in run.branches.items():
            blockers = sum(isinstance(node, Run) or node.holds_pages for node in branch.nodes)
            runs = {node.first: node for node in branch.nodes if isinstance(node, Run)}
            if offset > run.size or branch.blockers != blockers or branch.keys != sorted(branch.keys) or not branch.keys:
                raise InvariantError(f"{run}: what hangs behind block {offset} is wrong")
            if branch.runs != runs:
                raise InvariantError(f"{run}: what hangs behind block {offset} is not found by its tokens")
            if (blockers > 0) != (offset in run.blocking):
                raise InvariantError(f"{run}: what hangs behind block {offset} is not noted")
        if self.tree.can_go(run) and not run.is_queued:
            raise InvariantError(f"{run}: could be evicted and is not queued")
