"""The TensorRT Edge-LLM dialect: each mistake is a typed error that names the key and the value."""

from __future__ import annotations

from typing import Any

import pytest

from numba_kv.config import load_engine_config
from numba_kv.errors import ConfigError, UnsupportedModelError
from tests.helpers.configs import ABSENT, edgellm, per_layer
from tests.host.test_config_edgellm import RANKED

# changed keys, what the message has to say
BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"num_hidden_layers": ABSENT}, ("num_hidden_layers", "missing")),
    ({"num_hidden_layers": 0}, ("num_hidden_layers", "0 is not an integer from 1")),
    ({"num_hidden_layers": 2**31}, ("num_hidden_layers", "2147483648")),
    ({"num_hidden_layers": 12.0}, ("num_hidden_layers", "12.0")),
    ({"num_hidden_layers": True}, ("num_hidden_layers", "true is not an integer")),
    ({"num_hidden_layers": None}, ("num_hidden_layers", "null")),
    ({"num_key_value_heads": 0}, ("num_key_value_heads", "0 is not")),
    ({"num_key_value_heads": "4"}, ("num_key_value_heads", "'4'")),
    ({"head_dim": -64}, ("head_dim", "-64")),
    ({"hidden_size": ABSENT}, ("hidden_size", "missing")),
    ({"vocab_size": 0}, ("vocab_size", "0 is not")),
    ({"kv_cache_dtype": ABSENT}, ("kv_cache_dtype", "missing")),
    ({"kv_cache_dtype": "FP16"}, ("kv_cache_dtype", "'FP16'", "'fp16'")),
    ({"kv_cache_dtype": 16}, ("kv_cache_dtype", "16")),
    ({"kv_cache_dtype": "int8"}, ("kv_cache_dtype", "'int8'", "scales")),
    ({"builder_config": ABSENT, "edgellm_version": "0.11.0"}, ("builder_config", "missing")),
    ({"builder_config": ABSENT, "engine_role": "llm"}, ("builder_config", "missing")),
    ({"builder_config": False}, ("builder_config", "false", "an object")),
    ({"builder_config": [1]}, ("builder_config", "[1]", "an object")),
    ({"builder": {"max_batch_size": ABSENT}}, ("builder_config.max_batch_size", "missing")),
    ({"builder": {"max_batch_size": 0}}, ("builder_config.max_batch_size", "0 is not")),
    ({"builder": {"max_batch_size": 2.5}}, ("builder_config.max_batch_size", "2.5")),
    ({"builder": {"max_input_len": 512}}, ("builder_config.max_input_len", "512", "at most max_kv_cache_capacity 256")),
    ({"builder": {"max_kv_cache_capacity": 2147483521}}, ("builder_config.max_kv_cache_capacity", "2147483521")),
    ({"builder": {"max_kv_pool_pages": 3}}, ("builder_config.max_kv_pool_pages", "3 is not from 4")),
    ({"builder": {"max_kv_pool_pages": ABSENT}}, ("builder_config.max_kv_pool_pages", "missing")),
    ({"builder": {"max_kv_pool_pages": 1073741824}}, ("builder_config.max_kv_pool_pages", "1073741824", "1073741823")),
    (
        {"builder": {"max_batch_size": 2**31 - 1, "max_input_len": 2, "max_kv_cache_capacity": 2}},
        ("max_batch_size", "2147483647"),
    ),
    ({"builder": {"ragged_backend": "native_compact_ragged"}}, ("builder_config.ragged_backend", "'native_compact_ragged'")),
    ({"builder": {"ragged_backend": ABSENT}}, ("builder_config.ragged_backend", "missing")),
    ({"builder": {"num_swa_pages": -1}}, ("builder_config.num_swa_pages", "-1")),
    ({"builder": {"num_swa_pages": 2**31}}, ("builder_config.num_swa_pages", "2147483648")),
    ({"builder": {"max_lora_rank": -1}}, ("builder_config.max_lora_rank", "-1")),
    ({"builder": {"max_lora_ranks": 8}}, ("builder_config.max_lora_ranks", "did you mean 'max_lora_rank'")),
    ({"builder": {"num_swa_page": 8}}, ("builder_config.num_swa_page", "did you mean 'num_swa_pages'")),
    ({"builder": {"max_batch_size": ABSENT, "maxBatchSize": 2}}, ("maxBatchSize", "did you mean 'max_batch_size'")),
    ({"kv_sharing_donor": [-1]}, ("kv_sharing_donor", "did you mean 'kv_sharing_donors'")),
    ({"engine_role": "chef"}, ("engine_role", "'chef'", "'llm'")),
    ({"engine_role": "draft"}, ("engine_role", "'draft'")),
    ({"engine_role": "base"}, ("spec_decode_type", "'none'", "'base'")),
    ({"spec_decode_type": "eagle3"}, ("spec_decode_type", "'eagle3'", "'llm'")),
    ({"spec_decode_type": "eagle9"}, ("spec_decode_type", "'eagle9'")),
    ({"layer_types": ["attention"] * 2}, ("num_hidden_layers", "12", "2 attention layers")),
    ({"layer_types": ["full_attention"] * 2}, ("num_hidden_layers", "12", "2 attention layers")),
    ({"layer_types": ["attention", "attenshun"]}, ("layer_types[1]", "'attenshun'", "'mamba'")),
    ({"layer_types": [3]}, ("layer_types[0]", "3", "a string")),
    ({"layer_types": "attention"}, ("layer_types", "'attention'", "a list")),
    ({"num_attention_layers": 11}, ("num_attention_layers", "11", "12 attention layers")),
    ({"kv_layer_configs": [{}]}, ("layer_types", "0 entries for 1")),
    ({**per_layer(0, 0), "layer_types": ["attention"]}, ("layer_types", "1 entries for 2")),
    ({**per_layer(0), "layer_types": ["full_attention"]}, ("layer_types[0]", "'full_attention'")),
    ({**per_layer(0), "kv_layer_configs": [None]}, ("kv_layer_configs[0]", "null", "an object")),
    ({**per_layer(0), "kv_layer_configs": [{"head_dim": 64}]}, ("kv_layer_configs[0].num_kv_heads", "missing")),
    ({**per_layer(0, heads=0)}, ("kv_layer_configs[0].num_kv_heads", "0 is not")),
    ({**per_layer(-1)}, ("kv_layer_configs[0].kv_cache_capacity", "-1")),
    ({**per_layer(257)}, ("kv_layer_configs[0].kv_cache_capacity", "257", "256")),
    ({**per_layer(0, 0), "num_hidden_layers": 12}, ("num_hidden_layers", "12", "2 attention layers")),
    ({**per_layer(64)}, ("num_swa_pages", "0 is not at least 10")),
    ({"kv_sharing_donors": [-1] * 11}, ("kv_sharing_donors", "11 entries for 12")),
    ({"kv_sharing_donors": [-1] * 11 + [11]}, ("kv_sharing_donors[11]", "11")),
    ({"kv_sharing_donors": [-1] * 11 + [12]}, ("kv_sharing_donors[11]", "12")),
    ({"kv_sharing_donors": [-1] * 10 + [0, 10]}, ("kv_sharing_donors[11]", "10", "layer 0")),
    ({"kv_sharing_donors": [-2] * 12}, ("kv_sharing_donors[0]", "-2")),
    ({"builder": {"num_swa_pages": 10}, **per_layer(64, 0), "kv_sharing_donors": [-1, 0]}, ("kv_sharing_donors[1]", "window")),
    ({"global_head_dim": 0}, ("global_head_dim", "0 is not")),
    ({"num_deepstack_features": -1}, ("num_deepstack_features", "-1")),
    ({"reduced_vocab_size": 1.5}, ("reduced_vocab_size", "1.5")),
    ({"eos_token_id": [1, "2"]}, ("eos_token_id[1]", "'2'")),
    ({"ple_enabled": True}, ("num_ple_inputs", "0", "12")),
    ({"ple_enabled": True, "num_ple_inputs": 12}, ("ple_hidden_size", "0")),
    ({"ple_hidden_size": 4}, ("ple_enabled", "4")),
    ({"use_vision_bidirectional_attention": True}, ("image_token_id", "-1")),
    ({"mtp_base": 1}, ("mtp_base", "1 is not true or false")),
    ({"builder": {"tp_size": 0}}, ("builder_config.tp_size", "0 is not")),
    ({"builder": {"tp_size": 2}}, ("rank_configs", "missing", "tp_size is 2")),
    ({**RANKED, "rank_configs": []}, ("rank_configs", "[]")),
    ({**RANKED, "rank_configs": {}}, ("rank_configs", "{}", "a list")),
    ({**RANKED, "rank_configs": [{"rank": 0}]}, ("builder_config.tp_size", "2 is not 1")),
    ({**RANKED, "builder": {}}, ("builder_config.tp_size", "missing")),
    ({**RANKED, "builder": {"tp_size": 1}}, ("builder_config.tp_size", "1 is not 2")),
    ({**RANKED, "rank_configs": [{"rank": 0}, {"rank": 0}]}, ("rank_configs[1].rank", "0")),
    ({**RANKED, "rank_configs": [{"rank": 0}, {"rank": 2}]}, ("rank_configs[1].rank", "2 is not")),
    ({**RANKED, "rank_configs": [{"rank": 0}, 7]}, ("rank_configs[1]", "7", "an object")),
    ({**RANKED, "rank_configs": [{"rank": 0}, {"rank": 1, "config_overrides": 5}]}, ("config_overrides", "5", "an object")),
]


