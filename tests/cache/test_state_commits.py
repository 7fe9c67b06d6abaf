"""Commits after a verification step: every row becomes what a recomputation from scratch says, or stays bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_kv as kv
from numba_kv.cache import state_commit
from numba_kv.cache.mamba_cache import MambaCacheManager
from numba_kv.config import LLMEngineConfig, RecurrentLayer
from numba_kv.dtypes import dtype
from numba_kv.errors import ConfigError, InputError, InteropError, ShapeError, StateError
from numba_kv.kernels.state_commit import CommitStatus
from tests.helpers.kv_pools import NUMPY, same_bits
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
    replayed_delta_net,
    replayed_mamba,
    sequential_delta_net,
    short_conv,
    states_of,
)

#: The simulator is slow.
SIMULATED = kv.target() == "sim"
KINDS = ("float32", "float16", "bfloat16")
STATES = ("recurrent_state", "conv_state")


def verifying(layer: Any, tokens: int, mode: str = "snapshot", **limits: Any) -> LLMEngineConfig:
    return recurrent_config(layer, max_verify_tokens=tokens, recurrent_spec_verify_mode=mode, **limits)


def commit(states: MambaCacheManager, lengths: Sequence[int], slots: Sequence[int], ids: Any = None) -> dict[int, CommitStatus]:
    """Commit linearly or, with ids, along paths; return what was refused."""
    arrays = [int32(states.device, numbers) for numbers in (lengths, slots)]
    if ids is None:
        states.scatter_accepted_linear_states(*arrays)
    else:
        arrays.insert(0, int32(states.device, ids))
        states.scatter_accepted_tree_states(*arrays)
    refused = states.commit_refusals()
    for array in arrays:
        array._memory.close(states.device.stream)
    return refused


def path_of(length: int, ids: Sequence[int] | None) -> list[int]:
    return list(range(length)) if ids is None else [node for node in ids[:length] if node != -1]


def scattered(before: np.ndarray, snapshots: np.ndarray, paths: Sequence[Sequence[int]], slots: Sequence[int]) -> np.ndarray:
    """Return states [layers, B, ...] after each row's last accepted snapshot [layers, rows, tokens, ...]."""
    found = before.copy()
    for row, (path, slot) in enumerate(zip(paths, slots, strict=True)):
        if path and slot >= 0:
            found[:, slot] = snapshots[:, row, path[-1]]
    return found


# -- snapshots ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("lengths", "slots", "tokens"),
    [
        ([1, 4, 0], [0, 1, 2], 4),
        ([4, 2], [3, 1], 4),
        ([2, 3], [0, 1], 4),
        ([1, 2, 1, 0], [2, 3, 0, 1], 2),
        ([1, 1, 1, 1], [-1, 3, -1, 0], 1),
        ([0, 0], [1, 0], 3),
    ],
)
def test_linear_scatter(kind: str, lengths: list[int], slots: list[int], tokens: int) -> None:
    random = np.random.default_rng(0)
    with states_of(verifying(mamba2(recurrent_state_dtype=kind, conv_state_dtype=kind), 8)) as states:
        states.reshape_intermediate_states(len(lengths), tokens)
        before = {name: fill(states, name, random) for name in STATES}
        snapshots = {name: fill(states, f"intermediate_{name}", random) for name in STATES}
        assert states.state("intermediate_conv_state", 1).shape == (len(lengths), tokens, 7, 4)
        assert commit(states, lengths, slots) == {}
        for name in STATES:
            expected = scattered(before[name], snapshots[name], [range(n) for n in lengths], slots)
            assert same_bits(everything(states, name), expected)


def test_a_snapshot_of_several_parts_is_scattered_whole() -> None:
    random = np.random.default_rng(1)
    layer = mamba2(num_heads=2, head_dim=80, state_size=64, conv_dim=2100)
    with states_of(verifying(layer, 2, layers=2, max_batch_size=2)) as states:
        before, snapshots = (fill(states, name, random) for name in ("recurrent_state", "intermediate_recurrent_state"))
        conv, conv_snapshots = (fill(states, name, random) for name in ("conv_state", "intermediate_conv_state"))
        assert commit(states, [2, 1], [1, 0]) == {}
        paths = [[0, 1], [0]]
        assert same_bits(everything(states, "recurrent_state"), scattered(before, snapshots, paths, [1, 0]))
        assert same_bits(everything(states, "conv_state"), scattered(conv, conv_snapshots, paths, [1, 0]))


