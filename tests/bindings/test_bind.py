"""bind: which tensor is behind each name, at which shape, in each storage mode, step after step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.bindings import bind_lora, bind_rope, binding_names
from numba_kv.errors import CapacityError, InputError, ShapeError, StateError
from numba_kv.plan import plan_memory
from tests.helpers.configs import edgellm, per_layer
from tests.helpers.models import chunked, tiny_config
from tests.helpers.states import mamba2, recurrent_config, short_conv

MIXED = tiny_config(None, 8, max_batch_size=3)


@contextmanager
def running(config: kv.LLMEngineConfig = MIXED, prompts: tuple[int, ...] = (5, 9)) -> Iterator[tuple[kv.Batch, kv.StepView]]:
    """Run a prefill of `prompts` on the caches of a model."""
    with kv.SharedResources.create_for_llm(config) as resources, kv.Batch(resources) as batch:
        sequences = batch.update(admit=list(prompts))
        yield batch, batch.step({s: s.pending_tokens for s in sequences})


def reference_engine(**builder: Any) -> dict[str, Any]:
    """Return the engine of the reference's binding test: three layers, the last two with a window, one borrowing."""
    sizes = {"max_batch_size": 2, "max_input_len": 128, "max_kv_cache_capacity": 8192, "max_kv_pool_pages": 128}
    windows = per_layer(0, 129, 129, heads=1, head_dim=8)
    return edgellm(builder={**sizes, "num_swa_pages": 64, **builder}, kv_sharing_donors=[-1, -1, 1], **windows)


# -- what is bound


def test_everything_that_the_caches_have() -> None:
    with running() as (batch, view):
        tensors = kv.bind(batch.resources, view)
        assert {name: (str(t.dtype), t.shape) for name, t in tensors.items()} == {
            "positions": ("int32", (14,)),
            "query_start_offsets": ("int32", (3,)),
            "query_lengths": ("int32", (2,)),
            "past_lengths": ("int32", (2,)),
            "attention_sequence_lengths": ("int32", (2,)),
            "kv_page_table": ("int32", (2, 2, 64)),
            "kv_slot_mapping": ("int64", (14,)),
            "swa_kv_page_table": ("int32", (2, 2, 64)),
            "swa_kv_slot_mapping": ("int64", (14,)),
            "zero_buffer": ("uint8", (256,)),
            "swa_kv_cache_mode": ("int8", (1,)),
            **dict.fromkeys(("past_key_values_0", "present_key_values_0"), ("bfloat16", (2, 3 * 16 + 2, 4, 1, 8))),
            **dict.fromkeys(("past_key_values_1", "present_key_values_1"), ("bfloat16", (2, 3 * 3 + 2, 4, 1, 8))),
        }
        assert all(tensor.is_contiguous for _, tensor in tensors.items())
        assert tensors.missing(binding_names(MIXED)) == (
            "inputs_embeds",
            "state_indices",
            "logits_indices",
            "execution_phase_marker",
            "context_sequence_count_carrier",
            "logits",
        )


def test_the_contents_are_those_of_the_step() -> None:
    with running() as (batch, _):
        view = batch.step({batch.sequences[1]: 2})
        tensors = kv.bind(batch.resources, view)
        found = {name: tensors[name].to_host().tolist() for name in tensors if "key_values" not in name}
        assert found["positions"] == [9, 10]
        assert found["query_start_offsets"] == [0, 0, 2]
        assert found["query_lengths"] == [0, 2]
        assert found["past_lengths"] == [5, 9]
        assert found["attention_sequence_lengths"] == [5, 11]
        assert found["kv_slot_mapping"] == view.slot_mapping[0].to_host()[:2].tolist()
        assert found["swa_kv_slot_mapping"] == view.slot_mapping[1].to_host()[:2].tolist()
        assert not any(found["zero_buffer"])
        for name, g in (("kv_page_table", 0), ("swa_kv_page_table", 1)):
            table = np.array(found[name])
            assert np.array_equal(table, view.page_tables[g].to_host()[:2])
            mapped = table[:, 0] >= 0
            assert mapped.any(axis=1).all()
            pages = batch.plan.groups[g].num_pages
            assert pages == tensors[f"past_key_values_{g}"].shape[1]
            assert np.array_equal(table[:, 1][mapped], table[:, 0][mapped] + pages)


