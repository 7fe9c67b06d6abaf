"""Rotate Q and K of a step and write K and V into a layer's pool, with one unit of a head for a lane: `rotate_rows`.

The work of `rotate_kv`, and its bits, for heads whose runs of eight channels lie on boundaries of their own. A team of lanes
has a head, and each of its lanes a unit of channels (`head_units`) of it, token after token, so that what does not depend on
the token is found once:

    item: `span` tokens      lane: t of team g      heads of the list ``Q | K | V``: g, g + teams, ...      unit t

Places, slots, positions and elements of a token are loaded while the token before it is worked on.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import FLOAT8, FLOAT32, float_of
from numba_kv.kernels.head_units import norm_factor, normalised, rotated, squares, unit_runs
from numba_kv.kernels.jit import kernel, routine
from numba_kv.kernels.kv_rotate import NO_NORM, stored
from numba_kv.kernels.kv_write import slot_offset
from numba_kv.kernels.lanes import team_sum
from numba_kv.kernels.spec import array, scalar
from numba_kv.kernels.wide_rows import element_nbytes, floats_of, load_raw, store_raw

__all__ = ["rotate_rows"]


@routine
def token_numbers(token, slots, positions, rotary):
    """Return a token's slot and position; 0 for the position if nothing is rotated."""
    position = np.int64(0)
    if rotary > 0:
        position = np.int64(positions[np.uint64(token)])
    return slots[np.uint64(token)], position


@kernel(
    block_form=True,
    open_scalars=("kind", "pool_kind", "weight_kind", "interleaved"),
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
    tokens=scalar(),
    span=scalar(),
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
)
def rotate_rows(
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
    tokens,
    span,
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
):
    """Normalise and rotate Q and K of tokens, write K and V to their slots, Q to `q_out`, K to `k_out`; strides in bytes.

    A slot outside [0, num_slots) drops K and V, but not Q and `k_out`. A position outside of the table drops K and V, and Q and
    `k_out` become zeros. `inverse_dim`, `eps` and `norm_offset` are the bits of float32. `q_out` may be `q`, and `k_out` `k`.

    Item: `span` of `tokens` tokens; teams of ``2**team_shift`` lanes, as many as a head has units or more, share their heads.
    """
    team, teams = np.int64(1) << team_shift, lanes >> team_shift
    group, t = np.int64(lane) >> team_shift, np.int64(lane) & (team - 1)
    first = np.int64(item) * span
    stop = min(first + span, tokens)
    rotary_units = (rotary + 15) >> 4
    is_unit = t < rotary_units + ((dim - rotary + 15) >> 4)
    run_a, _, run_b, _ = unit_runs(t, rotary_units, rotary, dim, interleaved)
    size, pool_size = element_nbytes(kind), element_nbytes(pool_kind)
    run_a_at, between, pool_between = run_a * size, (run_b - run_a) * size, (run_b - run_a) * pool_size
    row_nbytes, sines_at = rotary * 4, rotary * 2
    none = np.uint64(0)
    empty = (none, none, none, none)
    total, turn = q_heads + 2 * heads, np.int64(0)
    while turn < total:  # as often for every lane: teams add up their squares together
        head = turn + group
        turn += teams
        is_there = is_unit and head < total
        is_q, is_v = head < q_heads, head >= q_heads + heads
        kv_head = head - q_heads
        memory, at, step = k, first * k_token + kv_head * k_head, k_token
        out, out_at, out_step = k_out, first * k_out_token + kv_head * k_out_head, k_out_token
        pool_at = kv_head * pool_head
        if is_q:
            memory, at, step = q, first * q_token + head * q_head, q_token
            out, out_at, out_step = q_out, first * q_out_token + head * q_out_head, q_out_token
        if is_v:
            kv_head -= heads
            memory, at, step = v, first * v_token + kv_head * v_head, v_token
            pool_at = kv_head * pool_head + pool_half
        at += run_a_at
        out_at += run_a_at
        pool_at += run_a * pool_size
        has_out = is_q or (has_k_out != 0 and not is_v)
        rotates = t < rotary_units and not is_v
        factor, offset = np.float32(1.0), np.float32(0.0)
        if pool_kind == FLOAT8 and kind != FLOAT8 and is_there and not is_q:
            factor = factors[np.uint64(head - q_heads)]
        has_norm, weight, weight_at, weight_between = False, k_weight, np.int64(0), np.int64(0)
        if weight_kind != NO_NORM:
            has_norm = is_there and not is_v and ((is_q and has_q_norm != 0) or (not is_q and has_k_norm != 0))
            weight_at = run_a * element_nbytes(weight_kind)
            weight_between = (run_b - run_a) * element_nbytes(weight_kind)
            offset = float_of(norm_offset)
            if is_q:
                weight = q_weight
        token = first
        next_slot, next_position = token_numbers(token, slots, positions, rotary)
        next_a, next_b = empty, empty
        if is_there:
            next_a, next_b = load_raw(memory, at, kind), load_raw(memory, at + between, kind)
        while token < stop:
            slot, position, a, b = next_slot, next_position, next_a, next_b
            token += 1
            at += step
            if token < stop:
                next_slot, next_position = token_numbers(token, slots, positions, rotary)
                if is_there:
                    next_a, next_b = load_raw(memory, at, kind), load_raw(memory, at + between, kind)
            in_table = rotary == 0 or (position >= 0 and position < table_rows)
            if not in_table:
                a, b = empty, empty
            x, y = floats_of(a, kind), floats_of(b, kind)
            if weight_kind != NO_NORM:
                inverse = norm_factor(team_sum(squares(x, y), lane, lanes, team), inverse_dim, eps)
                if has_norm:  # the weights stay in the nearest cache, and would take sixteen registers
                    x = normalised(x, inverse, offset, floats_of(load_raw(weight, weight_at, weight_kind), weight_kind))
                    weights = floats_of(load_raw(weight, weight_at + weight_between, weight_kind), weight_kind)
                    y = normalised(y, inverse, offset, weights)
            if rotates and in_table:
                row_at = position * row_nbytes + 32 * t
                cosines = floats_of(load_raw(table, row_at, FLOAT32), FLOAT32)
                sines = floats_of(load_raw(table, row_at + sines_at, FLOAT32), FLOAT32)
                x, y = rotated(x, y, cosines, sines, interleaved)
            is_new = in_table and (rotates or has_norm)
            if is_there and has_out:
                store_raw(out, out_at, stored(x, a, is_new, kind, kind, factor), kind)
                store_raw(out, out_at + between, stored(y, b, is_new, kind, kind, factor), kind)
            if is_there and not is_q and in_table and slot >= 0 and slot < num_slots:
                to = pool_at + slot_offset(slot, shift, pool_page, pool_token)
                store_raw(pool, to, stored(x, a, is_new, kind, pool_kind, factor), pool_kind)
                store_raw(pool, to + pool_between, stored(y, b, is_new, kind, pool_kind, factor), pool_kind)
            out_at += out_step
