"""Rotate Q and K of a step and write K and V into a layer's pool, in one pass over the data: `rotate_kv`.

The heads of a token are one list, ``Q | K | V``. A team of lanes has a head, and each of its lanes a unit of channels
(`head_units`), so that the cosines of a lane are the same for every head and are loaded once:

    item: a token        lane: t of team g        heads g, g + teams, ...        units t, t + team, ...

A head's raw elements are loaded while the head before it is worked on.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import FLOAT8, FLOAT32, float_of
from numba_kv.kernels.head_units import (
    close_tree,
    get_run,
    get_run_once,
    grow_tree,
    norm_factor,
    normalised,
    put_run,
    rotated,
    squares,
    unit_runs,
)
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.kv_write import slot_offset
from numba_kv.kernels.lanes import team_sum
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar
from numba_kv.kernels.wide_rows import floats_of, raw_of, rescaled

__all__ = ["NO_NORM", "rotate_kv"]

#: Kind of weights where nothing is normalised.
NO_NORM = -1


@routine
def head_at(head, token, q_heads, heads, q_token, q_head, k_token, k_head, v_token, v_head):
    """Return where a head of the list begins in its memory."""
    if head < q_heads:
        return token * q_token + head * q_head
    head -= q_heads
    if head < heads:
        return token * k_token + head * k_head
    return token * v_token + (head - heads) * v_head


@routine
def both_runs(q, k, v, head, at, q_heads, heads, runs, is_there, kind, wide):
    """Return the runs of a unit of a head, raw; zeros if it is not there."""
    none = np.uint64(0)
    a, b = (none, none, none, none), (none, none, none, none)
    first, count, second, rest = runs
    if is_there:
        memory = v
        if head < q_heads:
            memory = q
        elif head < q_heads + heads:
            memory = k
        a = get_run_once(memory, at, first, count, kind, wide)
        b = get_run_once(memory, at, second, rest, kind, wide)
    return a, b


@routine
def stored(floats, raw, is_new, kind, pool_kind, factor):
    """Return a run as the pool has it, of its float32; elements that are not new keep their bits if the type stays."""
    if not is_new and kind == pool_kind:
        return raw
    if pool_kind == FLOAT8 and kind != FLOAT8:
        floats = rescaled(floats, factor)
    return raw_of(floats, pool_kind)


@kernel(
    block_form=True,
    open_scalars=("kind", "pool_kind", "weight_kind", "interleaved", "wide", "single"),
    q=array("uint8"),
    k=array("uint8"),
    v=array("uint8"),
    pool=array("uint8"),
    q_out=array("uint8"),
    k_out=array("uint8"),
    q_weight=array("uint8"),
    k_weight=array("uint8"),
    table=array("uint8"),
    positions=array("int32"),
    slots=array("int64"),
    factors=array("float32"),
    q_heads=scalar(),
    heads=scalar(),
    dim=scalar(),
    rotary=scalar(),
    table_rows=scalar(),
    team_shift=scalar(),
    has_k_out=scalar(),
    has_q_norm=scalar(),
    has_k_norm=scalar(),
    inverse_dim=scalar(),
    eps=scalar(),
    norm_offset=scalar(),
    shift=scalar(),
    num_slots=scalar(),
    pool_half=scalar(),
    pool_page=scalar(),
    pool_token=scalar(),
    pool_head=scalar(),
    q_token=scalar(),
    q_head=scalar(),
    k_token=scalar(),
    k_head=scalar(),
    v_token=scalar(),
    v_head=scalar(),
    q_out_token=scalar(),
    q_out_head=scalar(),
    k_out_token=scalar(),
    k_out_head=scalar(),
    kind=scalar(),
    pool_kind=scalar(),
    weight_kind=scalar(),
    interleaved=scalar(),
    wide=scalar(),
    single=scalar(),
)
def rotate_kv(
    item,
    lane,
    lanes,
    q,
    k,
    v,
    pool,
    q_out,
    k_out,
    q_weight,
    k_weight,
    table,
    positions,
    slots,
    factors,
    q_heads,
    heads,
    dim,
    rotary,
    table_rows,
    team_shift,
    has_k_out,
    has_q_norm,
    has_k_norm,
    inverse_dim,
    eps,
    norm_offset,
    shift,
    num_slots,
    pool_half,
    pool_page,
    pool_token,
    pool_head,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    q_out_token,
    q_out_head,
    k_out_token,
    k_out_head,
    kind,
    pool_kind,
    weight_kind,
    interleaved,
    wide,
    single,
):
    """Normalise and rotate Q and K of a token, write K and V to its slot, Q to `q_out`, K to `k_out`; strides in bytes.

    A slot outside [0, num_slots) drops K and V, but not Q and `k_out`. A position outside of the table drops K and V, and Q and
    `k_out` become zeros. `single`: a lane has one unit at most. `inverse_dim`, `eps` and `norm_offset` are the bits of float32.
    `q_out` may be `q`, and `k_out` `k`.

    Item: a token; teams of ``2**team_shift`` lanes share its heads.
    """
    while np.int64(1) << team_shift > lanes:
        team_shift -= 1
    team, teams = np.int64(1) << team_shift, lanes >> team_shift
    group, t = lane >> team_shift, lane & (team - 1)
    token = np.int64(item)
    slot = slots[np.uint64(token)]
    position = np.int64(0)
    if rotary > 0:
        position = np.int64(positions[np.uint64(token)])
    rotary_units = (rotary + 15) >> 4
    units = rotary_units + ((dim - rotary + 15) >> 4)
    total = q_heads + 2 * heads
    runs = unit_runs(np.int64(t), rotary_units, rotary, dim, interleaved)
    head = np.int64(group)
    at = head_at(head, token, q_heads, heads, q_token, q_head, k_token, k_head, v_token, v_head)
    next_a, next_b = both_runs(q, k, v, head, at, q_heads, heads, runs, head < total and t < units, kind, wide)
    in_table = rotary == 0 or (position >= 0 and position < table_rows)
    to_slot = in_table and slot >= 0 and slot < num_slots
    slot_at = np.int64(0)
    if to_slot:
        slot_at = slot_offset(slot, shift, pool_page, pool_token)
    row_at = position * rotary * 4
    none = np.uint64(0)
    empty = (none, none, none, none)
    cosines = floats_of(empty, FLOAT32)
    sines = cosines
    first_cosines, first_sines = cosines, sines
    pairs = rotary >> 1
    if in_table and t < rotary_units:
        count = min(np.int64(8), pairs - 8 * t)
        first_cosines = floats_of(get_run(table, row_at, 8 * t, count, FLOAT32, wide), FLOAT32)
        first_sines = floats_of(get_run(table, row_at, pairs + 8 * t, count, FLOAT32, wide), FLOAT32)
    rounds = (units + team - 1) >> team_shift
    first = np.int64(0)
    while first < total:  # as often for every lane: teams add up their squares together
        head = first + group
        a, b = next_a, next_b
        here = at
        after = head + teams
        at = head_at(after, token, q_heads, heads, q_token, q_head, k_token, k_head, v_token, v_head)
        next_a, next_b = both_runs(q, k, v, after, at, q_heads, heads, runs, after < total and t < units, kind, wide)
        is_q, is_v = head < q_heads, head >= q_heads + heads
        kv_head = head - q_heads
        if is_v:
            kv_head -= heads
        has_norm = False
        inverse = np.float32(1.0)
        if weight_kind != NO_NORM:
            has_norm = not is_v and ((is_q and has_q_norm != 0) or (not is_q and has_k_norm != 0))
            sum_of_squares = team_sum(squares(floats_of(a, kind), floats_of(b, kind)), lane, lanes, team)
            if not single:
                zero = np.float32(0.0)
                tree = grow_tree(np.int64(0), sum_of_squares, (zero, zero, zero, zero, zero, zero))
                for turn in range(1, rounds):
                    c = t + (np.int64(turn) << team_shift)
                    there = unit_runs(c, rotary_units, rotary, dim, interleaved)
                    is_there = head < total and c < units
                    more_a, more_b = both_runs(q, k, v, head, here, q_heads, heads, there, is_there, kind, wide)
                    value = squares(floats_of(more_a, kind), floats_of(more_b, kind))
                    tree = grow_tree(np.int64(turn), team_sum(value, lane, lanes, team), tree)
                sum_of_squares = close_tree(rounds, tree)
            inverse = norm_factor(sum_of_squares, inverse_dim, eps)
        if head < total:
            c = np.int64(t)
            places = runs
            cosines, sines = first_cosines, first_sines
            while c < units:
                rotates = not is_v and c < rotary_units
                is_new = in_table and (rotates or has_norm)
                run_a, count_a, run_b, count_b = places
                if not in_table:
                    a, b = empty, empty
                x, y = floats_of(a, kind), floats_of(b, kind)
                if is_new:
                    if weight_kind != NO_NORM and has_norm:
                        weight = k_weight
                        if is_q:
                            weight = q_weight
                        offset = float_of(norm_offset)
                        w = floats_of(get_run(weight, 0, run_a, count_a, weight_kind, wide), weight_kind)
                        x = normalised(x, inverse, offset, w)
                        w = floats_of(get_run(weight, 0, run_b, count_b, weight_kind, wide), weight_kind)
                        y = normalised(y, inverse, offset, w)
                    if rotates:
                        x, y = rotated(x, y, cosines, sines, interleaved)
                if is_q or (has_k_out and not is_v):
                    made_a, made_b = stored(x, a, is_new, kind, kind, inverse), stored(y, b, is_new, kind, kind, inverse)
                    to, target = token * k_out_token + kv_head * k_out_head, k_out
                    if is_q:
                        to, target = token * q_out_token + head * q_out_head, q_out
                    put_run(target, to, run_a, count_a, made_a, kind, wide)
                    put_run(target, to, run_b, count_b, made_b, kind, wide)
                if not is_q and to_slot:
                    to = slot_at + kv_head * pool_head
                    factor = np.float32(1.0)
                    if is_v:
                        to += pool_half
                    if pool_kind == FLOAT8 and kind != FLOAT8:
                        factor = factors[np.uint64(head - q_heads)]
                    put_run(pool, to, run_a, count_a, stored(x, a, is_new, kind, pool_kind, factor), pool_kind, wide)
                    put_run(pool, to, run_b, count_b, stored(y, b, is_new, kind, pool_kind, factor), pool_kind, wide)
                if single:
                    break
                c += team
                if c < units:
                    places = unit_runs(c, rotary_units, rotary, dim, interleaved)
                    a, b = both_runs(q, k, v, head, here, q_heads, heads, places, True, kind, wide)
                    if in_table and c < rotary_units:
                        count = min(np.int64(8), pairs - 8 * c)
                        cosines = floats_of(get_run(table, row_at, 8 * c, count, FLOAT32, wide), FLOAT32)
                        sines = floats_of(get_run(table, row_at, pairs + 8 * c, count, FLOAT32, wide), FLOAT32)
        first += teams