def test_tree_scatter_takes_the_last_node_and_leaves_padding_out() -> None:
    """Nodes 5 and 1 are the last of their paths; the third row names none."""
    random = np.random.default_rng(2)
    ids, lengths, slots = [[0, 5, -1, -1], [3, -1, 1, 4], [-1, -1, 0, 0]], [4, 3, 2], [2, 0, 3]
    with states_of(verifying(mamba2(), 6)) as states:
        states.reshape_intermediate_states(3, 6)
        before = {name: fill(states, name, random) for name in STATES}
        snapshots = {name: fill(states, f"intermediate_{name}", random) for name in STATES}
        assert commit(states, lengths, slots, ids) == {}
        for name in STATES:
            expected = before[name].copy()
            expected[:, 2] = snapshots[name][:, 0, 5]
            expected[:, 0] = snapshots[name][:, 1, 1]
            assert same_bits(everything(states, name), expected)


# -- what is refused ---------------------------------------------------------------------------------------------------

LENGTH, NODE, SLOT, TWICE = CommitStatus.BAD_LENGTH, CommitStatus.BAD_NODE, CommitStatus.BAD_SLOT, CommitStatus.SLOT_TWICE
REFUSED = [
    ([-1, 1], [0, 1], None, {0: LENGTH}),
    ([5, 1], [0, 1], None, {0: LENGTH}),
    ([2**31 - 1, 1], [0, 1], None, {0: LENGTH}),
    ([1, 1], [4, 1], None, {0: SLOT}),
    ([1, 1], [-2, 1], None, {0: SLOT}),
    ([1, 1], [2**31 - 1, 1], None, {0: SLOT}),
    ([1, 2], [1, 1], None, {0: TWICE, 1: TWICE}),
    ([4, 1], [0, 1], [[0, 1, 2], [0, -1, -1]], {0: LENGTH}),
    ([2, 1], [0, 1], [[0, 4, 2], [0, -1, -1]], {0: NODE}),
    ([2, 1], [0, 1], [[0, -2, 2], [0, -1, -1]], {0: NODE}),
    ([3, 1], [0, 1], [[0, 1, 0], [0, -1, -1]], {0: NODE}),
    ([3, 1], [0, 1], [[1, -1, 1], [0, -1, -1]], {0: NODE}),
    ([2, 1], [0, 1], [[0, 2**31 - 1, 1], [0, -1, -1]], {0: NODE}),
]
CONFIGS = {
    "snapshots": verifying(mamba2(), 4),
    "replay": verifying(mamba2(), 4, "replay"),
    "delta net": verifying(delta_net(), 4, "replay"),
    "room": verifying(mamba2(), 4, conv_state_room=4),
    "convolutions": verifying(short_conv(), 4),
    "convolutions with room": verifying(short_conv(), 4, conv_state_room=4),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("lengths", "slots", "ids", "refused"), REFUSED)
def test_a_refused_row_stays_as_it_was(
    name: str, lengths: list[int], slots: list[int], ids: Any, refused: dict[int, CommitStatus]
) -> None:
    random = np.random.default_rng(3)
    with states_of(CONFIGS[name]) as states:
        states.reshape_intermediate_states(2, 4)
        arrays = [n for n in states.state_names if n not in STATES]
        for array in arrays:
            fill(states, array, random)
        before = {kind: fill(states, kind, random) for kind in kinds_of(states)}
        assert commit(states, lengths, slots, ids) == refused
        assert states.commit_refusals() == {}
        written = {slot for row, slot in enumerate(slots) if row not in refused}
        for kind in before:
            found = everything(states, kind)
            changed = {s for s in range(states.num_slots) if not same_bits(found[:, s], before[kind][:, s])}
            assert changed == written


