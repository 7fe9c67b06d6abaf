"""Row permutations: which row moves where when a batch is compacted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["cycles_of", "fill_holes"]


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
