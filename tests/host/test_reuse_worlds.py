"""Many sequences through the prefix cache: every lease is checked by content, every plan and refusal by brute force."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from numba_kv.geometry import Window
from numba_kv.ledger.reuse.block_hash import Blake2bHash
from numba_kv.ledger.reuse.content import MediaSpan, TokenContent
from numba_kv.ledger.reuse.groups import DraftContract, ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import CacheLimits
from tests.helpers.reuse_world import ConstantHash, World

NAMINGS: list[Any] = [None, Blake2bHash(), ConstantHash()]
WINDOWS = [Window("sliding", 1), Window("sliding", 3), Window("sliding", 7), Window("chunked", 4), Window("chunked", 6)]


@st.composite
def worlds(draw: st.DrawFn, *, windows: bool = False, states: bool = False, draft: bool = False) -> World:
    page = draw(st.sampled_from([1, 2, 4]))
    groups = ReuseGroups(
        page_tokens=page,
        has_full=draft or draw(st.integers(0, 4)) > 0 or not (windows or states),
        windows=tuple(draw(st.lists(st.sampled_from(WINDOWS), min_size=1, max_size=2))) if windows else (),
        is_recurrent=states,
        draft=DraftContract(future_tokens=draw(st.integers(0, 1))) if draft else None,
    )
    limits = CacheLimits(max_blocks=draw(st.sampled_from([None, 0, 5, 12])), whole_pages=draw(st.booleans()))
    return World(
        groups,
        draw(st.integers(4, 24)),
        slots=draw(st.integers(0, 8)),
        snapshots=draw(st.integers(1, 4)),
        limits=limits,
        naming=draw(st.sampled_from(NAMINGS)),
    )


POLICIES = st.builds(
    PublishPolicy,
    publish=st.sampled_from(["none", "prompt", "all", "all"]),
    reuse=st.integers(0, 9).map(bool),
    priority=st.integers(0, 2),
    at_end=st.booleans(),
    at_branch=st.booleans(),
    every_blocks=st.integers(0, 3),
    tails=st.booleans(),
)


def identities(page: int) -> list[ContextIdentity]:
    return [ContextIdentity(page_tokens=page), ContextIdentity(page_tokens=page, adapter=b"a" * 16)]


def contents(draw: Any, page: int, pasts: list[TokenContent]) -> TokenContent:
    """Draw a prompt that perhaps begins as an earlier one did, media included."""
    tokens, media = [], []
    if pasts and draw(st.integers(0, 4)):
        past = draw(st.sampled_from(pasts))
        keep = draw(st.integers(0, past.num_tokens))
        tokens = past.tokens[:keep].tolist()
        media = [span for span in past.media if span.stop <= keep]
    tokens += draw(st.lists(st.integers(0, 2), min_size=0 if tokens else 1, max_size=9))
    at = max([span.stop for span in media], default=0)
    if draw(st.integers(0, 3)) == 0 and at < len(tokens):
        start = draw(st.integers(at, len(tokens) - 1))
        length = draw(st.integers(1, len(tokens) - start))
        digest = draw(st.sampled_from([b"x" * 16, b"y" * 16]))
        tokens[start : start + length] = [2] * length
        media.append(MediaSpan(start, length, digest))
    return TokenContent(page, tokens, media)


def run(data: Any, world: World) -> None:
    pasts: list[TokenContent] = []
    page, draw = world.page, data.draw
    for _ in range(draw(st.integers(1, 14))):
        action = draw(st.sampled_from(["admit", "admit", "admit", "decode", "retire", "clear", "lease"]))
        ring_blocks = draw(st.sampled_from([1, 2, 4, 99]))
        if action == "admit":
            content = contents(draw, page, pasts)
            pasts.append(content)
            row = world.admit(draw(st.sampled_from(identities(page))), content, draw(POLICIES))
            if row is not None:
                world.prefill(row, ring_blocks)
        elif action == "lease":
            world.lease_for_nothing(draw(st.sampled_from(identities(page))), contents(draw, page, pasts))
        elif action == "clear" and draw(st.integers(0, 3)) == 0:
            world.cache.clear()
        elif world.rows:
            row = draw(st.sampled_from(world.rows))
            if action == "retire":
                world.retire(row)
            elif action == "decode":
                tokens = draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
                world.decode(row, tokens, ring_blocks, is_end=draw(st.booleans()))
        world.check()
    for row in list(world.rows):
        world.retire(row)
    world.check()
    world.cache.clear()
    world.check()
    assert world.cache.num_blocks == 0
    for pool in (world.pool, world.draft_pool):
        assert pool is None or pool.free_pages == pool.usable_pages
    assert all(slots.num_kept == 0 for slots in (*world.cache.store.windows, world.cache.store.snapshots))


@given(st.data())
def test_full_attention(data: st.DataObject) -> None:
    run(data, data.draw(worlds()))


@given(st.data())
def test_windows(data: st.DataObject) -> None:
    run(data, data.draw(worlds(windows=True)))


@given(st.data())
def test_states(data: st.DataObject) -> None:
    run(data, data.draw(worlds(states=True)))


@given(st.data())
def test_windows_and_states(data: st.DataObject) -> None:
    run(data, data.draw(worlds(windows=True, states=True)))


@given(st.data())
def test_drafts(data: st.DataObject) -> None:
    run(data, data.draw(worlds(draft=True)))


@given(st.data())
def test_everything_at_once(data: st.DataObject) -> None:
    run(data, data.draw(worlds(windows=True, states=True, draft=True)))
