"""Rotate Q and K of a step and write K and V into a layer's pool, in one pass over the data: `rotate_kv`.

The heads of a token are one list, ``Q | K | V``. A team of lanes has a head, and each of its lanes a unit of channels
(`head_units`), so that the cosines of a lane are the same for every head and are loaded once:

    item: a token        lane: t of team g        heads g, g + teams, ...        units t, t + team, ...

What is read of Q, K and V is asked for before the token's slot and position are known; stores have no branch. That is best
where much has to come from memory. Few tokens wait for one another's latencies instead: their teams have a head each, of
`parts` items a token, and Q, K and V go ways of their own, in which nothing is chosen, and which wait for the position first.

Strides, but that of a half, and slots are below 2**31, so that products are those of 32 bits.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import FLOAT8, FLOAT32, float_of
from numba_kv.kernels.head_units import (
    close_tree,
    get_run,
    grow_tree,
    norm_factor,
    normalised,
    put_run,
    rotated,
    squares,
    unit_runs,
)
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.lanes import team_sum
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import memory, scalar
from numba_kv.kernels.wide_rows import floats_of, product, raw_of, rescaled, results_of, slot_place

__all__ = ["NO_NORM", "rotate_kv"]

#: Kind of weights where nothing is normalised.
NO_NORM = -1


@routine
def both_runs(memory, at, runs, kind, wide):
    """Return the runs of a unit, raw."""
    first, count, second, rest = runs
    return get_run(memory, at, first, count, kind, wide, False), get_run(memory, at, second, rest, kind, wide, False)


@routine
def put_both(memory, at, runs, a, b, kind, wide, is_wanted):
    """Set the runs of a unit, if it is wanted."""
    first, count, second, rest = runs
    put_run(memory, at, first, count, a, kind, wide, is_wanted)
    put_run(memory, at, second, rest, b, kind, wide, is_wanted)


@routine
def rotary_unit(table, row_at, c, pairs, wide):
    """Return cosines and sines of a rotary unit, which tokens of other rows read again."""
    count = min(np.int64(8), pairs - 8 * c)
    cosines = floats_of(get_run(table, row_at, 8 * c, count, FLOAT32, wide, True), FLOAT32)
    return cosines, floats_of(get_run(table, row_at, pairs + 8 * c, count, FLOAT32, wide, True), FLOAT32)


@routine
def place_of(number, token, counts, given, strides):
    """Return of head `number` of the list: memory, where it begins there, whether it is of Q or V, and which of those it is."""
    q_heads, heads = counts
    q, memory, v = given
    (q_token, q_head), (token_stride, head_stride), (v_token, v_head) = strides
    head = np.uint32(number)
    is_q, is_v = head < np.uint32(q_heads), head >= np.uint32(q_heads + heads)
    own = head
    if is_q:
        memory, token_stride, head_stride = q, q_token, q_head
    else:
        own = np.uint32(head - np.uint32(q_heads))
    if is_v:
        own, memory, token_stride, head_stride = np.uint32(own - np.uint32(heads)), v, v_token, v_head
    return memory, product(token, token_stride) + product(own, head_stride), is_q, is_v, own


@routine
def inverse_norm(a, b, memory, at, lane, lanes, unit, channels, kind, interleaved, wide, single):
    """Return what the heads of a team are multiplied by, of the lane's first unit and those behind it."""
    t, team_shift, units, rotary_units, rotary, dim, inverse_dim, eps = channels
    team = np.int64(1) << team_shift
    value = squares(floats_of(a, kind), floats_of(b, kind))
    zero = np.float32(0.0)
    if t != unit:
        value = zero
    sum_of_squares = team_sum(value, lane, lanes, team)
    if not single:
        rounds = (units + team - 1) >> team_shift
        tree = grow_tree(np.int64(0), sum_of_squares, (zero, zero, zero, zero, zero, zero))
        for turn in range(1, rounds):
            c = t + (np.int64(turn) << team_shift)
            value = zero
            if c < units:
                there = unit_runs(c, rotary_units, rotary, dim, interleaved)
                more_a, more_b = both_runs(memory, at, there, kind, wide)
                value = squares(floats_of(more_a, kind), floats_of(more_b, kind))
            tree = grow_tree(np.int64(turn), team_sum(value, lane, lanes, team), tree)
        sum_of_squares = close_tree(rounds, tree)
    return norm_factor(sum_of_squares, inverse_dim, eps)


