"""The Hugging Face dialect: keys of single layers, as Transformers writes Gemma 4, and what is refused about them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from numba_kv.config import LLMEngineConfig, load_engine_config
from numba_kv.errors import ConfigError, UnsupportedModelError
from tests.helpers.configs import huggingface

S, F, C = "sliding_attention", "full_attention", "chunked_attention"


def shapes(config: LLMEngineConfig) -> list[tuple[int, int, int]]:
    return [(layer.num_kv_heads, layer.head_dim, layer.window.tokens) for layer in config.layers]


def load(layers: int, per_layer: object, model_type: str = "gemma4_text", **keys: Any) -> LLMEngineConfig:
    keys = {"layer_types": [S] * (layers - 1) + [F], "sliding_window": 64, **keys}
    return load_engine_config(huggingface(model_type, layers, per_layer_config=per_layer, **keys))


def test_full_layers_state_their_own_heads() -> None:
    rotation = {S: {"rope_type": "default"}, F: {"rope_type": "proportional", "partial_rotary_factor": 0.25}}
    config = load(12, {"11": {"head_dim": 32, "num_key_value_heads": 1}}, attention_k_eq_v=True, rope_parameters=rotation)
    assert shapes(config) == [(2, 16, 64)] * 11 + [(1, 32, 0)]
    assert [rope.rotary_dim for rope in config.ropes] == [16, 32]


@pytest.mark.parametrize("per_layer", [{}, None, {"1": {}}, {"0": {"intermediate_size": 7}}])
def test_the_key_alone_says_that_there_are_no_others(per_layer: object) -> None:
    """Without it Gemma 4's full layers have heads of 512; a file that has it states those that differ."""
    keys = {"layer_types": [S, F], "sliding_window": 64}
    assert shapes(load_engine_config(huggingface("gemma4_text", 2, **keys))) == [(2, 16, 64), (2, 512, 0)]
    assert shapes(load(2, per_layer, global_head_dim=32)) == [(2, 16, 64), (2, 16, 0)]


def test_every_layer_may_differ() -> None:
    per_layer = {
        "00": {"num_key_value_heads": 8, "sliding_window": 16},
        "01": {"sliding_window": None, "attention_chunk_size": 32},
        2: {"num_attention_heads": 4, "num_key_value_heads": 1},
    }
    config = load(4, per_layer, "llama", layer_types=[S, C, F, S])
    assert shapes(config) == [(8, 16, 16), (2, 16, 32), (1, 16, 0), (2, 16, 64)]


def test_layers_of_a_kind_with_heads_of_two_sizes_do_not_rotate() -> None:
    with pytest.raises(UnsupportedModelError, match=r"per_layer_config: head_dim of full layers is \[16, 32\]"):
        load(3, {"0": {"head_dim": 32}}, "llama", layer_types=[F, F, F])
    config = load(3, {"0": {"head_dim": 32}}, "llama", layer_types=[F, F, F], position_embedding_type="nope")
    assert [layer.head_dim for layer in config.layers] == [32, 16, 16]


BAD: list[tuple[object, tuple[str, ...]]] = [
    ([], ("per_layer_config", "[]", "an object")),
    ({"0": 7}, ("per_layer_config.0", "7", "an object")),
    ({"3": {}}, ("per_layer_config", "'3'", "from 0 to 2")),
    ({"-1": {}}, ("per_layer_config", "'-1'", "from 0 to 2")),
    ({"1.0": {}}, ("per_layer_config", "'1.0'")),
    ({True: {}}, ("per_layer_config", "true")),
    ({"9" * 5000: {}}, ("per_layer_config", "from 0 to 2")),
    ({"1": {}, "01": {}}, ("per_layer_config", "layer 1 is there twice", "'1'", "'01'")),
    ({"1": {"head_dim": 0}}, ("per_layer_config.1.head_dim", "0 is not")),
    ({"1": {"num_key_value_heads": 3}}, ("per_layer_config.1.num_key_value_heads", "3", "num_attention_heads 8")),
    ({"1": {"sliding_window": 0}}, ("per_layer_config.1.sliding_window", "0 is not")),
    ({"1": {"sliding_window": None}}, ("per_layer_config.1.sliding_window", "layer_types[1]")),
]


@pytest.mark.parametrize(("per_layer", "words"), BAD)
def test_bad_layers(per_layer: object, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(3, per_layer)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"skip": ["attention"]}, "per_layer_config.1.skip: layers that leave parts out"),
        ({"kv_lora_rank": 64}, "kv_lora_rank 64"),
        ({"v_head_dim": 8, "head_dim": 16}, "v_head_dim 8"),
        ({"v_head_dim": 8}, "v_head_dim 8"),  # the other one is the model's
    ],
)
def test_layers_that_are_not_supported(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        load(3, {"1": changes})


def test_layers_beside_recurrent_ones() -> None:
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 8, "conv_kernel_dim": 4}
    keys = {"layer_types": ["linear_attention", F], **{f"linear_{name}": size for name, size in sizes.items()}}
    config = load(2, {"1": {"intermediate_size": 8}}, "qwen3_next", **keys)
    assert [layer.head_dim for layer in config.layers] == [16]
    with pytest.raises(UnsupportedModelError, match="per_layer_config: attention layers that differ, beside recurrent ones"):
        load(2, {"1": {"head_dim": 32}}, "qwen3_next", **keys)


@pytest.mark.parametrize("keys", [{}, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}])
@pytest.mark.parametrize("explicit", [False, True])
def test_what_transformers_writes_is_what_it_was_made_from(keys: dict[str, Any], explicit: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install 'numba-kv[interop]')")
    made = {**huggingface("gemma4_text", 12, **keys), "sliding_window": 64, "global_head_dim": 32, "vocab_size": 64}
    config = transformers.Gemma4TextConfig(**{name: value for name, value in made.items() if name != "model_type"})
    config.serialize_explicit_per_layer_config = explicit
    written = json.loads(config.to_json_string())
    found, expected = load_engine_config(written), load_engine_config(made)
    assert shapes(found) == shapes(expected)
    heads = 1 if keys else 2
    assert shapes(found)[5] == shapes(found)[11] == (heads, 32, 0)
    nested = load_engine_config(json.loads(transformers.Gemma4Config(text_config=written).to_json_string()))
    assert shapes(nested) == shapes(found)
    assert nested.ropes == found.ropes
