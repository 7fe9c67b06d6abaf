"""The same calls give the same bytes of metadata on every target, and for every way the work is cut up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.geometry import ceil_div
from numba_kv.kernels.jit import Launch
from numba_kv.kernels.slots import fill_slots
from tests.helpers.batches import everything, opened, same
from tests.helpers.models import chunked, tiny_config

CONFIGS = [
    tiny_config(None, 6, chunked(10), max_batch_size=4, max_step_tokens=3, max_batch_tokens=200, num_kv_pages=40),
    tiny_config(None, max_batch_size=3, page_tokens=16, max_batch_tokens=100, lookahead_pages=0),
    tiny_config(5, chunked(7), max_batch_size=3, page_tokens=1, max_batch_tokens=150),
]
STEPS = 80


def script(batch: kv.Batch, seed: int) -> Iterator[str]:
    """Make random calls, legal ones and refused ones, and say after each what it was."""
    random = np.random.default_rng(seed)
    rows, capacity = batch.plan.config.max_batch_size, batch.plan.config.max_kv_cache_capacity
    for _ in range(STEPS):
        live = batch.sequences
        action = random.choice(["admit", "retire", "step", "step", "step", "decode", "decode", "rewind", "compact"])
        try:
            if action == "admit" and len(live) < rows:
                batch.update(admit=random.integers(1, 40, int(random.integers(1, rows - len(live) + 1))).tolist())
            elif action == "retire" and live:
                batch.retire(live[int(random.integers(len(live)))])
            elif action == "step" and live:
                chosen = [s for s in live if random.random() < 0.7] or live[:1]
                batch.step({s: min(s.pending_tokens, int(random.integers(1, 30))) or 1 for s in chosen})
            elif action == "decode":
                batch.step(int(random.integers(1, 3)))
            elif action == "rewind":
                chosen = [s for s in live if s.length >= capacity // 8 or random.random() < 0.3]
                batch.rewind({s: int(random.integers(1, 4)) for s in chosen})
            elif action == "compact":
                batch.compact(random.permutation(np.array(live, object)).tolist() if random.random() < 0.5 else None)
        except (kv.CapacityError, kv.InputError, kv.StateError) as error:
            action = f"{action}: {error}"
        yield str(action)


def compare(first: kv.Batch, second: kv.Batch, seed: int) -> None:
    """Run a script on both and compare everything after each call."""
    for one, other in zip(script(first, seed), script(second, seed), strict=True):
        assert one == other
        found, expected = everything(first), everything(second)
        for side in (found, expected):
            side["sequences"] = [values[1:] for values in side["sequences"]]
        same(found, expected)
    assert first.stats.tokens > 50


@pytest.mark.parametrize("config", CONFIGS)
def test_the_target_under_test_agrees_with_the_cpu(config: kv.LLMEngineConfig, target: str) -> None:
    if target == "cpu":
        pytest.skip("the cpu target is what others are compared with")
    with opened(config) as batch, opened(config, target="cpu") as reference:
        assert reference.resources.device.target == "cpu"
        compare(batch, reference, seed=1)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("tile", [1, 3])
def test_how_many_tokens_an_item_takes_does_not_matter(
    config: kv.LLMEngineConfig, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, cut = Launch.__call__, 0

    def cut_up(self: Launch, items: int, stream: kv.Stream, **scalars: int) -> None:
        nonlocal cut
        if self.kernel is fill_slots and self.device is batch.resources.device:
            cut += 1
            items, scalars["tile"] = ceil_div(scalars["num_tokens"], tile), tile
        launch(self, items, stream, **scalars)

    monkeypatch.setattr(Launch, "__call__", cut_up)
    with opened(config, target="cpu") as batch, opened(config, target="cpu") as reference:
        compare(batch, reference, seed=tile)
    assert cut > 3