def test_nothing_accepted_leaves_states_bit_by_bit() -> None:
    random = np.random.default_rng(4)
    for name in ("snapshots", "replay", "delta net", "convolutions"):
        with states_of(CONFIGS[name]) as states:
            for array in states.state_names:
                fill(states, array, random)
            before = {kind: everything(states, kind) for kind in kinds_of(states)}
            assert commit(states, [0] * 4, [3, 1, 0, 2]) == {}
            assert commit(states, [2] * 4, [3, 1, 0, 2], [[-1, -1, 0]] * 4) == {}
            assert commit(states, [2] * 4, [-1] * 4) == {}
            assert all(same_bits(everything(states, kind), values) for kind, values in before.items())


def test_snapshots_of_convolutions_alone_are_committed() -> None:
    random = np.random.default_rng(14)
    with states_of(CONFIGS["convolutions"]) as states:
        assert states.state_names == ("conv_state", "intermediate_conv_state")
        assert (states.has_commits, states.has_intermediate_recurrent_states) == (True, False)
        assert (states.has_intermediate_conv_states, states.uses_replay, states.commit_launches) == (True, False, 2)
        states.reshape_intermediate_states(3, 4)
        before, snapshots = (fill(states, name, random) for name in states.state_names)
        assert commit(states, [4, 0, 2], [2, 1, 3]) == {}
        assert same_bits(everything(states, "conv_state"), scattered(before, snapshots, [range(4), (), range(2)], [2, 1, 3]))
    with pytest.raises(ConfigError, match="ShortConvLayer"):
        verifying(short_conv(), 2, "replay")


# -- room for drafts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [mamba2, short_conv])
@settings(max_examples=20)
@given(data=st.data())
def test_rejected_drafts_are_shifted_out(make: Callable[..., RecurrentLayer], kind: str, data: st.DataObject) -> None:
    """The last columns are those of a sequence that only ever saw the accepted tokens."""
    room, kernel, channels = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    tokens = data.draw(st.integers(1, room))
    layer = make(conv_kernel=kernel, conv_dim=channels, conv_state_dtype=kind)
    seed = data.draw(st.integers(0, 99))
    random = np.random.default_rng(seed)
    with states_of(verifying(layer, room, conv_state_room=room, layers=2)) as states:
        assert "intermediate_conv_state" not in states.state_names
        columns = kernel - 1 + room
        assert states.conv_state(0).shape == (4, channels, columns)
        states.reshape_intermediate_states(4, tokens)
        before = fill(states, "conv_state", random)
        slots = data.draw(st.permutations([0, 1, 2, 3]))
        ids = None
        lengths = [data.draw(st.integers(0, tokens)) for _ in range(4)]
        if data.draw(st.booleans()):
            ids = [sorted(data.draw(st.permutations(range(tokens)))[:n]) + [-1] * (tokens - n) for n in lengths]
        assert commit(states, lengths, slots, ids) == {}
        found = everything(states, "conv_state")
        for row, slot in enumerate(slots):
            path = path_of(lengths[row], None if ids is None else ids[row])
            kept = before[:, slot, :, : columns - tokens]
            drafts = before[:, slot, :, columns - tokens :][:, :, path]
            expected = np.concatenate([np.zeros_like(before[:, slot, :, : tokens - len(path)]), kept, drafts], axis=2)
            assert same_bits(found[:, slot], expected)


def test_ids_must_ascend_where_drafts_are_shifted() -> None:
    with states_of(CONFIGS["room"]) as states:
        states.reshape_intermediate_states(2, 4)
        fill(states, "conv_state", np.random.default_rng(5))
        assert commit(states, [2, 2], [0, 1], [[2, 1], [1, 2]]) == {0: NODE}


# -- replays -----------------------------------------------------------------------------------------------------------

MAMBA_STASHES = ("replay_da_state", "replay_u_state", "replay_b_state", "replay_dt_state")
DELTA_STASHES = ("replay_k_state", "replay_g_state", "replay_beta_state", "replay_v_state")
PATHS = [
    (None, [4, 0, 1, 3]),
    ([[0, 2, 5, -1], [-1, -1, -1, -1], [3, -1, 1, 4], [0, 1, 2, 3]], [3, 4, 3, 4]),
]