@pytest.mark.parametrize(("keys", "words"), BAD)
def test_bad_files(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(edgellm(**keys))
    assert not isinstance(caught.value, UnsupportedModelError)
    assert str(caught.value).startswith("config (Edge-LLM): ")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"engine_role": "base", "spec_decode_type": "eagle3"}, ("'eagle3'", "speculative")),
        ({"engine_role": "dllm"}, ("'dllm'", "diffusion")),
        ({"builder": {"spec_base": True, "num_swa_pages": 64}, **per_layer(128)}, ("builder_config.spec_base", "speculative")),
        ({"dspark_base": True, "builder": {"num_swa_pages": 64}, **per_layer(128)}, ("dspark_base", "speculative")),
    ],
)
def test_engines_that_are_not_supported_yet(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        load_engine_config(edgellm(**keys))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "arguments", "words"),
    [
        ({}, {"rank": 1}, ("rank_configs", "rank 1")),
        ({}, {"expected_world_size": 2}, ("rank_configs", "expected_world_size is 2")),
        (RANKED, {"rank": 2}, ("rank_configs", "rank 2", "0 to 1")),
        (RANKED, {"expected_world_size": 1}, ("builder_config.tp_size", "2 is not 1")),
        (
            {"builder": {"num_swa_pages": 64}, **per_layer(128)},
            {"max_kv_cache_capacity": 127},
            ("kv_cache_capacity", "128", "127"),
        ),
        ({"builder": {"max_input_len": 256}}, {"max_batch_size": 2**23}, ("max_input_len", "max_batch_tokens")),
    ],
)
def test_arguments_that_the_file_contradicts(keys: dict[str, Any], arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(edgellm(**keys), **arguments)
    for word in words:
        assert word in str(caught.value)
