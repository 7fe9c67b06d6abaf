"""ModelCache: what caches of a transformers model have in common: they own its memory, and are told of its forwards."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from numba_kv.adapters.transformers_device import follow_stream
from numba_kv.adapters.transformers_hooks import hook_forwards
from numba_kv.adapters.transformers_layers import make_layers
from numba_kv.batch import Batch
from numba_kv.errors import StateError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import NoReturn, TypeVar

    from numba_kv.adapters.transformers_attention import AttentionChoice
    from numba_kv.adapters.transformers_layer_kv import LayerKV
    from numba_kv.adapters.transformers_layers import LayerSteps
    from numba_kv.adapters.transformers_model import ModelLayers
    from numba_kv.adapters.transformers_states import ModelStates
    from numba_kv.shared_resources import SharedResources

    _Self = TypeVar("_Self", bound="ModelCache")

__all__ = ["ModelCache"]


class ModelCache(Cache):
    """A cache of one model. Owns its memory; `close` gives it back.

    Parameters
    ----------
    resources : SharedResources
        The pools and tables; taken over.
    kv : LayerKV
        Moves K and V; taken over.
    choice : AttentionChoice or None
        Makes the model attend over pages while a forward runs; None: it attends as it does.

    Attributes
    ----------
    resources : SharedResources
        The pools and tables.
    batch : Batch
        The rows.
    """

    def __init__(self, resources: SharedResources, kv: LayerKV, choice: AttentionChoice | None) -> None:
        self.resources = resources
        self.batch = Batch(resources)
        self._kv = kv
        self._choice = choice
        self._is_traced = False
        self._has_closed = False

    def _join(self, model: Any, layers: ModelLayers, steps: LayerSteps, states: ModelStates | None = None) -> None:
        """Make the layers, which ask `steps`, and tell those of the model's forwards."""
        self._steps = steps
        self._states = states
        capacity = self.resources.plan.config.max_kv_cache_capacity
        Cache.__init__(self, layers=make_layers(steps, layers, capacity, states))
        self._hooks = hook_forwards(model, self)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store K and V of a layer and return those that its attention reads.

        Parameters
        ----------
        key_states, value_states : torch.Tensor [B, H, n, D]
            Of the model's element type, on its device; any strides.
        layer_idx : int
            Number of the layer.

        Returns
        -------
        keys, values : torch.Tensor [B, H, m, D]
            What the layer's attention is to be handed. For the model's own, the m and what they begin with are as
            `get_mask_sizes` said before.

        Raises
        ------
        InputError, ShapeError, InteropError
            If K and V are not those of this model, or the batch is another than before.
        CapacityError
            If a row would be longer than `max_tokens`, or there are more than `max_batch` rows.
        StateError
            After `close`, or if an earlier forward did not reach all layers (`reset` makes it usable again). Or, if the model
            has recurrent layers or attention reads pages, outside of a forward of the model.

        Stream: enqueues on torch's current one.
        """
        if self._is_traced:  # the operator of the layer's attention stores them
            return key_states, value_states
        moved: tuple[Any, Any] = self._update(layer_idx, key_states, value_states)
        return moved

    @torch.compiler.disable
    def _update(self, layer_idx: int, key_states: Any, value_states: Any) -> tuple[Any, Any]:
        self._check_open()
        self._follow(key_states.device)
        return self._steps.update(layer_idx, key_states, value_states)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, or the resources were closed."""
        return self._has_closed or self.resources.is_closed

    def close(self) -> None:
        """Give the memory back and take the hooks off the model; a second call does nothing. Stream: waits."""
        self._hooks()
        self._attend_as_before()
        if not self._has_closed:
            if self._states is not None:
                self._states.close()
            self._kv.close()
            self.resources.close()
            self._has_closed = True

    def __enter__(self: _Self) -> _Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else self._state()
        return f"{type(self).__name__}({len(self.layers)} layers, {state})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(f"{type(self).__name__} cannot be copied or pickled: it stands for memory of this process")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(None)

    def _check_open(self) -> None:
        if self.is_closed:
            raise StateError(f"{type(self).__name__} is closed")

    def _attend_as_before(self) -> None:
        """Let the model choose its attention as it did, also behind a forward that an interrupt has ended."""
        if self._choice is not None:
            self._choice.stop()

    def _forward_begins(self, mask: Any, shape: tuple[int, int] | None) -> None:
        if self._states is not None:
            self._follow(self._states.place)
        self._steps.start(mask, shape)
        if self._choice is not None:
            self._choice.start()

    def _follow(self, place: Any) -> None:
        """Move the resources to torch's current stream, unless a decode step has its own."""
        if place.type == "cuda" and self._kv.stream is None:
            follow_stream(self.resources, place)

    def _forward_ends(self, has_failed: bool) -> None:
        self._attend_as_before()
        self._steps.stop(has_failed)

    @abstractmethod
    def _state(self) -> str:
        """Return what is in it, for people."""
