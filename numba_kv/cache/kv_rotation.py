"""HeadNorm, and what `rotate_kv` is bound to: Q, K and V of tokens, a rotary table, a layer's pool.

Knows shapes, strides and element types. Does not know layers or steps.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.cache.kv_launch import RowLaunch, Shape, known_on_gpu, known_scalars
from numba_kv.cache.kv_operands import NARROW, check_aligned, dense, flat, is_wide, unowned
from numba_kv.cache.kv_overlap import are_apart, check_written, meet, same_place
from numba_kv.device import Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import RESERVED_PAGES, ceil_div
from numba_kv.kernels.bits import KINDS
from numba_kv.kernels.jit import lanes_of
from numba_kv.kernels.kv_rotate import NO_NORM, rotate_kv

if TYPE_CHECKING:
    from numba_kv.device import Device

__all__ = ["HeadNorm", "Rotation", "bind_rotation", "rotation_of"]

_FLOAT32 = dtype("float32")
_FLOAT, _TINY = struct.Struct("<f"), 2.0**-126
_KINDS = ("float32", "float16", "bfloat16")
#: Channels of a unit, and units that a lane can add up one after the other.
_UNIT, _MOST_UNITS = 16, 63
_WARP = 32
#: Most threads of a block, which are as many as a token has work for; and where nothing is aligned, which takes more registers.
_MOST_THREADS, _UNALIGNED_THREADS = 512, 256
#: Up to how many tokens Q, K and V go ways of their own, measured on an H200; and blocks of a token then.
_FEW_TOKENS, _PARTS = 256, 2
#: More rows than positions of 32 bits reach.
_MOST_ROWS = 1 << 31


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """Root-mean-square norm of each head of Q and K before the rotation (Qwen3, Gemma 3).

    ``x / sqrt(mean(x**2) + eps) * (offset + weight)``, in float32.

    Attributes
    ----------
    q, k : array [D], optional
        Weights on the device, of one type: float32, float16 or bfloat16. None leaves the heads as they are.
    eps : float
        Above zero.
    offset : float
        Added to every weight: 1 for Gemma.
    """

    q: Any = None
    k: Any = None
    eps: float = 1e-6
    offset: float = 0.0

    def bits(self) -> tuple[int, int]:
        """Return `eps` and `offset` as the bits of float32.

        Raises
        ------
        InputError
            If they are no such numbers.
        """
        return _bits("eps", self.eps, _TINY), _bits("offset", self.offset, -math.inf)


def _bits(name: str, value: Any, least: float) -> int:
    """Return a finite number of at least `least` as the bits of float32."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"norm: {name} {value!r} is not a number") from None
    try:
        packed = _FLOAT.pack(number)
    except OverflowError:
        packed = _FLOAT.pack(math.inf)
    rounded = _FLOAT.unpack(packed)[0]
    if not math.isfinite(rounded) or rounded < least:
        wanted = "a finite number above zero" if name == "eps" else "a finite number"
        raise InputError(f"norm: {name} {value!r} given; {wanted} wanted")
    return int.from_bytes(packed, "little")


