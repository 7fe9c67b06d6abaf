"""States of recurrent layers in resident slots, as transformers asks a cache about them.

Row i of the model's batch has its states in slot i, so that a layer is handed a view of the pool: with one token a row, models
change states there in place and tell nobody. ::

    conv state       [B, C, columns]    of the model's element type, the newest input in the last column
    recurrent state  [B, H, D, S]       float32; [B, D, S] in Mamba-1, which has no heads; none in layers of a convolution alone
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from numba_kv.adapters.transformers_device import place_of
from numba_kv.config import Mamba1Layer
from numba_kv.errors import InputError, InteropError, ShapeError, StateError

if TYPE_CHECKING:
    from numba_kv.adapters.transformers_rows import RowStep
    from numba_kv.shared_resources import SharedResources

__all__ = ["ModelStates"]


class ModelStates:
    """The states of one model, and what a forward does with them. Borrows the pools.

    Parameters
    ----------
    resources : SharedResources
        Of the model.
    layers : frozenset of int
        Layers with a recurrent or a convolution state.

    Attributes
    ----------
    layers : frozenset of int
        Layers with a recurrent or a convolution state.
    place : torch.device
        Where they are.
    reached : set of int
        Layers that have used their states in the current step.
    """

    def __init__(self, resources: SharedResources, layers: frozenset[int]) -> None:
        caches = resources.cache_managers[0]
        layer = resources.plan.config.recurrent_layer
        self.layers = layers
        self.place = place_of(resources.device)
        self.reached: set[int] = set()
        self._step: RowStep | None = None
        self._rows = 0
        self._previous: set[int] = set()
        self._stored: set[int] = set()
        with torch.inference_mode(False):  # or nobody could change them in place later
            self._conv = {each: torch.from_dlpack(caches.conv_state(each)) for each in layers}
            self._recurrent: dict[int, Any] = {}
            if layer is not None and layer.has_recurrent_state:
                self._recurrent = {each: torch.from_dlpack(caches.recurrent_state(each)) for each in layers}
            if isinstance(layer, Mamba1Layer):
                self._recurrent = {each: pool[:, 0] for each, pool in self._recurrent.items()}

    # -- what the forward says -----------------------------------------------------------------------------------

    def begin(self, step: RowStep) -> None:
        """Note that layers will use the states of the rows of a step."""
        self._step, self._rows = step, step.rows
        self.reached.clear()

    def end(self) -> None:
        """Note that the forward is over: from now on states are shown as copies."""
        self._step = None

    def forget(self) -> None:
        """Note that no row has a state: the next ones find zeros."""
        self._rows = 0
        self._previous.clear()
        self._stored.clear()

    def resize(self, rows: int) -> None:
        """Note that there are `rows` rows now, whose states are in their slots."""
        self._rows = rows

    def close(self) -> None:
        """Let go of the pools; a second call does nothing."""
        self.end()
        self.forget()
        self._conv.clear()
        self._recurrent.clear()

    # -- what the layers do --------------------------------------------------------------------------------------

    def has_previous(self, layer: int) -> bool:
        """Return whether a layer has a state from a forward before."""
        return layer in self._previous

    def conv(self, layer: int) -> Any:
        """Return the inputs [B, C, columns] that a layer keeps, None before the first ones; see `PagedCache.get_conv_state`."""
        return self._shown(layer, self._conv, self._previous)

    def recurrent(self, layer: int) -> Any:
        """Return the states of a layer as `conv` does its inputs; None if it has a convolution alone."""
        return self._shown(layer, self._recurrent, self._stored)

    def update_conv(self, layer: int, given: Any, columns: int | None) -> Any:
        """Keep the last inputs of a layer; see `StateLayer.update_conv_state`."""
        step = self._reach("update_conv_state", layer)
        pool = self._conv[layer]
        kept_columns = given.shape[-1] if columns is None else columns
        _check("conv_states", layer, (*given.shape[:-1], kept_columns), (step.rows, *pool.shape[1:]))
        _check_kind("conv_states", given, pool)
        kept = self._view(pool)
        missing = kept_columns - given.shape[-1]
        whole = given
        if layer in self._previous:
            whole = torch.cat([kept, given], dim=-1)
        elif missing > 0:
            whole = torch.nn.functional.pad(given, (missing, 0))
        with torch.no_grad():
            kept.copy_(whole[..., -kept_columns:])
        self._previous.add(layer)
        return whole

    def update_recurrent(self, layer: int, given: Any) -> Any:
        """Store the states behind a step; see `StateLayer.update_recurrent_state`."""
        step = self._reach("update_recurrent_state", layer)
        pool = self._recurrent.get(layer)
        if pool is None:
            raise ShapeError(f"recurrent_states: given in layer {layer}, which has a convolution alone")
        _check("recurrent_states", layer, tuple(given.shape), (step.rows, *pool.shape[1:]))
        _check_kind("recurrent_states", given, pool)
        kept = self._view(pool)
        with torch.no_grad():
            kept.copy_(given)
        self._stored.add(layer)
        return kept

    # -- parts ---------------------------------------------------------------------------------------------------

    def _shown(self, layer: int, pools: dict[int, Any], filled: set[int]) -> Any:
        """Return a layer's part of a pool: what the layer may change while a forward runs, a copy otherwise."""
        pool = pools.get(layer)
        if pool is None or layer not in filled:
            return None
        if self._step is None:
            return self._view(pool).clone()
        self.reached.add(layer)
        return self._view(pool)

    def _reach(self, call: str, layer: int) -> RowStep:
        """Note that a layer has used its state, and return the step.

        Raises
        ------
        InputError
            If the layer has none.
        StateError
            If no forward of the model is running.
        """
        if layer not in self.layers:
            raise InputError(f"layer_idx: {layer} has no state; the layers of the cache that do are {sorted(self.layers)}")
        if self._step is None:
            raise StateError(
                f"{call}: a cache with recurrent states works in forwards of the model that it was made for, not in another "
                "model or in layers that are called one by one"
            )
        self.reached.add(layer)
        return self._step

    def _view(self, pool: Any) -> Any:
        """Return the states of the rows. Its own tensor each time: what is changed in place may join a graph of gradients."""
        with torch.inference_mode(False):
            return pool[: self._rows].detach()


def _check(name: str, layer: int, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise ShapeError(f"{name}: {list(shape)} given, {list(wanted)} wanted in layer {layer}; the cache is of another model")


def _check_kind(name: str, given: Any, pool: Any) -> None:
    if given.dtype is not pool.dtype:
        raise InteropError(f"{name}: {given.dtype} given, the cache was made for {pool.dtype}")
    if given.device != pool.device:
        raise InteropError(f"{name}: on {given.device}, the cache is on {pool.device}; one model on one device is wanted")
