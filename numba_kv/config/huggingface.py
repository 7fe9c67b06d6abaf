"""The Hugging Face dialect of ``config.json``: keys of a Transformers model -> LLMEngineConfig.

Reads both key styles (that of Transformers 5 and the older one) and configurations that hold their text model in a nested
object. Knows how a file is laid out; layers, families, rotary parameters and refusals have files of their own beside this one.
"""

from __future__ import annotations

from numba_kv.config.engine import MAX_KV_CACHE_CAPACITY, LLMEngineConfig, check_kv_cache_dtype
from numba_kv.config.huggingface_families import HEAD_DIMS, KEY_ALIASES, NESTED_DEFAULTS, family_of
from numba_kv.config.huggingface_layers import read_layers
from numba_kv.config.huggingface_per_layer import PER_LAYER, layer_readers
from numba_kv.config.huggingface_recurrent import RECURRENT_FAMILIES, read_hybrid
from numba_kv.config.huggingface_rope import read_ropes
from numba_kv.config.huggingface_support import refuse_unsupported
from numba_kv.config.limits import Limits
from numba_kv.config.read import Reader
from numba_kv.errors import ConfigError

__all__ = ["read_huggingface"]

_DEFAULT_BATCH_SIZE = 16
_DEFAULT_BATCH_TOKENS = 8192
_DEFAULT_PAGE_TOKENS = 16
_DEFAULT_DTYPE = "bfloat16"
_NESTED_KEYS = ("text_config", "llm_config", "language_config", "thinker_config")
_MAX_NESTING = 4


def read_huggingface(top: Reader, limits: Limits) -> LLMEngineConfig:
    """Return the engine configuration of a Transformers model.

    A sliding window or chunk that reaches the capacity is full attention. A nested text configuration takes from its family's
    defaults what it leaves out, because only differences are written there.

    Raises
    ------
    ConfigError
        If a key is missing, of the wrong type, out of range or ambiguous.
    UnsupportedModelError
        If the model has recurrent layers of a kind that is not known, latent attention, cross attention or no cache at all.
    """
    if limits.rank or (limits.expected_world_size or 1) > 1:
        raise ConfigError(
            f"{top.parser}: rank {limits.rank}, expected_world_size {limits.expected_world_size}: "
            "this dialect describes whole models; only Edge-LLM configurations list tensor-parallel ranks"
        )
    text, model_type = _text_model(top)
    family = family_of(model_type)
    _refuse_bare(text, family, limits)
    capacity = limits.max_kv_cache_capacity or _stated_capacity(text)
    weights_dtype = _stated_dtype(text) or _stated_dtype(top) or _DEFAULT_DTYPE
    hybrid = read_hybrid(text, family, limits, weights_dtype)
    attention = text
    if hybrid is not None:
        if layer_readers(text, family, len(hybrid.types)):
            raise text.unsupported(f"{PER_LAYER}: attention layers that differ, beside recurrent ones, are not supported yet")
        full = ("full_attention",) * hybrid.attention_layers
        attention = text.with_values({**text.values, PER_LAYER: None, "num_hidden_layers": len(full), "layer_types": full})
    has_attention = hybrid is None or hybrid.attention_layers > 0
    layers = read_layers(attention, family, capacity) if has_attention else ()
    positions = text.integer("max_position_embeddings", 1, default=capacity)
    batch = limits.max_batch_size or _DEFAULT_BATCH_SIZE
    return LLMEngineConfig(
        model_type=model_type,
        layers=layers,
        layer_types=hybrid.types if hybrid is not None else (),
        recurrent_layer=hybrid.layer if hybrid is not None else None,
        max_batch_size=batch,
        max_kv_cache_capacity=capacity,
        page_tokens=limits.page_tokens or _DEFAULT_PAGE_TOKENS,
        kv_cache_dtype=limits.kv_cache_dtype or weights_dtype,
        kv_layout=limits.kv_layout,
        max_step_tokens=limits.max_step_tokens,
        max_batch_tokens=limits.max_batch_tokens or max(_DEFAULT_BATCH_TOKENS, batch),
        num_kv_pages=limits.num_kv_pages,
        lookahead_pages=limits.lookahead_pages,
        hidden_size=text.integer_or_none("hidden_size", 1) or 0,
        vocab_size=text.integer_or_none("vocab_size", 1) or 0,
        ropes=read_ropes(attention, family, positions) if has_attention else (),
        use_bounded_swa=limits.use_bounded_swa,
        eos_token_ids=_eos_token_ids(text) or _eos_token_ids(top),
        max_verify_tokens=limits.max_verify_tokens,
        recurrent_spec_verify_mode=limits.recurrent_spec_verify_mode or "snapshot",
        conv_state_room=limits.conv_state_room,
        kept_window_pages=limits.kept_window_pages,
        kept_states=limits.kept_states,
    )


