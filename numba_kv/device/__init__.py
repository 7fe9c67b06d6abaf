"""Targets, memory, streams, events and copies: the only room that touches a driver."""

from __future__ import annotations

from numba_kv.device.device import Device, create_device
from numba_kv.device.memory import Memory, MemoryStats
from numba_kv.device.staging import Staging
from numba_kv.device.stream import Event, Stream
from numba_kv.device.target import TARGETS, resolve_target, target
from numba_kv.device.tensor import Tensor

__all__ = [
    "TARGETS",
    "Device",
    "Event",
    "Memory",
    "MemoryStats",
    "Staging",
    "Stream",
    "Tensor",
    "create_device",
    "resolve_target",
    "target",
]
