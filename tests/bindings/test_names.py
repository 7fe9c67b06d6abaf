"""The names that an engine declares, counted as the reference's own tests count them, and who may be bound again."""

from __future__ import annotations

import re
from typing import Any

import pytest

import numba_kv as kv
from numba_kv.bindings import Rebind, binding_names, rebind_rule
from numba_kv.config.edgellm import prefers_bounded_swa
from tests.helpers.configs import edgellm, per_layer
from tests.helpers.models import chunked, tiny_config
from tests.helpers.states import delta_net, mamba2, recurrent_config, short_conv

ROPE = {"rope_theta": 1e4, "max_position_embeddings": 256}


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({"num_hidden_layers": 32}, 77),
        ({"num_hidden_layers": 2, "num_deepstack_features": 3}, 20),
        ({"num_hidden_layers": 10}, 33),
        ({**per_layer(0, 128), "builder": {"num_swa_pages": 10}}, 13 + 4 + 2),
        ({"num_hidden_layers": 2, "sliding_rope_config": ROPE, "full_rope_config": ROPE}, 14 + 4),
    ],
)
def test_registry_counts(keys: dict[str, Any], count: int) -> None:
    names = binding_names(kv.load_engine_config(edgellm(**keys)))
    assert len(names) == len(set(names)) == count


def test_the_names_of_a_small_engine() -> None:
    config = kv.load_engine_config(edgellm(num_hidden_layers=1, num_deepstack_features=1))
    assert set(binding_names(config)) == {
        "inputs_embeds",
        "positions",
        "query_start_offsets",
        "query_lengths",
        "past_lengths",
        "attention_sequence_lengths",
        "state_indices",
        "logits_indices",
        "execution_phase_marker",
        "context_sequence_count_carrier",
        "logits",
        "kv_page_table",
        "rope_rotary_cos_sin",
        "past_key_values_0",
        "present_key_values_0",
        "deepstack_embeds_0",
    }


STATE_NAMES = ["recurrent_state_{}", "present_recurrent_state_{}", "conv_state_{}", "present_conv_state_{}"]


@pytest.mark.parametrize(
    ("layer", "limits", "kept"),
    [
        (mamba2(), {}, []),
        (mamba2(), {"max_verify_tokens": 2}, ["intermediate_conv_state_{}", "intermediate_recurrent_state_{}"]),
        (mamba2(), {"max_verify_tokens": 2, "conv_state_room": 2}, ["intermediate_recurrent_state_{}"]),
        (short_conv(), {}, []),
        (short_conv(), {"max_verify_tokens": 2}, ["intermediate_conv_state_{}"]),
        (short_conv(), {"max_verify_tokens": 2, "conv_state_room": 2}, []),
        (
            mamba2(),
            {"max_verify_tokens": 2, "recurrent_spec_verify_mode": "replay"},
            ["intermediate_conv_state_{}", *(f"replay_{n}_state_{{}}" for n in ("da", "u", "b", "dt"))],
        ),
        (
            delta_net(),
            {"max_verify_tokens": 2, "recurrent_spec_verify_mode": "replay"},
            ["intermediate_conv_state_{}", *(f"replay_{n}_state_{{}}" for n in ("k", "g", "beta", "v"))],
        ),
    ],
)
def test_the_names_of_recurrent_layers(layer: Any, limits: dict[str, Any], kept: list[str]) -> None:
    names = binding_names(recurrent_config(layer, 2, **limits))
    found = [name for name in names if re.fullmatch(r".*_state_\d+", name)]
    states = [form for form in STATE_NAMES if layer.has_recurrent_state or "conv" in form]
    assert found == [form.format(number) for number in range(2) for form in (*states, *kept)]
    assert [name for name in names if "key_values" in name] == ["past_key_values_0", "present_key_values_0"]


def test_windows_are_numbered_only_if_there_are_several() -> None:
    def tables(config: kv.LLMEngineConfig) -> list[str]:
        return [name for name in binding_names(config) if name.startswith("swa")]

    assert tables(tiny_config(None, None)) == []
    assert tables(tiny_config(None, 8, 8)) == ["swa_kv_page_table", "swa_kv_cache_mode"]
    several = ["swa_kv_page_table_1", "swa_kv_page_table_2", "swa_kv_cache_mode"]
    assert tables(tiny_config(8, None, chunked(8), 8)) == several
    assert tables(tiny_config(8, None, chunked(8), 8, use_bounded_swa=False)) == several


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (Rebind.NEVER, "past_key_values_0 present_key_values_31 recurrent_state_0 present_conv_state_1 swa_kv_cache_mode"),
        (Rebind.NEVER, "model.layers.0.mlp.up_proj.weight positions_ my_positions kv_page_tables deepstack_embeds"),
        (Rebind.SIZE, "positions query_start_offsets query_lengths past_lengths attention_sequence_lengths state_indices"),
        (Rebind.SIZE, "kv_page_table swa_kv_page_table swa_kv_page_table_2 kv_slot_mapping swa_kv_slot_mapping_1"),
        (Rebind.SIZE, "intermediate_recurrent_state_0 intermediate_conv_state_11 replay_da_state_0 replay_beta_state_3"),
        (Rebind.ANYTHING, "inputs_embeds logits logits_indices hidden_states deepstack_embeds_0 ple_token_embeds_11"),
        (Rebind.ANYTHING, "rope_rotary_cos_sin rope_rotary_cos_sin_sliding rope_rotary_cos_sin_full zero_buffer"),
        (Rebind.ANYTHING, "lora_A_layers_0_q_proj model.layers.1.o_proj.lora_B.weight"),
    ],
)
def test_rebind_rules(rule: Rebind, names: str) -> None:
    assert {name: rebind_rule(name) for name in names.split()} == dict.fromkeys(names.split(), rule)


@pytest.mark.parametrize(
    ("swa_pages", "pool_pages", "bounded"), [(14, 23, True), (14, 8, False), (14, 14, False), (13, 14, True)]
)
def test_the_reference_decides_a_tie_for_full_rows(swa_pages: int, pool_pages: int, bounded: bool) -> None:
    assert prefers_bounded_swa(swa_pages, pool_pages) is bounded
