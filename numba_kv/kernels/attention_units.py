"""Products of queries with K, and of weights with V, over *units* of four neighbouring channels.

Memory is given as bytes. A unit is loaded at once where the host found that every unit is aligned to its size (`wide`), and
byte by byte elsewhere. `kind` and `wide` are constants of the compiled kernel.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import BFLOAT16, FLOAT8, FLOAT32, float_of, from_float32, to_float32
from numba_kv.kernels.lanes import team_sum
from numba_kv.kernels.routines import routine
from numba_kv.kernels.wide_access import load_4, load_8, load_16
from numba_kv.kernels.wide_values import from_bfloat16, from_float8, from_float16, from_float32_word

__all__ = ["UNIT", "element", "score_tile", "store", "weigh_tile"]

#: Channels of a unit.
UNIT = 4


@routine
def size_of(kind):
    """Return the bytes of an element."""
    if kind == FLOAT32:
        return np.int64(4)
    if kind == FLOAT8:
        return np.int64(1)
    return np.int64(2)


@routine
def element(memory, at, kind):
    """Return element `at` of a memory that is given as bytes, as float32."""
    size = size_of(kind)
    bits = np.int64(0)
    for i in range(size):
        bits |= np.int64(memory[np.uint64(at * size + i)]) << (8 * i)
    return float_of(to_float32(bits, kind))


@routine
def store(memory, at, kind, value):
    """Set element `at` of a memory that is given as bytes; rounded to nearest even."""
    size = size_of(kind)
    bits = from_float32(np.int64(np.float32(value).view(np.uint32)), kind)
    for i in range(size):
        memory[np.uint64(at * size + i)] = np.uint8((bits >> (8 * i)) & 0xFF)


@routine
def wide_unit(memory, at, kind):
    """Return the four elements from `at` on, which lie together in a word, or two words of float32."""
    if kind == FLOAT32:
        low, high = load_16(memory, at * 4)
        a, b = from_float32_word(low)
        c, d = from_float32_word(high)
        return a, b, c, d
    if kind == FLOAT8:
        found = from_float8(load_4(memory, at))
        return found[0], found[1], found[2], found[3]
    if kind == BFLOAT16:
        return from_bfloat16(load_8(memory, at * 2))
    return from_float16(load_8(memory, at * 2))


@routine
def unit(memory, at, left, kind, wide):
    """Return four elements from `at` on; those from `left` on are zeros and are not read."""
    if wide:
        return wide_unit(memory, at, kind)
    zero = np.float32(0.0)
    a = element(memory, at, kind)
    b = element(memory, at + 1, kind) if left > 1 else zero
    c = element(memory, at + 2, kind) if left > 2 else zero
    d = element(memory, at + 3, kind) if left > 3 else zero
    return a, b, c, d


@routine
def key_units(memory, at, stride, kind):
    """Return four units of a key."""
    return (
        wide_unit(memory, at, kind),
        wide_unit(memory, at + stride, kind),
        wide_unit(memory, at + 2 * stride, kind),
        wide_unit(memory, at + 3 * stride, kind),
    )


@routine
def value_unit(memory, offsets, key, channel, kind):
    """Return a unit of a key's V. Of one that is not there any that is: its weight is zero, and no branch holds loads up."""
    return wide_unit(memory, max(np.int64(0), np.int64(offsets[np.uint64(key)])) + channel, kind)


@routine
def value_units(memory, offsets, key, parts, channel, kind):
    """Return a unit of the V of four keys, every `parts`-th."""
    return (
        value_unit(memory, offsets, key, channel, kind),
        value_unit(memory, offsets, key + parts, channel, kind),
        value_unit(memory, offsets, key + 2 * parts, channel, kind),
        value_unit(memory, offsets, key + 3 * parts, channel, kind),
    )


@routine
def dot(total, floats, at, x):
    """Return `total` and the product of a unit with four neighbours of `floats`."""
    place = np.uint64(at)
    total += floats[place] * x[0]
    total += floats[place + np.uint64(1)] * x[1]
    total += floats[place + np.uint64(2)] * x[2]
    total += floats[place + np.uint64(3)] * x[3]
    return total


@routine
def score_tile(floats, offsets, memory, keys, lines, sharing, lane, lanes, kind, wide):
    """Write the products of all queries with a tile's keys. Every lane of the block comes here.

    `keys` is (place in `offsets`, count), `lines` (place of the queries, their pitch, place of the products, theirs, queries,
    channels), `sharing` (team, teams, member, members): a team works on a key, each member on every `members`-th unit. Keys
    with an offset of -1 have products of 0. Four queries are taken at once: a unit is loaded once for them.
    """
    key_at, count = keys
    q_at, pitch, s_at, tile, queries, dim = lines
    team, teams, member, members = sharing
    stride = members * UNIT
    done = np.int64(0)
    while done < count:
        j = done + team
        at = np.int64(-1)
        if j < count:
            at = np.int64(offsets[np.uint64(key_at + j)])
        begin = dim  # nothing to do
        if at >= 0:
            begin = np.int64(member * UNIT)
        i = np.int64(0)
        while wide and i + 4 <= queries:
            q0 = q_at + i * pitch
            q1, q2, q3 = q0 + pitch, q0 + 2 * pitch, q0 + 3 * pitch
            a = np.float32(0.0)
            b = np.float32(0.0)
            c = np.float32(0.0)
            d = np.float32(0.0)
            channel = begin
            while channel + 3 * stride < dim:  # four loads are under way before the first is used
                xs = key_units(memory, at + channel, stride, kind)
                for x in xs:
                    a = dot(a, floats, q0 + channel, x)
                    b = dot(b, floats, q1 + channel, x)
                    c = dot(c, floats, q2 + channel, x)
                    d = dot(d, floats, q3 + channel, x)
                    channel += stride
            while channel < dim:
                x = wide_unit(memory, at + channel, kind)
                a = dot(a, floats, q0 + channel, x)
                b = dot(b, floats, q1 + channel, x)
                c = dot(c, floats, q2 + channel, x)
                d = dot(d, floats, q3 + channel, x)
                channel += stride
            if members > 1:
                a = team_sum(a, lane, lanes, members)
                b = team_sum(b, lane, lanes, members)
                c = team_sum(c, lane, lanes, members)
                d = team_sum(d, lane, lanes, members)
            if member == 0 and j < count:
                to = s_at + i * tile + j
                floats[np.uint64(to)] = a
                floats[np.uint64(to + tile)] = b
                floats[np.uint64(to + 2 * tile)] = c
                floats[np.uint64(to + 3 * tile)] = d
            i += 4
        while i < queries:
            q0 = q_at + i * pitch
            a = np.float32(0.0)
            channel = begin
            while channel < dim:
                a = dot(a, floats, q0 + channel, unit(memory, at + channel, dim - channel, kind, wide))
                channel += stride
            if members > 1:
                a = team_sum(a, lane, lanes, members)
            if member == 0 and j < count:
                floats[np.uint64(s_at + i * tile + j)] = a
            i += 1
        done += teams


