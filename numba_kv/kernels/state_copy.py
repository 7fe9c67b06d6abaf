"""States to zero, and states to states: `clear_states_*`, `clear_fresh_states_*`, `copy_states_*`, `permute_states_*`.

`permute_state_rows` moves rows instead, which find their states.

A state is opaque here. Each kernel exists for 8-byte words and, for states that are not of whole words, for 2-byte halves. ::

    slab    | layer 0: slot 0, slot 1, ... | padding | layer 1: ...
    slot    | part | part | ... | rest |                               a block works on one part
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_kv.kernels.jit import kernel
from numba_kv.kernels.layout import FLAGS, LIVE, RECORD_WORDS, ROW
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar

__all__ = [
    "clear_fresh_states_halves",
    "clear_fresh_states_words",
    "clear_states_halves",
    "clear_states_words",
    "copy_part_of_state",
    "copy_states_halves",
    "copy_states_words",
    "permute_state_rows",
    "permute_states_halves",
    "permute_states_words",
]


#: Scalars of kernels over all layers' states: sizes, distances of layers and parts of a slot, the convolution's last.
_SLABS: dict[str, Any] = {
    "layers": scalar(),
    "part_size": scalar(),
    "recurrent_size": scalar(),
    "recurrent_layer": scalar(),
    "recurrent_parts": scalar(),
    "conv_size": scalar(),
    "conv_layer": scalar(),
    "parts": scalar(),
}


@routine
def part_place(part, sizes):
    """Return of a part: whether it is of the recurrent slab, where its layer begins there, a slot's size, first and end in it.

    The parts of all layers follow each other, those of a layer's convolution last.
    """
    part_size, recurrent_size, recurrent_layer, recurrent_parts, conv_size, conv_layer, parts = sizes
    layer = part // parts
    place = part - layer * parts
    is_recurrent = place < recurrent_parts
    base, size = layer * recurrent_layer, recurrent_size
    if not is_recurrent:
        place, base, size = place - recurrent_parts, layer * conv_layer, conv_size
    first = place * part_size
    return is_recurrent, base, size, first, min(first + part_size, size)


@routine
def clear_range(slab, at, stop, lane, lanes):
    """Clear the elements from `at` to `stop`; lanes share them."""
    j, end = np.uint64(at) + np.uint64(lane), np.uint64(stop)
    while j < end:
        slab[j] = 0
        j += np.uint64(lanes)


@routine
def clear_part_of_slot(part, slot, lane, lanes, recurrent, conv, sizes):
    """Clear one part of a slot."""
    is_recurrent, base, size, first, stop = part_place(part, sizes)
    at = base + slot * size
    if is_recurrent:
        clear_range(recurrent, at + first, at + stop, lane, lanes)
    else:
        clear_range(conv, at + first, at + stop, lane, lanes)


@kernel(
    block_form=True,
    recurrent=array("uint64"),
    conv=array("uint64"),
    first_slot=scalar(),
    **_SLABS,
)
def clear_states_words(
    item,
    lane,
    lanes,
    recurrent,
    conv,
    first_slot,
    layers,
    part_size,
    recurrent_size,
    recurrent_layer,
    recurrent_parts,
    conv_size,
    conv_layer,
    parts,
):
    """Clear the states of slots from `first_slot` on, in all layers; sizes in words. Item: a part, by slot and layer."""
    each = layers * parts
    place = np.int64(item) // each
    sizes = (part_size, recurrent_size, recurrent_layer, recurrent_parts, conv_size, conv_layer, parts)
    clear_part_of_slot(np.int64(item) - place * each, first_slot + place, lane, lanes, recurrent, conv, sizes)


#: Clear states that are not of whole words: `clear_states_words` in 2-byte units.
clear_states_halves = clear_states_words.over("clear_states_halves", recurrent="uint16", conv="uint16")


@routine
def start_row(edits, state_slots, state_index, record, is_first, recurrent, conv, part, lane, lanes, sizes):
    """Do one part of a record of a composition change: its row starts, or ends and has no states to be found."""
    at = record * RECORD_WORDS
    row = np.int64(edits[at + ROW])
    slot = np.int64(-1)
    if edits[at + FLAGS] & LIVE != 0:
        slot = np.int64(state_slots[row])
        clear_part_of_slot(part, slot, lane, lanes, recurrent, conv, sizes)
    if is_first and lane == 0:
        state_index[row] = slot


@kernel(
    block_form=True,
    recurrent=array("uint64"),
    conv=array("uint64"),
    edits=array("int32"),
    state_slots=array("int32"),
    state_index=array("int32"),
    **_SLABS,
)
def clear_fresh_states_words(
    item,
    lane,
    lanes,
    recurrent,
    conv,
    edits,
    state_slots,
    state_index,
    layers,
    part_size,
    recurrent_size,
    recurrent_layer,
    recurrent_parts,
    conv_size,
    conv_layer,
    parts,
):
    """Clear the states of rows that start in a composition change, whose records are in `edits`; sizes in words.

    `state_index` gets the slots of those rows, and -1 for rows that end. Item: a part, by record and layer.
    """
    each = layers * parts
    record = np.int64(item) // each
    part = np.int64(item) - record * each
    sizes = (part_size, recurrent_size, recurrent_layer, recurrent_parts, conv_size, conv_layer, parts)
    start_row(edits, state_slots, state_index, record, part == 0, recurrent, conv, part, lane, lanes, sizes)


#: Clear states of rows that start, where they are not of whole words: `clear_fresh_states_words` in 2-byte units.
clear_fresh_states_halves = clear_fresh_states_words.over("clear_fresh_states_halves", recurrent="uint16", conv="uint16")


@kernel(edits=array("int32"), state_slots=array("int32"), state_index=array("int32"))
def permute_state_rows(item, edits, state_slots, state_index):
    """Move rows along a cycle, as `permute_rows` does; states stay where they are.

    Item: a cycle r0 <- r1 <- ... <- r0 of `edits`.
    """
    first = np.int64(edits[item])
    last = np.int64(edits[item + 1]) - 1
    head, tail = edits[first], edits[last]
    slot, place = state_slots[head], state_index[head]
    for i in range(first, last):
        state_slots[edits[i]] = state_slots[edits[i + 1]]
        state_index[edits[i]] = state_index[edits[i + 1]]
    state_slots[tail] = slot
    state_index[tail] = place


@routine
def copy_part_of_state(target, source, to, at, first, part_size, size, lane, lanes):
    """Copy one part of a state that begins at `at` in `source` and at `to` in `target`; lanes share it."""
    t, s = np.uint64(to + first), np.uint64(at + first)
    step, stop = np.uint64(lanes), np.uint64(min(part_size, size - first))
    j = np.uint64(lane)
    while j + step + step + step < stop:  # all loads before the stores: their latencies overlap
        k, m, n = j + step, j + step + step, j + step + step + step
        a, b, c, d = source[s + j], source[s + k], source[s + m], source[s + n]
        target[t + j] = a
        target[t + k] = b
        target[t + m] = c
        target[t + n] = d
        j = n + step
    while j < stop:
        target[t + j] = source[s + j]
        j += step


@routine
def copy_slot(item, lane, lanes, target, source, pairs, from_slot, to_slot, layers, parts, part_size, size, strides, limits):
    """Copy one part of one slot; a pair whose source or target is no slot is left out."""
    target_layer, source_layer = strides
    num_targets, num_sources = limits
    plane = np.int64(item) // parts
    first = (np.int64(item) - plane * parts) * part_size
    pair = plane // layers
    layer = plane - pair * layers
    if pairs.shape[0] > 0:
        from_slot, to_slot = np.int64(pairs[pair, 0]), np.int64(pairs[pair, 1])
    if from_slot >= 0 and from_slot < num_sources and to_slot >= 0 and to_slot < num_targets:
        to = layer * target_layer + to_slot * size
        at = layer * source_layer + from_slot * size
        copy_part_of_state(target, source, to, at, first, part_size, size, lane, lanes)


@kernel(
    block_form=True,
    target=array("uint64"),
    source=array("uint64"),
    pairs=array("int32", 2),
    from_slot=scalar(),
    to_slot=scalar(),
    layers=scalar(),
    parts=scalar(),
    part_size=scalar(),
    size=scalar(),
    target_layer=scalar(),
    source_layer=scalar(),
    num_targets=scalar(),
    num_sources=scalar(),
)
def copy_states_words(
    item,
    lane,
    lanes,
    target,
    source,
    pairs,
    from_slot,
    to_slot,
    layers,
    parts,
    part_size,
    size,
    target_layer,
    source_layer,
    num_targets,
    num_sources,
):
    """Copy slot ``pairs[i, 0]`` of `source` to slot ``pairs[i, 1]`` of `target` in all layers; sizes in words.

    Without pairs, `from_slot` to `to_slot`. Item: a part of a slot, by pair and layer; lanes share its words.
    """
    strides = (target_layer, source_layer)
    limits = (num_targets, num_sources)
    copy_slot(item, lane, lanes, target, source, pairs, from_slot, to_slot, layers, parts, part_size, size, strides, limits)


#: Copy states that are not of whole words: `copy_states_words` in 2-byte units.
copy_states_halves = copy_states_words.over("copy_states_halves", target="uint16", source="uint16")


@routine
def permute_part_of_slots(slab, edits, head, tail, base, size, first, stop, lane, lanes):
    """Move one part of some slots of a layer along a cycle: each gets that of the next, the last one that of the first."""
    step = np.uint64(lanes)
    j = np.uint64(first) + np.uint64(lane)
    while j < np.uint64(stop):
        kept = slab[np.uint64(base + np.int64(edits[head]) * size) + j]
        for i in range(head, tail):
            source = np.uint64(base + np.int64(edits[i + 1]) * size) + j
            slab[np.uint64(base + np.int64(edits[i]) * size) + j] = slab[source]
        slab[np.uint64(base + np.int64(edits[tail]) * size) + j] = kept
        j += step


@kernel(
    block_form=True,
    recurrent=array("uint64"),
    conv=array("uint64"),
    edits=array("int32"),
    state_slots=array("int32"),
    state_index=array("int32"),
    **_SLABS,
)
def permute_states_words(
    item,
    lane,
    lanes,
    recurrent,
    conv,
    edits,
    state_slots,
    state_index,
    layers,
    part_size,
    recurrent_size,
    recurrent_layer,
    recurrent_parts,
    conv_size,
    conv_layer,
    parts,
):
    """Move states along cycles of slots s0 <- s1 <- ... <- s0 of `edits`, in all layers; sizes in words.

    `state_slots` and, of rows in use, `state_index` get the rows' own numbers. Item: a part, by cycle and layer. Bytes: the
    states of these slots are read and written once.
    """
    each = layers * parts
    cycle = np.int64(item) // each
    part = np.int64(item) - cycle * each
    head = np.int64(edits[cycle])
    tail = np.int64(edits[cycle + 1]) - 1
    if part == 0 and lane == 0:
        for i in range(head, tail + 1):
            row = np.int64(edits[i])
            state_slots[row] = row
            if state_index[row] >= 0:
                state_index[row] = row
    sizes = (part_size, recurrent_size, recurrent_layer, recurrent_parts, conv_size, conv_layer, parts)
    is_recurrent, base, size, first, stop = part_place(part, sizes)
    if is_recurrent:
        permute_part_of_slots(recurrent, edits, head, tail, base, size, first, stop, lane, lanes)
    else:
        permute_part_of_slots(conv, edits, head, tail, base, size, first, stop, lane, lanes)


#: Move states that are not of whole words: `permute_states_words` in 2-byte units.
permute_states_halves = permute_states_words.over("permute_states_halves", recurrent="uint16", conv="uint16")
