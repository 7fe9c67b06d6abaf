"""`replay_delta_net`: accepted tokens of a gated delta net again, from the step's stashed inputs.

For each token, with g the decay itself: ``S = g * S; s = S^T k; v' = (v - s) * beta; S = S + k (outer) v'``. Columns of S are
independent: a lane has one, and the block keeps its lanes' columns near itself from the first token to the last. A sum over a
column is taken in the order of its rows, and a state is rounded to its own type behind every token: a replay of several tokens
is, bit by bit, as many replays of one.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import FLOAT32
from numba_kv.kernels.block_memory import near_tile
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.replay_values import load_four, load_one, rounded_four, rounded_one, store_one
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar
from numba_kv.kernels.state_commit import PATH_AT, PATH_COUNT, PATH_SLOT
from numba_kv.kernels.wide_values import minus, plus, times

__all__ = ["replay_delta_net"]


@routine
def written_four(values, kind, decay, keys, write):
    """Return four numbers of a column after a token."""
    a, b, c, d = values
    p, q, r, s = keys
    return rounded_four(
        plus(times(decay, a), times(p, write)),
        plus(times(decay, b), times(q, write)),
        plus(times(decay, c), times(r, write)),
        plus(times(decay, d), times(s, write)),
        kind,
    )


@routine
def with_four(seen, values, decay, keys):
    """Return the sum of a column with four more of its numbers, decayed, times those of a key."""
    a, b, c, d = values
    p, q, r, s = keys
    seen = plus(seen, times(times(decay, a), p))
    seen = plus(seen, times(times(decay, b), q))
    seen = plus(seen, times(times(decay, c), r))
    return plus(seen, times(times(decay, d), s))


@routine
def written_one(value, kind, decay, key, write):
    """Return a number of a column after a token."""
    return rounded_one(plus(times(decay, value), times(key, write)), kind)


@routine
def begin_column(state, kind, at, size, dim, whole, decay, keys, k, tile, near, width):
    """Copy a column into the tile; return the first token's key times it."""
    seen = np.float32(0.0)
    i = np.int64(0)
    while i < whole:
        from_row = at + i * size
        four = (
            load_one(state, from_row, kind),
            load_one(state, from_row + size, kind),
            load_one(state, from_row + 2 * size, kind),
            load_one(state, from_row + 3 * size, kind),
        )
        seen = with_four(seen, four, decay, load_four(keys, k + i, FLOAT32))
        n0 = np.uint64(near + i * width)
        n1, n2, n3 = n0 + np.uint64(width), n0 + np.uint64(2 * width), n0 + np.uint64(3 * width)
        tile[n0], tile[n1], tile[n2], tile[n3] = four
        i += 4
    while i < dim:
        value = load_one(state, at + i * size, kind)
        seen = plus(seen, times(times(decay, value), load_one(keys, k + i, FLOAT32)))
        tile[np.uint64(near + i * width)] = value
        i += 1
    return seen


@routine
def pass_token(kind, dim, whole, decay, following, write, keys, k, next_k, tile, near, width):
    """Write a token into the tile's column; return the next one's key times it."""
    seen = np.float32(0.0)
    i = np.int64(0)
    while i < whole:
        n0 = np.uint64(near + i * width)
        n1, n2, n3 = n0 + np.uint64(width), n0 + np.uint64(2 * width), n0 + np.uint64(3 * width)
        four = (tile[n0], tile[n1], tile[n2], tile[n3])
        four = written_four(four, kind, decay, load_four(keys, k + i, FLOAT32), write)
        tile[n0], tile[n1], tile[n2], tile[n3] = four
        seen = with_four(seen, four, following, load_four(keys, next_k + i, FLOAT32))
        i += 4
    while i < dim:
        n0 = np.uint64(near + i * width)
        value = written_one(tile[n0], kind, decay, load_one(keys, k + i, FLOAT32), write)
        tile[n0] = value
        seen = plus(seen, times(times(following, value), load_one(keys, next_k + i, FLOAT32)))
        i += 1
    return seen


