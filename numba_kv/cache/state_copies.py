"""StateCopies: clears, copies, captures and restores whole slots of recurrent states, all layers in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.cache.kv_operands import check_aligned, unowned
from numba_kv.cache.state_slab import HALF, WORD, StateSlab
from numba_kv.config.state_layout import RESIDENT_STATES
from numba_kv.device import Memory, Staging, Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import ceil_div, round_up
from numba_kv.kernels.state_copy import (
    clear_fresh_states_halves,
    clear_fresh_states_words,
    clear_states_halves,
    clear_states_words,
    copy_states_halves,
    copy_states_words,
    permute_states_halves,
    permute_states_words,
)

if TYPE_CHECKING:
    from numba_kv.device import Device
    from numba_kv.kernels.jit import Kernel, Launch

__all__ = ["PART_NBYTES", "SlotState", "StateCopies"]

#: Bytes of a state that one block works on.
PART_NBYTES = 1 << 14
#: Pairs of one launch.
_MAX_PAIRS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class SlotState:
    """The states of one slot at a moment. Owns their memory: `close` gives it back.

    Attributes
    ----------
    recurrent : tuple of Tensor [1, H, D, S]
        One a recurrent layer; none if the layers are convolutions alone.
    conv : tuple of Tensor [1, C, columns]
        One a recurrent layer.
    """

    recurrent: tuple[Tensor, ...]
    conv: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(tensor.nbytes for tensor in (*self.recurrent, *self.conv))

    def close(self) -> None:
        """Give the memory back; a second call does nothing. Stream: after the work enqueued so far."""
        self.conv[0]._memory.close(self.conv[0].device.stream)


class StateCopies:
    """Works on slots of the pools of states: two, or that of convolutions alone. Borrows them; owns its list of pairs.

    The list is made on first use.
    """

    def __init__(self, device: Device, slabs: dict[str, StateSlab]) -> None:
        self._device = device
        self._pools = {name: slabs[name] for name in RESIDENT_STATES if name in slabs}
        conv = slabs["conv_state"]
        recurrent = slabs.get("recurrent_state", conv)  # stands for none: it has no parts then
        self._layers, self._slots = conv.plan.shape[:2]
        sizes = [slabs[name].slot_nbytes if name in slabs else 0 for name in RESIDENT_STATES]
        self._unit = WORD if all(size % WORD == 0 for size in sizes) else HALF
        parts = [ceil_div(size, PART_NBYTES) for size in sizes]
        self._parts = sum(parts)
        self._clear_values: dict[str, Tensor | int] = {
            "recurrent": recurrent.flat(self._unit),
            "conv": conv.flat(self._unit),
            "layers": self._layers,
            "part_size": PART_NBYTES // self._unit,
            "recurrent_size": sizes[0] // self._unit,
            "recurrent_layer": recurrent.plan.layer_nbytes // self._unit,
            "recurrent_parts": parts[0],
            "conv_size": sizes[1] // self._unit,
            "conv_layer": conv.plan.layer_nbytes // self._unit,
            "parts": self._parts,
        }
        self._clear: Launch | None = None
        self._in_place: list[tuple[Launch, int]] = []
        self._list: tuple[Staging, Tensor] | None = None

    def clear(self, first: int, count: int) -> None:
        """Clear `count` neighbouring slots."""
        if self._clear is None:
            kernel = clear_states_words if self._unit == WORD else clear_states_halves
            self._clear = kernel.bind(self._device, {**self._clear_values, "first_slot": 0})
        self._clear(count * self._layers * self._parts, self._device.stream, first_slot=first)

    def bind_fresh(self, edits: Tensor, state_slots: Tensor, state_index: Tensor) -> Callable[[int], None]:
        """Return what clears the slots of rows that start; see `MambaCacheManager.bind_fresh`."""
        kernel = clear_fresh_states_words if self._unit == WORD else clear_fresh_states_halves
        return self._bind_rows(kernel, edits, state_slots, state_index)

    def bind_permute(self, edits: Tensor, state_slots: Tensor, state_index: Tensor) -> Callable[[int], None]:
        """Return what moves states along cycles of slots; see `MambaCacheManager.bind_permute`."""
        kernel = permute_states_words if self._unit == WORD else permute_states_halves
        return self._bind_rows(kernel, edits, state_slots, state_index)

    def _bind_rows(self, kernel: Kernel, edits: Tensor, state_slots: Tensor, state_index: Tensor) -> Callable[[int], None]:
        """Return what launches a kernel whose items are parts of slots, by entry of `edits` and layer."""
        rows: dict[str, Tensor | int] = {"edits": edits, "state_slots": state_slots, "state_index": state_index}
        launch = kernel.bind(self._device, {**self._clear_values, **rows})
        each, device = self._layers * self._parts, self._device

        def run(entries: int) -> None:
            launch(entries * each, device.stream)

        return run

    def prepare(self) -> tuple[Staging, Tensor]:
        """Return the list of pairs, made and bound on the first call: what can fail for want of memory."""
        if self._list is None:
            self._list = Staging(self._device, 2 * _MAX_PAIRS), self._device.tensor((_MAX_PAIRS, 2), dtype("int32"))
        if not self._in_place:
            pools = [(pool, (pool.whole(), pool.plan.layer_nbytes, self._slots)) for pool in self._pools.values()]
            self._in_place = [self._bind(pool, whole, whole, self._layers, self._list[1]) for pool, whole in pools]
        return self._list

    def copy_pairs(self, pairs: list[tuple[int, int]]) -> None:
        """Copy slots within the pools."""
        staging, on_device = self.prepare()
        for first in range(0, len(pairs), _MAX_PAIRS):
            part = pairs[first : first + _MAX_PAIRS]
            staging.acquire()[: 2 * len(part)] = np.array(part, np.int32).reshape(-1)
            staging.send([(0, 2 * len(part), on_device, 0)], self._device.stream)
            for launch, items in self._in_place:
                launch(items * len(part), self._device.stream)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot outside of the pools: the layers of one kind follow each other at whole words."""
        return sum(self._layers * round_up(pool.slot_nbytes, WORD) for pool in self._pools.values())

    def bind_move(self, memory: Memory, at: int, *, out: bool) -> Callable[[int], None]:
        """Return what copies a slot to the `slot_nbytes` bytes of `memory` from `at` on, or back; at is a multiple of 8."""
        launches, name = [], "from_slot" if out else "to_slot"
        for pool in self._pools.values():
            stride = round_up(pool.slot_nbytes, WORD)  # so that whole words stay whole
            kind = dtype(pool.plan.dtype)
            dense = Tensor(memory, self._device, kind, (self._layers * stride // kind.itemsize,), offset_nbytes=at)
            inside, outside = (pool.whole(), pool.plan.layer_nbytes, self._slots), (dense, stride, 1)
            launches.append(self._bind(pool, *((outside, inside) if out else (inside, outside)), self._layers))
            at += self._layers * stride

        def move(slot: int) -> None:
            for launch, items in launches:
                launch(items, self._device.stream, **{name: slot})

        return move

    def capture(self, slot: int) -> SlotState:
        """Return a copy of a slot; see `MambaCacheManager.capture_slot`."""
        memory = self._device.allocate(self.slot_nbytes)
        try:
            self.bind_move(memory, 0, out=True)(slot)
        except BaseException:
            memory.close(self._device.stream)
            raise
        found: dict[str, tuple[Tensor, ...]] = {}
        at = 0
        for name, pool in self._pools.items():
            stride = round_up(pool.slot_nbytes, WORD)
            kind, shape = dtype(pool.plan.dtype), (1, *pool.plan.shape[2:])
            places = range(at, at + self._layers * stride, stride)
            found[name] = tuple(Tensor(memory, self._device, kind, shape, offset_nbytes=place) for place in places)
            at += self._layers * stride
        return SlotState(found.get("recurrent_state", ()), found["conv_state"])

    def restore(self, slot: int, recurrent: Sequence[Any], conv: Sequence[Any]) -> None:
        """Set a slot; see `MambaCacheManager.restore_slot`."""
        given = {
            name: self._checked(name.removesuffix("_state"), self._pools.get(name), arrays)
            for name, arrays in zip(RESIDENT_STATES, (recurrent, conv), strict=True)
        }
        launches: list[tuple[Launch, int]] = []  # all bound before the first one runs
        for name, pool in self._pools.items():
            tensors, done = given[name], 0
            while done < len(tensors):
                stride, run = _run_of(tensors[done:])
                source = unowned(tensors[done]) if run == 1 else _spanning(tensors[done], stride, run)
                to = pool.whole()[done * pool.plan.layer_nbytes // pool.whole().dtype.itemsize :]
                target = to, pool.plan.layer_nbytes, self._slots
                launches.append(self._bind(pool, target, (source, stride, 1), run, to_slot=slot))
                done += run
        if any(len(given[name]) < self._layers for name in self._pools):
            self.clear(slot, 1)
        for launch, items in launches:
            launch(items, self._device.stream)

    def close(self) -> None:
        """Forget the launches and give the list back. Stream: waits for copies in flight."""
        self._clear = None
        self._clear_values.clear()
        self._in_place.clear()
        if self._list is not None:
            staging, on_device = self._list
            staging.close()
            on_device._memory.close(self._device.stream)

    def _checked(self, name: str, pool: StateSlab | None, arrays: Sequence[Any]) -> list[Tensor]:
        """Return the arrays of one kind of state as tensors."""
        try:
            listed = list(arrays)
        except TypeError:
            raise InputError(f"{name}: {arrays!r} is not a sequence of arrays, one a layer") from None
        if pool is None:
            if listed:
                raise InputError(f"{name}: {len(listed)} arrays given, but the layers are convolutions alone; () is wanted")
            return []
        if len(listed) > self._layers:
            raise InputError(f"{name}: {len(listed)} arrays given for {self._layers} recurrent layers")
        kind, shape = dtype(pool.plan.dtype), (1, *pool.plan.shape[2:])
        found = []
        for layer, array in enumerate(listed):
            label = f"{name}[{layer}]"
            tensor = as_tensor(self._device, array, label)
            tensor.check_open()
            if tensor.dtype is not kind or tensor.shape != shape or not tensor.is_contiguous:
                given = f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.strides)}"
                raise ShapeError(f"{label}: {given} given, dense {kind} {list(shape)} wanted")
            check_aligned(tensor, label)
            memory = pool.memory
            if tensor.address < memory.address + memory.nbytes and memory.address < tensor.address + tensor.nbytes:
                raise InputError(f"{label}: lies in the states themselves; copy_slots copies from slot to slot")
            found.append(tensor)
        return found

    def _bind(
        self,
        pool: StateSlab,
        target: tuple[Tensor, int, int],
        source: tuple[Tensor, int, int],
        layers: int,
        pairs: Tensor | None = None,
        *,
        from_slot: int = 0,
        to_slot: int = 0,
    ) -> tuple[Launch, int]:
        """Return the launch that copies slots of a pool's size, and its items for a pair.

        `target` and `source` are memory, distance of layers in bytes, and slots.
        """
        size = pool.slot_nbytes
        numbers = (size, target[1], source[1], target[0].address, source[0].address)
        unit = WORD if all(number % WORD == 0 for number in numbers) else HALF
        parts = ceil_div(size, PART_NBYTES)
        if pairs is None:
            pairs = Tensor(pool.memory, self._device, dtype("int32"), (0, 2))
        launch = (copy_states_words if unit == WORD else copy_states_halves).bind(
            self._device,
            {
                "target": _units(target[0], unit),
                "source": _units(source[0], unit),
                "pairs": pairs,
                "from_slot": from_slot,
                "to_slot": to_slot,
                "layers": layers,
                "parts": parts,
                "part_size": PART_NBYTES // unit,
                "size": size // unit,
                "target_layer": target[1] // unit,
                "source_layer": source[1] // unit,
                "num_targets": target[2],
                "num_sources": source[2],
            },
        )
        return launch, layers * parts


def _run_of(tensors: list[Tensor]) -> tuple[int, int]:
    """Return at which distance (bytes) the first tensors follow each other, and how many do."""
    if len(tensors) < 2:
        return tensors[0].nbytes, 1
    stride = tensors[1].address - tensors[0].address
    shares = [tensor._memory is tensors[0]._memory for tensor in tensors]
    if stride < tensors[0].nbytes or not shares[1]:
        return tensors[0].nbytes, 1
    run = 2
    while run < len(tensors) and shares[run] and tensors[run].address - tensors[run - 1].address == stride:
        run += 1
    return stride, run


def _spanning(first: Tensor, stride: int, run: int) -> Tensor:
    """Return one axis over `run` tensors that follow each other at `stride` bytes."""
    memory, size = first._memory, first.dtype.itemsize
    count = ((run - 1) * stride + first.nbytes) // size
    return Tensor(memory, first.device, first.dtype, (count,), offset_nbytes=first.address - memory.address)


def _units(tensor: Tensor, unit: int) -> Tensor:
    """Return a dense tensor's bytes as one axis of unsigned integers; a rest at the end is left out."""
    memory = tensor._memory
    kind = dtype("uint64" if unit == WORD else "uint16")
    count = tensor.nbytes // unit
    return Tensor(memory, tensor.device, kind, (count,), offset_nbytes=tensor.address - memory.address)
