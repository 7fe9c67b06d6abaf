"""`replay_mamba`: accepted tokens of Mamba-2 again, from the step's stashed inputs.

States are float32, float16 or bfloat16; arithmetic is float32, and a state is rounded to its own type behind every token, so
that a replay of several tokens is, bit by bit, as many replays of one.

A lane has a tile of a head's state at once, which stays in registers from the first token to the last::

              columns (S)
    rows      |a|b|c|d|      what B * dt gives a column is shared by the tile's eight rows
    (D)       |a|b|c|d|
                  .
              |a|b|c|d|
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.bits import FLOAT32
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.replay_values import load_four, load_one, rounded_four, rounded_one, store_four, store_one
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar
from numba_kv.kernels.state_commit import PATH_AT, PATH_COUNT, PATH_SLOT
from numba_kv.kernels.wide_values import plus, times

__all__ = ["TILE_ROWS", "replay_mamba"]

#: Rows and columns of a lane's tile.
TILE_ROWS, TILE_COLUMNS = 8, 4


@routine
def after_token(values, decay, drives, x, kind):
    """Return four neighbouring numbers of a row after a token."""
    a, b, c, d = values
    p, q, r, s = drives
    return rounded_four(
        plus(times(a, decay), times(p, x)),
        plus(times(b, decay), times(q, x)),
        plus(times(c, decay), times(r, x)),
        plus(times(d, decay), times(s, x)),
        kind,
    )


@routine
def replay_tiles(memory, kind, at, stashes, places, paths, row, count, sizes, lane, lanes):
    """Replay rows [first, stop) of a head's state, where they are whole tiles."""
    da, u, b, dt = stashes
    head_at, u_at, b_at = places
    heads, dim, groups, size, first, stop = sizes
    columns = size // TILE_COLUMNS
    tiles = (stop - first) // TILE_ROWS * columns
    tile = np.int64(lane)
    while tile < tiles:
        upper = np.int64(np.uint32(tile) // np.uint32(columns))
        column = (tile - upper * columns) * TILE_COLUMNS
        top = first + upper * TILE_ROWS
        place = at + top * size + column
        v0 = load_four(memory, place, kind)
        v1 = load_four(memory, place + size, kind)
        v2 = load_four(memory, place + 2 * size, kind)
        v3 = load_four(memory, place + 3 * size, kind)
        v4 = load_four(memory, place + 4 * size, kind)
        v5 = load_four(memory, place + 5 * size, kind)
        v6 = load_four(memory, place + 6 * size, kind)
        v7 = load_four(memory, place + 7 * size, kind)
        for t in range(count):
            token = np.int64(paths[row, PATH_AT + t])
            decay = da[np.uint64(head_at + token * heads)]
            step = dt[np.uint64(head_at + token * heads)]
            x_at = u_at + token * heads * dim + top
            x0, x1, x2, x3 = load_four(u, x_at, FLOAT32)
            x4, x5, x6, x7 = load_four(u, x_at + 4, FLOAT32)
            p, q, r, s = load_four(b, b_at + token * groups * size + column, FLOAT32)
            drives = (times(p, step), times(q, step), times(r, step), times(s, step))
            v0 = after_token(v0, decay, drives, x0, kind)
            v1 = after_token(v1, decay, drives, x1, kind)
            v2 = after_token(v2, decay, drives, x2, kind)
            v3 = after_token(v3, decay, drives, x3, kind)
            v4 = after_token(v4, decay, drives, x4, kind)
            v5 = after_token(v5, decay, drives, x5, kind)
            v6 = after_token(v6, decay, drives, x6, kind)
            v7 = after_token(v7, decay, drives, x7, kind)
        store_four(memory, place, v0, kind)
        store_four(memory, place + size, v1, kind)
        store_four(memory, place + 2 * size, v2, kind)
        store_four(memory, place + 3 * size, v3, kind)
        store_four(memory, place + 4 * size, v4, kind)
        store_four(memory, place + 5 * size, v5, kind)
        store_four(memory, place + 6 * size, v6, kind)
        store_four(memory, place + 7 * size, v7, kind)
        tile += lanes


@routine
def replay_numbers(memory, kind, at, stashes, places, paths, row, count, sizes, lane, lanes):
    """Replay rows [first, stop) of a head's state of any size, number by number."""
    da, u, b, dt = stashes
    head_at, u_at, b_at = places
    heads, dim, groups, size, first, stop = sizes
    number = np.int64(lane)
    while number < (stop - first) * size:
        down = first + np.int64(np.uint32(number) // np.uint32(size))
        column = number - (down - first) * size
        value = load_one(memory, at + down * size + column, kind)
        for t in range(count):
            token = np.int64(paths[row, PATH_AT + t])
            decay = da[np.uint64(head_at + token * heads)]
            drive = times(load_one(b, b_at + token * groups * size + column, FLOAT32), dt[np.uint64(head_at + token * heads)])
            x = load_one(u, u_at + token * heads * dim + down, FLOAT32)
            value = rounded_one(plus(times(value, decay), times(drive, x)), kind)
        store_one(memory, at + down * size + column, value, kind)
        number += lanes


@kernel(
    block_form=True,
    open_scalars=("kind",),
    state=array("uint8"),
    da=array("float32"),
    u=array("uint8"),
    b=array("uint8"),
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
    item, lane, lanes, state, da, u, b, dt, paths, kind, layers, heads, dim, groups, size, parts, part_rows, tokens,
    state_layer, head_layer, u_layer, b_layer,
):  # fmt: skip
    """Replay accepted tokens of Mamba-2: ``state = round(state * dA + (B * dt) * x)`` for each, in the order of the path.

    Item: `part_rows` rows of a head's state, whole tiles unless all are one part, by row of the batch, layer and head; lanes
    share its tiles.
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
    )
    sizes = (heads, dim, groups, size, first, min(first + part_rows, dim))
    stashes = (da, u, b, dt)
    if dim % TILE_ROWS == 0 and size % TILE_COLUMNS == 0:
        replay_tiles(state, kind, at, stashes, places, paths, row, count, sizes, lane, lanes)
    else:
        replay_numbers(state, kind, at, stashes, places, paths, row, count, sizes, lane, lanes)
