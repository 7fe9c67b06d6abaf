"""Replays of accepted tokens: `replay_mamba` and `replay_delta_net` run the recurrence again from the step's stashed inputs.

States are float32, float16 or bfloat16; arithmetic is float32, and a state is rounded to its own type behind every token, so
that a replay of several tokens is, bit by bit, as many replays of one.

Products go through their bits, so that no compiler fuses them with sums: all targets give the same states, bit by bit.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import BFLOAT16, FLOAT16, FLOAT32, bits_of, float_of, from_float32, to_float32
from numba_kv.kernels.jit import kernel, routine
from numba_kv.kernels.spec import array, scalar
from numba_kv.kernels.state_commit import PATH_AT, PATH_COUNT, PATH_SLOT

__all__ = ["replay_delta_net", "replay_mamba"]


@routine
def product(a, b):
    """Return the float32 product, rounded; a NaN is the quiet one."""
    bits = bits_of(a * b)
    if bits & 0x7FFFFFFF > 0x7F800000:
        bits = np.int64(0x7FC00000)
    return float_of(bits)


@routine
def rounded(value, kind):
    """Return a float32 as a state of `kind` keeps it."""
    return float_of(to_float32(from_float32(bits_of(value), kind), kind))


@routine
def after_token(value, kind, decay, drive, step, x):
    """Return a state's number after a token."""
    return rounded(product(value, decay) + product(product(drive, step), x), kind)


