"""DLPack capsules: what those of other libraries say, and our own.

Our own are NumPy's, with the fields set that NumPy cannot state (bfloat16, float8, device memory). A consumer may let go of an
array at any time: with an exception pending, on a thread without the interpreter's lock, or when the interpreter has ended.
NumPy's capsules are let go of in C, which gets through all of these; a Python function does not.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba_kv.dtypes import DType, dtype
from numba_kv.errors import InteropError

if TYPE_CHECKING:
    from numba_kv.device.tensor import Tensor

__all__ = ["CPU", "CUDA", "CUDA_HOST", "CUDA_MANAGED", "Exported", "device_of", "read_capsule", "to_capsule"]

#: Device types of the header: the host's memory; a GPU's; the host's, page-locked by CUDA; CUDA's managed memory.
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
#: Type codes of the DLPack header; element types are told apart by code and bits.
_CODES = {
    "float32": 2,
    "float16": 2,
    "bfloat16": 4,
    "float8_e4m3": 10,
    "int64": 0,
    "int32": 0,
    "int8": 0,
    "uint8": 1,
    "float64": 2,
    "float8_e5m2": 12,
    "float8_e8m0": 14,
    "int16": 0,
    "uint64": 1,
    "uint32": 1,
    "uint16": 1,
    "bool": 6,
    "complex64": 5,
}


#: Code and bits -> element type.
_KNOWN = {(code, 8 * dtype(name).itemsize): dtype(name) for name, code in _CODES.items()}


@dataclass(frozen=True, slots=True)
class Exported:
    """An array as the capsule of another library describes it.

    Attributes
    ----------
    address : int
        Of its first element.
    kind, ordinal : int
        Device type of the header, and the number of the device.
    dtype : DType
        Element type.
    shape : tuple of int
        Extents.
    strides : tuple of int or None
        Distances between neighbours, in elements; None: dense.
    """

    address: int
    kind: int
    ordinal: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


#: The interpreter's own function under types of ours: those of `ctypes.pythonapi` itself are everybody's.
_PyCapsule_GetPointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Owner:
    """What an exported array holds: the tensor, under NumPy's array protocol as unsigned integers of the same size.

    Attributes
    ----------
    memory : object
        Set when the tensor's memory is closed before the array is let go of: what frees it then.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_tensor", "memory")

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.dtype.itemsize
        self._tensor = tensor
        self.memory: Any = None
        self.__array_interface__ = {
            "shape": tensor.shape,
            "typestr": f"{'|' if size == 1 else '<'}u{size}",
            "data": (tensor.address, False),
            "strides": tuple(s * size for s in tensor.strides),
            "version": 3,
        }


def device_of(tensor: Tensor) -> tuple[int, int]:
    """Return DLPack's device type and number of `tensor`."""
    return (CUDA, tensor.device.ordinal) if tensor.device.target == "cuda" else (CPU, 0)


def to_capsule(tensor: Tensor) -> Any:
    """Return a capsule that shares the tensor's memory; the tensor lives until the consumer is done."""
    import numpy as np

    owner = _Owner(tensor)
    tensor._memory.lend(owner)
    capsule = np.asarray(owner).__dlpack__()  # looks at no element, so that the memory may be a device's
    shared = _DLTensor.from_address(_PyCapsule_GetPointer(capsule, b"dltensor"))  # what the managed record begins with
    shared.device = _Device(*device_of(tensor))
    shared.dtype = _Type(_CODES[tensor.dtype.name], tensor.dtype.itemsize * 8, 1)
    return capsule


def read_capsule(capsule: Any, name: str) -> Exported:
    """Return what a capsule of another library says. It stays as it is: whoever keeps it keeps the memory.

    Parameters
    ----------
    capsule : capsule
        From ``__dlpack__()``, of the form without a version; not taken by anybody.
    name : str
        Of the argument, for messages.

    Raises
    ------
    InteropError
        If it is another capsule, or holds elements of a type that the library does not know.
    """
    try:
        header = _DLTensor.from_address(_PyCapsule_GetPointer(capsule, b"dltensor"))
    except ValueError as error:
        raise InteropError(f"{name}: no DLPack capsule of the form without a version ({error})") from error
    kind = (header.dtype.code, header.dtype.bits)
    known = _KNOWN.get(kind)
    if known is None or header.dtype.lanes != 1:
        code, bits, lanes = *kind, header.dtype.lanes
        raise InteropError(f"{name}: elements of DLPack's type {code} with {bits} bits and {lanes} lanes are not known here")
    strides = tuple(header.strides[: header.ndim]) if header.strides else None
    address = (header.data or 0) + header.byte_offset
    return Exported(address, header.device.kind, header.device.number, known, tuple(header.shape[: header.ndim]), strides)
