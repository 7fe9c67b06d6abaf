"""MambaCacheManager: what there is, and slots cleared, copied, captured and restored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from numba_kv.cache.mamba_cache import MambaCacheManager
from numba_kv.config import LLMEngineConfig
from numba_kv.config.state_layout import state_plans
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InteropError, ShapeError, StateError
from numba_kv.plan import plan_memory
from numba_kv.shared_resources import SharedResources
from tests.helpers.kv_pools import NUMPY, same_bits
from tests.helpers.models import tiny_config
from tests.helpers.states import (
    delta_net,
    everything,
    fill,
    kinds_of,
    mamba1,
    mamba2,
    recurrent_config,
    short_conv,
    states_of,
    values,
)

STATES = ("recurrent_state", "conv_state")
#: Words and halves, odd sizes and whole ones, every element type, parts of several blocks.
MODELS: dict[str, LLMEngineConfig] = {
    "odd sizes": recurrent_config(mamba2(recurrent_state_dtype="float16")),
    "whole words": recurrent_config(mamba2(state_size=8, conv_dim=8, conv_state_dtype="float32")),
    "bfloat16": recurrent_config(delta_net(recurrent_state_dtype="bfloat16", conv_state_dtype="float16")),
    "one layer": recurrent_config(mamba1(), 1, types=("none", "recurrent", "none")),
    "pure": recurrent_config(mamba2(), types=("recurrent",) * 3),
    "side by side": recurrent_config(mamba2(), types=("both", "both", "both")),
    "room for drafts": recurrent_config(mamba2(), conv_state_room=3),
    "short": recurrent_config(short_conv()),
    "short, several parts": recurrent_config(short_conv(conv_dim=2100, conv_kernel=5, conv_state_dtype="float16"), 2),
    "several parts": recurrent_config(mamba2(num_heads=2, head_dim=80, state_size=64, conv_dim=2100), 2, max_batch_size=2),
}


@pytest.fixture
def states() -> Iterator[MambaCacheManager]:
    with states_of(MODELS["odd sizes"]) as found:
        yield found


@pytest.mark.parametrize("name", MODELS)
def test_states_are_zero_dense_and_apart(name: str) -> None:
    config = MODELS[name]
    layer = config.recurrent_layer
    with states_of(config) as states:
        assert states.num_layers == config.num_recurrent_layers
        assert states.num_slots == config.max_batch_size
        assert states.nbytes == sum(plan.nbytes for plan in state_plans(config))
        spans = []
        rows = config.max_batch_size
        wanted = {
            "recurrent_state": ((rows, *layer.state_shape), layer.recurrent_state_dtype),
            "conv_state": ((rows, *layer.conv_shape(config.conv_state_room)), layer.conv_state_dtype),
        }
        assert states.state_names == kinds_of(states)
        for number in range(states.num_layers):
            for name in states.state_names:
                tensor, (shape, kind) = states.state(name, number), wanted[name]
                assert (tensor.shape, tensor.dtype.name, tensor.is_contiguous) == (shape, kind, True)
                assert tensor.address % 256 == 0
                assert not tensor.to_host().any()
                spans.append((tensor.address, tensor.address + tensor.nbytes))
        spans.sort()
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("name", MODELS)
def test_planned_bytes_are_the_allocated_ones(name: str) -> None:
    for config in (MODELS[name], replace(MODELS[name], max_verify_tokens=2)):
        plan = plan_memory(config)
        with SharedResources.create_for_llm(config) as resources:
            assert resources.device.memory.current_bytes == plan.nbytes


@pytest.mark.parametrize("name", MODELS)
def test_one_slot_is_cleared(name: str) -> None:
    random = np.random.default_rng(0)
    with states_of(MODELS[name]) as states:
        expected = {kind: fill(states, kind, random) for kind in kinds_of(states)}
        states.clear_slot(1)
        for kind in expected:
            expected[kind][:, 1] = 0
            assert same_bits(everything(states, kind), expected[kind])
        states.clear_states()
        assert not any(everything(states, kind).any() for kind in expected)


@pytest.mark.parametrize("slots", [[], [3], [0, 1], [3, 0, 2, 3], [0, 1, 2, 3]])
def test_several_slots_are_cleared(states: MambaCacheManager, slots: list[int]) -> None:
    expected = fill(states, "recurrent_state", np.random.default_rng(1))
    states.clear_slots(slots)
    expected[:, slots] = 0
    assert same_bits(everything(states, "recurrent_state"), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_slot_is_restored_bit_by_bit(name: str) -> None:
    random = np.random.default_rng(2)
    with states_of(MODELS[name]) as states:
        expected = {kind: fill(states, kind, random) for kind in kinds_of(states)}
        captured = states.capture_slot(1)
        assert captured.nbytes == sum(expected[kind][:, 1].nbytes for kind in expected)
        states.clear_slot(1)
        states.restore_slot(0, captured.recurrent, captured.conv)
        for kind, saved in {"recurrent_state": captured.recurrent, "conv_state": captured.conv}.items():
            if kind not in expected:
                assert saved == ()
                continue
            assert [tensor.shape[0] for tensor in saved] == [1] * states.num_layers
            assert same_bits(np.concatenate([tensor.to_host() for tensor in saved]), expected[kind][:, 1])
            expected[kind][:, 0] = expected[kind][:, 1]
            expected[kind][:, 1] = 0
            assert same_bits(everything(states, kind), expected[kind])
        captured.close()
        captured.close()
        with pytest.raises(StateError, match="given back"):
            states.restore_slot(0, captured.recurrent, captured.conv)


def test_bytes_of_a_slot() -> None:
    """Two layers of 2 x 3 x 4 and 5 x 6 elements of two bytes: 216 bytes."""
    kinds = {"recurrent_state_dtype": "float16", "conv_state_dtype": "float16"}
    layer = mamba2(num_heads=2, head_dim=3, state_size=4, conv_dim=5, conv_kernel=6, **kinds)
    with states_of(recurrent_config(layer, 2)) as states:
        captured = states.capture_slot(0)
        assert captured.nbytes == 216
        captured.close()


def test_values_of_a_capture_stay(states: MambaCacheManager) -> None:
    """Capture slot 1 with 31 and 41, overwrite it, and restore it to slot 3."""
    for layer in range(states.num_layers):
        for tensor, number in ((states.recurrent_state(layer), 31), (states.conv_state(layer), 41)):
            tensor[1].fill_from(np.full(tensor.shape[1:], number, tensor.dtype.numpy()))
    captured = states.capture_slot(1)
    states.clear_states()
    states.restore_slot(3, captured.recurrent, captured.conv)
    for kind, number in zip(STATES, (31, 41), strict=True):
        found = everything(states, kind).astype(np.float32)
        assert (found[:, 3] == number).all()
        assert not found[:, :3].any()
    captured.close()


def test_arrays_of_other_libraries_are_restored_and_missing_layers_become_zero(states: MambaCacheManager, target: str) -> None:
    if target == "cuda":
        pytest.skip("NumPy arrays are not in device memory")
    random = np.random.default_rng(3)
    expected = {kind: fill(states, kind, random) for kind in STATES}
    shapes = [(1, *expected[kind].shape[2:]) for kind in STATES]
    kinds = [states.state(kind, 0).dtype.name for kind in STATES]
    recurrent = [values(random, shapes[0], kinds[0]) for _ in range(2)]
    conv = [values(random, shapes[1], kinds[1]) for _ in range(3)]
    states.restore_slot(2, recurrent, conv)
    for kind, arrays in zip(STATES, (recurrent, conv), strict=True):
        expected[kind][:, 2] = 0
        for layer, array in enumerate(arrays):
            expected[kind][layer, 2] = array[0]
        assert same_bits(everything(states, kind), expected[kind])


def test_a_wrong_array_leaves_everything_as_it_was(states: MambaCacheManager) -> None:
    random = np.random.default_rng(4)
    expected = {kind: fill(states, kind, random) for kind in STATES}
    device = states.device
    good = states.capture_slot(0)
    shape, kind = good.conv[0].shape, good.conv[0].dtype
    wrong = [
        (device.tensor(shape, dtype("float32")), ShapeError, "float32"),
        (device.tensor(shape[1:], kind), ShapeError, "dense"),
        (device.tensor((2, *shape[1:]), kind), ShapeError, r"\[2, "),
        (device.tensor((*shape[:2], 2 * shape[2]), kind)[:, :, ::2], ShapeError, "strides"),
        (states.conv_state(1)[0:1], InputError, "states themselves"),
        ("state", InteropError, "str"),
    ]
    for array, error, words in wrong:
        with pytest.raises(error, match=words) as caught:
            states.restore_slot(1, good.recurrent, [good.conv[0], array])
        assert "conv[1]" in str(caught.value)
    with pytest.raises(InputError, match="recurrent: 4 arrays given for 3"):
        states.restore_slot(1, (*good.recurrent, good.recurrent[0]), good.conv)
    with pytest.raises(InputError, match="conv: 3 is not a sequence"):
        states.restore_slot(1, good.recurrent, 3)
    good.close()
    for array, _, _ in wrong[:4]:
        array._memory.close(device.stream)
    for name in STATES:
        assert same_bits(everything(states, name), expected[name])


@pytest.mark.parametrize("name", MODELS)
def test_a_slot_is_moved_to_memory_of_the_caller_and_back(name: str) -> None:
    random = np.random.default_rng(7)
    with states_of(MODELS[name]) as states:
        device, last = states.device, states.num_slots - 1
        expected = {kind: fill(states, kind, random) for kind in kinds_of(states)}
        memory = device.allocate(16 + states.slot_nbytes)
        states.move_slot(0, memory, 16, out=True)
        states.clear_slot(0)
        states.move_slot(last, memory, 16, out=False)
        for kind in expected:
            expected[kind][:, last] = expected[kind][:, 0]
            expected[kind][:, 0] = 0
            assert same_bits(everything(states, kind), expected[kind])
        for at in (-8, 4, 24):
            with pytest.raises(ShapeError, match=f"at: {at} given"):
                states.move_slot(0, memory, at, out=False)
        memory.close(device.stream)


@pytest.mark.parametrize("name", MODELS)
def test_slots_are_copied(name: str) -> None:
    random = np.random.default_rng(5)
    with states_of(MODELS[name]) as states:
        last = states.num_slots - 1
        expected = {kind: fill(states, kind, random) for kind in kinds_of(states)}
        states.copy_slots([(0, last)])
        states.copy_slots([])
        for kind in expected:
            expected[kind][:, last] = expected[kind][:, 0]
            assert same_bits(everything(states, kind), expected[kind])


def test_several_slots_are_copied_at_once(states: MambaCacheManager) -> None:
    expected = fill(states, "conv_state", np.random.default_rng(6))
    states.copy_slots([(1, 0), (1, 3)])
    expected[:, [0, 3]] = expected[:, [1, 1]]
    assert same_bits(everything(states, "conv_state"), expected)


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([(0, 4)], "4 is not one of the 4 slots"),
        ([(-1, 0)], "-1 is not"),
        ([(True, 0)], "True"),
        ([(0, 1), (2, 1)], "target twice"),
        ([(0, 1), (1, 2)], "slot 1 is both"),
        ([(0, 0)], "slot 0 is both"),
        ([0], "pairs of slots"),
        (7, "pairs of slots"),
    ],
)
def test_bad_pairs(states: MambaCacheManager, pairs: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        states.copy_slots(pairs)


@pytest.mark.parametrize("slot", [-1, 4, 1.0, True, None, "0", 2**40])
def test_bad_slots(states: MambaCacheManager, slot: object) -> None:
    for call in (states.clear_slot, states.capture_slot, lambda s: states.restore_slot(s, (), ())):
        with pytest.raises(InputError, match="slot: .* is not one of the 4 slots"):
            call(slot)
    with pytest.raises(InputError, match=r"slots\[1\]"):
        states.clear_slots([0, slot])


@pytest.mark.parametrize("layer", [-1, 3, 0.0, False, None])
def test_bad_layers(states: MambaCacheManager, layer: object) -> None:
    for call in (states.recurrent_state, states.conv_state):
        with pytest.raises(InputError, match="layer: .* is not one of the 3 recurrent layers"):
            call(layer)
    with pytest.raises(InputError, match="name: 'kv' is not one of recurrent_state, conv_state"):
        states.state("kv", 0)


def test_convolutions_alone_have_no_recurrent_states() -> None:
    with states_of(MODELS["short"]) as states:
        assert states.state_names == ("conv_state",)
        assert states.slot_nbytes == 3 * 40  # 6 channels of 3 columns of two bytes, in whole words
        with pytest.raises(InputError, match="recurrent_state: the recurrent layers are convolutions alone"):
            states.recurrent_state(2)
        with pytest.raises(InputError, match="layer: 3 is not one of the 3 recurrent layers"):
            states.recurrent_state(3)
        captured = states.capture_slot(0)
        before = fill(states, "conv_state", np.random.default_rng(8))
        with pytest.raises(InputError, match="recurrent: 3 arrays given, but the layers are convolutions alone"):
            states.restore_slot(1, captured.conv, captured.conv)
        assert same_bits(everything(states, "conv_state"), before)
        states.restore_slot(1, (), captured.conv[:2])  # the last layer becomes zero, too
        before[:, 1] = 0
        assert same_bits(everything(states, "conv_state"), before)
        captured.close()


def test_a_model_without_recurrent_layers_has_an_empty_manager() -> None:
    with states_of(tiny_config(None)) as states:
        assert (states.num_layers, states.nbytes, states.state_names, states.layer) == (0, 0, (), None)
        states.clear_states()
        states.clear_slot(0)
        states.clear_slots([0, 1])
        states.copy_slots([(0, 1)])
        with pytest.raises(InputError, match="there are none"):
            states.recurrent_state(0)
        for call in (lambda: states.capture_slot(0), lambda: states.restore_slot(0, (), ())):
            with pytest.raises(StateError, match="no recurrent layers"):
                call()


def test_every_call_after_close_is_an_error() -> None:
    with states_of(MODELS["pure"]) as states:
        captured = states.capture_slot(0)
        captured.close()
    calls = (
        lambda: states.recurrent_state(0),
        lambda: states.clear_states(),
        lambda: states.clear_slot(0),
        lambda: states.clear_slots([0]),
        lambda: states.copy_slots([(0, 1)]),
        lambda: states.capture_slot(0),
        lambda: states.restore_slot(0, captured.recurrent, captured.conv),
    )
    for call in calls:
        with pytest.raises(StateError, match="closed"):
            call()


def test_element_types_are_kept(target: str) -> None:
    for kind in ("float32", "float16", "bfloat16"):
        config = recurrent_config(mamba2(recurrent_state_dtype=kind, conv_state_dtype=kind), 1)
        with states_of(config) as states:
            assert states.recurrent_state(0).to_host().dtype == NUMPY[kind]
            assert states.conv_state(0).to_host().dtype == NUMPY[kind]
