"""Page-locked memory made of large pages, where the system has them, in two steps: the pages, and the lock.

Locking 64 MiB of ordinary pages takes the driver 20 to 35 ms, longer than copying a gigabyte; of large pages that have been
written to, 1 to 3 ms. Several threads can write to pages at once; the driver locks one piece after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.device.driver import check_driver
from numba_kv.device.memory import Memory
from numba_kv.errors import CapacityError, DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.device.cuda_device import CudaDevice

__all__ = ["large_pages", "locked_pages"]

_LARGE_PAGE = 2 << 20


def large_pages(nbytes: int) -> NDArray[np.uint8]:
    """Return zeroed host memory, committed when it is written to, in large pages where the system has them.

    Raises
    ------
    CapacityError
        If it cannot be mapped.
    """
    try:
        mapping = mmap.mmap(-1, nbytes + _LARGE_PAGE)
    except (OSError, ValueError, OverflowError) as error:
        raise CapacityError(f"host memory: {nbytes} bytes cannot be mapped ({error})", needed=nbytes, free=0) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(mapping, np.uint8)
    skip = -raw.ctypes.data % _LARGE_PAGE
    return raw[skip : skip + nbytes]


class _Lock:
    """The lock of pages. It goes when the last array that shows them does, on whatever thread that is."""

    def __init__(self, device: CudaDevice, array: NDArray[np.uint8]) -> None:
        from cuda.bindings import driver

        self._device = device
        self._driver: Any = driver
        self._array: NDArray[np.uint8] | None = None
        with device.active():
            locked = driver.cuMemHostRegister(array.ctypes.data, array.nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)
            check_driver(locked, f"locking {array.nbytes} bytes of host memory")
        self._array = array

    def __del__(self) -> None:
        array = getattr(self, "_array", None)
        if array is None:  # they were never locked
            return
        try:
            with self._device.active():
                self._driver.cuMemHostUnregister(array.ctypes.data)
        except DeviceError:  # the driver is gone, as when the process ends, and the locks with it
            return


def locked_pages(device: CudaDevice, array: NDArray[np.uint8]) -> Memory:
    """Lock the pages of a dense array and return them as memory that copies can read asynchronously.

    Raises
    ------
    DeviceError
        If the driver does not lock them; `Device.allocate_staging` may still work.
    """
    address = int(array.ctypes.data)
    shown = (ctypes.c_uint8 * array.nbytes).from_address(address)
    shown._owner = _Lock(device, array)  # type: ignore[attr-defined]
    return Memory(address, array.nbytes, np.ctypeslib.as_array(shown), None, device.pinned)
