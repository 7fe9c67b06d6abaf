"""What goes first, what never goes, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.errors import CapacityError, InvariantError, StateError
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.eviction import Wanted
from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import CacheLimits, PrefixCache
from numba_kv.ledger.reuse.publish_plan import PublishRequest
from numba_kv.ledger.reuse.recency import Recency
from tests.helpers.reuse_world import World

IDENTITY = ContextIdentity(page_tokens=1)


def new_cache(pages: int, **options: Any) -> tuple[PrefixCache, PageIdPool]:
    pool = PageIdPool(pages, 2)
    return PrefixCache(ReuseGroups(page_tokens=1), pool=pool, **options), pool


def serve(cache: PrefixCache, pool: PageIdPool, tokens: list[int], *, priority: int = 0, keep: bool = False) -> np.ndarray:
    """Serve one prompt and retire it; its pages, if it is to stay."""
    content = TokenContent(1, tokens)
    lease = cache.admit(IDENTITY, content, priority=priority)
    pages = np.concatenate([lease.plan.pages, pool.acquire(lease.plan.fresh_pages)])
    lease.copied()
    lease.handed_over()
    cache.publish(PublishRequest(identity=IDENTITY, content=content, tokens=len(tokens), pages=pages, priority=priority))
    if not keep:
        pool.drop(pages)
    cache.audit()
    return pages


def kept(cache: PrefixCache, tokens: list[int]) -> int:
    """Return how many first tokens of a prompt are kept."""
    return cache.lookup(IDENTITY, TokenContent(1, tokens)).matched_tokens


def test_what_was_used_longest_ago_goes_first() -> None:
    cache, pool = new_cache(7)
    for tokens in ([1, 2], [3, 4], [5, 6]):
        serve(cache, pool, tokens)
    cache.admit(IDENTITY, TokenContent(1, [1, 2])).release()
    cache.make_room(3)
    assert [kept(cache, t) for t in ([1, 2], [3, 4], [5, 6])] == [2, 0, 2]
    cache.make_room(4)
    assert [kept(cache, t) for t in ([1, 2], [3, 4], [5, 6])] == [2, 0, 1]


def test_a_lookup_is_no_use() -> None:
    cache, pool = new_cache(4)
    serve(cache, pool, [1, 2])
    serve(cache, pool, [3, 4])
    assert kept(cache, [1, 2]) == 2
    cache.make_room(1)
    assert kept(cache, [1, 2]) == 1


def test_branches_go_before_what_they_share() -> None:
    cache, pool = new_cache(5)
    serve(cache, pool, [1, 2, 3])
    serve(cache, pool, [1, 2, 4])
    cache.make_room(2)
    assert (kept(cache, [1, 2, 3]), kept(cache, [1, 2, 4])) == (2, 3)
    cache.make_room(4)
    assert kept(cache, [1, 2, 4]) == 1
    assert cache.figures.evicted_blocks == 3


def test_what_is_dear_goes_last() -> None:
    cache, pool = new_cache(6)
    serve(cache, pool, [1, 2], priority=1)
    serve(cache, pool, [1, 2, 3, 4])
    serve(cache, pool, [5, 6])
    cache.make_room(4)
    assert [kept(cache, t) for t in ([1, 2, 3, 4], [5, 6])] == [2, 0]
    cache.make_room(6)
    assert cache.num_blocks == 0


def test_what_a_row_reads_never_goes() -> None:
    cache, pool = new_cache(5)
    held = serve(cache, pool, [1, 2, 3], keep=True)
    serve(cache, pool, [4, 5])
    classes = cache.classes()
    assert (classes.free, classes.owned, classes.shared, classes.cached, classes.leased) == (0, 0, 0, 2, 3)
    before = pool.peek(0), cache.store.tree.version
    with pytest.raises(CapacityError, match="needs 3, 0 are free and at most 2 can be evicted") as caught:
        cache.make_room(3)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (3, 0, 2)
    assert (cache.num_blocks, cache.store.tree.version) == (5, before[1])
    cache.make_room(2)
    assert kept(cache, [1, 2, 3]) == 3
    pool.drop(held)
    cache.make_room(5)
    assert cache.num_blocks == 0
    cache.audit()


def test_a_page_comes_back_in_either_order() -> None:
    for row_first in (True, False):
        cache, pool = new_cache(1)
        pages = serve(cache, pool, [1], keep=True)
        steps = [lambda pool=pool, pages=pages: pool.drop(pages), cache.clear]
        for step in steps if row_first else (cache.clear, *steps):
            assert pool.free_pages == 0
            step()
        assert pool.free_pages == 1


def test_an_evicted_prefix_is_a_miss_though_its_page_lives_on() -> None:
    cache, pool = new_cache(2)
    serve(cache, pool, [1, 2])
    cache.make_room(2)
    serve(cache, pool, [3, 4])
    assert kept(cache, [1, 2]) == 0
    assert kept(cache, [3, 4]) == 2


def test_a_stale_plan_is_refused() -> None:
    cache, pool = new_cache(4)
    serve(cache, pool, [1, 2])
    plan = cache.lookup(IDENTITY, TokenContent(1, [1, 2, 3]))
    serve(cache, pool, [1, 2, 9])  # what others publish does not matter
    cache.acquire(plan).release()
    cache.make_room(4)
    serve(cache, pool, [5, 6])
    shares = pool.shares.copy()
    with pytest.raises(StateError, match="stale"):
        cache.acquire(plan)
    assert (pool.shares == shares).all()


def test_a_stale_eviction_is_refused() -> None:
    cache, pool = new_cache(4)
    serve(cache, pool, [1, 2])
    plan = cache.store.plan_room(Wanted(pages=1))
    assert plan is not None
    serve(cache, pool, [3])
    with pytest.raises(StateError, match="stale"):
        cache.store.evict(plan)
    assert cache.num_blocks == 3


def test_a_lease_is_given_back_once() -> None:
    cache, pool = new_cache(4)
    serve(cache, pool, [1, 2])
    lease = cache.admit(IDENTITY, TokenContent(1, [1, 2, 3]))
    with pytest.raises(StateError, match="after the copies"):
        lease.handed_over()
    lease.release()
    assert not lease.is_open
    for call in (lease.release, lease.copied, lease.handed_over):
        with pytest.raises(StateError):
            call()
    assert cache.classes().leased == 0
    cache.audit()


def test_a_plan_that_blocks_its_own_room_is_made_cold() -> None:
    groups = ReuseGroups(page_tokens=4)
    world = World(groups, 2, slots=0, snapshots=0)
    identity = ContextIdentity(page_tokens=4)
    row = world.admit(identity, TokenContent(4, range(8)), PublishPolicy())
    assert row is not None
    world.prefill(row, 1)
    world.retire(row)
    # Five tokens match: one page is leased, of the other one token is copied into a page that nobody has.
    row = world.admit(identity, TokenContent(4, [0, 1, 2, 3, 4, 9]), PublishPolicy())
    assert row is not None
    assert (row.length, world.cache.figures.cold_retries) == (0, 1)
    world.prefill(row, 1)
    world.check()


def test_the_bound_on_blocks_holds() -> None:
    cache, pool = new_cache(20, limits=CacheLimits(max_blocks=3))
    serve(cache, pool, [1, 2])
    serve(cache, pool, [3, 4, 5])
    assert (kept(cache, [1, 2]), kept(cache, [3, 4, 5]), cache.num_blocks) == (0, 3, 3)
    serve(cache, pool, [3, 4, 5, 6, 7])
    assert (kept(cache, [3, 4, 5, 6, 7]), cache.num_blocks, cache.figures.skipped_blocks) == (3, 3, 2)
    nothing, pool = new_cache(20, limits=CacheLimits(max_blocks=0))
    serve(nothing, pool, [1, 2])
    assert (nothing.num_blocks, pool.free_pages) == (0, 20)


def test_a_page_is_published_once() -> None:
    cache, pool = new_cache(4)
    pages = serve(cache, pool, [1, 2], keep=True)
    request = PublishRequest(identity=IDENTITY, content=TokenContent(1, [8, 9]), tokens=2, pages=pages)
    with pytest.raises(StateError, match="page 0 is kept for another block"):
        cache.publish(request)
    assert cache.num_blocks == 2
    cache.audit()


def test_a_lost_page_is_found() -> None:
    cache, pool = new_cache(4)
    serve(cache, pool, [1, 2])
    cache.store.full.kept[1] = False
    with pytest.raises(InvariantError, match="page 1 is in the index 1 times, 0 expected"):
        cache.audit()
    cache.store.full.kept[1] = True
    cache.store.tree.num_blocks += 1
    with pytest.raises(InvariantError, match="2 blocks are kept, 3 counted"):
        cache.audit()


def test_a_run_that_no_lookup_finds_is_found() -> None:
    cache, pool = new_cache(4)
    serve(cache, pool, [1, 2])
    (root,) = cache.store.tree.roots.values()
    root.branches[0].runs.clear()
    with pytest.raises(InvariantError, match="behind block 0 is not found by its tokens"):
        cache.audit()


def test_a_freed_page_that_is_kept_is_found() -> None:
    cache, pool = new_cache(4)
    serve(cache, pool, [1])
    pool.release(np.array([0], np.int32))
    with pytest.raises(InvariantError, match="page 0 is kept and free"):
        cache.audit()


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(0, 2)), min_size=1, max_size=8))
def test_the_order_is_that_of_a_naive_list(prompts: list[tuple[list[int], int]]) -> None:
    """Each block has a rank of its own; of the blocks behind which nothing is kept the lowest goes."""
    cache, pool = new_cache(64)
    ranks: dict[tuple[int, ...], tuple[int, int]] = {}
    for time, (prompt, priority) in enumerate(prompts):
        serve(cache, pool, prompt, priority=priority)
        for end in range(1, len(prompt) + 1):
            key = tuple(prompt[:end])
            ranks[key] = (max(priority, ranks.get(key, (0, 0))[0]), time)
    while ranks:
        leaves = [key for key in ranks if not any(o[: len(key)] == key and len(o) > len(key) for o in ranks)]
        lowest = min(ranks[key] for key in leaves)
        plan = cache.store.plan_room(Wanted(blocks=1))
        cache.store.evict(plan)
        gone = [key for key in ranks if kept(cache, list(key)) < len(key)]
        assert len(gone) == 1
        assert gone[0] in leaves
        assert ranks.pop(gone[0]) == lowest
    assert pool.free_pages == 64
    cache.audit()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans()), max_size=12))
def test_recency_is_that_of_a_naive_list(steps: list[tuple[int, int, bool]]) -> None:
    recency, naive, size = Recency(), [], 0
    for now, (end, priority, is_cut) in enumerate(steps, 1):
        if is_cut:
            size = min(size, end)
            recency.cut(size)
            naive = naive[:size]
        else:
            size = max(size, end)
            naive += [(0, 0)] * (size - len(naive))
            for block in range(end):
                naive[block] = (max(priority, naive[block][0]), now)
            recency.touch(end, priority, now)
        assert [recency.rank(block) for block in range(size)] == naive
        for end_block in range(1, size + 1):
            rank, begin = recency.last(end_block)
            assert set(naive[begin:end_block]) == {rank}
