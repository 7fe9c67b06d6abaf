"""Sequences to host memory and back: same K and V, same numbers, pages free in between, host memory counted."""

from __future__ import annotations

import numpy as np
import pytest

import numba_kv as kv
from tests.helpers.batches import everything, metadata, opened, pages_of, same
from tests.helpers.kv_model import KVModel, opened_io
from tests.helpers.models import chunked, tiny_config


def swapped_out(model: KVModel, sequence: kv.Sequence) -> kv.SwappedSequence:
    swapped = model.batch.swap_out(sequence)
    model.inherit(sequence, swapped)
    del model.told[sequence]
    return swapped


def swapped_in(model: KVModel, swapped: kv.SwappedSequence) -> kv.Sequence:
    sequence = model.batch.swap_in(swapped)
    model.inherit(swapped, sequence)
    del model.told[swapped]
    return sequence


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_sequence_comes_back_as_it_was(page: int, kind: str) -> None:
    config = tiny_config(
        None, 6, chunked(8), 6, heads=[(2, 8), (1, 8), (2, 4), (3, 7)], page_tokens=page, max_batch_size=3,
        max_step_tokens=3, max_batch_tokens=96, kv_cache_dtype=kind,
    )  # fmt: skip
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io, kind)
        first, second = batch.admit(num_tokens=13), batch.admit(num_tokens=5)
        model.step({first: 13, second: 5})
        for _ in range(3):
            model.step({first: 2, second: 1})
        model.rewind(first, 1)
        swapped = swapped_out(model, first)
        assert (first.state, swapped.state, swapped.length) == ("retired", "swapped", 18)
        assert batch.audit().rows == 1
        third = batch.admit(num_tokens=20)  # takes row and pages
        model.step({second: 3, third: 20})
        model.check()
        first = swapped_in(model, swapped)
        assert (first.row, first.length, first.pending_tokens, swapped.state) == (2, 18, 0, "resumed")
        batch.audit()
        model.check()
        model.rewind(first, 2)
        model.step({first: 3, second: 1, third: 1})
        model.check()
        batch.audit()
        assert batch.stats.swapped_out_bytes == batch.stats.swapped_in_bytes == swapped.nbytes


def test_bytes_are_those_of_the_pages_that_are_held() -> None:
    config = tiny_config(None, 6, heads=[(2, 8), (1, 4)], max_batch_size=2, kv_cache_dtype="float16")
    with opened(config) as batch:
        sequence = batch.admit(num_tokens=30)
        batch.step({sequence: 30})
        swapped = batch.swap_out(sequence)
        full, window = 2 * 4 * 16 * 2, 2 * 4 * 4 * 2  # K and V of a page
        assert swapped.nbytes == 8 * full + 3 * window
        assert batch.free_pages == batch.plan.groups[0].usable_pages
        assert batch.resources.device.pinned.current_bytes >= swapped.nbytes


def test_shared_pages_stay_with_the_others() -> None:
    with opened_io(tiny_config(None, 6, max_batch_size=3, max_batch_tokens=96, kv_cache_dtype="float32")) as (batch, io):
        model = KVModel(batch, io)
        parent = batch.admit(num_tokens=14)
        model.step({parent: 14})
        child = model.fork(parent)
        model.step({parent: 1, child: 2})
        shared = pages_of(batch, parent, 0)[:3]
        swapped = swapped_out(model, child)
        assert batch.audit().pools[0].shared == 0
        assert pages_of(batch, parent, 0)[:3] == shared
        child = swapped_in(model, swapped)
        assert not set(pages_of(batch, child, 0)) & set(shared)
        model.check()
        model.rewind(child, 6)  # nothing is shared any more
        model.step({parent: 1, child: 3})
        model.check()
        batch.audit()


def test_a_long_sequence_takes_several_blocks_of_page_ids() -> None:
    config = tiny_config(
        max_batch_size=2, max_kv_cache_capacity=400, page_tokens=1, max_batch_tokens=20, lookahead_pages=0,
        kv_cache_dtype="float32",
    )  # fmt: skip
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        sequence = batch.admit(num_tokens=400)
        for _ in range(20):
            model.step({sequence: 20})
        sequence = swapped_in(model, swapped_out(model, sequence))
        batch.audit()
        model.check()


def test_what_is_pending_is_pending_afterwards() -> None:
    with opened(tiny_config(max_batch_size=2)) as batch:
        sequence = batch.admit(num_tokens=20)
        batch.step({sequence: 7})
        sequence = batch.swap_in(batch.swap_out(sequence))
        assert (sequence.length, sequence.pending_tokens, sequence.generation) == (7, 13, 2)
        empty = batch.swap_in(batch.swap_out(batch.admit(num_tokens=3)))
        assert (empty.length, empty.pending_tokens) == (0, 3)
        batch.step({sequence: 13, empty: 3})
        batch.audit()


