"""The TensorRT Edge-LLM dialect: what a good file means. Numbers are those of the reference's own tests where it has some."""

from __future__ import annotations

from typing import Any

import pytest

from numba_kv.config import FULL, Window, load_engine_config
from numba_kv.errors import ConfigError
from tests.helpers.configs import edgellm, per_layer


def tokens(config: Any) -> list[int]:
    return [layer.window.tokens for layer in config.layers]


def test_the_smallest_engine() -> None:
    config = load_engine_config(edgellm())
    assert (config.max_batch_size, config.max_input_len, config.max_batch_tokens) == (2, 128, 256)
    assert (config.max_kv_cache_capacity, config.page_tokens, config.num_kv_pages) == (256, 128, 4)
    assert (config.kv_cache_dtype, config.hidden_size, config.vocab_size, config.max_lora_rank) == ("float16", 768, 32000, 0)
    assert (config.num_deepstack_features, config.reduced_vocab_size, config.eos_token_ids) == (0, 0, ())
    assert [(layer.num_kv_heads, layer.head_dim, layer.window, layer.kv_donor) for layer in config.layers] == [
        (4, 64, FULL, None)
    ] * 12


@pytest.mark.parametrize(
    ("keys", "field", "expected"),
    [
        ({"builder": {"max_input_len": 129}}, "max_input_len", 129),
        ({"builder": {"max_input_len": 129}}, "max_batch_tokens", 258),
        ({"builder": {"max_kv_pool_pages": 9}}, "num_kv_pages", 9),
        ({"builder": {"num_swa_pages": 64}, "kv_cache_dtype": "fp8"}, "kv_cache_dtype", "float8_e4m3"),
        ({"kv_cache_dtype": "bf16"}, "kv_cache_dtype", "bfloat16"),
        ({"kv_cache_dtype": "fp32"}, "kv_cache_dtype", "float32"),
        ({"reduced_vocab_size": 16000}, "reduced_vocab_size", 16000),
        ({"builder": {"max_lora_rank": 8}}, "max_lora_rank", 8),
        ({"num_deepstack_features": 3}, "num_deepstack_features", 3),
        ({"model": "qwen3", "model_type": "other"}, "model_type", "qwen3"),
        ({"model_type": "other"}, "model_type", "other"),
        ({"eos_token_id": [1, 2]}, "eos_token_ids", (1, 2)),
        ({"eos_token_id": 7}, "eos_token_ids", (7,)),
        ({"edgellm_version": "0.0.1"}, "max_batch_size", 2),
        ({"unknown_key": {"anything": 1}, "builder": {"max_prefill_batch_size": 4}}, "max_batch_size", 2),
        ({"ple_enabled": True, "num_ple_inputs": 12, "ple_hidden_size": 8}, "max_batch_size", 2),
        ({"use_vision_bidirectional_attention": True, "image_token_id": 5}, "max_batch_size", 2),
        ({"mtp_base": True, "builder": {"spec_draft": True}}, "max_batch_size", 2),  # of no effect without a window
        ({"engine_role": "llm", "spec_decode_type": "none"}, "max_batch_size", 2),
    ],
)
def test_fields(keys: dict[str, Any], field: str, expected: object) -> None:
    assert getattr(load_engine_config(edgellm(**keys)), field) == expected


def test_arguments_override() -> None:
    config = load_engine_config(
        edgellm(),
        max_batch_size=5,
        max_kv_cache_capacity=100,
        page_tokens=16,
        kv_cache_dtype="bfloat16",
        num_kv_pages=9,
        max_batch_tokens=50,
        max_step_tokens=2,
    )
    assert (config.max_batch_size, config.max_kv_cache_capacity, config.page_tokens, config.kv_cache_dtype) == (
        5,
        100,
        16,
        "bfloat16",
    )
    assert (config.num_kv_pages, config.max_batch_tokens, config.max_step_tokens, config.max_input_len) == (9, 50, 2, 100)


@pytest.mark.parametrize(("page_tokens", "pages"), [(128, 7), (16, 56), (1, 896), (256, 4)])
def test_the_pool_keeps_its_tokens_at_other_page_sizes(page_tokens: int, pages: int) -> None:
    config = load_engine_config(edgellm(builder={"max_kv_pool_pages": 7}), page_tokens=page_tokens)
    assert config.num_kv_pages == pages


