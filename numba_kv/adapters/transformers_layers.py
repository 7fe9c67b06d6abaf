"""Layers of a cache as transformers asks about them: PagedLayer has K and V in pages, StateLayer recurrent states in slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

if TYPE_CHECKING:
    from numba_kv.adapters.transformers_model import ModelLayers
    from numba_kv.adapters.transformers_states import ModelStates

__all__ = ["LayerSteps", "PagedLayer", "StateLayer", "StateSteps", "make_layers"]


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


class StateSteps(Protocol):
    """What layers with a state tell."""

    def reach_state(self, layer: int) -> None:
        """Note that a layer's state is about to be that behind the step."""


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
        self._is_croppable = is_croppable
        self.is_sliding = window is not None
        self.sliding_window = window

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return self._is_croppable

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
    """A layer with a state and a convolution's inputs. Borrows forward steps and states; keeps views of them.

    What transformers calls a previous state is there from the first forward on until the rows are forgotten.

    Parameters
    ----------
    forward : StateSteps
        Of the cache.
    states : ModelStates
        The pools.
    index : int
        Number of the layer.
    """

    is_compileable = False
    is_croppable = False

    def __init__(self, forward: StateSteps, states: ModelStates, index: int) -> None:
        LinearAttentionCacheLayerMixin.__init__(self)
        self._steps = forward
        self._states = states
        self._index = index
        states.tell(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: everything is allocated with the cache."""

    def update_conv_state(
        self, conv_states: Any, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Any:
        """Keep the last of a layer's inputs, and return them behind those that were kept before.

        Parameters
        ----------
        conv_states : torch.Tensor [B, C, n]
            The inputs of the step's columns.
        conv_kernel_size : int, optional
            Columns that are kept; default n.

        Returns
        -------
        torch.Tensor [B, C, m]
            Where nothing was kept: `conv_states`, behind zeros if they are fewer than `conv_kernel_size`.

        Raises
        ------
        StateError, ShapeError, InteropError
            If no forward of the model is running, or the inputs are not those of this layer.
        """
        columns = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        kept = self._states.conv(self._index, conv_states, columns)
        self._steps.reach_state(self._index)
        missing = columns - conv_states.shape[-1]
        whole = conv_states
        if self.has_previous_state[0]:
            whole = torch.cat([kept, conv_states], dim=-1)
        elif missing > 0:
            whole = torch.nn.functional.pad(conv_states, (missing, 0))
        with torch.no_grad():
            kept.copy_(whole[..., -columns:])
        self.conv_states[0], self.has_previous_state[0] = kept, True
        return whole

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """Store the states [B, H, D, S] behind a step, and return where they are.

        Raises
        ------
        StateError, ShapeError, InteropError
            As `update_conv_state`.
        """
        kept = self._states.recurrent(self._index, recurrent_states)
        self._steps.reach_state(self._index)
        with torch.no_grad():
            kept.copy_(recurrent_states)
        self.recurrent_states[0] = kept
        return kept

    def forget(self) -> None:
        """Note that no row has a state."""
        self.has_previous_state[0] = False
        self.conv_states[0] = self.recurrent_states[0] = None

    def resize(self, rows: int) -> None:
        """Note that the batch has `rows` rows."""
        for views in (self.conv_states, self.recurrent_states):
            view = views[0]
            if view is not None:
                with torch.inference_mode(False):
                    views[0] = view.as_strided((rows, *view.shape[1:]), view.stride())


class PagedStateLayer(StateLayer, PagedLayer):
    """A layer with attention and a state side by side."""

    def __init__(
        self,
        forward: Any,
        states: ModelStates,
        index: int,
        window: int | None,
        capacity: int,
    ) -> None:
        PagedLayer.__init__(self, forward, index, window, capacity, is_croppable=False)
        StateLayer.__init__(self, forward, states, index)


def make_layers(steps: Any, layers: ModelLayers, capacity: int, states: ModelStates | None) -> list[Any]:
    """Return the layers of a cache, which ask `steps`; `capacity` is the most tokens of a row."""
    made: list[Any] = []
    for index, (window, owns) in enumerate(zip(layers.windows, layers.owners, strict=True)):
        if states is not None and index in states.layers:
            if owns:
                made.append(PagedStateLayer(steps, states, index, window, capacity))
            else:
                made.append(StateLayer(steps, states, index))
        elif owns:
            made.append(PagedLayer(steps, index, window, capacity, layers.croppable[index]))
        else:
            made.append(DummyLayer())
    return made
