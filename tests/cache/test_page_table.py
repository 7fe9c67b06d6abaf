"""KVPageTable: the facts of the reference, and the hazards of it that are gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.cache.device_table import DeviceTable
from numba_kv.cache.page_table import KVPageTable
from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InvariantError, ShapeError, StateError
from numba_kv.geometry import MAX_POOL_PAGES

INT32 = dtype("int32")


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.fixture
def make(device: Device) -> Iterator[Any]:
    made: list[KVPageTable] = []

    def build(*args: Any, **kwargs: Any) -> KVPageTable:
        made.append(KVPageTable(device, *args, **kwargs))
        return made[-1]

    yield build
    for table in made:
        table.close()


def k(table: KVPageTable, slot: int) -> list[int]:
    return table.row(slot).tolist()


def v(table: KVPageTable, slot: int) -> list[int]:
    return table.host_entries[slot, 1].tolist()


def on_device(table: KVPageTable) -> np.ndarray:
    return table.tensor.to_host()


def counters(table: KVPageTable) -> tuple[int, int]:
    return table.last_upload_entries, table.last_upload_ranges


# -- mutators


@pytest.mark.parametrize("num_pages", [12, 17])
def test_identity_maps_every_page_and_shifts_v_by_the_whole_pool(make: Any, num_pages: int) -> None:
    table = make(3, 4, num_pages)
    table.set_identity()
    expected = np.arange(12).reshape(3, 4)
    assert np.array_equal(table.host_entries[:, 0], expected)
    assert np.array_equal(table.host_entries[:, 1], expected + num_pages)
    table.check_invariants()
    assert table.is_identity


def test_identity_does_not_count_reserved_pages(make: Any) -> None:
    make(2, 4, 10, reserved_pages=2).set_identity()
    table = make(2, 4, 9, reserved_pages=2)
    with pytest.raises(InputError, match=r"set_identity: 2 rows of 4 pages need 8, the pool has 7"):
        table.set_identity()
    assert not table.is_identity
    assert (table.host_entries == -1).all()


def test_a_row_is_set_and_its_rest_cleared(make: Any) -> None:
    table = make(2, 4, 10)
    table.set_row(1, [3, 7])
    assert k(table, 1) == [3, 7, -1, -1]
    assert v(table, 1) == [13, 17, -1, -1]
    assert k(table, 0) == [-1] * 4


def test_rows_replace_an_identity(make: Any) -> None:
    table = make(3, 3, 12)
    table.set_identity()
    table.set_rows([(0, [8, 9]), (1, []), (2, [4])])
    assert (k(table, 0), v(table, 0)[0]) == ([8, 9, -1], 20)
    assert k(table, 1) == v(table, 1) == [-1] * 3
    assert (k(table, 2)[0], v(table, 2)[0]) == (4, 16)
    assert not table.is_identity
    table.check_invariants()


def test_several_rows_are_set_all_or_none(make: Any) -> None:
    table = make(2, 3, 5)
    table.set_row(0, [1])
    with pytest.raises(InputError, match=r"ids: page 5 at index 0 for slot 1 is not in 0\.\.4"):
        table.set_rows([(0, [2, 3]), (1, [5])])
    assert k(table, 0) == [1, -1, -1]
    assert k(table, 1) == [-1] * 3


def test_a_slot_is_given_once(make: Any) -> None:
    table = make(2, 3, 8)
    with pytest.raises(InputError, match="rows: slot 0 is given twice"):
        table.set_rows([(0, [2]), (0, [5])])
    assert k(table, 0) == [-1] * 3


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([-2], r"page -2 at index 0 for slot 0 is not in 0\.\.4"),
        ([5], r"page 5 at index 0"),
        ([1, -1, 2], r"page -1 at index 1"),
        (None, r"ids: None for slot 0 is not a sequence of page ids"),
        ([0, 1, 2, 3], r"4 pages given for slot 0, a row has at most 3"),
        ([2, 0, 2], r"page 2 is given at 0 and at 2 for slot 0"),
        ([2**70], r"page 1180591620717411303424 at index 0"),
        ([True], r"ids\[0\]: True is not an integer"),
        ([1.0], r"ids\[0\]: 1\.0 is not an integer"),
        ("12", r"ids\[0\]: '1' is not an integer"),
        (np.array([2**63], np.uint64), r"page 9223372036854775808 at index 0"),
        (np.array([1.0]), r"ids: float64 array of shape \(1,\)"),
        (np.array([[1]]), r"ids: int64 array of shape \(1, 1\)"),
        (np.array([True]), r"ids: bool array"),
    ],
)
def test_bad_ids_of_a_dense_row_change_nothing(make: Any, ids: Any, message: str) -> None:
    table = make(1, 3, 5)
    table.set_row(0, [1])
    with pytest.raises(InputError, match=message):
        table.set_row(0, ids)
    assert k(table, 0) == [1, -1, -1]


@pytest.mark.parametrize(
    "ids", [[2, 0], (2, 0), iter([2, 0]), np.array([2, 0], np.uint8), np.array([9, 2, 0])[1:], [np.int32(2), np.uint64(0)]]
)
def test_ids_are_any_integers(make: Any, ids: Any) -> None:
    table = make(2, 3, 5)
    table.set_row(np.int64(1), ids)
    assert k(table, 1) == [2, 0, -1]


@pytest.mark.parametrize("rows", [5, [1], [(1,)], {0: [1]}, [(0, [1], 1)]])
def test_rows_are_pairs(make: Any, rows: Any) -> None:
    table = make(2, 3, 5)
    with pytest.raises(InputError, match="is not a sequence of pairs"):
        table.set_rows(rows)


def test_clearing_a_row_leaves_its_neighbours(make: Any) -> None:
    table = make(3, 3, 12)
    table.set_rows([(0, [7, 8]), (1, [3]), (2, [10, 11])])
    table.set_rows([(1, [])])
    assert (k(table, 0), v(table, 0)) == ([7, 8, -1], [19, 20, -1])
    assert k(table, 1) == v(table, 1) == [-1] * 3
    assert (k(table, 2), v(table, 2)) == ([10, 11, -1], [22, 23, -1])
    assert not table.is_identity
    table.check_invariants()


def test_sparse_rows_have_holes_and_share_pages_between_slots(make: Any) -> None:
    table = make(2, 8, 24, "sparse")
    for slot, logical, page in [(0, 1, 7), (0, 2, 3), (0, 6, 11), (1, 4, 7)]:
        table.set_entry(slot, logical, page)
    table.check_invariants()
    assert k(table, 0) == [-1, 7, 3, -1, -1, -1, 11, -1]
    assert v(table, 0) == [-1, 31, 27, -1, -1, -1, 35, -1]
    assert (k(table, 1)[4], v(table, 1)[4]) == (7, 31)


def test_sparse_slot_holds_a_page_once(make: Any) -> None:
    table = make(1, 8, 16, "sparse")
    table.set_entry(0, 1, 5)
    with pytest.raises(InputError, match="page: 5 is at logical page 1 of slot 0 already"):
        table.set_entry(0, 6, 5)
    assert k(table, 0)[6] == -1
    table.set_entry(0, 1, 5)  # what is there may be set again
    table.clear_entry(0, 1)
    table.clear_entry(0, 1)
    assert k(table, 0) == v(table, 0) == [-1] * 8
    table.set_entry(0, 6, 5)


def test_dense_slot_holds_a_page_once_too(make: Any) -> None:
    table = make(1, 4, 8)
    table.set_row(0, [1, 2])
    with pytest.raises(InputError, match="page: 2 is at logical page 1"):
        table.set_entry(0, 2, 2)
    assert k(table, 0) == [1, 2, -1, -1]


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("set_row", (0, [2, -1, 16]), r"page 16 at index 2 for slot 0 is not in -1\.\.15"),
        ("set_row", (0, [2, -1, 2]), "page 2 is given at 0 and at 2"),
        ("set_entry", (-1, 0, 1), r"slot: -1 is not in 0\.\.0"),
        ("set_entry", (1, 0, 1), r"slot: 1 is not in 0\.\.0"),
        ("set_entry", (0, -1, 1), r"logical: -1 is not in 0\.\.7"),
        ("set_entry", (0, 8, 1), r"logical: 8 is not in 0\.\.7"),
        ("set_entry", (0, 0, -1), r"page: -1 is not in 0\.\.15; clear_entry\(\)"),
        ("set_entry", (0, 0, 16), r"page: 16 is not in 0\.\.15"),
        ("set_entry", (0, 0, 2**40), r"page: 1099511627776 is not in"),
        ("set_entry", (False, 0, 1), "slot: False is not an integer"),
        ("set_entry", (0, 0.0, 1), r"logical: 0\.0 is not an integer"),
        ("set_entry", (0, 0, np.bool_(True)), "page: .*True.* is not an integer"),
        ("clear_entry", (-1, 0), "slot: -1"),
        ("clear_entry", (0, 8), "logical: 8"),
        ("row", (1,), "slot: 1"),
    ],
)
def test_bad_arguments_change_nothing(make: Any, call: str, arguments: tuple[Any, ...], message: str) -> None:
    table = make(1, 8, 16, "sparse")
    table.set_entry(0, 1, 5)
    before = table.host_entries.copy()
    with pytest.raises(InputError, match=message):
        getattr(table, call)(*arguments)
    assert np.array_equal(table.host_entries, before)


def test_sparse_row_keeps_its_holes(make: Any) -> None:
    table = make(1, 4, 8, "sparse")
    table.set_row(0, [-1, 3, -1, 0])
    assert k(table, 0) == [-1, 3, -1, 0]
    assert v(table, 0) == [-1, 11, -1, 8]
    table.check_invariants()


def test_sparse_row_replaces_entries(make: Any) -> None:
    table = make(1, 8, 16, "sparse")
    table.set_entry(0, 4, 3)
    table.set_entry(0, 7, 9)
    table.set_row(0, [9, 3])
    assert k(table, 0) == [9, 3, -1, -1, -1, -1, -1, -1]
    assert v(table, 0)[:3] == [25, 19, -1]
    table.check_invariants()
    table.set_entry(0, 7, 4)  # 4 is free, 9 and 3 are not
    with pytest.raises(InputError, match="page: 9"):
        table.set_entry(0, 5, 9)


def test_reserved_pages_are_never_in_the_table(make: Any) -> None:
    table = make(1, 4, 8, "sparse", reserved_pages=2)
    table.set_row(0, [5])
    assert v(table, 0)[0] == 13
    for call in (lambda: table.set_row(0, [6]), lambda: table.set_entry(0, 1, 7)):
        with pytest.raises(InputError, match=r"not in -?[01]\.\.5"):
            call()


@pytest.mark.parametrize(
    "mutate",
    [
        lambda t: t.set_row(0, [0, 1]),
        lambda t: t.set_rows([]),
        lambda t: t.set_entry(1, 1, 3),
        lambda t: t.clear_entry(1, 1),
    ],
)
def test_any_other_mutator_ends_the_identity(make: Any, mutate: Any) -> None:
    table = make(2, 2, 4)
    table.set_identity()
    mutate(table)
    assert not table.is_identity
    table.set_identity()
    assert table.is_identity


# -- uploads


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


class SlowDevice:
    """Stands in for a GPU that is busy: copies and events happen only when `run` is called."""

    def __init__(self, device: Device) -> None:
        self.device, self.pending, self.waits = device, [], 0
        self.stream = self
        self.handle = 0

    def allocate_staging(self, nbytes: int) -> Any:
        return self.device.allocate_staging(nbytes)

    def copy_to_device(self, destination: int, source: int, nbytes: int, stream: Any) -> None:
        self.pending.append((destination, source, nbytes))

    def active(self) -> Any:
        return contextlib.nullcontext()

    def record(self) -> Any:
        return SlowEvent(self)

    def run(self) -> None:
        for destination, source, nbytes in self.pending:
            self.device.copy_to_device(destination, source, nbytes, self.device.stream)
        self.pending.clear()
        self.device.stream.synchronize()


class SlowEvent:
    def __init__(self, device: SlowDevice) -> None:
        self.device, self.behind = device, len(device.pending)

    @property
    def is_done(self) -> bool:
        return not self.device.pending

    def synchronize(self) -> None:
        self.device.waits += bool(self.device.pending)
        self.device.run()


def test_uploads_behind_a_busy_stream_neither_wait_nor_overwrite_each_other(device: Device) -> None:
    slow = SlowDevice(device)
    tensor = device.tensor((2, 2, 2), INT32)
    tensor.device = slow  # type: ignore[assignment]
    copy = DeviceTable(slow, 2, 2, tensor)  # type: ignore[arg-type]
    states = [np.full((2, 2, 2), n, np.int32) for n in range(5)]
    for n, state in enumerate(states):
        copy.send(state, [(0, 8)], None)
        assert len(slow.pending) == n + 1
    assert slow.waits == 0
    seen = []
    tensor.device = device
    for _ in states:
        destination, source, nbytes = slow.pending.pop(0)
        device.copy_to_device(destination, source, nbytes, device.stream)
        seen.append(tensor.to_host().reshape(-1)[0])
    assert seen == [0, 1, 2, 3, 4]


# -- borrowed and wider memory


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


# -- invariants


@pytest.mark.parametrize(
    ("mode", "at", "value", "message"),
    [
        ("dense", (1, 1, 3), 5, "slot 1, logical page 3: K is unused but V is 5"),
        ("sparse", (1, 0, 0), -2, r"slot 1, logical page 0: K -2 is neither -1 nor in 0\.\.9"),
        ("dense", (2, 0, 1), 10, "slot 2, logical page 1: K 10 is neither"),
        ("dense", (2, 1, 0), 0, r"slot 2, logical page 0: V is 0, not K \+ num_pages = 18"),
        ("dense", (0, slice(None), 0), -1, "slot 0, logical page 1: page 1 follows the unused logical page 0"),
        ("sparse", (0, slice(None), 1), [0, 12], "slot 0, logical page 1: page 0 is mapped at logical page 0 too"),
        ("sparse", (0, slice(None), 4), [9, 21], "slot 0, logical page 4: page 9 lies behind the 4 pages of a row"),
    ],
)
def test_the_first_violation_is_named(make: Any, device: Device, mode: str, at: Any, value: Any, message: str) -> None:
    table = make(3, 4, 12, mode, reserved_pages=2, tensor=device.tensor((3, 2, 5), INT32))
    table.set_rows([(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6, 7, 8])])
    table.check_invariants()
    table._host.entries[at] = value
    with pytest.raises(InvariantError, match=message):
        table.check_invariants()


def test_the_host_copy_cannot_be_written(make: Any) -> None:
    table = make(1, 2, 4)
    for view in (table.row(0), table.host_entries):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


# -- ownership


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


def test_accessors(make: Any) -> None:
    table = make(2, 3, 8, "sparse", name="draft")
    assert (table.max_batch, table.max_pages_per_seq, table.num_pages, table.mode, table.name) == (2, 3, 8, "sparse", "draft")
    assert (table.tensor.shape, table.tensor.dtype) == ((2, 2, 3), INT32)
    assert repr(table) == "KVPageTable('draft', sparse, [2, 2, 3], num_pages=8)"


def test_rows_cannot_be_moved() -> None:
    moves = ("compact", "move", "swap", "permute", "reorder", "evict")
    assert [name for name in dir(KVPageTable) if any(move in name.lower() for move in moves)] == []


# -- gather


def slots_on(device: Device, values: list[int]) -> Tensor:
    slots = device.tensor((len(values),), INT32)
    slots.fill_from(np.array(values, np.int32))
    return slots


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


# -- on a GPU


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
