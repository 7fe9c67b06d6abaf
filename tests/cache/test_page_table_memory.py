"""Memory of a KVPageTable: borrowed and wider tensors, limits of a pool, bad constructor arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.cache.page_table import KVPageTable
from numba_kv.device import Device, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import MAX_POOL_PAGES
from tests.helpers.page_tables import INT32, counters, made_tables, on_device


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.fixture
def make(device: Device) -> Iterator[Any]:
    with made_tables(device) as make:
        yield make


def test_a_borrowed_tensor_may_be_wider(make: Any, device: Device) -> None:
    tensor = device.tensor((2, 2, 5), INT32)
    table = make(2, 3, 8, tensor=tensor)
    table.set_identity()
    table.check_invariants()
    table.upload()
    assert table.max_pages_per_seq == 3
    assert table.row(1).tolist() == [3, 4, 5]
    assert tensor.to_host().tolist() == [
        [[0, 1, 2, -1, -1], [8, 9, 10, -1, -1]],
        [[3, 4, 5, -1, -1], [11, 12, 13, -1, -1]],
    ]
    table.set_row(1, [7])
    table.upload_dirty()
    assert counters(table) == (6, 2)
    with pytest.raises(InputError, match="4 pages given for slot 0, a row has at most 3"):
        table.set_row(0, [0, 1, 2, 3])
    with pytest.raises(InputError, match=r"logical: 3 is not in 0\.\.2"):
        table.set_entry(0, 3, 7)
    table.close()
    assert tensor.to_host()[0, 0, 0] == 0  # still there


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((2, 2, 2), "int32"), ((3, 2, 3), "int32"), ((2, 1, 3), "int32"), ((2, 6), "int32"), ((2, 2, 3), "int64")],
)
def test_a_tensor_that_does_not_fit_is_refused(device: Device, shape: tuple[int, ...], kind: str) -> None:
    with pytest.raises(ShapeError, match=rf"tensor: {kind} .* dense int32 \[2, 2, at least 3\] wanted"):
        KVPageTable(device, 2, 3, 8, tensor=device.tensor(shape, dtype(kind)))


def test_a_tensor_is_dense_and_on_the_device(device: Device) -> None:
    wide = device.tensor((2, 2, 6), INT32)
    with pytest.raises(ShapeError, match="strides"):
        KVPageTable(device, 2, 3, 8, tensor=wide[:, :, :4])
    elsewhere = create_device().tensor((2, 2, 3), INT32)
    with pytest.raises(InputError, match="not a tensor on the table's device"):
        KVPageTable(device, 2, 3, 8, tensor=elsewhere)
    with pytest.raises(InputError, match="tensor: array"):
        KVPageTable(device, 2, 3, 8, tensor=np.zeros((2, 2, 3), np.int32))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 8), "max_batch: 0 is not in 1"),
        ((1, -4, 8), "max_pages_per_seq: -4"),
        ((1, 4, 0), "num_pages: 0"),
        ((1, 4, MAX_POOL_PAGES + 1), rf"num_pages: {MAX_POOL_PAGES + 1} is not in 1\.\.{MAX_POOL_PAGES}"),
        ((True, 4, 8), "max_batch: True is not an integer"),
        ((1, 4.0, 8), r"max_pages_per_seq: 4\.0 is not an integer"),
        ((1, 4, 8, "ring"), "mode: 'ring' is not 'dense' or 'sparse'"),
    ],
)
def test_bad_constructor_arguments(device: Device, arguments: tuple[Any, ...], message: str) -> None:
    before = device.memory.current_bytes
    with pytest.raises(InputError, match=message):
        KVPageTable(device, *arguments)
    assert device.memory.current_bytes == before


@pytest.mark.parametrize("reserved", [-1, 9])
def test_bad_reserved_pages(device: Device, reserved: int) -> None:
    with pytest.raises(InputError, match=rf"reserved_pages: {reserved} is not in 0\.\.8"):
        KVPageTable(device, 1, 4, 8, reserved_pages=reserved)


def test_a_pool_of_reserved_pages_maps_nothing(make: Any) -> None:
    table = make(1, 1, 2, reserved_pages=2)
    with pytest.raises(InputError, match="page: 0 is not in an empty range"):
        table.set_entry(0, 0, 0)
    with pytest.raises(InputError, match="page 0 at index 0 for slot 0 is not in a pool without usable pages"):
        table.set_row(0, [0])
    with pytest.raises(InputError, match="need 1, the pool has 0"):
        table.set_identity()
    table.set_row(0, [])
    table.check_invariants()
    assert table.upload()


def test_v_ids_reach_the_end_of_int32(make: Any) -> None:
    table = make(1, 2, np.int64(MAX_POOL_PAGES))
    table.set_row(0, [MAX_POOL_PAGES - 1])
    table.upload()
    assert on_device(table).tolist() == [[[MAX_POOL_PAGES - 1, -1], [2 * MAX_POOL_PAGES - 1, -1]]]
    assert 2 * MAX_POOL_PAGES - 1 <= 2**31 - 1
