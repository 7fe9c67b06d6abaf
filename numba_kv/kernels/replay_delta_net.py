"""`replay_delta_net`: accepted tokens of a gated delta net again, from the step's stashed inputs.

For each token, with g the decay itself: ``S = g * S; s = S^T k; v' = (v - s) * beta; S = S + k (outer) v'``. A state is rounded
to its own type behind every token: a replay of several tokens is, bit by bit, as many replays of one.

A sum over a column is taken run by run, of eight rows each: a run's products are added in the order of its rows, and then the
runs' sums in theirs. Where a block has enough lanes, each has a tile, which stays in registers from the first token to the
last; what tokens bring lies near the lanes by then: it is loaded while the tiles are::

                  columns of the block
    run 0         | tile | tile | tile |      a lane adds the products of its tile's columns,
    run 1         | tile | tile | tile |      then a lane a column those of the runs
      .

Else a lane has a column at once, which stays where it is.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import FLOAT32
from numba_kv.kernels.block_memory import NEAR_TILE, lanes_wait, near_four, near_tile, set_near_four
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.replay_values import (
    TILE_COLUMNS,
    TILE_ROWS,
    four_of,
    load_four,
    load_one,
    load_tile,
    store_one,
    store_tile,
    words_of,
)
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar
from numba_kv.kernels.state_commit import PATH_AT, PATH_COUNT, PATH_SLOT
from numba_kv.kernels.wide_values import minus, plus, times

__all__ = ["replay_delta_net"]


@routine
def near_floats_of(count, dim, columns):
    """Return how many numbers lie near the lanes: what tokens bring, the runs' sums, and what is written to the columns."""
    return count * (dim + columns + 4) + (dim // TILE_ROWS + 1) * columns


# -- tiles ---------------------------------------------------------------------------------------------------------------


@routine
def bring_tokens(near, stashes, places, paths, row, count, sizes, lane, lanes):
    """Put what every token brings near the lanes: key, values, decay and gate."""
    keys, decays, gates, values, value_kind = stashes
    k_at, head_at, v_at = places
    heads, key_heads, dim, size, columns = sizes
    record = dim + columns + 4
    fours = (dim + columns) // 4
    four = np.int64(lane)
    while four < count * fours:
        t = np.int64(np.uint32(four) // np.uint32(fours))
        at = (four - t * fours) * 4
        token = np.int64(paths[row, PATH_AT + t])
        if at < dim:
            numbers = load_four(keys, k_at + token * key_heads * dim + at, FLOAT32)
        else:
            numbers = load_four(values, v_at + token * heads * size + at - dim, value_kind)
        set_near_four(near, t * record + at, numbers)
        four += lanes
    t = np.int64(lane)
    while t < count:
        place = head_at + np.int64(paths[row, PATH_AT + t]) * heads
        near[np.uint64(t * record + dim + columns)] = decays[np.uint64(place)]
        near[np.uint64(t * record + dim + columns + 1)] = gates[np.uint64(place)]
        t += lanes


@routine
def decayed_four(values, decay):
    """Return four numbers of a row, decayed."""
    a, b, c, d = values
    return times(decay, a), times(decay, b), times(decay, c), times(decay, d)


@routine
def decayed_tile(words, decay, kind):
    """Return the numbers of a tile, decayed."""
    return (
        decayed_four(four_of(words[0], kind), decay),
        decayed_four(four_of(words[1], kind), decay),
        decayed_four(four_of(words[2], kind), decay),
        decayed_four(four_of(words[3], kind), decay),
        decayed_four(four_of(words[4], kind), decay),
        decayed_four(four_of(words[5], kind), decay),
        decayed_four(four_of(words[6], kind), decay),
        decayed_four(four_of(words[7], kind), decay),
    )


@routine
def with_row(sums, values, key):
    """Return the sums of four columns with the products of one more row."""
    p, q, r, s = sums
    a, b, c, d = values
    return plus(p, times(a, key)), plus(q, times(b, key)), plus(r, times(c, key)), plus(s, times(d, key))


@routine
def tile_sums(tile, upper, lower):
    """Return a tile's key times its columns; `upper` and `lower` have the key of four rows each."""
    a, b, c, d = tile[0]
    key = upper[0]
    sums = times(a, key), times(b, key), times(c, key), times(d, key)
    sums = with_row(sums, tile[1], upper[1])
    sums = with_row(sums, tile[2], upper[2])
    sums = with_row(sums, tile[3], upper[3])
    sums = with_row(sums, tile[4], lower[0])
    sums = with_row(sums, tile[5], lower[1])
    sums = with_row(sums, tile[6], lower[2])
    return with_row(sums, tile[7], lower[3])


@routine
def written_row(values, key, writes, kind):
    """Return the words of a tile's row after a token."""
    a, b, c, d = values
    p, q, r, s = writes
    return words_of(plus(a, times(key, p)), plus(b, times(key, q)), plus(c, times(key, r)), plus(d, times(key, s)), kind)


@routine
def written_tile(tile, upper, lower, writes, kind):
    """Return the words of a tile after a token."""
    return (
        written_row(tile[0], upper[0], writes, kind),
        written_row(tile[1], upper[1], writes, kind),
        written_row(tile[2], upper[2], writes, kind),
        written_row(tile[3], upper[3], writes, kind),
        written_row(tile[4], lower[0], writes, kind),
        written_row(tile[5], lower[1], writes, kind),
        written_row(tile[6], lower[2], writes, kind),
        written_row(tile[7], lower[3], writes, kind),
    )


@routine
def write_of_column(near, sums, column, runs, columns, value, gate):
    """Return what a token writes to a column, after the sums of its runs."""
    seen = near[np.uint64(sums + column)]
    for run in range(1, runs):
        seen = plus(seen, near[np.uint64(sums + run * columns + column)])
    return times(minus(value, seen), gate)


@routine
def replay_tiles(state, kind, at, near, stashes, places, paths, row, count, sizes, lane, lanes):
    """Replay columns of a head's state, from `at` on, a tile a lane."""
    heads, key_heads, dim, size, columns = sizes
    record = dim + columns + 4
    runs, wide = dim // TILE_ROWS, columns // TILE_COLUMNS
    sums = count * record
    writes = sums + runs * columns
    run = np.int64(np.uint32(lane) // np.uint32(wide))
    column = (np.int64(lane) - run * wide) * TILE_COLUMNS
    has_tile = run < runs
    if not has_tile:  # loads what another lane has
        run = np.int64(0)
    place = at + run * TILE_ROWS * size + column
    words = load_tile(state, place, size, kind)
    bring_tokens(near, stashes, places, paths, row, count, sizes, lane, lanes)
    lanes_wait()
    for t in range(count):
        begin = t * record
        upper, lower = near_four(near, begin + run * TILE_ROWS), near_four(near, begin + run * TILE_ROWS + 4)
        tile = decayed_tile(words, near[np.uint64(begin + dim + columns)], kind)
        if has_tile:
            set_near_four(near, sums + run * columns + column, tile_sums(tile, upper, lower))
        lanes_wait()
        own = np.int64(lane)
        while own < columns:
            value, gate = near[np.uint64(begin + dim + own)], near[np.uint64(begin + dim + columns + 1)]
            near[np.uint64(writes + own)] = write_of_column(near, sums, own, runs, columns, value, gate)
            own += lanes
        lanes_wait()
        words = written_tile(tile, upper, lower, near_four(near, writes + column), kind)
    if has_tile:
        store_tile(state, place, size, words, kind)


# -- columns -------------------------------------------------------------------------------------------------------------


@routine
def run_of_column(state, kind, at, size, first, stop, decay, keys, k):
    """Return the sum of a column's rows [first, stop), decayed, times a key."""
    seen = times(times(decay, load_one(state, at + first * size, kind)), load_one(keys, k + first, FLOAT32))
    for i in range(first + 1, stop):
        seen = plus(seen, times(times(decay, load_one(state, at + i * size, kind)), load_one(keys, k + i, FLOAT32)))
    return seen


@routine
def replay_column(state, kind, at, column, stashes, places, paths, row, count, sizes):
    """Replay one column of a head's state, from `at` on."""
    keys, decays, gates, values, value_kind = stashes
    k_at, head_at, v_at = places
    heads, key_heads, dim, size, columns = sizes
    for t in range(count):
        token = np.int64(paths[row, PATH_AT + t])
        decay = decays[np.uint64(head_at + token * heads)]
        k = k_at + token * key_heads * dim
        seen = run_of_column(state, kind, at, size, np.int64(0), min(np.int64(TILE_ROWS), dim), decay, keys, k)
        first = np.int64(TILE_ROWS)
        while first < dim:
            seen = plus(seen, run_of_column(state, kind, at, size, first, min(first + TILE_ROWS, dim), decay, keys, k))
            first += TILE_ROWS
        v = load_one(values, v_at + token * heads * size + column, value_kind)
        write = times(minus(v, seen), gates[np.uint64(head_at + token * heads)])
        for i in range(dim):
            value = times(decay, load_one(state, at + i * size, kind))
            store_one(state, at + i * size, plus(value, times(load_one(keys, k + i, FLOAT32), write)), kind)


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
    part_columns=scalar(),
    tokens=scalar(),
    state_layer=scalar(),
    key_layer=scalar(),
    head_layer=scalar(),
    value_layer=scalar(),
)
def replay_delta_net(
    item, lane, lanes, state, keys, decays, gates, values, spare, paths, kind, value_kind, layers, heads, key_heads, dim, size,
    part_columns, tokens, state_layer, key_layer, head_layer, value_layer,
):  # fmt: skip
    """Replay accepted tokens of a gated delta net, in the order of the path.

    Item: `part_columns` columns of a value head's state, of which there are whole parts, by row of the batch, layer and head;
    lanes share its tiles. `spare` holds `NEAR_TILE` numbers where nothing is near.
    """
    parts = size // part_columns
    plane = np.int64(np.uint32(item) // np.uint32(parts))
    first = (np.int64(item) - plane * parts) * part_columns
    head_plane = np.int64(np.uint32(plane) // np.uint32(heads))
    head = plane - head_plane * heads
    row = np.int64(np.uint32(head_plane) // np.uint32(layers))
    layer = head_plane - row * layers
    near = near_tile(spare)
    slot = np.int64(paths[row, PATH_SLOT])
    count = np.int64(paths[row, PATH_COUNT])
    if slot < 0 or count == 0:
        return
    at = layer * state_layer + (slot * heads + head) * dim * size + first
    begin = row * tokens
    key_head = np.int64(np.uint32(head) // np.uint32(heads // key_heads))
    places = (
        layer * key_layer + (begin * key_heads + key_head) * dim,
        layer * head_layer + begin * heads + head,
        layer * value_layer + (begin * heads + head) * size + first,
    )
    stashes = (keys, decays, gates, values, value_kind)
    sizes = (heads, key_heads, dim, size, part_columns)
    is_whole = dim % TILE_ROWS == 0 and part_columns % TILE_COLUMNS == 0 and size % TILE_COLUMNS == 0
    has_lanes = dim // TILE_ROWS * (part_columns // TILE_COLUMNS) <= lanes
    if is_whole and has_lanes and near_floats_of(count, dim, part_columns) <= NEAR_TILE:
        replay_tiles(state, kind, at, near, stashes, places, paths, row, count, sizes, lane, lanes)
    else:
        column = np.int64(lane)
        while column < part_columns:
            replay_column(state, kind, at + column, column, stashes, places, paths, row, count, sizes)
            column += lanes
