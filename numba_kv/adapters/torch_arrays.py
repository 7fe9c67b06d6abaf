"""Tensors of torch as tensors of numba_kv, and the other way round, without a copy.

`numba_kv.device.interop.as_tensor` takes tensors of torch too, through protocols. Here torch is asked itself, which costs less.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from numba_kv.device import Memory, MemoryStats, Tensor
from numba_kv.device.interop import check_resolved
from numba_kv.dtypes import dtype
from numba_kv.errors import ConfigError, InputError, InteropError

if TYPE_CHECKING:
    from numba_kv.device import Device

__all__ = ["as_kv_tensor", "to_torch"]


def as_kv_tensor(device: Device, array: Any, name: str) -> Tensor:
    """Return a torch tensor as a Tensor of `device` that shares its memory and keeps it alive.

    Parameters
    ----------
    device : Device
        Where the array has to be.
    array : torch.Tensor
        Of any strides that are not negative.
    name : str
        Of the argument, for messages.

    Raises
    ------
    InteropError
        If it lies elsewhere, its element type is not known here, or its negative or conjugate bit is set.

    Stream: orders nothing.
    """
    check_resolved(array, name)
    place = array.device
    wanted = ("cuda", device.ordinal) if device.target == "cuda" else ("cpu", 0)
    if (place.type, place.index or 0) != wanted:
        raise InteropError(
            f"{name}: the tensor is on {place}, the cache on {wanted[0]}:{wanted[1]}; one model on one device is wanted"
        )
    try:
        kind = dtype(str(array.dtype))
    except ConfigError:
        raise InteropError(f"{name}: elements of {array.dtype} are not known here") from None
    shape, strides = tuple(array.shape), tuple(array.stride())
    address = array.data_ptr()
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if all(shape) else 0
    nbytes = reach * kind.itemsize
    host_bytes = None
    if device.target != "cuda":
        import numpy as np

        host_bytes = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else np.empty(0, np.uint8)
    return Tensor(Memory(address, nbytes, host_bytes, array, MemoryStats()), device, kind, shape, strides=strides)


def to_torch(tensor: Tensor) -> Any:
    """Return a tensor as torch's, with the same memory, which lives as long as the result.

    Float8 arrives as torch's float8, also in a torch whose DLPack does not know it.

    Raises
    ------
    InputError
        If it is no Tensor.
    StateError
        If the tensor's memory has been given back.

    Stream: on `cuda` torch's current stream is made to wait for the work enqueued so far on the tensor's device.
    """
    if not isinstance(tensor, Tensor):
        raise InputError(f"tensor: {type(tensor).__name__} given, a Tensor of numba_kv wanted")
    import torch

    if not tensor.dtype.name.startswith("float8"):
        return torch.from_dlpack(tensor)
    return torch.from_dlpack(tensor.as_storage()).view(getattr(torch, tensor.dtype.numpy_name))
