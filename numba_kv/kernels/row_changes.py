"""The host's part of a composition change, compiled: it is done while a model waits.

Plain loops over the ledger's arrays; nothing here runs on a device, and nothing is decided but which rows are the lowest
free ones. Lines of `numbers`::

    0           1              2             3, 4                       5           6       7 ...
    generation  prompt tokens  leased pages  shortest, longest length   high water  floor   first mapped page of each group

An empty row has 0 of all but the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.kernels.host_code import compiled, part
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
from numba_kv.kernels.numba_targets import array_from_address

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RowArrays", "lowest_free", "note_change", "note_change_at", "write_change", "write_change_at", "write_records"]

_GENERATION, _PROMPT, _LEASED, _LOW, _HIGH, _, _FLOOR = range(7)

@part
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


@part
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


@part
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


@part
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


class RowArrays:
    """Where the arrays of a batch's rows are: a compiled call that is given each of them looks at them for microseconds.

    Parameters
    ----------
    request, live, changes, numbers, rings, pages, stack, shares, last, layout
        As `write_change` and `note_change` take them; dense. They stay where they are as long as this lives, which keeps them.

    Attributes
    ----------
    address : int
        Of the words that `write_change_at` and `note_change_at` read.
    """

    def __init__(
        self,
        *,
        request: NDArray[np.int64],
        live: NDArray[np.bool_],
        changes: NDArray[np.int8],
        numbers: NDArray[np.int64],
        rings: NDArray[np.int32],
        pages: NDArray[np.int32],
        stack: NDArray[np.int32],
        shares: NDArray[np.int32],
        last: NDArray[np.int64],
        layout: NDArray[np.int64],
    ) -> None:
        self._arrays = (request, live, changes, numbers, rings, pages, stack, shares, last, layout)
        sizes = (len(live), len(numbers), rings.shape[1], pages.shape[1], len(stack), len(request))
        self._words = np.array([*(array.ctypes.data for array in self._arrays), *sizes], np.int64)
        self.address: int = self._words.ctypes.data


_array_of_int64 = array_from_address("int64", 1, False)
_array_of_int32 = array_from_address("int32", 1, False)
_array_of_int8 = array_from_address("int8", 1, False)
_array_of_bool = array_from_address("boolean", 1, False)
_lines_of_int64 = array_from_address("int64", 2, False)
_lines_of_int32 = array_from_address("int32", 2, False)
_NUM_WORDS = 16


@compiled("UniTuple(int64, 2)(int64, int64, int64, int64, int64)")
def write_change_at(arrays, words, num_words, leaving, joining):
    """Do `write_change` with `RowArrays` at an address, into `num_words` words at another; return records and words."""
    at = _array_of_int64(arrays, (_NUM_WORDS,))
    rows = at[10]
    return write_change(
        _array_of_int64(at[0], (at[15],)),
        leaving,
        joining,
        _array_of_int32(words, (num_words,)),
        _array_of_bool(at[1], (rows,)),
        _array_of_int8(at[2], (rows,)),
        _lines_of_int64(at[3], (at[11], rows)),
        _lines_of_int32(at[4], (rows, at[12])),
    )


@compiled("UniTuple(int64, 2)(int64, int64, int64, int64, int64, int64)")
def note_change_at(arrays, leaving, joining, admitted, top, first_window):
    """Do `note_change` with `RowArrays` at an address."""
    at = _array_of_int64(arrays, (_NUM_WORDS,))
    rows = at[10]
    return note_change(
        _array_of_int64(at[0], (at[15],)),
        leaving,
        joining,
        admitted,
        _array_of_bool(at[1], (rows,)),
        _lines_of_int64(at[3], (at[11], rows)),
        _lines_of_int32(at[5], (rows, at[13])),
        _array_of_int32(at[6], (at[14],)),
        top,
        _array_of_int32(at[7], (at[14],)),
        _array_of_int64(at[8], (rows,)),
        _array_of_int64(at[9], (rows,)),
        first_window,
    )

