"""Speculative pairs small enough to allocate in a test, and the two files of one in the Edge-LLM dialect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numba_kv.config import DeploymentConfig, LLMEngineConfig, SpecDecodeConfig
from tests.helpers.configs import edgellm
from tests.helpers.models import tiny_config

#: One of each mode, with as few numbers as it takes.
SPECS: dict[str, dict[str, Any]] = {
    "mtp": {"steps": 3},
    "eagle3": {"steps": 3, "target_layers": (0,)},
    "dflash": {"block_size": 4, "target_layers": (0,)},
    "jetspec": {"block_size": 4, "target_layers": (0,)},
    "dspark": {"block_size": 3, "target_layers": (0,)},
    "gemma4_mtp": {"steps": 3, "target_kv_layers": (0,)},
}


def spec(mode: str = "mtp", **changes: Any) -> SpecDecodeConfig:
    """Return a round of a mode: four tokens are verified."""
    return SpecDecodeConfig(mode=mode, **{**SPECS[mode], **changes})


def pair(
    mode: str = "mtp",
    *,
    base: LLMEngineConfig | None = None,
    draft: LLMEngineConfig | None = None,
    **changes: Any,
) -> DeploymentConfig:
    """Return a base of a full and a window layer with a draft of one full layer that holds as much, and the proposals."""
    numbers = spec(mode, **changes)
    model = tiny_config(None, 8, hidden_size=16, vocab_size=100) if base is None else base
    if draft is None:
        draft = replace(model, layers=model.layers[:1])
        if not numbers.shares_target_kv:
            draft = replace(draft, max_kv_cache_capacity=model.max_kv_cache_capacity + numbers.draft_tokens)
    return DeploymentConfig(base=model, draft=draft, spec=numbers)


#: What each mode has in the files of its base and of its draft.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mtp": ({}, {}),
    "eagle3": ({"eagle_hidden_state_layers": [0, 5, 11]}, {"base_model_hidden_size": 3 * 768}),
    "dflash": (
        {"dflash_config": {"target_layer_ids": [1, 3]}},
        {"dflash_config": {"target_layer_ids": [1, 3], "block_size": 8}},
    ),
    "jetspec": ({"jetspec_config": {"target_layer_ids": [1]}}, {"dflash_config": {"target_layer_ids": [1], "block_size": 4}}),
    "dspark": ({"dspark_config": {"target_layer_ids": [2]}}, {"dspark_config": {"target_layer_ids": [2]}}),
    "gemma4_mtp": (
        {"model": "gemma4_text"},
        {
            "model": "gemma4_assistant",
            "shares_target_kv": True,
            "has_own_kv_cache": False,
            "constant_draft_positions": True,
            "returns_feedback_hidden": True,
            "kv_sharing_map": [
                {"assistant_layer": 1, "target_attention_layer": 11},
                {"assistant_layer": 0, "target_attention_layer": 10},
            ],
        },
    ),
}


def base_file(mode: str = "mtp", **keys: Any) -> dict[str, Any]:
    """Return the smallest base engine of a mode: 12 layers, capacity 256, a width of 16."""
    builder = {"max_verify_tree_size": 16, **keys.pop("builder", {})}
    own = {"engine_role": "base", "spec_decode_type": mode, **FILES[mode][0]}
    return edgellm(builder=builder, **{**own, **keys})


def draft_file(mode: str = "mtp", **keys: Any) -> dict[str, Any]:
    """Return the draft of `base_file`: 2 layers, the same capacity, a width of 16."""
    builder = {"max_draft_tree_size": 16, **keys.pop("builder", {})}
    own = {"engine_role": "draft", "spec_decode_type": mode, "num_hidden_layers": 2, "base_model_hidden_size": 768}
    return edgellm(builder=builder, **{**own, **FILES[mode][1], **keys})
