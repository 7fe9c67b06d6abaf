"""What the lanes of a block share: `lanes_wait`, and memory that is near them on a GPU: `near_floats` and its like."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from numba_kv.kernels.gpu_intrinsics import load_floats, store_floats
from numba_kv.kernels.numba_targets import cuda_device_function, cuda_module
from numba_kv.kernels.routines import primitive

__all__ = [
    "NEAR_FLOATS",
    "NEAR_INTEGERS",
    "NEAR_LANES",
    "NEAR_TILE",
    "lanes_wait",
    "near_floats",
    "near_four",
    "near_integers",
    "near_tile",
    "set_near_four",
]

#: Elements of the memory that a block has to itself: 30 KiB, so that seven blocks share a multiprocessor.
NEAR_FLOATS, NEAR_INTEGERS = 7168, 264
#: Elements of a tile that a block has to itself instead: 16 KiB, so that twelve blocks share a multiprocessor.
NEAR_TILE = 4096
#: Lanes of a block whose kernel is compiled for this memory.
NEAR_LANES = 128


def _simulated_wait() -> None:
    threading.current_thread().syncthreads()  # type: ignore[attr-defined]


def _gpu_wait(architecture: tuple[int, int]) -> Any:
    cuda = cuda_module()

    def lanes_wait():
        cuda.syncthreads()

    return cuda_device_function(lanes_wait)


def _near_array(kind: str, count: int) -> Any:
    """Return an intrinsic that takes an array and returns `count` elements of shared memory instead.

    ``cuda.shared.array`` would do if a device function could return an array.
    """
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic
    from numba.cuda.np.arrayobj import populate_array

    array_type = types.Array(getattr(types, kind), 1, "C")
    word, shared = ir.IntType(64), 3

    @intrinsic
    def near(typingctx, spare):
        def codegen(context, builder, signature, arguments):
            element = context.get_data_type(array_type.dtype)
            module = builder.module
            block = ir.GlobalVariable(
                module, ir.ArrayType(element, count), module.get_unique_name(f"near_{kind}"), addrspace=shared
            )
            block.linkage, block.align = "internal", 16
            block.initializer = ir.Constant(block.value_type, ir.Undefined)
            pointer = builder.addrspacecast(builder.bitcast(block, ir.PointerType(element, shared)), ir.PointerType(element))
            size = ir.Constant(word, context.get_abi_sizeof(element))
            view = context.make_array(array_type)(context, builder)
            shape = [ir.Constant(word, count)]
            populate_array(view, data=pointer, shape=shape, strides=[size], itemsize=size, meminfo=None)
            return view._getvalue()

        return array_type(array_type), codegen

    return near


def _gpu_floats(architecture: tuple[int, int]) -> Any:
    return _near_array("float32", NEAR_FLOATS)


def _gpu_integers(architecture: tuple[int, int]) -> Any:
    return _near_array("int64", NEAR_INTEGERS)


@primitive(gpu=_gpu_wait, sim=_simulated_wait)
def lanes_wait():
    """Wait until every lane of the block is here; what each wrote before, in whatever memory, all of them read after."""


@primitive(gpu=_gpu_floats)
def near_floats(spare):
    """Return `NEAR_FLOATS` floats that the lanes share: the given array, on `cuda` shared memory."""
    return spare


def _gpu_tile(architecture: tuple[int, int]) -> Any:
    return _near_array("float32", NEAR_TILE)


@primitive(gpu=_gpu_tile)
def near_tile(spare):
    """Return `NEAR_TILE` floats that the lanes share: the given array, on `cuda` shared memory."""
    return spare


@primitive(gpu=lambda architecture: load_floats())
def near_four(near, at):
    """Return four neighbours of a memory that is near; `at` is a multiple of 4."""
    i = np.uint64(at)
    return near[i], near[i + np.uint64(1)], near[i + np.uint64(2)], near[i + np.uint64(3)]


@primitive(gpu=lambda architecture: store_floats())
def set_near_four(near, at, numbers):
    """Set four neighbours of a memory that is near; `at` is a multiple of 4."""
    i = np.uint64(at)
    near[i], near[i + np.uint64(1)], near[i + np.uint64(2)], near[i + np.uint64(3)] = numbers


@primitive(gpu=_gpu_integers)
def near_integers(spare):
    """Return `NEAR_INTEGERS` 64-bit integers that the lanes share: the given array, on `cuda` shared memory."""
    return spare
