"""Rotary configurations, caches of their tables, and what a table must hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from numba_kv.config import RopeConfig
from numba_kv.device import Device, Memory, create_device
from numba_kv.weights import RopeCache


def rope(rope_type: str = "default", theta: float = 1e4, dim: int = 8, positions: int = 64, **parameters: Any) -> RopeConfig:
    """Return a rotation of 8 channels of a model of 64 positions, unless the arguments say otherwise."""
    return RopeConfig(
        rope_type=rope_type, theta=theta, rotary_dim=dim, max_position_embeddings=positions, parameters=parameters
    )


@contextmanager
def opened(device: Device | None = None) -> Iterator[RopeCache]:
    """Open a cache; its memory goes back behind it."""
    device = create_device() if device is None else device
    held: list[Memory] = []

    def take(name: str, nbytes: int) -> Memory:
        held.append(device.allocate(nbytes))
        return held[-1]

    cache = RopeCache(device, take)
    try:
        yield cache
    finally:
        cache.close()
        for memory in held:
            memory.close(device.stream)


def expected(frequencies: Sequence[float], positions: Any, magnitude: float = 1.0) -> np.ndarray:
    """Return the rows of a table: [positions, D], in extended precision."""
    angles = np.asarray(positions, np.longdouble)[..., None] * np.asarray(frequencies, np.longdouble)
    return np.concatenate([np.cos(angles), np.sin(angles)], -1) * np.longdouble(magnitude)


def plain(dim: int, theta: float) -> np.ndarray:
    """Return theta ** (-2d / D) of every pair d."""
    return np.longdouble(theta) ** (-np.arange(0, dim, 2, dtype=np.longdouble) / dim)
