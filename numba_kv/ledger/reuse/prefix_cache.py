"""PrefixCache: reuse of computed context behind one door. Decides and counts; moves no byte.

::

    plan = cache.lookup(identity, content)      pure
    lease = cache.acquire(plan)                 pages are held, room is made; all or nothing
    ...                                         the row takes lease.plan.pages; copies are enqueued
    lease.copied(); lease.handed_over()
    done = cache.publish(request)               at chunk ends; done.copies are enqueued
    ...                                         the row retires: its pages are dropped as ever
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.errors import CapacityError, InputError, StateError
from numba_kv.geometry import ceil_div, check_count
from numba_kv.ledger.reuse.block_hash import BlockHash
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.events import BlockEvent, ReuseFigures
from numba_kv.ledger.reuse.eviction import Wanted
from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.kept_pages import KeptPages, PageClasses, SharedPages
from numba_kv.ledger.reuse.lease import HeldPages, Lease, hold
from numba_kv.ledger.reuse.lookup import PrefixLookup, longest_kept
from numba_kv.ledger.reuse.path import entry
from numba_kv.ledger.reuse.publish_plan import PublishRequest
from numba_kv.ledger.reuse.publisher import Published, publish
from numba_kv.ledger.reuse.reuse_plan import Miss, MissReason, ReusePlan, WindowCopies
from numba_kv.ledger.reuse.run import Tail
from numba_kv.ledger.reuse.slots import SlotPool
from numba_kv.ledger.reuse.store import KeptStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CacheLimits", "PrefixCache"]


_NO_PAGES = np.zeros(0, np.int32)
_NO_PAGES.flags.writeable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Limits of a cache.

    Attributes
    ----------
    max_blocks : int or None
        Most blocks kept at once; None: as many as there are pages.
    whole_pages : bool
        Whether only whole pages are reused, as the reference does: then a prompt that is kept to its end computes a whole page
        again, where else it copies that page and computes one token.
    """

    max_blocks: int | None = None
    whole_pages: bool = False

    def __post_init__(self) -> None:
        if self.max_blocks is not None:
            check_count("max_blocks", self.max_blocks, 0)


