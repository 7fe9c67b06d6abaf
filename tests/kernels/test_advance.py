"""`advance` against its closed form in NumPy, on hand-made arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_kv as kv
from numba_kv.device import Device, create_device
from numba_kv.geometry import INT32_MAX, ceil_div
from numba_kv.kernels import layout
from numba_kv.kernels.advance import advance
from numba_kv.kernels.layout import Status
from tests.helpers.step_arrays import StepArrays, advanced, full_group, refusal, same, window_group

EXAMPLES = 25 if kv.target() == "sim" else 60


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def run(
    device: Device,
    before: StepArrays,
    counts: list[int] | None = None,
    back: list[int] | None = None,
    room: list[int] | None = None,
    capacity: int = 32,
    write_slots: bool = True,
    mode: int = layout.TAKE_BACK,
) -> StepArrays:
    """Launch a step and check every array against the closed form; `mode` says how `back` is read."""
    before = before.copy()
    rows = before.rows
    before.lay_out(room or counts or [0] * rows)
    before.counts[:] = 99 if counts is None else counts
    before.take_back[:] = 99 if back is None else back
    after = before.launch(
        advance,
        device,
        rows * len(before.groups),
        capacity=capacity,
        use_counts=int(counts is not None),
        back_mode=layout.NO_BACK if back is None else mode,
        write_slots=int(write_slots),
    )
    taken = back or [0] * rows
    if back and mode != layout.TAKE_BACK:  # of the last step, at most all of it
        read = [
            (k, n - k) if mode == layout.LAST_TAKE_BACK else (n - k, k)
            for k, n in zip(back, before.appended.tolist(), strict=True)
        ]
        taken = [k if k >= 0 and rest >= 0 else -1 for k, rest in read]
    same(after, advanced(before, counts or [0] * rows, taken, capacity, write_slots))
    return after


def sliding(tokens: int = 6, rows: int = 2, max_step_tokens: int = 2) -> StepArrays:
    """Return rows of a full and a sliding group of pages of 4, up to 32 tokens; every row has its full pages."""
    groups = [full_group(4, 8, rows * 8), window_group("sliding", tokens, 4, 8, rows, max_step_tokens)]
    arrays = StepArrays(groups, rows, 64)
    for row in range(rows):
        arrays.lease(row, list(range(8 * row, 8 * row + 8)))
    return arrays


def test_tokens_are_appended_where_the_tables_say(device: Device) -> None:
    after = run(device, sliding(), [5, 0])
    assert after.lengths.tolist() == [5, 0]
    assert after.slots(0)[:5].tolist() == [0, 1, 2, 3, 4]  # page 0 is a page like any other
    assert after.positions[:5].tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(after.page_table(1)[0, 0] >= 0).tolist() == [0, 1]


def test_a_count_of_zero_changes_nothing(device: Device) -> None:
    before = run(device, sliding(), [7, 3])
    after = run(device, before, [0, 0], [0, 0], write_slots=False)
    for name in before.arrays.keys() - {"counts", "take_back", "cu_seqlens_q", "seq_lens", "context_lens", "appended"}:
        assert np.array_equal(after.arrays[name], before.arrays[name]), name
    assert after.seq_lens.tolist() == after.context_lens.tolist() == [7, 3]


def test_tokens_are_taken_back_and_others_appended_in_one_launch(device: Device) -> None:
    after = run(device, run(device, sliding(), [6, 6]), [2, 1], [1, 2])
    assert after.lengths.tolist() == [7, 5]
    assert after.high_water.tolist() == [7, 6]
    assert after.context_lens.tolist() == [5, 4]
    assert not after.status.any()


def test_tokens_are_only_taken_back(device: Device) -> None:
    after = run(device, run(device, sliding(), [9, 8]), None, [2, 1], room=[9, 8], write_slots=False)
    assert after.lengths.tolist() == [7, 7]
    assert np.flatnonzero(after.page_table(1)[0, 0] >= 0).tolist() == [0, 1]


def test_accepted_tokens_stay_and_the_rest_is_taken_back(device: Device) -> None:
    before = run(device, sliding(max_step_tokens=4), [8, 8])
    drafted = run(device, before, [4, 4])
    after = run(device, drafted, [1, 4], [1, 4], mode=layout.ACCEPTED)
    assert after.context_lens.tolist() == [9, 12]
    assert after.lengths.tolist() == [10, 16]


@pytest.mark.parametrize("mode", [layout.ACCEPTED, layout.LAST_TAKE_BACK])
@pytest.mark.parametrize("number", [3, -1, INT32_MAX, -INT32_MAX - 1])
def test_only_tokens_of_the_last_step_are_accepted_or_taken_back(device: Device, mode: int, number: int) -> None:
    before = run(device, run(device, sliding(), [8, 8]), [2, 2])
    after = run(device, before, [1, 1], [number, 1], mode=mode)
    assert after.status.tolist() == [Status.BAD_COUNT, 0]
    assert after.lengths.tolist() == [10, 10]


def test_a_row_that_appended_nothing_has_nothing_to_take_back(device: Device) -> None:
    before = run(device, run(device, sliding(), [8, 8]), [0, 1])
    after = run(device, before, [1, 1], [1, 1], mode=layout.LAST_TAKE_BACK)
    assert after.status.tolist() == [Status.BAD_COUNT, 0]
    assert run(device, before, [1, 1], [0, 0], mode=layout.ACCEPTED).lengths.tolist() == [9, 9]


def test_going_back_to_the_start_makes_a_fresh_ring(device: Device) -> None:
    after = run(device, run(device, sliding(), [30, 28]), [3, 0], [30, 28])
    assert after.lengths.tolist() == [3, 0]
    assert after.high_water.tolist() == [3, 0]
    assert not after.mapped_begin.any()
    assert not after.status.any()


def test_a_page_that_left_the_table_comes_back(device: Device) -> None:
    before = run(device, sliding(max_step_tokens=2), [12, 12])
    longer = run(device, before, [1, 1])
    assert longer.page_table(1)[0, 0, 1] >= 0
    slid = run(device, longer, [1, 1])
    slid = run(device, slid, [1, 1])
    assert slid.mapped_begin[1].tolist() == [2, 2]
    after = run(device, slid, [1, 0], [2, 2])
    assert after.mapped_begin[1].tolist() == [2, 2]
    assert not after.status.any()


def test_a_row_can_end_below_the_pages_that_are_mapped(device: Device) -> None:
    before = StepArrays([full_group(1, 8, 0), window_group("sliding", 1, 1, 8, 1, 2)], 1, 8)
    for _ in range(5):
        before = run(device, before, [1], capacity=8)
    assert before.mapped_begin[1, 0] == 4
    after = run(device, before, None, [2], room=[1], capacity=8, write_slots=False)
    assert (after.mapped_begin[1, 0], after.lengths[0], after.status[0]) == (3, 3, 0)
    assert (after.page_table(1) == -1).all()
    assert run(device, after, [2], capacity=8).mapped_begin[1, 0] == 3


def test_surplus_tokens_of_a_row_are_dropped(device: Device) -> None:
    after = run(device, sliding(), [1, 2], room=[3, 3])
    for g in (0, 1):
        assert (after.slots(g)[:6] >= 0).tolist() == [True, False, False, True, True, False]
    assert after.positions[:6].tolist() == [0, 0, 0, 0, 1, 0]


def test_long_steps_keep_the_newest_pages(device: Device) -> None:
    """A window's oldest tokens are dropped, whatever the step appends. llama.cpp, mlx-lm#1914."""
    after = run(device, sliding(), [23, 17])
    ring = after.groups[1].ring
    for row, length in enumerate((23, 17)):
        end = ceil_div(length, 4)
        assert np.flatnonzero(after.page_table(1)[row, 0] >= 0).tolist() == list(range(end - ring, end))
    kept = after.slots(1)[:23] >= 0
    assert kept.tolist() == [position >= 4 * (6 - ring) for position in range(23)]


