"""Attention layers of a Hugging Face configuration: kinds, windows, heads, shared KV.

Knows the keys of a layer and what may be ambiguous about them. What a family means by a missing ``layer_types`` is in
`numba_kv.config.huggingface_families`.
"""

from __future__ import annotations

from numba_kv.config.huggingface_families import ATTENDS_TWICE_HIDDEN, FAMILIES, HEAD_DIMS, MAX_LAYERS, Kind, periodic_kinds
from numba_kv.config.huggingface_per_layer import PER_LAYER, layer_readers
from numba_kv.config.layers import AttentionLayer
from numba_kv.config.read import INT64_MAX, Reader, show, words
from numba_kv.errors import ConfigError
from numba_kv.geometry import FULL, Window

__all__ = ["head_dims", "read_layers"]

_KINDS: dict[str, Kind] = {"full_attention": "full", "sliding_attention": "sliding", "chunked_attention": "chunked"}
_WINDOW_KEYS: dict[Kind, str] = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}
_OTHER_WINDOW_KEYS = (
    "attention_window",
    "attention_window_size",
    "interleaved_sliding_window",
    "local_attention",
    "local_window_size",
    "sliding_window_size",
    "window_size",
)
_OTHER_KV_HEAD_KEYS = words("kv_n_heads multi_query multi_query_group_num n_head_kv n_kv_heads num_kv_heads num_query_groups")
_OTHER_HEAD_DIM_KEYS = ("attention_head_dim", "d_head", "d_kv", "head_size")


def read_layers(reader: Reader, family: str, capacity: int) -> tuple[AttentionLayer, ...]:
    """Return the attention layers; a window of `capacity` tokens or more is full attention.

    Raises
    ------
    ConfigError
        If a key is wrong, or leaves open which layers have a window.
    """
    count = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    own = layer_readers(reader, family, count)
    kinds = _kinds(reader, family, count)
    donors = _donors(reader, kinds)
    alike = _Keys(reader, family)
    layers = []
    for index, kind in enumerate(kinds):
        keys = _Keys(own[index], family) if index in own else alike
        size = keys.sizes.get(kind)
        if not size and kind != "full":
            key = _WINDOW_KEYS[kind]
            if size == 0:
                raise keys.reader.wrong(key, size, f"an integer from 1, but layer {index} has {kind} attention")
            raise keys.reader.error(key, f"null or missing, but layer_types[{index}] is '{kind}_attention', which needs it")
        window = FULL if size is None or size >= capacity else Window(kind, size)
        kv_heads, head_dim = keys.full if kind == "full" else keys.windowed
        layers.append(AttentionLayer(num_kv_heads=kv_heads, head_dim=head_dim, window=window, kv_donor=donors[index]))
    return tuple(layers)


class _Keys:
    """What the keys of a layer say, whichever kind it is of: KV heads and head size, and the sizes of windows."""

    def __init__(self, reader: Reader, family: str) -> None:
        self.reader = reader
        self.windowed = _geometry(reader, family)
        self.full = _full_geometry(reader, family)
        # Read even where the family has no use for them. 0 is how some write that there is no window.
        self.sizes = {kind: reader.integer_or_none(key, 0, INT64_MAX) for kind, key in _WINDOW_KEYS.items()}


def _kinds(reader: Reader, family: str, count: int) -> tuple[Kind, ...]:
    return _stated_kinds(reader, count) if reader.has("layer_types") else _derived_kinds(reader, family, count)


def _head_dim(reader: Reader, family: str, heads: int) -> int:
    is_wide = family in ATTENDS_TWICE_HIDDEN  # their kv_channels are those of a head that reads the hidden states alone
    for key in ("head_dim",) if is_wide else ("head_dim", "kv_channels"):
        if reader.has(key):
            return reader.integer(key, 1)
    if "head_dim" not in reader.values and family in HEAD_DIMS:
        return HEAD_DIMS[family]
    hidden, name = reader.integer("hidden_size", 1), "hidden_size"
    if is_wide:
        hidden, name = 2 * hidden, "twice hidden_size"
    if hidden % heads:
        raise reader.error("head_dim", f"missing, and {name} {hidden} is not a multiple of num_attention_heads {heads}")
    for key in _OTHER_HEAD_DIM_KEYS:
        if reader.has(key) and reader.get(key) != hidden // heads:
            raise reader.error(
                "head_dim", f"missing, while {key} is {show(reader.get(key))}, not hidden_size / num_attention_heads"
            )
    return hidden // heads


def _kv_heads(reader: Reader, family: str, heads: int) -> int:
    if family == "falcon":
        return _falcon_kv_heads(reader, heads)
    if family == "gpt_bigcode":
        return 1 if reader.boolean("multi_query", True) else heads
    if reader.has("num_key_value_heads"):
        kv_heads = reader.integer("num_key_value_heads", 1)
        if heads % kv_heads:
            raise reader.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
        return kv_heads
    for key in _OTHER_KV_HEAD_KEYS:
        if reader.has(key) and reader.get(key) is not False:
            raise reader.error("num_key_value_heads", f"missing, while {key} hints at grouped heads; state num_key_value_heads")
    return heads


