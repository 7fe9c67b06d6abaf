"""Rounds of a base and its draft: what commits leave in both models, by counts and paths of the host and of the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import numba_kv as kv
from tests.helpers.rounds import DEPLOYMENTS, K, opened_rounds
from tests.helpers.states import everything, int32

TREE = (-1, 0, 0, 1)
#: The simulator is slow: there it is one deployment that stands for the others.
SIMULATED = kv.target() == "sim"


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_rounds_of_every_kind(name: str) -> None:
    """Catch up, propose, verify, commit: all, some or none of three rows, by the host and by the device in turn."""
    with opened_rounds(name) as model:
        sequences = model.admit(9, 4, 1)
        batch, most = model.batch, model.batch.spec.max_accepted_tokens
        for turn, kept in enumerate(([most, 1, 0], [2, most, 1], [most, 2, most])):
            model.catch_up(batch.round_steps.catch_up or 0)
            for _ in range(batch.round_steps.draft_steps):
                model.draft_step()
            assert batch.draft_view.seq_lens.to_host().max() > 0
            model.verify()
            counts = dict(zip(sequences, kept, strict=True))
            if turn % 2:
                batch.commit(counts)
            else:
                model.commit_on_device({s.row: n for s, n in counts.items()})
            model.accepted({s: range(n) for s, n in counts.items()})
            model.check()


@pytest.mark.parametrize(
    "name", ["replay"] if SIMULATED else ["chain", "tree", "shared", "snapshots", "replay", "delta net", "room"]
)
@pytest.mark.parametrize("on_device", [True, False])
def test_paths_through_a_tree(name: str, on_device: bool) -> None:
    """And a plain step behind each round, which goes on from the last token that was kept. vllm#39273"""
    with opened_rounds(name) as model:
        sequences = model.admit(7, 12, 3)
        for paths in ([(0, 1, 3), (0,), ()], [(0, 2), (0, 1), (0, 1, 3)]):
            model.verify(parents=TREE)
            if on_device:
                model.commit_on_device({row: len(path) for row, path in enumerate(paths)}, dict(enumerate(paths)))
            else:
                model.batch.commit(dict(zip(sequences, paths, strict=True)))
            model.accepted(dict(zip(sequences, paths, strict=True)))
            model.check()
            model.step(dict.fromkeys(sequences, 1))
            model.check()


@pytest.mark.parametrize("name", ["snapshots", "replay", "delta net", "room"])
def test_a_round_that_keeps_nothing_adopts_nothing(name: str) -> None:
    """Snapshots and inputs that nobody wrote are NaN; all is rejected, and states are what they were. imp#1503"""
    with opened_rounds(name) as model:
        sequences = model.admit(7, 5, 3)
        states = model.states.states
        before = {kind: everything(states, kind) for kind in ("recurrent_state", "conv_state")}
        model.batch.verify_step()
        for kind in states.state_names:
            if kind not in before:
                for layer in range(states.num_layers):
                    array = states.state(kind, layer)
                    array.fill_from(np.full(array.shape, np.nan, array.dtype.numpy()))
        if name == "room":  # the step writes its inputs behind what was there, and the commit takes them out again
            kept = before["conv_state"].shape[-1] - 4
            for layer in range(states.num_layers):
                array = states.conv_state(layer)
                array.fill_from(
                    np.concatenate([array.to_host()[..., 4:], np.full((*array.shape[:-1], 4), np.nan, np.float32)], -1)
                )
        model.commit_on_device(dict.fromkeys(range(3), 0))
        for kind, values in before.items():
            found = everything(states, kind)
            if name == "room" and kind == "conv_state":
                found, values = found[..., -kept:], values[..., -kept:]
            assert np.array_equal(found, values)
        model.batch.sync_lengths()
        assert [s.length for s in sequences] == [7, 5, 3]
        model.batch.audit()


def test_positions_follow_the_depth_of_nodes() -> None:
    with opened_rounds("tree") as model:
        first, second = model.admit(5, 2)
        view = model.batch.verify_step(tree=model.batch.tree(TREE))
        assert view.positions.to_host()[:8].tolist() == [5, 6, 6, 7, 2, 3, 3, 4]
        assert view.slot_mapping[0].to_host()[:8].min() >= 0
        model.batch.commit({first: (), second: (0,)})
        assert (first.length, second.length) == (5, 3)


