"""Recurrent layers in both dialects: which decoder layers have states, their sizes and types, and every mistake by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from numba_kv.config import (
    AttentionLayer,
    GatedDeltaNetLayer,
    LLMEngineConfig,
    Mamba1Layer,
    Mamba2Layer,
    RecurrentLayer,
    ShortConvLayer,
    load_engine_config,
)
from numba_kv.config.state_layout import slot_nbytes, state_plans
from numba_kv.errors import ConfigError, UnsupportedModelError
from numba_kv.plan import plan_memory
from tests.helpers.configs import ABSENT, BAMBA, DELTA_NET, LFM2, MAMBA, NEMOTRON, ZAMBA2, edgellm, huggingface

LINEAR, FULL = "linear_attention", "full_attention"
JAMBA = {"mamba_expand": 2, "mamba_d_state": 4, "mamba_d_conv": 4}
MAMBA2 = {"num_heads": 4, "head_dim": 64, "state_size": 16, "n_groups": 2, "conv_kernel": 4, "expand": 2}
LETTERS = {"attention": "A", "recurrent": "R", "both": "B", "none": "-"}
BAMBA_LAYER = ((4, 64, 16), (4 * 64 + 2 * 2 * 16, 4))
SHORT_LAYER = ((0, 0, 0), (128, 3))
DELTA_LAYER = ((4, 8, 16), (2 * 2 * 8 + 4 * 16, 4))

FAMILIES: list[tuple[str, int, dict[str, Any], str, type[RecurrentLayer], Any]] = [
    ("qwen3_next", 5, DELTA_NET, "RRRAR", GatedDeltaNetLayer, DELTA_LAYER),
    ("qwen3_next", 3, {**DELTA_NET, "layer_types": [FULL, LINEAR, LINEAR]}, "ARR", GatedDeltaNetLayer, DELTA_LAYER),
    ("qwen3_5_text", 4, {**DELTA_NET, "full_attention_interval": 2}, "RARA", GatedDeltaNetLayer, DELTA_LAYER),
    ("qwen3_5_moe_text", 2, {**DELTA_NET, "full_attention_interval": 2}, "RA", GatedDeltaNetLayer, DELTA_LAYER),
    ("bamba", 3, BAMBA, "RRR", Mamba2Layer, BAMBA_LAYER),
    ("bamba", 3, {**BAMBA, "attn_layer_indices": [1]}, "RAR", Mamba2Layer, BAMBA_LAYER),
    ("bamba", 2, {**BAMBA, "mamba_d_head": "auto"}, "RR", Mamba2Layer, BAMBA_LAYER),
    ("granitemoehybrid", 2, BAMBA, "RR", Mamba2Layer, BAMBA_LAYER),
    ("granitemoehybrid", 2, {**BAMBA, "layer_types": ["mamba", "attention"]}, "RA", Mamba2Layer, BAMBA_LAYER),
    ("granitemoehybrid", 2, {**BAMBA, "layers_block_type": [FULL, LINEAR]}, "AR", Mamba2Layer, BAMBA_LAYER),
    ("falcon_h1", 2, BAMBA, "BB", Mamba2Layer, BAMBA_LAYER),
    ("falcon_h1", 2, {**BAMBA, "mamba_d_ssm": 96, "mamba_d_head": 24}, "BB", Mamba2Layer, ((4, 24, 16), (160, 4))),
    ("nemotron_h", 6, {**NEMOTRON, "hybrid_override_pattern": "M-*E"}, "R-A-", Mamba2Layer, ((4, 8, 16), (96, 4))),
    ("nemotron_h", 9, {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "moe", FULL]}, "R--A", Mamba2Layer, None),
    ("jamba", 5, {**JAMBA, "attn_layer_period": 3, "attn_layer_offset": 1}, "RARRA", Mamba1Layer, ((1, 256, 4), (256, 4))),
    ("mamba", 2, {"expand": 2, "state_size": 4, "conv_kernel": 4}, "RR", Mamba1Layer, ((1, 256, 4), (256, 4))),
    ("mamba", 2, {"intermediate_size": 48, "state_size": 4, "conv_kernel": 3}, "RR", Mamba1Layer, ((1, 48, 4), (48, 3))),
    ("mamba2", 2, MAMBA2, "RR", Mamba2Layer, BAMBA_LAYER),
    ("lfm2", 6, LFM2, "RARARA", ShortConvLayer, SHORT_LAYER),
    ("lfm2", 4, {"conv_L_cache": 3, "full_attn_idxs": [1, 2]}, "RAAR", ShortConvLayer, SHORT_LAYER),
    ("lfm2", 2, {"conv_L_cache": 3, "full_attn_idxs": []}, "RR", ShortConvLayer, SHORT_LAYER),
    ("lfm2_moe", 2, {"conv_L_cache": 4, "layer_types": [FULL, "conv"]}, "AR", ShortConvLayer, ((0, 0, 0), (128, 4))),
    ("olmo_hybrid", 2, {**DELTA_NET, "layer_types": [LINEAR, FULL]}, "RA", GatedDeltaNetLayer, DELTA_LAYER),
    ("olmo_hybrid", 9, DELTA_NET, "RRRARRRAR", GatedDeltaNetLayer, DELTA_LAYER),
    ("olmo_hybrid", 3, DELTA_NET, "RRA", GatedDeltaNetLayer, DELTA_LAYER),
    ("zamba2", 6, ZAMBA2, "RBRBRB", Mamba2Layer, BAMBA_LAYER),
    ("zamba2", 2, {**ZAMBA2, "layers_block_type": [LINEAR, "hybrid"]}, "RB", Mamba2Layer, BAMBA_LAYER),
    ("zamba2", 2, {**ZAMBA2, "layers_block_type": None, "layer_types": ["mamba"] * 2}, "RR", Mamba2Layer, BAMBA_LAYER),
    ("zamba2", 6, {**ZAMBA2, "mamba_headdim": None}, "RBRBRB", Mamba2Layer, BAMBA_LAYER),
]


def letters(config: LLMEngineConfig) -> str:
    return "".join(LETTERS[name] for name in config.layer_types)


@pytest.mark.parametrize(("family", "layers", "keys", "expected", "kind", "shapes"), FAMILIES)
def test_families(
    family: str, layers: int, keys: dict[str, Any], expected: str, kind: type[RecurrentLayer], shapes: Any
) -> None:
    config = load_engine_config(huggingface(family, layers, **keys))
    assert letters(config) == expected
    layer = config.recurrent_layer
    assert type(layer) is kind
    if shapes is not None:
        assert (layer.state_shape, layer.conv_shape()) == shapes
    attention = sum(letter in "AB" for letter in expected)
    assert config.layers == (AttentionLayer(num_kv_heads=2, head_dim=16),) * attention
    assert config.num_recurrent_layers == sum(letter in "RB" for letter in expected)


def test_indices_of_decoder_layers() -> None:
    config = load_engine_config(huggingface("nemotron_h", **NEMOTRON, hybrid_override_pattern="M-*M*E"))
    assert config.attention_indices == (-1, -1, 0, -1, 1, -1)
    assert config.recurrent_indices == (0, -1, -1, 1, -1, -1)
    both = load_engine_config(huggingface("falcon_h1", 2, **BAMBA))
    assert (both.attention_indices, both.recurrent_indices) == ((0, 1), (0, 1))
    plain = load_engine_config(huggingface(layers=3))
    assert (plain.attention_indices, plain.recurrent_indices) == ((0, 1, 2), (-1, -1, -1))
    assert (plain.layer_types, plain.recurrent_layer, plain.num_recurrent_layers) == ((), None, 0)


def test_a_hybrid_family_without_recurrent_layers_has_no_states() -> None:
    config = load_engine_config(huggingface("granitemoehybrid", 2, layer_types=["attention", FULL]))
    assert (letters(config), config.recurrent_layer) == ("AA", None)


def test_lfm2_has_attention_everywhere_unless_its_places_are_stated() -> None:
    config = load_engine_config(huggingface("lfm2", 2, conv_L_cache=3))
    assert (letters(config), config.recurrent_layer) == ("AA", None)


def test_lfm2_in_a_nested_model_takes_the_defaults_of_its_family() -> None:
    text = {"model_type": "lfm2", "hidden_size": 256, "layer_types": ["conv", FULL], "num_hidden_layers": 2}
    config = load_engine_config({"model_type": "lfm2_vl", "text_config": text})
    assert config.layers == (AttentionLayer(num_kv_heads=8, head_dim=8),)
    assert config.recurrent_layer == ShortConvLayer(conv_dim=256, conv_kernel=3)


@pytest.mark.parametrize(
    ("keys", "heads", "head_dim"),
    [
        ({"attention_head_dim": 20}, 2, 20),
        ({}, 2, 2 * 128 // 8),
        ({"kv_channels": 16, "num_key_value_heads": 8}, 8, 32),  # those are of another share of the hidden size
        ({"num_key_value_heads": None}, 8, 32),
    ],
)
def test_heads_of_zamba2_share_twice_the_hidden_size(keys: dict[str, Any], heads: int, head_dim: int) -> None:
    source = {name: value for name, value in huggingface("zamba2", **{**ZAMBA2, **keys}).items() if name != "head_dim"}
    assert load_engine_config(source).layers == (AttentionLayer(num_kv_heads=heads, head_dim=head_dim),) * 3


def test_olmo_hybrid_without_kv_heads_has_one_for_each_query_head() -> None:
    config = load_engine_config(huggingface("olmo_hybrid", 4, **{**DELTA_NET, "num_key_value_heads": None}))
    assert config.layers == (AttentionLayer(num_kv_heads=8, head_dim=16),)


def test_a_model_without_attention_needs_no_heads_and_has_no_rotation() -> None:
    source = huggingface("mamba2", 2, **MAMBA2, num_attention_heads=None, num_key_value_heads=None)
    config = load_engine_config(source)
    assert (config.layers, config.ropes) == ((), ())


@pytest.mark.parametrize(
    ("family", "keys", "rotary_dims"),
    [
        ("qwen3_next", DELTA_NET, [4]),
        ("bamba", {**BAMBA, "attn_layer_indices": [0]}, [8]),
        ("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M*"}, []),
        ("jamba", {**JAMBA, "attn_layer_period": 2, "attn_layer_offset": 1}, []),
        ("lfm2", LFM2, [16]),
        ("olmo_hybrid", DELTA_NET, [16]),
        ("olmo_hybrid", {**DELTA_NET, "rope_parameters": {"rope_type": "default"}}, [16]),
        ("olmo_hybrid", {**DELTA_NET, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}, []),
        ("zamba2", ZAMBA2, []),
        ("zamba2", {**ZAMBA2, "use_mem_rope": True}, [16]),
        ("granitemoehybrid", {"layer_types": [FULL] * 6}, []),
        ("granitemoehybrid", {"layer_types": [FULL] * 6, "position_embedding_type": "rope"}, [16]),
    ],
)
def test_rotation(family: str, keys: dict[str, Any], rotary_dims: list[int]) -> None:
    assert [rope.rotary_dim for rope in load_engine_config(huggingface(family, **keys)).ropes] == rotary_dims


@pytest.mark.parametrize(
    ("keys", "arguments", "expected"),
    [
        ({}, {}, ("float32", "bfloat16")),
        ({"dtype": "float16"}, {}, ("float32", "float16")),
        ({"dtype": "float8_e4m3fn"}, {}, ("float32", "bfloat16")),
        ({"mamba_ssm_dtype": "bfloat16"}, {}, ("bfloat16", "bfloat16")),
        ({"mamba_ssm_cache_dtype": "float16"}, {}, ("float16", "bfloat16")),
        ({"dtype": "float32"}, {"kv_cache_dtype": "fp8"}, ("float32", "float32")),
        ({"mamba_ssm_dtype": "bf16"}, {"recurrent_state_dtype": "fp16", "conv_state_dtype": "fp32"}, ("float16", "float32")),
    ],
)
def test_element_types(keys: dict[str, Any], arguments: dict[str, Any], expected: tuple[str, str]) -> None:
    layer = load_engine_config(huggingface("bamba", **{**BAMBA, **keys}), **arguments).recurrent_layer
    assert (layer.recurrent_state_dtype, layer.conv_state_dtype) == expected


def test_a_nested_model_takes_the_defaults_of_its_family() -> None:
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": 4}
    config = load_engine_config({"model_type": "qwen3_5", "text_config": text})
    assert letters(config) == "RRRA"
    assert config.recurrent_layer.state_shape == (32, 128, 128)


def test_verification_is_the_callers_choice() -> None:
    source = huggingface("bamba", **BAMBA)
    plain = load_engine_config(source)
    assert (plain.max_verify_tokens, plain.recurrent_spec_verify_mode, plain.conv_state_room) == (0, "snapshot", 1)
    asked = load_engine_config(source, max_verify_tokens=4, recurrent_spec_verify_mode="replay", conv_state_room=3)
    assert (asked.max_verify_tokens, asked.recurrent_spec_verify_mode, asked.conv_state_room) == (4, "replay", 3)
    assert (plain.has_conv_snapshots, asked.has_conv_snapshots) == (False, True)
    assert not load_engine_config(source, max_verify_tokens=3, conv_state_room=3).has_conv_snapshots


BAD: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *(("bamba", {**BAMBA, key: None}, (key, "missing")) for key in BAMBA if key != "mamba_expand"),
    *(("bamba", {**BAMBA, key: 0}, (key, "0 is not")) for key in BAMBA),
    *(("qwen3_next", {**DELTA_NET, key: None}, (key, "missing")) for key in DELTA_NET),
    *(("qwen3_next", {**DELTA_NET, key: 4.0}, (key, "4.0")) for key in DELTA_NET),
    *(("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M", key: None}, (key,)) for key in list(NEMOTRON)[:5]),
    *(("mamba2", {**MAMBA2, key: None}, (key, "missing")) for key in list(MAMBA2)[:5]),
    *(("jamba", {**JAMBA, "attn_layer_period": 2, "attn_layer_offset": 0, key: None}, (key,)) for key in JAMBA),
    ("bamba", {**BAMBA, "mamba_d_head": 63}, ("mamba_d_head", "63", "256 channels")),
    ("bamba", {**BAMBA, "mamba_d_head": "auto", "mamba_n_heads": 3}, ("mamba_d_head", "'auto'")),
    ("bamba", {**BAMBA, "mamba_n_groups": 3}, ("mamba_n_groups", "3", "mamba_n_heads 4")),
    ("bamba", {**BAMBA, "attn_layer_indices": [6]}, ("attn_layer_indices[0]", "6")),
    ("bamba", {**BAMBA, "mamba_d_state": 2**31 - 1}, ("mamba_n_heads", "channels")),
    ("qwen3_next", {**DELTA_NET, "linear_num_key_heads": 3}, ("linear_num_value_heads", "4", "linear_num_key_heads 3")),
    ("qwen3_next", {**DELTA_NET, "full_attention_interval": 0}, ("full_attention_interval", "0 is not")),
    ("qwen3_next", {**DELTA_NET, "layer_types": [LINEAR] * 5}, ("layer_types", "5 entries", "num_hidden_layers is 6")),
    ("qwen3_next", {**DELTA_NET, "layer_types": ["sliding_attention"] * 6}, ("layer_types[0]", "'sliding_attention'")),
    ("granitemoehybrid", {"layer_types": ["mlp"] * 6}, ("layer_types[0]", "'mlp'")),
    ("nemotron_h", NEMOTRON, ("layers_block_type", "missing", "hybrid_override_pattern")),
    ("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "MX"}, ("hybrid_override_pattern", "'X'")),
    ("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": ""}, ("hybrid_override_pattern", "0 letters")),
    ("nemotron_h", {**NEMOTRON, "layers_block_type": []}, ("layers_block_type", "0 entries")),
    ("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M", "mamba_ssm_cache_dtype": "int8"}, ("mamba_ssm_cache_dtype",)),
    *(("lfm2", {**LFM2, "conv_L_cache": value}, ("conv_L_cache",)) for value in (None, 0, 3.0)),
    ("lfm2", {**LFM2, "layer_types": [LINEAR] * 6}, ("layer_types[0]", "'linear_attention'", "'conv'")),
    ("lfm2", {"conv_L_cache": 3, "full_attn_idxs": [6]}, ("full_attn_idxs[0]", "6")),
    ("lfm2", {**LFM2, "hidden_size": None}, ("hidden_size", "missing")),
    ("lfm2_moe", {"conv_L_cache": 3, "full_attn_idxs": [1]}, ("layer_types", "missing")),
    ("olmo_hybrid", {**DELTA_NET, "layer_types": ["mlp"] * 6}, ("layer_types[0]", "'mlp'")),
    *(("olmo_hybrid", {**DELTA_NET, key: None}, (key, "missing")) for key in DELTA_NET),
    *(("zamba2", {**ZAMBA2, key: None}, (key, "missing")) for key in ZAMBA2 if key not in ("mamba_expand", "mamba_headdim")),
    ("zamba2", {**ZAMBA2, "mamba_headdim": None, "mamba_expand": None}, ("mamba_headdim", "missing")),
    ("zamba2", {**ZAMBA2, "mamba_headdim": 32}, ("mamba_headdim", "256 channels")),
    ("zamba2", {**ZAMBA2, "layers_block_type": ["attention"] * 6}, ("layers_block_type[0]", "'attention'", "'hybrid'")),
    ("zamba2", {**ZAMBA2, "head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3}, ("head_dim", "twice", "256")),
    ("jamba", {**JAMBA, "attn_layer_offset": 0}, ("attn_layer_period", "missing")),
    ("jamba", {**JAMBA, "attn_layer_period": 4, "attn_layer_offset": 4}, ("attn_layer_offset", "4 is not")),
]


@pytest.mark.parametrize(("family", "keys", "words"), BAD)
def test_bad_files(family: str, keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(huggingface(family, **keys))
    assert not isinstance(caught.value, UnsupportedModelError)
    assert str(caught.value).startswith("config (Hugging Face): ")
    for word in words:
        assert word in str(caught.value)


def test_edgellm_lists_layers() -> None:
    entry = {"num_kv_heads": 2, "head_dim": 32}
    source = edgellm(layer_types=["attention", "mamba", "mamba"], kv_layer_configs=[entry, None, None], **MAMBA)
    config = load_engine_config(source)
    assert letters(config) == "ARR"
    assert config.layers == (AttentionLayer(num_kv_heads=2, head_dim=32),)
    assert config.recurrent_layer == Mamba2Layer(
        num_heads=4,
        head_dim=8,
        state_size=16,
        num_groups=2,
        conv_dim=96,
        conv_kernel=4,
        recurrent_state_dtype="float32",
        conv_state_dtype="float16",
    )
    assert load_engine_config(source, conv_state_dtype="bf16").recurrent_layer.conv_state_dtype == "bfloat16"


def test_edgellm_counts_layers() -> None:
    assert letters(load_engine_config(edgellm(num_linear_attn_layers=2, num_attention_layers=3, **MAMBA))) == "AAARR" + "-" * 7
    assert letters(load_engine_config(edgellm(num_linear_attn_layers=2, **MAMBA))) == "A" * 10 + "RR"
    pure = load_engine_config(edgellm(num_linear_attn_layers=12, num_attention_layers=0, **MAMBA))
    assert (letters(pure), pure.layers, pure.ropes) == ("R" * 12, (), ())
    listed = load_engine_config(edgellm(layer_types=[LINEAR, FULL], **MAMBA))
    assert letters(listed) == "RA"


@pytest.mark.parametrize("model", ["qwen3_next", "qwen3_5"])
def test_edgellm_delta_nets(model: str) -> None:
    sizes = {**MAMBA, "conv_dim": 2 * 2 * 8 + 4 * 16}
    named = load_engine_config(edgellm(model=model, num_linear_attn_layers=1, **sizes)).recurrent_layer
    assert isinstance(named, GatedDeltaNetLayer)
    assert named.num_key_heads == 2
    sizes["recurrent_state_num_groups"] = 0
    assert load_engine_config(edgellm(num_linear_attn_layers=1, **sizes)).recurrent_layer == named


def test_edgellm_verification_mode() -> None:
    source = edgellm(num_linear_attn_layers=1, recurrent_spec_verify_mode="replay", **MAMBA)
    assert load_engine_config(source).recurrent_spec_verify_mode == "replay"
    assert load_engine_config(source, recurrent_spec_verify_mode="snapshot").recurrent_spec_verify_mode == "snapshot"


ONE = {"num_linear_attn_layers": 1, **MAMBA}
EDGELLM_BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    *(({**ONE, key: ABSENT}, (key, "missing")) for key in MAMBA if key != "recurrent_state_num_groups"),
    *(({**ONE, key: "fp8"}, (key, "'fp8'", "'bf16'")) for key in ("recurrent_state_dtype", "conv_state_dtype")),
    *(({**ONE, key: "float32"}, (key, "'float32'")) for key in ("recurrent_state_dtype", "conv_state_dtype")),
    ({**ONE, "recurrent_state_num_groups": 3}, ("recurrent_state_num_groups", "3", "recurrent_state_num_heads 4")),
    ({**ONE, "recurrent_state_num_groups": 0, "conv_dim": 97}, ("conv_dim", "97", "recurrent_state_num_groups")),
    ({**ONE, "recurrent_state_num_groups": 0, "conv_dim": 64}, ("conv_dim", "64")),
    ({**ONE, "recurrent_spec_verify_mode": "both"}, ("recurrent_spec_verify_mode", "'both'")),
    ({**ONE, "recurent_state_dtype": "fp32", "recurrent_state_dtype": ABSENT}, ("recurent_state_dtype", "did you mean")),
    ({**ONE, "num_linear_attn_layers": 13}, ("num_linear_attn_layers", "13 is not")),
    ({**ONE, "num_attention_layers": 12}, ("num_linear_attn_layers", "num_attention_layers 12")),
    ({**ONE, "layer_types": ["attention"] * 12}, ("num_linear_attn_layers", "0 recurrent")),
    ({**ONE, "layer_types": ["mamba", "attention"], "num_attention_layers": 2}, ("num_attention_layers", "1 attention")),
    ({**MAMBA, "layer_types": ["mamba"], "kv_layer_configs": [{}]}, ("kv_layer_configs[0]", "null")),
    ({**MAMBA, "layer_types": ["mamba", "attention"], "kv_layer_configs": [None, None]}, ("kv_layer_configs[1]", "null")),
    ({**MAMBA, "layer_types": [LINEAR], "kv_layer_configs": [None]}, ("layer_types[0]", "'mamba'")),
    ({"num_attention_layers": 0, "kv_layer_configs": [], "layer_types": []}, ("num_attention_layers", "0")),
]


@pytest.mark.parametrize(("keys", "words"), EDGELLM_BAD)
def test_bad_edgellm_files(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(edgellm(**keys))
    assert not isinstance(caught.value, UnsupportedModelError)
    for word in words:
        assert word in str(caught.value)


SIZES: dict[str, Any] = {"num_heads": 4, "head_dim": 8, "state_size": 16, "conv_dim": 96, "conv_kernel": 4}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        *((Mamba2Layer, {key: 0}, (key, "0 is not")) for key in SIZES),
        (Mamba2Layer, {"head_dim": True}, ("head_dim", "true")),
        (Mamba2Layer, {"num_groups": 3}, ("num_groups", "3", "num_heads 4")),
        (Mamba2Layer, {"recurrent_state_dtype": "float64"}, ("recurrent_state_dtype", "float64", "bfloat16")),
        (Mamba2Layer, {"conv_state_dtype": "fp8"}, ("conv_state_dtype", "fp8")),
        (GatedDeltaNetLayer, {"num_key_heads": 3}, ("num_key_heads", "3")),
        (GatedDeltaNetLayer, {"num_key_heads": 0}, ("num_key_heads", "0")),
        (Mamba1Layer, {}, ("num_heads", "4 is not 1")),
        (RecurrentLayer, {}, ("RecurrentLayer", "Mamba2Layer", "ShortConvLayer")),
    ],
)
def test_bad_layers(kind: type[RecurrentLayer], changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{**SIZES, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conv_dim": 0}, ("conv_dim", "0 is not")),
        ({"conv_kernel": True}, ("conv_kernel", "true")),
        ({"conv_state_dtype": "fp8"}, ("conv_state_dtype", "fp8")),
    ],
)
def test_bad_convolutions(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        ShortConvLayer(**{"conv_dim": 6, "conv_kernel": 3, **changes})
    for word in words:
        assert word in str(caught.value)


def test_a_convolution_alone_has_no_state() -> None:
    layer = ShortConvLayer(conv_dim=6, conv_kernel=3)
    assert not layer.has_recurrent_state
    assert (layer.state_shape, layer.conv_shape(), layer.conv_shape(4)) == ((0, 0, 0), (6, 3), (6, 6))
    assert repr(layer) == "ShortConvLayer(conv_dim=6, conv_kernel=3, conv_state_dtype='bfloat16')"
    assert replace(layer, conv_dim=7) == ShortConvLayer(conv_dim=7, conv_kernel=3)
    assert LAYER.has_recurrent_state
    config = LLMEngineConfig(**{**MODEL, "recurrent_layer": layer})
    assert [(p.name, p.shape, p.dtype) for p in state_plans(config)] == [("conv_state", (1, 2, 6, 3), "bfloat16")]
    assert slot_nbytes(config) == 40  # 36, in whole words
    assert plan_memory(config).state_nbytes == 256
    kept = [(p.name, p.shape) for p in state_plans(replace(config, max_verify_tokens=2))][1:]
    assert kept == [("intermediate_conv_state", (1, 2, 2, 6, 3))]


LAYER = Mamba2Layer(**SIZES)
MODEL: dict[str, Any] = {
    "layers": (AttentionLayer(num_kv_heads=1, head_dim=8),),
    "max_batch_size": 2,
    "max_kv_cache_capacity": 64,
    "layer_types": ("attention", "recurrent"),
    "recurrent_layer": LAYER,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["attention"]}, ("layer_types", "tuple")),
        ({"layer_types": ("attention", "mamba")}, ("layer_types[1]", "'mamba'", "recurrent")),
        ({"layer_types": ("recurrent",)}, ("layer_types", "0 layers have attention", "1")),
        ({"layer_types": ("both", "attention")}, ("layer_types", "2 layers have attention")),
        ({"layer_types": ("attention",)}, ("recurrent_layer", "given", "0 recurrent")),
        ({"recurrent_layer": None}, ("recurrent_layer", "missing", "1 recurrent")),
        ({"recurrent_layer": "mamba"}, ("recurrent_layer", "'mamba'")),
        ({"max_verify_tokens": -1}, ("max_verify_tokens", "-1")),
        ({"conv_state_room": -1}, ("conv_state_room", "-1")),
        ({"conv_state_room": 0, "recurrent_layer": Mamba2Layer(**{**SIZES, "conv_kernel": 1})}, ("conv_state_room", "0")),
        ({"recurrent_spec_verify_mode": "undo"}, ("recurrent_spec_verify_mode", "'undo'")),
        (
            {
                "recurrent_layer": Mamba1Layer(**{**SIZES, "num_heads": 1}),
                "max_verify_tokens": 2,
                "recurrent_spec_verify_mode": "replay",
            },
            ("recurrent_spec_verify_mode", "Mamba1Layer", "snapshot"),
        ),
        (
            {
                "recurrent_layer": ShortConvLayer(conv_dim=6, conv_kernel=3),
                "max_verify_tokens": 2,
                "recurrent_spec_verify_mode": "replay",
            },
            ("recurrent_spec_verify_mode", "ShortConvLayer", "snapshot"),
        ),
    ],
)
def test_bad_models(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        LLMEngineConfig(**{**MODEL, **changes})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"recurrent_state_dtype": "fp8"}, "recurrent_state_dtype"),
        ({"conv_state_dtype": "int8"}, "conv_state_dtype"),
        ({"max_verify_tokens": 1.5}, "max_verify_tokens"),
        ({"conv_state_room": -1}, "conv_state_room"),
        ({"recurrent_spec_verify_mode": "none"}, "recurrent_spec_verify_mode"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_engine_config(huggingface("bamba", **BAMBA), **arguments)
