"""Row gather of a page table: argument checks and launches that are bound once a destination.

Knows the table's tensor. Does not know what the rows hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.device import Stream, Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.kernels.gather import gather_rows

if TYPE_CHECKING:
    from numba_kv.kernels.jit import Launch

__all__ = ["RowGather"]

_INT32 = dtype("int32")
#: Launches that are kept; a step has one destination, or two that alternate. A kept one keeps its arrays alive.
_MAX_LAUNCHES = 4


class RowGather:
    """Gathers rows of a table ``[max_batch, 2, L]`` by slot numbers on the device. Borrows the table."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self._launches: dict[tuple[int, int, int, int], Launch] = {}

    def __call__(self, destination: Tensor, slots: Tensor, num_rows: int, stream: Stream) -> Tensor:
        """Enqueue the gather and return the rows, int32 ``[num_rows, 2, L]``, as a view of `destination`.

        Raises
        ------
        InputError, ShapeError
            If a tensor is elsewhere, too small, not dense int32, or written where it is read.
        """
        pitch = 2 * self._table.shape[2]
        self._check("destination", destination, num_rows * pitch)
        self._check("slots", slots, num_rows)
        for argument, read in (("slots", slots), ("the table itself", self._table)):
            if _overlap(destination, read):
                raise InputError(f"destination: overlaps {argument}, which is read while it is written")
        flat = _flat(destination)
        if num_rows:
            self._bound(flat, _flat(slots))(num_rows, stream)
        return _view(flat, (num_rows, 2, self._table.shape[2]))

    def close(self) -> None:
        """Forget the launches and the arrays that they keep alive."""
        self._launches.clear()

    def _check(self, argument: str, tensor: Tensor, wanted: int) -> None:
        if not isinstance(tensor, Tensor) or tensor.device is not self._table.device:
            raise InputError(f"{argument}: {tensor!r} is not a tensor on the table's device")
        if tensor.dtype is not _INT32 or not tensor.is_contiguous or tensor.size < wanted:
            raise ShapeError(
                f"{argument}: {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.strides)} given, "
                f"dense int32 of at least {wanted} elements wanted"
            )

    def _bound(self, destination: Tensor, slots: Tensor) -> Launch:
        key = (destination.address, destination.size, slots.address, slots.size)
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) == _MAX_LAUNCHES:
                del self._launches[next(iter(self._launches))]
            launch = gather_rows.bind(
                self._table.device,
                {
                    "destination": destination,
                    "table": _flat(self._table),
                    "slots": slots,
                    "num_slots": self._table.shape[0],
                    "row_words": 2 * self._table.shape[2],
                    "missing": -1,
                },
            )
            self._launches[key] = launch
        return launch


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.address < b.address + b.nbytes and b.address < a.address + a.nbytes


def _flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor as one axis; raises StateError if its memory has been given back."""
    return _view(tensor[:], (tensor.size,))


def _view(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    memory = tensor._memory
    return Tensor(memory, tensor.device, tensor.dtype, shape, offset_nbytes=tensor.address - memory.address)