@routine
def put_unit(a, b, places, head, angles, norm, targets, offsets, kinds):
    """Normalise and rotate a unit and write it to where it goes."""
    is_q, is_v, own, is_there, in_table, to_slot, slot_at = head
    rotates, cosines, sines = angles
    has_norm, inverse, norm_offset, q_weight, weight = norm
    pool, q_out, k_out, factors = targets
    pool_half, pool_head, q_at, q_out_head, k_at, k_out_head, heads = offsets
    kind, pool_kind, weight_kind, interleaved, wide, has_k_out = kinds
    x, y = floats_of(a, kind), floats_of(b, kind)
    if rotates or has_norm:
        if weight_kind != NO_NORM and has_norm:
            if is_q:
                weight = q_weight
            w_a, w_b = both_runs(weight, np.int64(0), places, weight_kind, wide)
            offset = float_of(norm_offset)
            x = normalised(x, inverse, offset, floats_of(w_a, weight_kind))
            y = normalised(y, inverse, offset, floats_of(w_b, weight_kind))
        if rotates:
            x, y = rotated(x, y, cosines, sines, interleaved)
        a, b = results_of(x, kind), results_of(y, kind)
    target, to, is_wanted = pool, slot_at + product(own, pool_head), is_there and to_slot
    if is_v:
        to += pool_half
    if is_q:
        target, to, is_wanted = q_out, q_at + product(own, q_out_head), is_there and in_table
    if kind == pool_kind or is_q:
        put_both(target, to, places, a, b, kind, wide, is_wanted)
    else:
        if pool_kind == FLOAT8:
            factor_at = np.uint64(own)
            if is_v:
                factor_at += np.uint64(heads)
            factor = factors[factor_at]
            x, y = rescaled(x, factor), rescaled(y, factor)
        put_both(pool, to, places, raw_of(x, pool_kind), raw_of(y, pool_kind), pool_kind, wide, is_wanted)
    if has_k_out and not is_q and not is_v:
        put_both(k_out, k_at + product(own, k_out_head), places, a, b, kind, wide, is_there and in_table)
    if not in_table:  # rare, and out of the way of what is waited for
        none = np.uint64(0)
        empty = (none, none, none, none)
        if is_q:
            put_both(q_out, q_at + product(own, q_out_head), places, empty, empty, kind, wide, is_there)
        elif has_k_out and not is_v:
            put_both(k_out, k_at + product(own, k_out_head), places, empty, empty, kind, wide, is_there)


@routine
def token_place(token, slots, num_slots, pool_place):
    """Return whether a token has a slot, and where that begins in half 0."""
    slot = slots[np.uint64(token)]
    shift, pool_page, pool_token = pool_place
    return np.uint64(slot) < np.uint64(num_slots), slot_place(slot, shift, pool_page, pool_token)


@routine
def table_place(token, positions, table_rows, rotary):
    """Return whether a token has a row of the table, and where that begins; of a token that has none, where another does."""
    position, rows = np.uint32(positions[np.uint64(token)]), np.uint32(table_rows)
    return position < rows, product(min(position, np.uint32(rows - np.uint32(1))), 4 * rotary)


@routine
def lone_unit(memory, at, head, token, slots, num_slots, pool_place, rows, runs, norm, targets, offsets, kinds):
    """Rotate the only unit of a lane, of the head at byte `at`, and write it; whether that is of Q, K or V is a constant.

    What the token's place is read from is read here: in front of the branches it would be waited for before there is anything
    else to do.
    """
    is_q, is_v, own, is_there = head
    positions, table, table_rows, rotary, unit, rotary_units, has_table = rows
    kind, wide = kinds[0], kinds[4]
    a, b = both_runs(memory, at, runs, kind, wide)
    in_table, row_at = True, np.int64(0)
    if has_table:
        in_table, row_at = table_place(token, positions, table_rows, rotary)
    none = np.uint64(0)
    empty = (none, none, none, none)
    cosines = floats_of(empty, FLOAT32)
    sines = cosines
    rotates = has_table and not is_v and unit < rotary_units
    if rotates:
        cosines, sines = rotary_unit(table, row_at, unit, rotary >> 1, wide)
    to_slot, slot_at = False, np.int64(0)
    if not is_q:
        to_slot, slot_at = token_place(token, slots, num_slots, pool_place)
    place = (is_q, is_v, own, is_there, in_table, to_slot and in_table, slot_at)
    put_unit(a, b, runs, place, (rotates, cosines, sines), norm, targets, offsets, kinds)


