"""Forks: what is shared, what is copied, what nobody may rewrite, and when pages are free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.cache import KVIO
from numba_kv.dtypes import dtype
from numba_kv.kernels.layout import Status
from tests.helpers.batches import everything, mapped, opened, pages_of, same
from tests.helpers.kv_model import KVModel, opened_io
from tests.helpers.models import chunked, tiny_config


@pytest.fixture
def batch() -> Iterator[kv.Batch]:
    """Four rows of 64 tokens, pages of 4, a full group and a sliding window of 6 (a ring of 3 pages)."""
    with opened(tiny_config(None, 6, max_batch_size=4, max_batch_tokens=256, lookahead_pages=2)) as batch:
        yield batch


def grown(batch: kv.Batch, tokens: int) -> kv.Sequence:
    """Return a new sequence of `tokens` tokens."""
    sequence = batch.admit(num_tokens=tokens)
    batch.step({sequence: tokens})
    return sequence


def test_full_pages_are_shared_and_the_rest_is_copied(batch: kv.Batch) -> None:
    parent = grown(batch, 14)
    child = batch.fork(parent)
    assert pages_of(batch, parent, 0)[:3] == pages_of(batch, child, 0)[:3]
    assert len(pages_of(batch, child, 0)) == 4  # nothing that runs ahead
    assert not set(pages_of(batch, child, 0)[3:]) & set(pages_of(batch, parent, 0))
    assert mapped(batch, parent, 1) == mapped(batch, child, 1) == [1, 2, 3]
    assert not set(pages_of(batch, child, 1)) & set(pages_of(batch, parent, 1))
    figures = batch.audit().pools[0]
    assert (figures.shared, figures.owned, figures.total) == (3, 4, batch.plan.groups[0].num_pages)
    assert (child.length, child.pending_tokens, child.prompt_tokens, child.generation) == (14, 0, 14, 2)
    assert (batch.stats.forked, batch.stats.admitted, batch.stats.copied_pages) == (1, 2, 1 + 3)
    batch.step(1)
    batch.audit()


def test_a_whole_page_is_not_copied(batch: kv.Batch) -> None:
    parent = grown(batch, 12)
    free = batch.free_pages
    child = batch.fork(parent)
    assert batch.free_pages == free
    assert pages_of(batch, child, 0) == pages_of(batch, parent, 0)[:3]
    batch.step(1)
    assert pages_of(batch, child, 0)[3] != pages_of(batch, parent, 0)[3]
    batch.audit()


@pytest.mark.parametrize("first_leaves", [True, False])
def test_pages_are_free_when_the_last_holder_is_gone(batch: kv.Batch, first_leaves: bool) -> None:
    parent = grown(batch, 14)
    children = batch.fork(parent, 2)
    assert [c.row for c in children] == [1, 2]
    usable = batch.plan.groups[0].usable_pages
    leaving = [parent, *children] if first_leaves else [*children, parent]
    shared = pages_of(batch, parent, 0)[:3]
    for left in leaving[:-1]:
        batch.retire(left)
        assert pages_of(batch, leaving[-1], 0)[:3] == shared
        batch.audit()
    assert batch.audit().pools[0].shared == 0
    batch.retire(leaving[-1])
    assert batch.free_pages == usable
    batch.audit()


def test_all_holders_can_leave_at_once(batch: kv.Batch) -> None:
    parent = grown(batch, 64)
    batch.fork(parent, 3)
    batch.update(retire=batch.sequences, admit=[3, 4])
    assert batch.free_pages == batch.plan.groups[0].usable_pages
    batch.audit()


def test_neither_rewinds_into_shared_pages(batch: kv.Batch) -> None:
    parent = grown(batch, 14)
    child = batch.fork(parent)
    batch.step(1)
    before = everything(batch)
    for sequence in (parent, child):
        with pytest.raises(kv.RewindTooFar, match="its first 12 tokens lie in pages that other sequences read too"):
            batch.rewind({sequence: 4})
    same(everything(batch), before)
    batch.rewind({parent: 3})
    batch.rewind({child: 3})
    assert (parent.length, child.length) == (12, 12)
    batch.step({parent: 2, child: 2})
    assert pages_of(batch, child, 0)[3] != pages_of(batch, parent, 0)[3]
    batch.audit()


def test_the_last_holder_may_rewrite_again() -> None:
    with opened(tiny_config(max_batch_size=3, max_batch_tokens=256)) as batch:
        parent = grown(batch, 30)
        child = batch.fork(parent)
        batch.retire(parent)
        assert floors(batch)[child.row] == 28  # nothing was sent
        batch.rewind({child: 13})
        assert (child.length, floors(batch)[child.row]) == (17, 0)
        batch.audit()
        grandchild = batch.fork(child)
        with pytest.raises(kv.RewindTooFar, match="its first 16 tokens"):
            batch.rewind({grandchild: 2})
        batch.retire(grandchild)
        batch.rewind({child: 7})
        batch.step({child: 9})
        batch.audit()


def test_part_of_the_shared_pages_can_become_free_to_rewrite() -> None:
    with opened(tiny_config(max_batch_size=3, max_batch_tokens=256)) as batch:
        first = grown(batch, 9)
        second = batch.fork(first)
        batch.step(1)
        batch.step({second: 20})
        third = batch.fork(second)
        batch.retire(third)
        with pytest.raises(kv.RewindTooFar, match="its first 8 tokens"):
            batch.rewind({second: second.length - 7})
        batch.rewind({second: second.length - 10})
        assert floors(batch)[second.row] == 8
        batch.audit()


def test_a_sequence_rewound_to_nothing_gives_shared_pages_up(batch: kv.Batch) -> None:
    parent = grown(batch, 14)
    child = batch.fork(parent)
    batch.step(1)
    batch.rewind({child: child.length, parent: parent.length})
    assert (parent.length, child.length) == (0, 0)
    assert pages_of(batch, parent, 0) == pages_of(batch, child, 0) == []
    assert floors(batch).tolist() == [0] * 4
    batch.audit()
    batch.step({parent: 7, child: 9})
    assert not set(pages_of(batch, parent, 0)) & set(pages_of(batch, child, 0))
    batch.audit()


def test_an_empty_sequence_can_be_forked(batch: kv.Batch) -> None:
    parent = batch.admit(num_tokens=5)
    child = batch.fork(parent)
    assert (child.length, child.pending_tokens) == (0, 5)
    batch.step({parent: 5, child: 5})
    assert not set(pages_of(batch, parent, 0)) & set(pages_of(batch, child, 0))
    batch.audit()


def test_what_is_pending_is_pending_for_the_child_too(batch: kv.Batch) -> None:
    parent = batch.admit(num_tokens=20)
    batch.step({parent: 9})
    child = batch.fork(parent)
    assert child.pending_tokens == 11
    batch.step({parent: 11, child: 11})
    batch.audit()


def test_the_device_takes_nothing_back_that_is_shared() -> None:
    """Tokens of a parent's last step are in shared pages: the row refuses, is left as it is and says so."""
    with opened(tiny_config(None, 6, max_batch_size=2, max_batch_tokens=128, max_step_tokens=6)) as batch:
        parent = grown(batch, 6)
        batch.step({parent: 6})
        child = batch.fork(parent)
        shape, back = (2,), np.array([5, 0], np.int32)
        array = batch.resources.device.tensor(shape, dtype("int32"))
        array.fill_from(back)
        batch.step({parent: 1, child: 1}, take_back=array)
        assert batch.refusals() == {parent: Status.REWIND_TOO_FAR}
        batch.sync_lengths()
        assert (parent.length, child.length) == (12, 13)
        array.fill_from(np.array([0, 1], np.int32))
        batch.step({parent: 1, child: 2}, take_back=array)
        batch.sync_lengths()
        assert (parent.length, child.length) == (13, 14)
        batch.audit()
        array._memory.close(batch.resources.stream)


