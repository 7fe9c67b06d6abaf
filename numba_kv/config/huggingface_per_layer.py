"""Keys that a Hugging Face configuration states for single layers: ``per_layer_config``, layer number -> changed keys.

Knows how the changes lie over the keys of the whole model. Does not know what a layer makes of them.
"""

from __future__ import annotations

from numba_kv.config.huggingface_support import refuse_unsupported
from numba_kv.config.read import Reader, words

__all__ = ["PER_LAYER", "layer_readers"]

PER_LAYER = "per_layer_config"

#: Keys that a cache depends on. A layer may change others, such as the width of its feed-forward part.
_CACHE_KEYS = frozenset(
    words(
        """attention_chunk_size head_dim hidden_size kv_channels kv_lora_rank num_attention_heads num_key_value_heads
        sliding_window v_head_dim"""
    )
)


def layer_readers(reader: Reader, family: str, count: int) -> dict[int, Reader]:
    """Return a reader of every layer whose cache is not as the rest of the file says, by the layer's number.

    Parameters
    ----------
    reader : Reader
        The text part of the configuration.
    family : str
        Its family.
    count : int
        Layers.

    Raises
    ------
    ConfigError
        If a key is not the number of a layer, or two are the same; if a value is not an object.
    UnsupportedModelError
        If a layer leaves parts of it out, or has a cache of a kind that is not supported.
    """
    if not reader.has(PER_LAYER):
        return {}
    section = reader.section(PER_LAYER)
    found: dict[int, Reader] = {}
    seen: dict[int, object] = {}
    for key in section.values:
        number = _layer_number(key)
        if number is None or number >= count:
            raise reader.wrong(PER_LAYER, key, f"the number of a layer, from 0 to {count - 1}")
        if number in seen:
            raise reader.error(PER_LAYER, f"layer {number} is there twice, as {seen[number]!r} and {key!r}")
        seen[number] = key
        changes = section.nested(str(key), section.values[key])
        if changes.get("skip"):
            raise reader.unsupported(f"{changes.key_path('skip')}: layers that leave parts out are not supported yet")
        own = {name: value for name, value in changes.values.items() if name in _CACHE_KEYS}
        if own:
            whole = {name: reader.values[name] for name in _CACHE_KEYS if name in reader.values}
            refuse_unsupported(changes.with_values({**whole, **own}), family)
            found[number] = changes.with_values({**reader.values, **own})
    return found


def _layer_number(key: object) -> int | None:
    """Return the number that a key of a JSON object writes, perhaps with zeros before it."""
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        return None
    text = str(key)
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None