@routine
def end_column(state, kind, at, size, dim, whole, decay, write, keys, k, tile, near, width):
    """Write the last token of the tile's column into the state."""
    i = np.int64(0)
    while i < whole:
        n0 = np.uint64(near + i * width)
        n1, n2, n3 = n0 + np.uint64(width), n0 + np.uint64(2 * width), n0 + np.uint64(3 * width)
        four = (tile[n0], tile[n1], tile[n2], tile[n3])
        four = written_four(four, kind, decay, load_four(keys, k + i, FLOAT32), write)
        to_row = at + i * size
        store_one(state, to_row, four[0], kind)
        store_one(state, to_row + size, four[1], kind)
        store_one(state, to_row + 2 * size, four[2], kind)
        store_one(state, to_row + 3 * size, four[3], kind)
        i += 4
    while i < dim:
        value = written_one(tile[np.uint64(near + i * width)], kind, decay, load_one(keys, k + i, FLOAT32), write)
        store_one(state, at + i * size, value, kind)
        i += 1


@routine
def replay_column(state, kind, at, keys, decays, gates, given, places, paths, row, count, sizes, tile, near, column):
    """Replay one column, from `at` on; the tile holds it between tokens, from `near` on, its numbers `width` apart."""
    values, v_kind = given
    k_at, head_at, v_at = places
    heads, key_heads, dim, size, width = sizes
    whole = np.int64(0)
    if dim % 4 == 0:  # then four numbers of a key lie at a multiple of 16 bytes
        whole = dim
    token = np.int64(paths[row, PATH_AT])
    decay = decays[np.uint64(head_at + token * heads)]
    k = k_at + token * key_heads * dim
    seen = begin_column(state, kind, at, size, dim, whole, decay, keys, k, tile, near, width)
    for t in range(1, count):
        v = load_one(values, v_at + token * heads * size + column, v_kind)
        write = times(minus(v, seen), gates[np.uint64(head_at + token * heads)])
        token = np.int64(paths[row, PATH_AT + t])
        following = decays[np.uint64(head_at + token * heads)]
        next_k = k_at + token * key_heads * dim
        seen = pass_token(kind, dim, whole, decay, following, write, keys, k, next_k, tile, near, width)
        decay, k = following, next_k
    v = load_one(values, v_at + token * heads * size + column, v_kind)
    write = times(minus(v, seen), gates[np.uint64(head_at + token * heads)])
    end_column(state, kind, at, size, dim, whole, decay, write, keys, k, tile, near, width)


@kernel(
    block_form=True,
    open_scalars=("kind", "value_kind"),
    state=array("uint8"),
    keys=array("uint8"),
    decays=array("float32"),
    gates=array("float32"),
    values=array("uint8"),
    spare=array("float32"),
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
    item, lane, lanes, state, keys, decays, gates, values, spare, paths, kind, value_kind, layers, heads, key_heads, dim, size,
    parts, part_columns, tokens, state_layer, key_layer, head_layer, value_layer,
):  # fmt: skip
    """Replay accepted tokens of a gated delta net, in the order of the path.

    Item: `part_columns` columns of a value head's state, by row of the batch, layer and head. `part_columns` times `dim` are at
    most `NEAR_TILE`; `spare` holds as many where nothing is near.
    """
    plane = np.int64(item) // parts
    first = (np.int64(item) - plane * parts) * part_columns
    head_plane = plane // heads
    head = plane - head_plane * heads
    row = head_plane // layers
    layer = head_plane - row * layers
    slot = np.int64(paths[row, PATH_SLOT])
    count = np.int64(paths[row, PATH_COUNT])
    tile = near_tile(spare)
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
    given = (values, value_kind)
    sizes = (heads, key_heads, dim, size, part_columns)
    place = np.int64(lane)
    while place < part_columns and first + place < size:
        column = first + place
        replay_column(
            state, kind, at + column, keys, decays, gates, given, places, paths, row, count, sizes, tile, place, column
        )
        place += lanes
