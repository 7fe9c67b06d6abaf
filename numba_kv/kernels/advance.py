"""`advance`: all bookkeeping of a step, one row an item.

For each row, e0 = length - taken back, n = count; for each window group the mapped pages become::

    before   [ mapped_begin ............ ceil(length / P) )
    after         [ begin .................... ceil((e0 + n) / P) )      begin = max(lowest_key(e0) / P, end - R)

and page l is `block_tables[l]`, which repeats the ring for all l: rotation needs no modulo and no page id from the host.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel, routine
from numba_kv.kernels.layout import (
    ACCEPTED,
    BAD_COUNT,
    BLOCK_AT,
    CHUNKED,
    EMPTY,
    FULL,
    KIND,
    NO_BACK,
    NUM_PAGES,
    OVER_CAPACITY,
    PAGE_MISSING,
    REWIND_TOO_FAR,
    RING,
    SHIFT,
    SLIDING,
    SLOT_AT,
    TABLE_AT,
    TAKE_BACK,
    WIDTH,
    WINDOW,
)
from numba_kv.kernels.spec import array, scalar

__all__ = ["advance"]


@routine
def pages_of(tokens, shift):
    """Return the pages that hold `tokens` tokens."""
    return (tokens + (np.int64(1) << shift) - 1) >> shift


@routine
def lowest_page(kind, window, shift, query):
    """Return the logical page of the lowest key that the query at position `query` sees."""
    low = np.int64(0)
    if kind == SLIDING:
        low = max(np.int64(0), query - window + 1)
    elif kind == CHUNKED:  # 32-bit division: a 64-bit one costs a hundred instructions
        low = np.int64(np.uint32(query) // np.uint32(window)) * window
    return low >> shift


@routine
def refusal_of(length, count, back, room, capacity, peak, floor, leased, groups):
    """Return 0, or why the row cannot take `back` tokens back and append `count`."""
    start = length - back
    if count < 0 or count > room or back < 0 or start < 0:
        return BAD_COUNT
    if start + count > capacity:
        return OVER_CAPACITY
    if count > 0 and groups[0, KIND] == FULL and pages_of(start + count, groups[0, SHIFT]) > leased:
        return PAGE_MISSING
    if back > 0 and start > 0:
        if start < floor:
            return REWIND_TOO_FAR
        for g in range(1, groups.shape[0]):
            shift = groups[g, SHIFT]
            if lowest_page(groups[g, KIND], groups[g, WINDOW], shift, start) < pages_of(peak, shift) - groups[g, RING]:
                return REWIND_TOO_FAR
    return 0


@routine
def remap(row, g, length, start, count, groups, mapped_begin, page_tables, block_tables):
    """Move window group `g` of a row from its mapped pages to those of the step."""
    shift = groups[g, SHIFT]
    old_begin = np.int64(mapped_begin[g, row])
    old_end = pages_of(length, shift)
    if count > 0:
        end = pages_of(start + count, shift)
        begin = max(lowest_page(groups[g, KIND], groups[g, WINDOW], shift, start), end - groups[g, RING])
    else:  # only taken back: keep what lies below
        end = pages_of(start, shift)
        begin = min(old_begin, end)
    k_row = groups[g, TABLE_AT] + np.int64(row) * 2 * groups[g, WIDTH]
    v_row = k_row + groups[g, WIDTH]
    ring_row = groups[g, BLOCK_AT] + np.int64(row) * groups[g, WIDTH]
    for page in range(old_begin, min(old_end, begin)):
        page_tables[k_row + page] = -1
        page_tables[v_row + page] = -1
    for page in range(max(old_begin, end), old_end):
        page_tables[k_row + page] = -1
        page_tables[v_row + page] = -1
    for page in range(begin, min(end, old_begin)):
        page_id = block_tables[ring_row + page]
        page_tables[k_row + page] = page_id
        page_tables[v_row + page] = page_id + groups[g, NUM_PAGES]
    for page in range(max(begin, old_end), end):
        page_id = block_tables[ring_row + page]
        page_tables[k_row + page] = page_id
        page_tables[v_row + page] = page_id + groups[g, NUM_PAGES]
    mapped_begin[g, row] = begin


@kernel(
    counts=array("int32"),
    take_back=array("int32"),
    cu_seqlens_q=array("int32"),
    lengths=array("int32"),
    high_water=array("int32"),
    floors=array("int32"),
    leased=array("int32"),
    status=array("int32"),
    mapped_begin=array("int32", 2),
    groups=array("int64", 2),
    page_tables=array("int32"),
    block_tables=array("int32"),
    slot_mapping=array("int64"),
    positions=array("int32"),
    seq_lens=array("int32"),
    context_lens=array("int32"),
    capacity=scalar(),
    use_counts=scalar(),
    back_mode=scalar(),
    write_slots=scalar(),
)
def advance(
    row,
    counts,
    take_back,
    cu_seqlens_q,
    lengths,
    high_water,
    floors,
    leased,
    status,
    mapped_begin,
    groups,
    page_tables,
    block_tables,
    slot_mapping,
    positions,
    seq_lens,
    context_lens,
    capacity,
    use_counts,
    back_mode,
    write_slots,
):
    """Take tokens of the last step back, append those of this one, rotate every window.

    `use_counts` says whether `counts` counts, `back_mode` how `take_back` is read: not, as tokens to take back, or as tokens
    of the row's last step that stay.

    Item: a row. Writes: lengths, high_water, status (refusals only), mapped_begin, page tables of window groups, seq_lens,
    context_lens and, if `write_slots`, slot_mapping and positions of the row's tokens. A refused row keeps its state.
    """
    length = np.int64(lengths[row])
    count = np.int64(0)
    if use_counts != 0:
        count = np.int64(counts[row])
    back = np.int64(0)
    if back_mode != NO_BACK:
        back = np.int64(take_back[row])
        if back_mode != TAKE_BACK:
            appended = np.int64(seq_lens[row]) - np.int64(context_lens[row])
            if back < 0 or back > appended:
                back = np.int64(-1)  # refused below
            elif back_mode == ACCEPTED:
                back = appended - back
    first = np.int64(cu_seqlens_q[row])
    room = np.int64(cu_seqlens_q[row + 1]) - first
    peak = np.int64(high_water[row])
    if count != 0 or back != 0:
        refusal = refusal_of(length, count, back, room, capacity, peak, np.int64(floors[row]), np.int64(leased[row]), groups)
        if refusal != 0:
            status[row] = refusal
            count = np.int64(0)
            back = np.int64(0)
    start = length - back
    if count != 0 or back != 0:
        for g in range(1, groups.shape[0]):
            remap(row, g, length, start, count, groups, mapped_begin, page_tables, block_tables)
        if start == 0:  # nothing of the row is left: a fresh ring
            peak = np.int64(0)
        lengths[row] = start + count
        high_water[row] = max(peak, start + count)
    context_lens[row] = start
    seq_lens[row] = start + count
    if write_slots != 0:
        for token in range(room):
            position = start + token
            positions[first + token] = position if token < count else 0
            for g in range(groups.shape[0]):
                slot = np.int64(-1)
                if token < count and groups[g, KIND] != EMPTY:
                    shift = groups[g, SHIFT]
                    page = position >> shift
                    if page >= mapped_begin[g, row]:
                        page_id = np.int64(block_tables[groups[g, BLOCK_AT] + np.int64(row) * groups[g, WIDTH] + page])
                        slot = (page_id << shift) + (position - (page << shift))
                slot_mapping[groups[g, SLOT_AT] + first + token] = slot
