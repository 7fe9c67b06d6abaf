"""`replay_mamba`: accepted tokens of Mamba-2 again, from the step's stashed inputs.

States are float32, float16 or bfloat16; arithmetic is float32, and a state is rounded to its own type behind every token, so
that a replay of several tokens is, bit by bit, as many replays of one.

A lane has tiles of a head's state one after the other; each stays in registers from the first token to the last. What tokens do
to them lies near the lanes by then: it is loaded while the first tile is::

              columns (S)
    rows      |a|b|c|d|      what B * dt gives a column is shared by the tile's eight rows
    (D)       |a|b|c|d|
                  .
              |a|b|c|d|

    near      | B * dt of the columns | x of the rows | dA . . . |      for each token
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
from numba_kv.kernels.wide_values import plus, times

__all__ = ["replay_mamba"]


@routine
def row_after_token(words, decay, drives, x, kind):
    """Return the words of a tile's row after a token."""
    a, b, c, d = four_of(words, kind)
    p, q, r, s = drives
    return words_of(
        plus(times(a, decay), times(p, x)),
        plus(times(b, decay), times(q, x)),
        plus(times(c, decay), times(r, x)),
        plus(times(d, decay), times(s, x)),
        kind,
    )


@routine
def tile_after_token(words, decay, drives, upper, lower, kind):
    """Return the words of a tile after a token; `upper` and `lower` have x of four rows each."""
    return (
        row_after_token(words[0], decay, drives, upper[0], kind),
        row_after_token(words[1], decay, drives, upper[1], kind),
        row_after_token(words[2], decay, drives, upper[2], kind),
        row_after_token(words[3], decay, drives, upper[3], kind),
        row_after_token(words[4], decay, drives, lower[0], kind),
        row_after_token(words[5], decay, drives, lower[1], kind),
        row_after_token(words[6], decay, drives, lower[2], kind),
        row_after_token(words[7], decay, drives, lower[3], kind),
    )


