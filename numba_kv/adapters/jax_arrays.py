"""Tensors of numba_kv as arrays of JAX, without a copy. Arrays of JAX are taken as they are, for reading.

JAX takes most of a GPU's memory when it starts; with ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` it leaves room for pools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba_kv.errors import InteropError

if TYPE_CHECKING:
    from numba_kv.device import Tensor

__all__ = ["to_jax"]


def to_jax(tensor: Tensor) -> Any:
    """Return a tensor as an array of JAX, with the same memory, which lives as long as the result.

    JAX takes arrays as constant. Work of the library that writes this memory is seen by what is computed from the array
    afterwards and must not overlap with it: wait for both (``jax.block_until_ready``), and do not donate the array.

    Raises
    ------
    InteropError
        If JAX could only copy it: int64 (`StepView.slot_mapping`) without ``jax_enable_x64``, memory with gaps between elements
        (give the whole tensor and slice the result), or, on the host, an address that is not a multiple of 64.
    StateError
        If the tensor's memory has been given back.

    Stream: on `cuda` as DLPack says: JAX names a stream, which is made to wait for the work enqueued so far.
    """
    import jax

    tensor.check_open()
    kind = tensor.dtype.numpy()
    if jax.dtypes.canonicalize_dtype(kind) != kind:
        raise InteropError(
            f"tensor: {tensor.dtype} would be copied to a smaller type; jax.config.update('jax_enable_x64', True) keeps it"
        )
    if not _has_no_gaps(tensor):
        raise InteropError(
            f"tensor: strides {list(tensor.strides)} of shape {list(tensor.shape)} leave gaps; JAX shares dense memory "
            "only, so give it the whole tensor and slice the result"
        )
    array = jax.dlpack.from_dlpack(tensor)
    if tensor.size and array.unsafe_buffer_pointer() != tensor.address:
        raise InteropError(f"tensor: JAX copied it; its address {tensor.address:#x} is not aligned as JAX wants")
    return array


def _has_no_gaps(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory, in whatever order of the axes."""
    reach = 1
    for stride, extent in sorted((s, n) for s, n in zip(tensor.strides, tensor.shape, strict=True) if n > 1):
        if stride != reach:
            return False
        reach *= extent
    return True
