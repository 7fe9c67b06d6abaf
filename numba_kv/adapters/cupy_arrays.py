"""Tensors of numba_kv as arrays of CuPy, without a copy. Arrays of CuPy are taken as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba_kv.errors import InteropError

if TYPE_CHECKING:
    from numba_kv.device import Tensor

__all__ = ["to_cupy"]


def to_cupy(tensor: Tensor) -> Any:
    """Return a tensor of the `cuda` target as an array of CuPy, with the same memory, which lives as long as the result.

    bfloat16 and float8, which CuPy lacks, arrive as unsigned integers of their size.

    Raises
    ------
    InteropError
        If the tensor is in host memory.
    StateError
        If the tensor's memory has been given back.

    Stream: CuPy's current stream is made to wait for the work enqueued so far on the tensor's device.
    """
    if tensor.device.target != "cuda":
        raise InteropError(f"tensor: it is in host memory (target {tensor.device.target!r}); CuPy takes arrays of a GPU")
    import cupy

    return cupy.from_dlpack(tensor.as_storage() if tensor.dtype.is_extension else tensor)
