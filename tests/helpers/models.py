"""Models small enough to allocate in a test: layers by their windows and heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from numba_kv.config.engine import LLMEngineConfig
from numba_kv.config.layers import AttentionLayer
from numba_kv.geometry import FULL, Window


def window(of: Window | int | None) -> Window:
    """Return a window: tokens of a sliding one, or None for full attention."""
    if isinstance(of, Window):
        return of
    return FULL if of is None else Window("sliding", of)


def chunked(tokens: int) -> Window:
    """Return chunked attention over chunks of `tokens`."""
    return Window("chunked", tokens)


def tiny_config(
    *windows: Window | int | None,
    heads: tuple[int, int] | Iterable[tuple[int, int]] = (1, 8),
    donors: Mapping[int, int] | None = None,
    **limits: Any,
) -> LLMEngineConfig:
    """Return a model with one layer a window: 2 rows of 64 tokens, pages of 4, unless `limits` says otherwise.

    `heads` is (H, D) of every layer, or one pair a layer; `donors` maps a layer to the one whose KV it borrows.
    """
    layers = windows or (None,)
    pairs = list(heads)
    if isinstance(pairs[0], int):
        pairs = [tuple(pairs)] * len(layers)
    return LLMEngineConfig(
        layers=tuple(
            AttentionLayer(num_kv_heads=h, head_dim=d, window=window(w), kv_donor=(donors or {}).get(i))
            for i, (w, (h, d)) in enumerate(zip(layers, pairs, strict=True))
        ),
        **{"max_batch_size": 2, "max_kv_cache_capacity": 64, "page_tokens": 4, "max_batch_tokens": 64, **limits},
    )
