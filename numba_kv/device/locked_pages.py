"""Page-locked memory made of large pages, where the system has them.

Locking 64 MiB of ordinary pages takes the driver 30 to 50 ms, longer than copying a gigabyte; of large pages, which the
caller's thread has touched, 3 ms.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING, Any

from numba_kv.device.memory import Memory, MemoryStats
from numba_kv.errors import DeviceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device.cuda_device import CudaDevice

__all__ = ["LockedPages"]

_LARGE_PAGE = 2 << 20


class LockedPages:
    """Touched and locked pages, not counted yet; `as_memory` makes them memory. Any thread may make them.

    Parameters
    ----------
    device : CudaDevice
        Which context knows them.
    nbytes : int
        Size; whole large pages waste nothing.

    Raises
    ------
    DeviceError
        If the driver does not lock them; `Device.allocate_staging` may still work.
    """

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        import numpy as np
        from cuda.bindings import driver

        self._device = device
        self._driver: Any = driver
        self._locked = False
        try:
            mapping = mmap.mmap(-1, nbytes + _LARGE_PAGE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceError(f"page-locked host memory: {nbytes} bytes cannot be mapped ({error})") from error
        raw = np.frombuffer(mapping, np.uint8)
        skip = -raw.ctypes.data % _LARGE_PAGE
        self.array: NDArray[np.uint8] = raw[skip : skip + nbytes]
        self.array.fill(0)  # without the interpreter's lock, so that several threads make pages at once
        self.address = int(self.array.ctypes.data)
        with device.active():
            status = driver.cuMemHostRegister(self.address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)[0]
        if int(status):
            raise DeviceError(f"page-locked host memory: the driver does not lock {nbytes} bytes ({status.name})")
        self._locked = True

    def as_memory(self, stats: MemoryStats) -> Memory:
        """Return the pages as memory, counted in `stats`. They are unlocked when the last array that shows them goes."""
        raw = (ctypes.c_uint8 * self.array.nbytes).from_address(self.address)
        raw._owner = self  # type: ignore[attr-defined]
        import numpy as np

        return Memory(self.address, self.array.nbytes, np.ctypeslib.as_array(raw), None, stats)

    def __del__(self) -> None:
        if not getattr(self, "_locked", False):
            return
        try:
            with self._device.active():
                self._driver.cuMemHostUnregister(self.address)
        except DeviceError:  # the driver is gone, as when the process ends, and the pages with it
            return
