"""Small configurations in both dialects, of our own making: one per family, with a few layers."""

from __future__ import annotations

from typing import Any


def huggingface(model_type: str = "llama", layers: int = 6, **keys: Any) -> dict[str, Any]:
    """Return a small model: 8 heads, 2 KV heads of 16 channels, 4,096 positions."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 128,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "vocab_size": 1000,
        **keys,
    }


def edgellm(**keys: Any) -> dict[str, Any]:
    """Return the smallest Edge-LLM engine; `builder` holds changes of its builder section."""
    builder = {
        "max_batch_size": 2,
        "max_input_len": 128,
        "max_kv_cache_capacity": 256,
        "max_kv_pool_pages": 4,
        "ragged_backend": "entry_padded_compatibility",
        **keys.pop("builder", {}),
    }
    config = {
        "num_hidden_layers": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "hidden_size": 768,
        "vocab_size": 32000,
        "kv_cache_dtype": "fp16",
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "builder_config": builder,
        **keys,
    }
    return without(config, *(key for key, value in config.items() if value is ABSENT))


#: Sizes of recurrent layers by the names of each family, for `huggingface` (hidden size 128), and of the Edge-LLM dialect.
BAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "float16",
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
LFM2: dict[str, Any] = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 3}
ZAMBA2: dict[str, Any] = {
    "layers_block_type": ["mamba", "hybrid"] * 3,
    "n_mamba_heads": 4,
    "mamba_headdim": 64,
    "mamba_d_state": 16,
    "mamba_ngroups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
MAMBA: dict[str, Any] = {
    "recurrent_state_num_heads": 4,
    "recurrent_state_num_groups": 2,
    "recurrent_state_head_dim": 8,
    "recurrent_state_size": 16,
    "conv_dim": 96,
    "conv_kernel": 4,
    "recurrent_state_dtype": "fp32",
    "conv_state_dtype": "fp16",
}

#: Stands for a key that is to be left out.
ABSENT: Any = object()


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return `config` without some of its keys, those of its builder section included."""
    found = {key: value for key, value in config.items() if key not in keys}
    builder = found.get("builder_config")
    if isinstance(builder, dict):
        found["builder_config"] = {k: v for k, v in builder.items() if v is not ABSENT and f"builder_config.{k}" not in keys}
    return found


def per_layer(*markers: int | None, heads: int = 4, head_dim: int = 64) -> dict[str, Any]:
    """Return the keys of attention layers with these capacity markers; None leaves the marker out."""
    entries = []
    for marker in markers:
        entry: dict[str, Any] = {"num_kv_heads": heads, "head_dim": head_dim}
        if marker is not None:
            entry["kv_cache_capacity"] = marker
        entries.append(entry)
    return {"num_hidden_layers": len(markers), "layer_types": ["attention"] * len(markers), "kv_layer_configs": entries}
