"""Recurrent layers of a Hugging Face configuration: which decoder layers have a state, and its sizes.

Knows how each hybrid family lists its layers and names its sizes. What a family's file leaves out is asked for by name: Only
what a null or a missing list means is taken from the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from numba_kv.config.huggingface_families import MAX_LAYERS
from numba_kv.config.limits import Limits
from numba_kv.config.read import Reader, words
from numba_kv.config.recurrent import (
    GatedDeltaNetLayer,
    Mamba1Layer,
    Mamba2Layer,
    RecurrentLayer,
    ShortConvLayer,
    check_state_dtype,
)

__all__ = ["RECURRENT_FAMILIES", "Hybrid", "read_hybrid"]

_ATTENTION, _RECURRENT, _BOTH, _NONE = "attention", "recurrent", "both", "none"
_NAMES = {
    "full_attention": _ATTENTION,
    "attention": _ATTENTION,
    "linear_attention": _RECURRENT,
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "conv": _RECURRENT,
    "hybrid": _BOTH,
    "mlp": _NONE,
    "moe": _NONE,
}
_LETTERS = {"M": _RECURRENT, "*": _ATTENTION, "-": _NONE, "E": _NONE}
#: Keys that state a state's element type, by whoever wrote the file.
_STATE_DTYPE_KEYS = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")

Types = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """What a file says of decoder layers: `types` of each, and the recurrent layer."""

    types: Types
    layer: RecurrentLayer | None

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return sum(name in (_ATTENTION, _BOTH) for name in self.types)


def read_hybrid(reader: Reader, family: str, limits: Limits, weights_dtype: str) -> Hybrid | None:
    """Return the decoder layers of a hybrid or recurrent model; None if the family has none.

    Parameters
    ----------
    reader : Reader
        The text part of the configuration.
    family : str
        Its family.
    limits : Limits
        What the caller asks for.
    weights_dtype : str
        Element type of the weights: that of convolution states.

    Raises
    ------
    ConfigError
        If a key is missing, of the wrong type or out of range, or if keys disagree.
    """
    if family not in RECURRENT_FAMILIES:
        return None
    list_types, read_sizes = RECURRENT_FAMILIES[family]
    types = list_types(reader)
    if not any(name in (_RECURRENT, _BOTH) for name in types):
        return Hybrid(types=types, layer=None)
    stated = next((key for key in _STATE_DTYPE_KEYS if reader.has(key)), None)
    state_dtype = "float32" if stated is None else check_state_dtype(f"{reader.parser}: {stated}", reader.get(stated))
    dtypes = {
        "recurrent_state_dtype": limits.recurrent_state_dtype or state_dtype,
        "conv_state_dtype": limits.conv_state_dtype or (weights_dtype if weights_dtype != "float8_e4m3" else "bfloat16"),
    }
    return Hybrid(types=types, layer=read_sizes(reader, dtypes))


def _count(reader: Reader) -> int:
    return reader.integer("num_hidden_layers", 1, MAX_LAYERS)


def _listed(reader: Reader, key: str, allowed: tuple[str, ...]) -> Types:
    names = reader.strings(key)
    for index, name in enumerate(names):
        if name not in allowed:
            raise reader.wrong(f"{key}[{index}]", name, " or ".join(repr(known) for known in allowed))
    if reader.has("num_hidden_layers") and len(names) != _count(reader):
        raise reader.error(key, f"{len(names)} entries, but num_hidden_layers is {_count(reader)}; they must agree")
    if not 1 <= len(names) <= MAX_LAYERS:
        raise reader.error(key, f"{len(names)} entries; 1 to {MAX_LAYERS} layers are wanted")
    return tuple(_NAMES[name] for name in names)


_TWO = ("linear_attention", "full_attention", "mamba", "attention")


def _every_layer(reader: Reader) -> Types:
    return (_RECURRENT,) * _count(reader)


def _both_in_every_layer(reader: Reader) -> Types:
    return (_BOTH,) * _count(reader)


def _last_of_few(reader: Reader) -> Types:
    if reader.has("layer_types"):
        return _listed(reader, "layer_types", _TWO)
    period = reader.integer("full_attention_interval", 1, default=4)
    return tuple(_RECURRENT if (index + 1) % period else _ATTENTION for index in range(_count(reader)))


def _olmo_hybrid_types(reader: Reader) -> Types:
    """OLMo Hybrid: attention in every fourth layer, and in the last one of a model that has no fourth."""
    if reader.has("layer_types"):
        return _listed(reader, "layer_types", _TWO)
    count = _count(reader)
    places = range(3, count, 4) or (count - 1,)
    return tuple(_ATTENTION if index in places else _RECURRENT for index in range(count))


def _lfm2_types(reader: Reader) -> Types:
    """LFM2: listed by kind, or by where attention is, which then is everywhere unless that is stated."""
    if reader.has("layer_types"):
        return _lfm2_listed_types(reader)
    return _at_indices(reader, "full_attn_idxs", range(_count(reader)))


def _lfm2_listed_types(reader: Reader) -> Types:
    return _listed(reader, "layer_types", ("conv", "full_attention"))


def _zamba2_types(reader: Reader) -> Types:
    """Zamba2: every layer has a state, and those called hybrid have attention besides."""
    key = "layers_block_type" if reader.has("layers_block_type") or not reader.has("layer_types") else "layer_types"
    return _listed(reader, key, ("mamba", "linear_attention", "hybrid"))


def _listed_or_recurrent(reader: Reader) -> Types:
    for key in ("layer_types", "layers_block_type"):
        if reader.has(key):
            return _listed(reader, key, _TWO)
    return _every_layer(reader)


def _attention_at_indices(reader: Reader) -> Types:
    return _at_indices(reader, "attn_layer_indices", ())


def _at_indices(reader: Reader, key: str, default: Sequence[int]) -> Types:
    """Return attention in the layers that a key lists, `default` if it is missing, and states in the others."""
    count = _count(reader)
    chosen = reader.integers(key, 0, count - 1) if reader.has(key) else default
    return tuple(_ATTENTION if index in chosen else _RECURRENT for index in range(count))


def _attention_at_offset(reader: Reader) -> Types:
    period = reader.integer("attn_layer_period", 1)
    offset = reader.integer("attn_layer_offset", 0, period - 1)
    return tuple(_ATTENTION if index % period == offset else _RECURRENT for index in range(_count(reader)))


def _blocks(reader: Reader) -> Types:
    """Nemotron-H: every block is a layer, feed-forward ones too; older files write one letter a block."""
    for key in ("layers_block_type", "layer_types"):
        if reader.has(key):
            return _listed(reader.with_values({**reader.values, "num_hidden_layers": None}), key, (*_TWO, "mlp", "moe"))
    key = "hybrid_override_pattern"
    if not reader.has(key):
        raise reader.error("layers_block_type", "missing; a list of the blocks, or hybrid_override_pattern, is required")
    pattern = reader.text(key)
    for letter in pattern:
        if letter not in _LETTERS:
            raise reader.wrong(key, letter, " or ".join(repr(known) for known in _LETTERS))
    if not 1 <= len(pattern) <= MAX_LAYERS:
        raise reader.error(key, f"{len(pattern)} letters; 1 to {MAX_LAYERS} layers are wanted")
    return tuple(_LETTERS[letter] for letter in pattern)


def _mamba2(
    heads: str,
    dim: str,
    state: str,
    groups: str,
    kernel: str,
    *,
    inner: str = "",
    expand: str = "",
    aliases: Mapping[str, str] | None = None,
    derives: bool = False,
) -> Callable[[Reader, dict[str, str]], RecurrentLayer]:
    """Return what reads a Mamba-2 layer from keys of these names; with `derives`, a missing size of heads follows."""

    def read(reader: Reader, dtypes: dict[str, str]) -> RecurrentLayer:
        values = dict(reader.values)
        for name, alias in (aliases or {}).items():
            if alias in values:
                values[name] = values[alias]
        reader = reader.with_values(values)
        num_heads, num_groups = reader.integer(heads, 1), reader.integer(groups, 1)
        channels = None
        if inner and reader.has(inner):
            channels = reader.integer(inner, 1)
        elif expand and reader.has(expand):
            channels = reader.integer(expand, 1) * reader.integer("hidden_size", 1)
        is_open = reader.get(dim) == "auto" or (derives and not reader.has(dim))
        if is_open and channels is not None and channels % num_heads == 0:
            head_dim = channels // num_heads
        else:
            head_dim = reader.integer(dim, 1)
        if channels is not None and channels != num_heads * head_dim:
            raise reader.error(dim, f"{head_dim} x {heads} {num_heads} is not the {channels} channels of the model")
        if num_heads % num_groups:
            raise reader.wrong(groups, num_groups, f"a divisor of {heads} {num_heads}")
        state_size = reader.integer(state, 1)
        return Mamba2Layer(
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=state_size,
            num_groups=num_groups,
            conv_dim=_channels(reader, heads, num_heads * head_dim + 2 * num_groups * state_size),
            conv_kernel=reader.integer(kernel, 1),
            **dtypes,
        )

    return read


def _mamba1(expand: str, state: str, kernel: str, *, inner: str = "") -> Callable[[Reader, dict[str, str]], RecurrentLayer]:
    """Return what reads a Mamba-1 layer from keys of these names."""

    def read(reader: Reader, dtypes: dict[str, str]) -> RecurrentLayer:
        if inner and reader.has(inner):
            channels = reader.integer(inner, 1)
        else:
            channels = _channels(reader, expand, reader.integer(expand, 1) * reader.integer("hidden_size", 1))
        return Mamba1Layer(
            num_heads=1,
            head_dim=channels,
            state_size=reader.integer(state, 1),
            conv_dim=channels,
            conv_kernel=reader.integer(kernel, 1),
            **dtypes,
        )

    return read


def _gated_delta_net(reader: Reader, dtypes: dict[str, str]) -> RecurrentLayer:
    key_heads, heads = reader.integer("linear_num_key_heads", 1), reader.integer("linear_num_value_heads", 1)
    if heads % key_heads:
        raise reader.wrong("linear_num_value_heads", heads, f"a multiple of linear_num_key_heads {key_heads}")
    key_dim, value_dim = reader.integer("linear_key_head_dim", 1), reader.integer("linear_value_head_dim", 1)
    return GatedDeltaNetLayer(
        num_heads=heads,
        num_key_heads=key_heads,
        head_dim=key_dim,
        state_size=value_dim,
        conv_dim=_channels(reader, "linear_num_value_heads", 2 * key_heads * key_dim + heads * value_dim),
        conv_kernel=reader.integer("linear_conv_kernel_dim", 1),
        **dtypes,
    )


def _short_conv(reader: Reader, dtypes: dict[str, str]) -> RecurrentLayer:
    return ShortConvLayer(
        conv_dim=reader.integer("hidden_size", 1),
        conv_kernel=reader.integer("conv_L_cache", 1),
        conv_state_dtype=dtypes["conv_state_dtype"],
    )


def _channels(reader: Reader, key: str, channels: int) -> int:
    """Return a product of sizes if it is a number of channels that memory can have."""
    if channels > 2**31 - 1:
        raise reader.error(key, f"{channels} channels follow from it and its neighbours; at most {2**31 - 1} are possible")
    return channels


_BAMBA = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", expand="mamba_expand")
_FALCON_H1 = _mamba2(
    "mamba_n_heads",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_n_groups",
    "mamba_d_conv",
    inner="mamba_d_ssm",
    expand="mamba_expand",
)
_NEMOTRON_H = _mamba2(
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "n_groups",
    "conv_kernel",
    aliases={"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"},
)
_ZAMBA2 = _mamba2(
    "n_mamba_heads",
    "mamba_headdim",
    "mamba_d_state",
    "mamba_ngroups",
    "mamba_d_conv",
    expand="mamba_expand",
    derives=True,
)
_MAMBA2 = _mamba2("num_heads", "head_dim", "state_size", "n_groups", "conv_kernel", expand="expand")

#: Family -> how it lists its layers, and how it states the sizes of the recurrent ones.
RECURRENT_FAMILIES: Mapping[str, tuple[Callable[[Reader], Types], Callable[[Reader, dict[str, str]], RecurrentLayer]]] = {
    **dict.fromkeys(words("qwen3_5 qwen3_5_moe qwen3_next"), (_last_of_few, _gated_delta_net)),
    "bamba": (_attention_at_indices, _BAMBA),
    "falcon_h1": (_both_in_every_layer, _FALCON_H1),
    "granitemoehybrid": (_listed_or_recurrent, _BAMBA),
    "jamba": (_attention_at_offset, _mamba1("mamba_expand", "mamba_d_state", "mamba_d_conv")),
    "lfm2": (_lfm2_types, _short_conv),
    "lfm2_moe": (_lfm2_listed_types, _short_conv),
    "mamba": (_every_layer, _mamba1("expand", "state_size", "conv_kernel", inner="intermediate_size")),
    "mamba2": (_every_layer, _MAMBA2),
    "nemotron_h": (_blocks, _NEMOTRON_H),
    "olmo_hybrid": (_olmo_hybrid_types, _gated_delta_net),
    "zamba2": (_zamba2_types, _ZAMBA2),
}
