"""DLPack capsules, made by hand because NumPy's own cannot carry bfloat16 and float8."""

from __future__ import annotations

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


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

#: Exported tensors by the address of their record: alive until the consumer calls the deleter.
_exported: dict[int, tuple[_Managed, Any, Any, Tensor]] = {}


def _release(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


_deleter = _Deleter(_release)


def _release_unused(capsule: int) -> None:
    """Free the record of a capsule that nobody consumed."""
    if ctypes.pythonapi.PyCapsule_IsValid(ctypes.c_void_p(capsule), b"dltensor"):
        _exported.pop(ctypes.pythonapi.PyCapsule_GetPointer(ctypes.c_void_p(capsule), b"dltensor"), None)


_CapsuleDestructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_capsule_destructor = _CapsuleDestructor(_release_unused)
ctypes.pythonapi.PyCapsule_IsValid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _CapsuleDestructor)
ctypes.pythonapi.PyCapsule_New.restype = ctypes.py_object


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
    return ctypes.pythonapi.PyCapsule_New(address, b"dltensor", _capsule_destructor)
