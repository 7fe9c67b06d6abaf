"""Checks of what callers of caches and decoders pass: token ids, masks, numbers of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from numba_kv.batch.arguments import integer, listed
from numba_kv.errors import InputError, ShapeError

if TYPE_CHECKING:
    from numba_kv.batch.sequence import Sequence

__all__ = ["check_ids", "check_mask", "row_numbers", "step_ids"]

#: What embeddings take.
_ID_TYPES = (torch.int64, torch.int32)


def check_ids(name: str, ids: Any) -> None:
    """Refuse what are not token ids of rows: torch.Tensor int64 or int32 [B, n].

    Raises
    ------
    InputError
        If it is no tensor, or of another element type.
    ShapeError
        If it has another number of axes, or no row.
    """
    if not isinstance(ids, torch.Tensor):
        raise InputError(f"{name}: {type(ids).__name__} given, a torch.Tensor of token ids wanted")
    if ids.dtype not in _ID_TYPES:
        raise InputError(f"{name}: elements of {ids.dtype} given, torch.int64 wanted")
    if ids.ndim != 2 or not len(ids):
        raise ShapeError(f"{name}: shape {list(ids.shape)} given, [rows, tokens] wanted")


def check_mask(mask: Any, ids: Any) -> int:
    """Return the most tokens that a row of `mask` shows. Stream: waits.

    Raises
    ------
    InputError
        If it is no tensor, or shows no token of a row: nothing can follow that.
    ShapeError
        If it is not shaped as `ids`.
    """
    if not isinstance(mask, torch.Tensor):
        raise InputError(f"attention_mask: {type(mask).__name__} given, a torch.Tensor or None wanted")
    if mask.shape != ids.shape:
        raise ShapeError(f"attention_mask: shape {list(mask.shape)} given, {list(ids.shape)} wanted, as input_ids")
    shown: list[int] = mask.ne(0).sum(-1).tolist()
    if not all(shown):
        raise InputError(f"attention_mask: row {shown.index(0)} has no token, only pads; leave the row out")
    return max(shown)


def row_numbers(name: str, values: Any) -> list[int]:
    """Return numbers of rows, of a list or an array of integers. Stream: waits for an array.

    Raises
    ------
    InputError
        If they are something else.
    """
    found = listed(name, values.tolist() if hasattr(values, "tolist") else values)
    numbers = []
    for value in found:
        number = integer(value)
        if number is None:
            raise InputError(f"{name}: {value!r} is not the number of a row; integers along one axis are wanted")
        numbers.append(number)
    return numbers


def step_ids(sequence: Sequence, ids: Any, count: int, place: Any) -> Any:
    """Return the tokens that a sequence appends in a step: torch.Tensor int64 [count] on `place`.

    Raises
    ------
    InputError
        If they are not integers, or not as many.
    """
    try:
        found = torch.as_tensor(ids, device=place).flatten()
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"tokens: {type(ids).__name__} given for {sequence!r}, token ids wanted ({error})") from error
    if len(found) != count:
        raise InputError(f"tokens: {len(found)} given, the step has {count} for {sequence!r}")
    if found.dtype is torch.bool or found.is_floating_point() or found.is_complex():
        raise InputError(f"tokens: elements of {found.dtype} given for {sequence!r}, integers wanted")
    return found.long()
