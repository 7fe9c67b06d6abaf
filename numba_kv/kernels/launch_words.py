"""A kernel launch as words for `DriverCalls`, and whether it may overlap the kernel before it.

A launch has a start of its own, of up to half a microsecond, in which nothing of it runs. Where the GPU can, blocks of a kernel
are started while the one before still runs, if that lets them; they wait, before they touch any memory, until it is done and
its stores are visible. So kernels see what they would see one after the other, and all other work sees them so, too.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.device.driver_functions import driver_version
from numba_kv.kernels.driver_calls import OwnWord

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GRID", "GRID_REST", "STREAM", "launch_words", "overlaps"]

#: Words of the call that differ from one time to the next: blocks, together with `GRID_REST`, and the stream.
GRID, STREAM = 5, 9
#: The grid's second extent, in the word of the first.
GRID_REST = 1 << 32
#: Compute capability from which on kernels wait for their predecessors themselves.
_OVERLAPS = (9, 0)
#: Version of the driver from which on a graph keeps such a launch.
_DRIVER = 12030
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


def overlaps(compute_capability: tuple[int, int]) -> bool:
    """Return whether kernels that are compiled for a GPU wait for their predecessors themselves."""
    return compute_capability >= _OVERLAPS


def launch_words(function: int, threads: int, parameters: int, compute_capability: tuple[int, int]) -> tuple[Any, ...]:
    """Return a launch of `function` as a call for `DriverCalls`.

    Parameters
    ----------
    function : int
        The driver's.
    threads : int
        Of a block.
    parameters : int
        Address of the parameters' addresses.
    compute_capability : tuple of int
        What the function is compiled for.
    """
    attributes = _attributes()
    count = len(attributes) // _ATTRIBUTE_WORDS if overlaps(compute_capability) and driver_version() >= _DRIVER else 0
    # The driver's CUlaunchConfig: extents of the grid, of a block, shared bytes, stream, attributes and their number.
    config = (GRID_REST, 1 | threads << 32, 1 | 1 << 32, 0, 0, attributes.ctypes.data, count)
    return "cuLaunchKernelEx", OwnWord(GRID), function, parameters, 0, *config


#: Words of an attribute: its kind, and 64 bytes for its value.
_ATTRIBUTE_WORDS = 9


@cache
def _attributes() -> NDArray[np.uint64]:
    """Return the attributes of a launch that may start early, for the process's life."""
    found = np.zeros(_ATTRIBUTE_WORDS, np.uint64)
    found[:2] = _PROGRAMMATIC_STREAM_SERIALIZATION, 1
    return found
