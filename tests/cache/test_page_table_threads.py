"""A KVPageTable and threads: any thread may call, one at a time, and no error leaves the table unusable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.cache.page_table import KVPageTable
from numba_kv.device import Device, create_device
from numba_kv.errors import DeviceError, StateError
from tests.helpers.page_tables import INT32, k, made_tables, on_device, slots_on
from tests.helpers.threads import in_a_thread

#: Every call that takes part, with arguments that are right for a table of 2 slots, 3 pages a row and 12 pages.
CALLS: dict[str, Callable[[KVPageTable], Any]] = {
    "set_identity": lambda t: t.set_identity(),
    "set_row": lambda t: t.set_row(0, [1]),
    "set_rows": lambda t: t.set_rows([(0, [1])]),
    "set_entry": lambda t: t.set_entry(0, 0, 1),
    "clear_entry": lambda t: t.clear_entry(0, 0),
    "check_invariants": lambda t: t.check_invariants(),
    "upload": lambda t: t.upload(),
    "upload_dirty": lambda t: t.upload_dirty(),
    "join": lambda t: t.join(),
    "gather_rows": lambda t: t.gather_rows(t.tensor, t.tensor, 0),
    "lend": lambda t: t.lend("Batch"),
    "give_back": lambda t: t.give_back(None),
    "close": lambda t: t.close(),
}


@pytest.fixture
def device() -> Device:
    return create_device()


@pytest.fixture
def make(device: Device) -> Iterator[Any]:
    with made_tables(device) as make:
        yield make


class Blocked:
    """Runs a call in a thread that stops inside it until `go_on`."""

    def __init__(self, call: Callable[[Callable[[], None]], Any]) -> None:
        self._inside, self._may_go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=call, args=(self._stop,))
        self._thread.start()
        assert self._inside.wait(60)

    def _stop(self) -> None:
        self._inside.set()
        assert self._may_go.wait(60)

    def go_on(self) -> None:
        self._may_go.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def assert_all_refused(table: KVPageTable) -> None:
    for name, call in CALLS.items():
        before = table.host_entries.copy()
        with pytest.raises(StateError, match="page table is in use by another thread; calls must not overlap"):
            call(table)
        assert np.array_equal(table.host_entries, before), name


def test_no_call_overlaps_a_mutator(make: Any) -> None:
    table = make(2, 3, 12)

    def rows(stop: Callable[[], None]) -> Iterator[tuple[int, list[int]]]:
        yield 0, [4, 5]
        stop()
        yield 1, [6]

    setting = Blocked(lambda stop: table.set_rows(rows(stop)))
    assert_all_refused(table)
    setting.go_on()
    assert (k(table, 0), k(table, 1)) == ([4, 5, -1], [6, -1, -1])
    table.set_row(1, [7])
    assert table.upload()
    assert np.array_equal(on_device(table), table.host_entries)


def test_no_call_overlaps_an_upload(make: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make(2, 3, 12)
    table.set_identity()

    def upload(stop: Callable[[], None]) -> None:
        copy = device.copy_to_device

        def slow(*arguments: Any) -> None:
            stop()
            copy(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(device, "copy_to_device", slow)
            table.upload()

    uploading = Blocked(upload)
    assert_all_refused(table)
    uploading.go_on()
    assert np.array_equal(on_device(table), table.host_entries)
    assert not table.upload()


def test_a_call_from_the_caller_s_own_iterable_comes_first(make: Any) -> None:
    table = make(2, 3, 12)

    def rows() -> Iterator[tuple[int, list[int]]]:
        yield 0, [4, 5]
        table.set_entry(1, 0, 3)

    table.set_rows(rows())
    assert k(table, 0) == [4, 5, -1]
    assert k(table, 1) == [3, -1, -1]
    table.check_invariants()
    assert table.upload()
    assert np.array_equal(on_device(table), table.host_entries)


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_an_error_of_the_caller_s_own_iterable_leaves_the_table_usable(make: Any, error: type[BaseException]) -> None:
    table = make(2, 3, 12)

    def rows() -> Iterator[tuple[int, list[int]]]:
        yield 0, [4, 5]
        raise error("the caller's queue")

    with pytest.raises(error, match="queue"):
        table.set_rows(rows())
    assert k(table, 0) == [-1] * 3
    table.set_row(0, [1])
    assert table.upload()


@pytest.mark.parametrize("upload", ["upload", "upload_dirty"])
@pytest.mark.parametrize("error", [DeviceError, RuntimeError, KeyboardInterrupt])
def test_a_failed_copy_leaves_the_rows_to_be_sent(
    make: Any, device: Device, monkeypatch: pytest.MonkeyPatch, upload: str, error: type[BaseException]
) -> None:
    table = make(2, 3, 12)
    table.upload()
    table.set_identity()

    def fail(*arguments: Any) -> None:
        raise error("copy")

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy_to_device", fail)
        with pytest.raises(error, match="copy"):
            getattr(table, upload)()
    assert getattr(table, upload)()
    assert np.array_equal(on_device(table), table.host_entries)


def test_a_device_that_cannot_be_made_current_leaves_the_table_usable(
    make: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make(2, 3, 12)
    table.set_identity()

    def fail() -> bool:
        raise DeviceError("context: the driver reports CUDA_ERROR_UNKNOWN")

    with monkeypatch.context() as patch:
        patch.setattr(device, "enter", fail)
        with pytest.raises(DeviceError, match="UNKNOWN"):
            table.upload()
    assert table.upload()


def test_mutators_leave_the_current_device_alone(make: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost no driver call."""
    table = make(2, 3, 12)
    monkeypatch.setattr(device, "enter", lambda: pytest.fail("the device was made current"))
    for name in ("set_identity", "set_row", "set_rows", "set_entry", "clear_entry", "check_invariants"):
        table.set_rows([(0, []), (1, [])])
        CALLS[name](table)


def test_every_call_works_from_a_fresh_thread(device: Device) -> None:
    """Each in a thread that never saw the device."""
    table = in_a_thread(lambda: KVPageTable(device, 2, 3, 12))
    for name in (
        "set_identity",
        "upload",
        "set_row",
        "set_rows",
        "upload_dirty",
        "set_entry",
        "clear_entry",
        "check_invariants",
    ):
        in_a_thread(lambda name=name: CALLS[name](table))
    in_a_thread(lambda: table.set_rows([(0, [3, 1]), (1, [2])]))
    other = in_a_thread(lambda: device.as_stream(None))
    assert in_a_thread(lambda: table.upload(other))
    in_a_thread(table.join)
    assert np.array_equal(in_a_thread(table.tensor.to_host), table.host_entries)
    slots, destination = in_a_thread(lambda: slots_on(device, [1, 0])), device.tensor((2, 2, 3), INT32)
    rows = in_a_thread(lambda: table.gather_rows(destination, slots, 2))
    assert np.array_equal(in_a_thread(rows.to_host), table.host_entries[[1, 0]])
    loan = object()
    in_a_thread(lambda: table.lend("Batch", loan))
    in_a_thread(lambda: table.give_back(loan))
    assert (in_a_thread(table.tensor.to_host) == -1).all()
    in_a_thread(table.close)
    in_a_thread(other.close)
    assert device.pinned.current_bytes == 0
