"""`apply_edits` and `permute_rows` against NumPy, on hand-made arrays and with the blocks that the host lays out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_kv as kv
from numba_kv.batch.edits import EditBlock
from numba_kv.batch.permutation import cycles_of, fill_holes
from numba_kv.device import Device, create_device
from numba_kv.errors import InvariantError
from numba_kv.geometry import ceil_div, mapped_pages
from numba_kv.kernels import layout
from numba_kv.kernels.edit import apply_edits, permute_rows
from numba_kv.kernels.row_changes import (
    lowest_free,
    note_change,
    note_change_at,
    write_change,
    write_change_at,
    write_records,
)
from numba_kv.kernels.row_growth import find_needs, least_steps, note_even_steps, note_growth, write_growth
from tests.helpers.step_arrays import StepArrays, full_group, same, window_group

EXAMPLES = 15 if kv.target() == "sim" else 50
ROW_STATE = ("lengths", "high_water", "appended", "floors", "leased", "status", "counts")


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def rows_in_use(rows: int = 3, lengths: tuple[int, ...] = (13, 0, 30), has_full: bool = True) -> StepArrays:
    """Return rows of a full and two window groups, pages of 4, at these lengths; row r leases what it needs and r more."""
    pages = rows * 8 if has_full else 0
    groups = [full_group(4, 8, pages), window_group("sliding", 6, 4, 8, rows), window_group("chunked", 8, 4, 8, rows)]
    arrays = StepArrays(groups, rows, 32, edit_words=400)
    for row, length in enumerate(lengths):
        arrays.lengths[row] = length
        arrays.high_water[row] = length + row
        arrays.floors[row] = row
        arrays.status[row] = row
        if has_full:
            arrays.lease(row, [8 * row + i for i in range(min(8, ceil_div(length, 4) + row))])
        for g, group in enumerate(arrays.groups[1:], 1):
            begin, end = mapped_pages(group.window, 4, group.ring, max(0, length - 1), min(length, 1))
            arrays.mapped_begin[g, row] = begin
            arrays.page_table(g)[row, :, begin:end] = arrays.blocks(g)[row, begin:end] + [[0], [group.num_pages]]
    return arrays


def send(device: Device, arrays: StepArrays, block: EditBlock) -> StepArrays:
    """Lay a block out in `edits` and apply it."""
    arrays = arrays.copy()
    arrays.edits[:] = 99
    num_words, layout_at, take_back_at = block.write(arrays.edits)
    assert (arrays.edits[num_words:] == 99).all()
    items, records = block.num_records + block.has_layout, block.num_records
    scalars = {"num_records": records, "layout_at": layout_at, "take_back_at": take_back_at}
    return arrays.launch(apply_edits, device, items, **scalars, old_tokens=block.old_tokens)


Rings = dict[int, list[np.ndarray] | None]


def reset(device: Device, arrays: StepArrays, rows: Rings, bounds: tuple[int, int] | None = None) -> StepArrays:
    """Empty rows, and give those that are to start a sequence their rings."""
    arrays, num_rows = arrays.copy(), arrays.rows
    arrays.edits[:] = 99
    changes, rings = np.zeros(num_rows, np.int8), [np.concatenate(rings_of(arrays, row)) for row in range(num_rows)]
    for row, ring in rows.items():
        changes[row] = 1 if ring is None else 2
        rings[row] = rings[row] if ring is None else np.concatenate(ring)
    low, high = (arrays.lengths,) * 2 if bounds is None else (np.full(num_rows, b) for b in bounds)
    numbers = np.stack([low, low, arrays.leased, low, high]).astype(np.int64)
    num_words = write_records(arrays.edits, changes, len(rows), numbers, np.stack(rings).astype(np.int32))
    assert (arrays.edits[num_words:] == 99).all()
    scalars = {"num_records": -1, "layout_at": -1, "take_back_at": -1, "old_tokens": 0}
    return arrays.launch(apply_edits, device, len(rows), **scalars)


def unchanged_but_edits(found: StepArrays, expected: StepArrays) -> None:
    """Compare everything but the block itself."""
    expected.arrays["edits"] = found.arrays["edits"]
    same(found, expected)


def emptied(arrays: StepArrays, row: int, rings: list[np.ndarray] | None) -> None:
    """Do what a reset of a row does, in place."""
    for name in ROW_STATE:
        arrays.arrays[name][row] = 0
    arrays.live[row] = rings is not None
    for g, group in enumerate(arrays.groups):
        arrays.page_table(g)[row] = -1
        arrays.blocks(g)[row] = group.null_page
        if not group.window.is_full:
            arrays.mapped_begin[g, row] = 0
            if rings is not None:
                arrays.blocks(g)[row] = rings[g - 1][np.arange(group.width) % group.ring]


def rings_of(arrays: StepArrays, row: int) -> list[np.ndarray]:
    return [arrays.blocks(g)[row, : arrays.groups[g].ring].copy() for g in range(1, len(arrays.groups))]


def test_a_retired_row_is_empty_in_every_table(device: Device) -> None:
    """Nothing of a row stays: entries of -1, the null page, length 0. vllm#56734, TensorRT-LLM#16056."""
    arrays = rows_in_use()
    after = reset(device, arrays, {2: None})
    expected = arrays.copy()
    emptied(expected, 2, None)
    unchanged_but_edits(after, expected)


