"""What a kernel of K and V is bound to: a layer's pool, two dense arrays and slots, checked and cut into the largest units.

Knows shapes, strides and element types. Does not know rows, tables or layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.device import Memory, MemoryStats, Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import RESERVED_PAGES
from numba_kv.kernels.bits import KINDS
from numba_kv.kernels.kv_read import gather_kv, gather_kv_words
from numba_kv.kernels.kv_write import write_kv, write_kv_words

if TYPE_CHECKING:
    from numba_kv.device import Device
    from numba_kv.kernels.jit import Launch

__all__ = ["RowLaunch", "bind_rows", "dense", "flat"]

_UNITS = {1: dtype("uint8"), 2: dtype("uint16"), 4: dtype("uint32"), 8: dtype("uint64")}
_WORD = 8
_MIN_THREADS, _MAX_THREADS = 32, 256
#: Kinds of the dense arrays; float8 is moved between float8 pools and float8 arrays as it is.
_DENSE = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """A bound kernel, its items for each token, and the tokens for which there is room."""

    launch: Launch
    items: int
    tokens: int


def flat(tensor: Tensor, itemsize: int) -> Tensor:
    """Return the memory that a tensor reaches as one dense axis of unsigned integers; a rest at the end is left out."""
    memory = tensor._memory
    count = tensor.reach[1] * tensor.dtype.itemsize // itemsize
    return Tensor(memory, tensor.device, _UNITS[itemsize], (count,), offset_nbytes=tensor.address - memory.address)


def dense(device: Device, value: Any, name: str, heads: int, dim: int) -> Tensor:
    """Return K or V of tokens, ``[T, H, D]`` or ``[B, n, H, D]``, as a tensor ``[T, H, D]`` that shares the memory.

    A foreign array is not kept alive: a later launch over the same address is over an array that its caller holds.

    Raises
    ------
    InteropError
        If it is not an array on the device.
    ShapeError
        If shape, strides or alignment cannot be used.
    """
    tensor = as_tensor(device, value, name)
    tensor.check_open()
    if tensor.ndim not in (3, 4) or tensor.shape[-2:] != (heads, dim):
        raise ShapeError(f"{name}: shape {list(tensor.shape)} given, [T, {heads}, {dim}] or [B, n, {heads}, {dim}] wanted")
    shape, strides = tensor.shape, tensor.strides
    if tensor.ndim == 4:
        if shape[1] == 1:  # the stride of an axis of one says nothing
            strides = (strides[0], strides[0], *strides[2:])
        if shape[0] > 1 and shape[1] > 0 and strides[0] != shape[1] * strides[1]:
            raise ShapeError(f"{name}: strides {list(strides)} given; rows that follow each other wanted, as in a dense array")
        shape, strides = (shape[0] * shape[1], heads, dim), strides[1:]
    if (dim > 1 and strides[2] != 1) or min(strides) < 0:
        raise ShapeError(f"{name}: strides {list(strides)} given; a last axis of stride 1 and no negative stride wanted")
    check_aligned(tensor, name)
    memory = unowned(tensor)._memory
    at = tensor.address - memory.address
    return Tensor(memory, device, tensor.dtype, shape, offset_nbytes=at, strides=strides)


def check_aligned(tensor: Tensor, name: str) -> None:
    """Raise ShapeError if the elements of `tensor` do not lie where a GPU can load them."""
    if tensor.address % tensor.dtype.itemsize:
        raise ShapeError(f"{name}: address {tensor.address:#x} is not aligned to elements of {tensor.dtype}")


def unowned(tensor: Tensor) -> Tensor:
    """Return a tensor over the same bytes that keeps nobody alive: what a launch is bound to that outlives the call."""
    tensor.check_open()
    memory = tensor._memory
    array = None
    if memory.array is not None:
        array = np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory.address))
    lent = Memory(memory.address, memory.nbytes, array, None, MemoryStats())
    at = tensor.address - memory.address
    return Tensor(lent, tensor.device, tensor.dtype, tensor.shape, offset_nbytes=at, strides=tensor.strides)


def bind_rows(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor, factors: Tensor | None, *, write: bool) -> RowLaunch:
    """Bind the kernel that writes tokens to slots of a pool, or reads them.

    Parameters
    ----------
    pool : Tensor [2, N, P, H, D]
        Strides in any order of N, P and H; the last axis dense.
    k, v : Tensor [T, H, D]
        From `dense`.
    slots : Tensor int64 [at least T]
        page * P + offset.
    factors : Tensor float32 [2 * H], optional
        What values of K's and V's heads are multiplied by: only and always where float8 becomes another type, or the reverse.
    write : bool
        Into the pool, or out of it.

    Raises
    ------
    InputError, ShapeError
        If element types cannot be converted, or memory that is written overlaps other memory of the call.

    Cost: compiles on first use. Enqueues nothing.
    """
    _, num_pages, page_tokens, heads, dim = pool.shape
    if k.shape != v.shape or k.dtype is not v.dtype:
        raise ShapeError(f"k, v: {k.dtype} {list(k.shape)} and {v.dtype} {list(v.shape)} differ")
    if k.dtype.name not in _DENSE and k.dtype is not pool.dtype:
        raise ShapeError(f"k, v: {k.dtype} given, one of {', '.join(_DENSE)} or the pool's {pool.dtype} wanted")
    if slots.dtype.name != "int64" or slots.ndim != 1 or not slots.is_contiguous:
        raise ShapeError(f"slots: {slots!r} given, dense int64 with 1 axis wanted")
    _check_overlap(pool, k, v, slots, write)
    changes = k.dtype is not pool.dtype
    if (factors is None) == (changes and pool.dtype.name == "float8_e4m3"):
        raise InputError(
            f"factors: {factors!r} given; {k.dtype} and a pool of {pool.dtype} want {'none' if factors else 'some'}"
        )
    merges = factors is None and all(t.strides[-2] == dim or heads == 1 for t in (pool, k, v))
    count, row = (1, heads * dim) if merges else (heads, dim)
    strides = {
        "row": row,
        "pool_half": pool.strides[0],
        "pool_page": pool.strides[1],
        "pool_token": pool.strides[2],
        "pool_head": pool.strides[3],
        "k_token": k.strides[0],
        "k_head": k.strides[1],
        "v_token": v.strides[0],
        "v_head": v.strides[1],
    }
    values: dict[str, Tensor | int] = {
        "slot_mapping" if write else "slots": slots,
        "heads": count,
        "shift": page_tokens.bit_length() - 1,
        "num_slots": (num_pages - RESERVED_PAGES) * page_tokens,
    }
    size = pool.dtype.itemsize
    used = [n * size for n in strides.values()] + [t.address for t in (pool, k, v)]
    if not changes and all(n % _WORD == 0 for n in used):
        kernel = write_kv_words if write else gather_kv_words
        values |= {"pool": flat(pool, _WORD), "k": flat(k, _WORD), "v": flat(v, _WORD)}
        values |= {name: n * size // _WORD for name, n in strides.items()}
        units = row * size // _WORD
    else:
        kernel = write_kv if write else gather_kv
        for name, tensor in (("pool", pool), ("k", k), ("v", v)):
            values |= {f"{name}{8 * itemsize}": flat(tensor, itemsize) for itemsize in (1, 2, 4)}
        values |= strides
        values |= {"pool_kind": KINDS[pool.dtype.name], "kind": KINDS[k.dtype.name]}
        values["factors"] = factors if factors is not None else Tensor(pool._memory, pool.device, dtype("float32"), (0,))
        units = row
    threads = min(_MAX_THREADS, max(_MIN_THREADS, -(-units // 32) * 32))
    return RowLaunch(kernel.bind(pool.device, values, threads=threads), count, k.shape[0])


def _check_overlap(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor, write: bool) -> None:
    spans = {name: _span(t) for name, t in (("the pool", pool), ("k", k), ("v", v))}
    for name in ("k", "v"):
        if _meet(spans[name], spans["the pool"]):
            raise InputError(f"{name}: overlaps the pool; a copy of it is needed")
    if write:
        return
    for name, tensor in (("k", k), ("v", v)):
        if _meet(spans[name], _span(slots)):
            raise InputError(f"{name}: overlaps the slots, which are read while it is written")
        tokens, heads, dim = tensor.shape
        axes = sorted((s, n) for s, n in zip(tensor.strides[:2], (tokens, heads), strict=True) if n > 1)
        if any(stride < reach for (stride, _), reach in zip(axes, _reaches(axes, dim), strict=False)):
            raise ShapeError(f"{name}: strides {list(tensor.strides)} given; what is written must not overlap itself")
    if not _meet(spans["k"], spans["v"]):
        return
    apart, rest = divmod(abs(v.address - k.address), k.dtype.itemsize)
    pitch = k.strides[0]
    fits = k.strides == v.strides and not rest and pitch and _token(k) <= apart % pitch <= pitch - _token(k)
    if not fits:
        raise InputError(
            "k, v: each lies in the other's range, and both are written; "
            "give separate arrays, or whole tokens side by side as in [T, 2, H, D]"
        )


def _reaches(axes: list[tuple[int, int]], dim: int) -> Iterator[int]:
    """Yield what lies within each axis, from the innermost on, in elements."""
    reach = dim
    for stride, extent in axes:
        yield reach
        reach += (extent - 1) * stride


def _token(tensor: Tensor) -> int:
    """Return the elements from a token's first to its last."""
    _, heads, dim = tensor.shape
    return (heads - 1) * tensor.strides[1] + dim


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.address, tensor.address + tensor.reach[1] * tensor.dtype.itemsize


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]
