"""Recency: when the blocks of a run were last used, and how dear they are.

A use touches a block and all before it, so rank never rises towards the end and a few steps say it all::

    block   0 ........ 4 ........ 9 ..... 20
    rank      (5, 31)    (0, 31)    (0, 7)        entries, the end first: (20, 0, 7) (9, 0, 31) (4, 5, 31)
"""

from __future__ import annotations

from collections import deque

__all__ = ["Rank", "Recency"]

#: (priority, time of last use); the smallest goes first.
Rank = tuple[int, int]


class Recency:
    """Ranks of the blocks of one run. Cost of each call: amortised O(1), times the number of priorities in use."""

    __slots__ = ("_steps",)

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, int]] = deque()  # (end, priority, time), the last blocks first

    def touch(self, end: int, priority: int, now: int) -> None:
        """Note that the blocks [0, end) are used now, by somebody to whom they are worth `priority`."""
        steps = self._steps
        if len(steps) == 1 and steps[0][0] <= end and steps[0][1] <= priority:
            steps[0] = (end, priority, now)  # as nearly always
            return
        dearer: list[tuple[int, int]] = []
        while steps and steps[-1][0] <= end:
            stop, worth, _ = steps.pop()
            dearer.append((stop, worth))
        if steps:
            priority = max(priority, steps[-1][1])
        dearer = [step for step in dearer if step[1] > priority]
        if not dearer or dearer[-1][0] != end:
            steps.append((end, priority, now))
        worth_before = None
        for stop, worth in reversed(dearer):
            if worth != worth_before:
                steps.append((stop, worth, now))
                worth_before = worth

    def cut(self, end: int) -> None:
        """Forget the blocks from `end` on."""
        steps = self._steps
        while len(steps) > 1 and steps[1][0] >= end:
            steps.popleft()
        if steps:
            if end:
                steps[0] = (min(end, steps[0][0]), *steps[0][1:])
            else:
                steps.clear()

    def last(self, end: int) -> tuple[Rank, int]:
        """Return the rank of block ``end - 1``, and the first block of those before it that have the same."""
        steps = self._steps
        for i, (_, priority, time) in enumerate(steps):
            begin = steps[i + 1][0] if i + 1 < len(steps) else 0
            if begin < end:
                return (priority, time), begin
        return (0, 0), 0

    def rank(self, block: int) -> Rank:
        """Return the rank of one block."""
        return self.last(block + 1)[0]
