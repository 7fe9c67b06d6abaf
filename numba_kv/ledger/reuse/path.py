"""Path: the kept blocks that a sequence begins with, and what is kept of the block behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.ledger.reuse.run import Run, Tail

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Path", "Place", "entry"]

#: A block of a run, or a tail (whose number does not matter).
Place = tuple[Run | Tail, int]


class Path:
    """Where a walk through the tree ended.

    Parameters
    ----------
    root : Run, optional
        Of the sequence's identity; None: nothing is kept for it.

    Attributes
    ----------
    segments : list of (Run, int)
        Runs from the root down, and how many of their first blocks equal the sequence's.
    blocks : int
        Blocks of all segments.
    partial, partial_tokens : Place or None, int
        What has the most first tokens in common with the block behind, and how many.
    has_siblings : bool
        Whether anything else is kept behind the last block.
    """

    __slots__ = ("blocks", "has_siblings", "partial", "partial_tokens", "root", "segments")

    def __init__(self, root: Run | None = None) -> None:
        self.root = root
        self.segments: list[tuple[Run, int]] = []
        self.blocks = 0
        self.partial: Place | None = None
        self.partial_tokens = 0
        self.has_siblings = False

    @property
    def end(self) -> tuple[Run, int]:
        """Run and blocks of it behind which the walk ended."""
        if self.segments:
            return self.segments[-1]
        if self.root is None:
            raise LookupError("the path has no root")
        return self.root, 0

    @property
    def name(self) -> bytes | None:
        """Name of the last block; None if there is none or blocks have no names."""
        run, size = self.segments[-1] if self.segments else (None, 0)
        return run.names[size - 1] if run is not None and run.names else None

    def line(self, line: int, start: int, stop: int) -> NDArray[np.int32]:
        """Return the entries of a line for the blocks [start, stop) of the path, int32 [stop - start]."""
        if len(self.segments) == 1:  # which begins with block 0
            whole: NDArray[np.int32] = self.segments[0][0].lines[line, start:stop].copy()
            return whole
        parts = []
        for run, size in reversed(self.segments):
            low, high = max(start, run.start) - run.start, min(stop - run.start, size)
            if low < high:
                parts.append(run.lines[line, low:high])
            if run.start <= start:
                break
        found: NDArray[np.int32] = np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)
        return found

    def place(self, block: int) -> Place:
        """Return where a block of the path is, or what is kept of the block behind it."""
        if block >= self.blocks:
            if self.partial is None or block > self.blocks:
                raise LookupError(f"block {block} is not on a path of {self.blocks} blocks")
            return self.partial
        for run, _ in reversed(self.segments):
            if run.start <= block:
                return run, block - run.start
        raise LookupError(f"block {block} is not on the path")


def entry(place: Place, line: int) -> int:
    """Return the entry of a line at a place."""
    node, block = place
    return int(node.lines[line] if isinstance(node, Tail) else node.lines[line, block])
