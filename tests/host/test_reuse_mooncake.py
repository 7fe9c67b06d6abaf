"""Prefix reuse on the prompts of a chat service: hit rates with nothing evicted, for several choices of what windows keep."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from numba_kv.geometry import Window
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import PrefixCache
from numba_kv.ledger.reuse.publish_plan import PublishRequest, RingView
from numba_kv.replay.trace import read_trace

TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces" / "mooncake_conversation.jsonl"
BLOCK = 512  # tokens that one hash id of the trace stands for: here one token, and a page is one token
#: A window of two: the next token sees one block behind it, as a window of 512 tokens sees one of 512.
GROUPS = ReuseGroups(page_tokens=1, windows=(Window("sliding", 2),))
IDENTITY = ContextIdentity(page_tokens=1)

POLICIES = {
    "prompt ends": (PublishPolicy(every_blocks=0, at_branch=False), 0.937, None),
    "branch points": (PublishPolicy(every_blocks=0), 0.960, None),
    "every 16": (PublishPolicy(every_blocks=16), 0.980, 0.11),
    "every 8": (PublishPolicy(every_blocks=8), 0.987, 0.17),
    "every 4": (PublishPolicy(every_blocks=4), 0.993, 0.29),
}


@pytest.mark.skipif(not TRACE.is_file(), reason="the real traces are not beside the checkout (../shared/data)")
@pytest.mark.parametrize("name", POLICIES)
def test_windows_keep_most_of_the_hits_of_full_attention(name: str) -> None:
    policy, wanted, wanted_share = POLICIES[name]
    prompts = [request.hash_ids[: request.input_tokens // BLOCK] for request in read_trace(TRACE).requests]
    total = sum(map(len, prompts))
    pool = PageIdPool(total, 2)
    cache = PrefixCache(GROUPS, pool=pool, window_slots=[(0, total)])
    full = windows = 0
    unseen = 1 << 30
    for prompt in filter(None, prompts):
        # One more token, which nobody else has: a prompt's last token is always computed, here it would be a block.
        lease = cache.admit(IDENTITY, TokenContent(1, [*prompt, unseen]))
        plan = lease.plan
        assert plan.matched_tokens <= len(prompt)
        full += plan.matched_tokens
        windows += plan.reused_tokens
        lease.copied()
        fresh = pool.acquire(len(prompt) - len(plan.pages))
        pages = np.concatenate([plan.pages, fresh])
        content = TokenContent(1, prompt)
        at = plan.reused_tokens
        for point in policy.points(len(prompt), at, len(prompt), plan.matched_tokens, 1):
            ring = RingView(max(0, point - 2), np.arange(max(0, point - 2), point, dtype=np.int32))
            cache.publish(
                PublishRequest(identity=IDENTITY, content=content, tokens=point, pages=pages, rings=(ring,), is_point=True)
            )
        lease.handed_over()
        pool.drop(pages)
    cache.audit()
    copies = cache.store.windows[0].num_kept
    assert round(windows / full, 3) == wanted
    if wanted_share is not None:
        assert round(copies / cache.num_blocks, 2) == wanted_share
    assert cache.num_blocks == len({block for prompt in prompts for block in prompt})
    assert pool.free_pages + cache.num_blocks == total