@pytest.mark.parametrize(
    ("counts", "back", "room", "status"),
    [
        ([-1, 1], None, [2, 1], Status.BAD_COUNT),
        ([3, 1], None, [2, 1], Status.BAD_COUNT),
        ([1, 1], [-1, 0], [1, 1], Status.BAD_COUNT),
        ([1, 1], [11, 0], [1, 1], Status.BAD_COUNT),
        ([23, 1], None, [23, 1], Status.OVER_CAPACITY),
        ([7, 1], None, [7, 1], Status.PAGE_MISSING),
        ([1, 1], [7, 0], [1, 1], Status.REWIND_TOO_FAR),
        ([0, 1], [7, 0], [0, 1], Status.REWIND_TOO_FAR),
    ],
)
def test_a_refused_row_is_unchanged_and_its_neighbour_is_not(
    device: Device, counts: list[int], back: list[int] | None, room: list[int], status: Status
) -> None:
    """Rows that cannot step say why and write nothing. vllm#53982, vllm#54296, sparkinfer#41, tt-metal#45184."""
    before = sliding(tokens=2)
    before.lease(0, list(range(4)))  # 16 tokens
    before.leased[0] = 4
    before.page_table(0)[0, :, 4:] = -1
    before.blocks(0)[0, 4:] = before.groups[0].null_page
    before = run(device, before, [10, 10])
    after = run(device, before, counts, back, room)
    assert after.status.tolist() == [status, 0]
    for name in ("lengths", "high_water", "mapped_begin", "page_tables"):
        rows = [after.arrays[name], before.arrays[name]]
        if name == "page_tables":
            rows = [a.page_table(1) for a in (after, before)]
        elif name == "mapped_begin":
            rows = [a.mapped_begin[1] for a in (after, before)]
        assert np.array_equal(rows[0][0], rows[1][0]), name
    for g in (0, 1):
        assert (after.slots(g)[: room[0]] == -1).all()
        assert after.slots(g)[room[0]] == after.slot(g, 1, 10)
    assert after.lengths[1] == 11


