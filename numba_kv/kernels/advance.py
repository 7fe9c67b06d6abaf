"""`advance`: all bookkeeping of a step, one row of one window group an item.

What a row's length depends on is kept once a group, so that items need nothing from each other: each finds the same
length, makes the same decision and writes its own copy. All loads come first; their latency is what a step costs.

For each row, e0 = length - taken back, n = count; for each window group the mapped pages become::

    before   [ mapped_begin ............ ceil(length / P) )
    after         [ begin .................... ceil((e0 + n) / P) )      begin = max(lowest_key(e0) / P, end - R)

and page l is `block_tables[l]`, which repeats the ring for all l: rotation needs no modulo and no page id from the host.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
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
from numba_kv.kernels.routines import routine
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
def rewind_refusal(start, peak, floor, groups):
    """Return 0, or why a row of peak length `peak` cannot go back to `start` tokens."""
    if start < floor:
        return REWIND_TOO_FAR
    if start == 0:  # nothing of the row is left: nothing to find
        return 0
    for g in range(1, groups.shape[0]):
        shift = groups[g, SHIFT]
        if lowest_page(groups[g, KIND], groups[g, WINDOW], shift, start) < pages_of(peak, shift) - groups[g, RING]:
            return REWIND_TOO_FAR
    return 0


@routine
def remap(k_row, v_row, id_row, old_begin, old_end, begin, end, num_pages, page_tables, block_tables):
    """Make [begin, end) the mapped pages of a window row, from [old_begin, old_end)."""
    for page in range(old_begin, min(old_end, begin)):
        page_tables[k_row + page] = -1
        page_tables[v_row + page] = -1
    for page in range(max(old_begin, end), old_end):
        page_tables[k_row + page] = -1
        page_tables[v_row + page] = -1
    for page in range(begin, min(end, old_begin)):
        page_id = block_tables[id_row + page]
        page_tables[k_row + page] = page_id
        page_tables[v_row + page] = page_id + num_pages
    for page in range(max(begin, old_end), end):
        page_id = block_tables[id_row + page]
        page_tables[k_row + page] = page_id
        page_tables[v_row + page] = page_id + num_pages


@kernel(
    counts=array("int32"),
    take_back=array("int32"),
    cu_seqlens_q=array("int32"),
    lengths=array("int32", 2),
    high_water=array("int32", 2),
    appended=array("int32", 2),
    mapped_begin=array("int32", 2),
    floors=array("int32"),
    leased=array("int32"),
    live=array("int32"),
    status=array("int32"),
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
    item,
    counts,
    take_back,
    cu_seqlens_q,
    lengths,
    high_water,
    appended,
    mapped_begin,
    floors,
    leased,
    live,
    status,
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

    Item: g * B + row. Writes: lengths, high_water, appended, mapped_begin, page tables of window groups and, if
    `write_slots`, slot_mapping of the row's tokens; items of group 0 also seq_lens, context_lens, positions and, for a
    refusal, status. A refused row keeps its state; of a retired row no count is read.
    """
    rows = np.int64(counts.shape[0])
    row = np.int64(item)
    g = np.int64(0)
    while row >= rows:  # groups are few: cheaper than a division
        row -= rows
        g += 1
    shift = groups[g, SHIFT]
    kind = groups[g, KIND]
    window = groups[g, WINDOW]
    ring = groups[g, RING]
    width = groups[g, WIDTH]
    num_pages = groups[g, NUM_PAGES]
    table_at = groups[g, TABLE_AT]
    id_row = groups[g, BLOCK_AT] + row * width
    slots_at = groups[g, SLOT_AT]
    full_kind = groups[0, KIND]
    full_shift = groups[0, SHIFT]
    length = np.int64(lengths[g, row])
    peak = np.int64(high_water[g, row])
    last = np.int64(appended[g, row])
    old_begin = np.int64(mapped_begin[g, row])
    floor = np.int64(floors[row])
    held = np.int64(leased[row])
    first = np.int64(cu_seqlens_q[row])
    room = np.int64(cu_seqlens_q[row + 1]) - first
    is_live = live[row] != 0
    count = np.int64(0)
    if use_counts != 0 and is_live:
        count = np.int64(counts[row])
    back = np.int64(0)
    if back_mode != NO_BACK and is_live:
        back = np.int64(take_back[row])
        if back_mode != TAKE_BACK:
            if back < 0 or back > last:
                back = np.int64(-1)  # refused below
            elif back_mode == ACCEPTED:
                back = last - back

    start = length - back
    refusal = 0
    if count < 0 or count > room or back < 0 or start < 0:
        refusal = BAD_COUNT
    elif start + count > capacity:
        refusal = OVER_CAPACITY
    elif count > 0 and full_kind == FULL and pages_of(start + count, full_shift) > held:
        refusal = PAGE_MISSING
    elif back > 0:
        refusal = rewind_refusal(start, peak, floor, groups)
    if refusal != 0:
        if g == 0:
            status[row] = refusal
        count = np.int64(0)
        start = length
        back = np.int64(0)
    after = start + count

    begin = old_begin
    if count != 0 or back != 0:
        if window > 0:
            end = pages_of(after, shift)
            if count != 0:
                begin = max(lowest_page(kind, window, shift, start), end - ring)
            else:  # only taken back: keep what lies below
                begin = min(old_begin, end)
            k_row = table_at + row * 2 * width
            old_end = pages_of(length, shift)
            remap(k_row, k_row + width, id_row, old_begin, old_end, begin, end, num_pages, page_tables, block_tables)
            mapped_begin[g, row] = begin
        if start == 0:  # nothing of the row is left: a fresh ring
            peak = np.int64(0)
        lengths[g, row] = after
        high_water[g, row] = max(peak, after)
    appended[g, row] = count
    if g == 0:
        context_lens[row] = start
        seq_lens[row] = after
    if write_slots != 0:
        for token in range(room):
            position = start + token
            slot = np.int64(-1)
            if token < count and kind != EMPTY:
                page = position >> shift
                if page >= begin:
                    slot = (np.int64(block_tables[id_row + page]) << shift) + (position - (page << shift))
            slot_mapping[slots_at + first + token] = slot
            if g == 0:
                positions[first + token] = position if token < count else 0
