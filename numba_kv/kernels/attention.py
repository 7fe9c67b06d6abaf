"""Attention over pages: `attend`, and `merge_splits` where the keys of a query were split.

The keys of a query are taken tile by tile, with a running maximum, sum and weighted V (online softmax in float32). A *work* is
some queries that share a KV head, up to `queries` pairs of a token and a head, and one of `splits` ranges of their keys. An
item is a *worker*: it does every `workers`-th work. Its memory, near the lanes or its part of an array::

    floats     queries [Q, pitch] | sums [parts, Q, v_pitch] | weights [Q, tile] | team maxima, team sums | state [4, Q]
    integers   places of K of each key of the tile | of V; -1: the key is not there | notes, so that no lane keeps them

A key is in a page; of rows that appended more than `long_tokens`, in the step's own K and V, or among the tokens that were
carried from before the step.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.attention_tiles import (
    MAX_TEAM,
    MINUS_INFINITY,
    clear,
    divide,
    exp_of,
    find_dense,
    find_paged,
    lowest_key,
    row_of,
    weigh_keys,
)
from numba_kv.kernels.attention_units import UNIT, element, score_tile, store, weigh_tile
from numba_kv.kernels.bits import FLOAT8, float_of
from numba_kv.kernels.block_memory import NEAR_FLOATS, NEAR_INTEGERS, NEAR_LANES, lanes_wait, near_floats, near_integers
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar

__all__ = ["MAX_QUERIES", "NEAR_PARTS", "NEAR_TILE", "NOTES", "attend", "merge_splits", "worker_floats"]

#: Integers of a worker beside those of a tile, and keys of a tile where its memory is near.
NOTES = 8
NEAR_TILE = (NEAR_INTEGERS - NOTES) // 2
#: Most groups of lanes that share the keys of a query's V where memory is near, and most queries of a work.
NEAR_PARTS, MAX_QUERIES = 4, 8


def worker_floats(queries: int, pitch: int, v_pitch: int, parts: int, tile: int) -> int:
    """Return the floats of a worker."""
    return queries * (pitch + parts * v_pitch + tile + 2 * MAX_TEAM + 4)


@routine
def load_queries(floats, q_at, pitch, q8, q_kind, strides, token, head, heads, queries, dim, lane, lanes):
    """Write queries as float32, and zeros behind each to its pitch: `heads` heads from `head` on, of tokens from `token` on."""
    token_stride, head_stride = strides
    i = lane
    while i < queries * pitch:
        query = divide(i, pitch)
        channel = i - query * pitch
        value = np.float32(0.0)
        if channel < dim:
            of = divide(query, heads)
            at = (token + of) * token_stride + (head + query - of * heads) * head_stride + channel
            value = element(q8, at, q_kind)
        floats[np.uint64(q_at + i)] = value
        i += lanes


@routine
def share_of_sink(top, total, sink):
    """Return what sums are multiplied by so that the weights, the sink's included, add up to 1; 0 where there is no key."""
    if not total > np.float32(0.0) and total == total:
        return np.float32(0.0)
    if sink > top:
        factor = exp_of(top - sink)
        return factor / (total * factor + np.float32(1.0))
    return np.float32(1.0) / (total + exp_of(sink - top))


