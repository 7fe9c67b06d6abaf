"""One upload through page-locked blocks. What files give is read and sent by the compiled loop, beside the interpreter.

Knows the words of that loop, and the functions of the system that make threads for it. Does not know threads of Python.
Importing this file imports Numba and compiles.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.device.driver_functions import CopyFunctions, status_name
from numba_kv.errors import DeviceError
from numba_kv.kernels import file_loop as loop
from numba_kv.weights.safetensors_file import pread_address

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.device import Device, Memory, Stream
    from numba_kv.weights.blocks import Blocks
    from numba_kv.weights.windows import Windows

__all__ = ["StagedRun"]

_STACK_NBYTES = 1 << 20


class StagedRun:
    """One upload: what is left of it, and what its readers do. Borrows everything that it is given.

    Parameters
    ----------
    device : Device
        The destination's.
    functions : CopyFunctions
        Of the device.
    stream : Stream
        Where copies go, whatever stream the device has meanwhile: none may be parted from its event.
    windows : Windows
        What is uploaded.
    blocks : Blocks
        Locked, each for its reader.
    memory : Memory
        The destination.
    num_readers : int
        At most.
    """

    def __init__(
        self,
        device: Device,
        functions: CopyFunctions,
        stream: Stream,
        *,
        windows: Windows,
        blocks: Blocks,
        memory: Memory,
        num_readers: int,
    ) -> None:
        count = min(num_readers, windows.count)
        self._device, self._stream, self._windows, self._blocks = device, stream, windows, blocks
        self._pieces: NDArray[np.int64] = windows.pieces()
        read = pread_address()
        if not read:  # then no file gives anything without Python
            self._pieces[:, loop.FILE] = -1
        # Descriptors of its own: those of a file that is closed meanwhile may become another's.
        self._files = {file: os.dup(file) for file in np.unique(self._pieces[:, loop.FILE]).tolist() if file >= 0}
        self._pieces[:, loop.FILE] = [self._files.get(file, -1) for file in self._pieces[:, loop.FILE].tolist()]
        job = dict.fromkeys(range(loop.JOB_WORDS), 0)
        job[loop.WINDOW_NBYTES], job[loop.NBYTES] = windows.window_nbytes, windows.nbytes
        job[loop.DESTINATION], job[loop.READ] = memory.address, read
        job[loop.COPY], job[loop.RECORD], job[loop.QUERY] = functions.copy, functions.record, functions.query
        job[loop.MAKE_CURRENT], job[loop.CONTEXT] = functions.make_current, functions.context
        job[loop.PIECES], job[loop.NUM_PIECES] = self._pieces.ctypes.data, len(self._pieces)
        self._job: NDArray[np.int64] = np.array(list(job.values()), np.int64)
        self._readers: NDArray[np.int64] = np.zeros((count, loop.READER_WORDS), np.int64)
        self._readers[:, loop.STREAM], self._readers[:, loop.JOB] = stream.handle, self._job.ctypes.data
        self._readers[:, loop.BLOCKS : loop.NUM_BLOCKS + 1] = [blocks.place(reader) for reader in range(count)]
        self._readers[:, loop.RESULT] = loop.NONE_LEFT

    @property
    def done_nbytes(self) -> int:
        """Bytes whose copies are enqueued."""
        return int(self._readers[:, loop.SENT].sum())

    def close(self) -> None:
        """Give back what it has of files. No part may run any more; a second call does nothing."""
        while self._files:
            os.close(self._files.popitem()[1])

    def stop(self) -> None:
        """Let every reader return after the window that it is at."""
        self._job[loop.NEXT] = self._windows.count

    @property
    def parts(self) -> list[Callable[[], None]]:
        """What is to run, each on a thread of its own.

        One part alone if files give everything: its readers need no Python. Otherwise a part for each reader.

        They raise
        ----------
        WeightError
            If a source fails.
        DeviceError
            If the driver refuses a copy.
        """
        if _thread_functions()[0] and (self._pieces[:, loop.FILE] >= 0).all():
            return [self._read_files]
        return [partial(self._read, reader) for reader in range(len(self._readers))]

    def _read_files(self) -> None:
        """Send all windows, and wait for their copies."""
        with self._device.active():
            create, join, attributes = _thread_functions()
            address = 0 if attributes is None else ctypes.addressof(attributes)
            loop.load_on_threads(self._readers, create, join, address)
            for reader, result in enumerate(self._readers[:, loop.RESULT].tolist()):
                self._go_on(reader, result)

    def _read(self, reader: int) -> None:
        """Send windows until there are none, and wait for their copies. For the thread of one reader."""
        with self._device.active():
            table = self._blocks.table(reader)
            self._go_on(reader, int(loop.load_windows(self._job, self._readers[reader], table, self._pieces, -1)))

    def _go_on(self, reader: int, window: int) -> None:
        """Fill what the loop returned, and come back to it. The device is current."""
        words, table = self._readers[reader], self._blocks.table(reader)
        while window >= 0:
            begin, end = self._windows.range(window)
            self._windows.fill(self._blocks.of(reader)[words[loop.TURN]][: end - begin], begin)
            window = int(loop.load_windows(self._job, words, table, self._pieces, window))
        if window != loop.NONE_LEFT:
            raise DeviceError(f"copy to the device: the driver reports {status_name(loop.NONE_LEFT - window)}")


@cache
def _thread_functions() -> tuple[int, int, ctypes.Array[ctypes.c_uint64] | None]:
    """Return the addresses of the functions that make and join threads, and attributes with a small stack; 0 and None without.

    The system keeps stacks of threads that have ended for others, but few large ones.
    """
    if os.name != "posix":
        return 0, 0, None
    library = ctypes.CDLL(None)
    create, join = (ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in ("pthread_create", "pthread_join"))
    attributes = (ctypes.c_uint64 * 16)()  # what the system writes there takes half of it
    if library.pthread_attr_init(attributes) or library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_NBYTES)):
        return create, join, None
    return create, join, attributes
