"""What the model families of Transformers mean by keys that a ``config.json`` leaves out.

Knows names, default values and how a family lays out its windows when no ``layer_types`` says so. Does not know how a layer is
built from that; see `numba_kv.config.huggingface_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from numba_kv.config.read import INT64_MAX, Reader, words

__all__ = [
    "ATTENDS_TWICE_HIDDEN",
    "CHUNKED",
    "FULL",
    "SLIDING",
    "FAMILIES",
    "HEAD_DIMS",
    "KEY_ALIASES",
    "MAX_LAYERS",
    "NESTED_DEFAULTS",
    "PARTIAL_ROTARY_FACTORS",
    "UNROTATED",
    "Kind",
    "family_of",
    "periodic_kinds",
]

Kind = Literal["full", "sliding", "chunked"]
Rule = Callable[[Reader, int], tuple[Kind, ...]]

#: More layers than any model has: what bounds the work on a file that lies.
MAX_LAYERS = 10_000

FULL: Kind = "full"
SLIDING: Kind = "sliding"
CHUNKED: Kind = "chunked"


def family_of(model_type: str) -> str:
    """Return the family of a model type: that of a composite model and of its text part are one."""
    return model_type.removesuffix("_text")


def periodic_kinds(count: int, period: int) -> tuple[Kind, ...]:
    """Return sliding layers of which every `period`-th is full instead."""
    return tuple(SLIDING if (index + 1) % period else FULL for index in range(count))


def _full(reader: Reader, count: int) -> tuple[Kind, ...]:
    return (FULL,) * count


def _every_layer(reader: Reader, count: int) -> tuple[Kind, ...]:
    return (SLIDING if reader.has("sliding_window") else FULL,) * count


def _period(reader: Reader, default: int) -> int:
    """Return every how many layers a full one comes; "LLLG" is another way to write 4."""
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if not reader.has(key):
            continue
        pattern = reader.get(key)
        if isinstance(pattern, str) and pattern and set(pattern[:-1]) <= {"L"} and pattern.endswith("G"):
            return len(pattern)
        return reader.integer(key, 1)
    return default


def _periodic(default: int, *, key: str = "", last_is_full: bool = False) -> Rule:
    """Return the rule of a family in which the last of every few layers is full and the others slide."""

    def rule(reader: Reader, count: int) -> tuple[Kind, ...]:
        if "sliding_window" in reader.values and not reader.has("sliding_window"):
            return (FULL,) * count
        reader.integer("sliding_window", 1, INT64_MAX)  # absent is no answer here: the family slides by default
        period = reader.integer(key, 1, default=default) if key else _period(reader, default)
        kinds = periodic_kinds(count, period)
        return (*kinds[:-1], FULL) if last_is_full else kinds

    return rule


def _upper_layers(reader: Reader, count: int) -> tuple[Kind, ...]:
    """Layers from `max_window_layers` on slide."""
    if not reader.has("sliding_window"):
        return (FULL,) * count
    first = reader.integer("max_window_layers", 0, default=28)
    return tuple(SLIDING if index >= first else FULL for index in range(count))


def _if_switched_on(rule: Rule) -> Rule:
    """Return `rule` for a family that ignores `sliding_window` until `use_sliding_window` is true."""

    def switched(reader: Reader, count: int) -> tuple[Kind, ...]:
        return rule(reader, count) if reader.boolean("use_sliding_window", False) else (FULL,) * count

    return switched


def _rotated_layers(reader: Reader, count: int) -> tuple[bool, ...]:
    """Return which layers rotate: `no_rope_layers` holds 1 for those that do, whatever its name says."""
    if reader.has("no_rope_layers"):
        stated = reader.integers("no_rope_layers", 0, 1)
        if len(stated) == count:
            return tuple(bool(flag) for flag in stated)
        if stated:
            raise reader.error("no_rope_layers", f"{len(stated)} entries for {count} layers; one per layer is required")
    interval = reader.integer("no_rope_layer_interval", 1, default=4)
    return tuple((index + 1) % interval != 0 for index in range(count))


def _rotated_layers_are_chunked(reader: Reader, count: int) -> tuple[Kind, ...]:
    if not reader.has("attention_chunk_size"):
        return (FULL,) * count
    return tuple(CHUNKED if rotated else FULL for rotated in _rotated_layers(reader, count))


def _unrotated_layers_slide(reader: Reader, count: int) -> tuple[Kind, ...]:
    if not reader.has("sliding_window"):
        return (FULL,) * count
    return tuple(FULL if rotated else SLIDING for rotated in _rotated_layers(reader, count))


_ALL_FULL = """apertus arcee baichuan bitnet bloom codegen cohere diffllama ernie4_5 ernie4_5_moe exaone falcon gemma glm glm4
glm4_moe glm4v gpt2 gpt_bigcode gpt_neox gptj granite granitemoe granitemoeshared helium hunyuan_v1_dense
hunyuan_v1_moe jetmoe llama minimax_m2 nemotron olmo olmo2 olmoe opt persimmon phi qwen3_vl qwen3_vl_moe seed_oss
stablelm"""

#: Layout of the windows of a family whose file has no `layer_types`.
FAMILIES: Mapping[str, Rule] = {
    **dict.fromkeys(words(_ALL_FULL), _full),
    **dict.fromkeys(words("ministral ministral3 mistral mixtral phi3 phi4_multimodal phimoe starcoder2"), _every_layer),
    **dict.fromkeys(words("qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen2_5_omni qwen3"), _if_switched_on(_upper_layers)),
    "qwen3_moe": _if_switched_on(_every_layer),
    "dots1": _upper_layers,
    "smollm3": _if_switched_on(_unrotated_layers_slide),
    **dict.fromkeys(words("gemma2 gpt_oss vaultgemma"), _periodic(2)),
    "gemma3": _periodic(6),
    "gemma3n": _periodic(5),
    "gemma4": _periodic(6, last_is_full=True),
    **dict.fromkeys(words("cohere2 exaone4 olmo3"), _periodic(4)),
    "afmoe": _periodic(4, key="global_attn_every_n_layers"),
    "llama4": _rotated_layers_are_chunked,
}

#: Head sizes of families that do not take hidden_size / num_attention_heads when `head_dim` is absent.
HEAD_DIMS: Mapping[str, int] = {
    **dict.fromkeys(words("gemma gemma2 gemma3 gemma3n gemma4 qwen3_5 qwen3_5_moe qwen3_next"), 256),
    **dict.fromkeys(words("glm glm4 helium llama4 qwen3 qwen3_vl seed_oss"), 128),
    "gpt_oss": 64,
}

#: Families whose attention reads the embeddings beside the hidden states: heads share twice the channels.
ATTENDS_TWICE_HIDDEN = frozenset({"zamba2"})

#: Families' own names of keys, mostly older ones'.
KEY_ALIASES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(
        words("gpt2 gpt_bigcode gptj codegen"),
        {
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
        },
    ),
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embed"},
    "zamba2": {"head_dim": "attention_head_dim"},
}

#: Families that add positions to the embeddings or the scores instead of rotating.
UNROTATED = frozenset(words("bloom gpt2 gpt_bigcode jamba nemotron_h opt"))

#: Rotated part of a head, where it is not all of it and the file is silent.
PARTIAL_ROTARY_FACTORS: Mapping[str, float] = {
    **dict.fromkeys(words("bamba glm glm4 glm4_moe nemotron persimmon phi"), 0.5),
    **dict.fromkeys(words("gpt_neox qwen3_5 qwen3_5_moe qwen3_next stablelm"), 0.25),
}


def _defaults(
    layers: int, hidden: int, heads: int, kv_heads: int | None, positions: int, vocabulary: int, **more: object
) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "vocab_size": vocabulary,
        **more,
    }


_TWO_THETAS = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}

#: Values that a *nested* text configuration leaves out: there only what differs from the family's defaults is written.
NESTED_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": _defaults(32, 4096, 32, None, 2048, 32000),
    "mistral": _defaults(32, 4096, 32, 8, 131072, 32000, sliding_window=4096),
    "gemma": _defaults(28, 3072, 16, 16, 8192, 256000),
    "gemma2": _defaults(26, 2304, 8, 4, 8192, 256000, sliding_window=4096),
    "gemma3": _defaults(26, 2304, 8, 4, 131072, 262208, sliding_window=4096, **_TWO_THETAS),
    "gemma3n": _defaults(35, 2048, 8, 2, 32768, 262400, sliding_window=512, num_kv_shared_layers=15, **_TWO_THETAS),
    "llama4": _defaults(48, 5120, 40, 8, 131072, 202048, attention_chunk_size=8192, rope_theta=5e5),
    "lfm2": _defaults(32, 2560, 32, 8, 128000, 65536, conv_L_cache=3, rope_theta=1e6),
    "qwen2": _defaults(32, 4096, 32, 32, 32768, 151936, sliding_window=4096),
    "qwen3": _defaults(32, 4096, 32, 32, 32768, 151936, sliding_window=4096),
    "qwen3_5": _defaults(
        32,
        4096,
        16,
        4,
        32768,
        248320,
        head_dim=256,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    ),
    "qwen2_5_vl": _defaults(80, 8192, 64, 8, 32768, 152064, rope_theta=1e6),
}
