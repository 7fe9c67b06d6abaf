"""What the attention kernel is bound to: queries, output, and K and V of the step, checked."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.cache.kv_operands import dense, flat, unowned
from numba_kv.device import Memory, MemoryStats, Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InteropError, ShapeError
from numba_kv.geometry import RESERVED_PAGES
from numba_kv.kernels.attention import attend, merge_splits
from numba_kv.kernels.attention_units import UNIT
from numba_kv.kernels.bits import KINDS
from numba_kv.kernels.layout import CHUNKED, FULL, SLIDING

if TYPE_CHECKING:
    from numba_kv.cache.attention_launch import AttentionMemory, Cut
    from numba_kv.cache.kv_cache import LayerStorage
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device import Device, Stream
    from numba_kv.kernels.jit import Launch

__all__ = ["Bound", "StepKV", "bind_attention", "checked_number", "checked_sinks", "checked_step_kv", "rows_of"]

_DENSE = ("float32", "float16", "bfloat16")
_WINDOWS = {"full": FULL, "sliding": SLIDING, "chunked": CHUNKED}
_NEVER = 1 << 40
_CARRY = (
    "carry_k_at", "carry_k_row", "carry_k_token", "carry_k_head", "carry_v_at", "carry_v_row", "carry_v_token", "carry_v_head"
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepKV:
    """K and V of a step that are not in pages: its own [T, H, D], and `carry` tokens of each row before it [B, carry, H, D]."""

    k: Tensor
    v: Tensor
    carry_k: Tensor
    carry_v: Tensor


@dataclass(frozen=True, slots=True)
class Bound:
    """Launches of one layer over one set of addresses, one after the other, and the tokens for which there is room."""

    attend: tuple[Launch, ...]
    merge: Launch
    tokens: int
    q_heads: int

    def run(self, cut: Cut, stream: Stream, scale: float, soft_cap: float) -> None:
        """Enqueue them; no soft cap is 0."""
        scalars = _scalars(cut, scale, soft_cap)
        for launch in self.attend:
            launch(cut.workers, stream, **scalars)
        if cut.splits > 1:
            self.merge(cut.num_tokens * self.q_heads, stream, splits=cut.splits)

    def repeated(self, cut: Cut, scale: float, soft_cap: float) -> list[Callable[[Stream], None]]:
        """Return functions that enqueue them each time; see `Launch.repeated`."""
        for launch in self.attend:
            launch.set(**_scalars(cut, scale, soft_cap))
        found = [launch.repeated(cut.workers) for launch in self.attend]
        if cut.splits > 1:
            self.merge.set(splits=cut.splits)
            found.append(self.merge.repeated(cut.num_tokens * self.q_heads))
        return found


def _scalars(cut: Cut, scale: float, soft_cap: float) -> dict[str, int]:
    numbers = {"num_tokens": cut.num_tokens, "works": cut.works, "splits": cut.splits, "queries": cut.queries}
    return numbers | {"workers": max(1, cut.workers), "scale": float_bits(scale), "soft_cap": float_bits(soft_cap)}


def float_bits(value: float) -> int:
    """Return the bits of a number as float32: how kernels are given it."""
    return int.from_bytes(struct.pack("<f", value), "little")


def checked_number(name: str, value: Any, *, positive: bool) -> float:
    """Return a number that is finite in float32, and positive if wanted.

    Raises
    ------
    InputError
        If it is not.
    """
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
        float_bits(number)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or (positive and not number >= 2.0**-126):
        raise InputError(f"{name}: {value!r} given, a {'positive ' if positive else ''}number that float32 can hold wanted")
    return number


def rows_of(device: Device, value: Any, name: str, heads: int, dim: int, *, written: bool = False) -> Tensor:
    """Return queries or output, [T, Hq, D] with heads that are a multiple of `heads`, as a tensor.

    Raises
    ------
    InteropError
        If it is not an array on the device, or is read-only and to be written.
    ShapeError
        If shape, element type or strides cannot be used.
    """
    tensor = as_tensor(device, value, name)
    tensor.check_open()
    if written and value is not tensor and getattr(getattr(value, "flags", None), "writeable", True) is False:
        raise InteropError(f"{name}: the array is read-only, and is to be written")
    if tensor.ndim != 3 or tensor.shape[2] != dim:
        raise ShapeError(f"{name}: shape {list(tensor.shape)} given, [T, query heads, {dim}] wanted")
    if not tensor.shape[1] or tensor.shape[1] % heads:
        raise ShapeError(f"{name}: {tensor.shape[1]} query heads given, a multiple of the layer's {heads} KV heads wanted")
    if tensor.dtype.name not in _DENSE:
        raise ShapeError(f"{name}: {tensor.dtype} given, one of {', '.join(_DENSE)} wanted")
    if (dim > 1 and tensor.strides[2] != 1) or min(tensor.strides) < 0:
        raise ShapeError(f"{name}: strides {list(tensor.strides)} given; a last axis of stride 1 and no negative stride wanted")
    if tensor.address % tensor.dtype.itemsize:
        raise ShapeError(f"{name}: address {tensor.address:#x} is not aligned to elements of {tensor.dtype}")
    return tensor


def checked_sinks(device: Device, value: Any, q_heads: int) -> Tensor:
    """Return a logit for each query head: dense float32 [Hq] on the device."""
    tensor = as_tensor(device, value, "sinks")
    tensor.check_open()
    if tensor.dtype.name != "float32" or tensor.shape != (q_heads,) or not tensor.is_contiguous or tensor.address % 4:
        raise ShapeError(f"sinks: {tensor!r} given, dense float32 [{q_heads}] wanted: a logit for each query head")
    return tensor


def checked_step_kv(
    device: Device, k: Any, v: Any, carry_k: Any, carry_v: Any, storage: LayerStorage, rows: int, carry: int
) -> StepKV:
    """Return K and V that are not in pages as tensors of one element type.

    Raises
    ------
    InteropError, ShapeError
        If one is not an array on the device, or its shape, strides or element type cannot be used.
    """
    heads, dim = storage.num_kv_heads, storage.head_dim
    own = {"k": dense(device, k, "k", heads, dim), "v": dense(device, v, "v", heads, dim)}
    before = {}
    for name, value in (("carry_k", carry_k), ("carry_v", carry_v)):
        if not carry:  # a window of one token: there is nothing to carry
            like = own[name[-1]]
            before[name] = Tensor(like._memory, device, like.dtype, (rows, 0, heads, dim))
            continue
        tensor = as_tensor(device, value, name)
        tensor.check_open()
        if tensor.shape != (rows, carry, heads, dim):
            raise ShapeError(f"{name}: shape {list(tensor.shape)} given, {[rows, carry, heads, dim]} wanted")
        if (dim > 1 and tensor.strides[3] != 1) or min(tensor.strides) < 0 or tensor.address % tensor.dtype.itemsize:
            raise ShapeError(f"{name}: strides {list(tensor.strides)} given; aligned elements, a dense last axis wanted")
        before[name] = unowned(tensor)
    kinds = {name: tensor.dtype.name for name, tensor in (own | before).items()}
    if len(set(kinds.values())) > 1 or kinds["k"] not in _DENSE:
        given, allowed = ", ".join(kinds.values()), ", ".join(_DENSE)
        raise ShapeError(f"k, v, carry_k, carry_v: {given} given, one of {allowed} for all wanted")
    return StepKV(**own, **before)


def bind_attention(
    pool: Tensor,
    q: Tensor,
    out: Tensor,
    storage: LayerStorage,
    buffers: StepBuffers,
    starts: Tensor,
    memory: AttentionMemory,
    *,
    step_kv: StepKV | None,
    factors: Tensor | None,
    sinks: Tensor | None,
) -> Bound:
    """Bind the kernels for one layer.

    Parameters
    ----------
    pool : Tensor [2, N, P, H, D]
        Strides in any order of N, P and H; the last axis dense.
    q, out : Tensor [T, Hq, D]
        From `rows_of`.
    storage : LayerStorage
        The layer's.
    buffers : StepBuffers
        Tables and lengths.
    starts : Tensor int32 [B + 1]
        First token of each row in the step: those of `buffers`, or of a step with a layout of its own.
    memory : AttentionMemory
        What launches share.
    step_kv : StepKV, optional
        Where keys of long steps are.
    factors : Tensor float32 [2 * H], optional
        What values of a float8 pool are multiplied by.
    sinks : Tensor float32 [Hq], optional
        From `checked_sinks`.

    Raises
    ------
    InputError, ShapeError
        If q and out differ in heads, or memory that is written overlaps other memory of the call.

    Cost: compiles on first use. Enqueues nothing.
    """
    device = pool.device
    heads, dim = pool.shape[3:]
    if q.shape[1:] != out.shape[1:]:
        raise ShapeError(f"q, out: shapes {list(q.shape)} and {list(out.shape)} differ in more than tokens")
    tables = buffers.page_tables[storage.group]
    read = {"the pool": pool, "q": q, "the page table": tables, "sinks": sinks}
    if step_kv is not None:
        read |= {name: getattr(step_kv, name) for name in ("k", "v", "carry_k", "carry_v")}
    _check_written(out, {name: tensor for name, tensor in read.items() if tensor is not None})
    group = q.shape[1] // heads
    _, is_near = memory.target.queries(group, dim, decodes=False)
    empty = Tensor(pool._memory, device, dtype("float32"), (0,))
    written: dict[str, Tensor | int] = {
        "out8": flat(unowned(out), 1),
        "out_token": out.strides[0],
        "out_head": out.strides[1],
        "out_kind": KINDS[out.dtype.name],
        "v_dim": dim,
        "splits": 1,
        "sinks": empty if sinks is None else unowned(sinks),
        "partial": memory.partial,
    }
    values: dict[str, Tensor | int] = written | {
        "q8": flat(unowned(q), 1),
        "q_token": q.strides[0],
        "q_head": q.strides[1],
        "q_kind": KINDS[q.dtype.name],
        "page_table": tables,
        "cu_seqlens": starts,
        "seq_lens": buffers.seq_lens,
        "context_lens": buffers.context_lens,
        "factors": empty if factors is None else factors,
        "spare_floats": memory.floats,
        "spare_integers": memory.integers,
        **dict.fromkeys(("num_tokens", "works", "scale", "soft_cap"), 0),
        **dict.fromkeys(("workers", "queries"), 1),
        "heads": heads,
        "group": group,
        "tile": memory.target.tile,
        "max_parts": memory.target.max_parts,
        "dim": dim,
        "shift": storage.page_tokens.bit_length() - 1,
        "num_pages": storage.num_pages - RESERVED_PAGES,
        "window_kind": _WINDOWS[storage.window.kind],
        "window": storage.window.tokens,
        "long_tokens": buffers.plan.config.max_step_tokens if step_kv is not None else _NEVER,
    }
    size, threads = dim if is_near else 0, memory.target.threads
    wide = _is_wide(pool, dim)
    paged = attend.fixed(kind=KINDS[pool.dtype.name], wide=int(wide), is_dense=0, size=size)
    forms = [paged.bind(device, values | _paged(pool), threads=threads)]
    if step_kv is not None:
        arrays = (step_kv.k, step_kv.v, step_kv.carry_k, step_kv.carry_v)
        memory8, places = _spanned(arrays)
        wide = all(_is_wide(tensor, dim) for tensor in arrays)
        dense_form = attend.fixed(kind=KINDS[step_kv.k.dtype.name], wide=int(wide), is_dense=1, size=size)
        forms.append(dense_form.bind(device, values | _dense(step_kv, memory8, places), threads=threads))
    merge = merge_splits.bind(device, written | {"q_heads": heads * group}, threads=threads)
    tokens = [t.shape[0] for t in (q, out, *(() if step_kv is None else (step_kv.k, step_kv.v)))]
    return Bound(tuple(forms), merge, min(tokens), heads * group)


def _paged(pool: Tensor) -> dict[str, Tensor | int]:
    """Return what says where K and V of a page are."""
    half, page, token, head, _ = pool.strides
    own = {"pool_half": half, "pool_page": page, "k_token": token, "k_head": head, "v_token": token, "v_head": head}
    return {"memory8": flat(pool, 1), **own, **dict.fromkeys(("k_at", "v_at", "carry", *_CARRY), 0)}


def _dense(step: StepKV, memory8: Tensor, places: list[int]) -> dict[str, Tensor | int]:
    """Return what says where K and V of the step, and of the tokens before it, are."""
    (k_token, k_head, _), (v_token, v_head, _) = step.k.strides, step.v.strides
    k_at, v_at, carry_k_at, carry_v_at = places
    carried = (carry_k_at, *step.carry_k.strides[:3], carry_v_at, *step.carry_v.strides[:3])
    own = {"k_at": k_at, "v_at": v_at, "k_token": k_token, "k_head": k_head, "v_token": v_token, "v_head": v_head}
    rest = {"pool_half": 0, "pool_page": 0, "carry": step.carry_k.shape[1]}
    return {"memory8": memory8, **own, **rest, **dict(zip(_CARRY, carried, strict=True))}


def _spanned(tensors: tuple[Tensor, ...]) -> tuple[Tensor, list[int]]:
    """Return the bytes from the first of some tensors to the last, and where each begins, in elements of their one type.

    What lies between them belongs to others and is not touched.
    """
    spans = [_span(tensor) for tensor in tensors if tensor.size]
    first = min((low for low, _ in spans), default=tensors[0].address)
    nbytes = max((high for _, high in spans), default=first) - first
    array = None
    if tensors[0]._memory.array is not None:
        array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(first))
    device, size = tensors[0].device, tensors[0].dtype.itemsize
    span = Tensor(Memory(first, nbytes, array, None, MemoryStats()), device, dtype("uint8"), (nbytes,))
    return span, [(tensor.address - first) // size if tensor.size else 0 for tensor in tensors]


def _is_wide(tensor: Tensor, dim: int) -> bool:
    """Return whether every unit of four channels is aligned to its size."""
    if not tensor.size:
        return True
    steps = [s for n, s in zip(tensor.shape[:-1], tensor.strides[:-1], strict=True) if n > 1]
    return dim % UNIT == 0 and all(s % UNIT == 0 for s in steps) and tensor.address % (UNIT * tensor.dtype.itemsize) == 0


def _check_written(out: Tensor, read: dict[str, Tensor]) -> None:
    span = _span(out)
    for name, tensor in read.items():
        other = _span(tensor)
        if span[0] < other[1] and other[0] < span[1] and not _alternate(out, tensor):
            raise InputError(f"out: overlaps {name}, which is read while it is written; give separate memory")
    tokens, heads, dim = out.shape
    reach = dim
    for stride, extent in sorted((s, n) for s, n in zip(out.strides[:2], (tokens, heads), strict=True) if n > 1):
        if stride < reach:
            raise ShapeError(f"out: strides {list(out.strides)} given; what is written must not overlap itself")
        reach += (extent - 1) * stride


def _alternate(out: Tensor, other: Tensor) -> bool:
    """Return whether whole tokens of both lie side by side, as in [T, Q heads + output heads, D]."""
    pitch, of_out, of_other = (n * out.dtype.itemsize for n in (out.strides[0], _token(out), _token(other)))
    if other.ndim != 3 or other.dtype is not out.dtype or other.strides[0] != out.strides[0] or not pitch:
        return False
    return of_other <= (out.address - other.address) % pitch <= pitch - of_out


def _token(tensor: Tensor) -> int:
    """Return the elements from a token's first to its last."""
    return (tensor.shape[-2] - 1) * tensor.strides[-2] + tensor.shape[-1] if tensor.ndim > 1 else 0


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.address, tensor.address + tensor.reach[1] * tensor.dtype.itemsize
