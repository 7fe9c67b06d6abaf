"""One upload through page-locked blocks. What files give is read and sent by the compiled loop, beside the interpreter.

Knows the words of that loop. Does not know threads. Importing this file imports Numba and compiles.
"""

from __future__ import annotations

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
        self.num_readers = min(num_readers, windows.count)
        self._device, self._stream, self._windows, self._blocks = device, stream, windows, blocks
        self._pieces: NDArray[np.int64] = windows.pieces()
        read = pread_address()
        if not read:  # then no file gives anything without Python
            self._pieces[:, loop.FILE] = -1
        self._job: NDArray[np.int64] = np.zeros(loop.JOB_WORDS, np.int64)
        self._job[loop.WINDOW_NBYTES], self._job[loop.NBYTES] = windows.window_nbytes, windows.nbytes
        self._job[loop.DESTINATION], self._job[loop.READ] = memory.address, read
        self._job[loop.COPY], self._job[loop.RECORD] = functions.copy, functions.record
        self._job[loop.QUERY] = functions.query
        self._readers: NDArray[np.int64] = np.zeros((self.num_readers, loop.READER_WORDS), np.int64)
        self._readers[:, loop.STREAM] = stream.handle

    @property
    def done_nbytes(self) -> int:
        """Bytes whose copies are enqueued."""
        return int(self._readers[:, loop.SENT].sum())

    def stop(self) -> None:
        """Let every reader return after the window that it is at."""
        self._job[loop.NEXT] = self._windows.count

    def work(self, reader: int) -> None:
        """Send windows until there are none, and wait for their copies. For the thread of one reader.

        Raises
        ------
        WeightError
            If a source fails.
        DeviceError
            If the driver refuses a copy.
        """
        words, table = self._readers[reader], self._blocks.table(reader)
        with self._device.active():
            window = int(loop.load_windows(self._job, words, table, self._pieces, -1))
            while window >= 0:
                begin, end = self._windows.range(window)
                self._windows.fill(self._blocks.of(reader)[words[loop.TURN]][: end - begin], begin)
                window = int(loop.load_windows(self._job, words, table, self._pieces, window))
        if window != loop.NONE_LEFT:
            raise DeviceError(f"copy to the device: the driver reports {status_name(loop.NONE_LEFT - window)}")
