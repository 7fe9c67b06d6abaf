"""PrefixAdmission: what is kept of prompts' beginnings becomes the beginning of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import CapacityError
from numba_kv.ledger.leases import plan_room
from numba_kv.ledger.reuse.content import MediaSpan, TokenContent
from numba_kv.ledger.sharing import freed_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.kept_states import KeptStates
    from numba_kv.batch.placement import RowPlacement
    from numba_kv.batch.stepper import Stepper
    from numba_kv.ledger.reuse.identity import ContextIdentity
    from numba_kv.ledger.reuse.lease import Lease
    from numba_kv.ledger.reuse.policy import PublishPolicy
    from numba_kv.ledger.reuse.prefix_cache import PrefixCache
    from numba_kv.ledger.reuse.reuse_plan import ReusePlan

__all__ = ["Admission", "PrefixAdmission"]


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A sequence that is admitted by its tokens.

    Attributes
    ----------
    identity, content : ContextIdentity, TokenContent
        What it is.
    policy : PublishPolicy
        What it reuses and leaves behind.
    most : int or None
        Most tokens that it may reuse.
    """

    identity: ContextIdentity
    content: TokenContent
    policy: PublishPolicy
    most: int | None = None

    def capped(self, most: int | None) -> Admission:
        """Return the same with at most so many tokens to reuse; None: as many as before."""
        if most is None or (self.most is not None and self.most <= most):
            return self
        return replace(self, most=most)


