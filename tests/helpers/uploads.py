"""What is uploaded in tests, where to, and what arrived."""

from __future__ import annotations

import numpy as np

from numba_kv.device import Device, Memory
from numba_kv.device.host_device import HostDevice
from numba_kv.weights.windows import Segment
from tests.helpers.late_device import LateDevice

RANDOM = np.random.default_rng(1)


def host_device(direct: bool) -> HostDevice:
    """Return a device to which readers write themselves, or one with staging."""
    return HostDevice("cpu") if direct else LateDevice()


def of_bytes(begin: int, content: np.ndarray) -> Segment:
    def fill(out: np.ndarray, at: int) -> None:
        out[:] = content[at : at + len(out)]

    return Segment(begin=begin, nbytes=len(content), fill=fill)


def contents(sizes: list[int], gap: int = 0) -> tuple[list[Segment], np.ndarray]:
    segments, whole, at = [], [], 0
    for size in sizes:
        content = RANDOM.integers(1, 256, size).astype(np.uint8)
        padding = -size % 256 + gap
        segments.append(of_bytes(at, content))
        whole += [content, np.zeros(padding, np.uint8)]
        at += size + padding
    found = np.concatenate(whole) if whole else np.zeros(0, np.uint8)
    return segments, found[: segments[-1].end if segments else 0]


def received(device: Device, memory: Memory, nbytes: int) -> np.ndarray:
    out = np.empty(nbytes, np.uint8)
    device.copy_to_host(out.ctypes.data, memory.address, nbytes, device.stream)
    return out


def dirty(device: Device, nbytes: int) -> Memory:
    memory = device.allocate(nbytes)
    noise = np.full(nbytes, 0xEE, np.uint8)
    device.copy_to_device(memory.address, noise.ctypes.data, nbytes, device.stream)
    device.stream.synchronize()
    return memory