def test_host_memory_is_used_again() -> None:
    with opened(tiny_config(None, 6, max_batch_size=2)) as batch:
        pinned = batch.resources.device.pinned
        sequence = batch.admit(num_tokens=9)
        batch.step({sequence: 9})
        before = pinned.current_bytes
        for _ in range(5):
            sequence = batch.swap_in(batch.swap_out(sequence))
        # Blocks of 1 MiB; beside them a GPU that lags behind the host makes it take one more block of edits, of some KiB.
        assert (pinned.current_bytes - before) >> 20 == 1
        several = [batch.swap_out(s) for s in (sequence, batch.admit(num_tokens=1))]
        assert (pinned.current_bytes - before) >> 20 == 2
        held = pinned.current_bytes
        for swapped in several:
            swapped.close()
            swapped.close()
            assert swapped.state == "closed"
            with pytest.raises(kv.StateError, match="does not wait in this batch"):
                batch.swap_in(swapped)
        assert pinned.current_bytes == held  # kept for the next


def test_no_more_unused_blocks_are_kept_than_are_useful() -> None:
    with opened(tiny_config(max_batch_size=12, max_batch_tokens=64)) as batch:
        several = [batch.swap_out(batch.admit(num_tokens=1)) for _ in range(12)]
        pinned = batch.resources.device.pinned
        held = pinned.current_bytes
        for swapped in several:
            swapped.close()
        assert pinned.current_bytes == held - 4 * (1 << 20)


@pytest.mark.parametrize("batch_first", [True, False])
def test_closing_the_batch_closes_what_waits(batch_first: bool) -> None:
    resources = kv.SharedResources.create_for_llm(tiny_config())
    before = resources.device.pinned.current_bytes
    batch = kv.Batch(resources)
    swapped = batch.swap_out(batch.admit(num_tokens=3))
    if batch_first:
        batch.close()
        assert swapped.state == "closed"
        assert resources.device.pinned.current_bytes == before
    resources.close()
    assert swapped.state == "closed"
    swapped.close()
    assert resources.device.pinned.current_bytes == resources.device.memory.current_bytes == 0


def test_refusals_change_nothing() -> None:
    config = tiny_config(max_batch_size=2, num_kv_pages=16, max_batch_tokens=64, lookahead_pages=0)
    with opened(config) as batch, opened(config) as other:
        sequence = batch.admit(num_tokens=30)
        batch.step({sequence: 30})
        swapped = batch.swap_out(sequence)
        with pytest.raises(kv.StateError, match="is not active"):
            batch.swap_out(sequence)
        with pytest.raises(kv.InputError, match="is not a SwappedSequence"):
            batch.swap_in(sequence)
        with pytest.raises(kv.StateError, match="does not wait in this batch"):
            other.swap_in(swapped)
        rest = batch.admit(num_tokens=40)
        batch.step({rest: 40})
        before = everything(batch)
        with pytest.raises(kv.CapacityError, match="a sequence of 30 tokens that comes back needs 8 of 4 tokens, 6") as refused:
            batch.swap_in(swapped)
        assert (refused.value.needed, refused.value.free, refused.value.evictable) == (8, 6, 0)
        same(everything(batch), before)
        batch.rewind({rest: 20})
        batch.admit(num_tokens=1)
        with pytest.raises(kv.CapacityError, match="0 of 2 rows are free"):
            batch.swap_in(swapped)
        batch.retire(batch.sequences[1])
        assert batch.swap_in(swapped).length == 30  # with pages that ran ahead of the other
        batch.audit()


def test_without_host_memory_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny_config()) as batch:
        sequence = batch.admit(num_tokens=9)
        batch.step({sequence: 9})
        before = everything(batch)

        def refuse(nbytes: int) -> None:
            raise kv.CapacityError(f"page-locked host memory: {nbytes}", needed=nbytes, free=0)

        monkeypatch.setattr(batch.resources.device, "allocate_staging", refuse)
        with pytest.raises(kv.CapacityError, match="page-locked"):
            batch.swap_out(sequence)
        same(everything(batch), before)
        monkeypatch.undo()
        assert batch.swap_in(batch.swap_out(sequence)).length == 9


def test_the_host_forms_of_all_targets_agree(target: str) -> None:
    """Metadata after a swap equals that of a sequence which was never swapped, but for its place."""
    config = tiny_config(None, 6, max_batch_size=1, max_batch_tokens=64)
    with opened(config) as batch, opened(config) as plain:
        for each in (batch, plain):
            sequence = each.admit(num_tokens=14)
            each.step({sequence: 14})
            each.step(1)
        batch.swap_in(batch.swap_out(batch.sequences[0]))
        batch.step(1)
        plain.step(1)
        found, wanted = metadata(batch), metadata(plain)
        for name in ("lengths", "high_water", "mapped_begin", "seq_lens", "positions"):
            assert np.array_equal(found[name], wanted[name]), name
        assert batch.stats.rotated_pages == plain.stats.rotated_pages
