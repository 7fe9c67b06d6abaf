"""Captured K and V: the tokens as they were written, restored into rows with any pages, windows as after the same tokens."""

from __future__ import annotations

import numpy as np
import pytest

import numba_kv as kv
from tests.helpers.batches import everything, mapped, opened, same
from tests.helpers.kv_model import KVModel, opened_io
from tests.helpers.kv_pools import same_bits
from tests.helpers.models import chunked, tiny_config
from tests.helpers.states import kinds_of, mamba2, recurrent_config, short_conv


def captured(model: KVModel, sequence: kv.Sequence, start: int, stop: int, place: str = "device") -> kv.KVSnapshot:
    """Capture a range and check the tensors against what was written."""
    snapshot = model.batch.capture_kv(sequence, start, stop, place=place)
    for layer in model.layers:
        storage = model.batch.resources.cache_managers[0].storage(layer)
        first, found = snapshot.first(layer), snapshot.kv(layer)
        assert found.shape == (2, stop - first, storage.num_kv_heads, storage.head_dim)
        assert first <= max(start, storage.window.lowest_key(stop))
        values = found.to_host()
        for position in range(first, stop):
            assert same_bits(values[:, position - first], model.told[sequence][layer][position]), (layer, position)
    return snapshot


def restored(model: KVModel, source: object, sequence: kv.Sequence, snapshot: kv.KVSnapshot) -> None:
    model.batch.restore_kv(sequence, snapshot)
    own = model.told.setdefault(sequence, {layer: [] for layer in model.layers})
    for layer, told in own.items():
        told += model.told[source][layer][snapshot.start : snapshot.stop]


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_a_prompt_is_restored_into_other_rows(page: int, kind: str, place: str) -> None:
    config = tiny_config(
        None, 6, chunked(8), 6, heads=[(2, 8), (1, 8), (2, 4), (3, 7)], page_tokens=page, max_batch_size=4,
        max_step_tokens=3, max_batch_tokens=96, kv_cache_dtype=kind,
    )  # fmt: skip
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io, kind)
        source = batch.admit(num_tokens=21)
        model.step({source: 21})
        snapshot = captured(model, source, 0, 21, place)
        model.step({source: 2})
        other, third = batch.admit(num_tokens=30), batch.admit(num_tokens=21)
        restored(model, source, other, snapshot)
        restored(model, source, third, snapshot)
        assert (other.length, other.pending_tokens, third.pending_tokens) == (21, 9, 0)
        model.check()
        batch.audit()
        model.rewind(third, 3)
        model.step({source: 1, other: 9, third: 2})
        model.check()
        model.retire(source)
        model.step({other: 1, third: 1})
        model.check()
        batch.audit()
        snapshot.close()


def test_the_beginning_of_a_longer_sequence() -> None:
    """As long as the windows hold what the next token sees; the pages of the window that are there are captured."""
    config = tiny_config(None, 6, max_batch_size=2, max_batch_tokens=96, max_step_tokens=8, kv_cache_dtype="float32")
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        source = batch.admit(num_tokens=20)
        model.step({source: 20})
        with captured(model, source, 0, 15) as snapshot:
            sequence = batch.admit(num_tokens=16)
            restored(model, source, sequence, snapshot)
            model.check()
            model.step({sequence: 1, source: 1})
            model.check()
        with pytest.raises(kv.RewindTooFar, match=r"position 9 sees .*capture while the sequence is that short"):
            batch.capture_kv(source, 0, 9)
        batch.audit()


def test_a_range_in_the_middle_is_appended_to_a_sequence_of_that_length() -> None:
    config = tiny_config(
        None, 6, chunked(8), max_batch_size=2, max_batch_tokens=96, kv_cache_dtype="float32", max_step_tokens=4
    )  # fmt: skip
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        source, other = batch.admit(num_tokens=24), batch.admit(num_tokens=24)
        model.step({source: 10, other: 11})
        model.step({source: 14})
        with captured(model, source, 11, 24) as snapshot:
            restored(model, source, other, snapshot)
            assert other.pending_tokens == 0
            model.check()
            batch.audit()
            model.step({source: 1, other: 1})
            model.check()
            batch.audit()


def test_a_step_takes_nothing_restored_back() -> None:
    with opened(tiny_config(max_batch_size=2, max_step_tokens=4)) as batch:
        source, other = batch.update(admit=[9, 9])
        batch.step({source: 9, other: 3})
        with batch.capture_kv(source, 3, 9) as snapshot:
            batch.restore_kv(other, snapshot)
        accepted = batch.resources.device.tensor((2,), kv.dtype("int32"))
        batch.step({source: 1, other: 1})
        accepted.fill_from(np.array([1, 0], np.int32))
        batch.step({source: 1, other: 1}, accepted=accepted)
        batch.sync_lengths()
        assert (source.length, other.length) == (11, 10)
        batch.audit()
        accepted._memory.close(batch.resources.stream)


