"""Adapters of sequences: they follow rows through every change, and stay loaded as long as somebody computes with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import numba_kv as kv
from tests.helpers.lora_files import OUT, SIZES, pairs, reference
from tests.helpers.models import tiny_config

TARGETS = tuple(kv.LoRATarget(name=name, k=k, n=n) for name, (k, n) in SIZES.items())


def matrices(seed: int) -> dict[str, np.ndarray]:
    return reference(pairs(OUT, seed=seed))


@pytest.fixture
def batch() -> Iterator[kv.Batch]:
    """Four rows; adapters a and b are loaded, there is room for one more."""
    config = replace(tiny_config(None, 6, max_batch_size=4), max_lora_rank=4, max_loras=3, lora_targets=TARGETS)
    with kv.SharedResources.create_for_llm(config) as resources, kv.Batch(resources) as batch:
        for seed, name in enumerate("ab"):
            lora(batch).load(name, matrices(seed))
        yield batch
        if not batch.guard.is_closed:
            check(batch)


def lora(batch: kv.Batch) -> kv.LoRAManager:
    manager = batch.resources.lora_manager
    assert manager is not None
    return manager


def check(batch: kv.Batch) -> None:
    """Compare the device's adapter of every row with that of the sequence in it."""
    manager, found = lora(batch), lora(batch).adapter_ids.to_host()
    expected = {s.row: 0 if s.adapter is None else s.adapter.slot for s in batch.sequences}
    assert found.tolist() == [expected.get(row, 0) for row in range(4)]
    for sequence in batch.sequences:
        assert manager.rows[sequence.row] == sequence.adapter


def names(batch: kv.Batch) -> list[str | None]:
    return [None if a is None else a.name for a in lora(batch).rows]


def test_rows_that_come_go_and_move(batch: kv.Batch) -> None:
    first, second, third = batch.update(admit=[3, 4, 5], adapters=["a", None, "b"])
    assert names(batch) == ["a", None, "b", None]
    batch.step({first: 3, second: 4, third: 5})
    batch.retire(first)
    assert names(batch) == [None, None, "b", None]
    batch.compact()
    assert sorted(filter(None, names(batch))) == ["b"]
    assert third.row < 2
    check(batch)
    fourth = batch.admit(num_tokens=2, adapter="a")
    batch.update(retire=[third], admit=[1, 1], adapters=["b", None])
    check(batch)
    assert fourth.adapter is not None
    assert fourth.adapter.name == "a"
    batch.compact([*reversed(batch.sequences)])
    batch.audit()


def test_forks_swaps_and_beams(batch: kv.Batch) -> None:
    first, second = batch.update(admit=[6, 7], adapters=["a", "b"])
    batch.step({first: 6, second: 7})
    child = batch.fork(first)
    assert child.adapter == first.adapter
    check(batch)
    waiting = batch.swap_out(first)
    assert first.adapter is None
    assert waiting.adapter is not None
    check(batch)
    batch.retire(child)
    with pytest.raises(kv.StateError, match="use"):
        lora(batch).unload("a")  # the sequence on the host still computes with it
    back = batch.swap_in(waiting)
    assert back.adapter is not None
    assert back.adapter.name == "a"
    batch.reorder({back: second})
    assert back.adapter == second.adapter
    check(batch)
    lora(batch).unload("a")  # nobody has it any more
    gone = batch.swap_out(back)
    gone.close()
    batch.clear()
    lora(batch).unload("b")


def test_a_sequence_keeps_the_bytes_it_was_admitted_with(batch: kv.Batch) -> None:
    old = batch.admit(num_tokens=2, adapter="a")
    lora(batch).swap("a", matrices(7))
    new = batch.admit(num_tokens=2, adapter="a")
    child = batch.fork(old)
    assert old.adapter is not None
    assert new.adapter is not None
    assert old.adapter.slot != new.adapter.slot
    assert child.adapter == old.adapter
    check(batch)


