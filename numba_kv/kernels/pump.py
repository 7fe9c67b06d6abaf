"""Pump: ranges of files through page-locked blocks onto the device, in compiled threads that need no interpreter.

Knows tables of numbers, and the C functions that read, copy and wait. Does not know formats or tensors.

With the interpreter's lock each block costs several hand-overs between threads, of tens of microseconds each; a block of
4 MiB takes 76 us to copy. Here a thread takes the lock once an upload.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.device.driver import check_driver
from numba_kv.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = [
    "Pump",
    "PumpFunctions",
    "PumpJob",
    "address_of",
    "cuda_functions",
    "destroy_event",
    "make_event",
    "wait_event",
]


@dataclass(frozen=True, kw_only=True)
class PumpFunctions:
    """Addresses of C functions.

    Attributes
    ----------
    read : int
        ``ssize_t pread(int, void *, size_t, off_t)``
    zero : int
        ``memset``
    copy : int
        ``int copy(device address, host address, bytes, stream)``, which enqueues; 0 if it went well, as the next two.
    record : int
        ``int record(event, stream)``
    wait : int
        ``int wait(event)``; an event that was never recorded is done.
    keep : object
        What has to live as long as the addresses are used.
    """

    read: int
    zero: int
    copy: int
    record: int
    wait: int
    keep: object = field(default=None, repr=False)


def cuda_functions() -> PumpFunctions | None:
    """Return the driver's functions, or None where it or the C library does not have them under these names."""
    try:
        driver, library = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
        return PumpFunctions(
            read=address_of(library.pread),
            zero=address_of(library.memset),
            copy=address_of(driver.cuMemcpyHtoDAsync_v2),
            record=address_of(driver.cuEventRecord),
            wait=address_of(driver.cuEventSynchronize),
            keep=(driver, library),
        )
    except (OSError, AttributeError, TypeError):  # TypeError: Windows cannot name its own process
        return None


def address_of(function: object) -> int:
    """Return the address of a ctypes function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class PumpJob:
    """One upload: windows of equal size, numbered from 0, the last one shorter.

    Parameters
    ----------
    segments : sequence of (begin, end, descriptor, file offset)
        What fills the destination, by rising `begin`, none empty; what lies between becomes 0.
    skipped : sequence of int
        Windows that somebody else fills; segments in them may have any descriptor.
    window_nbytes, total_nbytes : int
        Size of a window, and of all.
    destination : int
        Device address.
    stream : int
        Driver's stream.
    num_readers : int
        Threads.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, int, int, int]],
        skipped: Sequence[int],
        *,
        window_nbytes: int,
        total_nbytes: int,
        destination: int,
        stream: int,
        num_readers: int,
    ) -> None:
        self.segments = np.array(segments, np.int64).reshape(-1, 4)
        self.skipped = np.zeros(-(-total_nbytes // window_nbytes), np.int64)
        self.skipped[list(skipped)] = 1
        self.sizes = np.array([window_nbytes, total_nbytes], np.int64)
        self.destination = destination
        self.stream = stream
        self.state = np.zeros(2, np.int64)  # the next window; not 0: stop
        self.done: NDArray[np.int64] = np.zeros(num_readers, np.int64)

    def stop(self) -> None:
        """Let every reader return after the window that it is at."""
        self.state[1] = 1


class Pump:
    """The compiled loop and its functions. Borrows everything.

    Cost: the first one of a process loads the machine code from Numba's cache, or compiles for about a second.
    """

    def __init__(self, functions: PumpFunctions) -> None:
        from numba_kv.kernels.pump_loop import pump_windows

        self._loop = pump_windows
        self._functions = functions
        names = ("read", "zero", "copy", "record", "wait")
        self._addresses = np.array([getattr(functions, name) for name in names], np.int64)

    def run(self, job: PumpJob, reader: int, blocks: Sequence[int], events: Sequence[int]) -> int | None:
        """Take windows until there are none. Runs on a thread of its own, with the device current.

        Parameters
        ----------
        job : PumpJob
            Shared by the readers.
        reader : int
            Which one this is.
        blocks, events : sequence of int
            Addresses of this reader's blocks, and the driver's event of each.

        Returns
        -------
        int or None
            A window whose bytes could not be read, and was not copied; None: nothing is left, or the job was stopped.

        Raises
        ------
        DeviceError
            If the driver refuses; the job is stopped.

        Stream: enqueues copies and events.
        """
        code = self._loop(
            job.segments,
            job.skipped,
            job.sizes,
            job.state,
            job.state.ctypes.data,
            job.done,
            self._addresses,
            np.array(blocks, np.int64),
            np.array(events, np.int64),
            reader,
            job.destination,
            job.stream,
        )
        if code < 0:
            job.stop()
            raise DeviceError(f"copy to the device: the driver reports error {-code}")
        return int(code) - 1 if code else None


def make_event() -> int:
    """Return a new driver event without timing, for the current device."""
    from cuda.bindings import driver

    flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
    return int(check_driver(driver.cuEventCreate(flags), "event"))


def wait_event(event: int) -> None:
    """Wait for a driver event."""
    from cuda.bindings import driver

    check_driver(driver.cuEventSynchronize(driver.CUevent(event)), "waiting for a copy")


def destroy_event(event: int) -> None:
    """Give a driver event back."""
    from cuda.bindings import driver

    check_driver(driver.cuEventDestroy(driver.CUevent(event)), "giving an event back")
