"""The host's part of a composition change, compiled: it is done while a model waits.

Plain loops over the ledger's arrays; nothing here runs on a device. `change_rows` decides nothing but which rows are the
lowest free ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba

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
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["lowest_free", "note_change", "write_resets"]

_compiled: Any = numba.njit(cache=True, _nrt=False)


@_compiled
def lowest_free(
    live: NDArray[np.bool_], changes: NDArray[np.int8], leaving: NDArray[np.int64], joining: NDArray[np.int64]
) -> int:
    """Choose rows for new sequences and mark what changes.

    Fills `changes` [B]: 1 for rows that become empty, 2 for rows in which a sequence starts, 0 elsewhere; and `joining` with
    the lowest rows that are free once `leaving` are. Returns how many rows change.
    """
    for row in range(len(live)):
        changes[row] = 0
    for i in range(len(leaving)):
        changes[leaving[i]] = 1
    row = 0
    for i in range(len(joining)):
        while live[row] and changes[row] != 1:
            row += 1
        joining[i] = row
        row += 1
    for i in range(len(joining)):
        changes[joining[i]] = 2
    total = 0
    for row in range(len(live)):
        total += changes[row] != 0
    return total


@_compiled
def write_resets(
    words: NDArray[np.int32],
    changes: NDArray[np.int8],
    records: int,
    leased: NDArray[np.int64],
    lo: NDArray[np.int64],
    hi: NDArray[np.int64],
    rings: NDArray[np.int32],
) -> int:
    """Write the `records` records of the rows that change, and the ring pages of those that start, into `words`.

    Returns the words written. `rings` int32 [B, ring pages of all window groups].
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
        words[record + CLEAR_TO] = leased[row]
        words[record + LOW_TOKENS] = lo[row]
        words[record + HIGH_TOKENS] = hi[row]
        if changes[row] == 2:
            words[record + FLAGS] = RESET | LIVE
            words[record + RINGS_AT] = at
            for i in range(rings.shape[1]):
                words[at + i] = rings[row, i]
            at += rings.shape[1]
        record += RECORD_WORDS
    return at


@_compiled
def note_change(
    leaving: NDArray[np.int64],
    joining: NDArray[np.int64],
    prompts: NDArray[np.int64],
    admitted: int,
    live: NDArray[np.bool_],
    numbers: NDArray[np.int64],
    pages: NDArray[np.int32],
    stack: NDArray[np.int32],
    top: int,
    last: NDArray[np.int64],
    layout: NDArray[np.int64],
    first_window: int,
) -> tuple[int, int]:
    """Empty the rows that leave, put their pages on the free stack, and start the new sequences.

    `numbers` int64 [n, B]: generation, prompt, leased pages, then all else that an empty row has 0 of; from line
    `first_window` on, the first mapped page of each window group. `last` [B] becomes 0 and `layout` [B] -1 in rows that
    change. Returns the new top of the stack, and the pages that the windows of the rows that left had rotated out.
    """
    rotated = 0
    for i in range(len(leaving)):
        row = leaving[i]
        for page in range(numbers[2, row]):
            stack[top] = pages[row, page]
            top += 1
        for n in range(first_window, numbers.shape[0]):
            rotated += numbers[n, row]
        live[row] = False
        last[row] = 0
        layout[row] = -1
        for n in range(1, numbers.shape[0]):
            numbers[n, row] = 0
    for i in range(len(joining)):
        row = joining[i]
        live[row] = True
        numbers[0, row] = admitted + 1 + i
        numbers[1, row] = prompts[i]
        last[row] = 0
        layout[row] = -1
    return top, rotated
