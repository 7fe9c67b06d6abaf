"""Functions of the driver by their addresses, for compiled loops, which call them beside the interpreter.

Knows names and addresses. Does not know what the functions are called for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from numba_kv.device.driver import check_driver
from numba_kv.errors import DeviceError

__all__ = ["CopyFunctions", "driver_function", "driver_version", "status_name"]

#: Version of CUDA whose meaning of a name is wanted.
_VERSION = 12000


@dataclass(frozen=True, kw_only=True)
class CopyFunctions:
    """Addresses of functions that copy from the host. They take words of 64 bits and return a status of the driver, 0 at best.

    Attributes
    ----------
    copy : int
        ``copy(device address, host address, bytes, stream)``, which enqueues.
    record : int
        ``record(event, stream)``
    query : int
        ``query(event)``; 0 once the work before the event has run, 600 until then.
    make_current : int
        ``make_current(context)``, for threads on which the device is not current.
    context : int
        The device's, no address of a function.
    """

    copy: int
    record: int
    query: int
    make_current: int
    context: int


@cache
def driver_function(name: str) -> int:
    """Return the address of a function of the driver.

    Raises
    ------
    DeviceError
        If the driver has none of that name.
    """
    from cuda.bindings import driver

    address, _ = check_driver(driver.cuGetProcAddress(name.encode(), _VERSION, 0), name)
    if not address:
        raise DeviceError(f"{name}: the driver has no such function")
    return int(address)


@cache
def driver_version() -> int:
    """Return the newest version of CUDA that the driver knows, as it counts them: 12030 for 12.3.

    Raises
    ------
    DeviceError
        If it does not say.
    """
    from cuda.bindings import driver

    return int(check_driver(driver.cuDriverGetVersion(), "version of the driver"))


def status_name(status: int) -> str:
    """Return the driver's name of a status that a function returned."""
    from cuda.bindings import driver

    try:
        return str(driver.CUresult(status).name)
    except ValueError:
        return f"error {status}"