def test_an_admitted_row_gets_its_rings(device: Device) -> None:
    arrays = rows_in_use()
    rings = rings_of(arrays, 0)
    expected = arrays.copy()
    emptied(expected, 1, rings)
    unchanged_but_edits(reset(device, arrays, {1: rings}), expected)


@pytest.mark.parametrize("bounds", [(30, 30), (25, 30), (30, 32)])
def test_bounds_of_a_length_clear_all_that_may_be_mapped(device: Device, bounds: tuple[int, int]) -> None:
    arrays = rows_in_use()
    expected = arrays.copy()
    emptied(expected, 2, None)
    unchanged_but_edits(reset(device, arrays, {2: None}, bounds), expected)


def test_pages_are_added_and_taken_away(device: Device) -> None:
    arrays = rows_in_use()
    held = arrays.leased.astype(np.int64)
    block = EditBlock()
    firsts, sizes = np.array([held[0], held[2] - 2]), np.array([3, 0])
    block.set_pages(np.array([0, 2]), firsts, sizes, np.array([20, 9, 10], np.int32), held[[0, 2]])
    after = send(device, arrays, block)
    expected = arrays.copy()
    expected.lease(0, [*arrays.blocks(0)[0, : held[0]], 20, 9, 10])
    expected.blocks(0)[2, held[2] - 2 :] = expected.groups[0].null_page
    expected.page_table(0)[2, :, held[2] - 2 :] = -1
    expected.leased[2] = held[2] - 2
    unchanged_but_edits(after, expected)


def test_a_model_without_full_attention_has_no_full_table_to_write(device: Device) -> None:
    arrays = rows_in_use(has_full=False)
    expected = arrays.copy()
    emptied(expected, 2, rings_of(arrays, 2))
    unchanged_but_edits(reset(device, arrays, {2: rings_of(arrays, 2)}), expected)


def test_counts_and_offsets_travel_with_the_records(device: Device) -> None:
    arrays = rows_in_use()
    block = EditBlock()
    block.set_layout(np.array([4, 0, 2]), np.array([0, 4, 4, 6]))
    block.set_take_back(np.array([0, 7, 1]))
    expected = arrays.copy()
    expected.counts[:], expected.cu_seqlens_q[:], expected.take_back[:] = [4, 0, 2], [0, 4, 4, 6], [0, 7, 1]
    unchanged_but_edits(send(device, arrays, block), expected)