def replay_states(states: MambaCacheManager, stashes: Sequence[str], random: np.random.Generator) -> dict[str, np.ndarray]:
    states.reshape_intermediate_states(4, 6)
    return {name: fill(states, name, random) for name in (*STATES, "intermediate_conv_state", *stashes)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ids", "lengths"), PATHS)
@pytest.mark.parametrize(
    "sizes", [{}, {"num_heads": 1, "num_groups": 1, "head_dim": 1, "state_size": 1}, {"head_dim": 16, "state_size": 12}]
)
def test_mamba_replay_is_the_sequential_recurrence(kind: str, ids: Any, lengths: list[int], sizes: dict[str, int]) -> None:
    """Bit by bit, with the rounding of the state's type behind every token."""
    slots = [2, 0, 3, 1]
    with states_of(verifying(mamba2(recurrent_state_dtype=kind, **sizes), 6, "replay", layers=2)) as states:
        given = replay_states(states, MAMBA_STASHES, np.random.default_rng(6))
        assert commit(states, lengths, slots, ids) == {}
        expected = given["recurrent_state"].copy()
        paths = [path_of(n, None if ids is None else ids[row]) for row, n in enumerate(lengths)]
        for layer in range(states.num_layers):
            for row, path in enumerate(paths):
                for token in path:
                    inputs = (given[name][layer, row, token] for name in MAMBA_STASHES)
                    expected[layer, slots[row]] = replayed_mamba(expected[layer, slots[row]], *inputs)
        assert same_bits(everything(states, "recurrent_state"), expected)
        conv = scattered(given["conv_state"], given["intermediate_conv_state"], paths, slots)
        assert same_bits(everything(states, "conv_state"), conv)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ids", "lengths"), PATHS)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_heads": 3, "num_key_heads": 1, "head_dim": 19, "state_size": 7},
        {"head_dim": 1, "state_size": 1},
        {"num_heads": 2, "head_dim": 16, "state_size": 8},
    ],
)
def test_delta_net_replay_against_numpy(kind: str, ids: Any, lengths: list[int], sizes: dict[str, int]) -> None:
    slots = [2, 0, 3, 1]
    layer = delta_net(recurrent_state_dtype=kind, conv_state_dtype="float16", **sizes)
    with states_of(verifying(layer, 6, "replay", layers=2)) as states:
        random = np.random.default_rng(7)
        given = replay_states(states, DELTA_STASHES, random)
        given["replay_k_state"] /= np.linalg.norm(given["replay_k_state"], axis=-1, keepdims=True)
        for name, (low, high) in {"replay_g_state": (0.5, 1.0), "replay_beta_state": (0.0, 1.0)}.items():
            given[name] = random.uniform(low, high, given[name].shape).astype(np.float32)
        for name in DELTA_STASHES[:3]:
            for number in range(states.num_layers):
                states.state(name, number).fill_from(np.ascontiguousarray(given[name][number]))
        assert commit(states, lengths, slots, ids) == {}
        found = everything(states, "recurrent_state")
        tolerance = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}[kind]
        for number in range(states.num_layers):
            for row, length in enumerate(lengths):
                exact = given["recurrent_state"][number, slots[row]].astype(np.float64)
                in_order = given["recurrent_state"][number, slots[row]]
                for token in path_of(length, None if ids is None else ids[row]):
                    inputs = [given[name][number, row, token] for name in DELTA_STASHES]
                    exact, in_order = replayed_delta_net(exact, *inputs), sequential_delta_net(in_order, *inputs)
                assert same_bits(found[number, slots[row]], in_order)
                error = np.abs(found[number, slots[row]].astype(np.float64) - exact)
                assert (error <= tolerance * (1 + np.abs(exact))).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", [mamba2, delta_net])