def test_a_status_stays_until_the_host_clears_it(device: Device) -> None:
    refused = run(device, run(device, sliding(), [3, 3]), [40, 1], room=[40, 1])
    assert run(device, refused, [1, 1]).status.tolist() == [Status.OVER_CAPACITY, 0]


def test_tokens_below_the_floor_stay(device: Device) -> None:
    before = run(device, sliding(), [8, 8])
    before.floors[:] = [7, 6]
    after = run(device, before, [1, 1], [2, 2])
    assert after.status.tolist() == [Status.REWIND_TOO_FAR, 0]


def test_the_last_position_fits_and_the_next_does_not(device: Device) -> None:
    """A position at the capacity is refused and the neighbour's row is unchanged. sparkinfer#42."""
    full = run(device, run(device, sliding(), [31, 3]), [1, 0])
    assert full.lengths.tolist() == [32, 3]
    after = run(device, full, [1, 0])
    assert after.status.tolist() == [Status.OVER_CAPACITY, 0]
    assert np.array_equal(after.page_table(1), full.page_table(1))


@pytest.mark.parametrize("value", [INT32_MAX, -INT32_MAX - 1])
def test_sums_do_not_overflow_32_bits(device: Device, value: int) -> None:
    before = run(device, sliding(), [20, 20])
    for counts, back in (([value, 1], [0, 0]), ([1, 1], [value, 0]), ([value, 1], [value, 0])):
        after = run(device, before, counts, back, room=[1, 1])
        assert after.status.tolist() == [Status.BAD_COUNT, 0]
        assert after.lengths.tolist() == [20, 21]


def test_slots_and_v_ids_beyond_32_bits_are_exact(device: Device) -> None:
    """Products of page ids are 64 bits wide. vllm#1486, vllm#50427, tokenspeed#501."""
    pages = INT32_MAX // 2
    arrays = StepArrays([full_group(256, 2, pages - 2), window_group("sliding", 256, 256, 2, 1)], 1, 8)
    last = pages - 3
    arrays.lease(0, [last, last - 1])
    arrays.groups[1] = type(arrays.groups[1])(arrays.groups[1].window, 256, arrays.groups[1].ring, 2, pages)
    arrays.arrays["groups"][1, layout.NUM_PAGES] = pages
    arrays.blocks(1)[:] = [last, last - 1]
    run_at = arrays.copy()
    run_at.lengths[:] = run_at.high_water[:] = 254
    run_at.page_table(1)[0, :, 0] = [last, last + pages]
    after = run(device, run_at, [4], capacity=512)
    assert after.slots(1)[:4].tolist() == [last * 256 + 254, last * 256 + 255, (last - 1) * 256, (last - 1) * 256 + 1]
    assert after.slots(0)[:4].tolist() == after.slots(1)[:4].tolist()
    assert after.page_table(1)[0, 1].tolist() == [last + pages, last - 1 + pages]


def test_a_retired_row_writes_nothing(device: Device) -> None:
    """Rows without a sequence have no slot, whatever a dummy step counts for them. vllm#56734."""
    before = sliding()
    before.leased[1] = 0
    for g in (0, 1):
        before.blocks(g)[1] = before.groups[g].null_page
        before.page_table(g)[1] = -1
    after = run(device, before, [1, 0], room=[1, 1])
    assert [after.slots(g)[1] for g in (0, 1)] == [-1, -1]
    after = run(device, before, [1, 1])
    assert [after.slots(g)[1] for g in (0, 1)] == [-1, -1]
    assert (after.page_table(1)[1] == -1).all()


