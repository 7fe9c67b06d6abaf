"""What steps of a speculative round need beside `advance`: how far a draft is behind its base, where nodes of a tree are."""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.spec import array, scalar

__all__ = ["count_behind", "place_nodes"]


@kernel(
    counts=array("int32"),
    lengths=array("int32", 2),
    draft_lengths=array("int32", 2),
    live=array("int32"),
    ahead=scalar(),
)
def count_behind(item, counts, lengths, draft_lengths, live, ahead):
    """Write how many tokens a row of the draft lacks until it is `ahead` tokens longer than the base's; 0 if none.

    Item: a row.
    """
    row = np.int64(item)
    behind = np.int64(0)
    if live[row] != 0:
        behind = max(np.int64(0), np.int64(lengths[0, row]) + ahead - np.int64(draft_lengths[0, row]))
    counts[row] = behind


@kernel(
    parents=array("int32", 2),
    positions=array("int32"),
    cu_seqlens_q=array("int32"),
    context_lens=array("int32"),
    appended=array("int32", 2),
)
def place_nodes(item, parents, positions, cu_seqlens_q, context_lens, appended):
    """Write the position of a node: as far behind the row's length as it lies below the root.

    A parent comes before its children; what is none of these (-1: the root, or padding) ends the way up. Item: a node of a row.
    """
    nodes = np.int64(parents.shape[1])
    row = np.int64(item) // nodes
    node = np.int64(item) - row * nodes
    if node >= appended[0, row]:
        return
    depth = np.int64(0)
    at = node
    parent = np.int64(parents[row, at])
    while parent >= 0 and parent < at:
        depth += 1
        at = parent
        parent = np.int64(parents[row, at])
    positions[np.int64(cu_seqlens_q[row]) + node] = np.int64(context_lens[row]) + depth