@routine
def replay_head(state, kind, at, stashes, places, paths, row, count, sizes, lane, lanes):
    """Replay some neighbouring rows of one head's state; `places` are where the row's first token lies in each stash.

    A lane has four numbers in work at once, so that their loads overlap; places beyond the last are the last one's, not stored.
    """
    da, u, b, dt = stashes
    da_at, u_at, b_at, dt_at = places
    heads, dim, groups, size, first, stop = sizes
    begin = at + first * size
    end = (stop - first) * size
    e0 = np.int64(lane)
    while e0 < end:
        e1, e2, e3 = min(e0 + lanes, end - 1), min(e0 + 2 * lanes, end - 1), min(e0 + 3 * lanes, end - 1)
        v0 = float_of(to_float32(state[np.uint64(begin + e0)], kind))
        v1 = float_of(to_float32(state[np.uint64(begin + e1)], kind))
        v2 = float_of(to_float32(state[np.uint64(begin + e2)], kind))
        v3 = float_of(to_float32(state[np.uint64(begin + e3)], kind))
        wide = np.uint32(size)
        d0, s0 = np.int64(np.uint32(e0) // wide), np.int64(np.uint32(e0) % wide)
        d1, s1 = np.int64(np.uint32(e1) // wide), np.int64(np.uint32(e1) % wide)
        d2, s2 = np.int64(np.uint32(e2) // wide), np.int64(np.uint32(e2) % wide)
        d3, s3 = np.int64(np.uint32(e3) // wide), np.int64(np.uint32(e3) % wide)
        for t in range(count):
            token = np.int64(paths[row, PATH_AT + t])
            decay = da[np.uint64(da_at + token * heads)]
            step = dt[np.uint64(dt_at + token * heads)]
            x_at = u_at + token * heads * dim + first
            drive_at = b_at + token * groups * size
            v0 = after_token(v0, kind, decay, b[np.uint64(drive_at + s0)], step, u[np.uint64(x_at + d0)])
            v1 = after_token(v1, kind, decay, b[np.uint64(drive_at + s1)], step, u[np.uint64(x_at + d1)])
            v2 = after_token(v2, kind, decay, b[np.uint64(drive_at + s2)], step, u[np.uint64(x_at + d2)])
            v3 = after_token(v3, kind, decay, b[np.uint64(drive_at + s3)], step, u[np.uint64(x_at + d3)])
        state[np.uint64(begin + e0)] = from_float32(bits_of(v0), kind)
        if e0 + lanes < end:
            state[np.uint64(begin + e1)] = from_float32(bits_of(v1), kind)
        if e0 + 2 * lanes < end:
            state[np.uint64(begin + e2)] = from_float32(bits_of(v2), kind)
        if e0 + 3 * lanes < end:
            state[np.uint64(begin + e3)] = from_float32(bits_of(v3), kind)
        e0 += 4 * lanes


@kernel(
    block_form=True,
    state16=array("uint16"),
    state32=array("uint32"),
    da=array("float32"),
    u=array("float32"),
    b=array("float32"),
    dt=array("float32"),
    paths=array("int32", 2),
    kind=scalar(),
    layers=scalar(),
    heads=scalar(),
    dim=scalar(),
    groups=scalar(),
    size=scalar(),
    parts=scalar(),
    part_rows=scalar(),
    tokens=scalar(),
    state_layer=scalar(),
    head_layer=scalar(),
    u_layer=scalar(),
    b_layer=scalar(),
)
def replay_mamba(
    item,
    lane,
    lanes,
    state16,
    state32,
    da,
    u,
    b,
    dt,
    paths,
    kind,
    layers,
    heads,
    dim,
    groups,
    size,
    parts,
    part_rows,
    tokens,
    state_layer,
    head_layer,
    u_layer,
    b_layer,
):
    """Replay accepted tokens of Mamba-2: ``state = round(state * dA + (B * dt) * x)`` for each, in the order of the path.

    Item: `part_rows` rows of a head's state, by row of the batch, layer and head; lanes share its elements.
    """
    plane = np.int64(item) // parts
    first = (np.int64(item) - plane * parts) * part_rows
    head_plane = plane // heads
    head = plane - head_plane * heads
    row = head_plane // layers
    layer = head_plane - row * layers
    slot = np.int64(paths[row, PATH_SLOT])
    count = np.int64(paths[row, PATH_COUNT])
    if slot < 0 or count == 0:
        return
    at = layer * state_layer + (slot * heads + head) * dim * size
    begin = row * tokens
    group = head // (heads // groups)
    places = (
        layer * head_layer + begin * heads + head,
        layer * u_layer + (begin * heads + head) * dim,
        layer * b_layer + (begin * groups + group) * size,
        layer * head_layer + begin * heads + head,
    )
    sizes = (heads, dim, groups, size, first, min(first + part_rows, dim))
    stashes = (da, u, b, dt)
    if kind == FLOAT32:
        replay_head(state32, FLOAT32, at, stashes, places, paths, row, count, sizes, lane, lanes)
    elif kind == FLOAT16:
        replay_head(state16, FLOAT16, at, stashes, places, paths, row, count, sizes, lane, lanes)
    else:
        replay_head(state16, BFLOAT16, at, stashes, places, paths, row, count, sizes, lane, lanes)


@routine
def written(value, kind, decay, key, write):
    """Return a number of a delta net's state after a token."""
    return rounded(product(decay, value) + product(key, write), kind)


@routine
def replay_columns(state, kind, at, keys, decays, gates, values, places, paths, row, count, sizes, lane, lanes):
    """Replay some neighbouring columns of one head's state, a lane a column.

    The update of a token and the product of the next one's key with what it leaves are one pass over the column, four numbers
    at once, so that their loads overlap.
    """
    v16, v32, v_kind = values
    k_at, head_at, v_at = places
    heads, key_heads, dim, size, first, stop = sizes
    whole = dim - dim % 4
    column = first + np.int64(lane)
    while column < stop:
        token = np.int64(paths[row, PATH_AT])
        decay = decays[np.uint64(head_at + token * heads)]
        k = k_at + token * key_heads * dim
        seen = np.float32(0.0)
        for i in range(dim):
            value = float_of(to_float32(state[np.uint64(at + i * size + column)], kind))
            seen += product(product(decay, value), keys[np.uint64(k + i)])
        for t in range(count):
            v_place = np.uint64(v_at + token * heads * size + column)
            if v_kind == FLOAT32:
                v = float_of(v32[v_place])
            else:
                v = float_of(to_float32(v16[v_place], v_kind))
            write = product(v - seen, gates[np.uint64(head_at + token * heads)])
            following, next_k = decay, k
            if t + 1 < count:
                token = np.int64(paths[row, PATH_AT + t + 1])
                following = decays[np.uint64(head_at + token * heads)]
                next_k = k_at + token * key_heads * dim
            seen = np.float32(0.0)
            i = np.int64(0)
            while i < whole:
                s0 = np.uint64(at + i * size + column)
                s1, s2, s3 = s0 + np.uint64(size), s0 + np.uint64(2 * size), s0 + np.uint64(3 * size)
                x0 = float_of(to_float32(state[s0], kind))
                x1 = float_of(to_float32(state[s1], kind))
                x2 = float_of(to_float32(state[s2], kind))
                x3 = float_of(to_float32(state[s3], kind))
                x0 = written(x0, kind, decay, keys[np.uint64(k + i)], write)
                x1 = written(x1, kind, decay, keys[np.uint64(k + i + 1)], write)
                x2 = written(x2, kind, decay, keys[np.uint64(k + i + 2)], write)
                x3 = written(x3, kind, decay, keys[np.uint64(k + i + 3)], write)
                state[s0] = from_float32(bits_of(x0), kind)
                state[s1] = from_float32(bits_of(x1), kind)
                state[s2] = from_float32(bits_of(x2), kind)
                state[s3] = from_float32(bits_of(x3), kind)
                seen += product(product(following, x0), keys[np.uint64(next_k + i)])
                seen += product(product(following, x1), keys[np.uint64(next_k + i + 1)])
                seen += product(product(following, x2), keys[np.uint64(next_k + i + 2)])
                seen += product(product(following, x3), keys[np.uint64(next_k + i + 3)])
                i += 4
            while i < dim:
                place = np.uint64(at + i * size + column)
                value = float_of(to_float32(state[place], kind))
                value = written(value, kind, decay, keys[np.uint64(k + i)], write)
                state[place] = from_float32(bits_of(value), kind)
                seen += product(product(following, value), keys[np.uint64(next_k + i)])
                i += 1
            decay, k = following, next_k
        column += lanes


@kernel(
    block_form=True,
    state16=array("uint16"),
    state32=array("uint32"),
    keys=array("float32"),
    decays=array("float32"),
    gates=array("float32"),
    values16=array("uint16"),
    values32=array("uint32"),
    paths=array("int32", 2),
    kind=scalar(),
    value_kind=scalar(),
    layers=scalar(),
    heads=scalar(),
    key_heads=scalar(),
    dim=scalar(),
    size=scalar(),
    parts=scalar(),
    part_columns=scalar(),
    tokens=scalar(),
    state_layer=scalar(),
    key_layer=scalar(),
    head_layer=scalar(),
    value_layer=scalar(),
)
def replay_delta_net(
    item,
    lane,
    lanes,
    state16,
    state32,
    keys,
    decays,
    gates,
    values16,
    values32,
    paths,
    kind,
    value_kind,
    layers,
    heads,
    key_heads,
    dim,
    size,
    parts,
    part_columns,
    tokens,
    state_layer,
    key_layer,
    head_layer,
    value_layer,
):
    """Replay accepted tokens of a gated delta net, in the order of the path.

    For each: ``S = g * S; s = S^T k; v' = (v - s) * beta; S = S + k (outer) v'``, where g is the decay itself. Columns of S are
    independent. Item: `part_columns` columns of a value head's state, by row of the batch, layer and head.
    """
    plane = np.int64(item) // parts
    first = (np.int64(item) - plane * parts) * part_columns
    head_plane = plane // heads
    head = plane - head_plane * heads
    row = head_plane // layers
    layer = head_plane - row * layers
    slot = np.int64(paths[row, PATH_SLOT])
    count = np.int64(paths[row, PATH_COUNT])
    if slot < 0 or count == 0:
        return
    at = layer * state_layer + (slot * heads + head) * dim * size
    begin = row * tokens
    key_head = head // (heads // key_heads)
    places = (
        layer * key_layer + (begin * key_heads + key_head) * dim,
        layer * head_layer + begin * heads + head,
        layer * value_layer + (begin * heads + head) * size,
    )
    values = (values16, values32, value_kind)
    sizes = (heads, key_heads, dim, size, first, min(first + part_columns, size))
    if kind == FLOAT32:
        replay_columns(state32, FLOAT32, at, keys, decays, gates, values, places, paths, row, count, sizes, lane, lanes)
    elif kind == FLOAT16:
        replay_columns(state16, FLOAT16, at, keys, decays, gates, values, places, paths, row, count, sizes, lane, lanes)
    else:
        replay_columns(state16, BFLOAT16, at, keys, decays, gates, values, places, paths, row, count, sizes, lane, lanes)