@routine
def sharings(lanes, dim, max_parts, lane):
    """Return how lanes share products and weighted V: (team, teams, member, members) and (part, parts, place, span)."""
    members = np.int64(1)
    if lanes >= 32:
        members = np.int64(4)
    elif lanes > 1:
        members = np.int64(2)
    team = lane // members
    span = np.int64(1)
    while span * 2 <= lanes and span * UNIT < dim:
        span *= 2
    part = lane // span
    parts = min(np.int64(max_parts), lanes // span)
    return (team, lanes // members, lane - team * members, members), (part, parts, lane - part * span, span)


@routine
def weight_sharing(lanes, lane, queries):
    """Return how lanes share the weights of `queries` queries: (team, teams, member, members)."""
    members = min(np.int64(MAX_TEAM), max(np.int64(1), divide(lanes, queries)))
    teams = divide(lanes, members)
    team = divide(lane, members)
    member = lane - team * members
    if team >= teams:
        team = queries  # lanes that are left over do nothing
    return team, teams, member, members


@routine
def finish(floats, acc_at, state_at, apart, pitch, parts, queries, count, v_dim, factor, token, own, q_from, splits, split,
           q_heads, partial, sinks, out8, out_kind, out_token, out_head, lane, lanes):  # fmt: skip
    """Write what has become of `count` queries: their output, or their part of one."""
    i = np.int64(lane)
    while i < count * v_dim:
        query = divide(i, v_dim)
        channel = i - query * v_dim
        total = np.float32(0.0)
        for part in range(parts):
            total += floats[np.uint64(acc_at + part * apart + query * pitch + channel)]
        total *= factor
        top, weight = floats[np.uint64(state_at + query)], floats[np.uint64(state_at + queries + query)]
        behind = divide(query, own)
        q_head = q_from + query - behind * own
        if splits == 1:
            sink = MINUS_INFINITY
            if sinks.shape[0] > 0:
                sink = sinks[np.uint64(q_head)]
            at = (token + behind) * out_token + q_head * out_head + channel
            store(out8, at, out_kind, total * share_of_sink(top, weight, sink))
        else:
            at = (((token + behind) * q_heads + q_head) * splits + split) * (2 + v_dim)
            partial[np.uint64(at + 2 + channel)] = total
            if channel == 0:
                partial[np.uint64(at)] = top
                partial[np.uint64(at + 1)] = weight
        i += lanes


@kernel(
    block_form=True,
    open_scalars=("kind", "wide", "is_dense", "size"),
    memory8=array("uint8"),
    q8=array("uint8"),
    out8=array("uint8"),
    page_table=array("int32", 3),
    cu_seqlens=array("int32"),
    seq_lens=array("int32"),
    context_lens=array("int32"),
    factors=array("float32"),
    sinks=array("float32"),
    spare_floats=array("float32"),
    spare_integers=array("int64"),
    partial=array("float32"),
    num_tokens=scalar(),
    works=scalar(),
    workers=scalar(),
    splits=scalar(),
    heads=scalar(),
    group=scalar(),
    queries=scalar(),
    tile=scalar(),
    max_parts=scalar(),
    dim=scalar(),
    v_dim=scalar(),
    shift=scalar(),
    num_pages=scalar(),
    window_kind=scalar(),
    window=scalar(),
    long_tokens=scalar(),
    pool_half=scalar(),
    pool_page=scalar(),
    k_at=scalar(),
    k_token=scalar(),
    k_head=scalar(),
    v_at=scalar(),
    v_token=scalar(),
    v_head=scalar(),
    carry=scalar(),
    carry_k_at=scalar(),
    carry_k_row=scalar(),
    carry_k_token=scalar(),
    carry_k_head=scalar(),
    carry_v_at=scalar(),
    carry_v_row=scalar(),
    carry_v_token=scalar(),
    carry_v_head=scalar(),
    q_token=scalar(),
    q_head=scalar(),
    out_token=scalar(),
    out_head=scalar(),
    q_kind=scalar(),
    out_kind=scalar(),
    scale=scalar(),
    soft_cap=scalar(),
    kind=scalar(),
    wide=scalar(),
    is_dense=scalar(),
    size=scalar(),
)
def attend(
    item, lane, lanes, memory8, q8, out8, page_table, cu_seqlens, seq_lens, context_lens, factors, sinks, spare_floats,
    spare_integers, partial, num_tokens, works, workers, splits, heads, group, queries, tile, max_parts, dim, v_dim, shift,
    num_pages, window_kind, window, long_tokens, pool_half, pool_page, k_at, k_token, k_head, v_at, v_token, v_head, carry,
    carry_k_at, carry_k_row, carry_k_token, carry_k_head, carry_v_at, carry_v_row, carry_v_token, carry_v_head, q_token, q_head,
    out_token, out_head, q_kind, out_kind, scale, soft_cap, kind, wide, is_dense, size,
):  # fmt: skip
    """Write the attention of a step's tokens; places and strides in elements, `scale` and `soft_cap` as bits of float32.

    Rows that appended more than `long_tokens` are left to the form that `is_dense`, the others to the one that is not.

    `memory8` are bytes of elements of `kind` (`wide`: units of four channels are aligned to their size). Paged, it is the pool,
    with `k_token` and `k_head` its strides, and float8 is multiplied by `factors` [2, H]. Dense, it spans four arrays: at
    `k_at`, `v_at` the step's ``[T, H, D]``, at `carry_k_at`, `carry_v_at` the `carry` tokens before it ``[B, carry, H, D]``.
    `sinks` [H * group] may be empty. With one split `out` is written, zeros for tokens that the step did not append; with more,
    `partial` [T, H * group, splits, 2 + v_dim]: maximum, sum, sums of V. `size`, unless 0, is `dim` and `v_dim`, and the memory
    of a worker is near: a block has `NEAR_LANES` lanes, and a tile `NEAR_TILE` keys.

    Item: a worker; its lanes share every work.
    """
    floats, offsets = spare_floats, spare_integers
    lane, lanes = np.int64(lane), np.int64(lanes)
    if size > 0:
        floats, offsets = near_floats(spare_floats), near_integers(spare_integers)
        lanes, tile, max_parts = np.int64(NEAR_LANES), np.int64(NEAR_TILE), np.int64(NEAR_PARTS)
    pitch, v_pitch = (dim + UNIT - 1) // UNIT * UNIT, (v_dim + UNIT - 1) // UNIT * UNIT
    if size > 0:
        pitch = v_pitch = np.int64((size + UNIT - 1) // UNIT * UNIT)
    scoring, weighing = sharings(lanes, v_pitch, max_parts, lane)
    parts = weighing[1]
    each = pitch + max_parts * v_pitch + tile + 2 * MAX_TEAM + 4  # floats of a query
    room = queries
    q_at, key_at = np.int64(0), np.int64(0)
    if size > 0:  # places that do not depend on the step are constants
        room = min(np.int64(MAX_QUERIES), NEAR_FLOATS // each)
    else:
        q_at = np.int64(item) * queries * each
        key_at = np.int64(item) * (2 * tile + NOTES)
    acc_at = q_at + room * pitch
    acc_apart = room * v_pitch
    s_at = acc_at + max_parts * acc_apart
    max_at = s_at + room * tile
    sum_at = max_at + room * MAX_TEAM
    state_at = sum_at + room * MAX_TEAM
    value_at = key_at + tile
    note_at = value_at + tile
    few = min(queries, group)  # heads of a work, and tokens beside them
    many = queries // few
    chunks = (group + few - 1) // few
    work = np.int64(item)
    while work < works:
        rest = work // splits
        split = work - rest * splits
        of = rest // chunks
        chunk = rest - of * chunks
        stretch = of // heads
        head = of - stretch * heads
        own = min(few, group - chunk * few)
        q_from = head * group + chunk * few
        token = stretch * many
        stop = min(token + many, num_tokens)
        while token < stop:  # the tokens of one row at a time
            row = row_of(cu_seqlens, token)
            first = np.int64(cu_seqlens[row])
            end = min(stop, np.int64(cu_seqlens[row + 1]))
            if end <= token:  # behind the last row's tokens
                end = stop
            start, length = np.int64(context_lens[row]), np.int64(seq_lens[row])
            if (length - start > long_tokens) != (is_dense != 0):
                token = end
                continue
            position = start + token - first
            count = (end - token) * own
            base = lowest_key(position, window_kind, window)
            high = base  # a token that was not appended sees nothing
            if position < length:
                high = min(length, position + end - token)
            keys = (high - base + splits - 1) // splits
            base += split * keys
            high = min(high, base + keys)
            factor = float_of(scale)
            if kind == FLOAT8:
                factor *= factors[np.uint64(head)]
            lanes_wait()
            load_queries(floats, q_at, pitch, q8, q_kind, (q_token, q_head), token, q_from, own, count, dim, lane, lanes)
            clear(floats, acc_at, parts * acc_apart, np.float32(0.0), lane, lanes)
            clear(floats, state_at, room, MINUS_INFINITY, lane, lanes)
            clear(floats, state_at + room, room, np.float32(0.0), lane, lanes)
            if lane == 0:
                for note, what in enumerate((token, end, stop, own, q_from, split, head, work)):
                    offsets[np.uint64(note_at + note)] = what
            while base < high:
                n = min(tile, high - base)
                lanes_wait()
                if not is_dense:
                    pool = (head * k_head, pool_half, pool_page, k_token, shift, num_pages)
                    find_paged(offsets, (key_at, value_at), page_table, row, base, n, pool, lane, lanes)
                elif base < start:
                    n = min(n, start - base)
                    column = base - start + carry
                    k_from = carry_k_at + row * carry_k_row + column * carry_k_token + head * carry_k_head
                    v_from = carry_v_at + row * carry_v_row + column * carry_v_token + head * carry_v_head
                    find_dense(offsets, (key_at, value_at), n, k_from, carry_k_token, v_from, carry_v_token, lane, lanes)
                else:
                    k_from = k_at + (first + base - start) * k_token + head * k_head
                    v_from = v_at + (first + base - start) * v_token + head * v_head
                    find_dense(offsets, (key_at, value_at), n, k_from, k_token, v_from, v_token, lane, lanes)
                lanes_wait()
                lines = (q_at, pitch, s_at, tile, count, dim)
                score_tile(floats, offsets, memory8, (key_at, n), lines, scoring, lane, lanes, kind, wide)
                lanes_wait()
                places = (s_at, tile, max_at, sum_at, state_at, room, count)
                seen = (base, position, own, length)
                rule = (window_kind, window, factor, float_of(soft_cap))
                weigh_keys(floats, offsets, (key_at, n), places, seen, rule, weight_sharing(lanes, lane, count))
                lines_v = (acc_at + weighing[0] * acc_apart, v_pitch, s_at, tile, count, v_dim, state_at + 2 * room)
                weigh_tile(floats, offsets, memory8, (value_at, n), lines_v, weighing, kind, wide)
                base += n
            lanes_wait()
            token, end = offsets[np.uint64(note_at)], offsets[np.uint64(note_at + 1)]
            stop, own = offsets[np.uint64(note_at + 2)], offsets[np.uint64(note_at + 3)]
            q_from, split = offsets[np.uint64(note_at + 4)], offsets[np.uint64(note_at + 5)]
            head, work = offsets[np.uint64(note_at + 6)], offsets[np.uint64(note_at + 7)]
            v_factor = np.float32(1.0)
            if kind == FLOAT8:
                v_factor = factors[np.uint64(heads + head)]
            finish(
                floats, acc_at, state_at, acc_apart, v_pitch, parts, room, count, v_dim, v_factor, token, own, q_from, splits,
                split, heads * group, partial, sinks, out8, out_kind, out_token, out_head, lane, lanes,
            )  # fmt: skip
            token = end
        work += workers


@kernel(
    block_form=True,
    partial=array("float32"),
    sinks=array("float32"),
    out8=array("uint8"),
    q_heads=scalar(),
    splits=scalar(),
    v_dim=scalar(),
    out_token=scalar(),
    out_head=scalar(),
    out_kind=scalar(),
)
def merge_splits(item, lane, lanes, partial, sinks, out8, q_heads, splits, v_dim, out_token, out_head, out_kind):
    """Write one head of one token from the parts of its keys (`attend`).

    Item: a head of a token; lanes share its channels.
    """
    token = np.int64(item) // q_heads
    head = np.int64(item) - token * q_heads
    apart = 2 + v_dim
    at = np.int64(item) * splits * apart
    top = MINUS_INFINITY
    for split in range(splits):
        found = partial[np.uint64(at + split * apart)]
        if found > top:
            top = found
    reference = top if top > MINUS_INFINITY else np.float32(0.0)
    weight = np.float32(0.0)
    for split in range(splits):
        place = np.uint64(at + split * apart)
        weight += partial[place + np.uint64(1)] * exp_of(partial[place] - reference)
    sink = MINUS_INFINITY
    if sinks.shape[0] > 0:
        sink = sinks[np.uint64(head)]
    factor = share_of_sink(top, weight, sink)
    channel = np.int64(lane)
    while channel < v_dim:
        total = np.float32(0.0)
        for split in range(splits):
            place = np.uint64(at + split * apart)
            total += partial[place + np.uint64(2 + channel)] * exp_of(partial[place] - reference)
        store(out8, token * out_token + head * out_head + channel, out_kind, total * factor)
        channel += lanes