@dataclass(frozen=True, slots=True)
class Rotation:
    """Operands of one call, as tensors; from `dense` where they are ``[T, H, D]``.

    Attributes
    ----------
    q, q_out : Tensor [T, Hq, D] or None
        Both or none; one tensor for both works in place.
    k, v : Tensor [T, H, D] or None
        Both or none.
    k_out : Tensor [T, H, D] or None
        Gets K as it becomes; may be `k`.
    table : Tensor float32 [S, R] or None
        Cosines of all pairs, then their sines; None rotates nothing.
    positions : Tensor int32 or None
        Row of the table for each token.
    slots : Tensor int64
        Where K and V of each token go.
    interleaved : bool
        Whether neighbours are a pair, instead of halves.
    q_weight, k_weight : Tensor [D] or None
        Of the norm.
    tokens : int
        Tokens that all of them have.
    named : str
        Those that have no more.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    q_out: Tensor | None
    k_out: Tensor | None
    table: Tensor | None
    positions: Tensor | None
    slots: Tensor
    interleaved: bool
    q_weight: Tensor | None
    k_weight: Tensor | None
    tokens: int
    named: str


def vector(device: Device, value: Any, name: str, kinds: tuple[str, ...], least: int, exact: bool = False) -> Tensor:
    """Return a dense axis of at least `least` elements, or just so many, as a tensor that keeps nobody alive.

    Raises
    ------
    ShapeError
        If it is none of the right type.
    """
    tensor = as_tensor(device, value, name)
    tensor.check_open()
    fits = tensor.ndim == 1 and tensor.is_contiguous and (tensor.size == least if exact else tensor.size >= least)
    if not fits or tensor.dtype.name not in kinds:
        size = f"{least}" if exact else f"at least {least}"
        raise ShapeError(f"{name}: {tensor!r} given, a dense axis of {size} elements of {' or '.join(kinds)} wanted")
    check_aligned(tensor, name)
    return unowned(tensor)


def rotary_rows(device: Device, value: Any, dim: int) -> Tensor:
    """Return a rotary table as a tensor [S, R] that keeps nobody alive.

    Raises
    ------
    ShapeError
        If it is not dense float32 of one set of rows, one of them at least, with R even and at most `dim`.
    """
    tensor = as_tensor(device, value, "table")
    tensor.check_open()
    shape = tensor.shape
    is_one_set = tensor.ndim >= 2 and all(n == 1 for n in shape[:-2]) and shape[-2] > 0
    if tensor.dtype is not _FLOAT32 or not is_one_set or not tensor.is_contiguous:
        raise ShapeError(
            f"table: {tensor!r} given, dense float32 [S, R] with a row at least wanted; "
            "of a table with several row sets, gather the rows of the step's tokens first"
        )
    if shape[-1] % 2 or not 2 <= shape[-1] <= dim:
        raise ShapeError(f"table: rows of {shape[-1]} given, an even number of channels up to the heads' {dim} wanted")
    check_aligned(tensor, "table")
    lent = unowned(tensor)
    at = tensor.address - lent._memory.address
    return Tensor(lent._memory, device, tensor.dtype, shape[-2:], offset_nbytes=at)


def rotation_of(device: Device, pool: tuple[int, ...], given: dict[str, Any], slots: Tensor, interleaved: bool) -> Rotation:
    """Return the operands of a call, each checked.

    Parameters
    ----------
    device : Device
        Where they are.
    pool : tuple of int
        The pool's shape.
    given : dict
        Arrays or None: q, k, v, q_out, k_out, table, positions, norm.q, norm.k.
    slots : Tensor
        Of the step.
    interleaved : bool
        See `Rotation`.

    Raises
    ------
    InteropError, ShapeError, InputError
        If one is no array on the device, or not of the right shape.
    """
    heads, dim = pool[3:]
    if (given["k"] is None) != (given["v"] is None):
        raise InputError("k, v: one of them is None; give both or none")
    if given["q"] is None and given["q_out"] is not None:
        raise InputError("q_out: given without q")
    if given["k"] is None and given["k_out"] is not None:
        raise InputError("k_out: given without k")
    found: dict[str, Tensor | None] = {}
    for name in ("q", "k", "v", "q_out", "k_out"):
        value = given[name]
        if value is None:
            found[name] = None
            continue
        own = heads
        if name.startswith("q"):
            shape = as_tensor(device, value, name).shape
            own = shape[-2] if len(shape) > 2 else 0
        found[name] = dense(device, value, name, own, dim)
    tokens = min((t.shape[0] for t in found.values() if t is not None), default=0)
    table = None if given["table"] is None else rotary_rows(device, given["table"], dim)
    weights = [
        None if given[name] is None else vector(device, given[name], name, _KINDS, dim, exact=True)
        for name in ("norm.q", "norm.k")
    ]
    positions = None if table is None else vector(device, given["positions"], "positions", ("int32",), 0)
    named = ", ".join(name for name in ("q", "k", "v") if found[name] is not None)
    if positions is not None and positions.size < tokens:
        tokens, named = positions.size, "positions"
    return Rotation(
        **found,
        table=table,
        positions=positions,
        slots=slots,
        interleaved=interleaved,
        q_weight=weights[0] if found["q"] is not None else None,
        k_weight=weights[1] if found["k"] is not None else None,
        tokens=tokens,
        named=named,
    )


def bind_rotation(pool: Tensor, call: Rotation, factors: Tensor | None, norm_bits: tuple[int, int]) -> RowLaunch:
    """Bind the kernel that normalises, rotates and writes.

    Parameters
    ----------
    pool : Tensor [2, N, P, H, D]
        Strides in any order of N, P and H; the last axis dense.
    call : Rotation
        Checked one by one; here is checked whether they fit each other.
    factors : Tensor float32 [2 * H], optional
        What K and V are multiplied by, where they become float8.
    norm_bits : tuple of int
        `HeadNorm.bits`.

    Raises
    ------
    InputError, ShapeError
        If element types or shapes do not fit, strides in bytes or the pool's slots are 2**31 or more, or memory that is written
        overlaps other memory of the call.

    Cost: compiles on first use. Enqueues nothing.
    """
    given = call.q if call.k is None else call.k
    if given is None:
        raise InputError("q, k, v: none is given")
    _check_types(call, given)
    _check_places(pool, call)
    device, dim = pool.device, pool.shape[4]
    heads = 0 if call.k is None else call.k.shape[1]
    q_heads = 0 if call.q is None else call.q.shape[1]
    rotary = 0 if call.table is None else call.table.shape[1]
    units = ceil_div(rotary, _UNIT) + ceil_div(dim - rotary, _UNIT)
    weights = [w for w in (call.q_weight, call.k_weight) if w is not None]
    if weights and units > _MOST_UNITS:
        raise ShapeError(f"norm: heads of {dim} channels given, at most {_UNIT * (_MOST_UNITS - 1)} can be normalised")
    team = min(1 << (units - 1).bit_length(), _WARP, lanes_of(device, _WARP))
    wide, single = _all_wide(pool, call, dim, rotary), units <= team
    work = (q_heads + 2 * heads) * team
    rounds = ceil_div(work, _MOST_THREADS if wide and single else _UNALIGNED_THREADS)
    threads = ceil_div(ceil_div(work, rounds), _WARP) * _WARP
    values: dict[str, Tensor | int] = {
        "pool": flat(pool, 1),
        "q_weight": _bytes(call.q_weight, given),
        "k_weight": _bytes(call.k_weight, given),
        "table": _bytes(call.table, given),
        "positions": _no(given, "int32") if call.positions is None else call.positions,
        "slots": call.slots,
        "factors": _no(given, "float32") if factors is None else factors,
        "q_heads": q_heads,
        "heads": heads,
        "dim": dim,
        "rotary": rotary,
        "table_rows": 0 if call.table is None else min(call.table.shape[0], _MOST_ROWS),
        "has_q_norm": int(call.q_weight is not None),
        "has_k_norm": int(call.k_weight is not None),
        "inverse_dim": int((np.float32(1.0) / np.float32(dim)).view(np.uint32)),
        "eps": norm_bits[0],
        "norm_offset": norm_bits[1],
        "shift": pool.shape[2].bit_length() - 1,
        "num_slots": (pool.shape[1] - RESERVED_PAGES) * pool.shape[2],
    }
    arrays: dict[str, Tensor | None] = {name: getattr(call, name) for name in ("q", "k", "v", "q_out", "k_out")}
    for name, stride in zip(("half", "page", "token", "head"), pool.strides, strict=False):
        values[f"pool_{name}"] = stride * pool.dtype.itemsize
    for name, tensor in arrays.items():
        values[name] = _bytes(tensor, given)
        for axis, part in enumerate(("token", "head")):
            values[f"{name}_{part}"] = 0 if tensor is None else tensor.strides[axis] * tensor.dtype.itemsize
    _check_narrow(values)
    form = {
        "team_shift": team.bit_length() - 1,
        "has_table": int(call.table is not None),
        "has_k_out": int(call.k_out is not None),
        "exact": int(single and lanes_of(device, threads) == work),
    }
    values |= form
    left = ("table_rows", "num_slots", "pool_half")
    known = known_scalars(device, values, arrays, left) if wide else known_on_gpu(device, values, form)
    known |= {
        "kind": KINDS[given.dtype.name],
        "pool_kind": KINDS[pool.dtype.name if heads else given.dtype.name],
        "weight_kind": KINDS[weights[0].dtype.name] if weights else NO_NORM,
        "interleaved": int(call.interleaved),
        "wide": int(wide),
        "single": int(single),
    }
    shapes = [Shape(0, 1, threads)]
    parts, fewer = _parts_of(device, work, q_heads + 2 * heads)
    if parts and wide and single and not weights:
        few = Shape(0, 1, fewer, parts, rotate_kv.fixed(parts=parts, **known))
        shapes = [few, Shape(_FEW_TOKENS + 1, 1, threads)]
    return RowLaunch(rotate_kv.fixed(parts=0, **known), device, values, 1, call.tokens, *shapes, named=call.named)


def _parts_of(device: Device, work: int, all_heads: int) -> tuple[int, int]:
    """Return in how many blocks, of how many threads, a token is so that every lane has work; (0, 0) if it cannot be."""
    for parts in (_PARTS, 1):
        threads = ceil_div(ceil_div(work, parts), _WARP) * _WARP
        if threads <= _MOST_THREADS and all_heads % parts == 0 and lanes_of(device, threads) * parts == work:
            return parts, threads
    return 0, 0


def _check_narrow(values: dict[str, Tensor | int]) -> None:
    """Raise ShapeError if a stride or the slots are too many for products of 32 bits."""
    for name, number in values.items():
        if isinstance(number, int) and number >= NARROW and name.endswith(("_token", "_head", "_page", "_slots")):
            array, _, what = name.rpartition("_")
            if what == "slots":
                raise ShapeError(f"pool: {number} slots given, fewer than {NARROW} wanted")
            raise ShapeError(f"{array}: a stride of {number} bytes from {what} to {what} given, less than {NARROW} wanted")


def _no(given: Tensor, kind: str) -> Tensor:
    return Tensor(given._memory, given.device, dtype(kind), (0,))


def _bytes(tensor: Tensor | None, given: Tensor) -> Tensor:
    return _no(given, "uint8") if tensor is None else flat(tensor, 1)


def _all_wide(pool: Tensor, call: Rotation, dim: int, rotary: int) -> bool:
    """Return whether every run of eight channels lies on a boundary of its own."""
    if dim % _UNIT or rotary % _UNIT:
        return False
    for tensor in (call.q, call.k, call.v, call.q_out, call.k_out, call.table, call.q_weight, call.k_weight):
        if tensor is not None:
            size = tensor.dtype.itemsize
            if not is_wide(size, tensor.address, *(stride * size for stride in tensor.strides[:-1])):
                return False
    size = pool.dtype.itemsize
    return call.k is None or is_wide(size, pool.address, *(stride * size for stride in pool.strides[:-1]))


def _check_types(call: Rotation, given: Tensor) -> None:
    if given.dtype.name not in _KINDS:
        raise ShapeError(f"q, k, v: {given.dtype} given, one of {', '.join(_KINDS)} wanted")
    for name in ("q", "k", "v", "q_out", "k_out"):
        tensor: Tensor | None = getattr(call, name)
        if tensor is not None and (tensor.dtype is not given.dtype or tensor.shape[0] != given.shape[0]):
            raise ShapeError(
                f"{name}: {tensor.dtype} of {tensor.shape[0]} tokens given, {given.dtype} of {given.shape[0]} wanted"
            )
    if call.q is not None and call.q_out is not None and call.q.shape != call.q_out.shape:
        raise ShapeError(f"q_out: shape {list(call.q_out.shape)} given, {list(call.q.shape)} wanted")
    if call.q_weight is not None and call.k_weight is not None and call.q_weight.dtype is not call.k_weight.dtype:
        raise ShapeError(f"norm: weights of {call.q_weight.dtype} and {call.k_weight.dtype} given, one type wanted")


def _check_places(pool: Tensor, call: Rotation) -> None:
    read = {"q": call.q, "k": call.k, "v": call.v}
    if call.k is not None:
        for name, tensor in read.items():
            if tensor is not None and meet(tensor, pool):
                raise InputError(f"{name}: overlaps the pool; a copy of it is needed")
    others = {
        "table": call.table,
        "positions": call.positions,
        "slots": call.slots,
        "norm": call.q_weight,
        "norm of k": call.k_weight,
        "the pool": pool,
    }
    for name, source in (("q_out", "q"), ("k_out", "k")):
        written: Tensor | None = getattr(call, name)
        if written is None:
            continue
        check_written(name, written)
        for other, tensor in others.items():
            if tensor is not None and meet(written, tensor):
                raise InputError(f"{name}: overlaps {other}")
        for other, tensor in {**read, "q_out": call.q_out}.items():
            if tensor is None or tensor is written or (other == source and same_place(tensor, written)):
                continue
            if not are_apart(written, tensor):
                raise InputError(f"{name}: lies in the range of {other}; give it memory of its own, or that of {source}")
