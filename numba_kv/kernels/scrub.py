"""What pages hold when they become free: zeros, only finite numbers, or NaN to find who reads them."""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar

__all__ = ["FINITE", "NAN", "ZERO", "scrub_16", "scrub_32", "scrub_64", "scrub_8"]

# what becomes of an element
ZERO = 0
NAN = 1  # all bits set: a NaN in every element type
FINITE = 2  # zero if it is not finite


@routine
def scrubbed(word, bits, size, exponent, mode):
    """Return `bits` bits of elements of `size` bits; an element is not finite if all bits of `exponent` are set."""
    if mode == ZERO:
        return np.uint64(0)
    if mode == NAN:
        return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)
    mask = np.uint64(exponent)
    ones = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - size)
    for first in range(0, bits, size):
        place = np.uint64(first)
        if (word >> place) & mask == mask:
            word &= ~(ones << place)
    return word


@kernel(
    block_form=True,
    open_scalars=("bits",),
    slab=array("uint64"),
    block_tables=array("int32"),
    row_at=scalar(),
    first=scalar(),
    count=scalar(),
    halves=scalar(),
    parts=scalar(),
    part_size=scalar(),
    page_size=scalar(),
    layer_stride=scalar(),
    half_stride=scalar(),
    num_pages=scalar(),
    bits=scalar(),
    size=scalar(),
    exponent=scalar(),
    mode=scalar(),
)
def scrub_pages(
    item, lane, lanes, slab, block_tables, row_at, first, count, halves, parts, part_size, page_size, layer_stride,
    half_stride, num_pages, bits, size, exponent, mode,
):  # fmt: skip
    """Scrub logical pages [first, first + count) of a row in every layer and half; sizes in units of `bits` bits.

    `row_at` is the first element of the row in `block_tables`; entries that are not one of `num_pages` pages are left out, so
    the null page stays zeros. `size` bits an element, `exponent` the bits that are set in all numbers that are not finite.
    Item: a part of a page, by layer, half and page; lanes share its units.
    """
    plane = np.int64(item) // parts
    start = (np.int64(item) - plane * parts) * part_size
    place = plane // count
    page = np.int64(block_tables[row_at + first + plane - place * count])
    if page >= 0 and page < num_pages:
        layer = place // halves
        at = np.uint64(layer * layer_stride + (place - layer * halves) * half_stride + page * page_size)
        j, step, stop = np.uint64(start + lane), np.uint64(lanes), np.uint64(min(start + part_size, page_size))
        while j < stop:
            before = np.uint64(slab[at + j])
            after = scrubbed(before, bits, size, exponent, mode)
            if after != before:
                slab[at + j] = after
            j += step


scrub_64 = scrub_pages.fixed(bits=64)
#: Pages whose size is not of whole words.
scrub_32 = scrub_pages.over("scrub_pages_of_32", slab="uint32").fixed(bits=32)
scrub_16 = scrub_pages.over("scrub_pages_of_16", slab="uint16").fixed(bits=16)
scrub_8 = scrub_pages.over("scrub_pages_of_8", slab="uint8").fixed(bits=8)
