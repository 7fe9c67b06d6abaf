"""DLPack capsules, made by hand because NumPy's own cannot carry bfloat16 and float8."""

from __future__ import annotations

import atexit
import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numba_kv.device.tensor import Tensor

__all__ = ["device_of", "to_capsule"]

_CPU, _CUDA = 1, 2
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


class _Managed(ctypes.Structure):
    pass


#: The interpreter's own functions under types of ours: those of `ctypes.pythonapi` itself are everybody's.
_PyCapsule_IsValid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_PyCapsule_GetPointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_Py_IncRef = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))

_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

#: Exported tensors by the address of their record: alive until the consumer calls the deleter. This belongs to the process,
#: not to a device: a consumer holds nothing but that address, may outlive every object here, and calls back on any thread.
#: An entry is added once and taken out once, each by one dict operation, which the interpreter does whole.
_exported: dict[int, tuple[_Managed, Any, Any, Tensor]] = {}


def _release(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


_deleter = _Deleter(_release)


def _release_unused(capsule: int) -> None:
    """Free the record of a capsule that nobody consumed."""
    if _PyCapsule_IsValid(capsule, b"dltensor"):
        _exported.pop(_PyCapsule_GetPointer(capsule, b"dltensor"), None)


_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_capsule_destructor = _CapsuleDestructor(_release_unused)
_PyCapsule_New = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _CapsuleDestructor)(
    ("PyCapsule_New", ctypes.pythonapi)
)


@atexit.register
def _leave_to_consumers() -> None:
    """Keep what is still exported, without a deleter: a consumer may let go when no Python code can run any more."""
    for managed, *_ in _exported.values():
        managed.deleter = _Deleter()
    _Py_IncRef(_exported)


def device_of(tensor: Tensor) -> tuple[int, int]:
    """Return DLPack's device type and number of `tensor`."""
    return (_CUDA, tensor.device.ordinal) if tensor.device.target == "cuda" else (_CPU, 0)


def to_capsule(tensor: Tensor) -> Any:
    """Return a capsule that shares the tensor's memory; the tensor lives until the consumer is done."""
    extents = ctypes.c_int64 * max(1, tensor.ndim)
    shape, strides = extents(*tensor.shape), extents(*tensor.strides)
    kind, number = device_of(tensor)
    managed = _Managed()
    managed.tensor = _DLTensor(
        tensor.address,
        _Device(kind, number),
        tensor.ndim,
        _Type(_CODES[tensor.dtype.name], tensor.dtype.itemsize * 8, 1),
        ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)),
        0,
    )
    managed.deleter = _deleter
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, strides, tensor)
    return _PyCapsule_New(address, b"dltensor", _capsule_destructor)
