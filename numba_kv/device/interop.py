"""Foreign arrays as tensors, without a copy."""

from __future__ import annotations

import ctypes
from math import prod
from typing import TYPE_CHECKING, Any

from numba_kv.device.cuda_device import CudaDevice
from numba_kv.device.dlpack import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, read_capsule
from numba_kv.device.memory import Memory, MemoryStats
from numba_kv.device.tensor import Tensor
from numba_kv.dtypes import DType, dtype
from numba_kv.errors import ConfigError, InteropError

if TYPE_CHECKING:
    from numba_kv.device.device import Device

__all__ = ["as_tensor", "check_resolved"]

#: Libraries whose DLPack takes -1 for "order nothing"; JAX takes it for the address of a stream.
_SKIPPING = ("torch", "cupy")


def as_tensor(device: Device, value: Any, name: str, *, ordered: bool = False) -> Tensor:
    """Return `value` as a Tensor of `device` that shares its memory and keeps it alive.

    Parameters
    ----------
    device : Device
        Where the array has to be.
    value : Tensor or array
        Anything with ``__dlpack__`` (torch, CuPy, JAX), on the host targets also a NumPy array, on `cuda` anything with
        ``__cuda_array_interface__`` (Numba). An array that its library takes as constant (JAX) is for reading.
    name : str
        Of the argument, for messages.
    ordered : bool
        Whether the device's own stream is made to wait for what the array's library has enqueued so far, as far as the library
        tells (by DLPack, or the stream of its interface). Not while either stream is being captured.

    Raises
    ------
    InteropError
        If it is not such an array, lies elsewhere than on the device, is of an element type or byte order that the library
        does not know, or its memory does not hold its elements (see `check_resolved`).

    Stream: orders nothing unless `ordered`: the array must be written on the resources' stream, or that be made to wait.
    """
    if isinstance(value, Tensor):
        if value.device is not device:
            where = "" if repr(value.device) == repr(device) else f", on {value.device!r} and not on {device!r}"
            raise InteropError(f"{name}: the tensor belongs to another SharedResources{where}")
        return value
    check_resolved(value, name)
    import numpy as np

    if device.target != "cuda":
        if isinstance(value, np.ndarray):
            return _from_interface(device, value, value.__array_interface__, name)
        if hasattr(value, "__dlpack__"):
            return _from_dlpack(device, value, name, None)
        raise InteropError(f"{name}: {type(value).__name__} is not an array in host memory (a NumPy array, or __dlpack__)")
    can_export = hasattr(value, "__dlpack__")
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
    except (KeyError, TypeError, ValueError, RuntimeError, BufferError) as error:  # torch: of an element type, or a gradient
        if not can_export:
            raise InteropError(f"{name}: {type(value).__name__} is not an array in device memory ({error})") from error
        interface = None
    # the interface has no word for bfloat16 and float8, and torch's none for its stream
    if can_export and (interface is None or ordered or np.dtype(interface["typestr"]).kind == "V"):
        can_skip = not ordered and type(value).__module__.partition(".")[0] in _SKIPPING
        return _from_dlpack(device, value, name, -1 if can_skip else device.stream.handle)
    if interface is not None:
        stream = interface.get("stream")
        if ordered and stream is not None:
            device.stream.wait(device.as_stream(int(stream)).record())
        return _from_interface(device, value, interface, name)
    raise InteropError(
        f"{name}: {type(value).__name__} is not an array in device memory (__cuda_array_interface__ or __dlpack__)"
    )


def check_resolved(value: Any, name: str) -> None:
    """Refuse an array of torch whose memory holds its elements with another sign: neither protocol has a word for that.

    Raises
    ------
    InteropError
        If its negative or conjugate bit is set.
    """
    for bit, asked, way_out in (("negative", "is_neg", "resolve_neg"), ("conjugate", "is_conj", "resolve_conj")):
        is_set = getattr(value, asked, None)
        if is_set is not None and is_set():
            raise InteropError(f"{name}: the {bit} bit of the array is set, so that its memory holds others; give {way_out}()")


def _from_dlpack(device: Device, value: Any, name: str, stream: int | None) -> Tensor:
    """Return an array by DLPack; `stream` waits for it, and -1 is nobody: who is captured waits for no other stream."""
    is_cuda = device.target == "cuda"
    try:
        kind, ordinal = value.__dlpack_device__()
        wanted = int(kind) in ((CUDA, CUDA_MANAGED) if is_cuda else (CPU, CUDA_HOST))
        capsule = (value.__dlpack__(stream=stream) if is_cuda else value.__dlpack__()) if wanted else None
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InteropError(f"{name}: {type(value).__name__} cannot be exchanged ({error})") from error
    if not wanted or (is_cuda and kind == CUDA and ordinal != device.ordinal):
        places = {CPU: "host memory", CUDA_HOST: "host memory", CUDA: f"the memory of device {ordinal}"}
        place = places.get(int(kind), f"memory of DLPack's device type {int(kind)}")
        where = f"that of device {device.ordinal}" if is_cuda else "host memory"
        raise InteropError(f"{name}: the array lies in {place}, not in {where}; move it there")
    found = read_capsule(capsule, name)
    if found.strides is not None and min(found.strides, default=0) < 0:
        raise InteropError(f"{name}: strides of {found.strides} elements are not positive")
    # nobody takes the capsule, so it lets go of the array when the memory's owner does
    return _shared(device, capsule, found.address, found.dtype, found.shape, found.strides, name)


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
    return _shared(device, owner, int(interface["data"][0]), kind, shape, strides, name)


def _shared(
    device: Device,
    owner: Any,
    address: int,
    kind: DType,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    name: str,
) -> Tensor:
    """Return a Tensor of somebody else's memory, which `owner` keeps alive."""
    import numpy as np

    if not all(shape):
        reach = 0
    else:
        reach = prod(shape) if strides is None else sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    nbytes = reach * kind.itemsize
    bytes_of = None
    if isinstance(device, CudaDevice):
        place = device.foreign_place(address) if nbytes else None
        if place is not None:
            raise InteropError(f"{name}: the array lies in {place}, not in that of device {device.ordinal}; move it there")
    elif nbytes:
        bytes_of = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    else:
        bytes_of = np.empty(0, np.uint8)
    memory = Memory(address, nbytes, bytes_of, owner, MemoryStats())
    return Tensor(memory, device, kind, shape, strides=strides)