def test_an_absent_layout_changes_no_count(device: Device) -> None:
    arrays = rows_in_use()
    arrays.counts[:], arrays.take_back[:] = 5, 6
    block = EditBlock()
    block.set_take_back(np.array([1, 2, 3]))
    expected = arrays.copy()
    expected.take_back[:] = [1, 2, 3]
    unchanged_but_edits(send(device, arrays, block), expected)


def test_a_block_that_was_not_planned_for_is_refused() -> None:
    block = EditBlock()
    block.set_layout(np.array([4, 0, 2]), np.array([0, 4, 4, 6]))
    with pytest.raises(InvariantError, match="takes 7 words, 6 were planned"):
        block.write(np.zeros(6, np.int32))


def any_rows(data: st.DataObject) -> tuple[StepArrays, list[int]]:
    """Draw rows of any lengths, and some of them."""
    rows = data.draw(st.integers(1, 4))
    lengths = tuple(data.draw(st.lists(st.integers(0, 32), min_size=rows, max_size=rows)))
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
    return rows_in_use(rows, lengths, data.draw(st.booleans())), chosen


def any_layout(data: st.DataObject, block: EditBlock, expected: StepArrays) -> None:
    """Draw whether the block carries the counts of a step too, and which."""
    if data.draw(st.booleans()):
        counts = np.array(data.draw(st.lists(st.integers(0, 9), min_size=expected.rows, max_size=expected.rows)))
        block.set_layout(counts, np.concatenate([[0], np.cumsum(counts)]))
        expected.counts[:], expected.cu_seqlens_q[1:] = counts, np.cumsum(counts)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_rows_end_and_start(device: Device, data: st.DataObject) -> None:
    arrays, chosen = any_rows(data)
    expected = arrays.copy()
    sources = st.one_of(st.none(), st.integers(0, arrays.rows - 1))
    rings = {row: None if (s := data.draw(sources)) is None else rings_of(arrays, s) for row in chosen}
    for row, ring in rings.items():
        emptied(expected, row, ring)
    unchanged_but_edits(reset(device, arrays, rings), expected)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_pages_come_and_go(device: Device, data: st.DataObject) -> None:
    arrays, chosen = any_rows(data)
    chosen = [] if arrays.groups[0].is_empty else chosen
    expected, block = arrays.copy(), EditBlock()
    ids = list(data.draw(st.permutations(range(8 * arrays.rows))))
    firsts, sizes, taken = [], [], []
    for row in chosen:
        held = int(arrays.leased[row])
        first = data.draw(st.sampled_from([held, data.draw(st.integers(0, held))]))
        size = data.draw(st.integers(0, 8 - held)) if first == held else 0
        fresh, ids = ids[:size], ids[size:]
        firsts.append(first)
        sizes.append(size)
        taken += fresh
        expected.blocks(0)[row, first:] = expected.groups[0].null_page
        expected.page_table(0)[row, :, first:] = -1
        expected.lease(row, [*arrays.blocks(0)[row, :first], *fresh])
    numbers = (np.array(values, np.int64) for values in (chosen, firsts, sizes))
    block.set_pages(*numbers, np.array(taken, np.int32), arrays.leased[chosen].astype(np.int64))
    any_layout(data, block, expected)
    unchanged_but_edits(send(device, arrays, block), expected)


def permuted(device: Device, arrays: StepArrays, sources: list[int]) -> StepArrays:
    """Move rows on the device and compare every array with NumPy's indexing: row i becomes what row sources[i] was."""
    cycles = cycles_of(np.array(sources))
    arrays = arrays.copy()
    starts = len(cycles) + 1 + np.cumsum([0, *map(len, cycles)])
    words = [*starts, *(row for cycle in cycles for row in cycle)]
    arrays.edits[: len(words)] = words
    after = arrays.launch(permute_rows, device, len(cycles))
    expected = arrays.copy()
    for name in ROW_STATE:
        expected.arrays[name][:] = arrays.arrays[name][sources]
    expected.mapped_begin[:] = arrays.mapped_begin[:, sources]
    for g in range(len(arrays.groups)):
        expected.page_table(g)[:] = arrays.page_table(g)[sources]
        expected.blocks(g)[:] = arrays.blocks(g)[sources]
    same(after, expected)
    return after


