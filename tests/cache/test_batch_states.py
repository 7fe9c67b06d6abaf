"""Rows and their recurrent states: rows come, move and go; a sequence finds its own states, and a new one finds zeros."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import numba_kv as kv
from numba_kv.cache import HybridCacheManager, MambaCacheManager
from numba_kv.errors import InputError, InvariantError, RewindTooFar, StateError
from tests.helpers.batches import opened
from tests.helpers.kv_pools import same_bits
from tests.helpers.models import tiny_config
from tests.helpers.states import (
    delta_net,
    everything,
    fill,
    int32,
    kinds_of,
    mamba1,
    mamba2,
    recurrent_config,
    short_conv,
)

MODELS = {
    "hybrid": recurrent_config(mamba2()),
    "pure": recurrent_config(mamba2(state_size=8, conv_dim=8, conv_state_dtype="float32"), types=("recurrent",) * 2),
    "side by side": recurrent_config(delta_net(recurrent_state_dtype="bfloat16"), types=("both", "none", "both")),
    "short": recurrent_config(short_conv()),
    "verifying": recurrent_config(mamba2(), max_verify_tokens=3, conv_state_room=3, max_step_tokens=3),
}


def caches(batch: kv.Batch) -> HybridCacheManager:
    return batch.resources.cache_managers[0]


def slots(batch: kv.Batch) -> list[int]:
    return caches(batch).step_buffers.state_index.to_host().tolist()


def marked(states: MambaCacheManager, slot: int, number: float) -> None:
    """Write a number all over a slot."""
    for name in kinds_of(states):
        for layer in range(states.num_layers):
            tensor = states.state(name, layer)[slot]
            tensor.fill_from(np.full(tensor.shape, number).astype(tensor.dtype.numpy()))


def marked_rows(batch: kv.Batch) -> list[kv.Sequence]:
    """Start four sequences of 1 to 4 tokens, and write the number of each all over its states; return them."""
    made = batch.update(admit=[1, 2, 3, 4])
    batch.step({s: s.pending_tokens for s in made})
    for slot in range(4):
        marked(caches(batch).mamba_cache, slot, slot + 1)
    return made


def marks(states: MambaCacheManager, slot: int) -> set[float]:
    return {float(n) for name in kinds_of(states) for n in np.unique(everything(states, name)[:, slot].astype(np.float32))}


@pytest.mark.parametrize("name", MODELS)
def test_a_new_sequence_finds_zeros_and_others_keep_theirs(name: str) -> None:
    with opened(MODELS[name]) as batch:
        states = caches(batch).mamba_cache
        before = {kind: fill(states, kind, np.random.default_rng(0)) for kind in kinds_of(states)}
        assert slots(batch) == [-1] * 4
        first, second = batch.update(admit=[5, 3])
        view = batch.step({first: 5, second: 3})
        assert view.state_index.to_host().tolist() == [0, 1, -1, -1]
        for kind in before:
            before[kind][:, :2] = 0
            assert same_bits(everything(states, kind), before[kind])
        batch.audit()
        marked(states, 0, 1)
        marked(states, 1, 2)
        batch.retire(first)
        assert slots(batch) == [-1, 1, -1, -1]
        assert (marks(states, 0), marks(states, 1)) == ({1}, {2})  # what is left is cleared when it is used again
        batch.admit(num_tokens=1)
        assert slots(batch) == [0, 1, -1, -1]
        assert (marks(states, 0), marks(states, 1)) == ({0}, {2})
        batch.audit()


@pytest.mark.parametrize("name", MODELS)
def test_rows_move_and_states_stay(name: str) -> None:
    with opened(MODELS[name]) as batch:
        states = caches(batch).mamba_cache
        made = marked_rows(batch)
        batch.update(retire=[made[0], made[2]])
        batch.compact()
        left = {s.row: int(s.generation) for s in (made[1], made[3])}
        assert [slots(batch)[row] + 1 for row in sorted(left)] == [left[row] for row in sorted(left)]
        batch.compact([made[3], made[1]])
        assert slots(batch) == [3, 1, -1, -1]
        assert [marks(states, slot) for slot in range(4)] == [{1}, {2}, {3}, {4}]
        batch.audit()
        batch.update(admit=[1, 1])
        assert sorted(slots(batch)) == [0, 1, 2, 3]
        assert [marks(states, slot) for slot in range(4)] == [{0}, {2}, {0}, {4}]
        batch.audit()


def test_an_update_of_a_hybrid_sends_and_waits_no_more_than_that_of_any_model() -> None:
    with opened(tiny_config(None, max_batch_size=4)) as plain, opened(MODELS["hybrid"]) as hybrid:
        sent = []
        for batch in (plain, hybrid):
            before = batch.resources.device.bytes_to_device
            batch.update(admit=[3, 2])
            sent.append(batch.resources.device.bytes_to_device - before)
        assert sent[0] == sent[1]


def test_a_model_without_recurrent_layers_has_a_place_for_each_row() -> None:
    with opened(tiny_config(None, max_batch_size=3)) as batch:
        assert slots(batch) == [0, 1, 2]
        batch.update(admit=[1, 1])
        assert batch.step({batch.sequences[0]: 1}).state_index.to_host().tolist() == [0, 1, 2]


def test_a_pure_recurrent_model_runs_like_any_other() -> None:
    with opened(MODELS["pure"]) as batch:
        one, two = batch.update(admit=[40, 2])
        view = batch.step({one: 40, two: 2})
        assert (view.num_rows, view.num_tokens, view.kv_len_upper) == (2, 42, 40)
        assert view.positions.to_host()[:42].tolist() == [*range(40), 0, 1]
        assert view.seq_lens.to_host().tolist() == [40, 2, 0, 0]
        for _ in range(20):
            view = batch.step(1)
        assert view.seq_lens.to_host().tolist() == [60, 22, 0, 0]
        graph = batch.capture()
        batch.reserve(2)
        graph.launch()
        graph.launch()
        batch.advanced(2)
        assert (one.length, two.length) == (62, 24)
        assert batch.audit().tokens == 86
        batch.retire(two)
        with pytest.raises(kv.CapacityError, match="capacity"):
            batch.step(3)
        assert batch.can_admit(64)
        batch.clear()
        assert slots(batch) == [-1] * 4
        batch.audit()


@pytest.mark.parametrize("name", ["hybrid", "short"])
def test_a_fork_has_the_states_of_its_parent(name: str) -> None:
    with opened(MODELS[name]) as batch:
        states = caches(batch).mamba_cache
        parent = batch.admit(num_tokens=5)
        batch.step({parent: 5})
        before = {kind: fill(states, kind, np.random.default_rng(1)) for kind in kinds_of(states)}
        children = batch.fork(parent, 2)
        assert [child.length for child in children] == [5, 5]
        for kind in before:
            before[kind][:, [1, 2]] = before[kind][:, [0, 0]]
            assert same_bits(everything(states, kind), before[kind])
        batch.audit()


def test_states_are_swapped_with_their_sequence() -> None:
    for name in ("hybrid", "pure", "short"):
        with opened(MODELS[name]) as batch:
            states = caches(batch).mamba_cache
            made = batch.update(admit=[5, 7, 2])
            batch.step({s: s.pending_tokens for s in made})
            before = {kind: fill(states, kind, np.random.default_rng(4)) for kind in kinds_of(states)}
            swapped = batch.swap_out(made[0])
            assert swapped.nbytes >= states.slot_nbytes
            assert slots(batch) == [-1, 1, 2, -1]
            other = batch.admit(num_tokens=3)
            batch.step({other: 3})
            assert marks(states, 0) == {0}
            back = batch.swap_in(swapped)
            assert (back.length, slots(batch)) == (5, [0, 1, 2, 3])
            for kind in before:
                before[kind][:, 3] = before[kind][:, 0]
                before[kind][:, 0] = 0
                assert same_bits(everything(states, kind), before[kind])
            batch.audit()


# -- what cannot go back -------------------------------------------------------------------------------------------------


def test_states_cannot_go_back() -> None:
    with opened(recurrent_config(mamba2(), max_step_tokens=3)) as batch:
        states = caches(batch).mamba_cache
        one, two = batch.update(admit=[5, 5])
        batch.step({one: 5, two: 5})
        marked(states, 0, 1)
        marked(states, 1, 2)
        with pytest.raises(RewindTooFar, match=r"1 tokens are to be taken back, .* max_verify_tokens \(0\)"):
            batch.rewind({one: 1})
        back = int32(batch.resources.device, [1, 1, 0, 0])
        for argument in ("take_back", "accepted"):
            with pytest.raises(RewindTooFar, match="the device decides"):
                batch.step(1, **{argument: back})
        assert (one.length, two.length) == (5, 5)
        assert (marks(states, 0), marks(states, 1)) == ({1}, {2})
        batch.rewind({one: 5})
        assert (one.length, two.length) == (0, 5)
        assert (marks(states, 0), marks(states, 1)) == ({0}, {2})
        batch.audit()
        back._memory.close(batch.resources.stream)


def test_a_verification_step_is_taken_back_once_its_states_are_committed() -> None:
    """Verify three tokens a row, accept 3, 1 and 0 of them, commit the states and rewind the rest."""
    with opened(MODELS["verifying"]) as batch:
        states, device = caches(batch).mamba_cache, batch.resources.device
        made = batch.update(admit=[4, 4, 4])
        batch.step({s: 4 for s in made})
        resident = fill(states, "recurrent_state", np.random.default_rng(2))
        view = batch.step(3)
        states.reshape_intermediate_states(view.num_rows, 3)
        snapshots = fill(states, "intermediate_recurrent_state", np.random.default_rng(3))
        accepted = int32(device, [3, 1, 0])
        states.scatter_accepted_linear_states(accepted, view.state_index)
        assert states.commit_refusals() == {}
        batch.rewind({made[1]: 2, made[2]: 3})
        resident[:, 0], resident[:, 1] = snapshots[:, 0, 2], snapshots[:, 1, 0]
        assert same_bits(everything(states, "recurrent_state"), resident)
        assert [s.length for s in made] == [7, 5, 4]
        with pytest.raises(RewindTooFar, match=r"4 tokens are .* max_verify_tokens \(3\)"):
            batch.rewind({made[0]: 4})
        batch.audit()
        accepted._memory.close(batch.resources.stream)


# -- the audit, and layers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", ["state_index", "state_slots"])
def test_the_audit_sees_rows_that_find_other_states(array: str) -> None:
    with opened(MODELS["hybrid"]) as batch:
        batch.update(admit=[1, 1])
        getattr(caches(batch).step_buffers, array).fill_from(np.array([1, 0, 2, 3], np.int32))
        with pytest.raises(InvariantError, match=rf"{array}\[0\]: the device holds 1, the host expects 0"):
            batch.audit()
        batch.stepper.launches.states.slots[:] = 0
        with pytest.raises(InvariantError, match="two rows have one slot"):
            batch.audit()


def test_a_closed_batch_gives_every_row_its_own_slot_again() -> None:
    resources = kv.SharedResources.create_for_llm(MODELS["hybrid"])
    with kv.Batch(resources) as batch:
        one, two = batch.update(admit=[1, 1])
        batch.compact([two, one])
        assert slots(batch) == [1, 0, -1, -1]
    with kv.Batch(resources) as batch:
        batch.admit(num_tokens=1)
        assert slots(batch) == [0, -1, -1, -1]
        batch.audit()
    resources.close()


def test_decoder_layers_are_routed() -> None:
    types = ("recurrent", "none", "attention", "both", "recurrent")
    with opened(recurrent_config(mamba1(), types=types)) as batch:
        manager = caches(batch)
        assert [manager.layer_type(layer) for layer in range(manager.num_layers)] == list(types)
        assert (manager.num_layers, manager.kv_cache.num_layers, manager.mamba_cache.num_layers) == (5, 2, 3)
        attention, recurrent = {2: 0, 3: 1}, {0: 0, 3: 1, 4: 2}
        for layer in range(5):
            for places, place_of, getters in (
                (attention, manager.attention_index, (manager.kv, manager.k, manager.v, manager.storage)),
                (recurrent, manager.recurrent_index, (manager.recurrent_state, manager.conv_state)),
            ):
                if layer in places:
                    assert place_of(layer) == places[layer]
                    continue
                for call in (place_of, *getters):
                    with pytest.raises(InputError, match=f"decoder layer {layer} has no .* it is '{types[layer]}'"):
                        call(layer)
        for layer, place in attention.items():
            assert manager.kv(layer).address == manager.kv_cache.kv(place).address
            assert manager.v(layer).address == manager.kv_cache.v(place).address
            assert manager.storage(layer) == manager.kv_cache.storage(place)
        for layer, place in recurrent.items():
            assert manager.recurrent_state(layer).address == manager.mamba_cache.recurrent_state(place).address
            assert manager.conv_state(layer).address == manager.mamba_cache.conv_state(place).address
        for wrong in (-1, 5, True, 1.0, "0"):
            for call in (manager.layer_type, manager.kv, manager.recurrent_state):
                with pytest.raises(InputError, match="not one of the 5 decoder layers"):
                    call(wrong)


def test_a_resident_slot_is_cleared_without_its_lengths() -> None:
    with opened(MODELS["hybrid"]) as batch:
        manager = caches(batch)
        made = batch.update(admit=[11, 22])
        batch.step({s: s.pending_tokens for s in made})
        marked(manager.mamba_cache, 0, 1)
        marked(manager.mamba_cache, 1, 2)
        manager.clear_resident_slot(1)
        assert (marks(manager.mamba_cache, 0), marks(manager.mamba_cache, 1)) == ({1}, {0})
        assert manager.lengths.to_host().tolist() == [11, 22, 0, 0]
        with pytest.raises(InputError, match="slot: 4"):
            manager.clear_resident_slot(4)
    for call in (lambda: manager.recurrent_state(0), lambda: manager.kv(1), lambda: manager.clear_resident_slot(0)):
        with pytest.raises(StateError, match="closed"):
            call()


# -- any order of calls --------------------------------------------------------------------------------------------------


class StateMachine(RuleBasedStateMachine):
    """Drives a Batch; a forward pass adds one to each state for every token, from wherever `state_index` says it is."""

    @initialize(name=st.sampled_from(["hybrid", "pure", "short"]))
    def open(self, name: str) -> None:
        self.resources = kv.SharedResources.create_for_llm(MODELS[name])
        self.batch = kv.Batch(self.resources)
        self.states = self.resources.cache_managers[0].mamba_cache
        self.counted: dict[kv.Sequence, int] = {}

    @rule()
    def align(self) -> None:
        self.batch.align_states()
        assert all(slot in (-1, row) for row, slot in enumerate(slots(self.batch)))

    def first(self) -> kv.Tensor:
        """Return the states of the first layer that are counted in."""
        return self.states.state(kinds_of(self.states)[0], 0)

    def room(self) -> int:
        return self.batch.free_rows

    @precondition(lambda self: self.room() > 0)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        leaving = data.draw(st.lists(st.sampled_from(self.batch.sequences), unique=True) if self.counted else st.just([]))
        count = data.draw(st.integers(0, self.room() + len(leaving)))
        for sequence in leaving:
            del self.counted[sequence]
        self.counted.update(dict.fromkeys(self.batch.update(retire=leaving, admit=[1] * count), 0))

    @precondition(lambda self: self.counted)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.batch.sequences), min_size=1, unique=True))
        tokens = {sequence: data.draw(st.integers(1, 3)) for sequence in chosen if sequence.length < 60}
        if not tokens:
            return
        view = self.batch.step(tokens)
        index, starts = view.state_index.to_host(), view.cu_seqlens_q.to_host()
        first = self.first()
        for row in range(view.num_rows):
            appended = int(starts[row + 1] - starts[row])
            if index[row] >= 0 and appended:
                slot = first[int(index[row])]
                slot.fill_from((slot.to_host() + np.float32(appended)).astype(slot.dtype.numpy()))
        for sequence, count in tokens.items():
            self.counted[sequence] += count

    @precondition(lambda self: self.counted and self.room() > 0)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.batch.sequences))
        self.counted[self.batch.fork(parent)] = self.counted[parent]

    @precondition(lambda self: self.counted)
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        self.batch.compact(data.draw(st.none() | st.permutations(self.batch.sequences)))

    @precondition(lambda self: any(s.length for s in self.counted))
    @rule(data=st.data())
    def empty(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.batch.sequences if s.length]))
        self.batch.rewind({sequence: sequence.length})
        self.counted[sequence] = 0

    @invariant()
    def sequences_find_their_states(self) -> None:
        if not hasattr(self, "batch"):
            return
        self.batch.audit()
        index, found = slots(self.batch), self.first().to_host()
        for sequence, count in self.counted.items():
            assert sequence.length == count
            assert (found[index[sequence.row]] == count).all()
        assert [place for row, place in enumerate(index) if row not in {s.row for s in self.counted}].count(-1) == self.room()

    def teardown(self) -> None:
        if hasattr(self, "resources"):
            self.resources.close()


TestStates: Any = StateMachine.TestCase
if kv.target() == "sim":
    TestStates.settings = settings(max_examples=5, stateful_step_count=10)
