"""One upload to memory that the host can reach: windows are written where they belong.

Knows which window is next. Does not know threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from numba_kv.weights.blocks import host_bytes

if TYPE_CHECKING:
    from numba_kv.device import Memory
    from numba_kv.weights.windows import Windows

__all__ = ["DirectRun"]


class DirectRun:
    """As `StagedRun`, without blocks and copies.

    Parameters
    ----------
    windows : Windows
        What is uploaded.
    memory : Memory
        The destination, to which nothing else writes.
    num_readers : int
        At most.
    """

    def __init__(self, windows: Windows, memory: Memory, num_readers: int) -> None:
        self._windows, self._memory = windows, memory
        self._left = deque(range(windows.count))
        self._done = [0] * min(num_readers, windows.count)  # bytes of each reader

    @property
    def done_nbytes(self) -> int:
        """Bytes that are written."""
        return sum(self._done)

    def close(self) -> None:
        """Do nothing: it has nothing of its own."""

    def stop(self) -> None:
        """Let every reader return after the window that it is at."""
        self._left.clear()

    def start(self) -> None:
        """Do nothing: `parts` are all that there is."""

    def go_on(self) -> bool:
        """Return True, as there."""
        return True

    @property
    def parts(self) -> list[Callable[[], None]]:
        """What is to run, each on a thread of its own: a part for each reader.

        They raise
        ----------
        WeightError
            If a source fails.
        """
        return [partial(self._write, reader) for reader in range(len(self._done))]

    def _write(self, reader: int) -> None:
        """Write windows until there are none."""
        out = host_bytes(self._memory)
        while True:
            try:
                begin, end = self._windows.range(self._left.popleft())
            except IndexError:  # there is none left
                return
            self._windows.fill(out[begin:end], begin)
            self._done[reader] += end - begin
