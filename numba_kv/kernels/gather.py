"""Row gather: the dense table of one step from the rows of a resident table."""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.spec import array, scalar

__all__ = ["gather_rows"]


@kernel(
    block_form=True,
    destination=array("int32"),
    table=array("int32"),
    slots=array("int32"),
    num_slots=scalar(),
    row_words=scalar(),
    missing=scalar(),
)
def gather_rows(item, lane, lanes, destination, table, slots, num_slots, row_words, missing):
    """Copy row ``slots[item]`` of `table` to row `item` of `destination`; fill it with `missing` if there is no such row.

    Rows are opaque: `row_words` is 2L for page tables and L for block tables. Item: a row of `destination`; lanes share
    its words. Slots come from the device, so nobody else can check them.
    """
    slot = np.int64(slots[item])
    to = np.int64(item) * row_words
    if slot < 0 or slot >= num_slots:
        word = lane
        while word < row_words:
            destination[to + word] = missing
            word += lanes
    else:
        source = slot * row_words
        word = lane
        while word < row_words:
            destination[to + word] = table[source + word]
            word += lanes
