"""Uploads of a KVPageTable: what is sent, how it is counted, and on which stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.cache.device_table import DeviceTable
from numba_kv.cache.page_table import KVPageTable
from numba_kv.device import Device, create_device
from numba_kv.errors import InputError, InvariantError
from tests.helpers.late_device import LateDevice
from tests.helpers.page_tables import INT32, counters, made_tables, on_device


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.fixture
def make(device: Device) -> Iterator[Any]:
    with made_tables(device) as make:
        yield make


def test_the_second_upload_has_nothing_to_send(make: Any) -> None:
    table = make(2, 3, 6)
    table.set_identity()
    address = table.tensor.address
    assert table.upload()
    assert counters(table) == (12, 1)
    assert not table.upload()
    assert counters(table) == (12, 1)
    assert table.tensor.address == address
    assert on_device(table).reshape(-1)[[0, 3]].tolist() == [0, 6]


def test_only_changed_rows_are_sent(make: Any) -> None:
    table = make(2, 2, 4)
    table.set_identity()
    table.upload()
    table.tensor[1:2].fill_from(np.full((1, 2, 2), -99, np.int32))
    table.set_row(0, [2])
    assert table.upload()
    assert counters(table) == (4, 1)
    assert on_device(table).tolist() == [[[2, -1], [6, -1]], [[-99, -99], [-99, -99]]]


def test_the_same_row_again_is_no_change(make: Any) -> None:
    table = make(1, 3, 8)
    table.set_row(0, [1, 5])
    assert table.upload()
    table.set_row(0, [1, 5])
    assert not table.upload()
    table.set_row(0, [2])
    table.set_row(0, [1, 5])
    assert not table.upload()


def test_back_to_back_uploads_keep_their_order(make: Any) -> None:
    table = make(1, 3, 8)
    table.set_row(0, [1, 2])
    table.upload()
    table.set_row(0, [5, 6, 7])
    table.upload()
    assert on_device(table).tolist() == [[[5, 6, 7], [13, 14, 15]]]


def test_adjacent_changed_rows_are_one_copy(make: Any) -> None:
    table = make(5, 2, 10)
    table.upload()
    table.set_rows([(4, [9]), (0, [1]), (1, [2])])
    table.upload()
    assert counters(table) == (12, 2)


@pytest.mark.parametrize("upload", ["upload", "upload_dirty"])
def test_a_hole_in_a_dense_row_is_refused_at_upload(make: Any, upload: str) -> None:
    table = make(1, 4, 8, name="full")
    table.set_entry(0, 2, 3)
    with pytest.raises(InvariantError, match="full: slot 0, logical page 2: page 3 follows the unused logical page 0"):
        getattr(table, upload)()
    assert counters(table) == (0, 0)
    table.set_entry(0, 0, 1)
    table.set_entry(0, 1, 2)
    assert getattr(table, upload)()  # it was still marked
    assert on_device(table).tolist() == [[[1, 2, 3, -1], [9, 10, 11, -1]]]


def test_entry_uploads_count_entries_and_ranges(make: Any) -> None:
    table = make(2, 16, 40, "sparse")
    table.tensor.fill_from(np.full((2, 2, 16), 77, np.int32))  # what memory holds before the first upload
    table.set_entry(1, 12, 31)
    table.upload_dirty()
    assert counters(table) == (2, 2)
    copy = on_device(table)
    assert (copy[0, 0, 0], copy[1, 0, 12], copy[1, 1, 12]) == (-1, 31, 71)
    assert (copy >= 0).sum() == 2

    table.set_entry(1, 12, 31)
    assert not table.upload_dirty()
    assert counters(table) == (0, 0)
    table.set_entry(1, 8, 20)
    table.set_entry(1, 9, 21)
    assert table.upload_dirty()
    assert counters(table) == (4, 2)
    table.clear_entry(1, 12)
    table.upload_dirty()
    assert counters(table) == (2, 2)
    assert np.array_equal(on_device(table), table.host_entries)
    table.set_identity()
    table.upload()
    assert counters(table) == (64, 1)
    table.set_entry(0, 0, 39)
    assert not table.is_identity
    table.set_identity()
    assert table.is_identity
    table.upload_dirty()
    assert counters(table) == (0, 0)
    assert np.array_equal(on_device(table), table.host_entries)


def test_ranges_run_across_halves_and_rows(make: Any) -> None:
    table = make(2, 2, 4)
    table.upload()
    table.set_identity()
    table.upload_dirty()
    assert counters(table) == (8, 1)


@pytest.mark.parametrize("upload", ["upload", "upload_dirty"])
def test_the_first_upload_is_complete_whatever_was_set_and_cleared(make: Any, upload: str) -> None:
    table = make(3, 2, 6, "sparse")
    table.tensor.fill_from(np.full((3, 2, 2), 77, np.int32))
    table.set_entry(1, 0, 5)
    table.clear_entry(1, 0)
    assert getattr(table, upload)()
    assert (on_device(table) == -1).all()
    assert counters(table) == ((12, 1) if upload == "upload" else (0, 0))
    assert not table.upload()


def test_the_two_kinds_of_upload_share_what_was_sent(make: Any) -> None:
    table = make(2, 3, 9, "sparse")
    table.set_row(0, [1, 2])
    table.upload_dirty()
    assert not table.upload()
    table.set_row(1, [3])
    table.upload()
    assert not table.upload_dirty()
    assert np.array_equal(on_device(table), table.host_entries)


def test_an_upload_may_name_a_stream(make: Any, device: Device) -> None:
    table = make(1, 2, 4)
    other = device.as_stream(None)
    for page in range(4):
        table.set_row(0, [page])
        table.upload(other if page % 2 else None)
    assert np.array_equal(table.tensor.to_host(other), table.host_entries)
    table.set_row(0, [0])
    with pytest.raises(InputError, match="stream"):
        table.upload("main")
    assert table.upload()
    other.synchronize()
    table.close()
    other.close()


def test_uploads_behind_a_busy_stream_neither_wait_nor_overwrite_each_other() -> None:
    device = LateDevice()
    copy = DeviceTable(device, 2, 2, None)
    states = [np.full((2, 2, 2), n, np.int32) for n in range(5)]
    for n, state in enumerate(states):
        copy.send(state, [(0, 8)], None)
        assert len(device.stream.queue) == n + 1
    assert device.stream.waits == 0
    seen = []
    for _ in states:
        device.stream.run(1)
        seen.append(copy.tensor.numpy().reshape(-1)[0])
    assert seen == [0, 1, 2, 3, 4]
    copy.close()


@pytest.mark.gpu
def test_uploads_do_not_wait_for_a_busy_gpu() -> None:
    device = create_device("cuda")
    table = KVPageTable(device, 4, 64, 256)
    table.upload()
    device.stream.synchronize()
    ballast = device.tensor((1 << 28,), INT32)
    for value in range(400):  # about a tenth of a second of work
        device.fill(ballast, value, device.stream)
    mark = device.stream.record()
    for first in range(5):
        table.set_row(first % 4, list(range(first, first + 64)))
        assert table.upload()
    assert not mark.is_done
    assert np.array_equal(table.tensor.to_host(), table.host_entries)
    table.close()