def test_a_snapshot_outlives_the_batch_and_its_resources() -> None:
    config = tiny_config(None, 6, kv_cache_dtype="float32")
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        source = batch.admit(num_tokens=13)
        model.step({source: 13})
        snapshot = batch.capture_kv(source, 0, 13, place="host")
        expected = [snapshot.kv(layer).to_host() for layer in range(2)]
        batch.close()
        with kv.Batch(batch.resources) as second:
            second.restore_kv(second.admit(num_tokens=13), snapshot)
            second.audit()
        with kv.SharedResources.create_for_llm(config) as others, kv.Batch(others) as third:
            sequence = third.admit(num_tokens=13)
            third.restore_kv(sequence, snapshot)
            with third.capture_kv(sequence, 0, 13) as again:
                for layer in range(2):
                    assert same_bits(again.kv(layer).to_host(), expected[layer])
        snapshot.close()


def test_a_borrower_shows_what_its_donor_keeps() -> None:
    with opened(tiny_config(None, None, donors={1: 0})) as batch:
        sequence = batch.admit(num_tokens=5)
        batch.step({sequence: 5})
        with batch.capture_kv(sequence, 0, 5) as snapshot:
            assert snapshot.kv(1).address == snapshot.kv(0).address
            assert snapshot.nbytes == 2 * 5 * 8 * 2


def test_refusals_change_nothing() -> None:
    config = tiny_config(None, 6, max_batch_size=2, num_kv_pages=16, lookahead_pages=0, max_batch_tokens=64)
    with opened(config) as batch:
        source = batch.admit(num_tokens=30)
        batch.step({source: 30})
        for start, stop in ((0, 0), (3, 3), (-1, 4), (0, 31), (5, 4), (0.0, 4), (True, 4)):
            with pytest.raises(kv.InputError, match="is not a range of the 30 tokens"):
                batch.capture_kv(source, start, stop)
        with pytest.raises(kv.InputError, match="'gpu' is neither"):
            batch.capture_kv(source, 0, 30, place="gpu")
        snapshot = batch.capture_kv(source, 0, 30)
        other = batch.admit(num_tokens=40)
        batch.step({source: 6})
        before = everything(batch)
        with pytest.raises(kv.InputError, match="is not a KVSnapshot"):
            batch.restore_kv(other, source)
        with pytest.raises(kv.StateError, match="has 36 tokens, but the snapshot begins at 0"):
            batch.restore_kv(source, snapshot)
        with pytest.raises(kv.CapacityError, match=r"the restored range \[0, 30\) needs 8 of 4 tokens, 7 are free") as refused:
            batch.restore_kv(other, snapshot)
        assert (refused.value.needed, refused.value.free) == (8, 7)
        same(everything(batch), before)
        with pytest.raises(kv.InputError, match="layer: 2 is not one of"):
            snapshot.kv(2)
        with opened(tiny_config(None, 7)) as another, pytest.raises(kv.InputError, match="of another form"):
            another.restore_kv(another.admit(num_tokens=30), snapshot)
        with opened(tiny_config(None, 6, max_kv_cache_capacity=28)) as another, pytest.raises(kv.CapacityError, match="exceed"):
            another.restore_kv(another.admit(num_tokens=28), snapshot)
        snapshot.close()
        snapshot.close()
        with pytest.raises(kv.StateError, match="closed"):
            batch.restore_kv(other, snapshot)
        with pytest.raises(kv.StateError, match="closed"):
            snapshot.kv(0)


def test_a_row_keeps_its_own_pages_that_ran_ahead() -> None:
    config = tiny_config(max_batch_size=2, num_kv_pages=16, lookahead_pages=5, max_batch_tokens=64)
    with opened(config) as batch:
        source, other = batch.update(admit=[20, 20])
        batch.step({source: 20, other: 4})
        assert batch.free_pages == 0
        with batch.capture_kv(source, 4, 20) as snapshot:
            batch.restore_kv(other, snapshot)
        assert len(mapped(batch, other, 0)) >= 5
        batch.audit()


