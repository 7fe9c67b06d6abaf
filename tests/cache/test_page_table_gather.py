"""Row gather of a KVPageTable: the table of an execution batch, built on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.device import Device, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from tests.helpers.page_tables import INT32, made_tables, slots_on


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.fixture
def make(device: Device) -> Iterator[Any]:
    with made_tables(device) as make:
        yield make


def test_gather_builds_the_table_of_a_step(make: Any, device: Device) -> None:
    table = make(4, 2, 8)
    table.set_identity()
    table.upload()
    destination = device.tensor((4, 2, 2), INT32)
    order = [2, 0, 3]
    rows = table.gather_rows(destination, slots_on(device, order), 3)
    assert rows.shape == (3, 2, 2)
    expected = [[[order[r] * 2 + j + 8 * h for j in range(2)] for h in range(2)] for r in range(3)]
    assert rows.to_host().tolist() == expected
    assert (destination.to_host()[3] == 0).all()
    again = table.gather_rows(destination, slots_on(device, [1]), 1)
    assert again.address == rows.address == destination.address
    assert destination.to_host().tolist()[:3] == [[[2, 3], [10, 11]], *expected[1:]]


def test_gather_gives_an_unmapped_row_for_a_slot_that_does_not_exist(make: Any, device: Device) -> None:
    table = make(3, 2, 6, tensor=device.tensor((3, 2, 3), INT32))
    table.set_identity()
    table.upload()
    destination = device.tensor((24,), INT32)
    rows = table.gather_rows(destination, slots_on(device, [-1, 3, 2**31 - 1, 1]), np.int64(3)).to_host()
    assert (rows == -1).all()
    assert (destination.to_host()[18:] == 0).all()


def test_gather_reads_what_the_slots_hold_now(make: Any, device: Device) -> None:
    table = make(2, 2, 4)
    table.set_identity()
    table.upload()
    destination, slots = device.tensor((1, 2, 2), INT32), slots_on(device, [0])
    assert table.gather_rows(destination, slots, 1).to_host()[0, 0, 0] == 0
    slots.fill_from(np.array([1], np.int32))
    assert table.gather_rows(destination, slots, 1).to_host()[0, 0, 0] == 2


def test_gather_of_no_rows_is_empty(make: Any, device: Device) -> None:
    table = make(2, 2, 4)
    rows = table.gather_rows(device.tensor((1, 2, 2), INT32), device.tensor((0,), INT32), 0)
    assert rows.shape == (0, 2, 2)


def test_gather_refuses_what_does_not_fit(make: Any, device: Device) -> None:
    table = make(2, 2, 4)
    good, slots = device.tensor((2, 2, 2), INT32), slots_on(device, [0, 1])
    for rows in (-1, 3):
        with pytest.raises(InputError, match=rf"num_rows: {rows} is not in 0\.\.2"):
            table.gather_rows(good, slots, rows)
    with pytest.raises(ShapeError, match="destination: int32 .* at least 8 elements"):
        table.gather_rows(good[:1], slots, 2)
    with pytest.raises(ShapeError, match="slots: int32 .* at least 2 elements"):
        table.gather_rows(good, slots[:1], 2)
    with pytest.raises(ShapeError, match="destination: int64"):
        table.gather_rows(device.tensor((2, 2, 2), dtype("int64")), slots, 2)
    with pytest.raises(ShapeError, match="slots: int64"):
        table.gather_rows(good, device.tensor((2,), dtype("int64")), 2)
    with pytest.raises(ShapeError, match="destination: .* dense"):
        table.gather_rows(device.tensor((2, 2, 4), INT32)[:, :, ::2], slots, 2)
    with pytest.raises(InputError, match="slots: .* is not a tensor"):
        table.gather_rows(good, [0, 1], 2)
    with pytest.raises(InputError, match="destination: .* is not a tensor on the table's device"):
        table.gather_rows(create_device().tensor((2, 2, 2), INT32), slots, 2)
    with pytest.raises(InputError, match="destination: overlaps the table itself"):
        table.gather_rows(table.tensor, slots, 2)
    with pytest.raises(InputError, match="destination: overlaps slots"):
        table.gather_rows(good, good[0, 0], 2)


def test_gather_keeps_few_launches(make: Any, device: Device) -> None:
    table = make(1, 1, 2)
    table.set_identity()
    table.upload()
    slots = slots_on(device, [0])
    for _ in range(3):
        for destination in [device.tensor((1, 2, 1), INT32) for _ in range(6)]:
            assert table.gather_rows(destination, slots, 1).to_host().tolist() == [[[0], [2]]]
    assert len(table._gather._launches) <= 4


def test_a_lent_table_can_be_gathered(make: Any, device: Device) -> None:
    table = make(1, 1, 2)
    table.lend("Batch")
    table.tensor.fill_from(np.array([[[1], [3]]], np.int32))
    rows = table.gather_rows(device.tensor((2,), INT32), slots_on(device, [0]), 1)
    assert rows.to_host().tolist() == [[[1], [3]]]