def test_query_lengths_are_what_the_device_decided() -> None:
    with running() as (batch, _):
        resources = batch.resources
        counts = resources.device.tensor((3,), kv.dtype("int32"))
        counts.fill_from(np.array([1, 3, 0], np.int32))
        tensors = kv.bind(resources, batch.step(3, counts=counts))
        past, query, total = (tensors[f"{n}_lengths"].to_host() for n in ("past", "query", "attention_sequence"))
        assert query.tolist() == [1, 3]
        assert np.array_equal(past + query, total)
        assert tensors["positions"].shape == (6,)
        assert tensors["query_start_offsets"].to_host().tolist() == [0, 3, 6]


def test_both_names_of_a_layer_are_its_pool() -> None:
    config = tiny_config(None, 8, None, 8, heads=[(2, 8), (1, 4), (2, 8), (1, 4)], donors={2: 0, 3: 1})
    with running(config) as (batch, view):
        tensors, manager = kv.bind(batch.resources, view), batch.resources.cache_managers[0]
        for layer, owner in enumerate((0, 1, 0, 1)):
            past = tensors[f"past_key_values_{layer}"]
            assert past is tensors[f"present_key_values_{layer}"] is manager.kv(owner)
        assert "past_key_values_4" not in tensors


def test_states_are_bound_where_they_are() -> None:
    config = recurrent_config(mamba2(), 2, max_verify_tokens=3)
    with running(config) as (batch, view):
        resources, manager = batch.resources, batch.resources.cache_managers[0]
        tensors = kv.bind(resources, view)
        rows = view.num_rows
        assert tensors["state_indices"].to_host().tolist() == view.state_index.to_host()[:rows].tolist() == list(range(rows))
        for place, layer in enumerate((0, 2)):
            for name, state in (("recurrent_state", manager.recurrent_state(layer)), ("conv_state", manager.conv_state(layer))):
                bound = tensors[f"{name}_{place}"]
                assert bound is tensors[f"present_{name}_{place}"]
                assert (bound.address, bound.shape, bound.dtype) == (state.address, state.shape, state.dtype)
                kept = tensors[f"intermediate_{name}_{place}"]
                most = config.max_batch_size * 3
                assert (kept.shape, kept.dtype) == ((most, *state.shape[1:]), state.dtype)
        assert tensors["past_key_values_0"] is manager.kv(1)
        assert "past_key_values_1" not in tensors
        manager.mamba_cache.reshape_intermediate_states(rows, 2)
        kv.bind(resources, view, into=tensors)
        assert tensors["intermediate_conv_state_1"].shape[0] == 2 * rows
        assert tensors.changes_since(tensors.snapshot()) == ()


def test_of_convolutions_alone_only_what_there_is_is_bound() -> None:
    config = recurrent_config(short_conv(), 2, max_verify_tokens=3)
    with running(config) as (batch, view):
        manager, tensors = batch.resources.cache_managers[0], kv.bind(batch.resources, view)
        assert not [name for name in tensors if "recurrent_state" in name]
        for place, layer in enumerate((0, 2)):
            bound = tensors[f"conv_state_{place}"]
            assert bound is tensors[f"present_conv_state_{place}"]
            assert (bound.address, bound.shape) == (manager.conv_state(layer).address, (4, 6, 3))
            assert tensors[f"intermediate_conv_state_{place}"].shape == (12, 6, 3)
        assert "state_indices" in tensors
        declared = [name for name in binding_names(config) if "_state_" in name]
        assert tensors.missing(declared) == ()


