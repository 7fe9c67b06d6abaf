"""K and V of a step's tokens into a layer's pool: `write_kv`, and `write_kv_words` where no bit changes.

The pool is addressed by 64-bit strides of half, page, token and head, so that every layout of a page is one source. Neighbours
of the last axis lie together. A host that finds heads to lie together too names one head of H * D.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import FLOAT8, copy_pair, move_pair, pack_pair
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar

__all__ = ["slot_offset", "write_kv", "write_kv_words"]


@routine
def slot_offset(slot, shift, page_stride, token_stride):
    """Return where the token of a slot begins in half 0."""
    page = slot >> shift
    return page * page_stride + (slot - (page << shift)) * token_stride


@kernel(
    block_form=True,
    followed="early",
    pool=array("uint64"),
    k=array("uint64"),
    v=array("uint64"),
    slot_mapping=array("int64"),
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
def write_kv_words(
    item,
    lane,
    lanes,
    pool,
    k,
    v,
    slot_mapping,
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
    """Copy one head of one token, `row` words of K and of V; strides in words. Slots outside [0, num_slots) are dropped.

    Item: a head of a token; lanes share its words.
    """
    token = np.int64(item) // heads
    head = np.int64(item) - token * heads
    slot = slot_mapping[token]
    if slot >= 0 and slot < num_slots:
        at = slot_offset(slot, shift, pool_page, pool_token) + head * pool_head
        k_from, v_from = token * k_token + head * k_head, token * v_token + head * v_head
        copy_pair(pool, pool, at, at + pool_half, k, v, k_from, v_from, row, lane, lanes)


@kernel(
    block_form=True,
    followed="early",
    pool8=array("uint8"),
    pool16=array("uint16"),
    pool32=array("uint32"),
    k8=array("uint8"),
    k16=array("uint16"),
    k32=array("uint32"),
    v8=array("uint8"),
    v16=array("uint16"),
    v32=array("uint32"),
    slot_mapping=array("int64"),
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
def write_kv(
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
    slot_mapping,
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
    """Write one head of one token, `row` elements of K and of V, as elements of kind `pool_kind`; strides in elements.

    The arrays of one memory differ in element size alone; the kinds say which is used. What becomes float8 is multiplied by
    `factors` [2, heads] in float32 first: the inverses of the scales. Slots outside [0, num_slots) are dropped.

    Item: a head of a token; lanes share its elements.
    """
    token = np.int64(item) // heads
    head = np.int64(item) - token * heads
    slot = slot_mapping[token]
    if slot >= 0 and slot < num_slots:
        at = slot_offset(slot, shift, pool_page, pool_token) + head * pool_head
        k_from, v_from = token * k_token + head * k_head, token * v_token + head * v_head
        pool, ks, vs = (pool8, pool16, pool32), (k8, k16, k32), (v8, v16, v32)
        if pool_kind == FLOAT8 and kind != FLOAT8:
            k_factor, v_factor = factors[head], factors[heads + head]
            pack_pair(pool8, pool8, at, at + pool_half, ks, vs, k_from, v_from, kind, row, k_factor, v_factor, lane, lanes)
        else:
            move_pair(pool, pool, at, at + pool_half, pool_kind, ks, vs, k_from, v_from, kind, row, lane, lanes)
