"""Layers of a cache as transformers asks about them: those with K and V in pages, with states in slots, and with both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

if TYPE_CHECKING:
    from numba_kv.adapters.transformers_model import ModelLayers
    from numba_kv.adapters.transformers_states import ModelStates

__all__ = ["LayerSteps", "PagedLayer", "PagedStateLayer", "StateLayer", "make_layers"]


class LayerSteps(Protocol):
    """What layers ask, and what is told about forwards."""

    def start(self, mask: Any, shape: tuple[int, int] | None) -> None:
        """Note that the model's decoder begins, with its attention mask, and its rows and columns if they are known."""

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


class StateLayer(LinearAttentionCacheLayerMixin):
    """A layer with a recurrent state and a convolution, or with a convolution alone. Borrows the states; keeps nothing itself.

    Parameters
    ----------
    states : ModelStates
        Of the cache.
    index : int
        Number of the layer.
    """

    is_compileable = False
    is_croppable = False
    number_of_states = 1
    record_past = False

    def __init__(self, states: ModelStates, index: int) -> None:
        self._states = states
        self._state_index = index

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """Whether there is a state from a forward before, by number of the state: there is one."""
        return {0: self._states.has_previous(self._state_index)}

    @property
    def conv_states(self) -> dict[int, Any]:
        """Inputs that the convolution keeps, by number of the state; see `PagedCache.get_conv_state`."""
        return {0: self._states.conv(self._state_index)}

    @property
    def recurrent_states(self) -> dict[int, Any]:
        """States by number; see `PagedCache.get_recurrent_state`."""
        return {0: self._states.recurrent(self._state_index)}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: everything is allocated with the cache."""

    def update_conv_state(
        self, conv_states: Any, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Any:
        """Keep the last of a layer's inputs; see `PagedCache.update_conv_state`."""
        return self._states.update_conv(self._state_index, conv_states, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """Store the states behind a step; see `PagedCache.update_recurrent_state`."""
        return self._states.update_recurrent(self._state_index, recurrent_states)


class PagedStateLayer(PagedLayer, StateLayer):
    """A layer with attention and a state side by side."""

    def __init__(self, forward: LayerSteps, states: ModelStates, index: int, window: int | None, capacity: int) -> None:
        PagedLayer.__init__(self, forward, index, window, capacity, is_croppable=False)
        StateLayer.__init__(self, states, index)


def make_layers(steps: LayerSteps, layers: ModelLayers, capacity: int, states: ModelStates | None) -> list[Any]:
    """Return the layers of a cache, which ask `steps` and `states`; `capacity` is the most tokens of a row."""
    made: list[Any] = []
    for index, (window, owns) in enumerate(zip(layers.windows, layers.owners, strict=True)):
        if states is None or index not in states.layers:
            paged = PagedLayer(steps, index, window, capacity, layers.croppable[index]) if owns else DummyLayer()
            made.append(paged)
        elif owns:
            made.append(PagedStateLayer(steps, states, index, window, capacity))
        else:
            made.append(StateLayer(states, index))
    return made
