"""StateSlab: one array of all recurrent layers, by layer and as the flat units that kernels take.

Knows memory and shapes. Does not know what the array is for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from numba_kv.config.state_layout import RESIDENT_STATES
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import StateError

if TYPE_CHECKING:
    from numba_kv.config.state_layout import StatePlan
    from numba_kv.device import Device, Memory

__all__ = ["HALF", "WORD", "StateSlab"]

#: Bytes of the units that copies move: words where everything is of whole words, else halves.
WORD, HALF = 8, 2
_UNITS = {1: dtype("uint8"), HALF: dtype("uint16"), 4: dtype("uint32"), WORD: dtype("uint64")}


class StateSlab:
    """An array ``[layers, ...]`` whose layers start at aligned addresses. Owns no memory, but keeps it alive.

    Attributes
    ----------
    plan : StatePlan
        Name, shape and element type.
    """

    def __init__(self, device: Device, plan: StatePlan, take: Callable[[str, int], Memory]) -> None:
        self.plan = plan
        self._device = device
        self._memory: Memory | None = take(plan.name, plan.nbytes)

    @property
    def memory(self) -> Memory:
        """The bytes.

        Raises
        ------
        StateError
            After `close`.
        """
        if self._memory is None:
            raise StateError("MambaCacheManager is closed")
        return self._memory

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot, or of one row's one token, of one layer."""
        axes = 2 if self.plan.name in RESIDENT_STATES else 3
        return math.prod(self.plan.shape[axes:]) * dtype(self.plan.dtype).itemsize

    def layer(self, layer: int, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a layer's part, or as much of it as a dense tensor of `shape` takes."""
        kind = dtype(self.plan.dtype)
        extents = self.plan.shape[1:] if shape is None else shape
        return Tensor(self.memory, self._device, kind, extents, offset_nbytes=layer * self.plan.layer_nbytes)

    def flat(self, unit: int) -> Tensor:
        """Return the whole array as unsigned integers of `unit` bytes."""
        return Tensor(self.memory, self._device, _UNITS[unit], (self.plan.nbytes // unit,))

    def whole(self) -> Tensor:
        """Return the whole array as one axis of its own elements, padding included."""
        kind = dtype(self.plan.dtype)
        return Tensor(self.memory, self._device, kind, (self.plan.nbytes // kind.itemsize,))

    def close(self) -> None:
        """Forget the memory; its owner gives it back."""
        self._memory = None
