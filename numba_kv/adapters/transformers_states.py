"""States of recurrent layers in resident slots, as transformers asks a cache about them.

Row i of the model's batch has its states in slot i, so that what a layer is handed is a view of the pool: models change
convolution states there in place, and tell nobody. ::

    conv state       [B, C, columns]    of the model's element type, the newest input in the last column
    recurrent state  [B, H, D, S]       float32; [B, D, S] in models without heads; none beside a convolution alone
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from numba_kv.errors import InteropError, ShapeError

if TYPE_CHECKING:
    from numba_kv.adapters.transformers_layers import StateLayer
    from numba_kv.shared_resources import SharedResources

__all__ = ["ModelStates"]


class ModelStates:
    """The states of one model. Borrows the pools.

    Parameters
    ----------
    resources : SharedResources
        Of the model.
    layers : frozenset of int
        Layers with a state.

    Attributes
    ----------
    layers : frozenset of int
        Layers with a state.
    place : torch.device
        Where they are.
    """

    def __init__(self, resources: SharedResources, layers: frozenset[int]) -> None:
        caches, device = resources.cache_managers[0], resources.device
        kind = caches.mamba_cache.layer
        with_state = layers if kind is not None and kind.has_state else frozenset[int]()
        self.layers = layers
        self.place = torch.device("cuda", device.ordinal) if device.target == "cuda" else torch.device("cpu")
        with torch.inference_mode(False):  # or nobody could change them in place later
            self._conv = {layer: torch.from_dlpack(caches.conv_state(layer)) for layer in layers}
            self._recurrent = {layer: torch.from_dlpack(caches.recurrent_state(layer)) for layer in with_state}
        self._users: list[StateLayer] = []

    def tell(self, layer: StateLayer) -> None:
        """Tell a layer from now on when its states have gone, or have other rows."""
        self._users.append(layer)

    def conv(self, layer: int, given: Any, columns: int) -> Any:
        """Return the convolution states of as many rows as `given` [B, C, n] has.

        Raises
        ------
        ShapeError, InteropError
            If they are of another shape, element type or device.
        """
        held = self._conv[layer]
        rows = given.shape[0]
        wanted = (rows, *held.shape[1:])
        _check("conv_states", layer, (*given.shape[:-1], columns), wanted)
        _check_kind("conv_states", given, held)
        return self._rows(held, rows)

    def recurrent(self, layer: int, given: Any) -> Any:
        """Return the recurrent states of as many rows as `given` has, in its shape.

        Raises
        ------
        ShapeError, InteropError
            As `conv`; and if the layer is a convolution alone.
        """
        held = self._recurrent.get(layer)
        if held is None:
            raise ShapeError(
                f"recurrent_states: {list(given.shape)} given, but layer {layer} is a convolution alone; "
                "the cache is of another model"
            )
        rows, sizes = given.shape[0], tuple(held.shape[1:])
        wanted = (rows, *(sizes[1:] if sizes[0] == 1 and given.ndim == held.ndim - 1 else sizes))
        _check("recurrent_states", layer, tuple(given.shape), wanted)
        _check_kind("recurrent_states", given, held)
        return self._rows(held, rows).view(wanted)

    def forget(self) -> None:
        """Note that no row has a state: the next ones find zeros."""
        for layer in self._users:
            layer.forget()

    def resize(self, rows: int) -> None:
        """Note that there are `rows` rows now, whose states are in their slots."""
        for layer in self._users:
            layer.resize(rows)

    def _rows(self, held: Any, rows: int) -> Any:
        with torch.inference_mode(False):
            return held[:rows]


def _check(name: str, layer: int, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise ShapeError(f"{name}: {list(shape)} given, {list(wanted)} wanted in layer {layer}; the cache is of another model")


def _check_kind(name: str, given: Any, held: Any) -> None:
    if given.dtype is not held.dtype:
        raise InteropError(f"{name}: {given.dtype} given, the cache was made for {held.dtype}")
    if given.device != held.device:
        raise InteropError(f"{name}: on {given.device}, the cache is on {held.device}; one model on one device is wanted")
