"""One upload through page-locked blocks. What files give is read and sent by the compiled loop, beside the interpreter.

Knows the words of that loop, and the functions of the system that make threads for it. Does not make threads of Python, but
has work for them where files do not give everything.
Importing this file imports Numba and compiles.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.device.driver_functions import CopyFunctions, status_name
from numba_kv.errors import CapacityError, DeviceError
from numba_kv.kernels import file_loop as loop
from numba_kv.weights.safetensors_file import pread_address

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.device import Device, Memory, Stream
    from numba_kv.weights.blocks import Blocks
    from numba_kv.weights.windows import Windows

__all__ = ["StagedRun"]

_STACK_NBYTES = 1 << 20
#: Bytes of a copy at most, where blocks are that many times more. Larger ones are hardly faster, and keep more blocks busy.
_COPY_NBYTES = 8 << 20


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
        Locked.
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
        self._device, self._windows, self._blocks = device, windows, blocks
        self._pieces: NDArray[np.int64] = windows.pieces()
        self._threads = _thread_functions()
        read = pread_address()
        if not read:  # then no file gives anything without Python
            self._pieces[:, loop.FILE] = -1
        # Descriptors of its own: those of a file that is closed meanwhile may become another's.
        files = self._pieces[:, loop.FILE].tolist()
        self._files: dict[int, int] = {}
        self._open({file for file in files if file >= 0})
        self._pieces[:, loop.FILE] = files = [self._files.get(file, -1) for file in files]
        self._needs_python = not self._threads.create or -1 in files
        self._filled: NDArray[np.int64] = np.zeros(len(blocks), np.int64)
        self._ends: NDArray[np.int64] = np.zeros(len(blocks), np.int64)
        self._events: NDArray[np.int64] = np.array(blocks.events, np.int64)
        job = dict.fromkeys(range(loop.JOB_WORDS), 0)
        job[loop.WINDOW_NBYTES], job[loop.NBYTES] = windows.window_nbytes, windows.nbytes
        job[loop.DESTINATION], job[loop.STREAM] = memory.address, stream.handle
        job[loop.READ], job[loop.YIELD] = read, self._threads.let_others
        job[loop.COPY], job[loop.RECORD], job[loop.QUERY] = functions.copy, functions.record, functions.query
        job[loop.MAKE_CURRENT], job[loop.CONTEXT] = functions.make_current, functions.context
        job[loop.PIECES], job[loop.NUM_PIECES] = self._pieces.ctypes.data, len(self._pieces)
        job[loop.STAGING], job[loop.NUM_BLOCKS] = blocks.address, len(blocks)
        job[loop.MOST] = max(1, min(_COPY_NBYTES // windows.window_nbytes, len(blocks) // 4))
        job[loop.FILLED], job[loop.EVENTS] = self._filled.ctypes.data, self._events.ctypes.data
        job[loop.ENDS] = self._ends.ctypes.data
        self._job: NDArray[np.int64] = np.array(list(job.values()), np.int64)
        self._readers: NDArray[np.int64] = np.zeros((min(num_readers, windows.count), loop.READER_WORDS), np.int64)
        self._readers[:, loop.WINDOW], self._readers[:, loop.JOB] = -1, self._job.ctypes.data
        self._readers[:, loop.RESULT] = loop.NONE_LEFT

    def _open(self, files: set[int]) -> None:
        try:
            for file in files:
                self._files[file] = os.dup(file)
        except BaseException as error:
            free = len(self._files)
            self.close()
            if not isinstance(error, OSError):
                raise
            message = f"files: {len(files)} are to be read at once, the process can open {free} more ({error.strerror})"
            raise CapacityError(message, needed=len(files), free=free) from None

    @property
    def done_nbytes(self) -> int:
        """Bytes whose copies are enqueued."""
        return min(int(self._job[loop.SENT]) * self._windows.window_nbytes, self._windows.nbytes)

    def close(self) -> None:
        """Give back what it has of files. No reader may run any more; a second call does nothing."""
        while self._files:
            os.close(self._files.popitem()[1])

    def stop(self) -> None:
        """Let every reader return after the window that it is at, and wait for threads of the system."""
        self._job[loop.IS_STOPPED] = 1
        loop.join_threads(self._readers, self._threads.join)

    def start(self) -> None:
        """Have threads of the system read what files give, if they give everything; then `go_on` until it returns True."""
        if not self._needs_python:
            attributes = self._threads.attributes
            address = 0 if attributes is None else ctypes.addressof(attributes)
            loop.start_threads(self._readers, self._threads.create, address)

    def go_on(self) -> bool:
        """Be the first reader for one window, beside threads of the system, and do what those are stuck at.

        Return True once all windows are sent, their copies have run, and the threads have ended. Raises as `parts`.
        """
        if self._needs_python:
            return True
        with self._device.active():
            if self._job[loop.IS_STUCK]:
                self._help()
            if self._load(self._readers[0], 1) == loop.PAUSED:
                return False
        loop.join_threads(self._readers, self._threads.join)
        for result in self._readers[:, loop.RESULT].tolist():
            _check(result)
        return True

    @property
    def parts(self) -> list[Callable[[], None]]:
        """What is to run on threads of Python: a part for each reader, if files do not give everything.

        They raise
        ----------
        WeightError
            If a source fails.
        DeviceError
            If the driver refuses a copy.
        """
        return [partial(self._read, words) for words in self._readers] if self._needs_python else []

    def _read(self, words: NDArray[np.int64]) -> None:
        """Send windows until there are none, and wait for their copies. For the thread of one reader."""
        with self._device.active():
            self._load(words, loop.ENDLESS)

    def _load(self, words: NDArray[np.int64], most: int) -> int:
        """Run the loop of a reader, and fill what it returns. The device is current."""
        result = loop.load_windows(self._job, words, -1, most, 1)
        while result >= 0:
            result = self._fill(words, result, most)
        return _check(result)

    def _fill(self, words: NDArray[np.int64], window: int, most: int) -> int:
        """Fill a window whose block is free, and go on with the loop; return its result."""
        begin, end = self._windows.range(window)
        self._windows.fill(self._blocks.block(window % len(self._blocks))[: end - begin], begin)
        return loop.load_windows(self._job, words, window, most, 1)

    def _help(self) -> None:
        """Fill what threads of the system have left, which have ended with that."""
        self._job[loop.IS_STUCK] = 0  # before looking: another may be at it right now
        for words in self._readers[1:]:
            if words[loop.RESULT] >= 0:
                window, words[loop.RESULT] = int(words[loop.RESULT]), loop.NONE_LEFT
                _check(self._fill(words, window, 1))


def _check(result: int) -> int:
    """Return what a loop returned, unless the driver refused something."""
    if loop.PAUSED < result < loop.NONE_LEFT:
        raise DeviceError(f"copy to the device: the driver reports {status_name(loop.NONE_LEFT - result)}")
    return result


@dataclass(frozen=True, kw_only=True)
class ThreadFunctions:
    """Addresses of functions of the system for threads that Python does not hear of; 0 without.

    Attributes
    ----------
    create, join, let_others : int
        ``pthread_create``, ``pthread_join`` and ``sched_yield``.
    attributes : array or None
        Of a thread with a small stack: the system keeps stacks of threads that have ended for others, but few large ones.
    """

    create: int = 0
    join: int = 0
    let_others: int = 0
    attributes: ctypes.Array[ctypes.c_uint64] | None = None


@cache
def _thread_functions() -> ThreadFunctions:
    if os.name != "posix":
        return ThreadFunctions()
    library = ctypes.CDLL(None)
    names = ("pthread_create", "pthread_join", "sched_yield")
    create, join, let_others = (ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in names)
    attributes: ctypes.Array[ctypes.c_uint64] | None = (ctypes.c_uint64 * 16)()  # what the system writes there takes half of it
    if library.pthread_attr_init(attributes) or library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_NBYTES)):
        attributes = None
    return ThreadFunctions(create=create, join=join, let_others=let_others, attributes=attributes)
