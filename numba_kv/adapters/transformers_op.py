"""Attention over pages as one operator of torch, which torch.compile puts into its graph without looking inside.

What an operator is called with are tensors and numbers, so a cache is named by one. It stores K and V and attends at once: a
compiler may drop or move what only stores.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from numba_kv.errors import StateError

if TYPE_CHECKING:
    from numba_kv.adapters.transformers_cache import ModelCache

__all__ = ["number_of"]

#: Caches that are alive, by the number that stands for each in a graph.
_CACHES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def number_of(cache: ModelCache) -> int:
    """Return the number that stands for a cache, as long as it lives."""
    _CACHES[id(cache)] = cache
    return id(cache)


@torch.library.custom_op(
    "numba_kv::attend",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? sinks, int cache, int layer, float? scale, float? cap) -> Tensor",
)
def _attend(query: Any, key: Any, value: Any, sinks: Any, cache: int, layer: int, scale: Any, cap: Any) -> Any:
    found = _CACHES.get(cache)
    if found is None:
        raise StateError("attention: the cache of this graph is gone")
    return found._store_and_attend(layer, query, key, value, scale, cap, sinks)


@_attend.register_fake
def _shape(query: Any, key: Any, value: Any, sinks: Any, cache: int, layer: int, scale: Any, cap: Any) -> Any:
    rows, heads, tokens, dim = query.shape
    return query.new_empty((rows, tokens, heads, dim))
