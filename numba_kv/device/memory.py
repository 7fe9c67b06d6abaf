"""Device memory with counted bytes.

Knows how a target gives and takes memory. Does not know what is stored in it.
"""

from __future__ import annotations

import mmap
import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from numba_kv.device.unique import Unique
from numba_kv.errors import CapacityError, DeviceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device.cuda_device import CudaDevice

__all__ = ["Memory", "MemoryStats", "host_memory", "pinned_memory"]

#: From this size on host pools are mapped lazily and without reserving swap.
_LAZY_FROM = 1 << 20


def _no_reserve() -> int | None:
    """Return the flag that maps memory without reserving swap for it; Python names it from 3.13 on."""
    if hasattr(mmap, "MAP_NORESERVE"):
        return int(mmap.MAP_NORESERVE)
    known = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    return 0x4000 if known else None


_NO_RESERVE = _no_reserve()


@dataclass
class MemoryStats:
    """Bytes and allocations that a device has given out.

    Attributes
    ----------
    current_bytes, peak_bytes, total_bytes : int
        Held now, most ever held, sum of all.
    allocations, frees : int
        Calls.
    """

    current_bytes: int = 0
    peak_bytes: int = 0
    total_bytes: int = 0
    allocations: int = 0
    frees: int = 0

    def took(self, nbytes: int) -> None:
        """Count an allocation."""
        self.current_bytes += nbytes
        self.total_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        self.allocations += 1


class _Holder(Protocol):
    """What stands for a use of memory by another library."""

    memory: Any


class Memory(Unique):
    """A block of memory. Owns it; `close` gives it back once.

    Attributes
    ----------
    address, nbytes : int
        First byte and size.
    array : uint8 array or None
        The bytes, where the host can reach them. Pages of a closed block go back when the last array of them does, so
        that one which another library still holds stays readable; a device's do the same for arrays exchanged by DLPack.
    """

    def __init__(self, address: int, nbytes: int, array: NDArray[np.uint8] | None, native: Any, stats: MemoryStats) -> None:
        self.address = address
        self.nbytes = nbytes
        self.array = array
        self._native = native
        self._stats = stats
        self._lent: WeakSet[_Holder] | None = None
        stats.took(nbytes)
        self.is_closed = False  # last: what an interrupt left half made gives nothing back

    def close(self, stream: Any = None) -> None:
        """Give the memory back; a second call does nothing. On `cuda` the free is ordered on `stream`, if it is still open."""
        if self.is_closed:
            return
        self._count_out()
        native, self._native = self._native, None
        if native is not None:
            self.array = None
            lent = list(self._lent or ())
            for holder in lent:  # a leak is better than an array of somebody else's bytes: the last of them frees it
                holder.memory = native
            if stream is not None and not stream.is_closed and not lent:
                with stream.active():
                    native.close(stream.native)

    def lend(self, holder: _Holder) -> None:
        """Note that another library uses the memory as long as `holder` lives, beyond `close` if need be."""
        if self._native is not None:
            if self._lent is None:
                self._lent = WeakSet()
            self._lent.add(holder)

    def __del__(self) -> None:
        if not getattr(self, "is_closed", True):  # nobody closed it: its bytes go back with it
            self._count_out()

    def _count_out(self) -> None:
        stats = self._stats  # one line does it: an interrupt finds the block held and counted, or neither
        self.is_closed, stats.current_bytes, stats.frees = True, stats.current_bytes - self.nbytes, stats.frees + 1


def host_memory(nbytes: int, stats: MemoryStats) -> Memory:
    """Return zeroed host memory, committed only when it is touched, aligned to 256 bytes."""
    import numpy as np

    if nbytes >= _LAZY_FROM and _NO_RESERVE is not None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            raw = np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"host memory: {nbytes} bytes cannot be mapped ({error})", needed=nbytes, free=0) from error
    else:
        try:
            raw = np.zeros(nbytes + 256, np.uint8)
        except (MemoryError, ValueError) as error:
            raise CapacityError(f"host memory: {nbytes} bytes cannot be allocated", needed=nbytes, free=0) from error
        skip = -raw.ctypes.data % 256
        raw = raw[skip : skip + nbytes]
    return Memory(raw.ctypes.data, nbytes, raw, None, stats)


class _PinnedPages:
    """Page-locked pages. They go back when the last array that shows them does, on whatever thread that is."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        from cuda.core import LegacyPinnedMemoryResource

        self._device = device
        self._buffer: Any = LegacyPinnedMemoryResource().allocate(nbytes, stream=device.stream.native)  # type: ignore[attr-defined]
        self.address = int(self._buffer.handle)

    def __del__(self) -> None:
        buffer = getattr(self, "_buffer", None)
        if buffer is None:  # they were never there
            return
        try:
            with self._device.active():
                buffer.close()
        except DeviceError:  # the driver is gone, as when the process ends, and the pages with it
            return


def pinned_memory(nbytes: int, device: CudaDevice, stats: MemoryStats) -> Memory:
    """Return page-locked host memory (not zeroed). The device is current."""
    import ctypes

    import numpy as np

    pages = _PinnedPages(device, nbytes)
    raw = (ctypes.c_uint8 * nbytes).from_address(pages.address)
    raw._owner = pages  # type: ignore[attr-defined]
    return Memory(pages.address, nbytes, np.ctypeslib.as_array(raw), None, stats)
