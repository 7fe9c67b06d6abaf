"""The host's part of a composition change, compiled: it is done while a model waits.

Plain loops over the ledger's arrays; nothing here runs on a device, and nothing is decided but which rows are the lowest
free ones. Lines of `numbers`::

    0           1              2             3, 4                       5           6       7 ...
    generation  prompt tokens  leased pages  shortest, longest length   high water  floor   first mapped page of each group

An empty row has 0 of all but the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from numba_kv.kernels.layout import (
    CLEAR_TO,
    FLAGS,
    HIGH_TOKENS,
    LIVE,
    LOW_TOKENS,
    RECORD_WORDS,
    RESET,
    RINGS_AT,
    ROW,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["lowest_free", "note_change", "write_change", "write_records"]

_GENERATION, _PROMPT, _LEASED, _LOW, _HIGH, _, _FLOOR = range(7)

_compiled: Any = numba.njit(cache=True, _nrt=False)


@_compiled
def lowest_free(
    request: NDArray[np.int64], leaving: int, joining: int, live: NDArray[np.bool_], changes: NDArray[np.int8]
) -> int:
    """Choose rows for new sequences and mark what changes.

    `request` int64: the rows that leave, a prompt length for each sequence that joins, and behind them, filled here, the
    rows in which those start: the lowest that are free once the others have left. `changes` [B] becomes 1 for rows that are
    then empty, 2 for rows in which a sequence starts, 0 elsewhere. Returns how many rows change.
    """
    for row in range(len(live)):
        changes[row] = 0
    for i in range(leaving):
        changes[request[i]] = 1
    total = leaving + joining
    row = 0
    for i in range(joining):
        while live[row] and changes[row] != 1:
            row += 1
        request[leaving + joining + i] = row
        row += 1
    for i in range(joining):
        row = request[leaving + joining + i]
        total -= changes[row]  # left and taken again
        changes[row] = 2
    return total


@_compiled
def write_records(
    words: NDArray[np.int32],
    changes: NDArray[np.int8],
    records: int,
    numbers: NDArray[np.int64],
    rings: NDArray[np.int32],
) -> int:
    """Write the `records` records of the rows that change, and the ring pages of those that start, into `words`.

    `numbers` int64 [n, B]: see above. `rings` int32 [B, ring pages of all window groups]. Returns the words written.
    """
    at = records * RECORD_WORDS
    record = 0
    for row in range(len(changes)):
        if changes[row] == 0:
            continue
        for word in range(RECORD_WORDS):
            words[record + word] = 0
        words[record + ROW] = row
        words[record + FLAGS] = RESET
        words[record + CLEAR_TO] = numbers[_LEASED, row]
        words[record + LOW_TOKENS] = numbers[_LOW, row]
        words[record + HIGH_TOKENS] = numbers[_HIGH, row]
        if changes[row] == 2:
            words[record + FLAGS] = RESET | LIVE
            words[record + RINGS_AT] = at
            for i in range(rings.shape[1]):
                words[at + i] = rings[row, i]
            at += rings.shape[1]
        record += RECORD_WORDS
    return at


@_compiled
def write_change(
    request: NDArray[np.int64],
    leaving: int,
    joining: int,
    words: NDArray[np.int32],
    live: NDArray[np.bool_],
    changes: NDArray[np.int8],
    numbers: NDArray[np.int64],
    rings: NDArray[np.int32],
) -> tuple[int, int]:
    """Do `lowest_free` and `write_records` in one call; return records and words."""
    records = lowest_free(request, leaving, joining, live, changes)
    return records, write_records(words, changes, records, numbers, rings)


@_compiled
def note_change(
    request: NDArray[np.int64],
    leaving: int,
    joining: int,
    admitted: int,
    live: NDArray[np.bool_],
    numbers: NDArray[np.int64],
    pages: NDArray[np.int32],
    stack: NDArray[np.int32],
    top: int,
    shares: NDArray[np.int32],
    last: NDArray[np.int64],
    layout: NDArray[np.int64],
    first_window: int,
) -> tuple[int, int]:
    """Empty the rows that leave, put their pages on the free stack, and start the new sequences.

    A page that other rows hold too (`shares` int32 [pages]: how many) stays off the stack and has one holder less; only a row
    with a floor has such pages.
    `request` as `lowest_free` left it. `numbers` int64 [n, B]: see above; from line `first_window` on, the first mapped page
    of each window group. `last` [B] becomes 0 and `layout` [B] -1 in rows that change. Returns the new top of the stack, and
    the pages that the windows of the rows that left had rotated out.
    """
    rotated = 0
    for i in range(leaving):
        row = request[i]
        held = numbers[_LEASED, row]
        if numbers[_FLOOR, row] == 0:  # nobody reads with it
            for page in range(np.uint64(held)):
                stack[np.uint64(top) + page] = pages[np.uint64(row), page]
            top += held
        else:
            for page in range(held):
                page_id = pages[row, page]
                if shares[page_id] == 0:
                    stack[top] = page_id
                    top += 1
                else:
                    shares[page_id] -= 1
        for n in range(first_window, numbers.shape[0]):
            rotated += numbers[n, row]
        live[row] = False
        last[row] = 0
        layout[row] = -1
        for n in range(_PROMPT, numbers.shape[0]):
            numbers[n, row] = 0
    for i in range(joining):
        row = request[leaving + joining + i]
        live[row] = True
        numbers[_GENERATION, row] = admitted + 1 + i
        numbers[_PROMPT, row] = request[leaving + i]
        last[row] = 0
        layout[row] = -1
    return top, rotated
