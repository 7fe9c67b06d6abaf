"""Columns of the arrays that host and kernels share: one place, so that both sides agree.

`groups` int64 [G, GROUP_COLUMNS]: one row a window group. `edits` int32: the block of a composition change::

    | record 0 | record 1 | ... | page ids of all records | counts [B] | cu_seqlens_q [B+1] |
"""

from __future__ import annotations

from enum import IntEnum

from numba_kv.plan import GROUP_COLUMNS, RECORD_WORDS

__all__ = ["GROUP_COLUMNS", "RECORD_WORDS", "Status"]

# columns of `groups`
SHIFT = 0  # log2 of page_tokens
KIND = 1
WINDOW = 2  # tokens of the window or chunk
RING = 3  # R
WIDTH = 4  # L
NUM_PAGES = 5  # N: V = K + N; N - 2 is the null page
TABLE_AT = 6  # first element of the group's page tables
BLOCK_AT = 7  # ... block tables
SLOT_AT = 8  # ... slot mapping
CARRY_AT = 9  # ... carry slots
CARRY_WIDTH = 10

# values of KIND
FULL = 0
SLIDING = 1
CHUNKED = 2
EMPTY = 3  # the full group of a model without full-attention layers

# words of a record (RECORD_WORDS of them)
ROW = 0
FLAGS = 1
FIRST = 2  # full group: first logical page that gets an id
COUNT = 3  # ... how many
IDS_AT = 4  # ... first word of the ids in `edits`
CLEAR_FROM = 5  # full group: logical pages that become unmapped, disjoint from those that get an id
CLEAR_TO = 6
RINGS_AT = 7  # first word of the ring pages of all window groups, one group after the other
LOW_TOKENS = 8  # the row's length lies in [LOW_TOKENS, HIGH_TOKENS]: bounds what a reset has to clear
HIGH_TOKENS = 9

# bits of FLAGS
RESET = 1  # length 0, nothing mapped
LIVE = 2  # with RESET: the row gets ring pages; without it, it is retired
FLOOR = 4  # the row's floor becomes LOW_TOKENS

# words of a record of `place_rows`; behind them the first mapped page of each group
PLACE_ROW = 0
PLACE_PARENT = 1  # row whose first full-group pages it shares, or -1
PLACE_SHARED = 2  # how many
PLACE_LAST = 3  # page id behind them, or -1
PLACE_LEASED = 4  # full-group pages that the row holds
PLACE_OLD_LENGTH = 5  # its length before
PLACE_LENGTH = 6
PLACE_HIGH_WATER = 7
PLACE_FLOOR = 8  # of the row, and of its parent
PLACE_WORDS = 9

# how `advance` reads `take_back`
NO_BACK = 0
TAKE_BACK = 1  # tokens to take back
LAST_TAKE_BACK = 2  # ... of the row's last step, at most all of it
ACCEPTED = 3  # tokens of the row's last step that stay


class Status(IntEnum):
    """Why the device refused a row's step: the row is as it was before. The word stays until `Batch.refusals` reads it."""

    OK = 0
    BAD_COUNT = 1
    OVER_CAPACITY = 2
    PAGE_MISSING = 3
    REWIND_TOO_FAR = 4
    BAD_PATH = 5


OK, BAD_COUNT, OVER_CAPACITY, PAGE_MISSING, REWIND_TOO_FAR, BAD_PATH = (int(s) for s in Status)
