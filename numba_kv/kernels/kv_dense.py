"""K and V of one row between its pages and a dense array: `copy_dense_words` and `copy_dense_bytes`.

A row's positions are found through its block table, which repeats the ring of a window for every logical page: so pages that
a window has left, but a rewind would map again, are reached too. The dense array may lie in page-locked host memory.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.spec import array, scalar

__all__ = ["copy_dense_bytes", "copy_dense_words"]


@kernel(
    block_form=True,
    slab=array("uint64"),
    dense=array("uint64"),
    block_tables=array("int32"),
    row_at=scalar(),
    first=scalar(),
    count=scalar(),
    shift=scalar(),
    halves=scalar(),
    parts=scalar(),
    part_size=scalar(),
    heads=scalar(),
    dim=scalar(),
    layer_stride=scalar(),
    half_stride=scalar(),
    page_stride=scalar(),
    token_stride=scalar(),
    head_stride=scalar(),
    num_pages=scalar(),
    to_dense=scalar(),
)
def copy_dense_words(
    item, lane, lanes, slab, dense, block_tables, row_at, first, count, shift, halves, parts, part_size, heads, dim,
    layer_stride, half_stride, page_stride, token_stride, head_stride, num_pages, to_dense,
):  # fmt: skip
    """Copy positions [first, first + count) of a row to ``dense [layers, halves, count, heads, dim]``, or back; sizes in words.

    `row_at` is the first element of the row in `block_tables`, ``1 << shift`` the positions of a page: 1 to copy whole pages.
    Strides are of the slab. Positions whose entry is not one of `num_pages` pages become zeros in the dense array, and are left
    out on the way back. Item: a part of a position, by layer, half and position; lanes share its words.
    """
    plane = np.int64(item) // parts
    start = (np.int64(item) - plane * parts) * part_size
    place = plane // count
    i = plane - place * count
    layer = place // halves
    half = place - layer * halves
    position = first + i
    logical = position >> shift
    page = np.int64(block_tables[row_at + logical])
    is_page = page >= 0 and page < num_pages
    base = layer * layer_stride + half * half_stride + (position - (logical << shift)) * token_stride
    if is_page:
        base += page * page_stride
    step, stop = np.uint64(lanes), np.uint64(min(start + part_size, dim))
    for head in range(heads):
        at = np.uint64(base + head * head_stride)
        to = np.uint64((plane * heads + head) * dim)
        j = np.uint64(start + lane)
        if to_dense == 0:
            if is_page:
                while j < stop:
                    slab[at + j] = dense[to + j]
                    j += step
        elif is_page:
            while j < stop:
                dense[to + j] = slab[at + j]
                j += step
        else:
            while j < stop:
                dense[to + j] = 0
                j += step


#: Rows whose sizes are not of whole words: `copy_dense_words` in bytes.
copy_dense_bytes = copy_dense_words.over("copy_dense_bytes", slab="uint8", dense="uint8")
