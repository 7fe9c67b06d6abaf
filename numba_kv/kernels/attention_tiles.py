"""Where the keys of a tile lie, and what becomes of their products: weights that are comparable over all tiles."""

from __future__ import annotations

import math

import numpy as np

from numba_kv.kernels.block_memory import lanes_wait
from numba_kv.kernels.layout import CHUNKED, SLIDING
from numba_kv.kernels.routines import routine

__all__ = [
    "MAX_TEAM",
    "MINUS_INFINITY",
    "clear",
    "divide",
    "exp_of",
    "find_dense",
    "find_paged",
    "lowest_key",
    "row_of",
    "weigh_keys",
]

#: Most lanes that work on one query's weights.
MAX_TEAM = 32
MINUS_INFINITY = np.float32(-np.inf)
_NO_KEY = -1


@routine
def row_of(cu_seqlens, token):
    """Return the last row that starts at or before `token`."""
    row = np.int64(0)
    beyond = np.int64(cu_seqlens.shape[0] - 1)
    while beyond - row > 1:
        middle = (row + beyond) >> 1
        if np.int64(cu_seqlens[middle]) <= token:
            row = middle
        else:
            beyond = middle
    return row


@routine
def divide(a, b):
    """Return a / b rounded down, for numbers from 0 to 2**32 - 1: a GPU is slow at dividing longer ones."""
    return np.int64(np.uint32(a) // np.uint32(b))


@routine
def lowest_key(position, window_kind, window):
    """Return the lowest position that the query at `position` sees."""
    if window_kind == SLIDING:
        return max(np.int64(0), position - window + 1)
    if window_kind == CHUNKED:
        return divide(position, window) * window
    return np.int64(0)


@routine
def exp_of(value):
    """Return e to the power of a float32."""
    return np.float32(math.exp(value))


@routine
def capped(score, soft_cap):
    """Return a score, bent so that it stays below `soft_cap` if that is not 0."""
    if soft_cap > np.float32(0.0):
        return soft_cap * np.float32(math.tanh(score / soft_cap))
    return score


@routine
def clear(floats, at, count, value, lane, lanes):
    """Set `count` floats; lanes share them."""
    i = lane
    while i < count:
        floats[np.uint64(at + i)] = value
        i += lanes


@routine
def find_paged(offsets, places, page_table, row, base, count, pool, lane, lanes):
    """Write where K and V of positions from `base` on lie in the pool; -1 where no page is mapped.

    `places` are those of K's and V's offsets, `pool` is (head's start, half, page stride, token stride, shift, usable pages).
    """
    key_at, value_at = places
    start, half, page_stride, token_stride, shift, num_pages = pool
    j = lane
    while j < count:
        page = (base + j) >> shift
        at, value = np.int64(_NO_KEY), np.int64(_NO_KEY)
        if page < page_table.shape[2]:
            found = np.int64(page_table[row, 0, page])
            if found >= 0 and found < num_pages:
                at = start + found * page_stride + (base + j - (page << shift)) * token_stride
                value = at + half
        offsets[np.uint64(key_at + j)] = at
        offsets[np.uint64(value_at + j)] = value
        j += lanes


@routine
def find_dense(offsets, places, count, k_at, k_stride, v_at, v_stride, lane, lanes):
    """Write where K and V of neighbouring tokens lie in dense arrays."""
    key_at, value_at = places
    j = lane
    while j < count:
        offsets[np.uint64(key_at + j)] = k_at + j * k_stride
        offsets[np.uint64(value_at + j)] = v_at + j * v_stride
        j += lanes


@routine
def weigh_keys(floats, offsets, keys, places, seen, rule, sharing):
    """Turn a tile's products into weights, and move each query's maximum and sum on. Passes two barriers.

    A team of lanes works on a query: each leaves a maximum, and behind a barrier all know the tile's; so with the sum.

    `places` is (scores, tile, team maxima, team sums, state, state's width, queries); the state is maximum, sum, rescale and
    next maximum of each query. `seen` is (first key's position, first query's position, queries of a token, row's length),
    `rule` (window kind, window, scale, soft cap), `sharing` (team, teams, member, members).
    """
    key_at, count = keys
    s_at, tile, max_at, sum_at, state_at, width, queries = places
    base, position, heads, length = seen
    window_kind, window, scale, soft_cap = rule
    sum_state, rescale_at, next_at = state_at + width, state_at + 2 * width, state_at + 3 * width
    team, teams, member, members = sharing
    i = np.int64(team)
    while i < queries:
        high = position + divide(i, heads)
        low = lowest_key(high, window_kind, window)
        if high >= length:
            high = np.int64(-1)
        top = MINUS_INFINITY
        j = np.int64(member)
        while j < count:
            where = s_at + i * tile + j
            score = MINUS_INFINITY
            if base + j >= low and base + j <= high and offsets[np.uint64(key_at + j)] != _NO_KEY:
                score = capped(floats[np.uint64(where)] * scale, soft_cap)
                if score > top:
                    top = score
            floats[np.uint64(where)] = score
            j += members
        floats[np.uint64(max_at + i * MAX_TEAM + member)] = top
        i += teams
    lanes_wait()
    i = np.int64(team)
    while i < queries:
        before = floats[np.uint64(state_at + i)]
        top = before
        for other in range(members):
            found = floats[np.uint64(max_at + i * MAX_TEAM + other)]
            if found > top:
                top = found
        reference = top if top > MINUS_INFINITY else np.float32(0.0)
        total = np.float32(0.0)
        j = np.int64(member)
        while j < count:
            where = np.uint64(s_at + i * tile + j)
            weight = exp_of(floats[where] - reference)
            floats[where] = weight
            total += weight
            j += members
        floats[np.uint64(sum_at + i * MAX_TEAM + member)] = total
        if member == 0:  # the maximum itself is replaced behind the barrier: the others still read it
            floats[np.uint64(rescale_at + i)] = exp_of(before - reference)
            floats[np.uint64(next_at + i)] = top
        i += teams
    lanes_wait()
    i = np.int64(team)
    while i < queries:
        if member == 0:
            total = floats[np.uint64(sum_state + i)] * floats[np.uint64(rescale_at + i)]
            for other in range(members):
                total += floats[np.uint64(sum_at + i * MAX_TEAM + other)]
            floats[np.uint64(state_at + i)] = floats[np.uint64(next_at + i)]
            floats[np.uint64(sum_state + i)] = total
        i += teams