@pytest.mark.parametrize("layer", [mamba2(), short_conv()], ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("place", ["device", "host"])
def test_recurrent_states_are_captured_too(place: str, layer: kv.RecurrentLayer) -> None:
    with opened(recurrent_config(layer)) as batch:
        states = batch.resources.cache_managers[0].mamba_cache
        source, other = batch.update(admit=[5, 9])
        batch.step({source: 5})
        for number, name in enumerate(kinds_of(states), 3):
            tensor = states.state(name, 0)[source.row]
            tensor.fill_from(np.full(tensor.shape, number).astype(tensor.dtype.numpy()))
        with pytest.raises(kv.RewindTooFar, match="recurrent states cannot go back"):
            batch.capture_kv(source, 0, 4)
        with batch.capture_kv(source, 0, 5, place=place) as snapshot:
            batch.step({source: 1})
            batch.restore_kv(other, snapshot)
        assert other.length == 5
        index = batch.step({other: 1}).state_index.to_host()
        for number, name in enumerate(kinds_of(states), 3):
            assert (states.state(name, 0)[int(index[other.row])].to_host().astype(np.float32) == number).all()
        batch.audit()


def test_states_follow_a_new_order() -> None:
    with opened(recurrent_config(mamba2())) as batch:
        states = batch.resources.cache_managers[0].mamba_cache
        sequences = batch.update(admit=[3, 4, 5])
        batch.step({s: s.pending_tokens for s in sequences})
        for sequence in sequences:
            tensor = states.state("recurrent_state", 0)[sequence.row]
            tensor.fill_from(np.full(tensor.shape, sequence.row + 1).astype(tensor.dtype.numpy()))
        a, b, c = sequences
        batch.reorder({a: c, b: c, c: a})
        index = batch.step(dict.fromkeys(sequences, 1)).state_index.to_host()
        found = [states.state("recurrent_state", 0)[int(index[s.row])].to_host().astype(np.float32) for s in sequences]
        assert [set(np.unique(values)) for values in found] == [{3}, {3}, {1}]
        batch.audit()


@pytest.mark.parametrize("rows", [(2, 4), (4, 2)])
def test_resources_with_other_pools_take_a_snapshot(rows: tuple[int, int]) -> None:
    """Layers lie elsewhere where pools have more pages, or fewer: nothing but the restored row is written."""
    configs = [tiny_config(None, None, 6, max_batch_size=n, kv_cache_dtype="float32") for n in rows]
    with (
        kv.SharedResources.create_for_llm(configs[0]) as source,
        kv.SharedResources.create_for_llm(configs[1]) as target,
        kv.Batch(source) as one,
        kv.Batch(target) as other,
        kv.KVIO(source.cache_managers[0]) as io,
        kv.KVIO(target.cache_managers[0]) as target_io,
    ):

        def fill(batch: kv.Batch, writer: kv.KVIO, sequence: kv.Sequence, value: float) -> None:
            view = batch.step({sequence: 8})
            for layer in range(3):
                array = batch.resources.device.tensor((8, 1, 8), kv.dtype("float32"))
                array.fill_from(np.full((8, 1, 8), value + layer, np.float32))
                writer.write(layer, array, array, view)

        first = one.admit(num_tokens=8)
        fill(one, io, first, 1)
        with one.capture_kv(first, 0, 8) as snapshot:
            restored, *others = other.update(admit=[8] * rows[1])
            for sequence in others:
                fill(other, target_io, sequence, 50)
            other.restore_kv(restored, snapshot)
        other.audit()
        for layer, low in ((0, 0), (1, 0), (2, 3)):
            k, v = (target.device.tensor((rows[1], 8, 1, 8), kv.dtype("float32")) for _ in range(2))
            target_io.gather(layer, k, v, target.cache_managers[0].lengths)
            for sequence in (restored, *others):
                value = (1 if sequence is restored else 50) + layer
                for found in (k, v):
                    assert (found.to_host()[sequence.row, low:] == value).all()


def test_a_window_page_that_was_not_captured_is_not_mapped() -> None:
    """After a rewind a ring holds less than a fresh sequence of that length would map."""
    config = tiny_config(8, max_step_tokens=4, kv_cache_dtype="float32")
    with kv.SharedResources.create_for_llm(config) as resources, kv.Batch(resources) as batch:
        long = batch.admit(num_tokens=32)
        batch.step({long: 32})
        batch.rewind({long: 4})
        with batch.capture_kv(long, 0, 28) as snapshot:
            other = batch.admit(num_tokens=30)
            batch.restore_kv(other, snapshot)
            table = resources.cache_managers[0].step_buffers.page_tables[1].to_host()[other.row, 0]
            assert np.flatnonzero(table >= 0)[0] * 4 == snapshot.first(0) == 16
        batch.audit()
        batch.step({other: 2})
        batch.audit()
