"""Reuse plans case by case: the numbers of the reference where it states any, and what this cache does better."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numba_kv.errors import ConfigError, InputError
from numba_kv.geometry import Window
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.reuse.block_hash import Blake2bHash
from numba_kv.ledger.reuse.content import MediaSpan, TokenContent
from numba_kv.ledger.reuse.events import BlocksRemoved, BlocksStored
from numba_kv.ledger.reuse.groups import DraftContract, ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import CacheLimits, PrefixCache
from numba_kv.ledger.reuse.publish_plan import PublishRequest, RingView
from numba_kv.ledger.reuse.publisher import Published
from numba_kv.ledger.reuse.reuse_plan import MissReason, ReusePlan
from tests.helpers.reuse_world import ConstantHash

WHOLE = CacheLimits(whole_pages=True)
EAGLE, BLOCK_DRAFT, SHARED_KV = DraftContract(future_tokens=1), DraftContract(), DraftContract(owns_pages=False)


class Case:
    """One cache and what is published in it: pages are counted from `first`."""

    def __init__(self, page: int, *, limits: CacheLimits = WHOLE, pages: int = 64, naming: Any = None, **groups: Any) -> None:
        self.groups = ReuseGroups(page_tokens=page, **groups)
        self.pool = PageIdPool(pages, 2) if self.groups.has_full else None
        self.draft_pool = PageIdPool(pages, 2) if self.groups.has_draft else None
        self.identity = ContextIdentity(page_tokens=page)
        self.events: list[Any] = []
        self.cache = PrefixCache(
            self.groups,
            pool=self.pool,
            draft_pool=self.draft_pool,
            window_slots=[(0, 64)] * len(self.groups.windows),
            snapshot_slots=4 if self.groups.is_recurrent else 0,
            limits=limits,
            naming=naming or Blake2bHash(),
            on_event=self.events.append,
        )

    def publish(self, tokens: Any, count: int | None = None, *, draft: bool = True, **options: Any) -> Published:
        content = TokenContent(self.groups.page_tokens, tokens)
        stop = content.num_tokens if count is None else count
        blocks = -(-stop // self.groups.page_tokens)
        if self.pool is not None and "pages" not in options:
            options["pages"] = self.pool.acquire(blocks)
        if self.draft_pool is not None and draft:
            options["draft_pages"] = self.draft_pool.acquire(stop // self.groups.page_tokens)
        return self.cache.publish(PublishRequest(identity=self.identity, content=content, tokens=stop, **options))

    def plan(self, tokens: Any, **options: Any) -> ReusePlan:
        return self.cache.lookup(self.identity, TokenContent(self.groups.page_tokens, tokens), **options)


def rings(case: Case, tokens: int, blocks: int) -> tuple[RingView, ...]:
    end = -(-tokens // case.groups.page_tokens)
    first = max(0, end - blocks)
    return (RingView(first, np.arange(first, end, dtype=np.int32)),) * len(case.groups.windows)


@pytest.mark.parametrize(
    ("published", "asked", "reused", "fresh", "reason"),
    [
        (0, 257, 0, 3, MissReason.UNKNOWN_IDENTITY),
        (256, 257, 256, 1, MissReason.NOT_KEPT),
        (128, 257, 128, 2, MissReason.NOT_KEPT),
        (256, 256, 128, 1, MissReason.WHOLE_PAGES),
        (129, 130, 128, 1, MissReason.NOT_KEPT),
        (128, 128, 0, 1, MissReason.WHOLE_PAGES),
    ],
)
def test_full_attention_plans_as_the_reference_does(
    published: int, asked: int, reused: int, fresh: int, reason: MissReason
) -> None:
    case = Case(128)
    if published:
        case.publish(range(published))
    plan = case.plan(range(asked))
    assert (plan.reused_tokens, plan.fresh_pages, plan.misses[0].reason) == (reused, fresh, reason)
    assert plan.pages.tolist() == list(range(reused // 128))
    assert plan.matched_tokens == min(published // 128 * 128, asked)


def test_parts_of_pages_save_what_the_reference_computes_again() -> None:
    case = Case(128, limits=CacheLimits())
    case.publish(range(256))
    plan = case.plan(range(256))
    assert (plan.reused_tokens, plan.fresh_pages, plan.partial_page) == (255, 1, 1)
    assert [(m.part, m.reason, m.tokens) for m in plan.misses] == [("full", MissReason.LAST_TOKEN, 255)]
    other = case.plan([*range(200), 7, 7, 7])
    assert (other.reused_tokens, other.partial_page, other.pages.tolist()) == (200, 1, [0])
    assert other.misses[0].reason is MissReason.DIVERGED


@pytest.mark.parametrize(
    ("contract", "published", "asked", "reused", "fresh", "fresh_draft"),
    [
        (EAGLE, 256, 257, 128, 2, 2),
        (EAGLE, 256, 256, 128, 1, 1),
        (EAGLE, 128, 129, 0, 2, 2),
        (BLOCK_DRAFT, 256, 257, 256, 1, 1),
        (SHARED_KV, 256, 257, 256, 1, 0),
    ],
)
def test_drafts_plan_as_the_reference_does(
    contract: DraftContract, published: int, asked: int, reused: int, fresh: int, fresh_draft: int
) -> None:
    case = Case(128, draft=contract)
    case.publish(range(published))  # what follows is not known: the last position of a draft that looks ahead is void
    plan = case.plan(range(asked))
    assert (plan.reused_tokens, plan.fresh_pages, plan.fresh_draft_pages) == (reused, fresh, fresh_draft)
    assert len(plan.draft_pages) == (reused // 128 if contract.owns_pages else 0)


def test_pages_without_those_of_the_draft_are_of_no_use() -> None:
    case = Case(128, draft=EAGLE)
    case.publish(range(256), draft=False)
    plan = case.plan(range(257))
    assert (plan.reused_tokens, plan.fresh_pages, plan.fresh_draft_pages) == (0, 3, 3)
    assert (plan.misses[0].part, plan.misses[0].reason) == ("draft", MissReason.NO_DRAFT_PAGES)
    case.publish(range(257), draft=True)  # another sequence has them: they are added
    assert case.plan(range(257)).reused_tokens == 256
    case.cache.audit()


def test_a_draft_that_looks_ahead_loses_nothing_where_the_next_token_is_the_same() -> None:
    case = Case(4, draft=EAGLE, limits=CacheLimits())
    case.publish(range(9), 8)
    assert case.plan(range(9)).reused_tokens == 8
    other = case.plan([*range(8), 77])
    assert (other.reused_tokens, other.draft_partial_page) == (7, 1)
    assert other.misses[0].reason is MissReason.DRAFT_LOOKAHEAD
    case.publish([*range(8), 77, 78, 79, 80, 81], 12)  # brings its own page for the block in front of the fork
    assert case.plan([*range(8), 77, 78, 79, 80, 81]).draft_pages.tolist() == [0, 3, 4]
    assert case.plan(range(9)).draft_pages.tolist() == [0, 1]
    case.cache.audit()


def test_a_part_of_a_page_of_a_draft_ends_before_what_it_looks_ahead_at() -> None:
    for contract, reused in ((EAGLE, 5), (BLOCK_DRAFT, 6)):
        case = Case(4, draft=contract, limits=CacheLimits())
        case.publish(range(9), 8)
        plan = case.plan([0, 1, 2, 3, 4, 5, 99, 99])
        assert (plan.matched_tokens, plan.reused_tokens, plan.draft_partial_page) == (6, reused, 1)


def test_equal_tokens_of_other_media_are_other_tokens() -> None:
    case = Case(4, limits=CacheLimits())
    tokens, x, y = [7] * 12, b"x" * 16, b"y" * 16
    known = TokenContent(4, tokens, [MediaSpan(0, 5, x), MediaSpan(6, 4, x)])
    request = PublishRequest(identity=case.identity, content=known, tokens=12, pages=case.pool.acquire(3))
    case.cache.publish(request)
    for media, matched in (
        ([MediaSpan(0, 5, x), MediaSpan(6, 4, x)], 12),
        ([MediaSpan(0, 5, x), MediaSpan(6, 4, y)], 6),
        ([MediaSpan(0, 5, x)], 6),
        ([MediaSpan(0, 5, x), MediaSpan(6, 6, x)], 10),
        ([MediaSpan(0, 5, y), MediaSpan(6, 4, x)], 0),
        ([], 0),
    ):
        assert case.cache.lookup(case.identity, TokenContent(4, tokens, media)).matched_tokens == matched


def test_a_tail_never_takes_the_page_of_what_it_hangs_behind() -> None:
    case = Case(4, pages=4)
    first = case.pool.acquire(1)
    case.publish([1, 1, 1, 1], pages=first)
    case.pool.drop(first)
    pages = case.pool.acquire(3)  # none is free now, and only the first block could go
    done = case.publish([1, 1, 1, 1, 2], pages=pages, with_tail=True)
    assert (done.blocks, done.new_blocks, done.copies) == (1, 0, ())
    assert case.cache.figures.skipped_copies == 1
    assert case.cache.num_blocks == 1
    case.cache.audit()


def test_states_are_reused_at_their_length_only() -> None:
    case = Case(4, is_recurrent=True)
    done = case.publish(range(6), has_state=True, is_point=True)
    assert (done.blocks, done.new_blocks, done.snapshot) == (1, 1, 0)
    assert [(c.group, c.source, c.tokens) for c in done.copies] == [(0, 1, 2)]
    plan = case.plan(range(10))
    assert (plan.reused_tokens, plan.pages.tolist(), plan.fresh_pages, plan.snapshot) == (6, [0], 2, 0)
    assert plan.partial_page == done.copies[0].target
    exact = case.plan(range(6))
    assert (exact.reused_tokens, exact.fresh_pages) == (0, 2)
    assert exact.misses[0].reason is MissReason.NO_SNAPSHOT


def test_states_without_attention_take_no_page() -> None:
    case = Case(4, is_recurrent=True, has_full=False)
    assert case.publish(range(3), has_state=True).snapshot == 0
    plan = case.plan(range(4))
    assert (plan.reused_tokens, plan.snapshot, plan.fresh_pages, plan.partial_page) == (3, 0, 0, -1)


def test_the_snapshot_used_longest_ago_goes() -> None:
    case = Case(4, is_recurrent=True)
    for i in range(4):
        case.publish([i] * 5, has_state=True)
    case.cache.acquire(case.plan([0] * 6)).release()
    assert case.publish([9] * 5, has_state=True).snapshot == 1
    assert [case.plan([i] * 6).reused_tokens for i in (0, 1, 2, 9)] == [5, 0, 5, 5]
    case.cache.audit()


def test_windows_need_the_pages_behind_the_boundary_only() -> None:
    case = Case(4, windows=(Window("sliding", 6),), limits=CacheLimits())
    done = case.publish(range(24), is_point=True, rings=rings(case, 24, 3))
    assert [(c.group, c.source, c.tokens) for c in done.copies] == [(1, 4, 4), (1, 5, 4)]
    plan = case.plan(range(30))
    assert plan.reused_tokens == 24
    assert (plan.windows[0].first_block, plan.windows[0].slots.tolist()) == (4, [c.target for c in done.copies])
    fork = case.plan([*range(20), 99])
    assert (fork.matched_tokens, fork.reused_tokens) == (20, 0)
    assert [(m.part, m.reason, m.tokens) for m in fork.misses] == [
        ("window 0", MissReason.WINDOW_COPIES, 0),
        ("full", MissReason.DIVERGED, 20),
    ]
    case.publish(range(20), is_point=True, rings=rings(case, 20, 5))
    assert case.plan([*range(20), 99]).reused_tokens == 20


def test_a_lost_copy_costs_the_boundaries_that_see_it() -> None:
    case = Case(1, windows=(Window("sliding", 4),), limits=CacheLimits())
    pages = case.pool.acquire(12)
    for stop in range(1, 13):
        case.publish(range(12), stop, is_point=True, rings=rings(case, stop, 12), pages=pages)
    copies = case.cache.store.windows[0]
    (run,) = [run for run in case.cache.store.tree.runs() if run.size]
    case.cache.store._forget_copy(0, int(run.lines[1, 6]))
    # The next token sees three tokens behind it: 7, 8 and 9 see token 6.
    assert [case.plan([*range(n), 50]).reused_tokens for n in range(1, 13)] == [1, 2, 3, 4, 5, 6, 6, 6, 6, 10, 11, 12]
    assert copies.num_kept == 11
    case.cache.audit()


def test_attention_chunks_begin_without_any_copy() -> None:
    case = Case(4, windows=(Window("chunked", 6),), limits=CacheLimits())
    case.publish(range(24))
    assert case.plan(range(30)).reused_tokens == 24
    assert case.plan([*range(21), 99]).reused_tokens == 18
    assert case.plan([*range(21), 99]).windows[0].slots.tolist() == []


def test_a_ring_that_has_moved_on_gives_no_copy() -> None:
    case = Case(4, windows=(Window("sliding", 9),))
    done = case.publish(range(24), is_point=True, rings=rings(case, 24, 1))
    assert (done.copies, done.new_blocks, case.cache.figures.skipped_copies) == ((), 6, 1)


def test_the_first_page_published_stays() -> None:
    case = Case(4)
    case.publish([1, 1, 1, 1], pages=case.pool.acquire(1))
    done = case.publish([1, 1, 1, 1, 2, 2, 2, 2], pages=case.pool.acquire(2))
    assert (done.blocks, done.new_blocks) == (2, 1)
    assert (done.duplicates.tolist(), done.canonical.tolist()) == ([0], [0])
    assert case.plan([1, 1, 1, 1, 2, 2, 2, 2, 3]).pages.tolist() == [0, 2]
    assert case.cache.classes().leased == 2


def test_identities_share_nothing() -> None:
    case = Case(4)
    case.publish(range(8))
    content = TokenContent(4, range(9))
    for change in ({"adapter": b"other bytes"}, {"salt": b"tenant"}, {"rope": b"long"}, {"kv_cache_dtype": "float16"}):
        plan = case.cache.lookup(ContextIdentity(page_tokens=4, **change), content)
        assert (plan.reused_tokens, plan.misses[0].reason) == (0, MissReason.UNKNOWN_IDENTITY)
    assert case.cache.lookup(ContextIdentity(page_tokens=4), content).reused_tokens == 8


def test_blocks_of_one_name_are_told_apart_by_their_tokens() -> None:
    case = Case(4, naming=ConstantHash())
    one, two, three = [1] * 4 + [2] * 4, [1] * 4 + [3] * 4, [4] * 4 + [2] * 4
    one_pages, two_pages, three_pages = (case.pool.acquire(2) for _ in range(3))
    for tokens, pages in ((one, one_pages), (two, two_pages), (three, three_pages)):
        case.publish(tokens, pages=pages)
    assert {name for event in case.events for name in event.names} == {bytes(16)}
    wanted = [one_pages.tolist(), [one_pages[0], two_pages[1]], three_pages.tolist()]
    assert [case.plan([*tokens, 9]).pages.tolist() for tokens in (one, two, three)] == wanted
    for strange in ([5] * 4 + [2] * 4, [4] * 4 + [3] * 4, [1] * 4 + [4] * 4):
        kept = 4 if strange[0] != 5 else 0
        plan = case.plan([*strange, 9])
        assert (plan.matched_tokens, plan.reused_tokens, plan.misses[0].reason) == (kept, kept, MissReason.DIVERGED)
    for pages in (one_pages, two_pages, three_pages):
        case.pool.drop(pages)
    case.cache.make_room(case.pool.free_pages + 1)  # the second block of the first one goes, no other of its name
    assert [case.plan([*tokens, 9]).reused_tokens for tokens in (one, two, three)] == [4, 8, 8]
    case.cache.audit()


def test_who_wants_nothing_gets_nothing() -> None:
    case = Case(4)
    case.publish(range(8))
    plan = case.plan(range(9), reuse=False)
    assert (plan.reused_tokens, plan.fresh_pages, plan.misses[0].reason) == (0, 3, MissReason.BYPASS)


def test_events_name_what_comes_and_goes() -> None:
    case = Case(4)
    case.publish(range(8), 4)
    case.publish(range(8))
    case.pool.drop(np.arange(3, dtype=np.int32))
    case.cache.clear()
    first, second, gone = case.events
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert isinstance(gone, BlocksRemoved)
    assert (first.parent, second.parent) == (None, first.names[-1])
    assert second.tokens.tolist() == [[4, 5, 6, 7]]
    assert gone.names == first.names + second.names
    assert case.cache.num_blocks == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 9}, "9 are to be published, the ids of 8 are known"),
        ({"tokens": -1}, "-1 are to be published"),
        ({"pages": np.zeros(1, np.int32)}, "1 given for 8 tokens, which take 2 of 4"),
        ({"pages": np.zeros(2, np.int32)}, "a page is given for two blocks"),
        ({"content": TokenContent(8, range(8))}, "8 of the content"),
        ({"identity": ContextIdentity(page_tokens=8)}, "8 of the identity"),
        ({"rings": (RingView(0, np.zeros(1, np.int32)),)}, "1 given, the model has 0 window groups"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    case = Case(4)
    known = {
        "identity": case.identity,
        "content": TokenContent(4, range(8)),
        "tokens": 8,
        "pages": case.pool.acquire(2),
    }
    with pytest.raises(InputError, match=message):
        case.cache.publish(PublishRequest(**{**known, **change}))
    assert case.cache.num_blocks == 0
    assert not case.pool.shares.any()


def test_a_lookup_wants_tokens_of_its_page_size() -> None:
    case = Case(4)
    with pytest.raises(InputError, match="no token"):
        case.plan([])
    with pytest.raises(InputError, match="8 of the content"):
        case.cache.lookup(case.identity, TokenContent(8, [1]))


@pytest.mark.parametrize(
    "call", [lambda: DraftContract(future_tokens=2), lambda: ReuseGroups(page_tokens=4, windows=(Window("full"),))]
)
def test_groups_that_cannot_be_are_refused(call: Any) -> None:
    with pytest.raises(ConfigError):
        call()


@pytest.mark.parametrize(
    ("policy", "start", "stop", "points"),
    [
        (PublishPolicy(), 0, 1000, (96, 256, 500)),
        (PublishPolicy(), 96, 300, (256,)),
        (PublishPolicy(every_blocks=2), 60, 128, (64, 96, 128)),
        (PublishPolicy(at_end=False, at_branch=False, every_blocks=0), 0, 1000, ()),
        (PublishPolicy(publish="none"), 0, 1000, ()),
        (PublishPolicy(publish="all", at_branch=False), 480, 800, (500, 512, 768)),
    ],
)
def test_points_are_few(policy: PublishPolicy, start: int, stop: int, points: tuple[int, ...]) -> None:
    assert policy.points(500, start, stop, 100, 16) == points
    limit = 700
    inside = [p for p in points if p <= limit]
    assert policy.chunk_end(500, start, min(stop, limit), 100, 16) == (inside[0] if inside else min(stop, limit))


def test_a_policy_says_what_is_published() -> None:
    assert [PublishPolicy(publish=p).last_token(10, 25) for p in ("none", "prompt", "all")] == [0, 10, 25]
    for wrong in ({"publish": "some"}, {"priority": 1.5}):
        with pytest.raises(ConfigError):
            PublishPolicy(**wrong)
    with pytest.raises(InputError, match="every_blocks"):
        PublishPolicy(every_blocks=-1)
