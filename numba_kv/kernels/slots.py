"""Slots and positions of long steps: `fill_slots` over tokens, `fill_carry` over the tokens before the step."""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.layout import BLOCK_AT, CARRY_AT, CARRY_WIDTH, CHUNKED, EMPTY, KIND, SHIFT, SLOT_AT, WIDTH, WINDOW
from numba_kv.kernels.spec import array, scalar

__all__ = ["fill_carry", "fill_slots"]


@kernel(
    cu_seqlens_q=array("int32"),
    context_lens=array("int32"),
    seq_lens=array("int32"),
    mapped_begin=array("int32", 2),
    groups=array("int64", 2),
    block_tables=array("int32"),
    slot_mapping=array("int64"),
    positions=array("int32"),
    num_tokens=scalar(),
    tile=scalar(),
)
def fill_slots(
    item, cu_seqlens_q, context_lens, seq_lens, mapped_begin, groups, block_tables, slot_mapping, positions, num_tokens, tile
):
    """Write slot_mapping of every group and positions for `tile` neighbouring tokens.

    Item: a tile. Runs after `advance`, from its lengths. Tokens in pages that already left the window get slot -1.
    """
    token = np.int64(item) * tile
    stop = min(token + tile, num_tokens, np.int64(cu_seqlens_q[cu_seqlens_q.shape[0] - 1]))
    row = np.int64(0)
    beyond = np.int64(cu_seqlens_q.shape[0] - 1)
    while beyond - row > 1:  # the last row that starts at or before the token
        middle = (row + beyond) >> 1
        if cu_seqlens_q[middle] <= token:
            row = middle
        else:
            beyond = middle
    while token < stop:
        while token >= cu_seqlens_q[row + 1]:
            row += 1
        start = np.int64(context_lens[row])
        last = np.int64(seq_lens[row])
        first = np.int64(cu_seqlens_q[row])
        run = min(stop, np.int64(cu_seqlens_q[row + 1]))
        for g in range(groups.shape[0]):
            shift = groups[g, SHIFT]
            begin = np.int64(mapped_begin[g, row])
            ids = groups[g, BLOCK_AT] + row * groups[g, WIDTH]
            out = groups[g, SLOT_AT]
            real = groups[g, KIND] != EMPTY
            for t in range(token, run):
                position = start + t - first
                page = position >> shift
                slot = np.int64(-1)
                if real and position < last and page >= begin:
                    slot = (np.int64(block_tables[ids + page]) << shift) + (position - (page << shift))
                slot_mapping[out + t] = slot
        for t in range(token, run):
            position = start + t - first
            positions[t] = position if position < last else 0
        token = run


@kernel(
    block_form=True,
    context_lens=array("int32"),
    seq_lens=array("int32"),
    groups=array("int64", 2),
    block_tables=array("int32"),
    carry_slots=array("int64"),
    num_rows=scalar(),
    max_step_tokens=scalar(),
)
def fill_carry(item, lane, lanes, context_lens, seq_lens, groups, block_tables, carry_slots, num_rows, max_step_tokens):
    """Write where the window's tokens before a long step lie in the ring.

    Item: a row of a window group, group after group. Column j is position `context - width + j`; -1 where the first query
    of the step does not see it, where it does not exist, and in rows whose step was not long.
    """
    g = 1 + np.int64(item) // num_rows
    row = np.int64(item) - (g - 1) * num_rows
    width = groups[g, CARRY_WIDTH]
    start = np.int64(context_lens[row])
    low = start
    if np.int64(seq_lens[row]) - start > max_step_tokens:
        low = max(np.int64(0), start - groups[g, WINDOW] + 1)
        if groups[g, KIND] == CHUNKED:
            low = np.int64(np.uint32(start) // np.uint32(groups[g, WINDOW])) * groups[g, WINDOW]
    shift = groups[g, SHIFT]
    ids = groups[g, BLOCK_AT] + row * groups[g, WIDTH]
    out = groups[g, CARRY_AT] + row * width
    column = lane
    while column < width:
        position = start - width + column
        slot = np.int64(-1)
        if position >= low:
            page = position >> shift
            slot = (np.int64(block_tables[ids + page]) << shift) + (position - (page << shift))
        carry_slots[out + column] = slot
        column += lanes
