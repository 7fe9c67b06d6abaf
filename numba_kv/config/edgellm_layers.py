"""Layers of an Edge-LLM configuration: kinds, capacity markers, donors.

Knows the three forms in which a file states its layers. A layer whose capacity marker is below the engine's capacity keeps a
window of that many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numba_kv.config.edgellm_recurrent import ATTENTION_TYPES, RECURRENT_TYPES, read_layer_types
from numba_kv.config.layers import AttentionLayer
from numba_kv.config.read import Reader
from numba_kv.geometry import FULL, Window

__all__ = ["MAX_LAYERS", "Layers", "full_head_dim", "read_layers"]

#: More layers than any model has: what bounds the work on a file that lies.
MAX_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The attention layers in model order, and what each decoder layer keeps; `types` is empty if no layer is recurrent."""

    attention: tuple[AttentionLayer, ...]
    types: tuple[str, ...]


def full_head_dim(reader: Reader, head_dim: int) -> int:
    """Return the head size of full-attention layers."""
    return reader.integer("global_head_dim", 1, default=head_dim)


def read_layers(reader: Reader, head_dim: int, file_capacity: int, capacity: int) -> Layers:
    """Return the layers in model order.

    Parameters
    ----------
    reader : Reader
        The top level.
    head_dim : int
        Channels of a head where a layer does not say.
    file_capacity, capacity : int
        The capacity that the file's markers refer to, and the one in force. They differ if the caller overrides it.

    Raises
    ------
    ConfigError
        If lists and counts disagree, or a marker is larger than a capacity.
    """
    count = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    listed = _layer_types(reader)
    kinds = read_layer_types(reader, listed, max(count, len(listed)))
    types = tuple(name for name in listed if name not in RECURRENT_TYPES)
    plain = kinds.count("attention") if kinds else len(types) or count
    if reader.has("kv_layer_configs"):
        layers = _per_layer(reader, listed, file_capacity, capacity)
    elif types and set(types) <= {"full_attention", "sliding_attention"}:
        layers = _by_type(reader, types, head_dim)
    else:
        layer = AttentionLayer(num_kv_heads=reader.integer("num_key_value_heads", 1), head_dim=head_dim)
        layers = (layer,) * plain
    attention = reader.integer("num_attention_layers", 0, MAX_LAYERS, len(layers) if kinds else count)
    if len(layers) != attention:
        key = "num_attention_layers" if reader.has("num_attention_layers") else "num_hidden_layers"
        source = "kv_layer_configs" if reader.has("kv_layer_configs") else "layer_types" if types else "num_hidden_layers"
        raise reader.error(key, f"{attention} does not agree with {source}, which gives {len(layers)} attention layers")
    if not layers and not kinds:
        raise reader.wrong("num_attention_layers", 0, "at least 1, as there are no recurrent layers")
    return Layers(attention=_with_donors(reader, layers), types=kinds)


def _layer_types(reader: Reader) -> tuple[str, ...]:
    if not reader.has("layer_types"):
        return ()
    types = reader.strings("layer_types")
    for index, name in enumerate(types):
        if name not in (*ATTENTION_TYPES, *RECURRENT_TYPES):
            allowed = " or ".join(repr(known) for known in (*ATTENTION_TYPES, *RECURRENT_TYPES))
            raise reader.wrong(f"layer_types[{index}]", name, allowed)
    return types


def _per_layer(reader: Reader, types: tuple[str, ...], file_capacity: int, capacity: int) -> tuple[AttentionLayer, ...]:
    entries = reader.items("kv_layer_configs")
    if len(entries) != len(types):
        raise reader.error(
            "layer_types", f"{len(types)} entries for {len(entries)} kv_layer_configs; they must be equally many"
        )
    layers = []
    for index, (name, entry) in enumerate(zip(types, entries, strict=True)):
        if name == "mamba":
            if entry is not None:
                raise reader.wrong(f"kv_layer_configs[{index}]", entry, "null, as layer_types has 'mamba' there")
            continue
        if name != "attention":
            raise reader.wrong(f"layer_types[{index}]", name, "'attention' or 'mamba', as kv_layer_configs requires")
        item = reader.nested(f"kv_layer_configs[{index}]", entry)
        layers.append(
            AttentionLayer(
                num_kv_heads=item.integer("num_kv_heads", 1),
                head_dim=item.integer("head_dim", 1),
                window=_window(item, file_capacity, capacity),
            )
        )
    return tuple(layers)


def _window(item: Reader, file_capacity: int, capacity: int) -> Window:
    """Return what the capacity marker means: 0 and the engine's own capacity stand for full attention."""
    key = "kv_cache_capacity"
    marker = item.integer(key, 0, file_capacity, 0)
    if marker in (0, file_capacity, capacity):
        return FULL
    if marker > capacity:
        raise item.wrong(key, marker, f"at most max_kv_cache_capacity {capacity}; a window cannot be larger than the capacity")
    return Window("sliding", marker)


def _by_type(reader: Reader, types: tuple[str, ...], head_dim: int) -> tuple[AttentionLayer, ...]:
    """Layers without capacity markers: the type decides the head size alone, and every layer keeps all tokens."""
    heads = reader.integer("num_key_value_heads", 1)
    full = AttentionLayer(num_kv_heads=heads, head_dim=full_head_dim(reader, head_dim))
    sliding = AttentionLayer(num_kv_heads=heads, head_dim=head_dim)
    return tuple(full if name == "full_attention" else sliding for name in types)


def _with_donors(reader: Reader, layers: tuple[AttentionLayer, ...]) -> tuple[AttentionLayer, ...]:
    key = "kv_sharing_donors"
    if not reader.has(key):
        return layers
    donors = reader.integers(key, -1, len(layers) - 1)
    if len(donors) != len(layers):
        raise reader.error(key, f"{len(donors)} entries for {len(layers)} attention layers; one per layer is required")
    for index, donor in enumerate(donors):
        if donor < 0:
            continue
        where = f"{key}[{index}]"
        if donor == index:
            raise reader.wrong(where, donor, "another layer; -1 stands for KV of the layer's own")
        if donors[donor] >= 0:
            raise reader.wrong(where, donor, f"a layer with KV of its own: it borrows from layer {donors[donor]}")
        if layers[donor] != layers[index]:
            raise reader.wrong(where, donor, f"a layer of the same heads, head size and window as layer {index}")
    return tuple(replace(layer, kv_donor=None if donor < 0 else donor) for layer, donor in zip(layers, donors, strict=True))
