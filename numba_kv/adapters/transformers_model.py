"""What a transformers model wants of its cache, read from its configuration: kinds of layers, windows, heads.

Heads and head sizes are read by `numba_kv.config`, like those of any ``config.json``. Which layers slide, and over how many
tokens, is asked of transformers itself, because its masks are made for just that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from numba_kv.adapters.transformers_hooks import decoder_of
from numba_kv.adapters.transformers_sizes import KVSizes, read_sizes
from numba_kv.adapters.transformers_windows import attended_windows
from numba_kv.config import LLMEngineConfig, load_engine_config
from numba_kv.dtypes import KV_CACHE_DTYPES
from numba_kv.errors import ConfigError, InputError, UnsupportedModelError
from numba_kv.geometry import FULL, Window, check_count

__all__ = ["ModelLayers", "read_model"]

_FULL = "full_attention"
_RECURRENT, _BOTH = ("linear_attention", "conv"), ("hybrid", "hybrid_sliding")
#: To a cache of transformers a chunked layer is a sliding one: only the mask knows chunks.
_CHUNKED = "chunked_attention"
_SLIDING = ("sliding_attention", _CHUNKED)
_NO_CACHE = "dummy"
_INDEXED = "indexed_attention"


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The layers of a model as its cache sees them.

    Attributes
    ----------
    config : LLMEngineConfig
        What is allocated. A window that reaches the capacity is full attention there.
    windows : tuple of int or None
        Window of each layer in tokens, as transformers' caches have it or, where pages are read, as its attention has it; None
        for full attention.
    owners : tuple of bool
        Whether each layer stores K and V of its own.
    donors : frozenset of int
        Layers whose K and V later layers of the same forward read again.
    croppable : tuple of bool
        Whether tokens can be taken back in each layer: always where the pages of all tokens are kept.
    sizes : KVSizes or None
        Those of K and V where they differ; `config` has the halves that are stored instead.
    states : frozenset of int
        Layers with a recurrent state, or with a convolution's.
    """

    config: LLMEngineConfig
    windows: tuple[int | None, ...]
    owners: tuple[bool, ...]
    donors: frozenset[int]
    croppable: tuple[bool, ...]
    sizes: KVSizes | None = None
    states: frozenset[int] = frozenset()


def read_model(
    model: Any,
    *,
    max_batch: int,
    max_tokens: int,
    page_tokens: int,
    max_rewind_tokens: int,
    max_batch_tokens: int | None,
    num_kv_pages: int | None,
    reads_pages: bool = False,
    is_packed: bool = False,
) -> ModelLayers:
    """Return the layers of a transformers model, and the configuration of its caches.

    With `reads_pages`, pages are what attention reads: layers that see their chunk keep that, and K and V are of equal size.
    Without, layers that see their chunk keep as many tokens before each as a chunk has. With `is_packed`, a row of the model
    holds tokens of many sequences.

    Raises
    ------
    InputError
        If `model` is no transformers model, or a limit is no positive integer.
    ConfigError
        If the configuration leaves something open, or its element type cannot be cached.
    UnsupportedModelError
        If the model has layers that keep something else than K and V, or than attention over pages can read.
    """
    find = getattr(getattr(model, "config", None), "get_text_config", None)
    if find is None or not hasattr(model, "register_forward_pre_hook"):
        raise InputError(f"model: {type(model).__name__} is not a transformers model (PreTrainedModel)")
    check_count("max_batch", max_batch)
    check_count("max_tokens", max_tokens)
    check_count("max_rewind_tokens", max_rewind_tokens, 0)
    if max_batch_tokens is not None:
        check_count("max_batch_tokens", max_batch_tokens)
    kind = str(model.dtype).removeprefix("torch.")
    if kind not in KV_CACHE_DTYPES:
        raise ConfigError(f"model: its dtype is {kind}; a cache can be {', '.join(KV_CACHE_DTYPES)}")
    text = find(decoder=True)
    types, windows = _layer_types(text)
    chunked = tuple(reads_pages and each == _CHUNKED for each in types)
    if reads_pages:
        windows = attended_windows(decoder_of(model), text, windows, chunked, max_tokens)
    stated = _plain(text)
    sizes = read_sizes(stated)
    if reads_pages and sizes is not None and not sizes.are_equal:
        raise UnsupportedModelError(_unreadable(text, sizes))
    config = load_engine_config(
        stated if sizes is None else sizes.stated(stated),
        max_batch_size=max_batch,
        max_kv_cache_capacity=max_tokens,
        page_tokens=page_tokens,
        kv_cache_dtype=kind,
        max_step_tokens=min(max(1, max_rewind_tokens), max_tokens),
        max_batch_tokens=max_batch * max_tokens if max_batch_tokens is None else max_batch_tokens,
        num_kv_pages=num_kv_pages,
        recurrent_state_dtype="float32",  # models compute states so, and hand them to their cache as they are
        conv_state_dtype=kind,
    )
    _check_kinds(config, types, is_packed)
    if sizes is not None and sizes.doubles_windows:
        config = _doubled(config, windows)
    if sizes is not None and sizes.are_equal:
        sizes = None
    return replace(_combined(config, types, windows, chunked, max_rewind_tokens > 0), sizes=sizes)


