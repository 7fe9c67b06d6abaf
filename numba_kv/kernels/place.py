"""`place_rows`: rows get a length and pages that no step gave them: forks, and sequences that come back."""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.layout import (
    BLOCK_AT,
    EMPTY,
    KIND,
    NUM_PAGES,
    PLACE_FLOOR,
    PLACE_HIGH_WATER,
    PLACE_LAST,
    PLACE_LEASED,
    PLACE_LENGTH,
    PLACE_OLD_LENGTH,
    PLACE_PARENT,
    PLACE_ROW,
    PLACE_SHARED,
    PLACE_WORDS,
    RING,
    SHIFT,
    TABLE_AT,
    WIDTH,
)
from numba_kv.kernels.spec import array

__all__ = ["place_rows"]


@kernel(
    block_form=True,
    edits=array("int32"),
    groups=array("int64", 2),
    page_tables=array("int32"),
    block_tables=array("int32"),
    lengths=array("int32", 2),
    high_water=array("int32", 2),
    appended=array("int32", 2),
    mapped_begin=array("int32", 2),
    floors=array("int32"),
    leased=array("int32"),
)
def place_rows(
    item, lane, lanes, edits, groups, page_tables, block_tables, lengths, high_water, appended, mapped_begin, floors, leased
):  # fmt: skip
    """Set lengths, floors and mapped pages of the rows that the records name.

    Full group: the first PLACE_SHARED pages are the parent's, PLACE_LAST lies behind them; a row without a parent keeps its
    pages. Window groups: the pages [begin, end) of the row's own ring become mapped, those below unmapped. A row has its ring
    already and is not a parent; a parent keeps all but its floor.

    Item: a record (`kernels/layout.py`). Lanes share columns; no lane reads what another writes.
    """
    at = np.int64(item) * (np.int64(PLACE_WORDS) + np.int64(groups.shape[0]))
    row = np.int64(edits[at + PLACE_ROW])
    parent = np.int64(edits[at + PLACE_PARENT])
    old_length = np.int64(edits[at + PLACE_OLD_LENGTH])
    length = np.int64(edits[at + PLACE_LENGTH])
    if groups[0, KIND] != EMPTY and parent >= 0:
        width = groups[0, WIDTH]
        num_pages = groups[0, NUM_PAGES]
        k_row = groups[0, TABLE_AT] + row * 2 * width
        block_row = groups[0, BLOCK_AT] + row * width
        source_row = groups[0, BLOCK_AT] + parent * width
        shared = np.int64(edits[at + PLACE_SHARED])
        last = np.int64(edits[at + PLACE_LAST])
        stop = shared
        if last >= 0:
            stop += 1
        page = lane
        while page < stop:
            page_id = last
            if page < shared:
                page_id = np.int64(block_tables[source_row + page])
            page_tables[k_row + page] = page_id
            page_tables[k_row + width + page] = page_id + num_pages
            block_tables[block_row + page] = page_id
            page += lanes
    for g in range(1, groups.shape[0]):
        width = groups[g, WIDTH]
        shift = groups[g, SHIFT]
        num_pages = groups[g, NUM_PAGES]
        k_row = groups[g, TABLE_AT] + row * 2 * width
        block_row = groups[g, BLOCK_AT] + row * width
        last_in_page = (np.int64(1) << shift) - 1
        begin = np.int64(edits[at + PLACE_WORDS + g])
        page = max(np.int64(0), (old_length >> shift) - groups[g, RING]) + lane
        stop = min(begin, (old_length + last_in_page) >> shift)
        while page < stop:
            page_tables[k_row + page] = -1
            page_tables[k_row + width + page] = -1
            page += lanes
        page = begin + lane
        stop = (length + last_in_page) >> shift
        while page < stop:
            page_id = np.int64(block_tables[block_row + page])
            page_tables[k_row + page] = page_id
            page_tables[k_row + width + page] = page_id + num_pages
            page += lanes
    if lane == 0:
        for g in range(groups.shape[0]):
            lengths[g, row] = edits[at + PLACE_LENGTH]
            high_water[g, row] = edits[at + PLACE_HIGH_WATER]
            appended[g, row] = 0  # no step appended these tokens: none takes them back
            mapped_begin[g, row] = edits[at + PLACE_WORDS + g]
        floors[row] = edits[at + PLACE_FLOOR]
        leased[row] = edits[at + PLACE_LEASED]
        if parent >= 0:
            floors[parent] = edits[at + PLACE_FLOOR]
