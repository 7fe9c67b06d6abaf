"""What a kernel takes: the declared element type and number of axes of every argument.

A bound launch passes addresses, so a wrong element type would be reinterpreted without a word; declarations are what a
launch is checked against.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from numba_kv.device.tensor import Tensor
from numba_kv.dtypes import DType, dtype
from numba_kv.errors import InputError, ShapeError

__all__ = ["Argument", "array", "memory", "scalar"]

_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Argument:
    """One declared argument: a dense array of `ndim` axes, or a 64-bit integer (`dtype` None).

    With a `value` it is no argument but a constant of the compiled kernel. Without `has_extent` an array of one axis is passed
    as its address alone.
    """

    dtype: DType | None
    ndim: int = 0
    value: int | None = None
    has_extent: bool = True

    @property
    def storage_name(self) -> str:
        """Element type that a kernel sees: an integer of the same size for types that Numba lacks; empty for a scalar."""
        if self.dtype is None:
            return ""
        return self.dtype.storage_name if self.dtype.is_extension else self.dtype.name

    @property
    def words(self) -> int:
        """64-bit words it takes in a parameter block: address and extents, or the value; a constant takes none."""
        if self.value is not None:
            return 0
        return 1 if self.dtype is None or not self.has_extent else 1 + self.ndim

    def fixed(self, value: int) -> Argument:
        """Return the scalar as a constant."""
        if self.dtype is not None:
            raise InputError("an array cannot be a constant")
        return Argument(None, 0, index(value))

    def pack(self, name: str, value: Any) -> list[int]:
        """Return the words of `value`.

        Raises
        ------
        ShapeError, InputError
            If it is not what was declared.
        StateError
            If the tensor's memory has been given back.
        """
        if self.dtype is None:
            try:
                word = index(value)
            except TypeError:
                raise InputError(f"{name}: {value!r} is not an integer") from None
            if word not in _INT64:
                raise InputError(f"{name}: {word} does not fit 64 bits")
            return [word]
        if not isinstance(value, Tensor):
            raise InputError(f"{name}: {type(value).__name__} is not a Tensor")
        value.check_open()
        if value.dtype is not self.dtype or value.ndim != self.ndim:
            raise ShapeError(f"{name}: {value.dtype} with {value.ndim} axes given, {self.dtype} with {self.ndim} wanted")
        if not value.is_contiguous:
            raise ShapeError(f"{name}: strides {value.strides} given, a dense tensor wanted")
        return [value.address, *value.shape] if self.has_extent else [value.address]


def array(kind: str, ndim: int = 1) -> Argument:
    """Declare a dense array of element type `kind`."""
    return Argument(dtype(kind), ndim)


def memory(kind: str) -> Argument:
    """Declare a dense axis of element type `kind` whose extent the kernel does not ask for."""
    return Argument(dtype(kind), 1, has_extent=False)


def scalar() -> Argument:
    """Declare a 64-bit integer."""
    return Argument(None)
