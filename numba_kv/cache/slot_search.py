"""SlotSearch: the slots of positions of rows, found in the page tables on the device.

Knows tables, lengths and which launches are bound. Does not know K or V.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.cache.kv_launch import RowLaunch, Shape
from numba_kv.cache.kv_operands import check_aligned, reshaped, unowned
from numba_kv.device import Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import RESERVED_PAGES
from numba_kv.kernels.kv_read import find_slots

if TYPE_CHECKING:
    from numba_kv.cache.hybrid import HybridCacheManager
    from numba_kv.cache.launch_cache import LaunchCache

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

    def find(self, layer: int, shape: tuple[int, int], lengths: Any, rows: Any, starts: Any, low: int) -> Tensor:
        """Enqueue the search for the slots of [B, n] positions; see `KVIO.gather`.

        Returns
        -------
        Tensor int64 [B * n]
            Overwritten by the next search.
        """
        device, storage = self._device, self._caches.storage(layer)
        count = shape[0]
        if rows is None and count > self._every_row.size:
            raise ShapeError(f"k: {count} rows given, but there are {self._every_row.size}; `rows` can name one more than once")
        if starts is None:
            self._from_start = self._grown(self._from_start, count)
        given = {
            "lengths": as_tensor(device, lengths, "lengths"),
            "rows": self._every_row[:count] if rows is None else as_tensor(device, rows, "rows"),
            "starts": self._from_start[:count] if starts is None else as_tensor(device, starts, "starts"),
        }
        for name, tensor in given.items():
            tensor.check_open()
            if tensor.dtype is not _INT32 or tensor.ndim != 1 or tensor.size < count or not tensor.is_contiguous:
                raise ShapeError(f"{name}: {tensor!r} given, dense int32 of at least {count} elements wanted")
            check_aligned(tensor, name)
        first = _integer("low", low)
        tokens = count * shape[1]
        self._found = self._grown(self._found, tokens)
        key = ("find", storage.group, shape, self._found.address, *(tensor.address for tensor in given.values()))
        bound = self._launches.get(key)
        if bound is None:
            values: dict[str, Tensor | int] = {
                "slots": reshaped(self._found, shape),
                "page_table": self._caches.step_buffers.page_tables[storage.group],
                "low": 0,
                "shift": storage.page_tokens.bit_length() - 1,
                "num_pages": storage.num_pages - RESERVED_PAGES,
            }
            lent = {name: unowned(tensor) for name, tensor in given.items()}
            launch = RowLaunch(find_slots, device, {**lent, **values}, 1, tokens, Shape(0, 1, 128))
            bound = self._launches.keep(key, launch)
        bound.run(tokens, device.stream, low=first)
        return reshaped(self._found, (tokens,))

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
