"""BatchReuse: joins a batch's rows to the cache of kept prefixes.

The cache decides and counts on the host. Here its decisions become pages of rows, copies and floors, and the batch's tokens
become what is published. K and V of a step are written after `Batch.step` has returned, so a call publishes what earlier
steps have appended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.batch.kept_states import KeptStates
from numba_kv.batch.reuse_context import SequenceContext
from numba_kv.batch.reuse_limits import has_variants
from numba_kv.context.engine_identity import engine_identity, row_identity
from numba_kv.errors import CapacityError, InputError
from numba_kv.kernels.block_names import with_compiled_chain
from numba_kv.ledger.leases import plan_room
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.eviction import Wanted
from numba_kv.ledger.reuse.groups import reuse_groups
from numba_kv.ledger.reuse.prefix_cache import PrefixCache
from numba_kv.ledger.reuse.publish_plan import PublishRequest, RingView
from numba_kv.ledger.sharing import filled_ring, shared_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.placement import RowPlacement
    from numba_kv.batch.sequence import Sequence
    from numba_kv.batch.stepper import Stepper
    from numba_kv.context.options import ReuseOptions
    from numba_kv.device import Memory
    from numba_kv.ledger.reuse.content import MediaSpan
    from numba_kv.ledger.reuse.events import ReuseFigures
    from numba_kv.ledger.reuse.identity import ContextIdentity
    from numba_kv.ledger.reuse.lease import Lease
    from numba_kv.ledger.reuse.policy import PublishPolicy
    from numba_kv.ledger.reuse.publisher import Published
    from numba_kv.weights.lora_slots import LoRAAdapter

__all__ = ["BatchReuse"]


class BatchReuse:
    """Keeps prefixes of a batch's sequences and gives them to later ones. Made by `Batch` from its options.

    Attributes
    ----------
    cache : PrefixCache
        What is kept. To be looked at; the batch changes it.
    policy : PublishPolicy
        Of sequences that are admitted without one.
    due : set of Sequence
        Those that may have something to publish at the next call.
    """

    def __init__(
        self, options: ReuseOptions, stepper: Stepper, placement: RowPlacement, kept_states: Memory | None
    ) -> None:
        plan = stepper.plan
        ledger = stepper.ledger
        self.policy = options.policy
        self.due: set[Sequence] = set()
        self._engine = engine_identity(plan.config, options.weights, options.scales)
        self._stepper = stepper
        self._ledger = ledger
        self._placement = placement
        self._page = plan.config.page_tokens
        self._plan = plan
        self._contexts: dict[Any, SequenceContext] = {}
        self._has_variants = has_variants(plan.config)
        self._groups = groups = reuse_groups(plan)
        self._has_points = bool(groups.windows) or groups.is_recurrent
        self._states = KeptStates(stepper, kept_states) if groups.is_recurrent else None
        self.cache = PrefixCache(
            groups,
            pool=ledger.pool if groups.has_full else None,
            window_slots=[(group.usable_pages, group.kept_pages) for group in plan.groups[1:]],
            snapshot_slots=plan.config.kept_states if groups.is_recurrent else 0,
            limits=options.limits,
            naming=with_compiled_chain(options.naming),
            on_event=options.on_event,
        )
        placement.copies.prepare()
        ledger.kept = self if groups.has_full else None

    @property
    def figures(self) -> ReuseFigures:
        """Counts so far: reused tokens, misses by reason, evictions; a copy."""
        figures = self.cache.figures
        return replace(figures, misses=dict(figures.misses or {}))

    # -- room ----------------------------------------------------------------------------------------------------------

    @property
    def evictable(self) -> int:
        """Most pages that could become free."""
        full = self.cache.store.full
        return 0 if full is None else full.most_evictable

    def can_free(self, pages: int) -> bool:
        """Return whether so many pages can become free; changes nothing."""
        return self.cache.store.plan_room(Wanted(pages)) is not None

    def free(self, pages: int) -> None:
        """Let so many pages go.

        Raises
        ------
        StateError
            If the stream is being captured.
        """
        self._stepper.check_can_change()
        self.cache.make_room(self._ledger.pool.free_pages + pages)

    # -- admission -----------------------------------------------------------------------------------------------------

    def content(self, tokens: Any, media: Iterable[MediaSpan]) -> TokenContent:
        """Return the tokens of a prompt.

        Raises
        ------
        InputError, ShapeError
            If they are no token ids in host memory, or the media do not match them.
        """
        return TokenContent(self._page, tokens, media)

    def identity(self, adapter: LoRAAdapter | None, salt: bytes | None, rope: bytes | None) -> ContextIdentity:
        """Return whose context a sequence's is."""
        return row_identity(self._engine, adapter=adapter, salt=salt, rope=rope)

    def check_rope(self, policy: PublishPolicy, rope: bytes | None) -> None:
        """Check that a sequence says what its positions are turned by, where that is not always the same.

        Raises
        ------
        InputError
            If it does not, and is to reuse anything or to leave anything behind.
        """
        if self._has_variants and rope is None and (policy.reuse or policy.publish != "none"):
            raise InputError(
                "rope: the model rotates short and long sequences differently, so their K and V cannot be shared; say which "
                'table this one uses, for example rope=b"short" or rope=b"long"'
            )

    def admit(self, identity: ContextIdentity, content: TokenContent, policy: PublishPolicy) -> tuple[int, SequenceContext]:
        """Start a sequence with what is kept of its beginning; return its row, which was free, and its context.

        Pages that are only wanted by later steps are leased by these. A page for the beginning of a partly used page is taken
        now; where there is none, that part is computed anew.
        """
        self._stepper.begin()
        self._stepper.check_can_change()
        lease = self._lease(identity, content, policy)
        plan = lease.plan
        try:
            row = self._stepper.update([], [content.num_tokens])[0]
            if plan.is_hit:
                self._fill(row, lease)
        except BaseException:
            if lease.is_open:
                lease.release()
            raise
        if lease.is_open:
            lease.copied()
            lease.handed_over()
        reused, matched = plan.reused_tokens, plan.matched_tokens
        return row, SequenceContext(identity, content, policy, content.num_tokens, matched, reused // self._page * self._page)

    def _lease(self, identity: ContextIdentity, content: TokenContent, policy: PublishPolicy) -> Lease:
        """Return a lease of the longest prefix for which there is room."""
        cache = self.cache
        plan = cache.lookup(identity, content, reuse=policy.reuse)
        wanted = replace(plan, fresh_pages=int(plan.partial_page >= 0))
        try:
            return cache.acquire(wanted, priority=policy.priority)
        except CapacityError:
            pass
        try:
            leases = plan_room(self._ledger, 1, "the first page of a sequence")
        except CapacityError:
            cache.figures.cold_retries += 1
            if self._has_points:  # windows and states are those of this length
                less = replace(cache.lookup(identity, content, reuse=False), fresh_pages=0)
            else:
                less = replace(wanted, partial_page=-1, fresh_pages=0, reused_tokens=len(plan.pages) * self._page)
            return cache.acquire(less, priority=policy.priority)
        if leases is not None:
            self._stepper.move_pages(leases)
        return cache.acquire(wanted, priority=policy.priority)

    def _fill(self, row: int, lease: Lease) -> None:
        """Make a fresh row what the plan says."""
        plan, ledger, tokens = lease.plan, self._ledger, lease.plan.reused_tokens
        ids: NDArray[np.int32] = plan.pages
        floor = len(ids) * self._page
        if plan.partial_page >= 0:
            own = ledger.pool.acquire(1)
            ids = np.append(ids, own).astype(np.int32)
        if len(ids):
            self._placement.map_pages(row, 0, ids)
        ledger.floor[row] = floor
        ledger.set_base(row, tokens)
        firsts = [copies.first_block for copies in plan.windows]
        self._placement.place(row, tokens, tokens, np.array([0, *firsts], np.int64))
        self._stepper.stats.rotated_pages -= sum(firsts)  # pages that this row's windows did not leave
        if plan.partial_page >= 0:
            self._placement.copy(0, [(plan.partial_page, int(ids[-1]))])
        for g, copies in enumerate(plan.windows, 1):
            ring = ledger.rings[g][row]
            places = (copies.first_block + np.arange(len(copies.slots))) % len(ring)
            self._placement.copy(g, list(zip(copies.slots.tolist(), ring[places].tolist(), strict=True)))
        if self._states is not None:
            self._states.restore(row, plan.snapshot)
        lease.copied()
        lease.handed_over()

    def start(self, sequence: Sequence, context: SequenceContext) -> None:
        """Note a sequence that was admitted."""
        self._contexts[sequence] = context
        if context.policy.publish != "none":
            self.due.add(sequence)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def known_tokens(self, sequence: Sequence) -> int:
        """Return how many first tokens of a sequence are known."""
        context = self._contexts.get(sequence)
        return 0 if context is None else context.content.num_tokens

    def extend(self, sequence: Sequence, tokens: Any, media: Iterable[MediaSpan]) -> None:
        """Note which tokens follow those that are known.

        Raises
        ------
        InputError, ShapeError
            If they are no token ids, or nothing is known of the sequence; nothing was changed.
        """
        context = self._contexts.get(sequence)
        if context is None:
            raise InputError(f"note_tokens: {sequence!r} was admitted without its tokens, so nothing of it can be kept")
        context.content.extend(tokens, media)
        if context.policy.publish != "none" and context.content.num_tokens // self._page > context.published // self._page:
            self.due.add(sequence)

    def chunk(self, sequence: Sequence, length: int, count: int) -> int:
        """Return how many of `count` tokens a prefill step of a sequence should append."""
        context = self._contexts.get(sequence)
        if context is None or not count:
            return count
        args = (context.prompt_tokens, length, length + count, context.matched_tokens, self._page)
        return context.policy.chunk_end(*args) - length

    def shortened(self, lengths: Mapping[Sequence, int]) -> None:
        """Note that sequences were taken back to so many tokens: nobody knows what follows."""
        for sequence, length in lengths.items():
            context = self._contexts.get(sequence)
            if context is not None:
                context.truncate(length)

    def taken_back(self, back: NDArray[np.int64]) -> None:
        """Note that the device may take back up to so many tokens of each row, but none below its floor."""
        ledger = self._ledger
        for sequence, context in self._contexts.items():
            row = getattr(sequence, "row", None)  # a swapped sequence has none
            if row is not None and back[row]:
                context.truncate(max(int(ledger.lo[row] - back[row]), int(ledger.floor[row])))

    def inherit(self, parents: Mapping[Sequence, Any]) -> None:
        """Note that sequences have the tokens of others, as these were before."""
        made = {heir: self._contexts.get(parent) for heir, parent in parents.items() if heir is not parent}
        twins = {heir: None if context is None else context.copy() for heir, context in made.items()}
        for heir, context in twins.items():
            self.forget(heir)
            if context is not None:
                self.start(heir, context)

    def leave(self, sequence: Sequence, swapped: Any) -> None:
        """Note that a sequence waits without a row."""
        context = self._contexts.get(sequence)
        self.forget(sequence)
        if context is not None:
            self._contexts[swapped] = context

    def resume(self, swapped: Any, sequence: Sequence) -> None:
        """Note that one that waited has a row again."""
        context = self._contexts.pop(swapped, None)
        if context is not None:
            self.start(sequence, context)

    def end(self, sequences: Iterable[Sequence]) -> None:
        """Note that sequences have left their rows."""
        for sequence in sequences:
            self.forget(sequence)

    def forget(self, sequence: Any) -> None:
        """Forget what is known of a sequence; nothing more of it is published."""
        self._contexts.pop(sequence, None)
        self.due.discard(sequence)

    def unshare(self, targets: Mapping[int, int]) -> None:
        """Prepare rows to be rewound to so many tokens, where these end before or in pages that others hold too.

        Of a page that is used in part, the row gets a copy; the others keep theirs.

        Raises
        ------
        CapacityError
            If there are too few pages for the copies; nothing was changed.

        Stream: enqueues one copy and one kernel for each such row, and as many for floors and for each slab.
        """
        ledger, page = self._ledger, self._page
        rows = {row: target for row, target in targets.items() if 0 < target < shared_pages(ledger, row) * page}
        if not rows:
            return
        self._stepper.check_can_change()
        fresh = sum(target % page > 0 for target in rows.values())
        self._placement.make_room(fresh, "a rewind into shared pages")
        pairs: list[tuple[int, int]] = []
        given_up: list[NDArray[np.int32]] = []
        floors: dict[int, int] = {}
        for row, target in rows.items():
            keep, rest = divmod(target, page)
            old = ledger.pages[row, keep : ledger.leased[row]].copy()
            own = ledger.pool.acquire(int(rest > 0))
            floors[row] = max(keep * page, int(ledger.base[row]))
            self._stepper.map_pages(row, keep, own)
            pairs += zip(old[:1].tolist(), own.tolist(), strict=False)
            given_up.append(old)
        for old in given_up:  # only now: none of them becomes another row's copy
            ledger.pool.drop(old)
        self._stepper.set_floors(floors)
        if pairs:
            self._placement.copy(0, pairs)

    # -- publishing ----------------------------------------------------------------------------------------------------

    def publish_due(self) -> None:
        """Publish what earlier steps have appended. Stream: enqueues copies of tails, one copy and one kernel for floors."""
        self._stepper.check_can_change()
        self._stepper.begin()
        floors: dict[int, int] = {}
        for sequence in sorted(self.due, key=lambda one: one.generation):
            context, row = self._contexts[sequence], sequence.row
            length = int(self._ledger.lo[row])
            settled = length - self._stepper.plan.config.max_step_tokens
            for tokens, is_point in context.steps(length, settled=settled, is_last=False, has_points=self._has_points):
                done = self._publish(context, row, tokens, is_point)
                self._take_canonical(row, done)
                floors[row] = max(floors.get(row, 0), self._floor(done))
            if length >= context.prompt_tokens:
                self.due.discard(sequence)
        raised = {row: floor for row, floor in floors.items() if floor > self._ledger.floor[row]}
        if raised:
            self._stepper.set_floors(raised)

    def publish_last(self, sequences: Iterable[Sequence]) -> None:
        """Publish all of sequences that are about to leave their rows. Stream: enqueues copies of tails."""
        leaving = [s for s in sequences if s in self._contexts]
        if not leaving:
            return
        self._stepper.check_can_change()
        self._stepper.begin()
        for sequence in leaving:
            context, row = self._contexts[sequence], sequence.row
            length = int(self._ledger.lo[row])
            for tokens, is_point in context.steps(length, settled=length, is_last=True, has_points=self._has_points):
                done = self._publish(context, row, tokens, is_point)
                # The device forgets the row, so only the host need know.
                self._ledger.floor[row] = max(int(self._ledger.floor[row]), self._floor(done))

    def _floor(self, done: Published) -> int:
        """Return up to where a row's tokens lie in pages that the cache holds too."""
        return done.blocks * self._page if self._groups.has_full else 0

    def _publish(self, context: SequenceContext, row: int, tokens: int, is_point: bool) -> Published:
        ledger, policy = self._ledger, context.policy
        length = int(ledger.lo[row])
        has_state = is_point and self._states is not None and tokens == length == ledger.hi[row]
        if self._plan.config.max_verify_tokens:  # nobody knows whether what was verified has been committed
            has_state = has_state and tokens <= context.prompt_tokens
        rings = [(g, *filled_ring(ledger, group, row, length)) for g, group in enumerate(self._plan.groups) if g]
        done = self.cache.publish(
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
        ring = self._ledger.rings[g][row]
        return RingView(first, ring[np.arange(first, end) % len(ring)])

    def _take_canonical(self, row: int, done: Published) -> None:
        """Give a row the pages that were published first, and its own ones back: shared pages are always a row's first."""
        if not len(done.duplicates):
            return
        ledger = self._ledger
        ids = ledger.pages[row, : ledger.leased[row]].copy()
        own = ids[done.duplicates]
        ids[done.duplicates] = done.canonical
        first = int(done.duplicates[0])
        ledger.pool.share(done.canonical, 1)
        self._placement.map_pages(row, first, ids[first:])
        ledger.pool.drop(own)
