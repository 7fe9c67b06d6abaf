"""K and V of tokens into and out of a layer's pool where they lie on 16-byte boundaries: `move_kv`.

The work of `write_kv` and `gather_kv`, and their bits, by accesses of 16 bytes. Memory is given as bytes, and so are strides.

    item: `span` tokens                unit of a token: u = head * row + c
    lane: units lane, lane + lanes     16 bytes, or eight elements where they change their type; of K and of V

Nothing is divided; K and V are loaded before it is known whether their slot is a slot. Strides, but that of a half, and slots
are below 2**31, so that products are those of 32 bits.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import FLOAT8
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import memory, scalar
from numba_kv.kernels.wide_rows import (
    divided,
    floats_of,
    load_raw,
    product,
    raw_of,
    rescaled,
    slot_place,
    store_raw,
    unit_nbytes,
)

__all__ = ["changed", "move_kv"]


@routine
def changed(raw, kind, new_kind, factors, place):
    """Return eight elements in another type, times a factor if one of the types is float8."""
    if kind == new_kind:
        return raw
    floats = floats_of(raw, kind)
    if kind == FLOAT8 or new_kind == FLOAT8:
        floats = rescaled(floats, factors[np.uint64(place)])
    return raw_of(floats, new_kind)


@kernel(
    block_form=True,
    followed="early",
    open_scalars=("write", "kind", "pool_kind", "has_heads", "has_span"),
    pool=memory("uint8"),
    k=memory("uint8"),
    v=memory("uint8"),
    slots=memory("int64"),
    factors=memory("float32"),
    tokens=scalar(),
    span=scalar(),
    units=scalar(),
    by_units=scalar(),
    row=scalar(),
    by_row=scalar(),
    heads=scalar(),
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
    write=scalar(),
    kind=scalar(),
    pool_kind=scalar(),
    has_heads=scalar(),
    has_span=scalar(),
)
def move_kv(
    item,
    lane,
    lanes,
    pool,
    k,
    v,
    slots,
    factors,
    tokens,
    span,
    units,
    by_units,
    row,
    by_row,
    heads,
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
    write,
    kind,
    pool_kind,
    has_heads,
    has_span,
):
    """Write `span` of `tokens` tokens to their slots, or read them; `units` of a token are `row` of each head.

    Slots outside [0, num_slots) are dropped, or read as zeros. Without `has_heads` the heads lie together as one row.

    Item: `span` tokens, one without `has_span`; lanes share their units.
    """
    first, stop = np.int64(item), units
    if has_span:
        first = product(item, span)
        stop = product(min(span, tokens - first), units)
    step, pool_step = unit_nbytes(kind), unit_nbytes(pool_kind)
    u = np.int64(lane)
    while u < stop:
        t, c, h = first, u, np.int64(0)
        if has_span:
            t = divided(u, units, by_units)
            c -= product(t, units)
            t += first
        if has_heads:
            h = divided(c, row, by_row)
            c -= product(h, row)
        k_at = product(t, k_token) + product(h, k_head) + c * step
        v_at = product(t, v_token) + product(h, v_head) + c * step
        at = product(h, pool_head) + c * pool_step
        if write:
            key, value = load_raw(k, k_at, kind, False), load_raw(v, v_at, kind, False)
            slot = slots[np.uint64(t)]
            is_slot = slot >= 0 and slot < num_slots
            at += slot_place(slot, shift, pool_page, pool_token)
            store_raw(pool, at, changed(key, kind, pool_kind, factors, h), pool_kind, is_slot)
            at += pool_half
            store_raw(pool, at, changed(value, kind, pool_kind, factors, heads + h), pool_kind, is_slot)
        else:
            slot = slots[np.uint64(t)]
            none = np.uint64(0)
            key, value = (none, none, none, none), (none, none, none, none)
            if slot >= 0 and slot < num_slots:
                at += slot_place(slot, shift, pool_page, pool_token)
                key, value = load_raw(pool, at, pool_kind, False), load_raw(pool, at + pool_half, pool_kind, False)
            store_raw(k, k_at, changed(key, pool_kind, kind, factors, h), kind, True)
            store_raw(v, v_at, changed(value, pool_kind, kind, factors, heads + h), kind, True)
        u += lanes