def test_a_step_that_is_taken_back_whole_does_not_empty_a_forked_row() -> None:
    with opened(tiny_config(max_batch_size=2, max_batch_tokens=128, max_step_tokens=8)) as batch:
        parent = grown(batch, 8)
        batch.fork(parent)
        array = batch.resources.device.tensor((2,), dtype("int32"))
        array.fill_from(np.array([8, 0], np.int32))
        batch.step({parent: 1}, take_back=array)
        assert batch.refusals() == {parent: Status.REWIND_TOO_FAR}
        batch.sync_lengths()
        assert parent.length == 8
        batch.audit()
        array._memory.close(batch.resources.stream)


def test_forks_survive_compaction_and_captured_steps(batch: kv.Batch) -> None:
    first, parent = grown(batch, 5), grown(batch, 14)
    graph = batch.capture()
    child = batch.fork(parent)
    batch.retire(first)
    batch.compact()
    batch.audit()
    graph.reserve(30)
    for _ in range(30):
        graph.launch()
    graph.advanced()
    assert (parent.length, child.length) == (44, 44)
    assert pages_of(batch, parent, 0)[:3] == pages_of(batch, child, 0)[:3]
    assert not set(pages_of(batch, parent, 0)[3:]) & set(pages_of(batch, child, 0)[3:])
    batch.audit()


def test_a_fork_ends_a_run_of_even_steps_and_what_was_reserved(batch: kv.Batch) -> None:
    parent = grown(batch, 13)
    batch.step(1)
    batch.step(1)
    child = batch.fork(parent)
    assert child.length == 15
    view = batch.step(1)
    assert view.num_tokens == 2
    assert view.seq_lens.to_host()[:2].tolist() == [16, 16]
    batch.reserve(3)
    batch.fork(parent)
    with pytest.raises(kv.StateError, match="0 were reserved"):
        batch.advanced(1)


def test_pages_that_run_ahead_are_taken_for_the_copy() -> None:
    config = tiny_config(max_batch_size=3, num_kv_pages=16, lookahead_pages=13, max_batch_tokens=64)
    with opened(config) as batch:
        parent = grown(batch, 6)
        assert batch.free_pages == 1
        children = batch.fork(parent, 2)
        assert batch.free_pages == 0
        assert len(pages_of(batch, parent, 0)) == 14
        assert all(len(pages_of(batch, c, 0)) == 2 for c in children)
        batch.audit()