def test_a_replay_of_a_path_is_as_many_replays_of_one_token(net: Any, kind: str) -> None:
    with states_of(verifying(net(recurrent_state_dtype=kind), 6, "replay")) as states:
        stashes = [name for name in states.state_names if name.startswith("replay_")]
        given = replay_states(states, stashes, np.random.default_rng(8))
        ids, slots = [[0, 2, 3], [1, 2, 4], [5, 4, 3], [2, 0, 1]], [3, 2, 1, 0]
        assert commit(states, [3] * 4, slots, ids) == {}
        at_once = everything(states, "recurrent_state")
        for layer in range(states.num_layers):
            states.recurrent_state(layer).fill_from(np.ascontiguousarray(given["recurrent_state"][layer]))
        for token in range(3):
            assert commit(states, [1] * 4, slots, [[path[token]] for path in ids]) == {}
        assert same_bits(everything(states, "recurrent_state"), at_once)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy's, in the simulator
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [{}, {"head_dim": 8, "state_size": 4}], ids=["numbers", "tiles"])
@pytest.mark.parametrize("net", [mamba2, delta_net])
def test_a_nan_has_the_same_bits_on_every_target(net: Any, sizes: dict[str, int], kind: str) -> None:
    """All bits set but the sign, wherever it comes from: the state, of either sign, or an infinity times zero."""
    with states_of(verifying(net(recurrent_state_dtype=kind, **sizes), 1, "replay", layers=1, max_batch_size=2)) as states:
        given = {name: fill(states, name, np.random.default_rng(1)) for name in states.state_names}
        state = given["recurrent_state"]
        state[0, 0, 0, 0, 0], state[0, 1, 0, 0, 0], state[0, 1, 1, 1, 1] = np.nan, -np.nan, np.inf
        states.recurrent_state(0).fill_from(np.ascontiguousarray(state[0]))
        decay = "replay_da_state" if net is mamba2 else "replay_g_state"
        given[decay][0, 1, 0, 1] = 0
        states.state(decay, 0).fill_from(np.ascontiguousarray(given[decay][0]))
        assert commit(states, [1, 1], [0, 1]) == {}
        found = everything(states, "recurrent_state")
        bits = found.view(np.uint32 if kind == "float32" else np.uint16)
        is_nan = np.isnan(found.astype(np.float32))
        assert all(is_nan[0, slot, head, place, place] for slot, head, place in ((0, 0, 0), (1, 0, 0), (1, 1, 1)))
        assert (bits[is_nan] == (0x7FFFFFFF if kind == "float32" else 0x7FFF)).all()


@pytest.mark.parametrize(
    ("net", "sizes"),
    [
        (mamba2, {"num_groups": 1, "head_dim": 64, "state_size": 128}),
        (mamba2, {"num_groups": 1, "head_dim": 8, "state_size": 672}),  # six tokens are more than lies near a block
        (delta_net, {"num_key_heads": 1, "head_dim": 32 if SIMULATED else 128, "state_size": 128}),
        (delta_net, {"num_key_heads": 1, "head_dim": 768, "state_size": 4}),  # and here
    ],
)
def test_sizes_of_models(net: Any, sizes: dict[str, int]) -> None:
    layer = net(num_heads=1, **sizes)
    with states_of(verifying(layer, 6, "replay", layers=1, max_batch_size=2)) as states:
        random = np.random.default_rng(11)
        given = {name: fill(states, name, random) for name in states.state_names}
        if net is delta_net:
            given["replay_k_state"] /= np.linalg.norm(given["replay_k_state"], axis=-1, keepdims=True)
            states.state("replay_k_state", 0).fill_from(np.ascontiguousarray(given["replay_k_state"][0]))
        assert commit(states, [6, 1], [1, 0]) == {}
        found, step = everything(states, "recurrent_state")[0], replayed_mamba if net is mamba2 else sequential_delta_net
        for row, (length, slot) in enumerate([(6, 1), (1, 0)]):
            expected = given["recurrent_state"][0, slot]
            for token in range(length):
                inputs = [given[name][0, row, token] for name in (MAMBA_STASHES if net is mamba2 else DELTA_STASHES)]
                expected = step(expected, *inputs)
            assert same_bits(found[slot], expected)


