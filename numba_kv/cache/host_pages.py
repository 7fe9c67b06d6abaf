"""HostPages: page-locked room on the host for pages of a model's groups and for snapshots of states, and copies to it and back.

Knows slabs and strides. Does not know what is kept, or for whom. ::

    a slab on the device   [layers, 2, N, page]
    its area on the host   [layers, 2, S, page]        S pages instead of N, so one launch copies any pairs of pages
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.cache.kv_operands import flat_slab
from numba_kv.device import Memory, Staging, Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import ConfigError
from numba_kv.geometry import RESERVED_PAGES, ceil_div, round_up
from numba_kv.kernels.state_copy import copy_states_halves, copy_states_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from numba_kv.cache.kv_cache import KVCacheManager
    from numba_kv.device import Device
    from numba_kv.kernels.jit import Launch
    from numba_kv.plan import GroupPlan, SlabPlan

__all__ = ["HostPages", "HostRooms", "StateSlots"]

#: Pairs of one launch.
MAX_PAIRS = 1024
#: Bytes that one block copies.
PART_NBYTES = 1 << 14
_ALIGNMENT = 256
_WORD, _HALF = 8, 2
_UNITS = {_HALF: dtype("uint16"), _WORD: dtype("uint64")}


@dataclass(frozen=True, slots=True)
class HostRooms:
    """How much there is room for.

    Attributes
    ----------
    pages : tuple of int
        Pages of each group.
    states : int
        Snapshots.
    """

    pages: tuple[int, ...]
    states: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StateSlots:
    """Snapshots on the device: `count` slots of `nbytes` behind each other."""

    memory: Memory
    nbytes: int
    count: int


@dataclass(slots=True, eq=False)
class _Plane:
    """Arrays ``[layers, ids, size]`` on either side, of which pairs of ids are copied; sizes in bytes."""

    device: Tensor
    layers: int
    device_layer: int
    device_ids: int
    size: int
    host_ids: int
    at: int = 0
    out: Launch | None = None
    back: Launch | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.layers * self.host_ids * self.size


@dataclass(slots=True, eq=False)
class _Line:
    """What is copied together: the planes of a group, or the snapshots."""

    planes: list[_Plane] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of one id."""
        return sum(plane.layers * plane.size for plane in self.planes)