def test_a_model_without_states_leaves_their_indices_to_the_caller() -> None:
    with running() as (batch, view):
        tensors = kv.bind(batch.resources, view)
        assert not [name for name in tensors if "state" in name]


def test_a_model_without_windows_has_no_window_binding() -> None:
    with running(tiny_config(None, None)) as (batch, view):
        assert not [name for name in kv.bind(batch.resources, view) if name.startswith("swa")]


def test_a_model_of_windows_alone_has_an_empty_full_table() -> None:
    with running(tiny_config(8)) as (batch, view):
        tensors = kv.bind(batch.resources, view)
        assert (tensors["kv_page_table"].to_host() == -1).all()
        assert (tensors["kv_slot_mapping"].to_host() == -1).all()
        assert (tensors["swa_kv_slot_mapping"].to_host()[-4:] >= 0).all()


def test_several_windows_are_numbered_in_model_order() -> None:
    with running(tiny_config(8, None, chunked(8), 8)) as (batch, view):
        tensors = kv.bind(batch.resources, view)
        assert "swa_kv_page_table" not in tensors
        for place in (1, 2):
            assert tensors[f"swa_kv_page_table_{place}"].address == view.page_tables[place].address
            assert tensors[f"swa_kv_slot_mapping_{place}"].address == view.slot_mapping[place].address
        assert tensors["past_key_values_0"].shape[1] == batch.plan.groups[1].num_pages
        assert tensors["past_key_values_2"].shape[1] == batch.plan.groups[2].num_pages


@pytest.mark.parametrize("bounded", [True, False])
def test_the_storage_modes_of_the_reference(bounded: bool) -> None:
    config = kv.load_engine_config(reference_engine(), use_bounded_swa=bounded)
    with running(config, (200, 5)) as (batch, view):
        tensors = kv.bind(batch.resources, view)
        full, window = tensors["kv_page_table"], tensors["swa_kv_page_table"]
        pools = [tensors[f"past_key_values_{layer}"] for layer in range(3)]
        assert pools[2] is pools[1]
        assert pools[1].address != pools[0].address
        assert tensors["swa_kv_cache_mode"].shape == (int(bounded),)
        assert (window is full) is not bounded
        assert (tensors["swa_kv_slot_mapping"] is tensors["kv_slot_mapping"]) is not bounded
        bases = [t.to_host()[1, 1, 0] - t.to_host()[1, 0, 0] for t in (full, window)]
        assert bases == [pools[0].shape[1], pools[1].shape[1]]
        assert (bases[0] == bases[1]) is not bounded
        assert (pools[1].shape[1] < pools[0].shape[1]) is bounded


def test_full_mode_keeps_the_windows_of_the_model() -> None:
    config = tiny_config(8, None, chunked(8), use_bounded_swa=False)
    with running(config) as (batch, view):
        tensors = kv.bind(batch.resources, view)
        assert tensors["swa_kv_page_table_1"] is tensors["swa_kv_page_table_2"] is tensors["kv_page_table"]
        assert [layer.window.tokens for layer in batch.resources.config.layers] == [8, 0, 8]


# -- the zero buffer


@pytest.mark.parametrize(
    ("rows", "hidden", "features", "nbytes"),
    [(3, 512, 2, 3 * 512 * 2), (3, 512, 0, 256), (1, 16, 3, 256), (2, 64, 1, 256), (2, 65, 1, 260)],
)
def test_the_size_of_the_zero_buffer(rows: int, hidden: int, features: int, nbytes: int) -> None:
    config = tiny_config(None, max_batch_size=rows, hidden_size=hidden, num_deepstack_features=features)
    config = replace(config, max_step_tokens=4, max_input_len=32)  # one token a row counts, whatever a step may have
    assert plan_memory(config).region("zero_buffer").shape == (nbytes,)
    with kv.SharedResources.create_for_llm(config) as resources:
        assert resources.zero_buffer.shape == (nbytes,)
        assert not resources.zero_buffer.to_host().any()