def _text_model(top: Reader) -> tuple[Reader, str]:
    """Return the object that describes the text model, refusals done on the way, and its model type."""
    reader = top
    model_type = reader.text("model_type", "")
    for _ in range(_MAX_NESTING):
        key = next((key for key in _NESTED_KEYS if reader.has(key)), None)
        # Of a composite model's own keys only those that refuse it matter: its text part states the rest.
        refuse_unsupported(reader, family_of(model_type))
        if key is None:
            break
        reader = reader.section(key)
        model_type = reader.text("model_type", model_type)
    else:
        raise top.error(_NESTED_KEYS[0], f"nested more than {_MAX_NESTING} deep")
    family = family_of(model_type)
    values = dict(reader.values)
    if reader.path:
        values = {**NESTED_DEFAULTS.get(family, {}), **values}
    for name, alias in KEY_ALIASES.get(family, {}).items():
        if name not in values and alias in values:
            values[name] = values[alias]
    return reader.with_values(values), model_type


def _refuse_bare(text: Reader, family: str, limits: Limits) -> None:
    """Name at once all that is missing where more than one key is: such a file is none of a model, or the wrong part of one."""
    wanted = () if family in RECURRENT_FAMILIES else ("num_hidden_layers", "num_attention_heads")
    missing = [key for key in wanted if not text.has(key)]
    if wanted and family not in HEAD_DIMS and not any(text.has(key) for key in ("head_dim", "kv_channels", "hidden_size")):
        missing.append("head_dim (or hidden_size)")
    if limits.max_kv_cache_capacity is None and not text.has("max_position_embeddings"):
        missing.append("max_position_embeddings (or pass max_kv_cache_capacity)")
    if len(missing) > 1:
        names = [*(["model_type"] if not family else []), *missing]
        place = f" of {text.path}" if text.path else ""
        raise ConfigError(f"{text.parser}: keys{place} are missing: {', '.join(names)}; a model's config.json states them")


def _stated_capacity(text: Reader) -> int:
    if not text.has("max_position_embeddings"):
        raise text.error("max_position_embeddings", "missing; state it, or pass max_kv_cache_capacity")
    return text.integer("max_position_embeddings", 1, MAX_KV_CACHE_CAPACITY)


def _stated_dtype(reader: Reader) -> str | None:
    """Return the element type of the weights, if a cache can have it too."""
    for key in ("dtype", "torch_dtype"):
        if reader.has(key):
            try:
                return check_kv_cache_dtype(reader.text(key))
            except ConfigError:
                if not isinstance(reader.get(key), str):
                    raise
    return None


def _eos_token_ids(reader: Reader) -> tuple[int, ...]:
    key = "eos_token_id"
    if not reader.has(key):
        return ()
    if isinstance(reader.get(key), (list, tuple)):
        return reader.integers(key)
    # Some files write -1 for "none".
    return () if reader.get(key) == -1 else (reader.integer(key),)
