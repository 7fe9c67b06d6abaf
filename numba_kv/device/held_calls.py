"""Driver calls that keep the interpreter's lock.

A binding gives the lock away around each call and then waits to have it back. Where eight threads enqueue copies, that wait is
longer than the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["HeldCalls", "held_calls"]


@dataclass(frozen=True, kw_only=True)
class HeldCalls:
    """Functions of the driver that return at once. Each returns the driver's status, 0 if it went well.

    Attributes
    ----------
    copy : callable
        ``copy(device address, host address, bytes, stream)``, which enqueues.
    record : callable
        ``record(event, stream)``
    query : callable
        ``query(event)``; 0 if the work before it has run.
    """

    copy: Callable[[int, int, int, int], int]
    record: Callable[[int, int], int]
    query: Callable[[int], int]


def held_calls() -> HeldCalls | None:
    """Return the functions, or None where the driver's library has another name."""
    try:
        library = ctypes.PyDLL("libcuda.so.1")
        copy, record, query = library.cuMemcpyHtoDAsync_v2, library.cuEventRecord, library.cuEventQuery
    except (OSError, AttributeError):
        return None
    copy.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    record.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    query.argtypes = (ctypes.c_void_p,)
    return HeldCalls(copy=copy, record=record, query=query)