def test_deep_stack_inputs_are_zeros_unless_features_are_given() -> None:
    config = tiny_config(None, hidden_size=128, num_deepstack_features=2)
    with running(config) as (batch, prefill):
        resources, half = batch.resources, kv.dtype("float16")
        with pytest.raises(
            CapacityError, match=r"512 bytes do not hold 14 tokens.*allocate_zero_buffer\(resources, 3584\)"
        ) as e:
            kv.bind(resources, prefill)
        assert (e.value.needed, e.value.free) == (14 * 128 * 2, 512)
        features = {f"deepstack_embeds_{i}": resources.device.tensor((14, 128), half) for i in range(2)}
        tensors = kv.bind(resources, prefill, extra=features)
        assert tensors["deepstack_embeds_1"] is features["deepstack_embeds_1"]
        kv.bind(resources, batch.step(1), into=tensors)
        for name in features:
            assert (tensors[name].shape, tensors[name].dtype) == ((2, 128), half)
            assert tensors[name].address == resources.zero_buffer.address
            assert not tensors[name].to_host().any()
        one = resources.device.tensor((2, 128), half)
        kv.bind(resources, batch.step(1), into=tensors, extra={"deepstack_embeds_1": one})  # the other stays zeros
        assert tensors["deepstack_embeds_1"] is one
        assert tensors["deepstack_embeds_0"].address == resources.zero_buffer.address
        kv.allocate_zero_buffer(resources, 14 * 128 * 2)
        kv.bind(resources, prefill, into=tensors)
        assert tensors["deepstack_embeds_0"].shape == (14, 128)
        assert tensors["zero_buffer"] is resources.zero_buffer


# -- step after step


def test_addresses_never_change() -> None:
    with running() as (batch, view):
        tensors = kv.bind(batch.resources, view)
        before = {name: tensor.address for name, tensor in tensors.items()}
        first = batch.step(1)
        steady = kv.bind(batch.resources, first)
        then = steady.snapshot()
        for _ in range(20):  # windows rotate, pages are leased
            last = batch.step(1)
        assert kv.bind(batch.resources, last).changes_since(then) == ()
        expected = [s.length for s in batch.sequences]
        assert steady["attention_sequence_lengths"].to_host().tolist() == expected  # the old map, untouched
        batch.update(retire=batch.sequences[:1], admit=[3, 4])
        again = kv.bind(batch.resources, batch.step({batch.sequences[-1]: 4}))
        assert {name: tensor.address for name, tensor in again.items()} == before
        assert again.changes_since(then) == (
            "positions",
            "query_start_offsets",
            "query_lengths",
            "past_lengths",
            "attention_sequence_lengths",
            "kv_page_table",
            "kv_slot_mapping",
            "swa_kv_page_table",
            "swa_kv_slot_mapping",
        )


def test_a_map_is_brought_up_to_date() -> None:
    with running() as (batch, view):
        resources = batch.resources
        tensors = kv.bind(resources, view, extra={"logits": resources.device.tensor((2, 9), kv.dtype("float32"))})
        order, logits, frozen = list(tensors), tensors["logits"], tensors.frozen()
        batch.admit(num_tokens=4)
        assert kv.bind(resources, batch.step({batch.sequences[2]: 4}), into=tensors) is tensors
        assert list(tensors) == order
        assert tensors["kv_page_table"].shape[0] == frozen["past_lengths"].shape[0] == 3
        assert frozen["positions"].shape == (4,)
        assert tensors["logits"] is logits


def test_a_captured_step_needs_no_map_of_its_own() -> None:
    with running() as (batch, _):
        tensors = kv.bind(batch.resources, batch.step(1))
        then = tensors.snapshot()
        captured = batch.capture()
        captured.reserve(3)
        for _ in range(3):
            captured.launch()
        captured.advanced()
        assert tensors.changes_since(then) == ()
        assert tensors["attention_sequence_lengths"].to_host().tolist() == [5 + 4, 9 + 4]
        captured.close()


