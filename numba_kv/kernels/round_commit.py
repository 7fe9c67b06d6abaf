"""The end of a speculative round: which tokens of a verification step stay, and the lengths of base and draft.

`judge` decides about a row, once for everything that a commit changes. With n the row's length before the step::

    base     | 0 .. n | t0 t1 .. tV |        becomes   | 0 .. n | what is accepted |
    draft    | 0 .. n | proposals   |        becomes   | 0 .. n |, and as many proposals as are accepted where they are kept

A row is taken or refused as a whole, in both models: a refused one keeps its tokens, so that it can be committed again. Of a
row that was not verified the draft loses its proposals, and nothing else happens.
"""

from __future__ import annotations

import numpy as np

from numba_kv.kernels.advance import pages_of, remap, rewind_refusal
from numba_kv.kernels.block_memory import lanes_wait
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.layout import BAD_COUNT, BAD_PATH, BLOCK_AT, NUM_PAGES, SHIFT, TABLE_AT, WIDTH, WINDOW
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array, scalar

__all__ = ["commit_rounds", "resolve_rounds"]


@routine
def path_length(row, length, nodes, parents, appended):
    """Return the nodes of an accepted path, -1 left out, or -1 if it is none of the step's tree."""
    count = np.int64(0)
    before = np.int64(-1)
    for i in range(length):
        node = np.int64(nodes[row, i])
        if node == -1:
            continue
        if node <= before or node >= appended:
            return np.int64(-1)
        if parents.shape[1] > 0 and (node >= parents.shape[1] or np.int64(parents[row, node]) != before):
            return np.int64(-1)
        before = node
        count += 1
    return count


@routine
def judge(row, accepted, nodes, parents, keeps, base, draft, has_draft):
    """Return why a row is refused (0: it is not), tokens that stay, the base's length then, and the draft's.

    `base` and `draft` are lengths, high_water, appended, floors and groups of each.
    """
    lengths, high_water, appended, floors, groups = base
    length = np.int64(lengths[0, row])
    last = np.int64(appended[0, row])
    wanted = np.int64(accepted[row])
    most = last
    if nodes.shape[1] > 0:
        most = np.int64(nodes.shape[1])
    refusal = 0
    kept = wanted
    if last == 0:  # the row was not verified: nothing that is said of it counts
        kept = np.int64(0)
    elif wanted < 0 or wanted > most:
        refusal = BAD_COUNT
        kept = np.int64(0)
    elif nodes.shape[1] > 0:
        kept = path_length(row, wanted, nodes, parents, last)
        if kept < 0:
            refusal = BAD_PATH
    start = length - last + kept
    if refusal == 0 and start < length:
        refusal = rewind_refusal(start, np.int64(high_water[0, row]), np.int64(floors[row]), groups)
    draft_start = np.int64(0)
    if has_draft != 0:
        draft_lengths, draft_high_water, _, draft_floors, draft_groups = draft
        drafted = np.int64(draft_lengths[0, row])
        draft_start = length - last
        if keeps != 0:
            draft_start += kept
        draft_start = min(drafted, draft_start)
        if refusal == 0 and draft_start < drafted:
            peak, floor = np.int64(draft_high_water[0, row]), np.int64(draft_floors[row])
            refusal = rewind_refusal(draft_start, peak, floor, draft_groups)
    return refusal, kept, start, draft_start


@kernel(
    accepted=array("int32"),
    nodes=array("int32", 2),
    parents=array("int32", 2),
    state_index=array("int32"),
    kept=array("int32"),
    path=array("int32", 2),
    slots=array("int32"),
    lengths=array("int32", 2),
    high_water=array("int32", 2),
    appended=array("int32", 2),
    floors=array("int32"),
    live=array("int32"),
    groups=array("int64", 2),
    draft_lengths=array("int32", 2),
    draft_high_water=array("int32", 2),
    draft_appended=array("int32", 2),
    draft_floors=array("int32"),
    draft_groups=array("int64", 2),
    keeps=scalar(),
    has_draft=scalar(),
)
def resolve_rounds(
    item, accepted, nodes, parents, state_index, kept, path, slots, lengths, high_water, appended, floors, live, groups,
    draft_lengths, draft_high_water, draft_appended, draft_floors, draft_groups, keeps, has_draft,
):  # fmt: skip
    """Write what moves of K and V and commits of states read of a row, as `commit_rounds` will decide about it.

    Item: a row. Writes: `kept`, tokens that stay; `path`, their places in the step in order, then -1; `slots`, where its states
    are. A row that is refused, not in use, or not part of the step has 0, -1 and -1.
    """
    row = np.int64(item)
    count = np.int64(0)
    slot = np.int64(-1)
    if live[row] != 0 and appended[0, row] > 0:
        base = (lengths, high_water, appended, floors, groups)
        draft = (draft_lengths, draft_high_water, draft_appended, draft_floors, draft_groups)
        refusal, stays, _, _ = judge(row, accepted, nodes, parents, keeps, base, draft, has_draft)
        if refusal == 0:
            count = stays
            slot = np.int64(state_index[row])
    kept[row] = count
    slots[row] = slot
    place = np.int64(0)
    i = np.int64(0)
    while place < count and i < nodes.shape[1]:
        if nodes[row, i] != -1:
            path[row, place] = nodes[row, i]
            place += 1
        i += 1
    while place < path.shape[1]:
        path[row, place] = -1
        place += 1