@routine
def bring_tokens(near, stashes, places, paths, row, count, sizes, lane, lanes):
    """Put what every token does to the rows near the lanes."""
    da, u, b, dt = stashes
    head_at, u_at, b_at = places
    heads, dim, groups, size, rows = sizes
    record = size + rows + 4
    fours = (size + rows) // 4
    four = np.int64(lane)
    while four < count * fours:
        t = np.int64(np.uint32(four) // np.uint32(fours))
        at = (four - t * fours) * 4
        token = np.int64(paths[row, PATH_AT + t])
        if at < size:
            step = dt[np.uint64(head_at + token * heads)]
            p, q, r, s = load_four(b, b_at + token * groups * size + at, FLOAT32)
            numbers = times(p, step), times(q, step), times(r, step), times(s, step)
        else:
            numbers = load_four(u, u_at + token * heads * dim + at - size, FLOAT32)
        set_near_four(near, t * record + at, numbers)
        four += lanes
    t = np.int64(lane)
    while t < count:
        token = np.int64(paths[row, PATH_AT + t])
        near[np.uint64(t * record + size + rows)] = da[np.uint64(head_at + token * heads)]
        t += lanes


@routine
def replay_tiles(memory, kind, at, near, stashes, places, paths, row, count, sizes, lane, lanes):
    """Replay rows of a head's state, from `at` on, that are whole tiles."""
    heads, dim, groups, size, rows = sizes
    record = size + rows + 4
    columns = size // TILE_COLUMNS
    tiles = rows // TILE_ROWS * columns
    tile = min(np.int64(lane), tiles - 1)  # a lane without a tile loads what another has
    upper = np.int64(np.uint32(tile) // np.uint32(columns))
    column = tile - upper * columns
    place = at + upper * TILE_ROWS * size + column * TILE_COLUMNS
    words = load_tile(memory, place, size, kind)
    bring_tokens(near, stashes, places, paths, row, count, sizes, lane, lanes)
    lanes_wait()
    tile = np.int64(lane)
    while tile < tiles:
        for t in range(count):
            begin = t * record
            drives = near_four(near, begin + column * TILE_COLUMNS)
            x = begin + size + upper * TILE_ROWS
            decay = near[np.uint64(begin + size + rows)]
            words = tile_after_token(words, decay, drives, near_four(near, x), near_four(near, x + 4), kind)
        store_tile(memory, place, size, words, kind)
        tile += lanes
        if tile < tiles:
            upper = np.int64(np.uint32(tile) // np.uint32(columns))
            column = tile - upper * columns
            place = at + upper * TILE_ROWS * size + column * TILE_COLUMNS
            words = load_tile(memory, place, size, kind)


@routine
def replay_numbers(memory, kind, at, stashes, places, paths, row, count, sizes, lane, lanes):
    """Replay rows of a head's state of any size, number by number."""
    da, u, b, dt = stashes
    head_at, u_at, b_at = places
    heads, dim, groups, size, rows = sizes
    number = np.int64(lane)
    while number < rows * size:
        down = np.int64(np.uint32(number) // np.uint32(size))
        column = number - down * size
        value = load_one(memory, at + number, kind)
        for t in range(count):
            token = np.int64(paths[row, PATH_AT + t])
            decay = da[np.uint64(head_at + token * heads)]
            drive = times(load_one(b, b_at + token * groups * size + column, FLOAT32), dt[np.uint64(head_at + token * heads)])
            x = load_one(u, u_at + token * heads * dim + down, FLOAT32)
            store_one(memory, at + number, plus(times(value, decay), times(drive, x)), kind)
            value = load_one(memory, at + number, kind)
        number += lanes


@kernel(
    block_form=True,
    open_scalars=("kind",),
    state=array("uint8"),
    da=array("float32"),
    u=array("uint8"),
    b=array("uint8"),
    dt=array("float32"),
    spare=array("float32"),
    paths=array("int32", 2),
    kind=scalar(),
    layers=scalar(),
    heads=scalar(),
    dim=scalar(),
    groups=scalar(),
    size=scalar(),
    part_rows=scalar(),
    tokens=scalar(),
    state_layer=scalar(),
    head_layer=scalar(),
    u_layer=scalar(),
    b_layer=scalar(),
)
def replay_mamba(
    item, lane, lanes, state, da, u, b, dt, spare, paths, kind, layers, heads, dim, groups, size, part_rows, tokens,
    state_layer, head_layer, u_layer, b_layer,
):  # fmt: skip
    """Replay accepted tokens of Mamba-2: ``state = round(state * dA + (B * dt) * x)`` for each, in the order of the path.

    Item: `part_rows` rows of a head's state, of which there are whole parts, by row of the batch, layer and head; lanes share
    its tiles. `spare` holds `NEAR_TILE` numbers where nothing is near.
    """
    parts = dim // part_rows
    plane = np.int64(np.uint32(item) // np.uint32(parts))
    first = (np.int64(item) - plane * parts) * part_rows
    head_plane = np.int64(np.uint32(plane) // np.uint32(heads))
    head = plane - head_plane * heads
    row = np.int64(np.uint32(head_plane) // np.uint32(layers))
    layer = head_plane - row * layers
    near = near_tile(spare)
    slot = np.int64(paths[row, PATH_SLOT])
    count = np.int64(paths[row, PATH_COUNT])
    if slot < 0 or count == 0:
        return
    at = layer * state_layer + ((slot * heads + head) * dim + first) * size
    begin = row * tokens
    group = np.int64(np.uint32(head) // np.uint32(heads // groups))
    places = (
        layer * head_layer + begin * heads + head,
        layer * u_layer + (begin * heads + head) * dim + first,
        layer * b_layer + (begin * groups + group) * size,
    )
    sizes = (heads, dim, groups, size, part_rows)
    stashes = (da, u, b, dt)
    is_whole = part_rows % TILE_ROWS == 0 and size % TILE_COLUMNS == 0
    if is_whole and count * (size + part_rows + 4) <= NEAR_TILE:
        replay_tiles(state, kind, at, near, stashes, places, paths, row, count, sizes, lane, lanes)
    else:
        replay_numbers(state, kind, at, stashes, places, paths, row, count, sizes, lane, lanes)