def test_a_map_of_other_resources_is_refused_and_stays_as_it_is() -> None:
    with running() as (batch, view), running() as (other, other_view):
        tensors = kv.bind(batch.resources, view)
        then = tensors.snapshot()
        with pytest.raises(InputError, match="keeps its address"):
            kv.bind(other.resources, other_view, into=tensors)
        assert tensors.snapshot() == then
        with pytest.raises(InputError, match="is of another batch, not of model 0"):
            kv.bind(batch.resources, other_view)


# -- what else is bound


def test_rotary_rows() -> None:
    with running() as (batch, view):
        device, single = batch.resources.device, kv.dtype("float32")
        sliding, full = device.tensor((64, 8), single), device.tensor((64, 4), single)
        assert bind_rope([], view) == {}
        assert {n: t.shape for n, t in bind_rope([full], view).items()} == {"rope_rotary_cos_sin": (14, 4)}
        dual = bind_rope([sliding, full], view)
        assert {n: t.shape for n, t in dual.items()} == {
            "rope_rotary_cos_sin_sliding": (14, 8),
            "rope_rotary_cos_sin_full": (14, 4),
        }
        tensors = kv.bind(batch.resources, view, extra=dual)
        step = batch.step(1)
        kv.bind(batch.resources, step, into=tensors, extra=bind_rope([sliding, full], step))
        assert tensors["rope_rotary_cos_sin_full"].shape == (2, 4)
        with pytest.raises(InputError, match="3 rotary inputs"):
            bind_rope([full] * 3, view)
        for wrong in (full[:13], full[0], device.tensor((64, 8), kv.dtype("float16"))):
            with pytest.raises(ShapeError, match=r"rope_rotary_cos_sin: .* given, float32 \[at least 14 tokens, D\] wanted"):
                bind_rope([wrong], view)


def test_adapters() -> None:
    with running() as (batch, view):
        slot = batch.resources.device.tensor((16, 4), kv.dtype("float16"))
        names = {"layers.0.q_proj.lora_A": slot, "lora_B_layers_0_q_proj": slot}
        tensors = kv.bind(batch.resources, view, extra=bind_lora(names))
        assert tensors["layers.0.q_proj.lora_A"] is slot
        with pytest.raises(InputError, match="'q_proj.weight' holds neither 'lora_A' nor 'lora_B'"):
            bind_lora({**names, "q_proj.weight": slot})


# -- what is refused


def test_wrong_arguments() -> None:
    with running() as (batch, view):
        resources = batch.resources
        for index in (-1, 1, True, "0", None):
            with pytest.raises(InputError, match="index: .* is not one of the 1 models"):
                kv.bind(resources, view, index=index)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="resources: dict is not a SharedResources"):
            kv.bind({}, view)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="view: Batch is not a StepView"):
            kv.bind(resources, batch)  # type: ignore[arg-type]
        mine = resources.device.tensor((2,), kv.dtype("int32"))
        for name in ("kv_page_table", "past_key_values_0", "zero_buffer"):
            with pytest.raises(InputError, match=f"extra: '{name}' is bound to the resources' own tensor"):
                kv.bind(resources, view, extra={name: mine})
        tensors = kv.TensorMap()
        with pytest.raises(InputError, match="logits: int is not a Tensor"):
            kv.bind(resources, view, into=tensors, extra={"logits": 3})  # type: ignore[dict-item]
        assert not len(tensors)
        tensors.close()
        with pytest.raises(StateError, match="the TensorMap is closed"):
            kv.bind(resources, view, into=tensors)


def test_closed_resources_are_refused() -> None:
    with running() as (batch, view):
        resources = batch.resources
        tensors = kv.bind(resources, view)
        resources.close()
        with pytest.raises(StateError, match="SharedResources is closed"):
            kv.bind(resources, view)
        for name in tensors:
            with pytest.raises(StateError, match=f"{name}: the tensor's memory has been given back"):
                tensors.get(name)
        tensors.close()
