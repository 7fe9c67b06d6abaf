"""Rows of a padded batch: which columns are stored, beside a plain list a row. Needs neither torch nor transformers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_kv as kv
from numba_kv.adapters.transformers_rows import ModelRows
from numba_kv.errors import CapacityError, InputError, RewindTooFar
from tests.helpers.batches import opened
from tests.helpers.models import tiny_config

ROWS, CAPACITY, REACH = 5, 48, 4


def config(**limits: int) -> kv.LLMEngineConfig:
    """Return a model with a full and a sliding layer."""
    sizes = {"max_batch_size": ROWS, "max_kv_cache_capacity": CAPACITY, "page_tokens": 2, "max_step_tokens": REACH}
    return tiny_config(None, 6, **{**sizes, "max_batch_tokens": ROWS * CAPACITY, **limits})


class Naive:
    """The same as lists: of each row the padded indices that are stored, and its pads."""

    def __init__(self) -> None:
        self.length = 0
        self.rows: list[list[int]] = []

    def step(self, tokens: int, pads: list[int]) -> list[list[int]]:
        """Append columns; return the stored ones of each row."""
        if not self.rows:
            self.rows = [[] for _ in pads]
        new = [list(range(min(p, tokens) if not row else 0, tokens)) for row, p in zip(self.rows, pads, strict=True)]
        if not any(new):
            new = [[tokens - 1] for _ in new]
        for row, columns in zip(self.rows, new, strict=True):
            row += [self.length + column for column in columns]
        self.length += tokens
        return new

    def rewind(self, tokens: int) -> None:
        self.length -= tokens
        self.rows = [[index for index in row if index < self.length] for row in self.rows]

    def select(self, parents: list[int]) -> None:
        self.rows = [list(self.rows[parent]) for parent in parents]


def check(rows: ModelRows, naive: Naive) -> None:
    """Check lengths and offsets, and that row i of every table is row i."""
    assert rows.length == naive.length
    assert rows.lengths.tolist() == [len(row) for row in naive.rows]
    for offset, row in zip(rows.offsets, naive.rows, strict=True):
        assert row == [int(offset) + position for position in range(len(row))]
        assert row or offset <= naive.length
    lengths = rows.batch.resources.cache_managers[0].lengths.to_host()
    assert lengths[: len(naive.rows)].tolist() == [len(row) for row in naive.rows]
    assert not lengths[len(naive.rows) :].any()
    rows.batch.audit()


@settings(max_examples=25)
@given(data=st.data())
def test_rows_are_what_a_list_is(data: st.DataObject, target: str) -> None:
    if target == "sim" and data.draw(st.integers(0, 4)):
        return  # a fifth of the examples, in the simulator
    with opened(config(), target) as batch:
        rows, naive = ModelRows(batch), Naive()
        count = data.draw(st.integers(1, 3))
        for _ in range(data.draw(st.integers(1, 8))):
            what = data.draw(st.sampled_from(["step", "step", "step", "rewind", "select", "clear"]))
            if what == "step":
                tokens = data.draw(st.integers(1, 7))
                pads = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
                if naive.length + tokens > CAPACITY:
                    continue
                step = rows.step(count, tokens, np.array(pads))
                stored = naive.step(tokens, pads)
                assert (step.rows, step.tokens, step.length) == (count, tokens, naive.length)
                assert step.view.num_tokens == sum(map(len, stored))
                kept = [0] * count if step.pads is None else step.pads.tolist()
                assert [list(range(p, tokens)) for p in kept] == stored
            elif what == "rewind" and naive.length:
                tokens = data.draw(st.integers(0, min(REACH, naive.length)))
                try:
                    rows.rewind(tokens)
                except RewindTooFar:  # behind a fork, into pages that others read, or behind an earlier rewind
                    check(rows, naive)
                    continue
                naive.rewind(tokens)
            elif what == "select" and naive.rows:
                parents = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=ROWS))
                rows.select(parents)
                naive.select(parents)
                count = len(parents)
            elif what == "clear":
                rows.clear()
                naive = Naive()
            check(rows, naive)


def test_an_order_that_changes_nothing_launches_nothing(target: str) -> None:
    with opened(config(), target) as batch:
        rows = ModelRows(batch)
        rows.step(3, 4, None)
        before = batch.stats.launches
        rows.select([0, 1, 2])
        assert batch.stats.launches == before


def test_a_permutation_copies_no_page(target: str) -> None:
    with opened(config(), target) as batch:
        rows = ModelRows(batch)
        rows.step(4, 9, np.array([0, 1, 2, 3]))
        rows.select([3, 0, 1, 2])
        assert rows.lengths.tolist() == [6, 9, 8, 7]
        assert batch.stats.copied_pages == batch.stats.forked == 0


def test_a_step_that_does_not_fit_starts_no_row(target: str) -> None:
    with opened(config(), target) as batch:
        rows = ModelRows(batch)
        with pytest.raises(CapacityError, match=f"{ROWS + 1} rows given"):
            rows.step(ROWS + 1, 1, None)
        with pytest.raises(CapacityError, match=f"would have {CAPACITY + 1} tokens"):
            rows.step(1, CAPACITY + 2, np.array([1]))
        assert batch.sequences == []
        rows.step(2, CAPACITY + 1, np.array([1, 9]))
        with pytest.raises(InputError, match="3 rows given, the cache holds 2"):
            rows.step(3, 1, None)
        with pytest.raises(InputError, match=f"-{CAPACITY + 2} given"):
            rows.rewind(CAPACITY + 2)
        assert rows.lengths.tolist() == [CAPACITY, CAPACITY - 8]
