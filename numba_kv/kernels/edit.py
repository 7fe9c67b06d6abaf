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
    mapped_begin=array("int32", 2),
    lengths=array("int32"),
    high_water=array("int32"),
    floors=array("int32"),
    leased=array("int32"),
    status=array("int32"),
    counts=array("int32"),
    cu_seqlens_q=array("int32"),
    take_back=array("int32"),
    num_records=scalar(),
    layout_at=scalar(),
    take_back_at=scalar(),
)
def apply_edits(
    item,
    lane,
    lanes,
    edits,
    groups,
    page_tables,
    block_tables,
    mapped_begin,
    lengths,
    high_water,
    floors,
    leased,
    status,
    counts,
    cu_seqlens_q,
    take_back,
    num_records,
    layout_at,
    take_back_at,
):
    """Write the rows that the records name; the last item copies the layout of the next step.

    Item: a record, or behind them the layout (`layout_at`, `take_back_at`: first words in `edits`, negative if absent).
    Lanes share columns; no lane reads what another writes.
    """
    if item == num_records:
        rows = np.int64(counts.shape[0])
        if layout_at >= 0:
            for i in range(lane, rows, lanes):
                counts[i] = edits[layout_at + i]
            for i in range(lane, rows + 1, lanes):
                cu_seqlens_q[i] = edits[layout_at + rows + i]
        if take_back_at >= 0:
            for i in range(lane, rows, lanes):
                take_back[i] = edits[take_back_at + i]
        return
    at = np.int64(item) * RECORD_WORDS
    row = np.int64(edits[at + ROW])
    flags = edits[at + FLAGS]
    if groups[0, KIND] != EMPTY:
        width = groups[0, WIDTH]
        k_row = groups[0, TABLE_AT] + row * 2 * width
        block_row = groups[0, BLOCK_AT] + row * width
        null_page = groups[0, NUM_PAGES] - 2
        for page in range(np.int64(edits[at + CLEAR_FROM]) + lane, np.int64(edits[at + CLEAR_TO]), lanes):
            page_tables[k_row + page] = -1
            page_tables[k_row + width + page] = -1
            block_tables[block_row + page] = null_page
        first = np.int64(edits[at + FIRST])
        ids = np.int64(edits[at + IDS_AT])
        for i in range(lane, np.int64(edits[at + COUNT]), lanes):
            page_id = edits[ids + i]
            page_tables[k_row + first + i] = page_id
            page_tables[k_row + width + first + i] = page_id + groups[0, NUM_PAGES]
            block_tables[block_row + first + i] = page_id
        if lane == 0:
            leased[row] = edits[at + FIRST] + edits[at + COUNT]
    if flags & RESET != 0:
        ring_at = np.int64(edits[at + RINGS_AT])
        for g in range(1, groups.shape[0]):
            width = groups[g, WIDTH]
            ring = groups[g, RING]
            shift = groups[g, SHIFT]
            k_row = groups[g, TABLE_AT] + row * 2 * width
            begin = max(np.int64(0), (np.int64(edits[at + LOW_TOKENS]) >> shift) - ring)
            end = (np.int64(edits[at + HIGH_TOKENS]) + (np.int64(1) << shift) - 1) >> shift
            for page in range(begin + lane, end, lanes):
                page_tables[k_row + page] = -1
                page_tables[k_row + width + page] = -1
            block_row = groups[g, BLOCK_AT] + row * width
            null_page = groups[g, NUM_PAGES] - 2
            for column in range(lane, width, lanes):
                page_id = null_page
                if flags & LIVE != 0:
                    page_id = np.int64(edits[ring_at + np.int64(np.uint32(column) % np.uint32(ring))])
                block_tables[block_row + column] = page_id
            ring_at += ring
            if lane == 0:
                mapped_begin[g, row] = 0
        if lane == 0:
            lengths[row] = 0
            high_water[row] = 0
            floors[row] = 0
            status[row] = 0


@kernel(
    block_form=True,
    edits=array("int32"),
    groups=array("int64", 2),
    page_tables=array("int32"),
    block_tables=array("int32"),
    mapped_begin=array("int32", 2),
    lengths=array("int32"),
    high_water=array("int32"),
    floors=array("int32"),
    leased=array("int32"),
    status=array("int32"),
)
def permute_rows(
    item, lane, lanes, edits, groups, page_tables, block_tables, mapped_begin, lengths, high_water, floors, leased, status
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
                for column in range(lane, width, lanes):
                    kept = block_tables[base + np.int64(edits[first]) * pitch + column]
                    for i in range(first, last):
                        source = block_tables[base + np.int64(edits[i + 1]) * pitch + column]
                        block_tables[base + np.int64(edits[i]) * pitch + column] = source
                    block_tables[base + np.int64(edits[last]) * pitch + column] = kept
            else:
                for column in range(lane, width, lanes):
                    kept = page_tables[base + np.int64(edits[first]) * pitch + column]
                    for i in range(first, last):
                        source = page_tables[base + np.int64(edits[i + 1]) * pitch + column]
                        page_tables[base + np.int64(edits[i]) * pitch + column] = source
                    page_tables[base + np.int64(edits[last]) * pitch + column] = kept
    if lane == 0:
        head = edits[first]
        for g in range(groups.shape[0]):
            kept_begin = mapped_begin[g, head]
            for i in range(first, last):
                mapped_begin[g, edits[i]] = mapped_begin[g, edits[i + 1]]
            mapped_begin[g, edits[last]] = kept_begin
        kept_length, kept_peak, kept_floor = lengths[head], high_water[head], floors[head]
        kept_leased, kept_status = leased[head], status[head]
        for i in range(first, last):
            to, source_row = edits[i], edits[i + 1]
            lengths[to] = lengths[source_row]
            high_water[to] = high_water[source_row]
            floors[to] = floors[source_row]
            leased[to] = leased[source_row]
            status[to] = status[source_row]
        tail = edits[last]
        lengths[tail] = kept_length
        high_water[tail] = kept_peak
        floors[tail] = kept_floor
        leased[tail] = kept_leased
        status[tail] = kept_status
