"""The TensorRT Edge-LLM dialect of ``config.json`` -> LLMEngineConfig.

Knows the keys of a built engine's configuration and the reference's rules. Stricter than the reference where that hides a
mistake (numbers are integers in range, enums are known, lists agree with counts) and wider where it has a limit of its own:
several windows in one model, FP8 with windows, any page size, a scalar end token.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba_kv.config.edgellm_layers import MAX_LAYERS, full_head_dim, read_layers
from numba_kv.config.edgellm_ranks import apply_rank
from numba_kv.config.edgellm_recurrent import RECURRENT_KEYS, read_recurrent_layer, read_verify_mode
from numba_kv.config.edgellm_rope import read_ropes
from numba_kv.config.edgellm_speculative import SPEC_KEYS, SpecKeys, read_role, read_spec_keys
from numba_kv.config.engine import MAX_KV_CACHE_CAPACITY, LLMEngineConfig
from numba_kv.config.layers import AttentionLayer
from numba_kv.config.limits import Limits
from numba_kv.config.read import INT64_MAX, Reader, words
from numba_kv.geometry import INT32_MAX, MAX_POOL_PAGES, ceil_div, reference_private_pages

__all__ = ["check_pool_retention", "prefers_bounded_swa", "read_edgellm", "read_edgellm_member"]

#: Tokens of a page, unless the caller asks for others; page counts in the file are in this unit always.
REFERENCE_PAGE_TOKENS = 128

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3", "fp32": "float32"}
_BUILDER_KEYS = (
    "max_batch_size",
    "max_input_len",
    "max_kv_cache_capacity",
    "max_kv_pool_pages",
    "num_swa_pages",
    "ragged_backend",
    "max_lora_rank",
    "max_verify_tree_size",
    "max_draft_tree_size",
    "tp_size",
    "spec_base",
    "spec_draft",
)
#: Optional keys that change the caches, so that a misspelt one must not pass.
_TOP_KEYS = ("engine_role", "kv_layer_configs", "kv_sharing_donors", "rank_configs", "spec_decode_type", *RECURRENT_KEYS)
_LEGACY_FLAGS = words(
    """eagle_base is_eagle3_draft mtp_base is_mtp_draft mtp_tree_base dflash_base dflash_tree_base is_dflash_draft
    jetspec_base jetspec_tree_base is_jetspec_draft dspark_base is_dspark_draft gemma4_mtp_base gemma4_mtp_draft
    shares_target_kv"""
)


@dataclass(frozen=True, kw_only=True)
class _Builder:
    """Limits the engine was built with; pages are of `REFERENCE_PAGE_TOKENS` tokens."""

    max_batch_size: int
    max_input_len: int
    max_kv_cache_capacity: int
    max_kv_pool_pages: int
    num_swa_pages: int
    max_lora_rank: int


def read_edgellm(top: Reader, limits: Limits) -> LLMEngineConfig:
    """Return the engine configuration that a TensorRT Edge-LLM file describes.

    A capacity marker below the engine's capacity is a sliding window of that many tokens. The reference allows one window size
    and no FP8 beside it; here any number of sizes and every element type are accepted, and ``num_swa_pages`` is checked against
    the largest. ``max_kv_pool_pages`` becomes `num_kv_pages`, converted if `page_tokens` differs.

    Raises
    ------
    ConfigError
        If a key is missing, misspelt, of the wrong type or out of range, or if keys disagree.
    UnsupportedModelError
        If the engine is a diffusion model, or one of a speculative pair: see `read_edgellm_member`.
    """
    top.refuse_near_misses(_TOP_KEYS)
    reader = apply_rank(top, limits)
    read_role(reader, "llm")
    return _read_engine(reader, limits, "llm", 1)


def read_edgellm_member(top: Reader, limits: Limits, role: str) -> tuple[LLMEngineConfig, SpecKeys]:
    """Return one engine of a speculative pair, the "base" or the "draft", and what its file says of the pair.

    The vocabulary of a draft may be missing, its rank overrides are applied (the reference has none for drafts), and both may
    have windows, which the reference refuses.

    Raises
    ------
    ConfigError, UnsupportedModelError
        As `read_edgellm`, and if the file is not one of that role.
    """
    top.refuse_near_misses((*_TOP_KEYS, *SPEC_KEYS))
    reader = apply_rank(top, limits)
    keys = read_spec_keys(reader, role, read_role(reader, role))
    return _read_engine(reader, limits, role, keys.width + (role == "draft" and not keys.samples_from_anchor)), keys


def check_pool_retention(top: Reader, limits: Limits, may_keep: bool) -> None:
    """Refuse a pool of more pages than all rows take in an engine whose pages are not kept from one request to the next.

    Raises
    ------
    ConfigError
        As the reference, for which such pages are a mistake.
    """
    reader = apply_rank(top, limits)
    builder = _read_builder(reader)
    least = builder.max_batch_size * ceil_div(builder.max_kv_cache_capacity, REFERENCE_PAGE_TOKENS)
    if not may_keep and builder.max_kv_pool_pages != least:
        raise reader.section("builder_config").wrong(
            "max_kv_pool_pages", builder.max_kv_pool_pages, f"{least}: more than all rows take is of use only if pages are kept"
        )


def _read_engine(reader: Reader, limits: Limits, role: str, role_tokens: int) -> LLMEngineConfig:
    """Return the engine of a file whose role is known; `role_tokens` is what its role appends to a row at once."""
    builder = _read_builder(reader)
    head_dim = reader.integer("head_dim", 1)
    capacity = limits.max_kv_cache_capacity or builder.max_kv_cache_capacity
    found = read_layers(reader, head_dim, builder.max_kv_cache_capacity, capacity)
    layers = found.attention
    _check_windows(reader, builder, layers, role)
    _check_inputs(reader)
    batch = limits.max_batch_size or builder.max_batch_size
    page_tokens = limits.page_tokens or REFERENCE_PAGE_TOKENS
    # A smaller capacity asked for by the caller also bounds the prompt.
    max_input_len = min(builder.max_input_len, capacity)
    return LLMEngineConfig(
        model_type=reader.text("model", "") or reader.text("model_type", ""),
        layers=layers,
        layer_types=found.types,
        recurrent_layer=read_recurrent_layer(reader, limits) if found.types else None,
        max_batch_size=batch,
        max_kv_cache_capacity=capacity,
        page_tokens=page_tokens,
        kv_cache_dtype=_kv_cache_dtype(reader, limits),
        kv_layout=limits.kv_layout,
        max_step_tokens=limits.max_step_tokens,
        max_batch_tokens=limits.max_batch_tokens or _max_batch_tokens(reader, batch, max(max_input_len, role_tokens)),
        num_kv_pages=limits.num_kv_pages or _pool_pages(builder, page_tokens),
        lookahead_pages=limits.lookahead_pages,
        hidden_size=reader.integer("hidden_size", 1),
        vocab_size=_draft_vocab_size(reader) if role == "draft" else reader.integer("vocab_size", 1),
        max_lora_rank=builder.max_lora_rank,
        num_deepstack_features=reader.integer("num_deepstack_features", 0, default=0),
        ropes=read_ropes(reader, head_dim, full_head_dim(reader, head_dim)) if layers else (),
        use_bounded_swa=limits.use_bounded_swa,
        max_input_len=max_input_len,
        reduced_vocab_size=reader.integer("reduced_vocab_size", 0, default=0),
        eos_token_ids=_eos_token_ids(reader),
        max_verify_tokens=limits.max_verify_tokens,
        recurrent_spec_verify_mode=read_verify_mode(reader, limits),
        conv_state_room=limits.conv_state_room,
        kept_window_pages=limits.kept_window_pages,
        kept_states=limits.kept_states,
    )


def prefers_bounded_swa(num_swa_pages: int, max_kv_pool_pages: int) -> bool:
    """Return whether the reference would keep an engine's windows in their own pool, by the page counts of its file.

    Only if that pool is the smaller one: a tie is decided for full rows, which need no rotation. The rule is there for those
    who want the reference's choice. Here windows are bounded unless `use_bounded_swa` is False, because a ring takes about
    half of the reference's reservation and is never larger than a full row.

    Parameters
    ----------
    num_swa_pages, max_kv_pool_pages : int
        The builder's page counts, of `REFERENCE_PAGE_TOKENS` tokens.
    """
    return num_swa_pages < max_kv_pool_pages


def _read_builder(reader: Reader) -> _Builder:
    section = reader.section("builder_config")
    section.refuse_near_misses(_BUILDER_KEYS)
    reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    batch = section.integer("max_batch_size", 1)
    input_len = section.integer("max_input_len", 1)
    capacity = section.integer("max_kv_cache_capacity", 1, MAX_KV_CACHE_CAPACITY)
    row_pages = ceil_div(capacity, REFERENCE_PAGE_TOKENS)
    if batch * row_pages > MAX_POOL_PAGES:
        raise section.wrong(
            "max_batch_size", batch, f"possible: rows of {row_pages} pages each need more than {MAX_POOL_PAGES} pages"
        )
    pool = section.integer("max_kv_pool_pages", 1, INT64_MAX)
    least = batch * row_pages
    if not least <= pool <= MAX_POOL_PAGES:
        allowed = f"from {least} (max_batch_size {batch} x {row_pages} pages of {REFERENCE_PAGE_TOKENS}) to {MAX_POOL_PAGES}"
        raise section.wrong("max_kv_pool_pages", pool, allowed)
    if input_len > capacity:
        raise section.wrong("max_input_len", input_len, f"at most max_kv_cache_capacity {capacity}")
    section.choice("ragged_backend", ("entry_padded_compatibility",))
    if batch * input_len > INT32_MAX:
        raise section.wrong(
            "max_input_len", input_len, f"possible with max_batch_size {batch}: their product exceeds {INT32_MAX}"
        )
    return _Builder(
        max_batch_size=batch,
        max_input_len=input_len,
        max_kv_cache_capacity=capacity,
        max_kv_pool_pages=pool,
        num_swa_pages=section.integer("num_swa_pages", 0, default=0),
        max_lora_rank=section.integer("max_lora_rank", 0, default=0),
    )


def _kv_cache_dtype(reader: Reader, limits: Limits) -> str:
    found = reader.text("kv_cache_dtype")
    if found == "int8":
        raise reader.error("kv_cache_dtype", "'int8' is not supported: its quantisation scales have no place in the pools")
    name = _DTYPES[reader.choice("kv_cache_dtype", _DTYPES)]
    return limits.kv_cache_dtype or name


def _check_windows(reader: Reader, builder: _Builder, layers: tuple[AttentionLayer, ...], role: str) -> None:
    """Check what the reference asks of an engine with reduced layers."""
    windows = {layer.window.tokens for layer in layers if not layer.window.is_full}
    section = reader.section("builder_config")
    flags = [(reader, key) for key in _LEGACY_FLAGS] + [(section, "spec_base"), (section, "spec_draft")]
    speculative = [owner.key_path(key) for owner, key in flags if owner.boolean(key, False)]
    if not windows:
        return
    if speculative and role == "llm":
        raise reader.unsupported(
            f"{speculative[0]} true: a speculative engine with windows states its engine_role; load_deployment_config loads it"
        )
    needed = builder.max_batch_size * reference_private_pages(max(windows), REFERENCE_PAGE_TOKENS)
    if builder.num_swa_pages < needed:
        raise section.wrong(
            "num_swa_pages",
            builder.num_swa_pages,
            f"at least {needed}: max_batch_size {builder.max_batch_size} rows with a window of {max(windows)} tokens",
        )


def _check_inputs(reader: Reader) -> None:
    """Check what is stated about further inputs of the engine: per-layer embeddings and images."""
    counts = [reader.integer(key, 0, default=0) for key in ("num_ple_inputs", "ple_hidden_size")]
    if reader.boolean("ple_enabled", False):
        layers = reader.integer("num_hidden_layers", 1)
        if counts[0] != layers:
            raise reader.wrong("num_ple_inputs", counts[0], f"num_hidden_layers {layers}, which ple_enabled requires")
        if not counts[1]:
            raise reader.wrong("ple_hidden_size", counts[1], "above 0, which ple_enabled requires")
    elif any(counts):
        raise reader.error(
            "ple_enabled", f"false, but num_ple_inputs and ple_hidden_size are {counts[0]} and {counts[1]}, not 0"
        )
    image = reader.integer("image_token_id", -1, default=-1)
    reader.integer("audio_token_id", -1, default=-1)
    if reader.boolean("use_vision_bidirectional_attention", False) and image < 0:
        raise reader.wrong("image_token_id", image, "0 or more, which use_vision_bidirectional_attention requires")


def _draft_vocab_size(reader: Reader) -> int:
    return reader.integer("draft_vocab_size" if reader.has("draft_vocab_size") else "vocab_size", 0, default=0)


def _max_batch_tokens(reader: Reader, batch: int, row_tokens: int) -> int:
    if batch * row_tokens > INT32_MAX:
        raise reader.error(
            "builder_config.max_input_len", f"{row_tokens} tokens x {batch} rows exceeds {INT32_MAX}; pass max_batch_tokens"
        )
    return batch * row_tokens


def _pool_pages(builder: _Builder, page_tokens: int) -> int:
    """Return the pool in pages of `page_tokens`: as many tokens, and every row at full length as the file guarantees."""
    converted = ceil_div(builder.max_kv_pool_pages * REFERENCE_PAGE_TOKENS, page_tokens)
    return max(converted, builder.max_batch_size * ceil_div(builder.max_kv_cache_capacity, page_tokens))


def _eos_token_ids(reader: Reader) -> tuple[int, ...]:
    key = "eos_token_id"
    if reader.get(key) is None:
        return ()
    return reader.integers(key) if isinstance(reader.get(key), (list, tuple)) else (reader.integer(key),)
