"""The audit: it finds what is wrong, and finds nothing in long runs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.geometry import ceil_div
from tests.helpers.batches import opened
from tests.helpers.models import chunked, tiny_config


@pytest.fixture
def batch() -> Iterator[kv.Batch]:
    """Three rows of 64 tokens, pages of 4, a full group and a sliding window of 6 (a ring of 3 pages)."""
    with opened(tiny_config(None, 6, max_batch_size=3, max_batch_tokens=192)) as batch:
        yield batch


# -- the audit sees what it says it sees


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("lengths", (0, 0)),
        ("lengths", (1, 2)),
        ("high_water", (0, 1)),
        ("high_water", (1, 0)),
        ("floors", (0,)),
        ("leased", (2,)),
        ("live", (1,)),
        ("mapped_begin", (1, 0)),
        ("page_tables[0]", (0, 0, 0)),
        ("page_tables[0]", (0, 1, 1)),
        ("page_tables[1]", (0, 0, 0)),
        ("page_tables[1]", (2, 1, 3)),
        ("block_tables[0]", (0, 15)),
        ("block_tables[0]", (2, 0)),
        ("block_tables[1]", (1, 9)),
        ("block_tables[1]", (2, 0)),
    ],
)
def test_the_audit_finds_a_planted_error(batch: kv.Batch, name: str, place: tuple[int, ...]) -> None:
    """Also one beyond a row's length, where attention kernels read and drop it. vllm#42494."""
    sequences = batch.update(admit=[13, 5])
    batch.step({sequences[0]: 13, sequences[1]: 5})
    batch.audit()
    buffers = batch.resources.cache_managers[0].step_buffers
    kind, _, g = name.partition("[")
    tensor = getattr(buffers, kind)
    tensor = tensor[int(g[:-1])] if g else tensor
    values = tensor.to_host()
    values[place] += 1
    tensor.fill_from(values)
    with pytest.raises(kv.InvariantError):
        batch.audit()
    values[place] -= 1
    tensor.fill_from(values)
    batch.audit()


# -- long runs


@pytest.mark.parametrize("page", [2, 16, 64, 256])
def test_no_page_is_ever_lost(page: int, target: str) -> None:
    """Drafts of any length, rejected anywhere, leave the ledger equal to the pool after every step. sglang#27789."""
    steps = 2500 if target == "cpu" else 40
    random = np.random.default_rng(page)
    windows = (None, 9, chunked(12))
    config = tiny_config(
        *windows, max_batch_size=4, max_kv_cache_capacity=600, page_tokens=page, max_step_tokens=6, max_batch_tokens=600,
        num_kv_pages=2 * ceil_div(600, page), lookahead_pages=1,
    )  # fmt: skip
    with opened(config) as batch:
        usable = batch.plan.groups[0].usable_pages
        leased = batch.resources.cache_managers[0].step_buffers.leased
        for number in range(steps):
            live = batch.sequences
            if len(live) < 4 and (not live or random.random() < 0.1):
                live += batch.update(admit=[int(random.integers(1, 40))])
            drafts = {s: s.pending_tokens or int(random.integers(1, 7)) for s in live if random.random() < 0.9}
            ending = [s for s in live if s.length + 60 > 600 or random.random() < 0.003]
            if ending:
                batch.update(retire=ending)
                drafts = {s: n for s, n in drafts.items() if s not in ending}
            if drafts:
                try:
                    batch.step(drafts)
                except kv.CapacityError:
                    batch.retire(live.pop(live.index(next(iter(drafts)))))
                else:
                    rejected = {s: int(random.integers(0, min(n, 6))) for s, n in drafts.items()}
                    rejected = {s: n for s, n in rejected.items() if n}
                    if rejected:
                        batch.rewind(rejected)
            assert batch.free_pages + int(leased.to_host().sum()) == usable
            if number % 50 == 0 or number == steps - 1:
                assert [pool.total for pool in batch.audit().pools] == [g.num_pages for g in batch.plan.groups]
        assert batch.stats.rewinds > steps // 4
