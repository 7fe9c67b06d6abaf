"""Context reuse in any order of calls, with few pages: whatever a sequence reuses holds just what its tokens make it."""

from __future__ import annotations

import pytest

from tests.helpers.reuse_driver import MODELS, Driver, opened_model
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