@pytest.mark.parametrize("sources", [[0, 1, 2], [1, 0, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]])
def test_rows_move(device: Device, sources: list[int]) -> None:
    permuted(device, rows_in_use(), sources)


@settings(max_examples=EXAMPLES)
@given(sources=st.integers(1, 6).flatmap(lambda rows: st.permutations(range(rows))), data=st.data())
def test_any_permutation(device: Device, sources: list[int], data: st.DataObject) -> None:
    """Rows keep all that is theirs wherever they move, and nobody's page is in two rows. vllm-tt-plugin#103, vllm#51890."""
    rows = len(sources)
    lengths = tuple(data.draw(st.lists(st.integers(0, 32), min_size=rows, max_size=rows)))
    permuted(device, rows_in_use(rows, lengths, data.draw(st.booleans())), list(sources))


@given(live=st.lists(st.booleans(), min_size=1, max_size=9))
def test_holes_are_filled_from_above(live: list[bool]) -> None:
    sources = fill_holes(np.array(live))
    assert sorted(sources) == list(range(len(live)))
    assert np.array(live)[sources].tolist() == sorted(live, reverse=True)
    for row in range(sum(live)):
        assert not live[row] or sources[row] == row


def test_words_of_a_record_are_those_of_the_kernel() -> None:
    """The block is also what its layout says, word by word."""
    words, changes = np.zeros(64, np.int32), np.array([2, 0, 1], np.int8)
    rings = np.array([[4, 1], [5, 5], [6, 2]], np.int32)
    numbers = np.array([[0, 0, 0], [0, 0, 0], [3, 9, 1], [7, 9, 0], [9, 11, 2]])
    assert write_records(words, changes, 2, numbers, rings) == 22
    first, second = words[:10].tolist(), words[10:20].tolist()
    assert (first[layout.ROW], second[layout.ROW]) == (0, 2)
    assert (first[layout.FLAGS], second[layout.FLAGS]) == (layout.RESET | layout.LIVE, layout.RESET)
    assert (first[layout.CLEAR_FROM], first[layout.CLEAR_TO], first[layout.COUNT]) == (0, 3, 0)
    assert (first[layout.LOW_TOKENS], first[layout.HIGH_TOKENS]) == (7, 9)
    assert words[first[layout.RINGS_AT] :][:2].tolist() == [4, 1]
    block = EditBlock()
    block.set_pages(np.array([1, 3]), np.array([2, 0]), np.array([2, 1]), np.array([5, 6, 7], np.int32), np.array([2, 4]))
    assert block.write(words) == (23, -1, -1)
    first, second = words[:10].tolist(), words[10:20].tolist()
    assert (first[layout.ROW], first[layout.FLAGS], first[layout.FIRST], first[layout.COUNT]) == (1, 0, 2, 2)
    assert words[first[layout.IDS_AT] :][:2].tolist() == [5, 6]
    assert words[second[layout.IDS_AT]] == 7
    assert (first[layout.CLEAR_FROM], first[layout.CLEAR_TO]) == (4, 4)
    assert (second[layout.CLEAR_FROM], second[layout.CLEAR_TO]) == (1, 4)


def test_places_behind_a_smaller_layout_drop_what_is_there(device: Device) -> None:
    """A captured consumer runs over as many tokens as the widest step had. vllm#56734."""
    arrays = rows_in_use()
    for g in range(3):
        arrays.slots(g)[:] = np.arange(32)
    block = EditBlock()
    block.set_layout(np.array([2, 0, 3]), np.array([0, 2, 2, 5]), 9)
    after = send(device, arrays, block)
    for g in range(3):
        assert after.slots(g).tolist() == [0, 1, 2, 3, 4, -1, -1, -1, -1, *range(9, 32)]


