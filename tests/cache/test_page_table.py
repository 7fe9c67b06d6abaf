"""KVPageTable on the host: mutators, invariants and what a table says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from numba_kv.cache.page_table import KVPageTable
from numba_kv.device import Device, create_device
from numba_kv.errors import InputError, InvariantError
from tests.helpers.page_tables import INT32, k, made_tables, v


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.fixture
def make(device: Device) -> Iterator[Any]:
    with made_tables(device) as make:
        yield make


def test_a_table_needs_a_device() -> None:
    with pytest.raises(InputError, match="device: NoneType is not a Device"):
        KVPageTable(None, 1, 1, 1)  # type: ignore[arg-type]


# -- mutators


@pytest.mark.parametrize("ids", [{1: 2}, {1, 2}, b"\x01\x02", bytearray(2), {1: 2}.keys()])
def test_ids_without_an_order_are_refused(make: Any, ids: Any) -> None:
    table = make(1, 4, 8)
    with pytest.raises(InputError, match="ids: .* for slot 0 is not a sequence of page ids"):
        table.set_row(0, ids)
    assert k(table, 0) == [-1] * 4


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


# -- what it is


def test_accessors(make: Any) -> None:
    table = make(2, 3, 8, "sparse", name="draft")
    assert (table.max_batch, table.max_pages_per_seq, table.num_pages, table.mode, table.name) == (2, 3, 8, "sparse", "draft")
    assert (table.tensor.shape, table.tensor.dtype) == ((2, 2, 3), INT32)
    assert repr(table) == "KVPageTable('draft', sparse, [2, 2, 3], num_pages=8)"


def test_rows_cannot_be_moved() -> None:
    moves = ("compact", "move", "swap", "permute", "reorder", "evict")
    assert [name for name in dir(KVPageTable) if any(move in name.lower() for move in moves)] == []
