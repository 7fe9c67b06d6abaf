"""Who a KVPageTable belongs to, and in which order of streams: lending, giving back and closing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.cache.page_table import KVPageTable
from numba_kv.device import Device, create_device
from numba_kv.errors import InputError, StateError
from tests.helpers.late_device import LateDevice, LateStream
from tests.helpers.page_tables import INT32, counters, made_tables, on_device


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
    loan = table.lend("Batch")
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

    table.give_back(loan)
    assert not table.is_lent
    assert (on_device(table) == -1).all()
    assert not table.upload()
    assert not table.upload_dirty()
    with pytest.raises(StateError, match="is not lent"):
        table.give_back(loan)
    table.set_row(1, [2])
    table.upload_dirty()
    assert counters(table) == (2, 2)
    assert np.array_equal(on_device(table), table.host_entries)


def test_only_the_borrower_ends_a_loan(make: Any) -> None:
    table = make(2, 2, 4, name="window 512")
    mine = object()
    assert table.lend("Batch", mine) is mine
    assert table.is_lent_for(mine)
    assert not table.is_lent_for(None)
    for other in (None, object(), "Batch"):
        with pytest.raises(StateError, match="window 512 is lent to Batch; pass what its lend"):
            table.give_back(other)
    with pytest.raises(StateError, match="close: window 512 is lent to Batch"):
        table.close()
    assert table.is_lent
    table.give_back(mine)
    first = table.lend("Batch")
    table.give_back(first)
    second = table.lend("another")
    with pytest.raises(StateError, match="lent to another"):
        table.give_back(first)
    table.give_back(second)
    assert not table.is_lent_for(None)
    table.close()


def test_a_table_lent_before_its_first_upload_comes_back_defined(make: Any) -> None:
    table = make(1, 2, 4)
    table.set_row(0, [1])
    loan = table.lend("Batch")
    table.tensor.fill_from(np.full((1, 2, 2), 9, np.int32))
    table.give_back(loan)
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
        "give_back": (None,),
        "gather_rows": (None, None, 0),
        "join": (),
    }
    for call, arguments in calls.items():
        with pytest.raises(StateError, match="page table is closed"):
            getattr(table, call)(*arguments)
    with pytest.raises(StateError, match="is closed"):
        _ = table.tensor


def test_staging_is_taken_at_the_first_upload(device: Device) -> None:
    before = device.pinned.allocations
    table = KVPageTable(device, 2, 4, 8)
    loan = table.lend("Batch")
    table.give_back(loan)
    assert device.pinned.allocations == before
    table.close()


# -- the order of streams


def filled_by(device: LateDevice, table: KVPageTable, value: int) -> Any:
    """Do what a borrower does, on the device's own stream; return the table once every stream that is known has run."""
    device.fill(table.tensor, value, device.stream)
    device.stream.synchronize()
    return table.tensor.numpy()


@pytest.mark.parametrize("upload", ["upload", "upload_dirty"])
def test_a_borrower_s_work_is_behind_an_upload_on_another_stream(upload: str) -> None:
    device = LateDevice()
    other = device.as_stream(None)
    with made_tables(device) as make:
        table = make(2, 2, 4)
        table.set_identity()
        getattr(table, upload)(other)
        table.lend("Batch")
        assert (filled_by(device, table, 55) == 55).all()
        other.synchronize()
        assert (table.tensor.numpy() == 55).all()
        assert (device.stream.waits, other.waits) == (0, 0)  # type: ignore[attr-defined]


def test_a_table_is_given_back_behind_its_borrower_s_work() -> None:
    """On any stream, also if an upload on yet another one was the last that the table itself did."""
    device = LateDevice()
    uploading, returning = device.as_stream(None), device.as_stream(None)
    with made_tables(device) as make:
        table = make(2, 2, 4)
        table.set_identity()
        table.upload(uploading)
        loan = table.lend("Batch")
        device.fill(table.tensor, 55, device.stream)
        table.give_back(loan, returning)
        assert (table.tensor.to_host(returning) == -1).all()
        device.stream.synchronize()
        assert (table.tensor.numpy() == -1).all()