def test_larger_pages_still_hold_every_row() -> None:
    source = edgellm(builder={"max_kv_cache_capacity": 384, "max_kv_pool_pages": 6})
    assert load_engine_config(source, page_tokens=256).num_kv_pages == 4


def test_capacity_markers() -> None:
    config = load_engine_config(edgellm(builder={"num_swa_pages": 64}, **per_layer(None, 0, 128, 256)))
    assert [layer.window for layer in config.layers] == [FULL, FULL, Window("sliding", 128), FULL]


def test_limits_of_the_reference_that_are_lifted() -> None:
    windows = per_layer(64, 128, 0)
    assert tokens(load_engine_config(edgellm(builder={"num_swa_pages": 10}, **windows))) == [64, 128, 0]
    assert tokens(load_engine_config(edgellm(builder={"num_swa_pages": 10}, kv_cache_dtype="fp8", **windows))) == [64, 128, 0]


def test_the_fewest_window_pages() -> None:
    assert tokens(load_engine_config(edgellm(builder={"num_swa_pages": 10}, **per_layer(128)))) == [128]
    with pytest.raises(ConfigError, match="num_swa_pages: 9 is not at least 10"):
        load_engine_config(edgellm(builder={"num_swa_pages": 9}, **per_layer(128)))


@pytest.mark.parametrize(
    ("markers", "capacity", "expected"),
    [
        ((128, 256), 512, [128, 0]),  # a marker that meant full attention in the file still does
        ((128, 0), 129, [128, 0]),
        ((128, 0), 128, [0, 0]),
    ],
)
def test_markers_keep_their_meaning_at_another_capacity(markers: tuple[int, ...], capacity: int, expected: list[int]) -> None:
    source = edgellm(builder={"num_swa_pages": 64}, **per_layer(*markers))
    assert tokens(load_engine_config(source, max_kv_cache_capacity=capacity)) == expected


def test_heads_of_each_layer() -> None:
    entries = [{"num_kv_heads": 8, "head_dim": 64}, {"num_kv_heads": 4, "head_dim": 128}]
    source = edgellm(num_hidden_layers=2, layer_types=["attention", "attention"], kv_layer_configs=entries)
    assert [(layer.num_kv_heads, layer.head_dim) for layer in load_engine_config(source).layers] == [(8, 64), (4, 128)]


def test_three_equal_layers_from_the_scalars() -> None:
    layers = load_engine_config(edgellm(num_hidden_layers=3)).layers
    assert len(layers) == 3
    assert len(set(layers)) == 1


def test_every_fifth_layer_full() -> None:
    types = ["full_attention" if index % 5 == 4 else "sliding_attention" for index in range(10)]
    config = load_engine_config(edgellm(num_hidden_layers=10, head_dim=256, global_head_dim=512, layer_types=types))
    assert [layer.head_dim for layer in config.layers] == [256, 256, 256, 256, 512] * 2
    assert not config.has_window_layers  # this form has no capacity markers


def test_donors() -> None:
    config = load_engine_config(edgellm(num_hidden_layers=4, kv_sharing_donors=[-1, -1, 0, 1]))
    assert [layer.kv_donor for layer in config.layers] == [None, None, 0, 1]


RANKED = {
    "builder": {"tp_size": 2},
    "rank_configs": [
        {"rank": 1, "config_overrides": {"num_key_value_heads": 1}},
        {"rank": 0, "config_overrides": {"num_key_value_heads": 2}},
    ],
}


@pytest.mark.parametrize(("rank", "heads"), [(None, 4), (0, 2), (1, 1)])
@pytest.mark.parametrize("world", [None, 2])
def test_ranks(rank: int | None, heads: int, world: int | None) -> None:
    config = load_engine_config(edgellm(**RANKED), rank=rank, expected_world_size=world)
    assert config.layers[0].num_kv_heads == heads


def test_an_override_replaces_a_whole_section() -> None:
    entries = [{"rank": 0}, {"rank": 1, "config_overrides": {"builder_config": {"max_batch_size": 1}}}]
    source = edgellm(builder={"tp_size": 2}, rank_configs=entries)
    assert load_engine_config(source, rank=0).max_batch_size == 2
    with pytest.raises(ConfigError, match=r"builder_config\.max_input_len: missing"):
        load_engine_config(source, rank=1)


def test_one_rank_needs_no_list() -> None:
    assert load_engine_config(edgellm(builder={"tp_size": 1}), rank=0, expected_world_size=1).max_batch_size == 2
