"""Context reuse in any order of calls, with few pages: whatever a sequence reuses holds just what its tokens make it."""

from __future__ import annotations

import pytest

import numba_kv as kv
from numba_kv.ledger.reuse.policy import PublishPolicy
from tests.helpers.models import chunked, tiny_config
from tests.helpers.reuse_driver import LIMITS, MODELS, Driver, opened_model
from tests.helpers.reuse_model import ReuseModel


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_what_is_reused_holds_what_its_tokens_say(name: str, seed: int, target: str) -> None:
    config, limits = MODELS[name]
    with opened_model(config, limits) as (batch, io):
        model = ReuseModel(batch, io)
        driver = Driver(model, seed)
        for _ in range(12 if target == "sim" else 250):
            driver.act()
            model.check_all()
        if target != "sim":
            figures = batch.reuse.figures
            assert model.hits == figures.reused_tokens > 50
            assert figures.published_blocks > 10
            assert figures.evicted_blocks + figures.evicted_copies + figures.evicted_snapshots
            assert driver.rewinds
            assert driver.too_far == 0 or len(batch.plan.groups) > 1 or config.num_recurrent_layers
        batch.clear()
        report = batch.audit()
        assert all(pool.owned == pool.leased == pool.shared == 0 for pool in report.pools)
        batch.reuse.cache.clear()
        assert batch.audit().pools[0].cached == 0


def test_a_chunk_that_begins_inside_a_page_leaves_no_page_that_was_begun_elsewhere() -> None:
    """A row that begins where a chunk does has nothing of what lies before in that page, though others see it."""
    config = tiny_config(None, chunked(5), heads=(1, 4), num_kv_pages=40, kept_window_pages=20, **LIMITS)
    begun, points = list(range(15)), PublishPolicy(every_blocks=1)
    with opened_model(config, kv.CacheLimits()) as (batch, io):
        model = ReuseModel(batch, io)
        for tokens, policy, reused in (
            ([*begun[:12], 60], points, 0),
            (begun, PublishPolicy(every_blocks=0, tails=True), 12),
            (list(range(100, 124)), PublishPolicy(publish="none"), 0),  # what is left in the ring is another's
            ([*begun, *range(50, 59)], points, 15),  # the first page that it computes holds tokens 12, 13 and 14 too
            ([*begun[:14], 70, 71], points, 12),
        ):
            sequence = model.admit(tokens, policy=policy)
            model.check_all()
            assert sequence.reused_tokens == reused
            while sequence.pending_tokens:
                model.step({sequence: batch.prefill_chunk(sequence)})
            model.retire(sequence)