@pytest.mark.parametrize("name", ["snapshots", "replay", "delta net", "chain"])
def test_padding_in_a_path_is_left_out_by_everything(name: str) -> None:
    """-1 among the ids: K and V, states and lengths agree on the nodes that are there."""
    with opened_rounds(name) as model:
        sequences = model.admit(7, 5, 3)
        model.verify(parents=TREE)
        model.commit_on_device({0: 4, 1: 3, 2: 2}, {0: (0, -1, 1, 3), 1: (-1, 0, 2), 2: (-1, -1)})
        model.accepted(dict(zip(sequences, [(0, 1, 3), (0, 2), ()], strict=True)))
        assert model.batch.refusals() == {}
        model.check()


WRONG = {
    "above the tokens": ({0: 5}, None, kv.Status.BAD_COUNT),
    "negative": ({0: -1}, None, kv.Status.BAD_COUNT),
    "above the path": ({0: 4}, {0: (0, 1, 3), 1: (0, 1), 2: (0,)}, kv.Status.BAD_COUNT),
    "no node": ({0: 2}, {0: (0, 4), 1: (0, 1), 2: (0,)}, kv.Status.BAD_PATH),
    "below -1": ({0: 2}, {0: (0, -2), 1: (0, 1), 2: (0,)}, kv.Status.BAD_PATH),
    "twice": ({0: 3}, {0: (0, 1, 1), 1: (0, 1), 2: (0,)}, kv.Status.BAD_PATH),
    "back to its parent": ({0: 3}, {0: (0, 1, 0), 1: (0, 1), 2: (0,)}, kv.Status.BAD_PATH),
    "not a child": ({0: 3}, {0: (0, 2, 3), 1: (0, 1), 2: (0,)}, kv.Status.BAD_PATH),
    "not from the root": ({0: 2}, {0: (1, 3), 1: (0, 1), 2: (0,)}, kv.Status.BAD_PATH),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("name", ["room"] if SIMULATED else ["chain", "replay", "room"])
def test_a_refused_row_stays_as_it_was_and_can_be_committed_again(name: str, case: str) -> None:
    counts, paths, status = WRONG[case]
    with opened_rounds(name) as model:
        first, second, third = model.admit(7, 5, 3)
        model.draft_step()
        model.verify(parents=None if paths is None else TREE)
        model.commit_on_device({1: 2, 2: 1, **counts}, paths)
        model.accepted({second: (0, 1), third: (0,)})
        assert model.batch.refusals() == {first: status}
        model.check()
        assert first.length == 7 + 4
        good = (0, 1, 3) if paths else (0, 1, 2)
        if paths:
            model.commit_on_device({0: 3, 1: 9, 2: -5}, {0: good, 1: (7,), 2: (8,)})
        else:
            model.commit_on_device({0: 3, 1: 9, 2: -5})
        model.accepted({first: good})
        assert model.batch.refusals() == {}
        model.check()


def test_what_the_draft_keeps() -> None:
    """Proposals that were accepted stay in the draft or go; either way it can catch up, and be a token ahead where it keeps."""
    for keeps, expected in ((True, [9 + K, 5, 1]), (False, [9, 4, 1])):
        with opened_rounds("chain", keep_drafts=keeps, catch_up_tokens=4) as model:
            sequences = model.admit(9, 4, 1)
            for _ in range(K):
                model.draft_step()
            model.verify()
            model.batch.commit(dict(zip(sequences, (4, 1, 0), strict=True)))
            model.accepted(dict(zip(sequences, (range(4), range(1), ()), strict=True)))
            assert [model.batch.draft_length(s) for s in sequences] == expected
            model.catch_up()
            model.check()
            assert [model.batch.draft_length(s) for s in sequences] == [13, 5, 1]
            if keeps:
                model.catch_up(1)
                model.check()
                assert [model.batch.draft_length(s) for s in sequences] == [14, 6, 2]


def test_only_some_sequences_are_verified() -> None:
    """The proposals of the others are dropped; what the arrays say of them is not read."""
    with opened_rounds("chain") as model:
        first, second, third = model.admit(9, 4, 1)
        model.draft_step()
        view = model.batch.verify_step({first: 3, third: 2})
        assert view.num_tokens == 5
        model.commit_on_device({0: 2, 1: 99, 2: 0})
        assert model.batch.refusals() == {}
        model.batch.sync_lengths()
        model.batch.audit()
        assert [(s.length, model.batch.draft_length(s)) for s in (first, second, third)] == [(11, 10), (4, 4), (1, 1)]


# -- composition -----------------------------------------------------------------------------------------------------------


def test_rows_of_both_models_hold_the_same_sequences() -> None:
    with opened_rounds("chain") as model:
        batch = model.batch
        first, second = model.admit(9, 4)
        model.retire(first)
        assert batch.compact() == {second: 0}
        third, fourth = model.admit(2, 3)
        assert [(s, s.row) for s in batch.sequences] == [(second, 0), (third, 1), (fourth, 2)]
        assert batch.compact([fourth, second, third]) == {fourth: 0, second: 1, third: 2}
        model.check()
        model.draft_step()
        model.verify()
        batch.commit({fourth: 1, second: 2, third: 0})
        model.accepted({fourth: (0,), second: (0, 1), third: ()})
        model.check()
        with pytest.raises(kv.CapacityError, match="1 sequences are to be admitted, 0 of 3 rows are free"):
            batch.admit(num_tokens=1)
        model.check()
        batch.clear()
        assert (batch.free_rows, batch.audit()[1].tokens) == (3, 0)


def test_a_rewind_takes_both_back() -> None:
    with opened_rounds("chain") as model:
        first, second = model.admit(39, 4)
        model.draft_step()
        model.draft_step()
        model.batch.rewind({first: 2})
        assert (first.length, model.batch.draft_length(first), model.batch.draft_length(second)) == (37, 37, 6)
        model.batch.step({first: 1})
        with pytest.raises(kv.InputError, match="not in 1..4"):
            model.batch.rewind({second: 5})
        with pytest.raises(kv.RewindTooFar, match="cannot go back to 20 tokens"):
            model.batch.rewind({first: 18})
        model.batch.rewind({second: 4})
        assert (second.length, model.batch.draft_length(second)) == (0, 0)
        model.batch.audit()


def test_a_prompt_that_one_model_cannot_hold_changes_neither() -> None:
    """The draft's pool is full before the base's: what the base alone could take is refused before it is taken."""
    given = DEPLOYMENTS["chain"]
    base = replace(given.base, num_kv_pages=30, lookahead_pages=0)
    small = replace(given, base=base, draft=replace(given.draft, num_kv_pages=15, lookahead_pages=0))
    with kv.SharedResources.create_for_spec_decode(small) as resources, kv.SpeculativeBatch(resources) as batch:
        first = batch.admit(num_tokens=29)
        batch.step({first: 29})
        for _ in range(3):
            batch.draft_step()  # 8 pages of 4 tokens; 7 are left
        second = batch.admit(num_tokens=29)
        with pytest.raises(kv.CapacityError, match="pages: the step needs 8 more of 4 tokens, 7 are free"):
            batch.step({second: 29})
        assert (second.length, batch.base.free_pages) == (0, 15)
        batch.step({second: 28})
        batch.audit()


# -- what is refused -------------------------------------------------------------------------------------------------------


def test_what_the_host_says_is_checked_first() -> None:
    with opened_rounds("chain") as model:
        first, second, third = model.admit(9, 4, 1)
        batch = model.batch
        model.draft_step()
        model.verify(parents=TREE)
        good: dict[kv.Sequence, object] = {first: (0,), second: (0, 1), third: ()}
        wrong = {
            "is missing": {first: (0,), second: ()},
            "not in 0..3": {**good, first: (0, 4)},
            "node 1 .* is -1": {**good, first: (0, -1)},
            "not after 1": {**good, first: (0, 1, 1)},
            "whose parent is 1 and not 2": {**good, first: (0, 2, 3)},
            "whose parent is 0 and not -1": {**good, first: (1,)},
            "cannot be iterated": {**good, first: 2},
        }
        for match, accepted in wrong.items():
            with pytest.raises(kv.InputError, match=match):
                batch.commit(accepted)
        with pytest.raises(kv.InputError, match="nodes: given beside a mapping"):
            batch.commit(good, [[0]])
        counts = int32(batch.resources.device, [1, 1, 1])
        with pytest.raises(kv.InputError, match="nodes: None given, but a tree was verified"):
            batch.commit(counts)
        for nodes in ([[0]], [[0] * 5] * 3):
            tensor = int32(batch.resources.device, nodes)
            with pytest.raises(kv.ShapeError, match=r"dense int32 \[3, 1 to 4\] wanted"):
                batch.commit(counts, tensor)
            tensor._memory.close(batch.resources.stream)
        with pytest.raises(kv.InteropError):
            batch.commit("all")
        batch.commit(good)
        model.accepted(good)
        model.check()
        model.verify()
        for value in (-1, 5, True, 1.0):
            with pytest.raises(kv.InputError, match=r"accepted: .* is not in 0..4"):
                batch.commit({first: value, second: 1, third: 1})
        batch.retire(third)
        with pytest.raises(kv.InputError, match="is not active in this batch"):
            batch.commit({first: 1, second: 1, third: 1})
        batch.commit({first: 1, second: 1})
        counts._memory.close(batch.resources.stream)


def test_calls_in_the_wrong_order() -> None:
    """A verification step is committed before anything else; a commit has one to commit."""
    with opened_rounds("snapshots") as model:
        batch = model.batch
        with pytest.raises(kv.StateError, match="draft_view: the draft has made no step"):
            _ = batch.draft_view
        with pytest.raises(kv.StateError, match="no sequence is active"):
            batch.catch_up()
        first, second = model.admit(9, 4)
        with pytest.raises(kv.StateError, match="no verification step waits"):
            batch.commit({first: 1, second: 1})
        model.verify()
        calls = {
            "step": lambda: batch.step(1),
            "verify_step": batch.verify_step,
            "catch_up": batch.catch_up,
            "rewind": lambda: batch.rewind({first: 1}),
            "compact": batch.compact,
            "update": lambda: batch.admit(num_tokens=1),
            "reserve": lambda: batch.reserve(1),
        }
        for name, call in calls.items():
            with pytest.raises(kv.StateError, match=f"{name}: the last verification step is not committed"):
                call()
        batch.commit({first: 1, second: 0})
        model.accepted({first: (0,), second: ()})
        with pytest.raises(kv.StateError, match="no verification step waits"):
            batch.commit({first: 1, second: 1})
        model.check()
        with pytest.raises(kv.InputError, match="tokens: they differ, but recurrent layers"):
            batch.verify_step({first: 1, second: 2})
        model.check()


def test_a_draft_that_runs_too_far_is_refused() -> None:
    with opened_rounds("chain") as model:
        model.admit(9, 4)
        for _ in range(K + 1):
            model.draft_step()
        with pytest.raises(kv.CapacityError, match="1 tokens behind 4 since the last commit, but 4 can be taken back"):
            model.draft_step()
        with pytest.raises(kv.InputError, match="5 of a row, at most 4 can be verified"):
            model.batch.verify_step(5)
        model.verify()
        model.batch.commit(dict.fromkeys(model.lengths, 2))
        model.accepted(dict.fromkeys(model.lengths, (0, 1)))
        model.check()


def test_trees_are_checked_and_kept() -> None:
    with opened_rounds("tree") as model:
        batch = model.batch
        assert batch.tree([-1, 0, 0, 1]) is batch.tree((-1, 0, 0, 1))
        for parents in ([], [0], [-1, -1], [-1, 1], [-1, 2, 0], [-1, 0, True], [-1] + [0] * 4):
            with pytest.raises(kv.InputError, match="parents"):
                batch.tree(parents)
        model.admit(3)
        with pytest.raises(kv.InputError, match="tokens: given beside a tree"):
            batch.verify_step(4, tree=batch.tree(TREE))
        with pytest.raises(kv.InputError, match="ahead: 1 is not 0"):
            batch.catch_up(1)


def test_resources_without_a_draft_are_refused() -> None:
    with kv.SharedResources.create_for_llm(DEPLOYMENTS["chain"].base) as resources:
        with pytest.raises(kv.InputError, match="made without a draft"):
            kv.SpeculativeBatch(resources)
        with pytest.raises(kv.InputError, match="is not a SharedResources"):
            kv.SpeculativeBatch("resources")
        kv.Batch(resources).close()
    wrong = {
        "keep_drafts: True": {"keep_drafts": True},
        "keep_drafts: 1": {"keep_drafts": 1},
        "catch_up": {"catch_up_tokens": 9},
    }
    with kv.SharedResources.create_for_spec_decode(DEPLOYMENTS["tree"]) as resources:
        for match, options in wrong.items():
            with pytest.raises(kv.NumbaKVError, match=match):
                kv.SpeculativeBatch(resources, **options)
            assert resources.users == ()
        with kv.SpeculativeBatch(resources) as batch:
            assert resources.users == (batch.base, batch.draft)
        with pytest.raises(kv.StateError, match="closed"):
            batch.step(1)


def test_a_path_through_a_tree_that_the_host_does_not_know() -> None:
    """The device refuses one row; the host is told, and does not take lengths for granted before."""
    with opened_rounds("tree") as model:
        first, second = model.admit(5, 6)
        batch, device = model.batch, model.batch.resources.device
        tree = int32(device, [list(TREE)] * 3)
        batch.verify_step(tree=tree)
        batch.commit({first: [0, 1, 2], second: [0, 1]})
        assert not batch.is_exact
        with pytest.raises(kv.StateError, match="5 to 9 tokens long"):
            _ = first.length
        assert batch.refusals() == {first: kv.Status.BAD_PATH}
        batch.audit()
        assert (first.length, second.length) == (9, 8)
        batch.commit({first: [0, 1, 3], second: []})
        batch.sync_lengths()
        batch.audit()
        assert (first.length, second.length) == (8, 8)
        tree._memory.close(device.stream)


def test_a_draft_behind_its_prompt_is_refused_before_the_base_steps() -> None:
    with opened_rounds("chain") as model:
        batch = model.batch
        (sequence,) = model.admit(8)
        batch.rewind({sequence: 1})
        batch.verify_step({sequence: 2})
        batch.commit({sequence: 2})
        for tokens in (1, np.int64(1)):
            with pytest.raises(kv.StateError, match="has 1 unprefilled tokens in the draft; catch_up"):
                batch.step(tokens)
        assert (sequence.length, batch.draft_length(sequence)) == (9, 7)
        batch.audit()
        batch.catch_up()
        batch.step(1)
        assert (sequence.length, batch.draft_length(sequence)) == (10, 10)
        batch.audit()


def test_a_part_alone_is_read_and_not_changed() -> None:
    with opened_rounds("chain") as model:
        (sequence,) = model.admit(5)
        batch = model.batch
        batch.reserve(1)
        for part in (batch.base, batch.draft):
            (own,) = part.sequences
            stream = part.resources.stream
            calls = {
                "admit": lambda part=part: part.admit(num_tokens=2),
                "retire": lambda part=part, own=own: part.retire(own),
                "clear": part.clear,
                "compact": part.compact,
                "step": lambda part=part: part.step(1),
                "rewind": lambda part=part, own=own: part.rewind({own: 1}),
                "fork": lambda part=part, own=own: part.fork(own),
                "reorder": lambda part=part, own=own: part.reorder({own: own}),
                "swap_out": lambda part=part, own=own: part.swap_out(own),
                "refusals": part.refusals,
                "reserve": lambda part=part: part.reserve(1),
                "advanced": lambda part=part: part.advanced(1, 4 if part is batch.base else 1),
                "capture": part.capture,
                "enqueue_step": lambda part=part, stream=stream: part.enqueue_step(stream),
            }
            for call in calls.values():
                with pytest.raises(kv.StateError, match="Batch is a part of SpeculativeBatch.* call that one's admit, retire"):
                    call()
            part.sync_lengths()
            part.audit()
            assert part.derived.csr_on_host(0).kv_indptr.tolist()[-1] > 0
            part.derived.csr(0)
        batch.resources.hand_over(batch.resources.stream)
        batch.audit()
        model.step({sequence: 1})
        model.check()


def test_catching_up_takes_integers() -> None:
    with opened_rounds("chain") as model:
        model.admit(5)
        for ahead in (True, np.True_, 1.0, np.array([1]), np.array([0, 1]), 2, -1, None, "a"):
            with pytest.raises(kv.InputError, match="ahead: .* is not 0 or 1"):
                model.batch.catch_up(ahead)
        model.catch_up(np.int64(1))
        model.check()


def test_a_draft_that_fails_ends_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_rounds("chain") as model:
        (sequence,) = model.admit(5)

        def fail(*arguments: object, **options: object) -> None:
            raise kv.DeviceError("launch failed")

        with monkeypatch.context() as patch:
            patch.setattr(model.batch.draft.stepper.launches, "step", fail)
            with pytest.raises(kv.DeviceError):
                model.batch.step({sequence: 1})
        for call in (lambda: model.batch.step({sequence: 1}), model.batch.verify_step, model.batch.audit):
            with pytest.raises(kv.StateError, match="failed while work was being enqueued"):
                call()