def test_a_batch_without_adapters_leaves_rows_to_the_caller(batch: kv.Batch) -> None:
    lora(batch).assign({0: "a", 3: "b"})
    first, second = batch.update(admit=[2, 2])
    batch.retire(first)
    batch.compact()
    assert names(batch) == ["a", None, None, "b"]
    lora(batch).switch("b")
    batch.retire(second)
    lora(batch).switch(None)


def test_closing_gives_adapters_back(batch: kv.Batch) -> None:
    first, _ = batch.update(admit=[2, 3], adapters=["a", "b"])
    batch.step({first: 2})
    batch.swap_out(first)
    batch.close()
    assert names(batch) == [None] * 4
    for name in "ab":
        lora(batch).unload(name)
    assert first.adapter is None


def test_what_is_refused(batch: kv.Batch) -> None:
    before = lora(batch).adapter_ids.to_host().tolist()
    for wrong, message in (
        (["a"], "1 given for 2"),
        (["a", "c"], "'c'"),
        (["a", 5], "neither the name"),
        ("ab", "not a list"),
        (5, "not a list"),
    ):
        with pytest.raises(kv.InputError, match=message):
            batch.update(admit=[2, 2], adapters=wrong)  # type: ignore[arg-type]
    with pytest.raises(kv.CapacityError):
        batch.update(admit=[1] * 5, adapters=["a"] * 5)
    assert not batch.sequences
    assert lora(batch).adapter_ids.to_host().tolist() == before
    lora(batch).unload("a")  # a refused admission holds nothing
    with kv.SharedResources.create_for_llm(tiny_config()) as plain, kv.Batch(plain) as other:
        with pytest.raises(kv.InputError, match="'a' given, but the model takes none"):
            other.admit(num_tokens=1, adapter="a")
        assert other.update(admit=[1], adapters=[None])[0].adapter is None


def test_holds_of_a_batch_are_its_own(batch: kv.Batch) -> None:
    sequence = batch.admit(num_tokens=2, adapter="a")
    assert sequence.adapter is not None
    with pytest.raises(kv.StateError, match="was not acquired"):
        lora(batch).release(sequence.adapter)
    lora(batch).assign_held({sequence.row: None})  # what only the batch may do
    with pytest.raises(kv.InvariantError, match=r"adapter_ids\[0\]"):
        batch.audit()
    with pytest.raises(kv.StateError, match="1 sequences"):
        lora(batch).unload("a")
    child = batch.fork(sequence)
    assert child.adapter == sequence.adapter
    batch.audit()
    with pytest.raises(kv.InputError, match="1 given for 0"):
        batch.update(adapters=["a"])


def test_rows_of_sequences_with_adapters_take_no_others(batch: kv.Batch) -> None:
    sequence, other = batch.update(admit=[2, 2], adapters=["a", None])
    before = lora(batch).adapter_ids.to_host().tolist()
    for retired in (None, other):
        if retired is not None:
            batch.retire(retired)
        for call in (
            lambda: lora(batch).assign({sequence.row: None}),
            lambda: lora(batch).assign({3: "b"}),
            lambda: lora(batch).switch("b"),
        ):
            with pytest.raises(kv.StateError, match="of a batch"):
                call()
        assert lora(batch).adapter_ids.to_host().tolist() == before
        batch.audit()
    swapped = batch.swap_out(sequence)
    with pytest.raises(kv.StateError, match="of a batch"):
        lora(batch).switch("b")
    batch.retire(batch.swap_in(swapped))
    assert names(batch) == [None] * 4
    lora(batch).assign({1: "b"})  # nobody's rows are the caller's again
    batch.admit(num_tokens=2)
    batch.audit()
    assert names(batch) == [None, "b", None, None]
    batch.admit(num_tokens=2, adapter="a")
    assert names(batch) == [None, "a", None, None]
    batch.audit()


def test_a_manager_that_is_closed_ends_no_batch(batch: kv.Batch) -> None:
    sequence = batch.admit(num_tokens=2, adapter="a")
    lora(batch).close()
    child = batch.fork(sequence)
    assert child.adapter is None
    batch.retire(sequence)
    with pytest.raises(kv.StateError, match="closed"):
        batch.admit(num_tokens=1, adapter="a")
    assert batch.sequences == [child]
    batch.close()