def test_a_table_of_the_device_s_own_stream_is_lent_without_a_wait() -> None:
    device = LateDevice()
    with made_tables(device) as make:
        table = make(2, 2, 4)
        table.upload()
        before = len(device.stream.queue)
        table.lend("Batch")
        table.join()
        assert len(device.stream.queue) == before
        assert (filled_by(device, table, 55) == 55).all()


@pytest.mark.parametrize("joined_first", [True, False])
def test_another_stream_of_the_device_is_put_behind_uploads(joined_first: bool) -> None:
    """What a hand-over does: the old stream's work, and that of any stream that uploaded, comes before the new one's."""
    device = LateDevice()
    old, uploading, new = device.stream, device.as_stream(None), device.as_stream(None)
    assert isinstance(new, LateStream)
    with made_tables(device) as make:
        table = make(2, 2, 4)
        table.set_identity()
        table.upload(uploading)
        new.wait(old.record())
        if joined_first:
            table.join(new)
            device.stream = new
        else:
            device.stream = new
            table.join()
        assert (filled_by(device, table, 55) == 55).all()
        uploading.synchronize()
        assert (table.tensor.numpy() == 55).all()
        old.synchronize()


def test_any_stream_can_be_put_behind_an_upload() -> None:
    device = LateDevice()
    uploading, reading = device.as_stream(None), device.as_stream(None)
    with made_tables(device) as make:
        table = make(2, 2, 4)
        table.set_identity()
        table.upload()
        table.join(reading)
        assert np.array_equal(table.tensor.to_host(reading), table.host_entries)
        table.set_rows([(0, [3]), (1, [2])])
        table.upload(uploading)
        table.join(reading)
        assert np.array_equal(table.tensor.to_host(reading), table.host_entries)
        table.join(reading)
        assert not table.is_lent


def test_uploads_on_several_streams_keep_their_order() -> None:
    device = LateDevice()
    streams = [device.as_stream(None), None, device.as_stream(None), device.as_stream(None), None]
    with made_tables(device) as make:
        table = make(1, 2, 8)
        for page, stream in enumerate(streams):
            table.set_row(0, [page])
            table.upload(stream)
        assert np.array_equal(table.tensor.to_host(device.stream), table.host_entries)
        for stream in streams:
            if stream is not None:
                stream.synchronize()
        assert table.tensor.numpy()[0, 0].tolist() == [4, -1]


def test_a_stream_to_join_is_a_stream(make: Any) -> None:
    table = make(1, 2, 4)
    with pytest.raises(InputError, match="stream"):
        table.join("main")
    table.lend("Batch")
    table.join()  # a lent table too
    table.close(even_if_lent=True)
    with pytest.raises(StateError, match="page table is closed"):
        table.join()


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("upload", ["upload", "upload_dirty"])
def test_a_borrower_s_work_is_behind_an_upload_on_a_busy_stream(upload: str) -> None:
    device = create_device("cuda")
    busy, ballast = device.as_stream(None), device.tensor((1 << 28,), INT32)
    with made_tables(device) as make:
        table = make(4, 64, 256)
        table.set_identity()
        device.stream.synchronize()
        for value in range(400):  # about a tenth of a second of work
            device.fill(ballast, value, busy)
        assert getattr(table, upload)(busy)
        mark = busy.record()
        table.lend("Batch")
        device.fill(table.tensor, 55, device.stream)
        assert not mark.is_done, "the delay was too short to show anything"
        assert (table.tensor.to_host() == 55).all()
        busy.synchronize()
        assert (table.tensor.to_host() == 55).all()
    busy.close()


@pytest.mark.gpu
def test_a_stream_that_takes_over_is_put_behind_an_upload_on_a_busy_stream() -> None:
    device = create_device("cuda")
    busy, new, ballast = device.as_stream(None), device.as_stream(None), device.tensor((1 << 28,), INT32)
    with made_tables(device) as make:
        table = make(4, 64, 256)
        table.set_identity()
        device.stream.synchronize()
        for value in range(400):
            device.fill(ballast, value, busy)
        assert table.upload(busy)
        mark = busy.record()
        table.join(new)
        device.fill(table.tensor, 55, new)
        assert not mark.is_done, "the delay was too short to show anything"
        assert (table.tensor.to_host(new) == 55).all()
        busy.synchronize()
        assert (table.tensor.to_host(new) == 55).all()
        table.join()
    new.close()
    busy.close()