def _falcon_kv_heads(reader: Reader, heads: int) -> int:
    if reader.boolean("new_decoder_architecture", False):
        return reader.integer("num_kv_heads", 1, default=heads)
    return 1 if reader.boolean("multi_query", True) else heads


def _stated_kinds(reader: Reader, count: int) -> tuple[Kind, ...]:
    names = reader.strings("layer_types")
    for index, name in enumerate(names):
        if name not in _KINDS:
            raise reader.wrong(f"layer_types[{index}]", name, " or ".join(repr(n) for n in _KINDS))
    if len(names) != count:
        raise reader.error("layer_types", f"{len(names)} entries, but num_hidden_layers is {count}; they must agree")
    return tuple(_KINDS[name] for name in names)


def _derived_kinds(reader: Reader, family: str, count: int) -> tuple[Kind, ...]:
    rule = FAMILIES.get(family)
    if rule is not None:
        return rule(reader, count)
    if reader.get("use_sliding_window") is not False and reader.has("sliding_window"):
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            if reader.has(key):
                return periodic_kinds(count, reader.integer(key, 1))
        raise _ambiguous(reader, "sliding_window", family)
    for key in ("attention_chunk_size", *_OTHER_WINDOW_KEYS):
        if reader.has(key):
            raise _ambiguous(reader, key, family)
    return periodic_kinds(count, 1)


def _ambiguous(reader: Reader, key: str, family: str) -> ConfigError:
    return reader.error(
        key,
        f"{show(reader.get(key))} leaves open which layers have a window: model_type {family!r} is not a known family; "
        "add layer_types to the configuration",
    )


def head_dims(reader: Reader, family: str) -> tuple[int, int]:
    """Return the head size of layers with a window and of full layers.

    Raises
    ------
    UnsupportedModelError
        If single layers state different ones: then a kind of layers has no rotary table.
    """
    windowed, full = _geometry(reader, family)[1], _full_geometry(reader, family)[1]
    if not reader.has(PER_LAYER):
        return windowed, full
    count = reader.integer("num_hidden_layers", 1, MAX_LAYERS)
    own = {index: _Keys(keys, family) for index, keys in layer_readers(reader, family, count).items()}
    found: dict[bool, set[int]] = {False: set(), True: set()}
    for index, kind in enumerate(_kinds(reader, family, count)):
        is_full = kind == "full"
        keys = own.get(index)
        stated = (windowed, full)[is_full] if keys is None else (keys.full if is_full else keys.windowed)[1]
        found[is_full].add(stated)
    for is_full, sizes in found.items():
        if len(sizes) > 1:
            which = "full layers" if is_full else "layers with a window"
            raise reader.unsupported(f"{PER_LAYER}: head_dim of {which} is {sorted(sizes)}; only one of each kind rotates")
    return next(iter(found[False]), windowed), next(iter(found[True]), full)


def _geometry(reader: Reader, family: str) -> tuple[int, int]:
    heads = reader.integer("num_attention_heads", 1)
    return _kv_heads(reader, family, heads), _head_dim(reader, family, heads)


def _full_geometry(reader: Reader, family: str) -> tuple[int, int]:
    """Return KV heads and head size of full layers: Gemma 4's differ from those of its sliding layers.

    Where layers state keys of their own, that is the only way in which Gemma 4's differ.
    """
    kv_heads, head_dim = _geometry(reader, family)
    if PER_LAYER in reader.values:
        return kv_heads, head_dim
    if family == "gemma4" and "global_head_dim" not in reader.values:
        head_dim = 512
    head_dim = reader.integer("global_head_dim", 1, default=head_dim)
    if reader.boolean("attention_k_eq_v", False):
        kv_heads = reader.integer("num_global_key_value_heads", 1, default=kv_heads)
    return kv_heads, head_dim


def _donors(reader: Reader, kinds: tuple[Kind, ...]) -> list[int | None]:
    """Return whose KV each layer reads: the last `num_kv_shared_layers` borrow from the last owner of their kind."""
    shared = reader.integer("num_kv_shared_layers", 0, len(kinds) - 1, default=0)
    owners = len(kinds) - shared
    donors: list[int | None] = [None] * owners
    for index in range(owners, len(kinds)):
        same = [owner for owner in range(owners) if kinds[owner] == kinds[index]]
        if not same:
            allowed = f"possible: no layer before {owners} has {kinds[index]} attention as layer {index} has"
            raise reader.wrong("num_kv_shared_layers", shared, allowed)
        donors.append(same[-1])
    return donors
