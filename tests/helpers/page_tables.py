"""Page tables for tests, and short names for what is in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from numba_kv.cache.page_table import KVPageTable
from numba_kv.device import Device, Tensor
from numba_kv.dtypes import dtype

__all__ = ["INT32", "counters", "k", "made_tables", "on_device", "slots_on", "v"]

INT32 = dtype("int32")


@contextmanager
def made_tables(device: Device) -> Iterator[Callable[..., KVPageTable]]:
    """Give a function that makes tables on `device`; close them all at the end."""
    made: list[KVPageTable] = []

    def build(*args: Any, **kwargs: Any) -> KVPageTable:
        made.append(KVPageTable(device, *args, **kwargs))
        return made[-1]

    yield build
    for table in made:
        table.close(even_if_lent=True)


def k(table: KVPageTable, slot: int) -> list[int]:
    return table.row(slot).tolist()


def v(table: KVPageTable, slot: int) -> list[int]:
    return table.host_entries[slot, 1].tolist()


def on_device(table: KVPageTable) -> np.ndarray:
    return table.tensor.to_host()


def counters(table: KVPageTable) -> tuple[int, int]:
    return table.last_upload_entries, table.last_upload_ranges


def slots_on(device: Device, values: list[int]) -> Tensor:
    slots = device.tensor((len(values),), INT32)
    slots.fill_from(np.array(values, np.int32))
    return slots
