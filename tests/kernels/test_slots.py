"""`fill_slots` and `fill_carry` against NumPy, on hand-made arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_kv as kv
from numba_kv.device import Device, create_device
from numba_kv.geometry import INT32_MAX, ceil_div, mapped_pages
from numba_kv.kernels import layout
from numba_kv.kernels.advance import advance
from numba_kv.kernels.slots import fill_carry, fill_slots
from tests.helpers.step_arrays import StepArrays, fill_tokens, full_group, same, window_group

EXAMPLES = 15 if kv.target() == "sim" else 50


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def stepped(arrays: StepArrays, contexts: list[int], counts: list[int], room: list[int] | None = None) -> StepArrays:
    """Return the arrays as `advance` leaves them for `fill_slots`: lengths and mapped pages of the step."""
    after = arrays.copy()
    after.lay_out(room or counts)
    after.context_lens[:] = contexts
    after.seq_lens[:] = np.add(contexts, counts)
    for g, group in enumerate(after.groups[1:], 1):
        for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
            after.mapped_begin[g, row] = mapped_pages(group.window, group.page, group.ring, context, count)[0] if count else 0
    return after


def check_slots(device: Device, arrays: StepArrays, tile: int, num_tokens: int | None = None) -> StepArrays:
    """Launch `fill_slots` and compare every array."""
    total = int(arrays.cu_seqlens_q[-1]) if num_tokens is None else num_tokens
    after = arrays.launch(fill_slots, device, ceil_div(total, tile), num_tokens=total, tile=tile)
    expected = arrays.copy()
    for row in range(arrays.rows):
        fill_tokens(expected, row)
    same(after, expected)
    return after


def check_carry(device: Device, arrays: StepArrays, limit: int) -> StepArrays:
    """Launch `fill_carry` and compare every array."""
    windows = len(arrays.groups) - 1
    after = arrays.launch(fill_carry, device, arrays.rows * windows, num_rows=arrays.rows, max_step_tokens=limit)
    expected = arrays.copy()
    for g, group in enumerate(arrays.groups[1:], 1):
        width = group.window.tokens - 1
        expected.carry(g)[:] = -1
        for row in range(arrays.rows):
            context = int(arrays.context_lens[row])
            if arrays.seq_lens[row] - context > limit:
                for position in range(group.lowest(context), context):
                    expected.carry(g)[row, position - context + width] = arrays.slot(g, row, position)
    same(after, expected)
    return after


def three_rows(tokens: int = 64) -> StepArrays:
    """Return three rows of a full, a sliding and a chunked group, pages of 4, up to 32 tokens."""
    groups = [full_group(4, 8, 24), window_group("sliding", 6, 4, 8, 3), window_group("chunked", 8, 4, 8, 3)]
    arrays = StepArrays(groups, 3, tokens)
    for row in range(3):
        arrays.lease(row, list(range(8 * row, 8 * row + 8)))
    return arrays


@pytest.mark.parametrize("tile", [1, 3, 256])
def test_a_mixed_step(device: Device, tile: int) -> None:
    after = check_slots(device, stepped(three_rows(), [13, 0, 5], [1, 20, 9]), tile)
    assert after.positions[:4].tolist() == [13, 0, 1, 2]
    assert (after.slots(0)[:30] >= 0).all()
    assert (after.slots(1)[1:21] == -1).sum() == 8  # 20 tokens are 5 pages, of which the ring keeps 3


@pytest.mark.parametrize("tile", [1, 2, 5])
@pytest.mark.parametrize("counts", [[0, 0, 4], [0, 4, 0], [4, 0, 0], [3, 0, 1]])
def test_rows_that_append_nothing_are_skipped(device: Device, tile: int, counts: list[int]) -> None:
    check_slots(device, stepped(three_rows(), [1, 2, 3], counts), tile)


def test_surplus_tokens_are_dropped(device: Device) -> None:
    after = check_slots(device, stepped(three_rows(), [1, 2, 3], [2, 0, 9], room=[4, 3, 9]), 4)
    assert after.slots(0)[2:7].tolist() == [-1] * 5
    assert after.positions[2:7].tolist() == [0] * 5


def test_tokens_behind_the_step_are_left_alone(device: Device) -> None:
    arrays = stepped(three_rows(), [0, 0, 0], [9, 0, 0])
    after = check_slots(device, arrays, 256)
    assert (after.slots(0)[9:] == 77).all()


def test_no_token_is_no_work(device: Device) -> None:
    arrays = stepped(three_rows(), [1, 2, 3], [0, 0, 0])
    same(arrays.launch(fill_slots, device, 0, num_tokens=0, tile=4), arrays)


def test_slots_beyond_32_bits_are_exact(device: Device) -> None:
    """Products of page ids are 64 bits wide. vllm#1486, vllm#50427, tokenspeed#501."""
    last = INT32_MAX // 2 - 3
    arrays = StepArrays([full_group(256, 2, last + 1), window_group("sliding", 4, 256, 2, 1)], 1, 16)
    arrays.lease(0, [last, 7])
    arrays.blocks(1)[:] = [last, 3]
    after = check_slots(device, stepped(arrays, [250], [9]), 256)
    assert after.slots(0)[5] == after.slots(1)[5] == last * 256 + 255
    after = check_carry(device, stepped(arrays, [250], [9]), 1)
    assert after.carry(1)[0].tolist() == [last * 256 + 247, last * 256 + 248, last * 256 + 249]


