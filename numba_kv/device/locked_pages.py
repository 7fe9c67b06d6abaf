"""Page-locked memory made of large pages, where the system has them.

Locking 64 MiB of ordinary pages takes the driver 30 to 50 ms, longer than copying a gigabyte; of large pages, which several
threads have touched, under 10 ms.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.device.memory import Memory
from numba_kv.errors import DeviceError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.device.cuda_device import CudaDevice

__all__ = ["locked_pages"]

_LARGE_PAGE = 2 << 20

#: `map`, or one that works on several threads.
Map = Callable[[Callable[[int], None], Iterable[int]], Iterator[None]]


class _Pages:
    """Locked pages. They are unlocked when the last array that shows them goes, on whatever thread that is."""

    def __init__(self, device: CudaDevice, array: NDArray[np.uint8]) -> None:
        from cuda.bindings import driver

        self._device = device
        self._driver: Any = driver
        self._array: NDArray[np.uint8] | None = None
        with device.active():
            status = driver.cuMemHostRegister(array.ctypes.data, array.nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)[0]
        if int(status):
            raise DeviceError(f"page-locked host memory: the driver does not lock {array.nbytes} bytes ({status.name})")
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


def locked_pages(device: CudaDevice, nbytes: int, each: Map = map) -> Memory:
    """Return zeroed page-locked memory.

    Parameters
    ----------
    device : CudaDevice
        Whose context is to know it.
    nbytes : int
        Size; whole large pages waste nothing.
    each : callable
        A `map` on threads, so that several make pages at once.

    Raises
    ------
    DeviceError
        If the driver does not lock them; `Device.allocate_staging` may still work.
    """
    try:
        mapping = mmap.mmap(-1, nbytes + _LARGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError, OverflowError) as error:
        raise DeviceError(f"page-locked host memory: {nbytes} bytes cannot be mapped ({error})") from error
    raw = np.frombuffer(mapping, np.uint8)
    skip = -raw.ctypes.data % _LARGE_PAGE
    array = raw[skip : skip + nbytes]

    def touch(begin: int) -> None:
        array[begin : begin + _LARGE_PAGE].fill(0)  # without the interpreter's lock

    for _ in each(touch, range(0, nbytes, _LARGE_PAGE)):
        pass
    address = int(array.ctypes.data)
    shown = (ctypes.c_uint8 * nbytes).from_address(address)
    shown._owner = _Pages(device, array)  # type: ignore[attr-defined]
    return Memory(address, nbytes, np.ctypeslib.as_array(shown), None, device.pinned)