@pytest.mark.parametrize("net", [mamba2, delta_net])
def test_states_in_parts(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that are too large for one block give what they give in one."""
    found = []
    for tiles in (None, 4):
        if tiles is not None:
            monkeypatch.setattr(state_commit, "_MAMBA_TILES", tiles)
            monkeypatch.setattr(state_commit, "_REPLAY_THREADS", tiles)
        with states_of(verifying(net(head_dim=16, state_size=16), 6, "replay", layers=1)) as states:
            replay_states(states, MAMBA_STASHES if net is mamba2 else DELTA_STASHES, np.random.default_rng(12))
            assert commit(states, [4, 0, 1, 3], [2, 0, 3, 1]) == {}
            found.append(everything(states, "recurrent_state"))
    assert same_bits(*found)


def test_a_delta_net_writes_what_is_new() -> None:
    """By hand: one head, key (1, 0), decay 0.5, gate 1, value 4 over a state of 2s: the row of the key becomes the value."""
    layer = delta_net(num_heads=1, num_key_heads=1, head_dim=2, state_size=1, conv_state_dtype="float32")
    with states_of(verifying(layer, 1, "replay", layers=1, max_batch_size=1)) as states:
        given = {"recurrent_state": [[[[2.0], [2.0]]]], "replay_k_state": [[[[1.0, 0.0]]]], "replay_g_state": [[[0.5]]]}
        given |= {"replay_beta_state": [[[1.0]]], "replay_v_state": [[[[4.0]]]]}
        for name, numbers in given.items():
            states.state(name, 0).fill_from(np.array(numbers, np.float32))
        assert commit(states, [1], [0]) == {}
        assert everything(states, "recurrent_state")[0, 0, 0].tolist() == [[4.0], [1.0]]


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_wrong_arrays_are_refused_before_anything_is_enqueued() -> None:
    with states_of(CONFIGS["snapshots"]) as states:
        device = states.device
        before = fill(states, "recurrent_state", np.random.default_rng(9))
        fill(states, "intermediate_recurrent_state", np.random.default_rng(10))
        lengths, slots, ids = (int32(device, n) for n in ([1] * 4, [0, 1, 2, 3], [[0]] * 4))
        short, wide = int32(device, [1] * 3), device.tensor((4,), dtype("int64"))
        many = int32(device, [[0] * 5] * 4)
        none = int32(device, [[]] * 4)
        linear, tree = states.scatter_accepted_linear_states, states.scatter_accepted_tree_states
        for call, error, words in (
            (lambda: linear(short, slots), ShapeError, "accept_len: .* at least 4"),
            (lambda: linear(wide, slots), ShapeError, "accept_len: .*int64"),
            (lambda: linear(lengths, ids), ShapeError, "state_index"),
            (lambda: linear(3, slots), InteropError, "accept_len"),
            (lambda: tree(many, lengths, slots), ShapeError, "node_ids: .* 1 to 4"),
            (lambda: tree(none, lengths, slots), ShapeError, "node_ids"),
            (lambda: tree(lengths, lengths, slots), ShapeError, "node_ids"),
            (lambda: tree(None, lengths, slots), InputError, "node_ids: None"),
            (lambda: states.replay_commit_accepted_tree_states(ids, lengths, slots), StateError, "snapshots"),
        ):
            with pytest.raises(error, match=words):
                call()
        assert same_bits(everything(states, "recurrent_state"), before)
        for tensor in (lengths, slots, ids, short, wide, many, none):
            tensor._memory.close(device.stream)


def test_a_stream_is_the_devices_own_or_captured() -> None:
    with states_of(CONFIGS["snapshots"]) as states:
        device = states.device
        states.reshape_intermediate_states(1, 4)
        before = fill(states, "recurrent_state", np.random.default_rng(11))
        snapshots = fill(states, "intermediate_recurrent_state", np.random.default_rng(12))
        lengths, slots = int32(device, [2]), int32(device, [3])
        with pytest.raises(InputError, match="stream"):
            states.scatter_accepted_linear_states(lengths, slots, stream="mine")
        assert same_bits(everything(states, "recurrent_state"), before)
        states.scatter_accepted_linear_states(lengths, slots, stream=device.stream)
        assert same_bits(everything(states, "recurrent_state"), scattered(before, snapshots, [[0, 1]], [3]))
        for tensor in (lengths, slots):
            tensor._memory.close(device.stream)


def test_a_captured_commit_follows_its_arrays() -> None:
    """One graph commits whatever lengths and slots the arrays hold when it is launched."""
    with states_of(CONFIGS["replay"]) as states:
        device = states.device
        states.reshape_intermediate_states(2, 4)
        given = {name: fill(states, name, np.random.default_rng(13)) for name in states.state_names}
        lengths, slots = int32(device, [0, 0]), int32(device, [0, 1])
        states.scatter_accepted_linear_states(lengths, slots)  # compiles
        graph = device.capture(lambda stream: states.scatter_accepted_linear_states(lengths, slots, stream=stream))
        assert same_bits(everything(states, "recurrent_state"), given["recurrent_state"])
        for numbers, places in (([2, 0], [3, 1]), ([1, 4], [0, 2])):
            lengths.fill_from(np.array(numbers, np.int32))
            slots.fill_from(np.array(places, np.int32))
            graph.launch(device.stream)
        expected = given["recurrent_state"].copy()
        for row, count, slot in ((0, 2, 3), (0, 1, 0), (1, 4, 2)):
            for layer in range(states.num_layers):
                for token in range(count):
                    inputs = (given[name][layer, row, token] for name in MAMBA_STASHES)
                    expected[layer, slot] = replayed_mamba(expected[layer, slot], *inputs)
        assert same_bits(everything(states, "recurrent_state"), expected)
        graph.close()
        for tensor in (lengths, slots):
            tensor._memory.close(device.stream)


@pytest.mark.parametrize(
    ("rows", "tokens", "word"),
    [(0, 1, "rows"), (5, 1, "rows"), (True, 1, "rows"), (1, 0, "tokens"), (1, 5, "tokens"), (1, 1.0, "tokens")],
)
def test_bad_packing(rows: Any, tokens: Any, word: str) -> None:
    with states_of(CONFIGS["snapshots"]) as states, pytest.raises(InputError, match=f"{word}: "):
        states.reshape_intermediate_states(rows, tokens)


@pytest.mark.parametrize("config", [tiny_config(None), recurrent_config(mamba2())], ids=["attention", "no verification"])
def test_a_plan_without_verification_says_so(config: LLMEngineConfig) -> None:
    with states_of(config) as states:
        assert not states.has_intermediate_recurrent_states
        assert not states.has_intermediate_conv_states
        assert not states.uses_replay
        vector = int32(states.device, [0])
        for call in (
            lambda: states.scatter_accepted_linear_states(vector, vector),
            lambda: states.reshape_intermediate_states(1, 1),
            states.commit_refusals,
        ):
            with pytest.raises(StateError, match="no verification of recurrent states"):
                call()
        vector._memory.close(states.device.stream)


def test_replay_modes_say_what_they_keep() -> None:
    with states_of(CONFIGS["replay"]) as states:
        assert states.uses_replay
        assert states.state_names == (*STATES, "intermediate_conv_state", *MAMBA_STASHES)
        lengths, slots, ids = (int32(states.device, n) for n in ([0] * 4, [0, 1, 2, 3], [[0]] * 4))
        states.replay_commit_accepted_tree_states(ids, lengths, slots)
        for tensor in (lengths, slots, ids):
            tensor._memory.close(states.device.stream)
    with states_of(CONFIGS["delta net"]) as states:
        assert states.state_names == (*STATES, "intermediate_conv_state", *DELTA_STASHES)
    with states_of(verifying(mamba1(), 2)) as states:
        assert not states.uses_replay
        assert states.has_intermediate_recurrent_states
    with pytest.raises(ConfigError, match="Mamba1Layer"):
        verifying(mamba1(), 2, "replay")


def test_stashes_keep_their_element_types() -> None:
    for kind in KINDS:
        with states_of(verifying(delta_net(conv_state_dtype=kind), 2, "replay")) as states:
            kinds = [states.state(name, 0).to_host().dtype for name in DELTA_STASHES]
            assert kinds == [np.float32] * 3 + [NUMPY[kind]]