@routine
def weighted(sums, weight, x):
    """Return four sums plus a weight times a unit. A weight of zero takes nothing, whatever the unit holds."""
    a, b, c, d = sums
    if weight != np.float32(0.0):
        a += weight * x[0]
        b += weight * x[1]
        c += weight * x[2]
        d += weight * x[3]
    return a, b, c, d


@routine
def add_scaled(floats, at, factor, sums):
    """Multiply four neighbours of `floats` by `factor` and add four sums to them."""
    place = np.uint64(at)
    a, b, c, d = sums
    floats[place] = floats[place] * factor + a
    floats[place + np.uint64(1)] = floats[place + np.uint64(1)] * factor + b
    floats[place + np.uint64(2)] = floats[place + np.uint64(2)] * factor + c
    floats[place + np.uint64(3)] = floats[place + np.uint64(3)] * factor + d


@routine
def weigh_tile(floats, offsets, memory, keys, lines, sharing, kind, wide):
    """Add the keys' V, each times its weight, to the sums of all queries, which are multiplied by their rescale first.

    `keys` is (place in `offsets`, count), `lines` (place of the sums, their pitch, place of the weights, theirs, queries,
    channels, place of the rescales), `sharing` (part, parts, place, span): lane `place` of `span` takes every `span`-th unit,
    for every `parts`-th key from `part` on; each part has sums of its own.
    """
    value_at, count = keys
    acc_at, pitch, s_at, tile, queries, dim, rescale_at = lines
    part, parts, place, span = sharing
    zero = np.float32(0.0)
    channel = np.int64(place * UNIT)
    if part >= parts:  # lanes that are left over
        channel = dim
    while channel < dim:
        i = np.int64(0)
        while wide and i + 4 <= queries:
            row = s_at + i * tile
            a = (zero, zero, zero, zero)
            b, c, d = a, a, a
            j = np.int64(part)
            while kind != FLOAT8 and j + 7 * parts < count:  # eight loads are under way before the first is used
                xs = value_units(memory, offsets, value_at + j, parts, channel, kind)
                for x in xs + value_units(memory, offsets, value_at + j + 4 * parts, parts, channel, kind):
                    a = weighted(a, floats[np.uint64(row + j)], x)
                    b = weighted(b, floats[np.uint64(row + tile + j)], x)
                    c = weighted(c, floats[np.uint64(row + 2 * tile + j)], x)
                    d = weighted(d, floats[np.uint64(row + 3 * tile + j)], x)
                    j += parts
            while kind == FLOAT8 and j + 3 * parts < count:  # four: they become as many floats at once
                xs = value_units(memory, offsets, value_at + j, parts, channel, kind)
                for x in xs:
                    a = weighted(a, floats[np.uint64(row + j)], x)
                    b = weighted(b, floats[np.uint64(row + tile + j)], x)
                    c = weighted(c, floats[np.uint64(row + 2 * tile + j)], x)
                    d = weighted(d, floats[np.uint64(row + 3 * tile + j)], x)
                    j += parts
            while j < count:
                x = value_unit(memory, offsets, value_at + j, channel, kind)
                a = weighted(a, floats[np.uint64(row + j)], x)
                b = weighted(b, floats[np.uint64(row + tile + j)], x)
                c = weighted(c, floats[np.uint64(row + 2 * tile + j)], x)
                d = weighted(d, floats[np.uint64(row + 3 * tile + j)], x)
                j += parts
            to = acc_at + i * pitch + channel
            add_scaled(floats, to, floats[np.uint64(rescale_at + i)], a)
            add_scaled(floats, to + pitch, floats[np.uint64(rescale_at + i + 1)], b)
            add_scaled(floats, to + 2 * pitch, floats[np.uint64(rescale_at + i + 2)], c)
            add_scaled(floats, to + 3 * pitch, floats[np.uint64(rescale_at + i + 3)], d)
            i += 4
        while i < queries:
            row = s_at + i * tile
            a = (zero, zero, zero, zero)
            j = np.int64(part)
            while j < count:
                at = np.int64(offsets[np.uint64(value_at + j)])
                if at >= 0:
                    x = unit(memory, at + channel, dim - channel, kind, wide)
                    a = weighted(a, floats[np.uint64(row + j)], x)
                j += parts
            add_scaled(floats, acc_at + i * pitch + channel, floats[np.uint64(rescale_at + i)], a)
            i += 1
        channel += span * UNIT
