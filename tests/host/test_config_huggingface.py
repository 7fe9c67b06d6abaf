"""The Hugging Face dialect: what each family's keys mean, in the older and the newer style."""

from __future__ import annotations

from typing import Any

import pytest

from numba_kv.config import FULL, LLMEngineConfig, Window, load_engine_config
from tests.helpers.configs import huggingface, without

S, F, C = "sliding_attention", "full_attention", "chunked_attention"
LETTERS = {"full": "F", "sliding": "S", "chunked": "C"}


def kinds(config: LLMEngineConfig) -> str:
    return "".join(LETTERS[layer.window.kind] for layer in config.layers)


def windows(config: LLMEngineConfig) -> set[int]:
    return {layer.window.tokens for layer in config.layers if not layer.window.is_full}


def test_defaults() -> None:
    config = load_engine_config(huggingface())
    assert config.model_type == "llama"
    assert (config.max_batch_size, config.max_kv_cache_capacity, config.page_tokens) == (16, 4096, 16)
    assert (config.max_step_tokens, config.max_batch_tokens, config.num_kv_pages, config.lookahead_pages) == (1, 8192, None, 4)
    assert (config.kv_cache_dtype, config.hidden_size, config.vocab_size) == ("bfloat16", 128, 1000)
    assert [(layer.num_kv_heads, layer.head_dim, layer.window, layer.kv_donor) for layer in config.layers] == [
        (2, 16, FULL, None)
    ] * 6


def test_arguments_override() -> None:
    arguments: dict[str, Any] = {
        "max_batch_size": 3,
        "max_kv_cache_capacity": 100,
        "page_tokens": 8,
        "kv_cache_dtype": "fp8",
        "max_step_tokens": 5,
        "max_batch_tokens": 64,
        "num_kv_pages": 20,
        "lookahead_pages": 0,
        "use_bounded_swa": False,
    }
    config = load_engine_config(huggingface(dtype="float16"), **arguments)
    assert {name: getattr(config, name) for name in arguments} == {**arguments, "kv_cache_dtype": "float8_e4m3"}


def test_many_rows_raise_the_tokens_of_a_step() -> None:
    assert load_engine_config(huggingface(), max_batch_size=10_000).max_batch_tokens == 10_000


