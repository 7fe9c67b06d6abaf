"""The plain prefix cache that ours is measured beside does the same, and the measure of both."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.errors import CapacityError, StateError
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.prefix_cache import CacheLimits, PrefixCache
from numba_kv.ledger.reuse.publish_plan import PublishRequest
from numba_kv.replay.bench_reuse import measure_hits
from numba_kv.replay.plain_prefix_cache import PlainPrefixCache, PlainPrompt

PAGE = 2


def prepared(tokens: list[int]) -> PlainPrompt:
    return PlainPrompt.prepare(np.array(tokens, np.int32).tobytes(), PAGE)


# Whole pages and one token, which is computed: we note a use of a page, too, that only its last token keeps from being used.
TOKENS = st.lists(st.integers(0, 1), max_size=12).map(lambda tokens: [*tokens[: len(tokens) // PAGE * PAGE], 0])
PROMPTS = st.lists(st.tuples(TOKENS, st.booleans()), min_size=1, max_size=20)


@given(PROMPTS, st.integers(7, 20))
def test_plain_python_finds_and_gives_up_what_we_do(prompts: list[tuple[list[int], bool]], pages: int) -> None:
    pool = PageIdPool(pages, 0)
    ours = PrefixCache(ReuseGroups(page_tokens=PAGE), pool=pool, limits=CacheLimits(whole_pages=True))
    plain = PlainPrefixCache(list(range(pages)), PAGE)
    for tokens, has_salt in prompts:
        identity = ContextIdentity(page_tokens=PAGE, salt=b"tenant" if has_salt else None)
        content, prompt = TokenContent(PAGE, tokens), prepared(tokens)
        plan, other = ours.lookup(identity, content), plain.lookup(identity, prompt)
        assert (plan.reused_tokens, plan.fresh_pages) == (len(other.found) * PAGE, other.fresh_pages)
        lease = ours.acquire(plan)
        plain.release(plain.acquire(other))
        stop = len(prompt.names)
        fresh = pool.acquire(stop - len(plan.pages))
        held = np.concatenate([plan.pages, fresh])
        ours.publish(PublishRequest(identity=identity, content=content, tokens=stop * PAGE, pages=held))
        plain.publish(identity, prompt)
        pool.drop(fresh)
        lease.release()
        assert ours.num_blocks == sum(map(len, plain.kept.values()))
        assert pool.free_pages == len(plain.free)


@given(PROMPTS, st.integers(6, 12), st.data())
def test_plain_python_keeps_what_is_read(prompts: list[tuple[list[int], bool]], pages: int, data: st.DataObject) -> None:
    plain = PlainPrefixCache(list(range(pages)), PAGE)
    leases: list[Any] = []
    for tokens, has_salt in prompts:
        prompt = prepared(tokens)
        with suppress(CapacityError):  # which changes nothing that is checked here
            leases.append((prompt, plain.acquire(plain.lookup(has_salt, prompt))))
            plain.publish(has_salt, prompt)
        while leases and data.draw(st.booleans()):
            plain.release(leases.pop(data.draw(st.integers(0, len(leases) - 1)))[1])
        blocks = [block for index in plain.kept.values() for block in index.values()]
        assert sorted([*plain.free, *(block.page for block in blocks)]) == list(range(pages))
        assert {block.page for block in blocks if not block.readers} == set(plain.unread)
        assert sum(block.readers for block in blocks) == sum(len(lease.found) for _, lease in leases)
        for held, lease in leases:
            assert [block.tokens for block in lease.found] == held.blocks[: len(lease.found)]
            assert all(block.is_kept for block in lease.found)


def test_plain_python_refuses_what_we_refuse() -> None:
    plain = PlainPrefixCache([0, 1, 2], PAGE)
    plain.publish("model", prepared([1, 1, 2, 2, 3]))
    plan = plain.lookup("model", prepared([1, 1, 2, 2, 3]))
    lease = plain.acquire(plain.lookup("model", prepared([1, 1, 9])))
    plain.release(lease)
    with pytest.raises(StateError, match="given back already"):
        plain.release(lease)
    plain.make_room(2)  # the block that lies behind the other one goes
    assert len(plain.lookup("model", prepared([1, 1, 2, 2, 3])).found) == 1
    with pytest.raises(StateError, match="stale"):
        plain.acquire(plan)
    with pytest.raises(CapacityError):
        plain.make_room(4)


def test_plain_python_compares_tokens_too() -> None:
    plain = PlainPrefixCache(list(range(4)), PAGE)
    kept, other = prepared([1, 1, 2]), prepared([5, 5, 2])
    other.names = kept.names  # a collision
    plain.publish("model", kept)
    assert len(plain.lookup("model", kept).found) == 1
    assert plain.lookup("model", other).found == []


def test_both_are_measured() -> None:
    found = measure_hits(4, repeat=20)
    assert found["pages"] == 4
    parts = ("lookup_us", "acquire_us", "release_us")
    for prefix in ("", "plain_"):
        assert all(found[prefix + part] > 0 for part in parts)  # type: ignore[operator]
        assert found[f"{prefix}hit_us"] >= max(found[prefix + part] for part in parts)  # type: ignore[operator, type-var]
        assert found[f"{prefix}hash_us"] > 0  # type: ignore[operator]
    assert found["times_faster"] == pytest.approx(found["plain_hit_us"] / found["hit_us"], abs=0.01)  # type: ignore[operator]
