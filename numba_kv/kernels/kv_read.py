"""K and V of tokens out of a layer's pool: `gather_kv` and `gather_kv_words`; `find_slots` and `find_ragged_slots` name them.

Tokens are named by slots, as in the write: the same list serves every layer of a group, and `carry_slots` are such a list.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import FLOAT8, clear_row, copy_pair, move_pair, unpack_pair
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.kv_write import slot_offset
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar

__all__ = ["find_ragged_slots", "find_slots", "gather_kv", "gather_kv_words"]


@routine
def slot_of(page_table, row, position, length, shift, num_pages):
    """Return the slot of a position of a row; -1 where it has none: see `find_slots`."""
    slot = np.int64(-1)
    if row >= 0 and row < page_table.shape[0] and position >= 0 and position < length:
        page = position >> shift
        if page < page_table.shape[2]:
            found = np.int64(page_table[row, 0, page])
            if found >= 0 and found < num_pages:
                slot = (found << shift) + (position - (page << shift))
    return slot


@kernel(
    slots=array("int64", 2),
    page_table=array("int32", 3),
    rows=array("int32"),
    starts=array("int32"),
    lengths=array("int32"),
    low=scalar(),
    shift=scalar(),
    num_pages=scalar(),
)
def find_slots(item, slots, page_table, rows, starts, lengths, low, shift, num_pages):
    """Write the slot of one position: column i of row b is position ``starts[b] + low + i`` of table row ``rows[b]``.

    -1 where the position is negative, not below ``lengths[b]``, not mapped, or the row is not in the table. Item: a position of
    a row.
    """
    columns = np.int64(slots.shape[1])
    b = np.int64(item) // columns
    column = np.int64(item) - b * columns
    position = np.int64(starts[b]) + low + column
    slots[b, column] = slot_of(page_table, np.int64(rows[b]), position, np.int64(lengths[b]), shift, num_pages)


@kernel(
    slots=array("int64"),
    cu_seqlens=array("int32"),
    page_table=array("int32", 3),
    rows=array("int32"),
    starts=array("int32"),
    lengths=array("int32"),
    low=scalar(),
    shift=scalar(),
    num_pages=scalar(),
)
def find_ragged_slots(item, slots, cu_seqlens, page_table, rows, starts, lengths, low, shift, num_pages):
    """Write the slot of one token: those of row b are tokens [cu_seqlens[b], cu_seqlens[b + 1]), from its position on.

    The position of the row's first token is ``starts[b] + low``. -1 as in `find_slots`, and for tokens of no row.

    Item: a token.
    """
    token = np.int64(item)
    count = np.int64(cu_seqlens.shape[0] - 1)
    slot = np.int64(-1)
    if token < cu_seqlens[count]:
        b, beyond = np.int64(0), count
        while beyond - b > 1:  # the last row that starts at or before the token
            middle = (b + beyond) >> 1
            if cu_seqlens[middle] <= token:
                b = middle
            else:
                beyond = middle
        first = np.int64(cu_seqlens[b])
        if first <= token:
            position = np.int64(starts[b]) + low + token - first
            slot = slot_of(page_table, np.int64(rows[b]), position, np.int64(lengths[b]), shift, num_pages)
    slots[token] = slot


@kernel(
    block_form=True,
    pool=array("uint64"),
    k=array("uint64"),
    v=array("uint64"),
    slots=array("int64"),
    heads=scalar(),
    row=scalar(),
    shift=scalar(),
    num_slots=scalar(),
    pool_half=scalar(),
    pool_page=scalar(),
    pool_token=scalar(),
    pool_head=scalar(),
    k_token=scalar(),
    k_head=scalar(),
    v_token=scalar(),
    v_head=scalar(),
)
def gather_kv_words(
    item,
    lane,
    lanes,
    pool,
    k,
    v,
    slots,
    heads,
    row,
    shift,
    num_slots,
    pool_half,
    pool_page,
    pool_token,
    pool_head,
    k_token,
    k_head,
    v_token,
    v_head,
):
    """Copy one head of one token, `row` words of K and of V; strides in words. Zeros for slots outside [0, num_slots).

    Item: a head of a token; lanes share its words.
    """
    token = np.int64(item) // heads
    head = np.int64(item) - token * heads
    slot = slots[token]
    k_to, v_to = token * k_token + head * k_head, token * v_token + head * v_head
    if slot >= 0 and slot < num_slots:
        at = slot_offset(slot, shift, pool_page, pool_token) + head * pool_head
        copy_pair(k, v, k_to, v_to, pool, pool, at, at + pool_half, row, lane, lanes)
    else:
        k_at, v_at = np.uint64(k_to), np.uint64(v_to)
        step, stop = np.uint64(lanes), np.uint64(row)
        j = np.uint64(lane)
        while j < stop:
            k[k_at + j] = np.uint64(0)
            v[v_at + j] = np.uint64(0)
            j += step


@kernel(
    block_form=True,
    pool8=array("uint8"),
    pool16=array("uint16"),
    pool32=array("uint32"),
    k8=array("uint8"),
    k16=array("uint16"),
    k32=array("uint32"),
    v8=array("uint8"),
    v16=array("uint16"),
    v32=array("uint32"),
    slots=array("int64"),
    factors=array("float32"),
    heads=scalar(),
    row=scalar(),
    shift=scalar(),
    num_slots=scalar(),
    pool_half=scalar(),
    pool_page=scalar(),
    pool_token=scalar(),
    pool_head=scalar(),
    k_token=scalar(),
    k_head=scalar(),
    v_token=scalar(),
    v_head=scalar(),
    pool_kind=scalar(),
    kind=scalar(),
)
def gather_kv(
    item,
    lane,
    lanes,
    pool8,
    pool16,
    pool32,
    k8,
    k16,
    k32,
    v8,
    v16,
    v32,
    slots,
    factors,
    heads,
    row,
    shift,
    num_slots,
    pool_half,
    pool_page,
    pool_token,
    pool_head,
    k_token,
    k_head,
    v_token,
    v_head,
    pool_kind,
    kind,
):
    """Read one head of one token, `row` elements of K and of V, as elements of kind `kind`; strides in elements.

    What was float8 is multiplied by `factors` [2, heads] in float32: the scales. Zeros for slots outside [0, num_slots).

    Item: a head of a token; lanes share its elements.
    """
    token = np.int64(item) // heads
    head = np.int64(item) - token * heads
    slot = slots[token]
    k_to, v_to = token * k_token + head * k_head, token * v_token + head * v_head
    if slot >= 0 and slot < num_slots:
        at = slot_offset(slot, shift, pool_page, pool_token) + head * pool_head
        pool, ks, vs = (pool8, pool16, pool32), (k8, k16, k32), (v8, v16, v32)
        if pool_kind == FLOAT8 and kind != FLOAT8:
            k_factor, v_factor = factors[head], factors[heads + head]
            unpack_pair(ks, vs, k_to, v_to, kind, pool8, pool8, at, at + pool_half, row, k_factor, v_factor, lane, lanes)
        else:
            move_pair(ks, vs, k_to, v_to, kind, pool, pool, at, at + pool_half, pool_kind, row, lane, lanes)
    else:
        clear_row(k8, k16, k32, k_to, kind, row, lane, lanes)
        clear_row(v8, v16, v32, v_to, kind, row, lane, lanes)
