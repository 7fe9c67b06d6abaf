"""The same bookkeeping as plain Python would do it, to be measured beside ours.

Page lists a request, NumPy where one would reach for it, one upload of the step's arrays. Not used by the library.
"""

from __future__ import annotations

import numpy as np

from numba_kv.geometry import ceil_div

__all__ = ["PlainManager"]


class PlainManager:
    """Full and window pages of decoding requests, in Python lists; the step's arrays in one NumPy block."""

    def __init__(self, lengths: list[int], capacity: int, windows: list[int], page_tokens: int) -> None:
        rows, groups = len(lengths), 1 + len(windows)
        self.page = page_tokens
        self.windows = windows
        self.lengths = list(lengths)
        width = ceil_div(capacity, page_tokens)
        self.free = [list(range(rows * width, 0, -1)) for _ in range(groups)]
        self.table = np.full((groups, rows, width), -1, np.int32)
        self.pages: list[list[dict[int, int]]] = []
        for g in range(groups):
            held = []
            for row, length in enumerate(lengths):
                first = 0 if g == 0 else max(0, length - windows[g - 1]) // page_tokens
                mine = {page: self.free[g].pop() for page in range(first, ceil_div(length, page_tokens))}
                held.append(mine)
                self.table[g, row, list(mine)] = list(mine.values())
            self.pages.append(held)
        self.slots = np.zeros((groups, rows), np.int64)

    def step(self) -> np.ndarray:
        """Append one token to every row; return the block that would be uploaded."""
        page, table = self.page, self.table
        for row, length in enumerate(self.lengths):
            if length % page == 0:
                logical = length // page
                for g, held in enumerate(self.pages):
                    held[row][logical] = table[g, row, logical] = self.free[g].pop()
            for g, window in enumerate(self.windows, 1):
                low = length + 1 - window
                if low > 0 and low % page == 0:
                    gone = low // page - 1
                    page_id = self.pages[g][row].pop(gone, None)
                    if page_id is not None:
                        self.free[g].append(page_id)
                        table[g, row, gone] = -1
            self.lengths[row] = length + 1
        positions = np.array(self.lengths) - 1
        rows = np.arange(len(positions))
        for g in range(len(self.pages)):
            self.slots[g] = table[g, rows, positions // page] * page + positions % page
        return np.concatenate([self.slots.ravel(), positions, positions + 1])