def _plain(text: Any) -> dict[str, Any]:
    """Return a configuration as the content of a ``config.json``."""
    values: dict[str, Any] = text.to_dict()
    values["model_type"] = text.model_type
    if values.get("num_hidden_layers") is None:  # some count blocks of several layers
        values["num_hidden_layers"] = getattr(text, "num_hidden_layers", None)
    return values


def _unreadable(text: Any, sizes: KVSizes) -> str:
    """Return why attention cannot read the pages of a model."""
    if sizes.is_latent:
        kept = "caches a latent for each token, of which its layers make K and V"
    else:
        kept = f"has K of {sizes.keys} and V of {sizes.values} channels"
    return f"model: {text.model_type!r} {kept}; attention over pages cannot read that, use PagedCache with attention='gather'"


def _doubled(config: LLMEngineConfig, windows: tuple[int | None, ...]) -> LLMEngineConfig:
    """Give layers with a window twice the heads."""
    layers = tuple(
        layer if tokens is None else replace(layer, num_kv_heads=2 * layer.num_kv_heads)
        for layer, tokens in zip(config.layers, windows, strict=True)
    )
    return replace(config, layers=layers)


def _layer_types(text: Any) -> tuple[list[str], tuple[int | None, ...]]:
    """Return what transformers' own caches make of a configuration: a name and a window for each layer."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    types, options = get_layer_types_and_kwargs(text)
    strange = sorted(set(types) - {_FULL, *_SLIDING, *_RECURRENT, *_BOTH, _NO_CACHE})
    if _INDEXED in strange:
        raise UnsupportedModelError("model: its layers keep keys of an indexer besides, which is not supported here yet")
    if strange:
        raise UnsupportedModelError(f"model: layers of type {', '.join(strange)} are not supported here yet")
    for index, each in enumerate(options):
        if each.get("number_of_states", 1) != 1:
            raise UnsupportedModelError(
                f"model: layer {index} has {each['number_of_states']} convolutions, one is supported beside its state"
            )
    return types, tuple(each.get("sliding_window") for each in options)


def _check_kinds(config: LLMEngineConfig, types: list[str], is_packed: bool) -> None:
    """Refuse a model whose layers keep something else than its configuration says, and states where none can be kept."""
    name = config.model_type
    if is_packed and config.num_recurrent_layers:
        raise UnsupportedModelError(
            f"model: {name!r} has layers with recurrent states, which would run through the sequences of a packed row; "
            "use PagedCache"
        )
    if not config.layers:
        raise UnsupportedModelError(f"model: {name!r} has no attention, so it has no pages; use transformers' own cache")
    stated = config.layer_types or ("attention",) * len(config.layers)
    kinds = {**dict.fromkeys(_RECURRENT, "recurrent"), **dict.fromkeys(_BOTH, "both")}
    if len(stated) != len(types):
        raise UnsupportedModelError(f"model: {name!r} has {len(types)} layers, but its configuration describes {len(stated)}")
    for index, (said, each) in enumerate(zip(stated, types, strict=True)):
        wanted = ("none", "attention") if each == _NO_CACHE else (kinds.get(each, "attention"),)
        if said not in wanted:
            raise UnsupportedModelError(f"model: layer {index} of {name!r} is {each!r}, but its configuration says {said!r}")


def _combined(
    config: LLMEngineConfig, types: list[str], windows: tuple[int | None, ...], chunked: tuple[bool, ...], keeps_more: bool
) -> ModelLayers:
    """Give the layers of `config` the windows that transformers has; they decide what a forward is handed."""
    capacity = config.max_kv_cache_capacity
    places = [index for index, place in enumerate(config.attention_indices) if place >= 0]
    donors = dict(zip(places, (layer.kv_donor for layer in config.layers), strict=True))
    layers = []
    for index, layer in zip(places, config.layers, strict=True):
        owner = index if layer.kv_donor is None else places[layer.kv_donor]
        tokens = windows[owner]
        if types[index] == _NO_CACHE and layer.kv_donor is None:
            raise UnsupportedModelError(
                f"model: layer {index} reads K and V of another layer, but the configuration does not say whose"
            )
        window = FULL if tokens is None or tokens >= capacity else Window("chunked" if chunked[owner] else "sliding", tokens)
        layers.append(replace(layer, window=window))
    full = {index for index, layer in zip(places, layers, strict=True) if layer.window.is_full}
    return ModelLayers(
        config=replace(config, layers=tuple(layers), ropes=()),  # the model has rotary tables of its own
        windows=windows,
        owners=tuple(index in donors and donors[index] is None for index in range(len(types))),
        donors=frozenset(places[donor] for donor in donors.values() if donor is not None),
        croppable=tuple(keeps_more or index in full or index not in donors for index in range(len(types))),
        states=frozenset(index for index, place in enumerate(config.recurrent_indices) if place >= 0),
    )
