"""Random requests to a world, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from numba_kv.geometry import Window
from numba_kv.ledger.reuse.block_hash import Blake2bHash
from numba_kv.ledger.reuse.content import MediaSpan, TokenContent
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.policy import PublishPolicy
from tests.helpers.reuse_world import ConstantHash, World

NAMINGS: list[Any] = [None, Blake2bHash(), ConstantHash()]
WINDOWS = [Window("sliding", 1), Window("sliding", 3), Window("sliding", 7), Window("chunked", 4), Window("chunked", 6)]


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
    """Return two that share nothing."""
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
    """Serve requests of all kinds, and check everything after each."""
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
