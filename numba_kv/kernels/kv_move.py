"""K and V of tokens into and out of a layer's pool where they lie on 16-byte boundaries: `move_kv`.

The work of `write_kv` and `gather_kv`, and their bits, by accesses of 16 bytes. Memory is given as bytes, and so are strides.

    item: `span` tokens          unit of a token: u = head * row + c
    lane: units u, u + lanes     16 bytes, or eight elements where they change their type; of K and of V

Nothing is divided and two units are on their way at once; K and V are loaded before it is known whether their slot is a slot.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import FLOAT8
from numba_kv.kernels.jit import kernel, routine
from numba_kv.kernels.kv_write import slot_offset
from numba_kv.kernels.spec import array, scalar
from numba_kv.kernels.wide_rows import divided, floats_of, load_raw, raw_of, rescaled, store_raw, unit_nbytes

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
    open_scalars=("write", "kind", "pool_kind", "has_heads"),
    pool=array("uint8"),
    k=array("uint8"),
    v=array("uint8"),
    slots=array("int64"),
    factors=array("float32"),
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
):
    """Write `span` of `tokens` tokens to their slots, or read them; `units` of a token are `row` of each head.

    Slots outside [0, num_slots) are dropped, or read as zeros. Without `has_heads` the heads lie together as one row.

    Item: `span` tokens; lanes share their units.
    """
    first = np.int64(item) * span
    stop = min(span, tokens - first) * units
    u = np.int64(lane)
    while u < stop:
        w = u + lanes
        two = w < stop
        if not two:
            w = u  # the same unit again costs nothing, and no load waits for a branch
        t0, t1 = np.int64(0), np.int64(0)
        c0, c1 = u, w
        if span > 1:
            t0, t1 = divided(u, units, by_units), divided(w, units, by_units)
            c0 -= t0 * units
            c1 -= t1 * units
        h0, h1 = np.int64(0), np.int64(0)
        if has_heads:
            h0, h1 = divided(c0, row, by_row), divided(c1, row, by_row)
            c0 -= h0 * row
            c1 -= h1 * row
        t0 += first
        t1 += first
        slot0, slot1 = slots[np.uint64(t0)], slots[np.uint64(t1)]
        is0 = slot0 >= 0 and slot0 < num_slots
        is1 = slot1 >= 0 and slot1 < num_slots
        step, pool_step = unit_nbytes(kind), unit_nbytes(pool_kind)
        k0, k1 = t0 * k_token + h0 * k_head + c0 * step, t1 * k_token + h1 * k_head + c1 * step
        v0, v1 = t0 * v_token + h0 * v_head + c0 * step, t1 * v_token + h1 * v_head + c1 * step
        at0 = h0 * pool_head + c0 * pool_step
        at1 = h1 * pool_head + c1 * pool_step
        if write:
            key0, value0 = load_raw(k, k0, kind), load_raw(v, v0, kind)
            key1, value1 = load_raw(k, k1, kind), load_raw(v, v1, kind)
            if is0:
                at0 += slot_offset(slot0, shift, pool_page, pool_token)
                store_raw(pool, at0, changed(key0, kind, pool_kind, factors, h0), pool_kind)
                store_raw(pool, at0 + pool_half, changed(value0, kind, pool_kind, factors, heads + h0), pool_kind)
            if two and is1:
                at1 += slot_offset(slot1, shift, pool_page, pool_token)
                store_raw(pool, at1, changed(key1, kind, pool_kind, factors, h1), pool_kind)
                store_raw(pool, at1 + pool_half, changed(value1, kind, pool_kind, factors, heads + h1), pool_kind)
        else:
            none = np.uint64(0)
            key0, value0 = (none, none, none, none), (none, none, none, none)
            key1, value1 = (none, none, none, none), (none, none, none, none)
            if is0:
                at0 += slot_offset(slot0, shift, pool_page, pool_token)
                key0, value0 = load_raw(pool, at0, pool_kind), load_raw(pool, at0 + pool_half, pool_kind)
            if is1:
                at1 += slot_offset(slot1, shift, pool_page, pool_token)
                key1, value1 = load_raw(pool, at1, pool_kind), load_raw(pool, at1 + pool_half, pool_kind)
            store_raw(k, k0, changed(key0, pool_kind, kind, factors, h0), kind)
            store_raw(v, v0, changed(value0, pool_kind, kind, factors, heads + h0), kind)
            if two:
                store_raw(k, k1, changed(key1, pool_kind, kind, factors, h1), kind)
                store_raw(v, v1, changed(value1, pool_kind, kind, factors, heads + h1), kind)
        u += 2 * lanes
