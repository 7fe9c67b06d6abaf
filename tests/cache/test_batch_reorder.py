"""Beams: sequences take the tokens of others over, in any way at all, and keep rows and names."""

from __future__ import annotations

import numpy as np
import pytest

import numba_kv as kv
from tests.helpers.batches import everything, metadata, opened, pages_of, same
from tests.helpers.kv_model import KVModel, opened_io
from tests.helpers.models import chunked, tiny_config


def reordered(model: KVModel, parents: dict[kv.Sequence, kv.Sequence]) -> None:
    before, rewound = dict(model.told), set(model.rewound)
    rows = {s: s.row for s in model.batch.sequences}
    lengths = {s: s.length for s in model.batch.sequences}
    model.batch.reorder(parents)
    for sequence, parent in parents.items():
        model.told[sequence] = {layer: list(told) for layer, told in before[parent].items()}
        model.rewound.discard(sequence)
        if parent in rewound:
            model.rewound.add(sequence)
        assert sequence.length == lengths[parent]
    assert {s: s.row for s in model.batch.sequences} == rows
    model.batch.audit()


@pytest.mark.parametrize("page", [1, 4, 16])
def test_beams(page: int, target: str) -> None:
    config = tiny_config(
        None, 6, chunked(8), heads=[(2, 8), (1, 8), (2, 4)], page_tokens=page, max_batch_size=5, max_batch_tokens=160,
        kv_cache_dtype="float32",
    )  # fmt: skip
    with opened_io(config) as (batch, io):
        model, random = KVModel(batch, io), np.random.default_rng(3)
        hole, first = batch.admit(num_tokens=2), batch.admit(num_tokens=13)
        model.step({hole: 2, first: 13})
        beams = [first, *(model.fork(first) for _ in range(3))]
        model.retire(hole)
        for _ in range(4 if target == "sim" else 25):
            model.step(dict.fromkeys(beams, 1))
            reordered(model, {beam: beams[int(random.integers(4))] for beam in beams})
            model.check()
        assert batch.stats.forked > 3
        batch.clear()
        assert batch.free_pages == batch.plan.groups[0].usable_pages
        batch.audit()


def test_an_exchange_moves_no_bytes() -> None:
    with opened_io(tiny_config(None, 6, max_batch_size=3, max_batch_tokens=96, kv_cache_dtype="float32")) as (batch, io):
        model = KVModel(batch, io)
        a, b, c = batch.update(admit=[5, 9, 14])
        model.step({a: 5, b: 9, c: 14})
        pages = {s: pages_of(batch, s, 0) for s in (a, b, c)}
        reordered(model, {a: b, b: c, c: a})
        assert [pages_of(batch, s, 0) for s in (a, b, c)] == [pages[b], pages[c], pages[a]]
        assert (batch.stats.copied_pages, batch.stats.forked) == (0, 0)
        assert [s.prompt_tokens for s in (a, b, c)] == [9, 14, 5]
        assert [s.generation for s in (a, b, c)] == batch.stepper.ledger.generation.tolist() == [1, 2, 3]
        model.step({a: 1, b: 1, c: 1})
        model.check()


def test_pages_of_those_that_leave_serve_the_copies() -> None:
    config = tiny_config(max_batch_size=2, num_kv_pages=16, max_batch_tokens=64, lookahead_pages=0, kv_cache_dtype="float32")
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        a, b = batch.update(admit=[30, 30])
        model.step({a: 30, b: 30})
        assert batch.free_pages == 0
        reordered(model, {b: a})
        assert batch.free_pages == 7
        model.check()


def test_pending_tokens_follow() -> None:
    with opened(tiny_config(max_batch_size=2)) as batch:
        a, b = batch.update(admit=[20, 6])
        batch.step({a: 5, b: 6})
        batch.reorder({b: a})
        assert (b.length, b.pending_tokens) == (5, 15)
        batch.step({a: 15, b: 15})
        batch.audit()


def test_the_same_order_does_nothing() -> None:
    with opened(tiny_config(max_batch_size=2)) as batch:
        a, b = batch.update(admit=[3, 6])
        batch.step({a: 3, b: 6})
        before = everything(batch)
        batch.reorder({a: a, b: b})
        batch.reorder({})
        same(everything(batch), before)


def test_refusals_change_nothing() -> None:
    config = tiny_config(max_batch_size=3, num_kv_pages=16, max_batch_tokens=64, lookahead_pages=0)
    with opened(config) as batch:
        a, b, gone = batch.update(admit=[31, 32, 1])
        batch.step({a: 31, b: 32})
        batch.retire(gone)
        before = everything(batch)
        with pytest.raises(kv.InputError, match="list is not a mapping"):
            batch.reorder([a, b])
        with pytest.raises(kv.StateError, match="is not active"):
            batch.reorder({a: gone})
        with pytest.raises(kv.InputError, match="is not a Sequence"):
            batch.reorder({a: 1})
        same(everything(batch), before)
        counts = batch.resources.device.tensor((3,), kv.dtype("int32"))
        batch.rewind({a: 2})
        batch.step({a: 1}, counts=counts)
        with pytest.raises(kv.StateError, match="sync_lengths"):
            batch.reorder({b: a})
        counts._memory.close(batch.resources.stream)
        batch.sync_lengths()
        batch.reorder({b: a, a: b})
        assert (a.length, b.length) == (32, 29)
        batch.audit()


def test_too_few_pages_for_the_copies() -> None:
    config = tiny_config(max_batch_size=3, num_kv_pages=17, max_batch_tokens=64, lookahead_pages=0)
    with opened(config) as batch:
        a, b, c = batch.update(admit=[30, 34, 1])
        batch.step({a: 30, b: 34})
        before = everything(batch)
        with pytest.raises(kv.CapacityError, match="the new order needs 1 of 4 tokens, 0 are free") as refused:
            batch.reorder({c: a})
        assert (refused.value.needed, refused.value.free) == (1, 0)
        same(everything(batch), before)
        assert metadata(batch)["floors"].tolist() == [0, 0, 0]
