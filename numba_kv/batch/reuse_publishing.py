"""PrefixPublishing: what rows have computed becomes what is kept.

K and V of a step are written after `Batch.step` has returned, so a call publishes what earlier steps have appended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.ledger.reuse.publish_plan import PublishRequest, RingView
from numba_kv.ledger.sharing import whole_ring

if TYPE_CHECKING:
    from numba_kv.batch.kept_states import KeptStates
    from numba_kv.batch.placement import RowPlacement
    from numba_kv.batch.reuse_context import SequenceContext
    from numba_kv.batch.reuse_contexts import SequenceContexts
    from numba_kv.batch.sequence import Sequence
    from numba_kv.batch.stepper import Stepper
    from numba_kv.ledger.reuse.prefix_cache import PrefixCache
    from numba_kv.ledger.reuse.publisher import Published

__all__ = ["PrefixPublishing"]

#: A sequence's context, its row, and up to which tokens it is published, with whether these are points.
_Work = tuple["SequenceContext", int, list[tuple[int, bool]]]


class PrefixPublishing:
    """Publishes what a batch's rows hold. Owns nothing.

    Parameters
    ----------
    cache : PrefixCache
        Decides what is kept, and where.
    stepper, placement : Stepper, RowPlacement
        Of the batch.
    contexts : SequenceContexts
        What is known of its sequences.
    states : KeptStates or None
        Snapshots, where the model has recurrent layers.
    """

    def __init__(
        self,
        cache: PrefixCache,
        stepper: Stepper,
        placement: RowPlacement,
        contexts: SequenceContexts,
        states: KeptStates | None,
    ) -> None:
        self._cache = cache
        self._stepper = stepper
        self._placement = placement
        self._contexts = contexts
        self._states = states
        self._page = stepper.plan.config.page_tokens
        self._has_points = bool(cache.groups.windows) or cache.groups.is_recurrent

    def publish_due(self) -> None:
        """Publish what earlier steps have appended. Stream: enqueues copies of tails, one copy and one kernel for floors."""
        stepper, contexts = self._stepper, self._contexts
        stepper.begin()
        ledger, floors = stepper.ledger, dict[int, int]()
        due = sorted(contexts.due, key=lambda one: one.generation)
        for context, row, steps in self._work(due, is_last=False):
            for tokens, is_point in steps:
                done = self._publish(context, row, tokens, is_point)
                self._take_canonical(row, done)
                floors[row] = max(floors.get(row, 0), self._floor(done))
        contexts.due.difference_update([s for s in due if ledger.lo[s.row] >= contexts[s].prompt_tokens])
        raised = {row: floor for row, floor in floors.items() if floor > ledger.floor[row]}
        if raised:
            stepper.set_floors(raised)

    def publish_last(self, sequences: Iterable[Sequence]) -> None:
        """Publish all of sequences that are about to leave their rows. Stream: enqueues copies of tails."""
        leaving = [s for s in sequences if s in self._contexts]
        if not leaving:
            return
        self._stepper.begin()
        ledger = self._stepper.ledger
        for context, row, steps in self._work(leaving, is_last=True):
            for tokens, is_point in steps:
                done = self._publish(context, row, tokens, is_point)
                # The device forgets the row, so only the host need know.
                ledger.floor[row] = max(int(ledger.floor[row]), self._floor(done))

    def _work(self, sequences: Iterable[Sequence], *, is_last: bool) -> list[_Work]:
        """Return what there is to publish: context, row, and up to which tokens, as `SequenceContext.steps`."""
        ledger, unsettled = self._stepper.ledger, 0 if is_last else self._stepper.plan.config.max_step_tokens
        found: list[_Work] = []
        for sequence in sequences:
            context, row = self._contexts[sequence], sequence.row
            length = int(ledger.lo[row])
            steps = context.steps(length, settled=length - unsettled, is_last=is_last, has_points=self._has_points)
            if steps:
                found.append((context, row, steps))
        if found:  # pages are shared first, and the device is told by the floors that follow
            self._stepper.start_work()
        return found

    def _floor(self, done: Published) -> int:
        """Return up to where a row's tokens lie in pages that the cache holds too."""
        return done.blocks * self._page if self._cache.groups.has_full else 0

    def _publish(self, context: SequenceContext, row: int, tokens: int, is_point: bool) -> Published:
        ledger, plan, policy = self._stepper.ledger, self._stepper.plan, context.policy
        length = int(ledger.lo[row])
        has_state = is_point and self._states is not None and tokens == length == ledger.hi[row]
        if plan.config.max_verify_tokens:  # nobody knows whether what was verified has been committed
            has_state = has_state and tokens <= context.prompt_tokens
        rings = [(g, *whole_ring(ledger, group, row, length)) for g, group in enumerate(plan.groups) if g]
        done = self._cache.publish(
            PublishRequest(
                identity=context.identity,
                content=context.content,
                tokens=tokens,
                pages=ledger.pages[row, : ledger.leased[row]],
                rings=tuple(self._ring(row, *ring) for ring in rings),
                is_point=is_point,
                has_state=bool(has_state),
                with_tail=is_point and policy.tails and tokens % self._page > 0,
                priority=policy.priority,
            )
        )
        context.published = tokens
        for g in sorted({copy.group for copy in done.copies}):
            self._placement.copy(g, [(copy.source, copy.target) for copy in done.copies if copy.group == g])
        if self._states is not None and done.snapshot >= 0:
            self._states.capture(row, done.snapshot)
        return done

    def _ring(self, row: int, g: int, first: int, end: int) -> RingView:
        ring = self._stepper.ledger.rings[g][row]
        return RingView(first, ring[np.arange(first, end) % len(ring)])

    def _take_canonical(self, row: int, done: Published) -> None:
        """Give a row the pages that were published first, and its own ones back: shared pages are always a row's first."""
        if not len(done.duplicates):
            return
        ledger = self._stepper.ledger
        ids = ledger.pages[row, : ledger.leased[row]].copy()
        own = ids[done.duplicates]
        ids[done.duplicates] = done.canonical
        first = int(done.duplicates[0])
        ledger.pool.share(done.canonical, 1)
        self._placement.map_pages({row: (first, ids[first:])})
        ledger.pool.drop(own)