# model_type, layers, further keys, expected kinds, expected window
FAMILIES = [
    ("llama", 4, {}, "FFFF", 0),
    ("llama", 4, {"sliding_window": 64}, "FFFF", 0),  # the family has no such key
    ("llama", 2, {"sliding_window": 0, "attention_chunk_size": 0}, "FF", 0),
    ("mistral", 3, {"sliding_window": 64}, "SSS", 64),
    ("mistral", 3, {"sliding_window": None}, "FFF", 0),
    ("mixtral", 3, {}, "FFF", 0),
    ("phi3", 3, {"sliding_window": 64}, "SSS", 64),
    ("phi3", 3, {"sliding_window": None}, "FFF", 0),
    ("starcoder2", 2, {"sliding_window": 64}, "SS", 64),
    ("qwen2", 4, {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 2}, "FFFF", 0),
    ("qwen2", 4, {"sliding_window": 64, "max_window_layers": 2}, "FFFF", 0),  # off unless switched on
    ("qwen2", 4, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, "FFSS", 64),
    ("qwen2", 4, {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 2}, "FFFF", 0),
    ("qwen2_moe", 2, {"sliding_window": 0, "use_sliding_window": False}, "FF", 0),  # as transformers writes that
    ("qwen2_moe", 2, {"sliding_window": 0, "use_sliding_window": False, "layer_types": ["full_attention"] * 2}, "FF", 0),
    ("qwen3", 3, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, "SSS", 64),
    ("qwen3", 30, {"sliding_window": 64, "use_sliding_window": True}, "F" * 28 + "SS", 64),
    ("qwen3_moe", 3, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, "SSS", 64),
    ("qwen3_moe", 3, {"sliding_window": 64}, "FFF", 0),
    ("qwen2_5_vl_text", 3, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, "FSS", 64),
    ("dots1", 3, {"sliding_window": 64, "max_window_layers": 1}, "FSS", 64),
    ("gemma", 3, {}, "FFF", 0),
    ("gemma2", 5, {"sliding_window": 64}, "SFSFS", 64),
    ("gemma3_text", 8, {"sliding_window": 64, "sliding_window_pattern": 6}, "SSSSSFSS", 64),
    ("gemma3_text", 8, {"sliding_window": 64, "_sliding_window_pattern": 3}, "SSFSSFSS", 64),
    ("gemma3_text", 7, {"sliding_window": 64}, "SSSSSFS", 64),
    ("gemma3_text", 3, {"sliding_window": 64, "sliding_window_pattern": 1}, "FFF", 0),
    ("gemma3n_text", 6, {"sliding_window": 64}, "SSSSFS", 64),
    ("gemma4_text", 4, {"sliding_window": 64, "global_head_dim": 16}, "SSSF", 64),
    ("cohere2", 5, {"sliding_window": 64, "sliding_window_pattern": 4}, "SSSFS", 64),
    ("cohere2", 5, {"sliding_window": 64}, "SSSFS", 64),
    ("olmo3", 5, {"sliding_window": 64}, "SSSFS", 64),
    ("exaone4", 5, {"sliding_window": 64, "sliding_window_pattern": "LLLG"}, "SSSFS", 64),
    ("exaone4", 5, {"sliding_window": None, "sliding_window_pattern": None}, "FFFFF", 0),
    ("gpt_oss", 4, {"sliding_window": 64}, "SFSF", 64),
    ("gpt_oss", 4, {"sliding_window": None}, "FFFF", 0),
    ("afmoe", 4, {"sliding_window": 64, "global_attn_every_n_layers": 2}, "SFSF", 64),
    ("llama4_text", 5, {"attention_chunk_size": 64}, "CCCFC", 64),
    ("llama4_text", 4, {"attention_chunk_size": 64, "no_rope_layers": []}, "CCCF", 64),
    ("llama4_text", 4, {"attention_chunk_size": 64, "no_rope_layers": [1, 0, 0, 1]}, "CFFC", 64),
    ("llama4_text", 4, {"attention_chunk_size": 64, "no_rope_layer_interval": 2}, "CFCF", 64),
    ("llama4_text", 4, {"attention_chunk_size": None}, "FFFF", 0),
    ("smollm3", 4, {"sliding_window": 64, "use_sliding_window": False}, "FFFF", 0),
    ("smollm3", 4, {"sliding_window": 64, "use_sliding_window": True}, "FFFS", 64),
    ("smollm3", 2, {"sliding_window": 64, "use_sliding_window": True, "no_rope_layers": [0, 1]}, "SF", 64),
    # layer_types decides, whatever the family would do
    ("mistral", 3, {"sliding_window": 64, "layer_types": [F, S, F]}, "FSF", 64),
    ("qwen2", 2, {"sliding_window": 64, "use_sliding_window": True, "layer_types": [S, F]}, "SF", 64),
    ("granitemoehybrid", 2, {"layer_types": ["attention", "attention"], "mamba_d_state": 8}, "FF", 0),
    # families nobody has told us about
    ("novel", 2, {}, "FF", 0),
    ("novel", 2, {"sliding_window": None, "attention_chunk_size": None}, "FF", 0),
    ("novel", 2, {"sliding_window": 64, "use_sliding_window": False}, "FF", 0),
    ("novel", 3, {"sliding_window": 64, "sliding_window_pattern": 3}, "SSF", 64),
    ("novel", 3, {"sliding_window": 64, "layer_types": [S, F, S]}, "SFS", 64),
    ("novel", 3, {"attention_chunk_size": 64, "layer_types": [C, F, C]}, "CFC", 64),
    ("", 2, {}, "FF", 0),
]


@pytest.mark.parametrize(("model_type", "layers", "keys", "expected", "window"), FAMILIES)
def test_layout_of_windows(model_type: str, layers: int, keys: dict[str, Any], expected: str, window: int) -> None:
    config = load_engine_config(huggingface(model_type, layers, **keys))
    assert kinds(config) == expected
    assert windows(config) == ({window} if window else set())


def test_several_windows_of_different_kinds() -> None:
    config = load_engine_config(huggingface("novel", 3, layer_types=[S, C, F], sliding_window=32, attention_chunk_size=64))
    assert [layer.window for layer in config.layers] == [Window("sliding", 32), Window("chunked", 64), FULL]


@pytest.mark.parametrize("capacity", [63, 64, 65])
@pytest.mark.parametrize(("kind", "key"), [(S, "sliding_window"), (C, "attention_chunk_size")])
def test_a_window_that_reaches_the_capacity_is_full_attention(capacity: int, kind: str, key: str) -> None:
    source = huggingface("novel", 1, layer_types=[kind], **{key: 64})
    (layer,) = load_engine_config(source, max_kv_cache_capacity=capacity).layers
    assert layer.window.is_full == (capacity <= 64)


def test_a_window_beyond_32_bits_is_full_attention() -> None:
    assert kinds(load_engine_config(huggingface("mistral", 1, sliding_window=2**40))) == "F"


