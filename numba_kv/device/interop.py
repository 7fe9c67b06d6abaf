"""Foreign arrays as tensors, without a copy."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from numba_kv.device.cuda_device import CudaDevice
from numba_kv.device.memory import Memory, MemoryStats
from numba_kv.device.tensor import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import ConfigError, InteropError

if TYPE_CHECKING:
    from numba_kv.device.device import Device

__all__ = ["as_tensor"]


def as_tensor(device: Device, value: Any, name: str) -> Tensor:
    """Return `value` as a Tensor of `device` that shares its memory and keeps it alive.

    Parameters
    ----------
    device : Device
        Where the array has to be.
    value : Tensor or array
        On `cuda` anything with ``__cuda_array_interface__`` (torch, CuPy, Numba), on the host targets a NumPy array or
        what ``numpy.from_dlpack`` takes.
    name : str
        Of the argument, for messages.

    Raises
    ------
    InteropError
        If it is not such an array, lies elsewhere than on the device, or is of an element type or byte order that the library
        does not know.

    Stream: orders nothing; the array must be written on the resources' stream, or that stream be made to wait.
    """
    if isinstance(value, Tensor):
        if value.device is not device:
            where = "" if repr(value.device) == repr(device) else f", on {value.device!r} and not on {device!r}"
            raise InteropError(f"{name}: the tensor belongs to another SharedResources{where}")
        return value
    if device.target == "cuda":
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is None:
            raise InteropError(f"{name}: {type(value).__name__} is not an array in device memory (__cuda_array_interface__)")
        return _from_interface(device, value, interface, name)
    import numpy as np

    array = value
    if not isinstance(array, np.ndarray):
        try:
            array = np.from_dlpack(value)
        except (AttributeError, TypeError, RuntimeError, BufferError) as error:
            raise InteropError(f"{name}: {type(value).__name__} is not an array in host memory ({error})") from error
    return _from_interface(device, array, array.__array_interface__, name)


def _from_interface(device: Device, owner: Any, interface: dict[str, Any], name: str) -> Tensor:
    import numpy as np

    # ml_dtypes arrays state an opaque type in their interface; the array itself knows better
    found = owner.dtype if isinstance(owner, np.ndarray) else np.dtype(interface["typestr"])
    if not found.isnative:  # its name does not tell
        raise InteropError(
            f"{name}: elements of type {found.str!r} have the other byte order; convert them to {found.newbyteorder('=').str!r}"
        )
    try:
        kind = dtype(found.name)
    except ConfigError as error:
        raise InteropError(f"{name}: elements of type {found.name} are not known here") from error
    shape = tuple(int(n) for n in interface["shape"])
    steps = interface.get("strides")
    strides = None if steps is None else tuple(int(s) // kind.itemsize for s in steps)
    if steps is not None and any(s < 0 or s % kind.itemsize for s in steps):
        raise InteropError(f"{name}: strides of {steps} bytes are not whole, positive elements of {kind}")
    address = int(interface["data"][0])
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if strides is not None else int(np.prod(shape))
    nbytes = max(0, reach) * kind.itemsize
    bytes_of = None
    if isinstance(device, CudaDevice):
        place = device.foreign_place(address) if nbytes else None
        if place is not None:
            raise InteropError(f"{name}: the array lies in {place}, not in that of device {device.ordinal}; move it there")
    else:
        bytes_of = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    memory = Memory(address, nbytes, bytes_of, owner, MemoryStats())
    return Tensor(memory, device, kind, shape, strides=strides)
