"""The one module that imports Numba's CUDA package: a successor package is a change here.

`array_from_address` gives a kernel its arrays from 64-bit words, so that a launch passes nothing but integers and no
private argument layout of Numba's has to be known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from numba_kv.device.target import simulator_is_on

__all__ = ["array_from_address", "compile_to_ptx", "cuda", "cuda_device_function", "cuda_module"]

if simulator_is_on():
    from numba import cuda
else:
    cuda = None


def cuda_module() -> Any:
    """Return Numba's CUDA package, not the simulator's; imported by the first call."""
    from numba import cuda as module

    return module


@cache
def array_from_address(kind: str, ndim: int, on_gpu: bool) -> Any:
    """Return an intrinsic `(address, extents) -> dense array` of element type `kind`."""
    if on_gpu:
        from numba.cuda import types
        from numba.cuda.extending import intrinsic
        from numba.cuda.np.arrayobj import populate_array
    else:
        from numba.core import types
        from numba.extending import intrinsic
        from numba.np.arrayobj import populate_array
    from llvmlite import ir

    array_type = types.Array(getattr(types, kind), ndim, "C")
    word = ir.IntType(64)

    @intrinsic
    def array_at(typingctx, address, extents):
        def codegen(context, builder, signature, arguments):
            address_value, extent_values = arguments
            element = context.get_data_type(array_type.dtype)
            if on_gpu:  # through the global address space, so that accesses are ld.global and st.global
                pointer = builder.addrspacecast(
                    builder.inttoptr(address_value, ir.PointerType(element, 1)), ir.PointerType(element)
                )
            else:
                pointer = builder.inttoptr(address_value, ir.PointerType(element))
            itemsize = ir.Constant(word, context.get_abi_sizeof(element))
            shape = [builder.extract_value(extent_values, axis) for axis in range(ndim)]
            strides: list[Any] = []
            step = itemsize
            for extent in reversed(shape):
                strides.insert(0, step)
                step = builder.mul(step, extent)
            view = context.make_array(array_type)(context, builder)
            populate_array(view, data=pointer, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
            return view._getvalue()

        return array_type(types.int64, types.UniTuple(types.int64, ndim)), codegen

    return array_at


def cuda_device_function(function: Any) -> Any:
    """Return `function` as a CUDA device function (a fresh one: its overloads are for one architecture)."""
    return cuda_module().jit(device=True)(function)


@contextmanager
def _architecture(compute_capability: tuple[int, int]) -> Iterator[None]:
    """Let Numba compile device functions for an architecture without asking a driver which one is current."""
    from numba.cuda import dispatcher

    original = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=compute_capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = original


def compile_to_ptx(entry: Any, num_words: int, compute_capability: tuple[int, int]) -> str:
    """Compile a kernel of `num_words` 64-bit integers to PTX. Needs no GPU and no driver."""
    from numba.cuda import types

    signature = types.void(*[types.int64] * num_words)
    with _architecture(compute_capability):
        ptx, _ = cuda_module().compile(entry, signature, cc=compute_capability, device=False, abi="numba", output="ptx")
    return str(ptx)