@st.composite
def shapes(draw: st.DrawFn) -> StepArrays:
    """Rows of any windows, with a full group or an empty one, and possibly too few full pages."""
    rows, page, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4, 16])), draw(st.integers(1, 8))
    limit = draw(st.integers(1, 5))
    windows = draw(st.lists(st.tuples(st.sampled_from(["sliding", "chunked"]), st.integers(1, 20)), max_size=2))
    pages = draw(st.sampled_from([0, rows * width]))
    groups = [full_group(page, width, pages), *(window_group(k, w, page, width, rows, limit) for k, w in windows)]
    arrays = StepArrays(groups, rows, 200, seed=draw(st.integers(0, 9)))
    for row in range(rows if pages else 0):
        arrays.lease(row, list(range(row * width, row * width + draw(st.integers(0, width)))))
    return arrays


@settings(max_examples=EXAMPLES)
@given(arrays=shapes(), data=st.data())
def test_any_sequence_of_steps_follows_the_closed_form(device: Device, arrays: StepArrays, data: st.DataObject) -> None:
    capacity = arrays.groups[0].page * arrays.groups[0].width - data.draw(st.integers(0, arrays.groups[0].page - 1))
    for _ in range(data.draw(st.integers(1, 5))):
        counts, back, room = [], [], []
        for row in range(arrays.rows):
            count = data.draw(st.one_of(st.integers(0, 3), st.integers(-1, 40)))
            counts.append(count)
            back.append(data.draw(st.one_of(st.integers(0, 3), st.integers(-1, int(arrays.lengths[row]) + 1))))
            room.append(max(0, count + data.draw(st.sampled_from([0, 0, 0, 1, -1]))))
        uses = data.draw(st.sampled_from([(True, False), (False, True), (True, True)]))
        arrays = run(
            device,
            arrays,
            counts if uses[0] else None,
            back if uses[1] else None,
            room,
            capacity,
            write_slots=data.draw(st.booleans()),
            mode=data.draw(st.sampled_from([layout.TAKE_BACK, layout.LAST_TAKE_BACK, layout.ACCEPTED])),
        )
        arrays.status[:] = 0


@settings(max_examples=EXAMPLES)
@given(
    window=st.integers(1, 20),
    page=st.sampled_from([1, 2, 4, 16]),
    limit=st.integers(1, 5),
    kind=st.sampled_from(["sliding", "chunked"]),
    data=st.data(),
)
def test_short_steps_and_short_rewinds_are_never_refused(
    device: Device, window: int, page: int, limit: int, kind: str, data: st.DataObject
) -> None:
    """Up to `max_step_tokens` below the longest length a row goes back, also over several steps. mlx-engine#177, mlx-lm#118."""
    width = ceil_div(64, page)
    arrays = StepArrays([full_group(page, width, 0), window_group(kind, window, page, width, 1, limit)], 1, 64)
    for _ in range(data.draw(st.integers(1, 10))):
        length, peak = int(arrays.lengths[0]), int(arrays.high_water[0])
        back = data.draw(st.integers(0, max(0, min(length, limit - (peak - length)))))
        count = data.draw(st.integers(0, min(limit, 64 - (length - back))))
        assert refusal(arrays, 0, 0, back, 64) == 0
        arrays = run(device, arrays, [count], [back], capacity=64)
        assert not arrays.status.any()
        mapped = np.flatnonzero(arrays.page_table(1)[0, 0] >= 0)
        assert len(mapped) <= arrays.groups[1].ring
        if count:  # every key that the step's queries see is mapped
            assert mapped[0] <= arrays.groups[1].lowest(length - back) // page


@pytest.mark.parametrize(("back", "floor"), [(3, 8), (3, 7), (10, 1), (10, 0), (2, 8)])
def test_nothing_below_the_floor_is_taken_back(device: Device, back: int, floor: int) -> None:
    """Not even by a row that would become empty: others may read its pages."""
    before = run(device, sliding(20), [10, 10])
    before.floors[0] = floor
    after = run(device, before, [1, 1], [back, 0])
    assert after.status.tolist() == [Status.REWIND_TOO_FAR if 10 - back < floor else 0, 0]
