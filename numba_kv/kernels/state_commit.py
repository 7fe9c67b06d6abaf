"""Which tokens of a verification step are committed, and their states.

`resolve_commits` checks rows, once for all layers and arrays; `scatter_states_*` and `shift_conv_states_*` move snapshots and
drafts.

`paths` int32 [B, 2 + V] is what a commit does to each row: slot (-1: nothing), tokens, and the tokens' places in the step. ::

    accepted length 3, node ids  0  -1  4     ->    slot, 2, 0, 4          -1 is padding: it is left out
    accepted length 2, no ids                 ->    slot, 2, 0, 1          a linear step accepts its first tokens

A row is refused as a whole, before any of its states is written, if its length is out of range, an id names no node, a node is
there twice, or another row commits to the same slot: its word in `status` says why and stays until it is read.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar
from numba_kv.kernels.state_copy import copy_part_of_state

__all__ = [
    "PATH_AT",
    "PATH_COUNT",
    "PATH_SLOT",
    "CommitStatus",
    "resolve_commits",
    "scatter_states_halves",
    "scatter_states_words",
    "shift_conv_states_16",
    "shift_conv_states_32",
]

# columns of `paths`
PATH_SLOT = 0
PATH_COUNT = 1
PATH_AT = 2


class CommitStatus(IntEnum):
    """Why the device refused to commit a row: its states are as they were."""

    OK = 0
    BAD_LENGTH = 1
    BAD_NODE = 2
    BAD_SLOT = 3
    SLOT_TWICE = 4


OK, BAD_LENGTH, BAD_NODE, BAD_SLOT, SLOT_TWICE = (int(s) for s in CommitStatus)


@routine
def follow_path(item, paths, node_ids, length, tokens, is_ordered):
    """Write the places of a row's accepted tokens; return how many they are, or -1 if they are no path."""
    row = np.int64(item)
    count = np.int64(0)
    if node_ids.shape[1] == 0:
        while count < length:
            paths[row, PATH_AT + count] = count
            count += 1
        return count
    for t in range(length):
        node = np.int64(node_ids[row, t])
        if node == -1:
            continue
        if node < 0 or node >= tokens:
            return np.int64(-1)
        for i in range(count):
            before = np.int64(paths[row, PATH_AT + i])
            if before == node or (is_ordered != 0 and before > node):
                return np.int64(-1)
        paths[row, PATH_AT + count] = node
        count += 1
    return count


@kernel(
    paths=array("int32", 2),
    status=array("int32"),
    accept_len=array("int32"),
    state_index=array("int32"),
    node_ids=array("int32", 2),
    tokens=scalar(),
    num_slots=scalar(),
    is_ordered=scalar(),
)
def resolve_commits(item, paths, status, accept_len, state_index, node_ids, tokens, num_slots, is_ordered):
    """Check what a row accepts and write its path; `node_ids` has no columns for a linear step.

    With `is_ordered`, ids must ascend: parents come before their children. Item: a row.
    """
    row = np.int64(item)
    slot = np.int64(state_index[row])
    length = np.int64(accept_len[row])
    most = tokens
    if node_ids.shape[1] > 0:
        most = np.int64(node_ids.shape[1])
    word = OK
    count = np.int64(0)
    if slot < -1 or slot >= num_slots:
        word = BAD_SLOT
    elif length < 0 or length > most:
        word = BAD_LENGTH
    elif slot >= 0:
        for other in range(state_index.shape[0]):
            if other != row and np.int64(state_index[other]) == slot:
                word = SLOT_TWICE
        if word == OK:
            count = follow_path(row, paths, node_ids, length, tokens, is_ordered)
            if count < 0:
                word = BAD_NODE
    if word != OK:
        status[row] = word
        slot = np.int64(-1)
        count = np.int64(0)
    paths[row, PATH_SLOT] = slot
    paths[row, PATH_COUNT] = count


@routine
def scatter_part(
    item, lane, lanes, pool, snapshots, paths, layers, parts, part_size, size, pool_layer, snapshot_layer, tokens
):
    """Copy one part of the snapshot behind a row's last accepted token to its slot."""
    plane = np.int64(item) // parts
    first = (np.int64(item) - plane * parts) * part_size
    row = plane // layers
    layer = plane - row * layers
    slot = np.int64(paths[row, PATH_SLOT])
    count = np.int64(paths[row, PATH_COUNT])
    if slot >= 0 and count > 0:
        last = np.int64(paths[row, PATH_AT + count - 1])
        to = layer * pool_layer + slot * size
        at = layer * snapshot_layer + (row * tokens + last) * size
        copy_part_of_state(pool, snapshots, to, at, first, part_size, size, lane, lanes)


