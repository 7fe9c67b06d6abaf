"""Windows of attention itself, where transformers' caches have others: in pages nothing but the window hides a key.

A cache of transformers goes by ``layer_types`` and ``sliding_window`` of the configuration. Some decoders make one mask for all
their layers, which slides wherever ``sliding_window`` is stated; most older ones never make a sliding mask.
"""

from __future__ import annotations

import sys
from typing import Any

from numba_kv.config.read import words
from numba_kv.errors import UnsupportedModelError

__all__ = ["attended_windows"]

#: Model types whose decoders ask `sliding_window` alone which mask all of their layers get.
_ONE_MASK = frozenset(
    words("ministral3 mistral mixtral phi3 phi4_multimodal phimoe qwen3_moe starcoder2 voxtral_realtime_text")
)
#: What makes masks that hide more than later tokens, as decoders import it.
_MASKS = {"sliding": "create_sliding_window_causal_mask", "chunked": "create_chunked_causal_mask"}


def attended_windows(
    decoder: Any, text: Any, windows: tuple[int | None, ...], chunked: tuple[bool, ...], max_tokens: int
) -> tuple[int | None, ...]:
    """Return how many tokens a query of each layer sees; None for all before it.

    Parameters
    ----------
    decoder : torch.nn.Module
        The part of a model that holds its layers.
    text : PreTrainedConfig
        Of the decoder.
    windows : tuple of int or None
        What transformers' own cache keeps in each layer.
    chunked : tuple of bool
        Whether the window of a layer is its chunk.
    max_tokens : int
        Of a row: a window that is no shorter hides nothing.

    Raises
    ------
    UnsupportedModelError
        If the cache of a layer would slide and its attention would not: what is seen then depends on how a prompt is cut.
    """
    if text.model_type in _ONE_MASK:
        windows = (getattr(text, "sliding_window", None),) * len(windows)
    for index, (tokens, is_chunked) in enumerate(zip(windows, chunked, strict=True)):
        if tokens is None or tokens >= max_tokens or _imports(decoder, _MASKS["chunked" if is_chunked else "sliding"]):
            continue
        key = "attention_chunk_size" if is_chunked else "sliding_window"
        raise UnsupportedModelError(
            f"model: the configuration gives layer {index} of {text.model_type!r} {key} {tokens}, but its attention has no "
            f"such mask and sees all tokens of a forward; remove {key} from the configuration, or use PagedCache with "
            "attention='gather'"
        )
    return windows


def _imports(decoder: Any, name: str) -> bool:
    """Return whether the modules in which a decoder's classes are written know a name."""
    kinds = {kind for module in decoder.modules() for kind in type(module).__mro__}
    return any(hasattr(sys.modules.get(kind.__module__), name) for kind in kinds)
