"""Which arrays of a call may lie over each other: what is written must not be what something else reads or writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from numba_kv.errors import InputError, ShapeError

if TYPE_CHECKING:
    from numba_kv.device import Tensor

__all__ = ["are_apart", "check_rows", "check_written", "meet", "same_place"]


def meet(a: Tensor, b: Tensor) -> bool:
    """Return whether the ranges of two tensors have bytes in common."""
    (a_low, a_high), (b_low, b_high) = _span(a), _span(b)
    return a_low < b_high and b_low < a_high


def same_place(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have every element in common."""
    return a.address == b.address and a.shape == b.shape and a.strides == b.strides and a.dtype is b.dtype


def are_apart(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors [T, H, D] share no element, as far as that is plain.

    Their ranges do not meet, or their tokens lie side by side at one pitch, as K and V in [T, 2, H, D].
    """
    if not meet(a, b):
        return True
    first, second = (a, b) if a.address <= b.address else (b, a)
    apart, rest = divmod(second.address - first.address, a.dtype.itemsize)
    pitch = a.strides[0]
    if a.dtype is not b.dtype or rest or not pitch or pitch != b.strides[0]:
        return False
    return _token(first) <= apart % pitch <= pitch - _token(second)


def check_written(name: str, tensor: Tensor) -> None:
    """Raise ShapeError if elements of `tensor` [T, H, D] lie over each other."""
    tokens, heads, dim = tensor.shape
    axes = sorted((s, n) for s, n in zip(tensor.strides[:2], (tokens, heads), strict=True) if n > 1)
    if any(stride < reach for (stride, _), reach in zip(axes, _reaches(axes, dim), strict=False)):
        raise ShapeError(f"{name}: strides {list(tensor.strides)} given; what is written must not overlap itself")


def check_rows(pool: Tensor, k: Tensor, v: Tensor, slots: Tensor, write: bool) -> None:
    """Raise if K and V cannot be moved to or from the pool.

    Raises
    ------
    InputError, ShapeError
        If memory that is written overlaps other memory of the call.
    """
    for name, tensor in (("k", k), ("v", v)):
        if meet(tensor, pool):
            raise InputError(f"{name}: overlaps the pool; a copy of it is needed")
    if write:
        return
    for name, tensor in (("k", k), ("v", v)):
        if meet(tensor, slots):
            raise InputError(f"{name}: overlaps the slots, which are read while it is written")
        check_written(name, tensor)
    if not are_apart(k, v):
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
