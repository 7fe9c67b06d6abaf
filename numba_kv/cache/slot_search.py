"""SlotSearch: the slots of positions of rows, found in the page tables on the device.

Knows tables, lengths and which launches are bound. Does not know K or V.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.cache.kv_launch import RowLaunch, Shape
from numba_kv.cache.kv_operands import check_aligned, reshaped, unowned
from numba_kv.cache.kv_overlap import meet
from numba_kv.cache.launch_cache import place
from numba_kv.device import Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import RESERVED_PAGES
from numba_kv.kernels.kv_read import find_ragged_slots, find_slots

if TYPE_CHECKING:
    from numba_kv.cache.hybrid import HybridCacheManager
    from numba_kv.cache.launch_cache import LaunchCache
    from numba_kv.device import Stream

__all__ = ["SlotSearch"]

_INT32, _INT64 = dtype("int32"), dtype("int64")


class SlotSearch:
    """Searches of one model. Borrows its tables; owns an array for what it finds."""

    def __init__(self, caches: HybridCacheManager, launches: LaunchCache[RowLaunch]) -> None:
        self._caches = caches
        self._device = device = caches.device
        self._launches = launches
        rows = caches.plan.config.max_batch_size
        self._every_row = device.tensor((rows,), _INT32)
        self._every_row.fill_from(np.arange(rows, dtype=np.int32))
        self._from_start = device.tensor((rows,), _INT32)
        self._found = device.tensor((0,), _INT64)

    def own(self, size: int) -> Tensor:
        """Return an array for what is found: int64 [size], overwritten by the next search into it."""
        self._found = self._grown(self._found, size)
        return reshaped(self._found, (size,))

    def find(
        self,
        layer: int,
        slots: Tensor,
        lengths: Any,
        rows: Any,
        starts: Any,
        low: int,
        *,
        cu_seqlens: Any = None,
        stream: Stream | None = None,
        named: str = "slots",
    ) -> Tensor:
        """Enqueue a search for the slots of positions of a layer's rows; see `KVIO.find_slots`.

        Parameters
        ----------
        slots : Tensor int64 [B, n], with `cu_seqlens` [T]
            Written; dense.
        named : str
            What messages call the array that says how many rows there are.

        Returns
        -------
        Tensor int64 [B * n] or [T]
            The slots, flat.
        """
        storage = self._caches.storage(layer)
        named = named if cu_seqlens is None else "cu_seqlens"
        given = self._rows(slots, lengths, rows, starts, cu_seqlens, named, stream in (None, self._device.stream))
        first = _integer("low", low)
        key = ("find", storage.group, *place(slots), *(part for t in given.values() for part in (t.address, t.size)))
        bound = self._launches.get(key)
        if bound is None:
            for name, tensor in given.items():
                if meet(slots, tensor):
                    raise InputError(f"slots: overlaps {name}, which is read while it is written")
            kernel = find_slots if cu_seqlens is None else find_ragged_slots
            values: dict[str, Tensor | int] = {
                "slots": unowned(slots),
                "page_table": self._caches.step_buffers.page_tables[storage.group],
                "low": 0,
                "shift": storage.page_tokens.bit_length() - 1,
                "num_pages": storage.num_pages - RESERVED_PAGES,
            }
            lent = {name: unowned(tensor) for name, tensor in given.items()}
            launch = RowLaunch(kernel, self._device, {**lent, **values}, 1, slots.size, Shape(0, 1, 128))
            bound = self._launches.keep(key, launch)
        bound.run(slots.size, self._device.stream if stream is None else stream, low=first)
        return reshaped(slots, (slots.size,))

    def _rows(
        self, slots: Tensor, lengths: Any, rows: Any, starts: Any, cu_seqlens: Any, named: str, can_grow: bool
    ) -> dict[str, Tensor]:
        """Return the arrays that name positions, each checked."""
        device, found = self._device, {"lengths": as_tensor(self._device, lengths, "lengths")}
        count = slots.shape[0]
        if cu_seqlens is not None:
            found["cu_seqlens"] = cumulative = as_tensor(device, cu_seqlens, "cu_seqlens")
            count = max(1, cumulative.size - 1)
        most = self._every_row.size
        if rows is None and count > most:
            raise ShapeError(f"{named}: {count} rows given, but there are {most}; `rows` can name one more than once")
        if starts is None and count > self._from_start.size:
            if not can_grow:
                raise ShapeError(f"starts: None given for {count} rows in a capture, where at most {most} can go without")
            self._from_start = self._grown(self._from_start, count)
        found["rows"] = self._every_row[:count] if rows is None else as_tensor(device, rows, "rows")
        found["starts"] = self._from_start[:count] if starts is None else as_tensor(device, starts, "starts")
        for name, tensor in found.items():
            least = count + 1 if name == "cu_seqlens" else count
            tensor.check_open()
            if tensor.dtype is not _INT32 or tensor.ndim != 1 or tensor.size < least or not tensor.is_contiguous:
                raise ShapeError(f"{name}: {tensor!r} given, dense int32 of at least {least} elements wanted")
            check_aligned(tensor, name)
        return found

    def close(self) -> None:
        """Give the arrays back. Stream: enqueues."""
        for tensor in (self._every_row, self._from_start, self._found):
            tensor._memory.close(self._device.stream)

    def _grown(self, tensor: Tensor, size: int) -> Tensor:
        """Return a tensor of our own that has room for `size` elements: the one given, or a larger one in its place."""
        if tensor.size >= size:
            return tensor
        larger = self._device.tensor((size,), tensor.dtype)
        self._launches.forget(tensor.address)
        tensor._memory.close(self._device.stream)
        return larger


def _integer(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"{name}: {value!r} is not an integer") from None
