"""Who a KVPageTable belongs to: lending, giving back and closing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.cache.page_table import KVPageTable
from numba_kv.device import Device, create_device
from numba_kv.errors import StateError
from tests.helpers.page_tables import counters, made_tables, on_device


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.fixture
def make(device: Device) -> Iterator[Any]:
    with made_tables(device) as make:
        yield make


def test_a_lent_table_belongs_to_its_borrower(make: Any) -> None:
    table = make(2, 2, 4, name="window 512")
    table.set_identity()
    table.upload()
    table.lend("Batch")
    assert table.is_lent
    assert not table.is_identity
    assert (table.host_entries == -1).all()
    calls = {
        "set_identity": (),
        "set_row": (0, [1]),
        "set_rows": ([],),
        "set_entry": (0, 0, 1),
        "clear_entry": (0, 0),
        "upload": (),
        "upload_dirty": (),
        "lend": ("another",),
    }
    for call, arguments in calls.items():
        with pytest.raises(StateError, match=f"{call}: window 512 is lent to Batch"):
            getattr(table, call)(*arguments)
    table.tensor.fill_from(np.arange(8, dtype=np.int32).reshape(2, 2, 2))  # the borrower's work

    table.give_back()
    assert not table.is_lent
    assert (on_device(table) == -1).all()
    assert not table.upload()
    assert not table.upload_dirty()
    with pytest.raises(StateError, match="is not lent"):
        table.give_back()
    table.set_row(1, [2])
    table.upload_dirty()
    assert counters(table) == (2, 2)
    assert np.array_equal(on_device(table), table.host_entries)


def test_a_table_lent_before_its_first_upload_comes_back_defined(make: Any) -> None:
    table = make(1, 2, 4)
    table.set_row(0, [1])
    table.lend("Batch")
    table.tensor.fill_from(np.full((1, 2, 2), 9, np.int32))
    table.give_back()
    assert (on_device(table) == -1).all()
    assert not table.upload()


def test_closing_frees_everything_once(device: Device) -> None:
    memory, pinned = device.memory.current_bytes, device.pinned.current_bytes
    table = KVPageTable(device, 2, 4, 8)
    table.upload()
    assert device.memory.current_bytes == memory + 2 * 2 * 4 * 4
    assert device.pinned.current_bytes > pinned
    table.close()
    table.close()
    assert (device.memory.current_bytes, device.pinned.current_bytes) == (memory, pinned)
    calls: dict[str, tuple[Any, ...]] = {
        "set_row": (0, []),
        "set_identity": (),
        "upload": (),
        "upload_dirty": (),
        "check_invariants": (),
        "row": (0,),
        "lend": ("Batch",),
        "give_back": (),
        "gather_rows": (None, None, 0),
    }
    for call, arguments in calls.items():
        with pytest.raises(StateError, match="page table is closed"):
            getattr(table, call)(*arguments)
    with pytest.raises(StateError, match="is closed"):
        _ = table.tensor


def test_staging_is_taken_at_the_first_upload(device: Device) -> None:
    before = device.pinned.allocations
    table = KVPageTable(device, 2, 4, 8)
    table.lend("Batch")
    table.give_back()
    assert device.pinned.allocations == before
    table.close()
