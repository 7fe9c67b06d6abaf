"""PagedLayer: one layer of a paged cache, as transformers asks a cache about its layers."""

from __future__ import annotations

from typing import Any, Protocol

from transformers.cache_utils import CacheLayerMixin

__all__ = ["LayerSteps", "PagedLayer"]


class LayerSteps(Protocol):
    """What layers ask, and what is told about forwards."""

    def start(self, mask: Any) -> None:
        """Note that the model's decoder begins, with its attention mask."""

    def stop(self, has_failed: bool) -> None:
        """Note that it has ended."""

    def update(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """Store K and V of a layer and return what its attention is handed."""

    def length(self, layer: int) -> Any:
        """Return the padded length of a layer: a number, or a tensor where the host does not know it."""

    def mask_length(self, layer: int) -> int:
        """Return the padded length of a layer for which masks are made."""


class PagedLayer(CacheLayerMixin):
    """A full or sliding layer. Borrows the forward steps; keeps nothing itself.

    Parameters
    ----------
    forward : LayerSteps
        Of the cache.
    index : int
        Number of the layer.
    window : int or None
        Tokens that a query sees, its own included; None for all.
    capacity : int
        Most tokens of a row.
    is_croppable : bool
        Whether tokens can be taken back.
    """

    is_compileable = False
    supports_early_init = False

    def __init__(self, forward: LayerSteps, index: int, window: int | None, capacity: int, is_croppable: bool) -> None:
        super().__init__()
        self._forward = forward
        self._index = index
        self._capacity = capacity
        self.is_initialized = True  # everything is allocated with the cache
        self.is_croppable = is_croppable
        self.is_sliding = window is not None
        self.sliding_window = window

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Do nothing: everything is allocated with the cache."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store K and V of the layer; see `PagedCache.update`."""
        return self._forward.update(self._index, key_states, value_states)

    def get_seq_length(self) -> Any:
        """Return the tokens of a row, pads included; a tensor in forwards that run without the host."""
        return self._forward.length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next `query_length` queries are handed, and the padded index of the first one."""
        length = self._forward.mask_length(self._index)
        first = 0 if self.sliding_window is None else max(0, length - self.sliding_window + 1)
        return length - first + query_length, first

    def get_max_length(self) -> int:
        """Return the most tokens that the layer can be handed."""
        return self._capacity if self.sliding_window is None else min(self._capacity, self.sliding_window)