@pytest.mark.parametrize(
    ("model_type", "keys", "absent", "heads", "head_dim"),
    [
        ("llama", {}, (), 2, 16),
        ("llama", {}, ("head_dim", "num_key_value_heads"), 8, 16),
        ("llama", {"head_dim": None, "num_key_value_heads": None}, (), 8, 16),
        ("llama", {"head_dim": 48}, (), 2, 48),
        ("gemma2", {"sliding_window": 64}, ("head_dim",), 2, 256),
        ("gpt_oss", {"sliding_window": 64}, ("head_dim",), 2, 64),
        ("qwen3", {}, ("head_dim",), 2, 128),
        ("jetmoe", {"kv_channels": 24}, ("head_dim",), 2, 24),
        ("falcon", {}, ("head_dim", "num_key_value_heads"), 1, 16),
        ("falcon", {"multi_query": False}, ("head_dim", "num_key_value_heads"), 8, 16),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}, ("head_dim", "num_key_value_heads"), 4, 16),
        ("gpt_bigcode", {"multi_query": True}, ("head_dim", "num_key_value_heads"), 1, 16),
    ],
)
def test_heads(model_type: str, keys: dict[str, Any], absent: tuple[str, ...], heads: int, head_dim: int) -> None:
    config = load_engine_config(without(huggingface(model_type, 2, **keys), *absent))
    assert {(layer.num_kv_heads, layer.head_dim) for layer in config.layers} == {(heads, head_dim)}


def test_older_key_names() -> None:
    config = load_engine_config({"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": 128})
    assert [(layer.num_kv_heads, layer.head_dim) for layer in config.layers] == [(4, 16)] * 3
    assert (config.max_kv_cache_capacity, config.hidden_size, config.ropes) == (128, 64, ())


def test_full_layers_with_other_heads() -> None:
    keys = {"layer_types": [S, F], "sliding_window": 64, "global_head_dim": 32, "num_global_key_value_heads": 1}
    plain = load_engine_config(huggingface("gemma4_text", 2, **keys))
    assert [(layer.num_kv_heads, layer.head_dim) for layer in plain.layers] == [(2, 16), (2, 32)]
    tied = load_engine_config(huggingface("gemma4_text", 2, attention_k_eq_v=True, **keys))
    assert [(layer.num_kv_heads, layer.head_dim) for layer in tied.layers] == [(2, 16), (1, 32)]


def test_shared_kv() -> None:
    config = load_engine_config(huggingface("gemma3n_text", 10, sliding_window=64, num_kv_shared_layers=4))
    assert kinds(config) == "SSSSFSSSSF"
    assert [layer.kv_donor for layer in config.layers] == [None] * 6 + [5, 5, 5, 4]


@pytest.mark.parametrize(
    ("keys", "argument", "expected"),
    [
        ({}, None, "bfloat16"),
        ({"dtype": "float16"}, None, "float16"),
        ({"torch_dtype": "float32"}, None, "float32"),
        ({"dtype": None, "torch_dtype": "float16"}, None, "float16"),
        ({"dtype": "float64"}, None, "bfloat16"),
        ({"dtype": "auto"}, None, "bfloat16"),
        ({"torch_dtype": "float16"}, "float32", "float32"),
        ({"torch_dtype": "torch.float16"}, None, "float16"),
    ],
)
def test_element_type(keys: dict[str, Any], argument: str | None, expected: str) -> None:
    assert load_engine_config(huggingface(**keys), kv_cache_dtype=argument).kv_cache_dtype == expected


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_nested_text_model(key: str) -> None:
    source = {
        "model_type": "wrapper",
        "dtype": "float16",
        "eos_token_id": [7, 9],
        key: huggingface("mistral", 2, sliding_window=64),
    }
    config = load_engine_config(source)
    assert (config.model_type, kinds(config), config.kv_cache_dtype, config.eos_token_ids) == (
        "mistral",
        "SS",
        "float16",
        (7, 9),
    )


def test_text_model_nested_twice() -> None:
    config = load_engine_config(
        {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": huggingface("qwen2_5_omni_text", 2)}}
    )
    assert kinds(config) == "FF"


def test_a_nested_text_model_takes_its_familys_defaults() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    config = load_engine_config({"model_type": "gemma3", "text_config": text})
    assert kinds(config) == "SSSSSF" * 5 + "SSSS"
    assert {(layer.num_kv_heads, layer.head_dim) for layer in config.layers} == {(4, 256)}
    assert (config.max_kv_cache_capacity, windows(config)) == (131072, {1024})
    assert [rope.theta for rope in config.ropes] == [1e4, 1e6]


@pytest.mark.parametrize(("value", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, ()), (-1, ())])
def test_end_tokens(value: Any, expected: tuple[int, ...]) -> None:
    assert load_engine_config(huggingface(eos_token_id=value)).eos_token_ids == expected
