"""Derived forms of a group's block table and of lengths: CSR, compact window tables, K and V tables without -1, sums."""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.layout import BLOCK_AT, EMPTY, KIND, NUM_PAGES, SHIFT, WIDTH
from numba_kv.kernels.spec import array, scalar

__all__ = ["compact_table", "copy_indices", "count_pages", "split_table", "sum_lengths"]


@kernel(
    lengths=array("int32", 2),
    mapped_begin=array("int32", 2),
    groups=array("int64", 2),
    kv_indptr=array("int32"),
    last_page_len=array("int32"),
    group=scalar(),
)
def count_pages(item, lengths, mapped_begin, groups, kv_indptr, last_page_len, group):
    """Write where each row's pages start in the CSR form, and how full its last page is.

    Item: a row, or one behind the last. Sums over the rows before it, so that one launch does. The empty group has no pages.
    """
    shift = groups[group, SHIFT]
    size = np.int64(1) << shift
    is_real = groups[group, KIND] != EMPTY
    total = np.int64(0)
    if is_real:
        for row in range(item):
            total += ((np.int64(lengths[group, row]) + size - 1) >> shift) - np.int64(mapped_begin[group, row])
    kv_indptr[item] = total
    if item < last_page_len.shape[0]:
        length = np.int64(lengths[group, item])
        last = np.int64(1)
        if is_real and length > np.int64(mapped_begin[group, item]) << shift:
            last = length - ((length - 1) >> shift << shift)
        last_page_len[item] = last


@kernel(
    block_form=True,
    mapped_begin=array("int32", 2),
    groups=array("int64", 2),
    block_tables=array("int32"),
    kv_indptr=array("int32"),
    kv_indices=array("int32"),
    group=scalar(),
)
def copy_indices(item, lane, lanes, mapped_begin, groups, block_tables, kv_indptr, kv_indices, group):
    """Copy each row's pages to its place in the CSR form. Item: a row; lanes stride over its pages."""
    first = np.int64(kv_indptr[item])
    count = np.int64(kv_indptr[item + 1]) - first
    at = groups[group, BLOCK_AT] + np.int64(item) * groups[group, WIDTH] + np.int64(mapped_begin[group, item])
    i = lane
    while i < count:
        kv_indices[first + i] = block_tables[at + i]
        i += lanes


@kernel(
    block_form=True,
    lengths=array("int32", 2),
    mapped_begin=array("int32", 2),
    groups=array("int64", 2),
    block_tables=array("int32"),
    window_tables=array("int32", 2),
    window_seq_lens=array("int32"),
    group=scalar(),
)
def compact_table(item, lane, lanes, lengths, mapped_begin, groups, block_tables, window_tables, window_seq_lens, group):
    """Write a row's mapped pages from column 0 on, null pages behind them, and its length from the first of them.

    Item: a row; lanes stride over columns. After a rewind nothing may be mapped until the next step: the length is 0 then.
    """
    shift = groups[group, SHIFT]
    length = np.int64(lengths[group, item])
    begin = np.int64(mapped_begin[group, item])
    end = (length + (np.int64(1) << shift) - 1) >> shift
    at = groups[group, BLOCK_AT] + np.int64(item) * groups[group, WIDTH]
    column = lane
    stop = window_tables.shape[1]
    while column < stop:
        page_id = groups[group, NUM_PAGES] - 2
        if begin + column < end:
            page_id = np.int64(block_tables[at + begin + column])
        window_tables[item, column] = page_id
        column += lanes
    if lane == 0:
        window_seq_lens[item] = max(np.int64(0), length - (begin << shift))


@kernel(
    block_form=True,
    groups=array("int64", 2),
    block_tables=array("int32"),
    kv_block_tables=array("int32", 3),
    group=scalar(),
)
def split_table(item, lane, lanes, groups, block_tables, kv_block_tables, group):
    """Write K and V ids of a row, all of them valid: V = K + N. Item: a row; lanes stride over columns."""
    at = groups[group, BLOCK_AT] + np.int64(item) * groups[group, WIDTH]
    column = lane
    stop = groups[group, WIDTH]
    while column < stop:
        page_id = np.int64(block_tables[at + column])
        kv_block_tables[item, 0, column] = page_id
        kv_block_tables[item, 1, column] = page_id + groups[group, NUM_PAGES]
        column += lanes


@kernel(row_lengths=array("int32"), cu_seqlens_k=array("int32"))
def sum_lengths(item, row_lengths, cu_seqlens_k):
    """Write the tokens of all rows before one. Item: a row, or one behind the last."""
    total = np.int64(0)
    for row in range(item):
        total += np.int64(row_lengths[row])
    cu_seqlens_k[item] = total
