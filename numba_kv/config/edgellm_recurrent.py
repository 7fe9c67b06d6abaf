"""Recurrent layers of an Edge-LLM configuration: their place among the decoder layers, and their sizes.

Knows the two ways in which a file lists hybrid layers, and how the kind of a recurrent layer is told: by the model's name, else
by its groups.
"""

from __future__ import annotations

from numba_kv.config.limits import Limits
from numba_kv.config.read import Reader, words
from numba_kv.config.recurrent import VERIFY_MODES, GatedDeltaNetLayer, Mamba2Layer, RecurrentLayer

__all__ = [
    "ATTENTION_TYPES",
    "RECURRENT_KEYS",
    "RECURRENT_TYPES",
    "read_layer_types",
    "read_recurrent_layer",
    "read_verify_mode",
]

ATTENTION_TYPES = ("attention", "full_attention", "sliding_attention")
RECURRENT_TYPES = ("mamba", "linear_attention")
#: Optional keys that change the states, so that a misspelt one must not pass.
RECURRENT_KEYS = words(
    """num_linear_attn_layers num_attention_layers recurrent_state_num_heads recurrent_state_num_groups recurrent_state_head_dim
    recurrent_state_size conv_dim conv_kernel recurrent_spec_verify_mode recurrent_state_dtype conv_state_dtype"""
)
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_DELTA_NETS = words("qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text")


def read_layer_types(reader: Reader, listed: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return what each decoder layer keeps, "attention" or "recurrent"; empty if no layer is recurrent.

    Parameters
    ----------
    reader : Reader
        The top level.
    listed : tuple of str
        Its ``layer_types``, checked; empty if there is no list: then attention layers come first.
    count : int
        Decoder layers, of which some may keep nothing.

    Raises
    ------
    ConfigError
        If list and counts disagree.
    """
    recurrent = sum(name in RECURRENT_TYPES for name in listed)
    key = "num_linear_attn_layers"
    stated = reader.integer(key, 0, count, recurrent)
    if listed:
        if stated != recurrent:
            raise reader.error(key, f"{stated} does not agree with layer_types, which has {recurrent} recurrent layers")
        return tuple("recurrent" if name in RECURRENT_TYPES else "attention" for name in listed) if recurrent else ()
    if not stated:
        return ()
    attention = reader.integer("num_attention_layers", 0, count, count - stated)
    if attention + stated > count:
        raise reader.error(key, f"{stated} and num_attention_layers {attention} are more than num_hidden_layers {count}")
    rest = count - attention - stated
    return ("attention",) * attention + ("recurrent",) * stated + ("none",) * rest


def read_recurrent_layer(reader: Reader, limits: Limits) -> RecurrentLayer:
    """Return what every recurrent layer is.

    A Qwen model has gated delta nets, any other with groups Mamba-2 layers, and one without groups gated delta nets, if its
    channels are those of one.

    Raises
    ------
    ConfigError
        If a size or an element type is missing or wrong.
    """
    heads = reader.integer("recurrent_state_num_heads", 1)
    head_dim, state_size = reader.integer("recurrent_state_head_dim", 1), reader.integer("recurrent_state_size", 1)
    groups = reader.integer("recurrent_state_num_groups", 0, default=0)
    conv_dim, conv_kernel = reader.integer("conv_dim", 1), reader.integer("conv_kernel", 1)
    recurrent_dtype = limits.recurrent_state_dtype or _DTYPES[reader.choice("recurrent_state_dtype", _DTYPES)]
    conv_dtype = limits.conv_state_dtype or _DTYPES[reader.choice("conv_state_dtype", _DTYPES)]
    name = reader.text("model", "") or reader.text("model_type", "")
    if groups and name not in _DELTA_NETS:
        if heads % groups:
            raise reader.wrong("recurrent_state_num_groups", groups, f"a divisor of recurrent_state_num_heads {heads}")
        return Mamba2Layer(
            num_heads=heads,
            head_dim=head_dim,
            state_size=state_size,
            num_groups=groups,
            conv_dim=conv_dim,
            conv_kernel=conv_kernel,
            recurrent_state_dtype=recurrent_dtype,
            conv_state_dtype=conv_dtype,
        )
    key_heads, rest = divmod(conv_dim - heads * state_size, 2 * head_dim)
    if rest or key_heads < 1 or heads % key_heads:
        allowed = f"2 x key heads x {head_dim} + {heads} x {state_size}, as a gated delta net has it"
        raise reader.wrong("conv_dim", conv_dim, f"{allowed}; a Mamba layer states its recurrent_state_num_groups")
    return GatedDeltaNetLayer(
        num_heads=heads,
        num_key_heads=key_heads,
        head_dim=head_dim,
        state_size=state_size,
        conv_dim=conv_dim,
        conv_kernel=conv_kernel,
        recurrent_state_dtype=recurrent_dtype,
        conv_state_dtype=conv_dtype,
    )


def read_verify_mode(reader: Reader, limits: Limits) -> str:
    """Return how a verification step keeps recurrent states."""
    stated = reader.choice("recurrent_spec_verify_mode", VERIFY_MODES, "snapshot")
    return limits.recurrent_spec_verify_mode or stated
