"""Composition changes: `apply_edits` writes what a block of records says, `permute_rows` moves rows."""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.layout import (
    BLOCK_AT,
    CLEAR_FROM,
    CLEAR_TO,
    COUNT,
    EMPTY,
    FIRST,
    FLAGS,
    FLOOR,
    HIGH_TOKENS,
    IDS_AT,
    KIND,
    LIVE,
    LOW_TOKENS,
    NUM_PAGES,
    RECORD_WORDS,
    RESET,
    RING,
    RINGS_AT,
    ROW,
    SHIFT,
    SLOT_AT,
    TABLE_AT,
    WIDTH,
)
from numba_kv.kernels.spec import array, scalar

__all__ = ["apply_edits", "permute_rows"]


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
    live=array("int32"),
    status=array("int32"),
    counts=array("int32"),
    cu_seqlens_q=array("int32"),
    take_back=array("int32"),
    slot_mapping=array("int64"),
    num_records=scalar(),
    layout_at=scalar(),
    take_back_at=scalar(),
    old_tokens=scalar(),
)
def apply_edits(
    item,
    lane,
    lanes,
    edits,
    groups,
    page_tables,
    block_tables,
    lengths,
    high_water,
    appended,
    mapped_begin,
    floors,
    leased,
    live,
    status,
    counts,
    cu_seqlens_q,
    take_back,
    slot_mapping,
    num_records,
    layout_at,
    take_back_at,
    old_tokens,
):
    """Write the rows that the records name, and copy the layout of the next step.

    Item: a record; item `num_records`, if it is not negative: the layout (`layout_at`, `take_back_at`: its first words in
    `edits`, negative if absent).
    Lanes share columns; no lane reads what another writes.
    """
    if item == num_records:
        rows = np.int64(counts.shape[0])
        if layout_at >= 0:
            i = lane
            while i < rows:
                counts[i] = edits[layout_at + i]
                i += lanes
            i = lane
            while i < rows + 1:
                cu_seqlens_q[i] = edits[layout_at + rows + i]
                i += lanes
            for g in range(groups.shape[0]):  # places that the layout before had beyond this one's drop what is there
                i = np.int64(edits[layout_at + 2 * rows]) + lane
                while i < old_tokens:
                    slot_mapping[groups[g, SLOT_AT] + i] = -1
                    i += lanes
        if take_back_at >= 0:
            i = lane
            while i < rows:
                take_back[i] = edits[take_back_at + i]
                i += lanes
        return
    at = np.int64(item) * RECORD_WORDS
    row = np.int64(edits[at + ROW])
    flags = edits[at + FLAGS]
    if groups[0, KIND] != EMPTY:
        width = groups[0, WIDTH]
        k_row = groups[0, TABLE_AT] + row * 2 * width
        block_row = groups[0, BLOCK_AT] + row * width
        null_page = groups[0, NUM_PAGES] - 2
        page = np.int64(edits[at + CLEAR_FROM]) + lane
        stop = np.int64(edits[at + CLEAR_TO])
        while page < stop:
            page_tables[k_row + page] = -1
            page_tables[k_row + width + page] = -1
            block_tables[block_row + page] = null_page
            page += lanes
        first = np.int64(edits[at + FIRST])
        ids = np.int64(edits[at + IDS_AT])
        i = lane
        stop = np.int64(edits[at + COUNT])
        while i < stop:
            page_id = edits[ids + i]
            page_tables[k_row + first + i] = page_id
            page_tables[k_row + width + first + i] = page_id + groups[0, NUM_PAGES]
            block_tables[block_row + first + i] = page_id
            i += lanes
        if lane == 0:
            leased[row] = edits[at + FIRST] + edits[at + COUNT]
    if lane == 0 and flags & FLOOR != 0:
        floors[row] = edits[at + LOW_TOKENS]
    if flags & RESET != 0:
        ring_at = np.int64(edits[at + RINGS_AT])
        for g in range(1, groups.shape[0]):
            width = groups[g, WIDTH]
            ring = groups[g, RING]
            shift = groups[g, SHIFT]
            k_row = groups[g, TABLE_AT] + row * 2 * width
            begin = max(np.int64(0), (np.int64(edits[at + LOW_TOKENS]) >> shift) - ring)
            end = (np.int64(edits[at + HIGH_TOKENS]) + (np.int64(1) << shift) - 1) >> shift
            page = begin + lane
            while page < end:
                page_tables[k_row + page] = -1
                page_tables[k_row + width + page] = -1
                page += lanes
            block_row = groups[g, BLOCK_AT] + row * width
            null_page = groups[g, NUM_PAGES] - 2
            column = lane
            while column < width:
                page_id = null_page
                if flags & LIVE != 0:
                    page_id = np.int64(edits[ring_at + np.int64(np.uint32(column) % np.uint32(ring))])
                block_tables[block_row + column] = page_id
                column += lanes
            ring_at += ring
        if lane == 0:
            for g in range(groups.shape[0]):
                lengths[g, row] = 0
                high_water[g, row] = 0
                appended[g, row] = 0
                mapped_begin[g, row] = 0
            floors[row] = 0
            status[row] = 0
            live[row] = 1 if flags & LIVE != 0 else 0
            if layout_at < 0:  # until the layout of a step says otherwise, a captured step appends nothing here
                counts[row] = 0


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
    live=array("int32"),
    status=array("int32"),
)
def permute_rows(
    item,
    lane,
    lanes,
    edits,
    groups,
    page_tables,
    block_tables,
    lengths,
    high_water,
    appended,
    mapped_begin,
    floors,
    leased,
    live,
    status,
):
    """Move the metadata of rows along a cycle; no KV byte moves.

    Item: a cycle r0 <- r1 <- ... <- r0. `edits` holds the first word of each cycle's rows (items + 1 words), then the rows.
    Each lane carries its own columns around the whole cycle, so lanes need not wait for each other.
    """
    first = np.int64(edits[item])
    last = np.int64(edits[item + 1]) - 1
    for g in range(groups.shape[0]):
        for form in range(3):  # K half, V half, block table
            width = groups[g, WIDTH]
            base = groups[g, BLOCK_AT] if form == 2 else groups[g, TABLE_AT] + form * width
            pitch = width if form == 2 else 2 * width
            if form == 2:
                column = lane
                while column < width:
                    kept = block_tables[base + np.int64(edits[first]) * pitch + column]
                    for i in range(first, last):
                        source = block_tables[base + np.int64(edits[i + 1]) * pitch + column]
                        block_tables[base + np.int64(edits[i]) * pitch + column] = source
                    block_tables[base + np.int64(edits[last]) * pitch + column] = kept
                    column += lanes
            else:
                column = lane
                while column < width:
                    kept = page_tables[base + np.int64(edits[first]) * pitch + column]
                    for i in range(first, last):
                        source = page_tables[base + np.int64(edits[i + 1]) * pitch + column]
                        page_tables[base + np.int64(edits[i]) * pitch + column] = source
                    page_tables[base + np.int64(edits[last]) * pitch + column] = kept
                    column += lanes
    if lane == 0:
        head, tail = edits[first], edits[last]
        for g in range(groups.shape[0]):
            length, peak = lengths[g, head], high_water[g, head]
            count, begin = appended[g, head], mapped_begin[g, head]
            for i in range(first, last):
                lengths[g, edits[i]] = lengths[g, edits[i + 1]]
                high_water[g, edits[i]] = high_water[g, edits[i + 1]]
                appended[g, edits[i]] = appended[g, edits[i + 1]]
                mapped_begin[g, edits[i]] = mapped_begin[g, edits[i + 1]]
            lengths[g, tail] = length
            high_water[g, tail] = peak
            appended[g, tail] = count
            mapped_begin[g, tail] = begin
        floor, held, alive, word = floors[head], leased[head], live[head], status[head]
        for i in range(first, last):
            floors[edits[i]] = floors[edits[i + 1]]
            leased[edits[i]] = leased[edits[i + 1]]
            live[edits[i]] = live[edits[i + 1]]
            status[edits[i]] = status[edits[i + 1]]
        floors[tail] = floor
        leased[tail] = held
        live[tail] = alive
        status[tail] = word