@routine
def shorten(g, row, start, lengths, high_water, appended, mapped_begin, groups, page_tables, block_tables):
    """Set a row's length in one window group back to `start`; pages below it that are mapped stay so."""
    length = np.int64(lengths[g, row])
    if start != length:
        if groups[g, WINDOW] > 0:
            shift = groups[g, SHIFT]
            width = groups[g, WIDTH]
            end = pages_of(start, shift)
            old_begin = np.int64(mapped_begin[g, row])
            begin = min(old_begin, end)
            k_row = groups[g, TABLE_AT] + row * 2 * width
            id_row = groups[g, BLOCK_AT] + row * width
            old_end = pages_of(length, shift)
            pages = groups[g, NUM_PAGES]
            remap(k_row, k_row + width, id_row, old_begin, old_end, begin, end, pages, page_tables, block_tables)
            mapped_begin[g, row] = begin
        lengths[g, row] = start
        if start == 0:  # nothing of the row is left: a fresh ring
            high_water[g, row] = 0
    appended[g, row] = 0


@kernel(
    block_form=True,
    accepted=array("int32"),
    nodes=array("int32", 2),
    parents=array("int32", 2),
    lengths=array("int32", 2),
    high_water=array("int32", 2),
    appended=array("int32", 2),
    mapped_begin=array("int32", 2),
    floors=array("int32"),
    live=array("int32"),
    status=array("int32"),
    groups=array("int64", 2),
    page_tables=array("int32"),
    block_tables=array("int32"),
    seq_lens=array("int32"),
    context_lens=array("int32"),
    draft_lengths=array("int32", 2),
    draft_high_water=array("int32", 2),
    draft_appended=array("int32", 2),
    draft_mapped_begin=array("int32", 2),
    draft_floors=array("int32"),
    draft_groups=array("int64", 2),
    draft_page_tables=array("int32"),
    draft_block_tables=array("int32"),
    draft_seq_lens=array("int32"),
    draft_context_lens=array("int32"),
    keeps=scalar(),
    has_draft=scalar(),
)
def commit_rounds(
    item, lane, lanes, accepted, nodes, parents,
    lengths, high_water, appended, mapped_begin, floors, live, status, groups, page_tables, block_tables, seq_lens,
    context_lens, draft_lengths, draft_high_water, draft_appended, draft_mapped_begin, draft_floors, draft_groups,
    draft_page_tables, draft_block_tables, draft_seq_lens, draft_context_lens, keeps, has_draft,
):  # fmt: skip
    """Take back what a row does not keep of its verification step, in base and draft; or say in its status why not.

    `nodes` has no columns for a linear step, `parents` none where the tree is not known. Item: a row; each lane does some of
    the window groups of both models, once all have decided.
    """
    row = np.int64(item)
    is_live = live[row] != 0
    base = (lengths, high_water, appended, floors, groups)
    draft = (draft_lengths, draft_high_water, draft_appended, draft_floors, draft_groups)
    # Of rows that are not in use too: all loads come at once, and their latency is what a commit costs.
    refusal, _, start, draft_start = judge(row, accepted, nodes, parents, keeps, base, draft, has_draft)
    lanes_wait()  # every lane has read what the others change
    if not is_live:
        return
    if refusal != 0:
        if lane == 0:
            status[row] = refusal
        return
    own = np.int64(groups.shape[0])
    total = own
    if has_draft != 0:
        total += np.int64(draft_groups.shape[0])
    g = np.int64(lane)
    while g < total:
        if g < own:
            shorten(g, row, start, lengths, high_water, appended, mapped_begin, groups, page_tables, block_tables)
        else:
            shorten(
                g - own, row, draft_start, draft_lengths, draft_high_water, draft_appended, draft_mapped_begin, draft_groups,
                draft_page_tables, draft_block_tables,
            )  # fmt: skip
        g += lanes
    if lane == 0:
        seq_lens[row] = start
        context_lens[row] = start
        if has_draft != 0:
            draft_seq_lens[row] = draft_start
            draft_context_lens[row] = draft_start
