"""Models with recurrent layers that are small enough to allocate in a test, and what commits must leave, in NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np

from numba_kv.cache.mamba_cache import MambaCacheManager
from numba_kv.config import (
    AttentionLayer,
    GatedDeltaNetLayer,
    LLMEngineConfig,
    Mamba1Layer,
    Mamba2Layer,
    RecurrentLayer,
    ShortConvLayer,
)
from numba_kv.device import Device, Tensor
from numba_kv.dtypes import dtype
from numba_kv.shared_resources import SharedResources
from tests.helpers.kv_pools import NUMPY


def mamba2(**changes: Any) -> Mamba2Layer:
    """Return a Mamba-2 layer of 4 heads of 3 x 5, 2 groups, and a convolution of 7 channels over 4 tokens."""
    return Mamba2Layer(
        **{"num_heads": 4, "head_dim": 3, "state_size": 5, "num_groups": 2, "conv_dim": 7, "conv_kernel": 4, **changes}
    )


def delta_net(**changes: Any) -> GatedDeltaNetLayer:
    """Return a gated delta net of 4 value heads that map 6 channels to 5, 2 key heads."""
    sizes = {"num_heads": 4, "num_key_heads": 2, "head_dim": 6, "state_size": 5, "conv_dim": 44, "conv_kernel": 4}
    return GatedDeltaNetLayer(**{**sizes, **changes})


def mamba1(**changes: Any) -> Mamba1Layer:
    """Return a Mamba-1 layer of 10 channels and 3 columns."""
    return Mamba1Layer(**{"num_heads": 1, "head_dim": 10, "state_size": 3, "conv_dim": 10, "conv_kernel": 3, **changes})


def short_conv(**changes: Any) -> ShortConvLayer:
    """Return a convolution alone, of 6 channels over 3 tokens."""
    return ShortConvLayer(**{"conv_dim": 6, "conv_kernel": 3, **changes})


def recurrent_config(layer: RecurrentLayer, layers: int = 3, **limits: Any) -> LLMEngineConfig:
    """Return a model of `layers` recurrent layers, with an attention layer behind the first, unless `types` says otherwise."""
    types = limits.pop("types", ("recurrent", "attention") + ("recurrent",) * (layers - 1))
    attention = sum(name in ("attention", "both") for name in types)
    return LLMEngineConfig(
        layers=(AttentionLayer(num_kv_heads=1, head_dim=8),) * attention,
        layer_types=types,
        recurrent_layer=layer,
        **{"max_batch_size": 4, "max_kv_cache_capacity": 64, "page_tokens": 4, "max_batch_tokens": 64, **limits},
    )


@contextmanager
def states_of(config: LLMEngineConfig) -> Iterator[MambaCacheManager]:
    """Open the resources of a model and yield its states; everything has been given back afterwards."""
    resources = SharedResources.create_for_llm(config)
    try:
        yield resources.cache_managers[0].mamba_cache
    finally:
        resources.close()
    assert resources.device.memory.current_bytes == 0


def kinds_of(states: MambaCacheManager) -> tuple[str, ...]:
    """Return the arrays of resident states that there have to be: both, that of convolutions alone, or none."""
    layer = states.layer
    if layer is None:
        return ()
    return ("recurrent_state", "conv_state") if layer.has_recurrent_state else ("conv_state",)


def values(random: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Return numbers around 0 in an element type."""
    return random.normal(size=shape).astype(np.float32).astype(NUMPY[kind])


def fill(states: MambaCacheManager, name: str, random: np.random.Generator) -> np.ndarray:
    """Fill an array of all layers with numbers and return them: [layers, ...]."""
    kind = states.state(name, 0).dtype.name
    made = values(random, (states.num_layers, *states.state(name, 0).shape), kind)
    for layer in range(states.num_layers):
        states.state(name, layer).fill_from(np.ascontiguousarray(made[layer]))
    return made


def everything(states: MambaCacheManager, name: str) -> np.ndarray:
    """Return an array of all layers: [layers, ...]."""
    return np.stack([states.state(name, layer).to_host() for layer in range(states.num_layers)])


def int32(device: Device, numbers: Sequence[Any]) -> Tensor:
    """Return numbers as an int32 tensor."""
    made = np.array(numbers, np.int32)
    tensor = device.tensor(made.shape, dtype("int32"))
    tensor.fill_from(made)
    return tensor


def replayed_mamba(state: np.ndarray, da: np.ndarray, u: np.ndarray, b: np.ndarray, dt: np.ndarray) -> np.ndarray:
    """Return a state [H, D, S] after one token: da, dt [H], u [H, D], b [G, S]; float32, rounded to the state's type."""
    wide = state.astype(np.float32)
    per_head = np.repeat(b, len(wide) // len(b), axis=0)
    drive = (per_head * dt[:, None])[:, None, :] * u[:, :, None]
    return (wide * da[:, None, None] + drive).astype(state.dtype)


def sequential_delta_net(state: np.ndarray, k: np.ndarray, g: np.ndarray, beta: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return what `replayed_delta_net` does in float32, rounded to the state's type; sums run by run of eight rows."""
    keys = np.repeat(k, len(state) // len(k), axis=0)
    decayed = state.astype(np.float32) * g[:, None, None]
    products = decayed * keys[:, :, None]
    runs = [reduce(np.add, products[:, first : first + 8].swapaxes(0, 1)) for first in range(0, state.shape[1], 8)]
    write = (v.astype(np.float32) - reduce(np.add, runs)) * beta[:, None]
    return (decayed + keys[:, :, None] * write[:, None, :]).astype(state.dtype)


def replayed_delta_net(state: np.ndarray, k: np.ndarray, g: np.ndarray, beta: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return a state [H, D, S] after one token in float64: k [K, D], g, beta [H], v [H, S]."""
    keys = np.repeat(k.astype(np.float64), len(state) // len(k), axis=0)
    decayed = state.astype(np.float64) * g[:, None, None]
    written = (v.astype(np.float64) - np.einsum("hds,hd->hs", decayed, keys)) * beta[:, None]
    return decayed + keys[:, :, None] * written[:, None, :]
