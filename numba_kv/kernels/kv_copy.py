"""Pages to pages of the same pools: `copy_page_units`, `copy_page_words` and `copy_page_bytes`.

A page lies together in every layout, so a copy knows nothing of heads or element types.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.spec import array, scalar
from numba_kv.kernels.wide_access import load_16, store_16
from numba_kv.kernels.wide_rows import divided, product

__all__ = ["copy_page_bytes", "copy_page_units", "copy_page_words"]


@kernel(
    block_form=True,
    slab=array("uint64"),
    pairs=array("int32", 2),
    num_pairs=scalar(),
    halves=scalar(),
    parts=scalar(),
    part_size=scalar(),
    page_size=scalar(),
    layer_stride=scalar(),
    half_stride=scalar(),
    num_pages=scalar(),
    num_targets=scalar(),
)
def copy_page_words(
    item,
    lane,
    lanes,
    slab,
    pairs,
    num_pairs,
    halves,
    parts,
    part_size,
    page_size,
    layer_stride,
    half_stride,
    num_pages,
    num_targets,
):
    """Copy page ``pairs[i, 0]`` to page ``pairs[i, 1]`` of `num_pairs` in every half of every layer; sizes in words.

    Sources are below `num_pages`, targets below `num_targets`; other pairs are left out. No page is a target twice, nor a
    target and a source. Item: a part of a page, by layer, half, pair and part; lanes share its words.
    """
    plane = np.int64(item) // parts
    first = (np.int64(item) - plane * parts) * part_size
    layer_half = plane // num_pairs
    pair = plane - layer_half * num_pairs
    layer = layer_half // halves
    half = layer_half - layer * halves
    source, target = np.int64(pairs[pair, 0]), np.int64(pairs[pair, 1])
    if source >= 0 and source < num_pages and target >= 0 and target < num_targets:
        base = layer * layer_stride + half * half_stride + first
        at_from, to = np.uint64(base + source * page_size), np.uint64(base + target * page_size)
        step, stop = np.uint64(lanes), np.uint64(min(part_size, page_size - first))
        j = np.uint64(lane)
        while j < stop:
            slab[to + j] = slab[at_from + j]
            j += step


#: Pages whose size is not of whole words: `copy_page_words` in bytes.
copy_page_bytes = copy_page_words.over("copy_page_bytes", slab="uint8")


@kernel(
    block_form=True,
    slab=array("uint8"),
    pairs=array("int32", 2),
    halves=scalar(),
    parts=scalar(),
    num_pairs=scalar(),
    by_parts=scalar(),
    by_halves=scalar(),
    by_pairs=scalar(),
    part_size=scalar(),
    page_size=scalar(),
    layer_stride=scalar(),
    half_stride=scalar(),
    num_pages=scalar(),
    num_targets=scalar(),
)
def copy_page_units(
    item,
    lane,
    lanes,
    slab,
    pairs,
    halves,
    parts,
    num_pairs,
    by_parts,
    by_halves,
    by_pairs,
    part_size,
    page_size,
    layer_stride,
    half_stride,
    num_pages,
    num_targets,
):
    """Copy pages whose size and place are multiples of 16 bytes: `copy_page_words`, but sizes are in bytes.

    Two units of 16 bytes are on their way at once. ``by_*`` are the reciprocals of what they name.
    """
    plane = divided(np.int64(item), parts, by_parts)
    first = product(np.int64(item) - product(plane, parts), part_size)
    layer_half = divided(plane, num_pairs, by_pairs)
    pair = plane - product(layer_half, num_pairs)
    layer = divided(layer_half, halves, by_halves)
    half = layer_half - product(layer, halves)
    source, target = np.int64(pairs[pair, 0]), np.int64(pairs[pair, 1])
    if source >= 0 and source < num_pages and target >= 0 and target < num_targets:
        base = layer * layer_stride + half * half_stride + first
        at, to = base + product(source, page_size), base + product(target, page_size)
        step, stop = 16 * np.int64(lanes), min(part_size, page_size - first)
        j = 16 * np.int64(lane)
        while j + step < stop:
            a0, a1 = load_16(slab, at + j)
            b0, b1 = load_16(slab, at + j + step)
            store_16(slab, to + j, a0, a1)
            store_16(slab, to + j + step, b0, b1)
            j += 2 * step
        if j < stop:
            a0, a1 = load_16(slab, at + j)
            store_16(slab, to + j, a0, a1)