class PrefixCache:
    """Kept prefixes of one model. One thread at a time.

    Parameters
    ----------
    groups : ReuseGroups
        The model.
    pool, draft_pool, window_slots, snapshot_slots, naming, on_event
        See `KeptStore`.
    limits : CacheLimits, optional
        How much is kept.
    """

    def __init__(
        self,
        groups: ReuseGroups,
        *,
        pool: SharedPages | None = None,
        draft_pool: SharedPages | None = None,
        window_slots: Sequence[tuple[int, int]] = (),
        snapshot_slots: int = 0,
        limits: CacheLimits | None = None,
        naming: BlockHash | None = None,
        on_event: Callable[[BlockEvent], None] | None = None,
    ) -> None:
        self.groups = groups
        self.limits = limits or CacheLimits()
        self._page = groups.page_tokens
        self._has_others = bool(groups.windows) or groups.is_recurrent or groups.has_draft
        # States of recurrent layers are of one length, whatever the pages: parts of pages go with them.
        self._whole_pages = self.limits.whole_pages and not groups.is_recurrent
        self.store = KeptStore(
            groups,
            pool=pool,
            draft_pool=draft_pool,
            window_slots=window_slots,
            snapshot_slots=snapshot_slots,
            naming=naming,
            on_event=on_event,
        )

    @property
    def figures(self) -> ReuseFigures:
        """Counts so far."""
        return self.store.figures

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept."""
        return self.store.tree.num_blocks

    def classes(self) -> PageClasses | None:
        """Return what the pages of the full group are; None if the model has none."""
        return self.store.full.classes() if self.store.full is not None else None

    # -- looking -------------------------------------------------------------------------------------------------------

    def lookup(self, identity: ContextIdentity, content: TokenContent, *, reuse: bool = True) -> ReusePlan:
        """Return how much of a sequence can be reused. Changes nothing.

        Parameters
        ----------
        reuse : bool
            False: a cold plan, for a request that wants nothing of others.

        Raises
        ------
        InputError
            If page sizes do not fit, or there is no token.
        """
        page, n = self._page, content.num_tokens
        if content.page_tokens != page or identity.page_tokens != page:
            raise InputError(
                f"page_tokens: {content.page_tokens} of the content and {identity.page_tokens} of the identity, "
                f"{page} of the cache"
            )
        if not n:
            raise InputError("content: no token; a sequence begins with at least one")
        if not reuse:
            return self._cold(n, Miss("all", MissReason.BYPASS, 0))
        store = self.store
        path = store.tree.match(identity, content)
        matched, tokens, misses = longest_kept(path, n, page, whole_pages=self._whole_pages)
        plan = ReusePlan(
            num_tokens=n,
            matched_tokens=matched,
            reused_tokens=tokens,
            pages=_NO_PAGES,
            draft_pages=_NO_PAGES,
            misses=misses,
            path=path,
            epochs=store.epochs(),
        )
        if self._has_others:
            self._join(plan, content)
        if store.full is not None:
            blocks, rest = divmod(plan.reused_tokens, page)
            plan.pages = path.line(0, 0, blocks)
            plan.fresh_pages = -(-n // page) - blocks
            if rest:
                plan.partial_page = entry(path.place(blocks), 0)
        return plan

    def _join(self, plan: ReusePlan, content: TokenContent) -> None:
        """Shorten a plan to what the groups beside full attention can use too, and note what they take."""
        groups, page = self.groups, self._page
        look = PrefixLookup(groups, content, plan.path, whole_pages=self.limits.whole_pages)
        (tokens, tail), misses = look.find(plan.reused_tokens)
        plan.reused_tokens = tokens
        plan.misses = tuple(sorted([*plan.misses, *misses], key=lambda miss: miss.tokens))
        if tokens:
            plan.windows = tuple(WindowCopies(*look.slots(w, tokens, tail)) for w in range(len(groups.windows)))
        if tail is not None:
            plan.tail, plan.snapshot = tail, tail.snapshot
        if groups.has_draft:
            blocks, rest = divmod(tokens, page)
            plan.draft_pages = look.draft_pages(tokens)
            plan.fresh_draft_pages = ceil_div(plan.num_tokens, page) - blocks
            if rest:
                plan.draft_partial_page = entry(plan.path.place(blocks), groups.draft_line)

    def _cold(self, num_tokens: int, miss: Miss) -> ReusePlan:
        total = ceil_div(num_tokens, self.groups.page_tokens)
        return ReusePlan(
            num_tokens=num_tokens,
            misses=(miss,),
            fresh_pages=total if self.groups.has_full else 0,
            fresh_draft_pages=total if self.groups.has_draft else 0,
        )

    def bring_back(self, identity: ContextIdentity, content: TokenContent, *, priority: int = 0, spare: int = 0) -> int:
        """Bring to the device what a sequence can reuse of `KeptStore.lower`; a lookup then finds so many tokens more.

        See `HostTier.bring_back`.
        """
        host, limits = self.store.lower, self.limits
        if host is None:
            return 0
        most, whole = limits.max_blocks, limits.whole_pages
        return host.bring_back(
            self.store, identity, content, max_blocks=most, whole_pages=whole, priority=priority, spare=spare
        )

    # -- leasing -------------------------------------------------------------------------------------------------------

    def acquire(self, plan: ReusePlan, *, priority: int = 0, extra_pages: int = 0) -> Lease:
        """Hold what a plan reuses and make room for the pages it does not; nothing, or all.

        Parameters
        ----------
        priority : int
            Of the request: what it uses is worth that much.
        extra_pages : int
            Pages that are wanted beyond those of the sequence, in each pool that has any.

        Raises
        ------
        StateError
            If the plan has become stale; look up again.
        CapacityError
            If not enough pages can be freed; carries needed, free and evictable.
        """
        store = self.store
        if plan.epochs and plan.epochs != store.epochs():  # else cold, or nothing was given up since
            self._check_current(plan)
        held: list[HeldPages] = []
        is_short = False
        if store.full is not None:
            pool = store.full.pool
            held.append(hold(pool, plan.pages))
            is_short = pool.free_pages < plan.fresh_pages + extra_pages
        if store.draft is not None:
            pool = store.draft.pool
            held.append(hold(pool, plan.draft_pages))
            is_short = is_short or pool.free_pages < plan.fresh_draft_pages + extra_pages
        has_sources = plan.has_sources
        if has_sources:
            self._hold_sources(plan, 1)
        lease = Lease(self, plan, held, has_sources)
        if is_short:
            self._make_room(lease, extra_pages)
        self._note(plan, priority)
        return lease

    def _make_room(self, lease: Lease, extra_pages: int) -> None:
        """Make room for what a lease does not hold, or give it back."""
        plan, store = lease.plan, self.store
        wanted = Wanted(
            plan.fresh_pages + extra_pages if store.full is not None else 0,
            plan.fresh_draft_pages + extra_pages if store.draft is not None else 0,
        )
        try:
            store.make_room(wanted, f"a sequence of {plan.num_tokens} tokens, {plan.reused_tokens} of them reused,")
        except CapacityError:
            lease.release()
            raise

    def admit(
        self, identity: ContextIdentity, content: TokenContent, *, reuse: bool = True, priority: int = 0, extra_pages: int = 0
    ) -> Lease:
        """Look up and acquire; a plan that finds no room because of what it reuses is made cold.

        Raises
        ------
        InputError
            See `lookup`.
        CapacityError
            If there is no room for the sequence at all; nothing was changed.
        """
        plan = self.lookup(identity, content, reuse=reuse)
        try:
            return self.acquire(plan, priority=priority, extra_pages=extra_pages)
        except CapacityError:
            if not plan.is_hit:
                raise
        cold = self._cold(content.num_tokens, Miss("all", MissReason.BYPASS, 0))
        lease = self.acquire(cold, priority=priority, extra_pages=extra_pages)
        self.figures.cold_retries += 1
        return lease

    def unpin_sources(self, plan: ReusePlan) -> None:
        """Let go of what a lease's copies are made from; `Lease.copied` calls it."""
        self._hold_sources(plan, -1)

    def _check_current(self, plan: ReusePlan) -> None:
        store = self.store
        full, draft, states, *windows = plan.epochs
        partial = np.array([plan.partial_page, plan.draft_partial_page, plan.snapshot], np.int32)
        checks: list[tuple[KeptPages | SlotPool[Any] | None, NDArray[np.int32], int]] = [
            (store.full, np.append(plan.pages, partial[0:1][partial[0:1] >= 0]), full),
            (store.draft, np.append(plan.draft_pages, partial[1:2][partial[1:2] >= 0]), draft),
            (store.snapshots, partial[2:3][partial[2:3] >= 0], states),
            *((pool, copies.slots, epoch) for pool, copies, epoch in zip(store.windows, plan.windows, windows, strict=False)),
        ]
        if not all(pool is None or pool.are_current(ids, epoch) for pool, ids, epoch in checks):
            raise StateError("acquire: the plan is stale, what it reuses was evicted since; look up again")

    def _hold_sources(self, plan: ReusePlan, count: int) -> None:
        store = self.store
        for kept, page in ((store.full, plan.partial_page), (store.draft, plan.draft_partial_page)):
            if kept is not None and page >= 0:
                kept.pool.shares[page] += count
        if plan.windows:
            for pool, copies in zip(store.windows, plan.windows, strict=True):
                slots = copies.slots.tolist()
                pool.pin(slots) if count > 0 else pool.unpin(slots)
        if plan.snapshot >= 0:
            store.snapshots.pin([plan.snapshot]) if count > 0 else store.snapshots.unpin([plan.snapshot])

    def _note(self, plan: ReusePlan, priority: int) -> None:
        store, path = self.store, plan.path
        figures = store.figures
        now = store.tree.tick()
        store.tree.touch(path, priority, now)
        node = plan.tail or (path.partial[0] if path.partial is not None and plan.reused_tokens else None)
        if isinstance(node, Tail):
            store.tree.touch_tail(node, priority, now)
        if plan.windows:
            for pool, copies in zip(store.windows, plan.windows, strict=True):
                pool.touch(copies.slots.tolist())
        if plan.snapshot >= 0:
            store.snapshots.touch([plan.snapshot])
        figures.lookups += 1
        figures.hits += plan.reused_tokens > 0
        figures.looked_up_tokens += plan.num_tokens
        figures.matched_tokens += plan.matched_tokens
        figures.reused_tokens += plan.reused_tokens
        if plan.misses and figures.misses is not None:
            part, reason, _ = plan.misses[0]
            key = part + ": " + reason  # its value: a reason is a string
            figures.misses[key] = figures.misses.get(key, 0) + 1

    # -- keeping -------------------------------------------------------------------------------------------------------

    def publish(self, request: PublishRequest) -> Published:
        """Keep what a sequence has computed, as far as there is room. The first page published for a block stays.

        Raises
        ------
        InputError, StateError
            If tokens, pages and rings do not fit, or a page is kept for something else; nothing was changed.
        """
        return publish(self.store, request, self.limits.max_blocks)

    def make_room(self, pages: int, *, draft_pages: int = 0) -> None:
        """Evict until so many pages are free.

        Raises
        ------
        CapacityError
            If not enough can go; nothing was changed.
        """
        self.store.make_room(Wanted(pages, draft_pages), "a step")

    def clear(self) -> None:
        """Give up everything that no row reads."""
        self.store.clear()

    def audit(self) -> None:
        """Check that the index and the pools agree.

        Raises
        ------
        InvariantError
            Naming what does not.
        """
        self.store.check()
