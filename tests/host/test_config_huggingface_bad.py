"""The Hugging Face dialect: mistakes name key and value, and what is not supported yet is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from numba_kv.config import load_engine_config
from numba_kv.errors import ConfigError, UnsupportedModelError
from tests.helpers.configs import huggingface, without

S, F, C = "sliding_attention", "full_attention", "chunked_attention"

BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"num_hidden_layers": 0}, ("num_hidden_layers", "0 is not an integer from 1")),
    ({"num_hidden_layers": 10**9}, ("num_hidden_layers", "1000000000")),
    ({"num_hidden_layers": None}, ("num_hidden_layers", "missing")),
    ({"num_hidden_layers": 6.0}, ("num_hidden_layers", "6.0")),
    ({"num_hidden_layers": True}, ("num_hidden_layers", "true")),
    ({"num_hidden_layers": "6"}, ("num_hidden_layers", "'6'")),
    ({"num_attention_heads": 0}, ("num_attention_heads", "0 is not")),
    ({"num_attention_heads": [8, 8]}, ("num_attention_heads", "[8, 8]")),
    ({"num_key_value_heads": 0}, ("num_key_value_heads", "0 is not")),
    ({"num_key_value_heads": -2}, ("num_key_value_heads", "-2")),
    ({"num_key_value_heads": 3}, ("num_key_value_heads", "3", "num_attention_heads 8")),
    ({"head_dim": 0}, ("head_dim", "0 is not")),
    ({"head_dim": None, "hidden_size": 130}, ("head_dim", "hidden_size 130", "num_attention_heads 8")),
    ({"head_dim": None, "d_kv": 64}, ("head_dim", "d_kv is 64")),
    ({"num_key_value_heads": None, "multi_query_group_num": 2}, ("num_key_value_heads", "multi_query_group_num")),
    ({"max_position_embeddings": None}, ("max_position_embeddings", "max_kv_cache_capacity")),
    ({"max_position_embeddings": 0}, ("max_position_embeddings", "0 is not")),
    ({"max_position_embeddings": 10**12}, ("max_position_embeddings", "1000000000000")),
    ({"hidden_size": -1}, ("hidden_size", "-1")),
    ({"vocab_size": 0}, ("vocab_size", "0 is not")),
    ({"model_type": 7}, ("model_type", "7", "a string")),
    ({"dtype": 16}, ("dtype", "16", "a string")),
    ({"sliding_window": -4096}, ("sliding_window", "-4096")),
    ({"sliding_window": 4096.0}, ("sliding_window", "4096.0")),
    ({"sliding_window": False}, ("sliding_window", "false")),
    ({"attention_chunk_size": -1}, ("attention_chunk_size", "-1 is not")),
    ({"model_type": "llama4_text", "attention_chunk_size": 0}, ("attention_chunk_size", "0 is not an integer from 1")),
    ({"model_type": "mistral", "sliding_window": 0}, ("sliding_window", "0 is not an integer from 1")),
    ({"model_type": "qwen2", "sliding_window": 0, "use_sliding_window": True, "max_window_layers": 0}, ("sliding_window", "0")),
    ({"layer_types": [F] * 5 + [S], "sliding_window": 0}, ("sliding_window", "0 is not an integer from 1", "layer 5")),
    ({"model_type": "mistral", "sliding_window": "4k"}, ("sliding_window", "'4k'")),
    ({"model_type": "gemma2"}, ("sliding_window", "missing")),
    ({"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 0}, ("sliding_window_pattern", "0 is not")),
    ({"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": "LXG"}, ("sliding_window_pattern", "'LXG'")),
    ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": "yes"}, ("use_sliding_window", "'yes'")),
    ({"model_type": "llama4_text", "attention_chunk_size": 8, "no_rope_layers": [1]}, ("no_rope_layers", "1 entries for 6")),
    ({"model_type": "llama4_text", "attention_chunk_size": 8, "no_rope_layers": [2] * 6}, ("no_rope_layers[0]", "2")),
    ({"layer_types": [F] * 5}, ("layer_types", "5 entries", "num_hidden_layers is 6")),
    ({"layer_types": []}, ("layer_types", "0 entries")),
    ({"layer_types": F}, ("layer_types", "'full_attention'", "a list")),
    ({"layer_types": [F] * 5 + [1]}, ("layer_types[5]", "1", "a string")),
    ({"layer_types": [F] * 5 + ["global"]}, ("layer_types[5]", "'global'", "'chunked_attention'")),
    ({"layer_types": [F] * 5 + [S]}, ("sliding_window", "layer_types[5]")),
    ({"layer_types": [F] * 5 + [S], "sliding_window": None}, ("sliding_window", "layer_types[5]")),
    ({"layer_types": [C] * 6}, ("attention_chunk_size", "layer_types[0]")),
    ({"num_kv_shared_layers": 6}, ("num_kv_shared_layers", "6")),
    ({"num_kv_shared_layers": -1}, ("num_kv_shared_layers", "-1")),
    (
        {"layer_types": [S] * 4 + [F] * 2, "sliding_window": 8, "num_kv_shared_layers": 2},
        ("num_kv_shared_layers", "2", "layer 4"),
    ),
    ({"text_config": []}, ("text_config", "[]", "an object")),
    ({"text_config": huggingface(sliding_window=-1)}, ("text_config.sliding_window", "-1 is not")),
    ({"text_config": {"text_config": {"text_config": {"text_config": {"text_config": {}}}}}}, ("text_config", "deep")),
    ({"eos_token_id": "</s>"}, ("eos_token_id", "'</s>'")),
    ({"is_encoder_decoder": 1}, ("is_encoder_decoder", "1 is not true or false")),
    # the family is not known, so nobody can say which layers the window is for
    ({"model_type": "novel", "sliding_window": 64}, ("sliding_window", "64", "'novel'", "layer_types")),
    ({"model_type": "novel", "sliding_window": 64, "use_sliding_window": True}, ("sliding_window", "64", "'novel'")),
    ({"model_type": "novel", "attention_chunk_size": 64}, ("attention_chunk_size", "64", "'novel'")),
    ({"model_type": "novel", "window_size": 64}, ("window_size", "64", "'novel'")),
    ({"model_type": "novel", "num_key_value_heads": None, "n_kv_heads": 2}, ("num_key_value_heads", "n_kv_heads")),
]


@pytest.mark.parametrize(("keys", "words"), BAD)
def test_bad_files(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(huggingface(**{"layers": 6, **keys}))
    assert not isinstance(caught.value, UnsupportedModelError)
    assert str(caught.value).startswith("config (Hugging Face): ")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads"])
def test_required_keys(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: missing"):
        load_engine_config(without(huggingface(), key))


def test_everything_that_is_missing_is_named_at_once() -> None:
    names = r"model_type, num_hidden_layers, num_attention_heads, head_dim \(or hidden_size\), max_position_embeddings"
    with pytest.raises(ConfigError, match=rf"config \(Hugging Face\): keys are missing: {names} \(or pass "):
        load_engine_config({})
    with pytest.raises(ConfigError, match="missing: model_type, num_hidden_layers, num_attention_heads, head_dim") as caught:
        load_engine_config({}, max_kv_cache_capacity=64)
    assert "max_position_embeddings" not in str(caught.value)
    with pytest.raises(ConfigError, match="keys of text_config are missing: num_hidden_layers, num_attention_heads"):
        load_engine_config({"model_type": "novel", "text_config": {"hidden_size": 64}})


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"model_type": name}, "recurrent") for name in ("zamba", "falcon_mamba", "kimi_linear", "hymba", "phi4flash")),
    *(({"model_type": name}, "recurrent") for name in ("plamo2", "recurrent_gemma", "rwkv", "minimax", "xlstm")),
    ({"model_type": "novel", "layer_types": ["linear_attention"] * 6}, "recurrent"),
    ({"model_type": "novel", "layer_types": ["conv"] * 6}, "recurrent"),
    ({"model_type": "novel", "mamba_d_state": 16}, "recurrent"),
    ({"model_type": "novel", "layers_block_type": ["attention"]}, "recurrent"),
    ({"model_type": "novel", "linear_num_key_heads": 16}, "recurrent"),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent"),
    ({"model_type": "novel", "kv_lora_rank": 512}, "latent"),
    ({"model_type": "novel", "layer_types": ["compressed_sparse_attention"] * 6}, "compressed"),
    ({"model_type": "t5"}, "cross attention"),
    ({"model_type": "novel", "is_encoder_decoder": True}, "cross attention"),
    ({"model_type": "mllama"}, "cross attention"),
    ({"model_type": "novel", "cross_attention_layers": [3]}, "cross attention"),
    ({"model_type": "novel", "add_cross_attention": True}, "cross attention"),
    ({"model_type": "bert"}, "encoder"),
    ({"model_type": "gemma3_text", "sliding_window": 64, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"model_type": "nemotron-nas", "block_configs": [{}]}, "block_configs"),
    ({"model_type": "hunyuan", "use_cla": True}, "use_cla"),
    ({"model_type": "novel", "v_head_dim": 8}, "v_head_dim"),
]


@pytest.mark.parametrize(("keys", "word"), REFUSED)
@pytest.mark.parametrize("nested", [False, True])
def test_models_that_are_not_supported_yet(keys: dict[str, Any], word: str, nested: bool) -> None:
    model = huggingface(**keys)
    with pytest.raises(UnsupportedModelError) as caught:
        load_engine_config({"model_type": "wrapper", "text_config": model} if nested else model)
    assert word in str(caught.value)
    assert str(keys["model_type"]).removesuffix("_text") in str(caught.value)


def test_a_composite_is_refused_by_its_own_name() -> None:
    with pytest.raises(UnsupportedModelError, match="kimi_linear"):
        load_engine_config({"model_type": "kimi_linear", "text_config": huggingface("novel")})


def test_refusal_comes_before_missing_keys() -> None:
    with pytest.raises(UnsupportedModelError, match="falcon_mamba"):
        load_engine_config({"model_type": "falcon_mamba"})


def test_keys_that_say_no_do_not_refuse() -> None:
    quiet = {
        "kv_lora_rank": None,
        "is_encoder_decoder": False,
        "cross_attention_layers": [],
        "use_bidirectional_attention": "vision",
    }
    assert len(load_engine_config(huggingface("novel", **quiet)).layers) == 6
