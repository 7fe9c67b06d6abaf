"""The host's part of running ahead, compiled: pages that rows need, the records that map them, and the mirror after steps.

Plain loops over the ledger's arrays, as in `row_changes`, which says what the lines of `numbers` are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.kernels.host_code import compiled, part
from numba_kv.kernels.layout import CHUNKED, CLEAR_FROM, CLEAR_TO, COUNT, FIRST, IDS_AT, RECORD_WORDS, ROW, SLIDING

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["find_needs", "least_steps", "note_even_steps", "note_growth", "write_growth"]

_LEASED, _LOW, _HIGH, _PEAK, _FIRST_BEGIN = 2, 3, 4, 5, 7

_ROW, _ROWS, _IDS = "int64[::1]", "int64[:, ::1]", "int32[::1]"


@compiled(f"UniTuple(int64, 3)({_ROW}, boolean[::1], {_ROWS}, int64, int64, int64, int64, {_ROW})")
def find_needs(
    tokens: NDArray[np.int64],
    live: NDArray[np.bool_],
    numbers: NDArray[np.int64],
    page: int,
    row_pages: int,
    ahead: int,
    free: int,
    targets: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Decide how many pages of the full group each row should hold, so that it can append its `tokens`.

    When any row is short, every live row is brought `ahead` pages beyond its need, so that the next block is far away; if
    fewer than that are `free`, rows get just what they need.

    Returns
    -------
    missing, grown, rows : int
        Pages without which `tokens` cannot be appended, and, if so many are free, pages that rows get and rows that get some;
        `targets` int64 [B] is then what each row holds afterwards.
    """
    missing = 0
    for row in range(len(tokens)):
        if tokens[row] > 0:
            missing += max(0, (numbers[_HIGH, row] + tokens[row] + page - 1) // page - numbers[_LEASED, row])
    if missing == 0 or missing > free:
        return missing, 0, 0
    grown, rows = 0, 0
    for row in range(len(tokens)):
        held = numbers[_LEASED, row]
        targets[row] = held
        if live[row]:
            need = (numbers[_HIGH, row] + tokens[row] + page - 1) // page
            targets[row] = max(held, min(need + ahead, row_pages))
        grown += targets[row] - held
        rows += targets[row] > held
    if grown > free:
        grown, rows = missing, 0
        for row in range(len(tokens)):
            held = numbers[_LEASED, row]
            targets[row] = held
            if tokens[row] > 0:
                targets[row] = max(held, (numbers[_HIGH, row] + tokens[row] + page - 1) // page)
            rows += targets[row] > held
    return missing, grown, rows


@compiled(f"int64({_IDS}, int64, {_ROW}, {_ROWS}, {_IDS}, int64)")
def write_growth(
    words: NDArray[np.int32],
    rows: int,
    targets: NDArray[np.int64],
    numbers: NDArray[np.int64],
    stack: NDArray[np.int32],
    top: int,
) -> int:
    """Write the records of the `rows` rows that grow to their targets, with ids from the top of the free stack on.

    Returns the words written.
    """
    record, at = 0, rows * RECORD_WORDS
    for row in range(len(targets)):
        held = numbers[_LEASED, row]
        more = targets[row] - held
        if more > 0:
            for word in range(RECORD_WORDS):
                words[record + word] = 0
            words[record + ROW] = row
            words[record + FIRST] = held
            words[record + COUNT] = more
            words[record + IDS_AT] = at
            words[record + CLEAR_FROM] = words[record + CLEAR_TO] = targets[row]
            for _ in range(more):
                top -= 1
                words[at] = stack[top]
                at += 1
            record += RECORD_WORDS
    return at


@compiled(f"void({_ROW}, {_ROWS}, int32[:, ::1], {_IDS}, int64)")
def note_growth(
    targets: NDArray[np.int64], numbers: NDArray[np.int64], pages: NDArray[np.int32], stack: NDArray[np.int32], top: int
) -> None:
    """Give rows the pages that `write_growth` wrote; the stack is as it was then."""
    for row in range(len(targets)):
        for page in range(numbers[_LEASED, row], targets[row]):
            top -= 1
            pages[row, page] = stack[top]
        numbers[_LEASED, row] = targets[row]


@part
def _steps_left(row: int, count: int, numbers: NDArray[np.int64], capacity: int, page: int) -> int:
    """Return the steps of `count` tokens that a row can take without a new page, at its longest; `page` 0: no pages."""
    limit = np.int64(capacity)
    if page > 0:
        limit = min(limit, numbers[_LEASED, row] * page)
    left: int = max(np.int64(0), limit - numbers[_HIGH, row]) // count
    return left


@compiled(f"int64({_ROW}, {_ROWS}, int64, int64)")
def least_steps(counts: NDArray[np.int64], numbers: NDArray[np.int64], capacity: int, page: int) -> int:
    """Return the steps of `counts` tokens that every row with a count can take without a new page; `page` 0: no pages."""
    least = np.int64(capacity)
    for row in range(len(counts)):
        if counts[row] > 0:
            least = min(least, _steps_left(row, counts[row], numbers, capacity, page))
    found: int = least
    return found


@compiled(f"void({_ROWS}, {_ROW}, int64, int64, int64, {_ROWS})")
def note_even_steps(
    numbers: NDArray[np.int64], counts: NDArray[np.int64], steps: int, capacity: int, page: int, groups: NDArray[np.int64]
) -> None:
    """Append `counts` tokens `steps` times to rows whose length is known; a row that cannot take one stops there.

    `groups` int64 [G, 4]: kind of window (`layout`), its tokens, tokens of a page, pages of a ring.
    """
    for row in range(len(counts)):
        count = counts[row]
        if count == 0:
            continue
        taken = min(steps, _steps_left(row, count, numbers, capacity, page))
        if taken == 0:
            continue
        numbers[_LOW, row] += count * taken
        numbers[_HIGH, row] += count * taken
        numbers[_PEAK, row] = max(numbers[_PEAK, row], numbers[_HIGH, row])
        end = numbers[_LOW, row]
        start = end - count
        for g in range(len(groups)):
            window, tokens, ring = groups[g, 1], groups[g, 2], groups[g, 3]
            if groups[g, 0] == SLIDING:
                low = max(np.int64(0), start - window + 1)
            elif groups[g, 0] == CHUNKED:
                low = start // window * window
            else:
                continue
            numbers[_FIRST_BEGIN + g, row] = max(low // tokens, (end + tokens - 1) // tokens - ring)
