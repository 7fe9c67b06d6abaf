"""Driver calls in a row, made by one compiled call.

A call through the Python binding costs about a microsecond beside what the driver does, which is as much as the driver needs
for many of them. Here the host keeps calls as words, address of the function first, and changes those that differ from one
time to the next. Knows words and the names of driver functions; what they mean is known to who makes the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.device.driver_functions import driver_function, status_name
from numba_kv.errors import DeviceError, InvariantError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.device.stream import Stream

__all__ = ["CALL_WORDS", "CaptureQuery", "DriverCalls", "OwnWord"]

#: Words of a call: the function's address and its parameters, 11 at most, each of them 64 bits or fewer.
CALL_WORDS = 12


class OwnWord(int):
    """Stands, among a call's parameters, for the address of a word of the same call; word 1 is its first parameter."""


class DriverCalls:
    """Calls of driver functions that return a status, made in their order until one fails.

    Parameters
    ----------
    *calls : sequence
        Name of the function, then its parameters as integers: values, addresses of what has to live as long as this, and
        `OwnWord`. What follows the function's parameters is there for those.

    Attributes
    ----------
    words : memoryview of int64
        The calls, `CALL_WORDS` each: parameter i of call c is ``words[c * CALL_WORDS + 1 + i]``. Takes integers alone.
    """

    __slots__ = ("_address", "_names", "_run", "_table", "words")

    def __init__(self, *calls: Sequence[Any]) -> None:
        self._run = _compiled()
        self._names = [str(call[0]) for call in calls]
        self._table: NDArray[np.int64] = np.zeros(CALL_WORDS * len(calls), np.int64)
        self._address = self._table.ctypes.data
        for c, (name, *parameters) in enumerate(calls):
            begin = self._address + 8 * CALL_WORDS * c
            if any(isinstance(p, OwnWord) and not 0 <= p < CALL_WORDS for p in parameters):
                raise InvariantError(f"{name}: a call has words 0..{CALL_WORDS - 1}")
            if len(parameters) >= CALL_WORDS:
                raise InvariantError(f"{name}: {len(parameters)} parameters given, at most {CALL_WORDS - 1} are passed")
            row = [driver_function(name), *(begin + 8 * p if isinstance(p, OwnWord) else p for p in parameters)]
            self._table[c * CALL_WORDS : c * CALL_WORDS + len(row)] = np.array(row, np.uint64).view(np.int64)
        self.words = self._table.data

    def __call__(self) -> None:
        """Make the calls.

        Raises
        ------
        DeviceError
            If one fails; those behind it are not made.
        """
        failed = self._run(self._address, len(self._names))
        if failed:
            self._refuse(failed)

    def _refuse(self, failed: int) -> None:
        place, status = divmod(failed, 1 << 32)
        raise DeviceError(f"{self._names[place]}: the driver reports {status_name(status)}")


class CaptureQuery:
    """Asks whether a stream is being captured: `Stream.is_capturing` at half its cost, for it is asked in every step.

    The stream's device is current in the caller's thread.
    """

    __slots__ = ("_answer", "_array", "_calls")

    def __init__(self) -> None:
        self._array: NDArray[np.int32] = np.zeros(1, np.int32)
        self._answer = self._array.data
        self._calls = DriverCalls(("cuStreamIsCapturing", 0, self._array.ctypes.data))

    def __call__(self, stream: Stream) -> bool:
        """Return whether what is enqueued on `stream` now goes into a graph. Host only.

        Raises
        ------
        DeviceError
            If the driver does not say.
        """
        self._calls.words[1] = stream.handle
        self._calls()
        return self._answer[0] != 0  # 0 is the driver's word for none


@cache
def _compiled() -> Any:
    from numba_kv.kernels.driver_loop import run_calls

    return run_calls