def test_refusals_change_nothing() -> None:
    config = tiny_config(max_batch_size=3, num_kv_pages=16, lookahead_pages=0, max_batch_tokens=64)
    with opened(config) as batch:
        parent, other = grown(batch, 30), grown(batch, 32)
        before = everything(batch)
        with pytest.raises(kv.CapacityError, match="a fork of 30 tokens needs 1 of 4 tokens, 0 are free") as refused:
            batch.fork(parent)
        assert (refused.value.needed, refused.value.free, refused.value.evictable) == (1, 0, 0)
        with pytest.raises(kv.CapacityError, match="2 sequences are to be admitted, 1 of 3 rows are free"):
            batch.fork(other, 2)
        for wrong in (0, -1, 1.5, True, "2"):
            with pytest.raises(kv.InputError, match="count: "):
                batch.fork(parent, wrong)
        with pytest.raises(kv.InputError, match="is not a Sequence"):
            batch.fork(0)
        same(everything(batch), before)
        batch.fork(other)  # all its pages are full
        batch.retire(parent)
        with pytest.raises(kv.StateError, match="is not active"):
            batch.fork(parent)


def test_a_length_that_the_device_decided_is_asked_for_first(batch: kv.Batch) -> None:
    parent = grown(batch, 6)
    counts = batch.resources.device.tensor((4,), dtype("int32"))
    batch.step({parent: 3}, counts=counts)
    with pytest.raises(kv.StateError, match=r"call sync_lengths\(\) first"):
        batch.fork(parent)
    batch.sync_lengths()
    assert batch.fork(parent).length == 6
    counts._memory.close(batch.resources.stream)


def floors(batch: kv.Batch) -> np.ndarray:
    return batch.resources.cache_managers[0].step_buffers.floors.to_host()


# -- K and V


@pytest.mark.parametrize("page", [1, 4, 16])
def test_every_sequence_keeps_its_own_kv(page: int) -> None:
    config = tiny_config(
        None, 6, chunked(8), 6, heads=[(2, 8), (1, 8), (2, 4), (3, 7)], page_tokens=page, max_batch_size=4,
        max_step_tokens=3, max_batch_tokens=96, kv_cache_dtype="float32",
    )  # fmt: skip
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        parent = batch.admit(num_tokens=11)
        model.step({parent: 11})
        model.step({parent: 3})
        child = model.fork(parent)
        model.check()
        for _ in range(5):
            model.step({parent: 1, child: 3})
            model.check()
        model.rewind(child, 2)
        model.check()
        grandchild = model.fork(child)
        model.check()
        model.step({parent: 2, child: 3, grandchild: 1})
        model.check()
        model.retire(parent)
        model.step({child: 9, grandchild: 1})
        model.check()
        batch.audit()


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3"])
def test_random_forks_keep_their_kv(kind: str, target: str) -> None:
    windows = (None, 5, chunked(6))
    config = tiny_config(
        *windows, heads=(1, 4), page_tokens=4, max_batch_size=4, max_batch_tokens=64, kv_cache_dtype=kind,
        max_step_tokens=2, num_kv_pages=30, lookahead_pages=1,
    )  # fmt: skip
    with opened_io(config) as (batch, io):
        model, random = KVModel(batch, io, kind), np.random.default_rng(8)
        for _ in range(15 if target == "sim" else 150):
            drive(model, random)
            model.check()
        batch.audit()


def drive(model: KVModel, random: np.random.Generator) -> None:
    """Do one thing to a batch."""
    batch, choice = model.batch, random.random()
    sequences = list(batch.sequences)
    if not sequences or (choice < 0.15 and batch.free_rows):
        if batch.free_rows:
            sequence = batch.admit(num_tokens=int(random.integers(1, 12)))
            model.step({sequence: sequence.pending_tokens})
        return
    sequence = sequences[int(random.integers(len(sequences)))]
    if choice < 0.4 and batch.free_rows and batch.free_pages > 2:
        model.fork(sequence)
    elif choice < 0.5 or sequence.length > 40:
        model.retire(sequence)
    elif choice < 0.65:
        try:
            model.rewind(sequence, int(random.integers(1, min(6, sequence.length) + 1)))
        except kv.RewindTooFar:
            return
    elif choice < 0.7:
        batch.compact()
    else:
        model.step({s: int(random.integers(1, 3)) for s in sequences if s.length})


def test_a_fork_of_a_model_without_layers_of_its_own_group(target: str) -> None:
    with opened_io(tiny_config(5, heads=(1, 8), kv_cache_dtype="float32")) as (batch, io):
        model = KVModel(batch, io)
        parent = batch.admit(num_tokens=9)
        model.step({parent: 9})
        child = model.fork(parent)
        model.rewind(child, 1)
        model.step({parent: 1, child: 1})
        model.check()
        assert batch.audit().pools[0].total == 2
        assert isinstance(io, KVIO)
