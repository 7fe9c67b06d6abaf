"""Targets of an engine: what a configuration tells, and which module of an adapter means which."""

from __future__ import annotations

from typing import Any

import pytest

from numba_kv.config import load_engine_config
from numba_kv.errors import ConfigError, InputError
from numba_kv.weights import LoRATarget, targets_from_config
from numba_kv.weights.lora_targets import TargetTable
from tests.helpers.configs import huggingface

SPLIT = tuple(LoRATarget(name=f"model.layers.3.self_attn.{n}_proj", k=8, n=c) for n, c in (("q", 16), ("k", 4), ("v", 4)))
FUSED = LoRATarget(name="model.layers.3.self_attn.qkv_proj", k=8, n=24, parts=(("q_proj", 16), ("k_proj", 4), ("v_proj", 4)))


def found(targets: tuple[LoRATarget, ...], module: str) -> list[tuple[int, int, int, int]]:
    return [(p.target, p.source, p.column, p.n) for p in TargetTable(targets).find(module)]


def engine(**keys: Any) -> Any:
    return load_engine_config(huggingface(layers=2, **keys), max_batch_size=2, max_kv_cache_capacity=64)


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.3.self_attn.k_proj",
        "layers.3.self_attn.k_proj",
        "base_model.model.model.layers.3.self_attn.k_proj",
        "model.language_model.layers.3.self_attn.k_proj",
        "language_model.model.layers.3.self_attn.k_proj",
    ],
)
def test_wrappers_are_seen_through(module: str) -> None:
    assert found(SPLIT, module) == [(1, 0, 0, 4)]
    assert found((FUSED,), module) == [(0, 0, 16, 4)]


@pytest.mark.parametrize(
    "module",
    [
        "vision_tower.layers.3.self_attn.k_proj",
        "model.visual.layers.3.self_attn.k_proj",
        "model.audio_tower.model.layers.3.self_attn.k_proj",
        "model.layers.2.self_attn.k_proj",
        "model.layers.33.self_attn.k_proj",
        "model.layers.3.cross_attn.k_proj",
        "k_proj",
        "model",
        "",
    ],
)
def test_other_modules_are_not_taken_for_targets(module: str) -> None:
    assert found(SPLIT, module) == found((FUSED,), module) == []


def test_a_fused_module_is_cut_for_split_targets() -> None:
    assert found(SPLIT, FUSED.name) == [(0, 0, 0, 16), (1, 16, 0, 4), (2, 20, 0, 4)]
    assert found(SPLIT[:2], FUSED.name) == [], "v has no target: its columns would be lost"
    assert found((FUSED,), FUSED.name) == [(0, 0, 0, 24)]


def test_room_of_a_target() -> None:
    assert [t.rank_room(16) for t in (SPLIT[0], FUSED, LoRATarget(name="x", k=1, n=1, max_rank=5))] == [16, 48, 5]


@pytest.mark.parametrize(
    "targets",
    [
        (SPLIT[0], SPLIT[0]),
        (SPLIT[0], LoRATarget(name="layers.3.self_attn.q_proj", k=8, n=16)),
        (SPLIT[0], FUSED),
        (SPLIT[0], LoRATarget(name="other", k=1, n=1, a_name=SPLIT[0].b_name)),
        (LoRATarget(name="other", k=1, n=1, a_name="x", b_name="x"),),
        (),
        ("q_proj",),
    ],
)
def test_wrong_tables(targets: Any) -> None:
    with pytest.raises(InputError, match="targets: "):
        TargetTable(targets)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": ""}, "'' is not the name of a module"),
        ({"k": 0}, "k of target 'x': 0"),
        ({"n": True}, "n of target 'x': True"),
        ({"max_rank": 0}, "max_rank of target 'x': 0"),
        ({"parts": (("a", 1), ("b", 2))}, "together 4 columns"),
        ({"parts": (("a", 2), ("a", 2))}, "not different parts"),
        ({"parts": (("a", 4), ("b", 0))}, "columns of part 'b'"),
    ],
)
def test_wrong_targets(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        LoRATarget(**{"name": "x", "k": 4, "n": 4, **wrong})


def test_a_configuration_gives_attention_targets() -> None:
    targets = targets_from_config(engine(), num_attention_heads=8)
    assert [(t.name.removeprefix("model.layers."), t.k, t.n) for t in targets[:4]] == [
        ("0.self_attn.q_proj", 128, 128),
        ("0.self_attn.k_proj", 128, 32),
        ("0.self_attn.v_proj", 128, 32),
        ("0.self_attn.o_proj", 128, 128),
    ]
    assert len(targets) == 8
    assert (targets[0].a_name, targets[0].b_name) == tuple(f"{targets[0].name}.lora_{half}.weight" for half in "AB")


def test_a_configuration_gives_mlp_and_fused_targets() -> None:
    targets = targets_from_config(engine(), num_attention_heads=[8, 4], intermediate_size=96, fused=True, prefix="layers")
    assert [(t.name, t.k, t.n, t.parts) for t in targets[4:]] == [
        ("layers.1.self_attn.qkv_proj", 128, 128, (("q_proj", 64), ("k_proj", 32), ("v_proj", 32))),
        ("layers.1.self_attn.o_proj", 64, 128, ()),
        ("layers.1.mlp.gate_up_proj", 128, 192, (("gate_proj", 96), ("up_proj", 96))),
        ("layers.1.mlp.down_proj", 96, 128, ()),
    ]


@pytest.mark.parametrize(
    ("keys", "options", "said"),
    [
        ({}, {}, "num_attention_heads: not given"),
        ({}, {"num_attention_heads": [8]}, "num_attention_heads: 1 values for 2 layers"),
        ({}, {"num_attention_heads": 0}, "num_attention_heads: 0"),
        ({}, {"num_attention_heads": 8, "intermediate_size": "96"}, "intermediate_size: "),
    ],
)
def test_what_a_configuration_does_not_tell_is_named(keys: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        targets_from_config(engine(**keys), **options)


def test_an_unknown_hidden_size_is_named() -> None:
    from dataclasses import replace

    with pytest.raises(ConfigError, match="hidden_size: the configuration does not say it"):
        targets_from_config(replace(engine(), hidden_size=0), num_attention_heads=8)