def test_a_sliding_window_carries_what_it_sees(device: Device) -> None:
    after = check_carry(device, stepped(three_rows(), [10, 3, 0], [5, 5, 5]), 4)
    assert after.carry(1)[0].tolist() == [after.slot(1, 0, p) for p in range(5, 10)]
    assert after.carry(1)[1].tolist() == [-1, -1, *(after.slot(1, 1, p) for p in range(3))]
    assert after.carry(1)[2].tolist() == [-1] * 5


def test_a_chunk_carries_what_is_before_the_step_in_it(device: Device) -> None:
    after = check_carry(device, stepped(three_rows(), [10, 8, 15], [5, 5, 5]), 4)
    assert after.carry(2)[0].tolist() == [-1] * 5 + [after.slot(2, 0, p) for p in (8, 9)]
    assert after.carry(2)[1].tolist() == [-1] * 7
    assert after.carry(2)[2].tolist() == [after.slot(2, 2, p) for p in range(8, 15)]


def test_short_rows_carry_nothing(device: Device) -> None:
    after = check_carry(device, stepped(three_rows(), [10, 10, 10], [4, 5, 0]), 4)
    assert [int((after.carry(1)[row] >= 0).sum()) for row in range(3)] == [0, 5, 0]


def test_a_window_of_one_token_carries_nothing(device: Device) -> None:
    arrays = StepArrays([full_group(4, 4, 0), window_group("sliding", 1, 4, 4, 1)], 1, 16)
    check_carry(device, stepped(arrays, [3], [5]), 1)


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepArrays, int]:
    """Rows of any windows in the middle of a step, and the most tokens of a short one."""
    rows, page = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 16]))
    width, limit = ceil_div(48, page), draw(st.integers(1, 5))
    windows = draw(st.lists(st.tuples(st.sampled_from(["sliding", "chunked"]), st.integers(1, 20)), min_size=1, max_size=2))
    has_full = draw(st.booleans())
    groups = [full_group(page, width, rows * width if has_full else 0)]
    groups += [window_group(k, w, page, width, rows, limit) for k, w in windows]
    arrays = StepArrays(groups, rows, 100, seed=draw(st.integers(0, 9)))
    for row in range(rows if has_full else 0):
        arrays.lease(row, list(range(row * width, (row + 1) * width)))
    contexts = draw(st.lists(st.integers(0, 24), min_size=rows, max_size=rows))
    counts = draw(st.lists(st.one_of(st.integers(0, 2), st.integers(0, 24)), min_size=rows, max_size=rows))
    surplus = draw(st.lists(st.sampled_from([0, 0, 1]), min_size=rows, max_size=rows))
    return stepped(arrays, contexts, counts, np.add(counts, surplus).tolist()), limit


@settings(max_examples=EXAMPLES)
@given(step=steps(), tile=st.sampled_from([1, 2, 7, 256]))
def test_any_step(device: Device, step: tuple[StepArrays, int], tile: int) -> None:
    arrays, limit = step
    check_slots(device, arrays, tile)
    check_carry(device, arrays, limit)


@settings(max_examples=EXAMPLES)
@given(step=steps(), tile=st.sampled_from([1, 4, 256]))
def test_short_steps_get_the_same_slots_from_both_kernels(device: Device, step: tuple[StepArrays, int], tile: int) -> None:
    arrays, _ = step
    before = arrays.copy()
    before.lengths[:] = before.high_water[:] = before.context_lens
    before.counts[:] = before.seq_lens - before.context_lens
    before.leased[:] = before.groups[0].width
    options = {"capacity": 1 << 20, "use_counts": 1, "back_mode": layout.NO_BACK}
    at_once = before.launch(advance, device, before.rows * len(before.groups), **options, write_slots=1)
    later = before.launch(advance, device, before.rows * len(before.groups), **options, write_slots=0)
    total = int(before.cu_seqlens_q[-1])
    same(later.launch(fill_slots, device, ceil_div(total, tile), num_tokens=total, tile=tile), at_once)
