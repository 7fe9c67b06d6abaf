"""Rotary parameters in both dialects: where they stand, what they default to, what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from numba_kv.config import RopeConfig, load_engine_config
from numba_kv.errors import ConfigError
from tests.helpers.configs import ABSENT, edgellm, huggingface

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
LONG = {"long_factor": [1.0] * 8, "short_factor": [1] * 8}


def one(rope_type: str = "default", theta: float = 1e4, dim: int = 16, positions: int = 4096, **parameters: Any) -> RopeConfig:
    return RopeConfig(
        rope_type=rope_type, theta=theta, rotary_dim=dim, max_position_embeddings=positions, parameters=parameters
    )


HUGGINGFACE = [
    ({}, (one(),)),
    ({"rope_theta": 500000}, (one(theta=5e5),)),
    ({"rope_theta": 5e5, "rope_scaling": None}, (one(theta=5e5),)),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, (one(theta=7.0),)),
    ({"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.5}}, (one(theta=7.0, dim=8),)),
    ({"partial_rotary_factor": 0.25}, (one(dim=4),)),
    ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, (one("llama3", **LLAMA3),)),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, (one("linear", factor=2.0),)),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, (one("dynamic", factor=2.0),)),
    (
        {"rope_scaling": {"type": "su", **LONG}, "original_max_position_embeddings": 512},
        (one("longrope", long_factor=(1.0,) * 8, short_factor=(1.0,) * 8, original_max_position_embeddings=512),),
    ),
    (
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        (one("mrope", mrope_section=(2, 3, 3), mrope_interleaved=False),),
    ),
    (
        {"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}},
        (one("mrope", mrope_section=(2, 3, 3), mrope_interleaved=False),),
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64}},
        (one("yarn", factor=1.0, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0, original_max_position_embeddings=64),),
    ),
    ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, (one(), one(theta=1e6))),
    ({"rope_theta": 1e4, "rope_local_base_freq": 1e4}, (one(),)),
    (
        {"rope_theta": 1e6, "rope_local_base_freq": 10000, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        (one(), one("linear", 1e6, factor=8.0)),
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        (one(), one(theta=1e6)),
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 9.0}, "sliding_attention": {"rope_theta": 9.0}}},
        (one(theta=9.0),),
    ),
    ({"position_embedding_type": "nope"}, ()),
]


@pytest.mark.parametrize(("keys", "expected"), HUGGINGFACE)
def test_huggingface(keys: dict[str, Any], expected: tuple[RopeConfig, ...]) -> None:
    assert load_engine_config(huggingface(**keys)).ropes == expected


def test_families_that_rotate_part_of_a_head() -> None:
    assert load_engine_config(huggingface("phi")).ropes[0].rotary_dim == 8
    assert load_engine_config(huggingface("gpt_neox", rotary_pct=1.0, rotary_emb_base=3)).ropes == (one(theta=3.0),)


def test_each_layer_kind_rotates_its_own_head_size() -> None:
    parameters = {
        "sliding_attention": {"rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    source = huggingface("gemma4_text", 4, sliding_window=64, global_head_dim=32, rope_parameters=parameters)
    for capacity in (4096, 32):  # also when the capacity makes every layer full
        sliding, full = load_engine_config(source, max_kv_cache_capacity=capacity).ropes
        assert (sliding.rotary_dim, full.rotary_dim, full.parameters["partial_rotary_factor"]) == (16, 32, 0.25)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, one(dim=64, positions=256)),
        ({"rope_theta": ABSENT, "max_position_embeddings": ABSENT}, one(theta=1e5, dim=64, positions=32768)),
        ({"partial_rotary_factor": 0.5}, one(dim=32, positions=256)),
        ({"head_dim": 256, "partial_rotary_factor": 0.25}, one(dim=64, positions=256)),
        ({"use_rope": False}, one("nope", 1e5, dim=64, positions=256)),
        ({"rope_scaling": {"type": "nope"}}, one("nope", 1e5, dim=64, positions=256)),
        ({"rope_scaling": None}, one(dim=64, positions=256)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, one("llama3", dim=64, positions=256, **LLAMA3)),
        ({"rope_scaling": {"type": "default", "rope_type": "llama3"}}, one(dim=64, positions=256)),  # type wins
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, one("dynamic", dim=64, positions=256)),
        (
            {"rope_scaling": {"type": "proportional", "factor": 2}, "partial_rotary_factor": 0.25},
            one("proportional", dim=64, positions=256, partial_rotary_factor=0.25, factor=2.0),
        ),
    ],
)
def test_edgellm(keys: dict[str, Any], expected: RopeConfig) -> None:
    assert load_engine_config(edgellm(**keys)).ropes == (expected,)


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({"head_dim": 64}, 12_496_091.4),
        ({"head_dim": 128, "hidden_size": 4096}, 11_158_839.9),
    ],
)
def test_edgellm_alpha_stretches_the_base(keys: dict[str, Any], theta: float) -> None:
    source = edgellm(rope_scaling={"type": "dynamic", "alpha": 1000}, **keys)
    assert load_engine_config(source).ropes[0].theta == pytest.approx(theta, rel=1e-8)


def test_edgellm_yarn_magnitude() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": None}
    (rope,) = load_engine_config(edgellm(rope_scaling=scaling)).ropes
    assert rope.parameters["attention_factor"] == pytest.approx(1.1386294361119891)


def test_edgellm_two_blocks() -> None:
    blocks = {
        "sliding_rope_config": {"rope_theta": 1e4, "max_position_embeddings": 99},
        "full_rope_config": {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
    }
    ropes = load_engine_config(edgellm(global_head_dim=128, **blocks)).ropes
    assert ropes == (one(dim=64, positions=99), one(theta=1e6, dim=32, positions=256))
    ropes = load_engine_config(edgellm(sliding_rotary_dim=16, full_rotary_dim=64, **blocks)).ropes
    assert [rope.rotary_dim for rope in ropes] == [16, 64]


BLOCK = {"rope_theta": 1e4}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_scaling": {"type": "spiral"}}, ("rope_scaling.type", "'spiral'", "'llama3'")),
        ({"rope_scaling": {"rope_type": 3}}, ("rope_scaling.rope_type", "3")),
        ({"rope_scaling": []}, ("rope_scaling", "[]", "an object")),
        ({"rope_theta": 0}, ("rope_theta", "0 is not", "above 0")),
        ({"rope_theta": True}, ("rope_theta", "true")),
        ({"rope_theta": "1e4"}, ("rope_theta", "'1e4'")),
        ({"rope_theta": float("inf")}, ("rope_theta", "inf")),
        ({"rope_theta": 10**400}, ("rope_theta", "1000")),
        ({"partial_rotary_factor": 1.5}, ("partial_rotary_factor", "1.5", "up to 1")),
        ({"partial_rotary_factor": 1e-3}, ("partial_rotary_factor", "0.001")),
        ({"rope_scaling": {"type": "llama3"}}, ("rope_scaling.low_freq_factor", "missing")),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "factor": -1}}, ("rope_scaling.factor", "-1")),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            ("high_freq_factor", "1.0", "low_freq_factor"),
        ),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 0}}, ("original_max", "0 is not")),
        ({"rope_scaling": {"type": "yarn"}}, ("rope_scaling.factor", "missing")),
        (
            {"rope_scaling": {"type": "longrope", **LONG, "short_factor": [1.0]}, "original_max_position_embeddings": 64},
            ("short_factor", "1 factors"),
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, ("mrope_section", "(1, 2)", "three")),
    ],
)
@pytest.mark.parametrize("make", [huggingface, edgellm])
def test_bad_parameters(make: Any, keys: dict[str, Any], words: tuple[str, ...]) -> None:
    extra = {"head_dim": 16} if make is edgellm else {}
    with pytest.raises(ConfigError) as caught:
        load_engine_config(make(**extra, **keys))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ("rope_scaling.type", "'linear'")),
        ({"sliding_rope_config": BLOCK}, ("full_rope_config", "missing")),
        ({"full_rope_config": BLOCK, "sliding_rope_config": 3}, ("sliding_rope_config", "3", "an object")),
        (
            {"full_rope_config": BLOCK, "sliding_rope_config": {"rope_scaling": {"type": "mrope"}}},
            ("sliding_rope_config", "mrope"),
        ),
        ({"full_rope_config": BLOCK, "sliding_rope_config": BLOCK, "full_rotary_dim": 65}, ("full_rotary_dim", "65", "64")),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1000}, "head_dim": 2}, ("alpha", "more than 2")),
        ({"rope_scaling": {"type": "dynamic", "alpha": 1e300}, "head_dim": 3}, ("alpha", "1e+300")),
        ({"rope_scaling": {"type": "longrope", **LONG}, "head_dim": 16}, ("original_max_position_embeddings", "missing")),
    ],
)
def test_bad_parameters_of_edgellm(keys: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(edgellm(**keys))
    for word in words:
        assert word in str(caught.value)


def test_a_record_is_read_only_hashable_and_copyable() -> None:
    rope = one("linear", factor=2.0)
    with pytest.raises(TypeError):
        rope.parameters["factor"] = 3.0  # type: ignore[index]
    assert copy.deepcopy(rope) == pickle.loads(pickle.dumps(rope)) == rope
    assert hash(rope) == hash(one("linear", factor=2.0))
