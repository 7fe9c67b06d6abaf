"""Failures of the driver as errors of this library.

Knows statuses. Does not know devices; imports no binding, so that it can be used before there is a driver.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from numba_kv.errors import CapacityError, DeviceError

__all__ = ["check_driver", "raise_allocation_error"]

_STATUS = re.compile(r"CUDA_ERROR_\w+")
#: What an allocation of a positive size ends with where it does not fit, in memory or in addresses.
_EXHAUSTED = {"CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_VALUE"}


def check_driver(result: Any, what: str) -> Any:
    """Return the values of a driver call's `(status, *values)`; raise DeviceError if it failed."""
    status, *values = result
    if int(status):
        raise DeviceError(f"{what}: the driver reports {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def raise_allocation_error(error: Exception, what: str, nbytes: int, free: Callable[[], int]) -> None:
    """Raise an error of this library for one that an allocation through cuda.core raised; return if it is not the driver's.

    cuda.core gives the class of its errors no public name, but their text begins with the driver's status.

    Parameters
    ----------
    error : Exception
        What was raised.
    what : str
        The memory's name in messages.
    nbytes : int
        Bytes that were wanted.
    free : callable
        Returns the bytes that are free; called only if memory ran out.

    Raises
    ------
    CapacityError
        If memory ran out.
    DeviceError
        If the driver reports anything else.
    """
    found = _STATUS.match(str(error))
    if found is None:
        return
    if found.group() not in _EXHAUSTED:
        raise DeviceError(f"{what}: allocating {nbytes} bytes, the driver reports {found.group()}") from error
    left = free()
    raise CapacityError(f"{what}: {nbytes} bytes are wanted, {left} are free ({error})", needed=nbytes, free=left) from error
