"""A kernel launch as words for `DriverCalls`, and whether its blocks may start before the kernel in front is done.

A launch has a start of its own, of up to half a microsecond, in which nothing of it runs. Where the GPU can, blocks of a kernel
are there before the one in front is done; in their first instruction they wait until it is, and its stores are visible. So our
kernels see what they would see one after the other.

When the *next* kernel's blocks may come is what a kernel says with ``followed``:

    "done"   when this one is done, as behind any kernel; what other libraries launch sees nothing new
    "early"  as soon as this one's own wait is over: for kernels that leave a GPU room
    "late"   when blocks of this one end

Kernels of other libraries that are launched to overlap may read what describes their work (lengths, page lists) before they
wait. So a kernel that writes such things is "done"; the others write K and V alone, which nobody reads before the wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_kv.device.driver_functions import driver_version
from numba_kv.kernels.driver_calls import OwnWord

__all__ = ["FOLLOWED", "GRID", "GRID_REST", "STREAM", "can_overlap", "launch_words"]

#: When the next kernel's blocks may start.
FOLLOWED = ("done", "early", "late")
#: Words of the call that differ from one time to the next: blocks, together with `GRID_REST`, and the stream.
GRID, STREAM = 5, 9
#: The grid's second extent, in the word of the first.
GRID_REST = 1 << 32
#: Compute capability from which on kernels wait for the one in front themselves.
_OVERLAPS = (9, 0)
#: Version of the driver from which on a graph keeps such a launch.
_DRIVER = 12030
#: The driver's CUlaunchAttribute: its kind, programmatic stream serialization, and 64 bytes for its value, which is true.
_ATTRIBUTE = np.array([6, 1, *[0] * 7], np.uint64)
_ATTRIBUTE.flags.writeable = False


def can_overlap(compute_capability: tuple[int, int]) -> bool:
    """Return whether kernels that are compiled for a GPU wait for the kernel in front themselves."""
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

    Returns
    -------
    tuple
        Name and words. Before each call `GRID` is set to the blocks together with `GRID_REST`, and `STREAM` to the stream.

    Raises
    ------
    DeviceError
        If the driver does not tell its version.
    """
    count = int(can_overlap(compute_capability) and driver_version() >= _DRIVER)
    # The driver's CUlaunchConfig: extents of the grid, of a block, shared bytes, stream, attributes and their number.
    config = (GRID_REST, 1 | threads << 32, 1 | 1 << 32, 0, 0, _ATTRIBUTE.ctypes.data, count)
    return "cuLaunchKernelEx", OwnWord(GRID), function, parameters, 0, *config