@given(data=st.data())
def test_rows_that_come_and_go_on_the_host(data: st.DataObject) -> None:
    """The lowest free rows are taken; pages of rows that leave are free if nobody else reads them; all else of them is 0."""
    count = data.draw(st.integers(1, 9))
    live = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    before = live.copy()
    leaving = data.draw(st.lists(st.sampled_from(range(count)), unique=True).map(lambda rows: [r for r in rows if live[r]]))
    free = sorted([*np.flatnonzero(~live).tolist(), *leaving])
    wanted = data.draw(st.integers(0, len(free)))
    prompts = [row + 50 for row in range(wanted)]
    changes, request = np.full(count, 9, np.int8), np.full(3 * count, -1, np.int64)
    request[: len(leaving) + wanted] = leaving + prompts
    numbers = np.arange(9 * count).reshape(9, count) + 1
    numbers[2] = live * (np.arange(count) % 3)
    numbers[6] = data.draw(st.lists(st.sampled_from([0, 8]), min_size=count, max_size=count))  # floors
    old = numbers.copy()
    rings, words = np.zeros((count, 2), np.int32), np.zeros(14 * count, np.int32)
    same_request, same_changes, same_words = request.copy(), changes.copy(), words.copy()
    records = lowest_free(request, len(leaving), wanted, live, changes)
    joining = request[len(leaving) + wanted :][:wanted].tolist()
    assert joining == free[:wanted]
    marks = {**dict.fromkeys(leaving, 1), **dict.fromkeys(joining, 2)}
    assert changes.tolist() == [marks.get(row, 0) for row in range(count)]
    assert records == len(marks)
    num_words = write_records(words, changes, records, numbers, rings)
    both = write_change(same_request, len(leaving), wanted, same_words, live, same_changes, numbers, rings)
    assert both == (records, num_words)
    for one, other in ((request, same_request), (changes, same_changes), (words, same_words)):
        assert one.tolist() == other.tolist()
    pages, stack = np.arange(3 * count, dtype=np.int32).reshape(count, 3), np.full(5 * count, -1, np.int32)
    shares = np.zeros(3 * count, np.int32)
    for row in np.flatnonzero(numbers[6]):  # only a row with a floor reads pages with others
        shares[3 * row : 3 * row + 3] = data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
    others = shares.copy()
    last, sent = np.full(count, 7), np.full(count, 7)
    top, rotated = note_change(
        request, len(leaving), wanted, 20, live, numbers, pages, stack, 2, shares, last, sent, 7
    )
    assert rotated == old[7:, leaving].sum()
    assert last.tolist() == [0 if row in marks else 7 for row in range(count)]
    assert sent.tolist() == [-1 if row in marks else 7 for row in range(count)]
    left = [page for row in leaving for page in pages[row, : old[2, row]].tolist()]
    assert stack[2:top].tolist() == [page for page in left if others[page] == 0]
    assert shares.tolist() == [n - (page in left and n > 0) for page, n in enumerate(others.tolist())]
    for row in range(count):
        assert live[row] == (row in joining or (before[row] and row not in leaving))
        line = old[:, row].copy()
        if row in leaving:
            line[1:] = 0
        if row in joining:
            line[:2] = [21 + joining.index(row), prompts[joining.index(row)]]
        assert numbers[:, row].tolist() == line.tolist()


def test_nothing_is_left_to_compile_when_a_batch_runs() -> None:
    """What runs between launches has its machine code as soon as it can be called."""
    for function in (find_needs, write_growth, note_growth, least_steps, note_even_steps, write_change_at, note_change_at):
        assert len(function.signatures) == 1
        assert not function._can_compile