class HostPages:
    """Room on the host. Owns its memory and a list of pairs.

    Lines are numbered as the groups are; -1 are snapshots. All copies are on the device's stream, so they are in order with
    each other and with all that reads or writes the pools.

    Parameters
    ----------
    device : Device
        Whose pools they are.
    pools : KVCacheManager
        Pools of the model.
    rooms : HostRooms
        Of how many pages and snapshots.
    states : StateSlots or None
        Snapshots on the device.

    Raises
    ------
    ConfigError
        If pages are not of whole 2-byte units.
    CapacityError
        If the host has not enough memory.
    """

    def __init__(self, device: Device, pools: KVCacheManager, rooms: HostRooms, states: StateSlots | None = None) -> None:
        self._device = device
        self._lines: dict[int, _Line] = {}
        for group, count in zip(pools.plan.groups, rooms.pages, strict=True):
            planes = [plane for slab in group.slabs for plane in _planes(pools, group, slab, count)]
            self._lines[group.index] = _Line(planes)
        if states is not None:
            whole = Tensor(states.memory, device, dtype("uint8"), (states.count * states.nbytes,))
            self._lines[-1] = _Line([_Plane(whole, 1, whole.nbytes, states.count, states.nbytes, rooms.states)])
        at = 0
        for plane in self._all():
            plane.at = at
            at += round_up(plane.nbytes, _ALIGNMENT)
        with ExitStack() as undo:
            self._memory = device.allocate_staging(max(at, 1))
            undo.callback(self._memory.close, device.stream)
            self._staging = Staging(device, 2 * MAX_PAIRS)
            undo.callback(self._staging.close)
            self._pairs = device.tensor((MAX_PAIRS, 2), dtype("int32"))
            undo.callback(self._pairs._memory.close, device.stream)
            for plane in self._all():
                self._bind(plane)
            undo.pop_all()

    @property
    def nbytes(self) -> int:
        """Bytes of page-locked memory."""
        return self._memory.nbytes

    def id_nbytes(self, line: int) -> int:
        """Return the bytes of one page of a group, or of one snapshot, in all layers."""
        return self._lines[line].nbytes

    def move(self, line: int, pairs: NDArray[np.int32], *, out: bool) -> int:
        """Copy pages or snapshots; return the launches.

        Parameters
        ----------
        line : int
            Index of a group; -1: snapshots.
        pairs : int32 [n, 2]
            Ids where they are and where they go, none of these twice. Others than the room has are left out.
        out : bool
            Whether to the host.

        Stream: enqueues, for each 1,024 pairs, one copy of their list and one kernel for each slab.
        """
        planes, stream = self._lines[line].planes, self._device.stream
        launches = 0
        for first in range(0, len(pairs), MAX_PAIRS):
            part = pairs[first : first + MAX_PAIRS]
            self._staging.acquire()[: part.size] = part.reshape(-1)
            self._staging.send([(0, part.size, self._pairs, 0)], stream)
            for plane in planes:
                launch = plane.out if out else plane.back
                if launch is not None:
                    launch(len(part) * plane.layers * ceil_div(plane.size, PART_NBYTES), stream)
                    launches += 1
        return launches

    def read(self, line: int, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return what is on the host, uint8 [n, id_nbytes]: of each id one slab after another, layer by layer. Waits."""
        self._device.stream.synchronize()
        parts = [self._array(plane)[:, ids].swapaxes(0, 1).reshape(len(ids), -1) for plane in self._lines[line].planes]
        found: NDArray[np.uint8] = np.concatenate(parts, axis=1) if parts else np.zeros((len(ids), 0), np.uint8)
        return found

    def write(self, line: int, ids: NDArray[np.int32], rows: NDArray[np.uint8]) -> None:
        """Set what is on the host, as `read` returns it. Waits for copies in flight."""
        self._device.stream.synchronize()
        at = 0
        for plane in self._lines[line].planes:
            width = plane.layers * plane.size
            part = rows[:, at : at + width].reshape(len(ids), plane.layers, plane.size)
            self._array(plane)[:, ids] = part.swapaxes(0, 1)
            at += width

    def close(self) -> None:
        """Give the memory back. Stream: waits for copies in flight."""
        self._device.stream.synchronize()
        self._lines.clear()
        self._staging.close()
        self._pairs._memory.close(self._device.stream)
        self._memory.close(self._device.stream)

    def _all(self) -> Iterator[_Plane]:
        for line in self._lines.values():
            yield from line.planes

    def _array(self, plane: _Plane) -> NDArray[np.uint8]:
        """Return a plane's part of the host memory, uint8 [layers, ids, size]; a view."""
        memory = self._memory.array
        if memory is None:
            raise ConfigError("host memory cannot be reached by the host")
        view: NDArray[np.uint8] = memory[plane.at : plane.at + plane.nbytes]
        return view.reshape(plane.layers, plane.host_ids, plane.size)

    def _bind(self, plane: _Plane) -> None:
        numbers = (plane.size, plane.device_layer, plane.device.address)
        unit = next((unit for unit in (_WORD, _HALF) if not any(number % unit for number in numbers)), 0)
        if not unit:
            raise ConfigError(f"pages of {plane.size} bytes are not of whole 2-byte units; they cannot be moved to the host")
        if not plane.nbytes:
            return
        host = Tensor(self._memory, self._device, _UNITS[unit], (plane.nbytes // unit,), offset_nbytes=plane.at)
        memory, at = plane.device._memory, plane.device.address - plane.device._memory.address
        pool = Tensor(memory, self._device, _UNITS[unit], (plane.device.nbytes // unit,), offset_nbytes=at)
        kernel = copy_states_words if unit == _WORD else copy_states_halves
        common: dict[str, Tensor | int] = {
            "pairs": self._pairs,
            "from_slot": 0,
            "to_slot": 0,
            "layers": plane.layers,
            "parts": ceil_div(plane.size, PART_NBYTES),
            "part_size": PART_NBYTES // unit,
            "size": plane.size // unit,
        }
        there = (host, plane.host_ids * plane.size // unit, plane.host_ids)
        here = (pool, plane.device_layer // unit, plane.device_ids)
        plane.out = kernel.bind(self._device, {**common, **_ends(there, here)})
        plane.back = kernel.bind(self._device, {**common, **_ends(here, there)})


def _ends(target: tuple[Tensor, int, int], source: tuple[Tensor, int, int]) -> dict[str, Tensor | int]:
    """Return the operands of a copy: for each end memory, distance of layers in units, and ids."""
    return {
        "target": target[0],
        "source": source[0],
        "target_layer": target[1],
        "source_layer": source[1],
        "num_targets": target[2],
        "num_sources": source[2],
    }


def _planes(pools: KVCacheManager, group: GroupPlan, slab: SlabPlan, host_ids: int) -> Iterator[_Plane]:
    """Yield the arrays of a slab: one, if K and V of all layers follow each other at one distance, else one for each half."""
    pool, ids = pools.kv(slab.layers[0]), group.num_pages - RESERVED_PAGES
    size = group.page_tokens * slab.num_kv_heads * slab.head_dim * pool.dtype.itemsize
    whole, half, halves = flat_slab(pool, slab.nbytes, 1), group.num_pages * size, slab.shape[1]
    if slab.layer_nbytes == halves * half:
        yield _Plane(whole, len(slab.layers) * halves, half, ids, size, host_ids)
        return
    for i in range(halves):
        yield _Plane(whole[i * half :], len(slab.layers), slab.layer_nbytes, ids, size, host_ids)
