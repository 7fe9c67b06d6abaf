"""The device arrays of adapters: views of the slots, at addresses that never change.

Knows shapes and strides. Does not know which adapter is where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from numba_kv.config.lora_layout import LoRALayout
from numba_kv.device import Device, Memory, MemoryStats, Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError

__all__ = ["LoRATensors"]

_INT32, _INT64, _FLOAT32 = dtype("int32"), dtype("int64"), dtype("float32")


class LoRATensors:
    """Slots of adapters, and the slot of each row. Borrows the memory, which `take` owns.

    What the slots hold is written by `LoRAManager` alone.

    Parameters
    ----------
    device : Device
        Where the memory is.
    layout : LoRALayout
        Bytes and places.
    take : callable
        ``take(name, nbytes)`` returns zeroed device memory.

    Attributes
    ----------
    adapter_ids : Tensor
        int32 [B]: slot of each row; 0 is the zero adapter, so every entry is a slot that can be read.
    scalings : Tensor
        float32 [S, T], slots a stride apart: what ``x @ A @ B`` is to be multiplied by. 1 where it is in B already, 0 where
        an adapter does not have a target.
    view_scalings : Tensor or None
        float32 [T]: those of the view; None without one.
    bindings : mapping of str to Tensor
        Names of the engine's inputs -> dense matrices of the view: A [k, R], B [R, n]. The same addresses and shapes for
        every adapter; without one, and from its rank on, zeros. Empty without a view.
    words : Tensor
        int64: all slots, the view last; what copies move.
    """

    def __init__(self, device: Device, layout: LoRALayout, take: Callable[[str, int], Memory]) -> None:
        self._device = device
        self._layout = layout
        self._memory = take("lora.slots", layout.slots_nbytes)
        self._numbers = {target.name: number for number, target in enumerate(layout.targets)}
        self.adapter_ids = Tensor(take("lora.adapter_ids", layout.ids_nbytes), device, _INT32, (layout.max_batch_size,))
        self.words = Tensor(self._memory, device, _INT64, (layout.num_blocks, layout.slot_nbytes // 8))
        count = len(layout.targets)
        strides = (layout.slot_nbytes // 4, 1)
        self.scalings = Tensor(self._memory, device, _FLOAT32, (layout.num_slots, count), strides=strides)
        view_at = layout.num_slots * layout.slot_nbytes
        self.view_scalings: Tensor | None = None
        found: dict[str, Tensor] = {}
        if layout.has_view:
            self.view_scalings = Tensor(self._memory, device, _FLOAT32, (count,), offset_nbytes=view_at)
            places = zip(layout.targets, layout.ranks, layout.a_offsets, layout.b_offsets, strict=True)
            for target, rank, a_at, b_at in places:
                for name, shape, at in ((target.a_name, (target.k, rank), a_at), (target.b_name, (rank, target.n), b_at)):
                    found[name] = Tensor(self._memory, device, layout.dtype, shape, offset_nbytes=view_at + at)
        self.bindings: Mapping[str, Tensor] = MappingProxyType(found)

    def a(self, target: str) -> Tensor:
        """Return A of every slot of a target: [S, k, R], slots a stride apart.

        Raises
        ------
        InputError
            If the engine has no such target.
        """
        number = self._number(target)
        layout = self._layout
        return self._over_slots(layout.a_offsets[number], layout.targets[number].k, layout.ranks[number])

    def b(self, target: str) -> Tensor:
        """Return B of every slot of a target: [S, R, n], slots a stride apart.

        Raises
        ------
        InputError
            If the engine has no such target.
        """
        number = self._number(target)
        layout = self._layout
        return self._over_slots(layout.b_offsets[number], layout.ranks[number], layout.targets[number].n)

    def slot_memory(self, slot: int) -> Memory:
        """Return the bytes of one slot as memory to copy to; borrowed, and counted already."""
        nbytes = self._layout.slot_nbytes
        begin = slot * nbytes
        array = None if self._memory.array is None else self._memory.array[begin : begin + nbytes]
        return Memory(self._memory.address + begin, nbytes, array, None, MemoryStats())

    def _over_slots(self, offset: int, rows: int, columns: int) -> Tensor:
        layout = self._layout
        strides = (layout.slot_nbytes // layout.dtype.itemsize, columns, 1)
        shape = (layout.num_slots, rows, columns)
        return Tensor(self._memory, self._device, layout.dtype, shape, offset_nbytes=offset, strides=strides)

    def _number(self, target: str) -> int:
        number = self._numbers.get(target)
        if number is None:
            raise InputError(f"target: {target!r} is not one of the engine's {len(self._numbers)} targets")
        return number
