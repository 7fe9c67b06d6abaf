"""What an Edge-LLM configuration says of speculative decoding: role, mode, widths, and the section of each mode.

Knows the keys and the rules that one file can break. What base and draft must agree on is checked where both are known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numba_kv.config.read import Reader, words
from numba_kv.config.spec_decode import BLOCK_MODES, SPEC_MODES
from numba_kv.geometry import INT32_MAX

__all__ = ["SPEC_KEYS", "SpecKeys", "read_role", "read_spec_keys"]

#: Optional keys of speculative engines, so that a misspelt one must not pass.
SPEC_KEYS = words(
    """eagle_hidden_state_layers dflash_config jetspec_config dspark_config base_model_hidden_size draft_vocab_size
    kv_sharing_map assistant_hidden_size"""
)
_ROLES = ("llm", "base", "draft", "dllm")
_GEMMA_BASES = words("gemma4 gemma4_text gemma4_unified gemma4_unified_text")
_GEMMA_DRAFT = "gemma4_assistant"
#: What an assistant states of itself; the default of each is the opposite.
_ASSISTANT_FLAGS = {
    "shares_target_kv": True,
    "has_own_kv_cache": False,
    "constant_draft_positions": True,
    "returns_feedback_hidden": True,
}
#: Block size where a file does not say.
_BLOCK_SIZES = {"dflash": 16, "jetspec": 16, "dspark": 7}
#: What the second version of DFlash is made of; nothing else is built.
_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_DFLASH2_FLAGS = {"is_causal": False, "supports_probabilistic_sampling": True}
_DFLASH2_LAYERS = 5


@dataclass(frozen=True, kw_only=True)
class SpecKeys:
    """The speculative part of one engine's configuration.

    Attributes
    ----------
    mode : str
        One of `SPEC_MODES`.
    width : int
        Tokens of a row that the engine takes at once: verified by a base, drafted by a draft.
    block_size, version : int
        0 where the mode has none.
    target_layers : tuple of int
        Layers of the base whose hidden states the draft reads; empty where the file does not list them.
    base_hidden_size : int
        Channels of what the draft reads; 0 where a base does not say.
    samples_from_anchor : bool
        See `SpecDecodeConfig`.
    sharing_map : tuple of (int, int)
        Layer of the draft and the base's layer whose KV it reads.
    """

    mode: str
    width: int
    block_size: int = 0
    version: int = 0
    target_layers: tuple[int, ...] = ()
    base_hidden_size: int = 0
    samples_from_anchor: bool = True
    sharing_map: tuple[tuple[int, int], ...] = ()


def read_role(reader: Reader, wanted: str) -> str:
    """Return the mode of an engine that is wanted as the "base" or the "draft" of a pair, or as "llm", alone.

    Raises
    ------
    ConfigError
        If the file has another role, or role and mode disagree.
    UnsupportedModelError
        If the model is a diffusion model, or one of a pair and wanted alone.
    """
    role = reader.choice("engine_role", _ROLES, "llm")
    mode = reader.choice("spec_decode_type", ("none", *SPEC_MODES), "none")
    speculative = role in ("base", "draft")
    if speculative and mode == "none":
        raise reader.wrong("spec_decode_type", mode, f"a speculative type, which engine_role {role!r} requires")
    if not speculative and mode != "none":
        raise reader.wrong("spec_decode_type", mode, f"'none', which engine_role {role!r} requires")
    if role == "dllm":
        raise reader.unsupported("engine_role 'dllm': diffusion models are not supported yet")
    if wanted == "llm" and role == "draft":
        raise reader.wrong("engine_role", role, "the role of a base model; load_deployment_config loads a draft with its base")
    if wanted == "llm" and role == "base":
        raise reader.unsupported(f"spec_decode_type {mode!r}: load_deployment_config loads the engines of a speculative pair")
    if role != wanted:
        raise reader.wrong("engine_role", role, f"{wanted!r}, as which the engine is loaded")
    return mode


def read_spec_keys(reader: Reader, role: str, mode: str) -> SpecKeys:
    """Return the speculative part of an engine of role "base" or "draft".

    Raises
    ------
    ConfigError
        If a key is missing, of the wrong type or out of range, or if keys disagree.
    """
    layers = reader.integer("num_hidden_layers", 1)
    width_key = "max_verify_tree_size" if role == "base" else "max_draft_tree_size"
    width = reader.section("builder_config").integer(width_key, 1)
    hidden_key = "base_model_hidden_size"
    hidden = reader.integer(hidden_key, 1) if role == "draft" else reader.integer(hidden_key, 0, default=0)
    found = SpecKeys(mode=mode, width=width, base_hidden_size=hidden)
    # The layers that a list names are those of the base, so that a draft's own count says nothing about them.
    top = layers - 1 if role == "base" else INT32_MAX
    if mode == "eagle3" and role == "base" and reader.has("eagle_hidden_state_layers"):
        return _with_layers(found, reader, "eagle_hidden_state_layers", top)
    if mode == "gemma4_mtp":
        return _gemma(reader, role, found)
    if mode not in BLOCK_MODES:
        return found
    section = _section(reader, mode)
    version = section.integer("version", 1, 2, 1) if mode == "dflash" else 0
    found = replace(
        found,
        block_size=section.integer("block_size", 1, default=_BLOCK_SIZES[mode]),
        version=version,
        samples_from_anchor=section.boolean("sample_from_anchor", True) if mode == "dspark" else True,
    )
    section.integer("mask_token_id", 0, default=0)
    if mode == "jetspec" and not section.boolean("causal_head", True):
        raise section.wrong("causal_head", False, "true, which 'jetspec' requires")
    if mode == "dspark":
        section.integer("markov_rank", 0, default=0)
    if mode == "dspark" and role == "draft" and not found.samples_from_anchor and width == INT32_MAX:
        raise reader.error(f"builder_config.{width_key}", f"{width} leaves no room for the anchor")
    found = _with_layers(found, section, "target_layer_ids", top)
    if version == 2:
        _check_dflash2(section, found, layers if role == "draft" else _DFLASH2_LAYERS)
    return found


def _section(reader: Reader, mode: str) -> Reader:
    """Return where the keys of a block mode stand; JetSpec has two more places for its own."""
    for key in {"jetspec": ("jetspec_config", "dflash_config")}.get(mode, (f"{mode}_config",)):
        if reader.has(key):
            return reader.section(key)
    return reader if mode == "jetspec" else reader.section(f"{mode}_config")


def _with_layers(found: SpecKeys, section: Reader, key: str, top: int) -> SpecKeys:
    layers = section.integers(key, 0, top)
    if not layers and found.mode in BLOCK_MODES:
        raise section.wrong(key, list(layers), "a list of at least one layer")
    for place, layer in enumerate(layers):
        if layer in layers[:place]:
            raise section.wrong(f"{key}[{place}]", layer, "a layer that is not listed yet")
    return replace(found, target_layers=layers)


def _check_dflash2(section: Reader, found: SpecKeys, draft_layers: int) -> None:
    for key, value in _DFLASH2.items():
        section.integer(key, value, value, value)
    for flag, stated in _DFLASH2_FLAGS.items():
        if section.boolean(flag, stated) is not stated:
            raise section.wrong(flag, not stated, f"{str(stated).lower()}, which version 2 requires")
    if not 2 <= found.block_size <= 16:
        raise section.wrong("block_size", found.block_size, "from 2 to 16, which version 2 requires")
    if len(found.target_layers) != _DFLASH2_LAYERS:
        raise section.error("target_layer_ids", f"{len(found.target_layers)} layers; version 2 requires {_DFLASH2_LAYERS}")
    if draft_layers != _DFLASH2_LAYERS:
        raise section.error("version", f"2 requires a draft of {_DFLASH2_LAYERS} layers, not {draft_layers}")


def _gemma(reader: Reader, role: str, found: SpecKeys) -> SpecKeys:
    """Read the keys of Gemma 4: its draft is an assistant that reads the base's KV."""
    model, hidden = reader.text("model", "") or reader.text("model_type", ""), reader.integer("hidden_size", 1)
    if role == "base":
        if model not in _GEMMA_BASES:
            raise reader.wrong("model", model, " or ".join(map(repr, _GEMMA_BASES)))
        if found.base_hidden_size not in (0, hidden):
            raise reader.wrong("base_model_hidden_size", found.base_hidden_size, f"0 or hidden_size {hidden}")
        return found
    if model != _GEMMA_DRAFT:
        raise reader.wrong("model", model, repr(_GEMMA_DRAFT))
    for key, wanted in _ASSISTANT_FLAGS.items():
        if reader.boolean(key, not wanted) is not wanted:
            raise reader.wrong(key, not wanted, f"{str(wanted).lower()}, which {_GEMMA_DRAFT!r} requires")
    assistant = reader.integer("assistant_hidden_size", 0, default=0)
    if assistant not in (0, hidden):
        raise reader.wrong("assistant_hidden_size", assistant, f"0 or hidden_size {hidden}")
    pairs = []
    for place, entry in enumerate(reader.items("kv_sharing_map")):
        item = reader.nested(f"kv_sharing_map[{place}]", entry)
        pairs.append((item.integer("assistant_layer", 0), item.integer("target_attention_layer", 0)))
    return replace(found, sharing_map=tuple(pairs))
