"""Row permutations: which row moves where when a batch is compacted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["completed", "cycles_of", "fill_holes"]


def fill_holes(live: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return sources of rows such that the highest live rows move into the holes below them."""
    sources = np.arange(len(live))
    count = int(live.sum())
    holes = np.flatnonzero(~live[:count])
    movers = np.flatnonzero(live[count:]) + count
    if len(holes) != len(movers):
        raise InvariantError(f"{len(holes)} holes and {len(movers)} rows to fill them")
    sources[holes], sources[movers] = movers, holes
    return sources


def completed(sources: dict[int, int], rows: int) -> NDArray[np.int64]:
    """Return sources of all rows from those of some; the others stay where they are if they can."""
    order = np.arange(rows)
    order[list(sources)] = list(sources.values())
    taken = set(sources.values())
    open_rows = [row for row in range(rows) if row not in sources and row in taken]  # what they held is elsewhere
    order[open_rows] = [row for row in range(rows) if row in sources and row not in taken]
    return order


def cycles_of(sources: NDArray[np.int64]) -> list[list[int]]:
    """Return the cycles r0 <- r1 <- ... of a permutation, without the fixed rows."""
    seen, found = set(), []
    for row in range(len(sources)):
        cycle = []
        while row not in seen and sources[row] != row:
            seen.add(row)
            cycle.append(row)
            row = int(sources[row])
        if cycle:
            found.append(cycle)
    return found