class PrefixAdmission:
    """Starts rows of a batch with what is kept. Owns nothing.

    Parameters
    ----------
    cache : PrefixCache
        What is kept.
    stepper, placement : Stepper, RowPlacement
        Of the batch.
    states : KeptStates or None
        Snapshots, where the model has recurrent layers.
    """

    def __init__(self, cache: PrefixCache, stepper: Stepper, placement: RowPlacement, states: KeptStates | None) -> None:
        self._cache = cache
        self._stepper = stepper
        self._placement = placement
        self._states = states
        self._page = stepper.plan.config.page_tokens
        self._has_points = bool(cache.groups.windows) or cache.groups.is_recurrent

    def lease(self, leaving: list[int], admissions: Sequence[Admission | None]) -> list[Lease | None]:
        """Return a lease of the longest prefix for which there is room, for each admission in turn; all or none.

        Pages that only later steps want are leased by these. For the beginning of a partly used page a page is promised
        now; where there is none, that part is computed anew.

        Parameters
        ----------
        leaving : list of int
            Rows that become empty before the leases are used.
        admissions : sequence of Admission or None
            What joins; None: nobody knows, so nothing is reused for it.

        Stream: enqueues copies of what goes to the host, and comes from there.
        """
        self._stepper.begin()
        self._stepper.check_can_change()
        leases: list[Lease | None] = []
        promised = 0  # free pages that earlier leases are going to take
        try:
            for admission in admissions:
                leases.append(None if admission is None else self._lease(leaving, admission, promised))
                promised += leases[-1] is not None and leases[-1].plan.partial_page >= 0
        except BaseException:
            for lease in leases:
                if lease is not None:
                    lease.release()
            raise
        return leases

    def find(self, admission: Admission) -> ReusePlan:
        """Return what an admission can reuse. Changes nothing."""
        content, policy, most = admission.content, admission.policy, admission.most
        if most is None or most >= content.num_tokens - 1:
            return self._cache.lookup(admission.identity, content, reuse=policy.reuse)
        plan = self._cache.lookup(admission.identity, _first(content, most + 1), reuse=policy.reuse and most > 0)
        path = self._cache.store.tree.match(admission.identity, content)
        matched = path.blocks * self._page + path.partial_tokens if policy.reuse else 0
        return replace(plan, num_tokens=content.num_tokens, matched_tokens=matched)

    def bring_back(self, admission: Admission, spare: int = 0) -> None:
        """Bring what an admission can reuse of the host to the device; `spare` pages stay free."""
        content, most = admission.content, admission.most
        if admission.policy.reuse and most != 0:
            wanted = content if most is None or most >= content.num_tokens - 1 else _first(content, most + 1)
            self._cache.bring_back(admission.identity, wanted, priority=admission.policy.priority, spare=spare)

    def _lease(self, leaving: list[int], admission: Admission, promised: int) -> Lease:
        cache, ledger, policy = self._cache, self._stepper.ledger, admission.policy
        free_later = freed_pages(ledger, leaving) if leaving else 0
        self.bring_back(admission, max(0, promised - free_later))
        plan = self.find(admission)
        fresh = promised + 1 if plan.partial_page >= 0 else 0
        wanted = replace(plan, fresh_pages=max(0, fresh - free_later))
        try:
            return cache.acquire(wanted, priority=policy.priority)
        except CapacityError:
            pass
        try:
            leases = plan_room(ledger, fresh, "the first page of a sequence", leaving=leaving)
        except CapacityError:
            cache.figures.cold_retries += 1
            if self._has_points:  # windows and states are those of this length
                less = replace(self.find(replace(admission, most=0)), fresh_pages=0)
            else:
                less = replace(wanted, partial_page=-1, fresh_pages=0, reused_tokens=len(plan.pages) * self._page)
            return cache.acquire(less, priority=policy.priority)
        if leases is not None:
            self._stepper.move_pages(leases)
        return cache.acquire(wanted, priority=policy.priority)

    def fill(self, rows: list[int], leases: Sequence[Lease | None]) -> None:
        """Make fresh rows what the plans of their leases say.

        Stream: for all that reuse anything together one copy and one kernel for lengths, and for each block of page ids; with
        parts of pages or windows one copy and one kernel for each slab; two kernels for each snapshot.
        """
        made = [(row, lease) for row, lease in zip(rows, leases, strict=True) if lease is not None]
        hits = [(row, lease.plan) for row, lease in made if lease.plan.is_hit]
        ledger, placement = self._stepper.ledger, self._placement
        maps: dict[int, tuple[int, NDArray[np.int32]]] = {}
        copies: list[list[tuple[int, int]]] = [[] for _ in self._stepper.plan.groups]
        places = []
        for row, plan in hits:
            ids = plan.pages
            ledger.floor[row] = len(ids) * self._page
            ledger.set_base(row, plan.reused_tokens)
            if plan.partial_page >= 0:
                own = ledger.pool.acquire(1)
                copies[0].append((plan.partial_page, int(own[0])))
                ids = np.append(ids, own).astype(np.int32)
            if len(ids):
                maps[row] = 0, ids
            for g, window in enumerate(plan.windows, 1):
                ring = ledger.rings[g][row]
                at = (window.first_block + np.arange(len(window.slots))) % len(ring)
                copies[g] += zip(window.slots.tolist(), ring[at].tolist(), strict=True)
            begins = np.array([0, *(window.first_block for window in plan.windows)], np.int64)
            places.append((row, plan.reused_tokens, plan.reused_tokens, begins))
            self._stepper.stats.rotated_pages -= int(begins.sum())  # pages that this row's windows did not leave
        if hits:
            placement.map_pages(maps)
            placement.place(places)
            for g, pairs in enumerate(copies):
                if pairs:
                    placement.copy(g, pairs)
        for row, plan in hits:
            if self._states is not None:
                self._states.restore(row, plan.snapshot)
        for _, lease in made:
            lease.copied()
            lease.handed_over()


def _first(content: TokenContent, tokens: int) -> TokenContent:
    """Return the first tokens of a content; an item that is cut is as long as what is left of it."""
    media = [span for span in content.media if span.start < tokens]
    if media and media[-1].stop > tokens:
        media[-1] = MediaSpan(media[-1].start, tokens - media[-1].start, media[-1].digest)
    return TokenContent(content.page_tokens, content.tokens[:tokens], media)
