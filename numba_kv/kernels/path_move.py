"""Tokens of a row's last step to other places of that step: the accepted path of a tree moves together.

For each row, with e0 its length before the step and ``nodes[row] = [n0, n1, ...]``::

    position   e0 .. e0 + n0 ..... e0 + n1 .................... e0 + appended
    becomes    e0   <-/  e0 + 1   <-/   ...

Ids rise along a path (a parent comes before its child) and none is below its place, so a token is read before another takes
its place: each lane carries its own words, in order, and waits for nobody.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.layout import SHIFT, TABLE_AT, WIDTH
from numba_kv.kernels.spec import array, scalar

__all__ = ["move_token_bytes", "move_token_words"]


@kernel(
    block_form=True,
    slab=array("uint64"),
    nodes=array("int32", 2),
    page_tables=array("int32"),
    groups=array("int64", 2),
    lengths=array("int32", 2),
    appended=array("int32", 2),
    floors=array("int32"),
    group=scalar(),
    layers=scalar(),
    halves=scalar(),
    heads=scalar(),
    dim=scalar(),
    layer_stride=scalar(),
    half_stride=scalar(),
    page_stride=scalar(),
    token_stride=scalar(),
    head_stride=scalar(),
    num_pages=scalar(),
)
def move_token_words(
    item, lane, lanes, slab, nodes, page_tables, groups, lengths, appended, floors,
    group, layers, halves, heads, dim, layer_stride, half_stride, page_stride, token_stride, head_stride, num_pages,
):  # fmt: skip
    """Move token ``nodes[row, i]`` of each row's last step to place i of the step; sizes in words.

    An id that does not rise, is below its place or not in the step moves nothing (-1: none); nor does one whose page is not
    mapped, or whose place lies below the row's floor. Item: a half of a layer of a row; lanes share a token's words.
    """
    plane = np.int64(item) // halves
    half = np.int64(item) - plane * halves
    row = plane // layers
    layer = plane - row * layers
    count = np.int64(appended[group, row])
    start = np.int64(lengths[group, row]) - count
    floor = np.int64(floors[row])
    shift = groups[group, SHIFT]
    table = groups[group, TABLE_AT] + row * 2 * groups[group, WIDTH]
    base = layer * layer_stride + half * half_stride
    step, stop = np.uint64(lanes), np.uint64(dim)
    last = np.int64(-1)
    for i in range(min(np.int64(nodes.shape[1]), count)):
        node = np.int64(nodes[row, i])
        if node > last and node >= i and node < count:
            last = node
            source, target = start + node, start + i
            from_page, to_page = source >> shift, target >> shift
            from_id = np.int64(page_tables[table + from_page])
            to_id = np.int64(page_tables[table + to_page])
            is_there = from_id >= 0 and from_id < num_pages and to_id >= 0 and to_id < num_pages
            if node != i and target >= floor and is_there:
                from_at = base + from_id * page_stride + (source - (from_page << shift)) * token_stride
                to_at = base + to_id * page_stride + (target - (to_page << shift)) * token_stride
                for head in range(heads):
                    at = np.uint64(from_at + head * head_stride)
                    to = np.uint64(to_at + head * head_stride)
                    j = np.uint64(lane)
                    while j < stop:
                        slab[to + j] = slab[at + j]
                        j += step


#: Tokens whose sizes are not of whole words: `move_token_words` in bytes.
move_token_bytes = move_token_words.over("move_token_bytes", slab="uint8")
