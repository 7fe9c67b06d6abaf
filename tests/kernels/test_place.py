"""`place_rows` against its definition in NumPy: forks, rows that come back, and rows that get more; floors that drop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_kv as kv
from numba_kv.device import Device, create_device
from numba_kv.geometry import ceil_div, mapped_pages
from numba_kv.kernels import layout
from numba_kv.kernels.edit import apply_edits
from numba_kv.kernels.place import place_rows
from tests.helpers.step_arrays import StepArrays, full_group, same, window_group

EXAMPLES = 15 if kv.target() == "sim" else 60
ROWS = 4


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def rows_in_use(has_full: bool, lengths: list[int]) -> StepArrays:
    """Return rows at these lengths, reached one token at a time; row r leases the pages that it needs."""
    groups = [
        full_group(4, 8, ROWS * 8 if has_full else 0),
        window_group("sliding", 6, 4, 8, ROWS),
        window_group("chunked", 8, 4, 8, ROWS),
    ]
    arrays = StepArrays(groups, ROWS, 32, edit_words=100)
    for row, length in enumerate(lengths):
        arrays.lengths[row] = arrays.high_water[row] = length
        arrays.appended[row] = 3
        if has_full:
            arrays.lease(row, [8 * row + i for i in range(ceil_div(length, 4))])
        for g, group in enumerate(arrays.groups[1:], 1):
            begin, end = mapped_pages(group.window, 4, group.ring, max(0, length - 1), min(length, 1))
            arrays.mapped_begin[g, row] = begin
            remap(arrays, g, row, begin, end)
    return arrays


def remap(arrays: StepArrays, g: int, row: int, begin: int, end: int) -> None:
    table, group = arrays.page_table(g), arrays.groups[g]
    table[row] = -1
    table[row, 0, begin:end] = arrays.blocks(g)[row, begin:end]
    table[row, 1, begin:end] = arrays.blocks(g)[row, begin:end] + group.num_pages


def placed(a: StepArrays, records: list[dict[str, int]], begins: list[list[int]]) -> StepArrays:
    """Return what the records make of the arrays."""
    b = a.copy()
    for record, begin in zip(records, begins, strict=True):
        row, parent, shared, last = record["ROW"], record["PARENT"], record["SHARED"], record["LAST"]
        b.lengths[row], b.high_water[row] = record["LENGTH"], record["HIGH_WATER"]
        b.floors[row], b.leased[row] = record["FLOOR"], record["LEASED"]
        b.mapped_begin[:, row] = begin
        b.appended[row] = 0
        if parent >= 0:
            b.floors[parent] = record["FLOOR"]
            if not a.groups[0].is_empty:
                ids = [*a.blocks(0)[parent, :shared].tolist(), *([last] if last >= 0 else [])]
                b.blocks(0)[row, : len(ids)] = b.page_table(0)[row, 0, : len(ids)] = ids
                b.page_table(0)[row, 1, : len(ids)] = np.array(ids, np.int32) + a.groups[0].num_pages
        for g, group in enumerate(a.groups[1:], 1):
            remap(b, g, row, begin[g], ceil_div(record["LENGTH"], group.page))
    return b


def run(device: Device, before: StepArrays, records: list[dict[str, int]], begins: list[list[int]]) -> None:
    before = before.copy()
    words: list[int] = []
    for record, begin in zip(records, begins, strict=True):
        line = [0] * layout.PLACE_WORDS
        for name, value in record.items():
            line[getattr(layout, f"PLACE_{name}")] = value
        words += [*line, *begin]
    before.edits[: len(words)] = words
    same(before.launch(place_rows, device, len(records)), placed(before, records, begins))


@settings(max_examples=EXAMPLES)
@given(data=st.data(), length=st.integers(0, 32), has_full=st.booleans())
def test_children_get_what_the_parent_has(device: Device, data: st.DataObject, length: int, has_full: bool) -> None:
    before = rows_in_use(has_full, [3, length, 0, 0])
    shared, rest = divmod(length if has_full else 0, 4)
    begins = before.mapped_begin[:, 1].tolist()
    records = [
        {
            "ROW": row,
            "PARENT": 1,
            "SHARED": shared,
            "LAST": 8 * row if rest else -1,
            "LEASED": shared + (rest > 0),
            "OLD_LENGTH": 0,
            "LENGTH": length,
            "HIGH_WATER": length + data.draw(st.integers(0, 3)),
            "FLOOR": 4 * shared,
        }
        for row in data.draw(st.permutations([2, 3]))
    ]
    run(device, before, records, [begins, begins])


@settings(max_examples=EXAMPLES)
@given(old=st.integers(0, 31), more=st.integers(1, 32), has_full=st.booleans())
def test_a_row_without_a_parent_keeps_its_pages(device: Device, old: int, more: int, has_full: bool) -> None:
    """What was mapped below its new windows is unmapped, whether they overlap the old ones or not."""
    new = min(32, old + more)
    before = rows_in_use(has_full, [5, 0, old, 0])
    begins = [0, *(mapped_pages(g.window, 4, g.ring, old, new - old)[0] for g in before.groups[1:])]
    leased = int(before.leased[2])
    record = {
        "ROW": 2, "PARENT": -1, "SHARED": 0, "LAST": -1, "LEASED": leased, "OLD_LENGTH": old, "LENGTH": new,
        "HIGH_WATER": new, "FLOOR": 2,
    }  # fmt: skip
    run(device, before, [record], [begins])


@pytest.mark.parametrize("keep", [0, 3])
def test_an_edit_lowers_a_floor(device: Device, keep: int) -> None:
    before = rows_in_use(True, [9, 10, 0, 0])
    before.floors[:2] = 8
    line = before.edits[: layout.RECORD_WORDS]
    line[layout.ROW], line[layout.FLAGS], line[layout.LOW_TOKENS] = 1, layout.FLOOR, 4
    line[layout.FIRST] = line[layout.CLEAR_FROM] = keep
    line[layout.CLEAR_TO] = 3
    expected = before.copy()
    expected.floors[1], expected.leased[1] = 4, keep
    expected.page_table(0)[1, :, keep:] = -1
    expected.blocks(0)[1, keep:] = expected.groups[0].null_page
    same(before.launch(apply_edits, device, 1, num_records=1, layout_at=-1, take_back_at=-1, old_tokens=0), expected)
