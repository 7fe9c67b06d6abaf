"""What a kernel of K and V is bound to: a layer's pool, two dense arrays and slots, checked and cut into the largest units.

Knows shapes, strides and element types. Does not know rows, tables or layers.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.cache.kv_launch import RowLaunch, Shape, known_scalars, threads_for
from numba_kv.cache.kv_overlap import check_rows
from numba_kv.device import Memory, MemoryStats, Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import RESERVED_PAGES
from numba_kv.kernels.bits import KINDS
from numba_kv.kernels.kv_move import move_kv
from numba_kv.kernels.kv_read import gather_kv, gather_kv_words
from numba_kv.kernels.kv_write import write_kv, write_kv_words
from numba_kv.kernels.wide_rows import EIGHT, RAW, reciprocal

if TYPE_CHECKING:
    from numba_kv.device import Device

__all__ = ["NARROW", "bind_rows", "check_aligned", "dense", "flat", "flat_slab", "is_wide", "reshaped", "unowned"]

_UNITS = {1: dtype("uint8"), 2: dtype("uint16"), 4: dtype("uint32"), 8: dtype("uint64")}
_WORD = 8
_WIDE = 16
#: Least number that kernels of wide accesses do not take as a stride in bytes, or as a slot.
NARROW = 1 << 31
#: Units that a block should have, one a thread, and from so many tokens on.
_FEW_UNITS, _MANY_TOKENS, _MANY_UNITS = 64, 2048, 128
#: Kinds of the dense arrays; float8 is moved between float8 pools and float8 arrays as it is.
_DENSE = ("float32", "float16", "bfloat16")


def flat(tensor: Tensor, itemsize: int) -> Tensor:
    """Return the memory that a tensor reaches as one dense axis of unsigned integers; a rest at the end is left out."""
    memory = tensor._memory
    count = tensor.reach[1] * tensor.dtype.itemsize // itemsize
    return Tensor(memory, tensor.device, _UNITS[itemsize], (count,), offset_nbytes=tensor.address - memory.address)


def flat_slab(pool: Tensor, nbytes: int, itemsize: int) -> Tensor:
    """Return the `nbytes` of a slab as one dense axis of unsigned integers; `pool` is its first layer's."""
    memory, count = pool._memory, nbytes // itemsize
    return Tensor(memory, pool.device, _UNITS[itemsize], (count,), offset_nbytes=pool.address - memory.address)


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
    strides = _meant(shape, strides)
    memory = unowned(tensor)._memory
    at = tensor.address - memory.address
    return Tensor(memory, device, tensor.dtype, shape, offset_nbytes=at, strides=strides)


def _meant(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of [T, H, D] without those of axes of one that say nothing: a kernel may be compiled with them.

    That of one token is kept where more tokens would have it, as in packed Q, K and V.
    """
    (tokens, heads, dim), (token, head, last) = shape, strides
    head = dim if heads == 1 else head
    if tokens == 1 and (token < heads * dim or token % max(1, dim)):
        token = heads * dim
    return token, head, last


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


def reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a dense tensor in another shape of as many elements, or fewer."""
    memory = tensor._memory
    return Tensor(memory, tensor.device, tensor.dtype, shape, offset_nbytes=tensor.address - memory.address)


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
    check_rows(pool, k, v, slots, write)
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
    # A CPU composes accesses of 16 bytes from single ones, which pays only where elements are converted together.
    wide = changes or pool.device.target != "cpu"
    if wide and not page_tokens & (page_tokens - 1) and _is_wide(pool, k, v, strides):
        return _bind_wide(pool, k, v, slots, factors, values, strides, write)
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
        values["factors"] = factors if factors is not None else _no_factors(pool)
        units = row
    return RowLaunch(kernel, pool.device, values, count, k.shape[0], Shape(0, 1, threads_for(units)))


def _no_factors(pool: Tensor) -> Tensor:
    return Tensor(pool._memory, pool.device, dtype("float32"), (0,))


def is_wide(size: int, *places: int) -> bool:
    """Return whether eight elements of `size` bytes are one access each, or two, at places of so many bytes."""
    return not any(place % min(_WIDE, EIGHT * size) for place in places)


def _is_wide(pool: Tensor, k: Tensor, v: Tensor, strides: dict[str, int]) -> bool:
    """Return whether every unit lies on a boundary of its own size, or of 16 bytes, and numbers fit 32 bits."""
    slots = pool.shape[1] * pool.shape[2]
    if max(slots, *(_WORD * n for name, n in strides.items() if name != "pool_half")) > NARROW:
        return False
    if (strides["row"] * pool.dtype.itemsize % _WIDE if k.dtype is pool.dtype else strides["row"] % EIGHT) != 0:
        return False
    for name, tensor in (("pool", pool), ("k", k), ("v", v)):
        size = tensor.dtype.itemsize
        used = [n * size for key, n in strides.items() if key.startswith(f"{name}_")]
        if not is_wide(_WIDE if k.dtype is pool.dtype else size, *used, tensor.address):
            return False
    return True


def _bind_wide(
    pool: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    factors: Tensor | None,
    values: dict[str, Tensor | int],
    strides: dict[str, int],
    write: bool,
) -> RowLaunch:
    """Bind `move_kv`: strides in bytes, rows in units."""
    heads = pool.shape[3]
    raw = k.dtype is pool.dtype
    row = strides["row"] * k.dtype.itemsize // _WIDE if raw else strides["row"] // EIGHT
    has_heads = values["heads"] != 1
    units = row * heads if has_heads else row
    given: dict[str, Tensor | int] = {
        "slots": slots,
        "factors": factors if factors is not None else _no_factors(pool),
        "tokens": 0,
        "span": 1,
        "units": units,
        "by_units": reciprocal(units),
        "row": row,
        "by_row": reciprocal(row),
        "heads": heads,
        "shift": values["shift"],
        "num_slots": values["num_slots"],
    }
    for name, tensor in (("pool", pool), ("k", k), ("v", v)):
        size = tensor.dtype.itemsize
        given[name] = flat(tensor, 1)
        given |= {key: n * size for key, n in strides.items() if key.startswith(f"{name}_")}
    few, many = max(1, _FEW_UNITS // units), max(1, _MANY_UNITS // units)
    kernel = move_kv.fixed(
        write=int(write),
        kind=RAW if raw else KINDS[k.dtype.name],
        pool_kind=RAW if raw else KINDS[pool.dtype.name],
        has_heads=int(has_heads),
        has_span=int(max(few, many) > 1),
        **known_scalars(pool.device, given, {"k": k, "v": v}, ("tokens", "span", "num_slots", "pool_half")),
    )
    shapes = [Shape(0, few, threads_for(few * units))]
    if many > few:
        shapes.append(Shape(_MANY_TOKENS, many, threads_for(many * units)))
    return RowLaunch(kernel, pool.device, given, 1, k.shape[0], *shapes)