@kernel(
    block_form=True,
    followed="late",  # beside its own blocks, which nearly fill a GPU, those of the next would lie unevenly
    open_scalars=("kind", "pool_kind", "weight_kind", "interleaved", "wide", "single", "parts"),
    q=memory("uint8"),
    k=memory("uint8"),
    v=memory("uint8"),
    pool=memory("uint8"),
    q_out=memory("uint8"),
    k_out=memory("uint8"),
    q_weight=memory("uint8"),
    k_weight=memory("uint8"),
    table=memory("uint8"),
    positions=memory("int32"),
    slots=memory("int64"),
    factors=memory("float32"),
    q_heads=scalar(),
    heads=scalar(),
    dim=scalar(),
    rotary=scalar(),
    table_rows=scalar(),
    team_shift=scalar(),
    has_table=scalar(),
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
    exact=scalar(),
    parts=scalar(),
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
    has_table,
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
    exact,
    parts,
):
    """Normalise and rotate Q and K of a token, write K and V to its slot, Q to `q_out`, K to `k_out`; strides in bytes.

    A slot outside [0, num_slots) drops K and V, but not Q and `k_out`. A position outside of the table drops K and V, and Q and
    `k_out` become zeros; a table has a row at least, and 2**31 at most. `single`: a lane has one unit at most; `exact`: there
    are as many teams as heads. `inverse_dim`, `eps` and `norm_offset` are the bits of float32. `q_out` may be `q`, and `k_out`
    `k`.

    Item: a token; teams of ``2**team_shift`` lanes, at most all of them, share its heads. With `parts`, for few tokens: so many
    items are a token, whose teams are as many as its heads; lanes have one unit, and nothing is normalised.
    """
    team, teams = np.int64(1) << team_shift, np.int64(lanes) >> team_shift
    group, t = np.int64(lane) >> team_shift, np.int64(lane) & (team - 1)
    token, first = np.int64(item), np.int64(0)
    total = q_heads + 2 * heads
    if parts > 1:
        token = np.int64(np.uint32(item) // np.uint32(parts))
        first = product(np.uint32(item) - np.uint32(token) * np.uint32(parts), total // parts)
    pairs = rotary >> 1
    rotary_units = (rotary + 15) >> 4
    units = rotary_units + ((dim - rotary + 15) >> 4)
    unit, last = min(t, units - 1), rotary_units - 1
    runs = unit_runs(unit, rotary_units, rotary, dim, interleaved)
    counts, given = (q_heads, heads), (q, k, v)
    strides = ((q_token, q_head), (k_token, k_head), (v_token, v_head))
    targets = (pool, q_out, k_out, factors)
    q_at, k_at = product(token, q_out_token), product(token, k_out_token)
    offsets = (pool_half, pool_head, q_at, q_out_head, k_at, k_out_head, heads)
    channels = (t, team_shift, units, rotary_units, rotary, dim, inverse_dim, eps)
    kinds = (kind, pool_kind, weight_kind, interleaved, wide, has_k_out)
    pool_place = (shift, pool_page, pool_token)
    if parts:
        no_norm, is_there = (False, np.float32(1.0), norm_offset, q_weight, k_weight), t < units
        rows = (positions, table, table_rows, rotary, unit, rotary_units, has_table)
        own = np.uint32(first + group)
        if own < np.uint32(q_heads):
            at, lone = product(token, q_token) + product(own, q_head), (True, False, own, is_there)
            lone_unit(q, at, lone, token, slots, num_slots, pool_place, rows, runs, no_norm, targets, offsets, kinds)
            return
        own = np.uint32(own - np.uint32(q_heads))
        if own < np.uint32(heads):
            at, lone = product(token, k_token) + product(own, k_head), (False, False, own, is_there)
            lone_unit(k, at, lone, token, slots, num_slots, pool_place, rows, runs, no_norm, targets, offsets, kinds)
            return
        own = np.uint32(own - np.uint32(heads))
        at, lone = product(token, v_token) + product(own, v_head), (False, True, own, is_there)
        lone_unit(v, at, lone, token, slots, num_slots, pool_place, rows, runs, no_norm, targets, offsets, kinds)
        return
    to_slot, slot_at = token_place(token, slots, num_slots, pool_place)
    in_table, row_at = True, np.int64(0)
    if has_table:
        in_table, row_at = table_place(token, positions, table_rows, rotary)
        to_slot = to_slot and in_table
    none = np.uint64(0)
    empty = (none, none, none, none)
    cosines = floats_of(empty, FLOAT32)
    sines = cosines
    while True:  # as often for every lane: teams add up their squares together
        number, is_there = first + group, t < units
        if not exact:
            number, is_there = min(number, total - 1), is_there and number < total
        memory, at, is_q, is_v, own = place_of(number, token, counts, given, strides)
        a, b = both_runs(memory, at, runs, kind, wide)
        if has_table and (exact or not single or first == 0):
            cosines, sines = rotary_unit(table, row_at, min(unit, last), pairs, wide)
        has_norm, inverse = False, np.float32(1.0)
        if weight_kind != NO_NORM:
            has_norm = not is_v and ((is_q and has_q_norm != 0) or (not is_q and has_k_norm != 0))
            inverse = inverse_norm(a, b, memory, at, lane, lanes, unit, channels, kind, interleaved, wide, single)
        head = (is_q, is_v, own, is_there, in_table, to_slot, slot_at)
        norm = (has_norm, inverse, norm_offset, q_weight, k_weight)
        angles = (has_table and not is_v and unit < rotary_units, cosines, sines)
        put_unit(a, b, runs, head, angles, norm, targets, offsets, kinds)
        c = t + team
        while not single and c < units:
            places = unit_runs(c, rotary_units, rotary, dim, interleaved)
            a, b = both_runs(memory, at, places, kind, wide)
            if has_table:
                cosines, sines = rotary_unit(table, row_at, min(c, last), pairs, wide)
            angles = (has_table and not is_v and c < rotary_units, cosines, sines)
            put_unit(a, b, places, head, angles, norm, targets, offsets, kinds)
            c += team
        first += teams
        if exact or first >= total:
            break