@kernel(
    block_form=True,
    pool=array("uint64"),
    snapshots=array("uint64"),
    paths=array("int32", 2),
    layers=scalar(),
    parts=scalar(),
    part_size=scalar(),
    size=scalar(),
    pool_layer=scalar(),
    snapshot_layer=scalar(),
    tokens=scalar(),
)
def scatter_states_words(
    item, lane, lanes, pool, snapshots, paths, layers, parts, part_size, size, pool_layer, snapshot_layer, tokens
):
    """Commit snapshots, packed by `tokens` a row, to the slots of rows in all layers; sizes in words.

    Item: a part of a state, by row and layer; lanes share its words.
    """
    scatter_part(item, lane, lanes, pool, snapshots, paths, layers, parts, part_size, size, pool_layer, snapshot_layer, tokens)


@kernel(
    block_form=True,
    pool=array("uint16"),
    snapshots=array("uint16"),
    paths=array("int32", 2),
    layers=scalar(),
    parts=scalar(),
    part_size=scalar(),
    size=scalar(),
    pool_layer=scalar(),
    snapshot_layer=scalar(),
    tokens=scalar(),
)
def scatter_states_halves(
    item, lane, lanes, pool, snapshots, paths, layers, parts, part_size, size, pool_layer, snapshot_layer, tokens
):
    """Commit snapshots that are not of whole words: `scatter_states_words` in 2-byte units."""
    scatter_part(item, lane, lanes, pool, snapshots, paths, layers, parts, part_size, size, pool_layer, snapshot_layer, tokens)


@routine
def shift_channels(item, lane, lanes, pool, paths, layers, parts, part_size, channels, columns, pool_layer, tokens):
    """Move the inputs of accepted tokens to the end of some channels' columns.

    ::

        before   | old | old | old | 0 | 1 | 2 | 3 |       4 tokens were written behind what was there
        after    |  0  |  0  | old | old | old | 0 | 2 |   nodes 0 and 2 are accepted

    A column comes from one at most as high, so going down overwrites nothing that is still to be read.
    """
    plane = np.int64(item) // parts
    first = (np.int64(item) - plane * parts) * part_size
    row = plane // layers
    layer = plane - row * layers
    slot = np.int64(paths[row, PATH_SLOT])
    lack = tokens - np.int64(paths[row, PATH_COUNT])
    if slot < 0 or lack == 0:
        return
    base = layer * pool_layer + slot * channels * columns
    kept = columns - tokens
    channel = first + lane
    stop = min(first + part_size, channels)
    while channel < stop:
        at = base + channel * columns
        column = columns - 1
        while column >= lack:
            source = column - lack
            if source >= kept:
                source = kept + np.int64(paths[row, PATH_AT + source - kept])
            pool[np.uint64(at + column)] = pool[np.uint64(at + source)]
            column -= 1
        while column >= 0:
            pool[np.uint64(at + column)] = 0
            column -= 1
        channel += lanes


@kernel(
    block_form=True,
    pool=array("uint16"),
    paths=array("int32", 2),
    layers=scalar(),
    parts=scalar(),
    part_size=scalar(),
    channels=scalar(),
    columns=scalar(),
    pool_layer=scalar(),
    tokens=scalar(),
)
def shift_conv_states_16(item, lane, lanes, pool, paths, layers, parts, part_size, channels, columns, pool_layer, tokens):
    """Shift rejected drafts out of convolution states of 2-byte elements, in which all `tokens` of the step were written.

    Item: some channels of a row's slot, by row and layer; lanes share them.
    """
    shift_channels(item, lane, lanes, pool, paths, layers, parts, part_size, channels, columns, pool_layer, tokens)


@kernel(
    block_form=True,
    pool=array("uint32"),
    paths=array("int32", 2),
    layers=scalar(),
    parts=scalar(),
    part_size=scalar(),
    channels=scalar(),
    columns=scalar(),
    pool_layer=scalar(),
    tokens=scalar(),
)
def shift_conv_states_32(item, lane, lanes, pool, paths, layers, parts, part_size, channels, columns, pool_layer, tokens):
    """Shift rejected drafts out of convolution states of 4-byte elements; see `shift_conv_states_16`."""
    shift_channels(item, lane, lanes, pool, paths, layers, parts, part_size, channels, columns, pool_layer, tokens)
