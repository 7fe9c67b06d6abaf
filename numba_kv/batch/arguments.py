"""Checks of what callers pass: counts, prompts and lists of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from numba_kv.batch.launches import DeviceCounts
from numba_kv.device import Device, Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.errors import CapacityError, InputError, ShapeError
from numba_kv.kernels import layout

__all__ = ["at_least_one", "device_counts", "integer", "listed", "num_prompt_tokens", "one_prompt", "positive", "prompt_length"]


def integer(value: Any) -> int | None:
    """Return `value` as an int if it is an integer of any kind (not a bool), else None.

    Raises
    ------
    InputError
        If it is too large to be printed, or its own conversion fails.
    """
    # Before NumPy 2.4 its bool has the method too.
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__") or getattr(value, "ndim", 0) != 0:
        return None
    try:
        number = int(value.__index__())
    except TypeError:  # an array without axes has the method, whatever it holds
        return None
    except Exception as error:
        raise InputError(f"{type(value).__name__}: an integer is wanted, and its conversion failed ({error!r})") from error
    if number.bit_length() > 1024:  # Python refuses to print integers of many thousand digits
        raise InputError(f"an integer of {number.bit_length()} bits is given; nothing here is that large")
    return number


def positive(value: Any, limit: int, purpose: str) -> int:
    """Return `value` as an int from 1 to `limit`, the most tokens of a step.

    Raises
    ------
    InputError
        If it is none.
    """
    number = integer(value)
    if number is None or number < 1:
        raise InputError(f"tokens: {value!r} {purpose} is not a positive integer; leave out who appends nothing")
    if number > limit:
        raise InputError(f"tokens: {number} {purpose}, max_batch_tokens is {limit}; take several steps")
    return number


def listed(name: str, values: Any) -> list[Any]:
    """Return the items of an iterable.

    Raises
    ------
    InputError
        If it is none.
    """
    if type(values) is list:
        return values.copy()
    try:
        items = iter(values)
    except TypeError:
        raise InputError(f"{name}: {values!r} cannot be iterated; pass a list, of one item too") from None
    return list(items)


def one_prompt(tokens: Any, num_tokens: Any) -> Any:
    """Return the prompt of a call that takes either token ids or their number.

    Raises
    ------
    InputError
        If neither or both are given, or one in the place of the other.
    """
    if (tokens is None) == (num_tokens is None):
        raise InputError("admit: give either tokens or num_tokens")
    if num_tokens is not None and integer(num_tokens) is None:
        raise InputError(f"num_tokens: {num_tokens!r} is not an integer; token ids go into tokens")
    if tokens is not None and integer(tokens) is not None:
        raise InputError(f"tokens: {tokens!r} is not a sequence of token ids; their number goes into num_tokens")
    return num_tokens if tokens is None else tokens


def prompt_length(prompt: Any, capacity: int) -> int:
    """Return the tokens of a prompt given as token ids or as their number.

    Ids are looked at as far as that is cheap: those of a list (some milliseconds for 100,000) and of a NumPy array; of an
    array that may lie on a device, its type.

    Raises
    ------
    InputError
        If it is neither, or empty.
    CapacityError
        If it is longer than `capacity`.
    """
    number = integer(prompt)
    if number is None:
        number = num_prompt_tokens(prompt)
        _check_ids(prompt)
    if number < 1:
        raise InputError(f"admit: a prompt of {number} tokens; at least 1 is wanted")
    if number > capacity:
        raise CapacityError(
            f"admit: a prompt of {number} tokens exceeds max_kv_cache_capacity {capacity}; shorten it, or plan a larger one",
            needed=number,
            free=capacity,
        )
    return number


def num_prompt_tokens(prompt: Any) -> int:
    """Return the length of a sequence, whose items are not looked at.

    Raises
    ------
    InputError
        If it is none, or not one-dimensional.
    """
    if getattr(prompt, "ndim", 1) != 1 or isinstance(prompt, (str, bytes, Mapping, Set)):
        raise InputError(f"admit: tokens of type {type(prompt).__name__} are not a one-dimensional sequence of token ids")
    try:
        return len(prompt)
    except TypeError:
        raise InputError(f"admit: {prompt!r} is neither a sequence of token ids nor their number") from None


def _check_ids(prompt: Any) -> None:
    """Raise InputError if what is in a prompt cannot be token ids."""
    kind = getattr(prompt, "dtype", None)
    if kind is None:
        wrong = _wrong_id(prompt)
    else:
        is_real = getattr(kind, "is_floating_point", False) or getattr(kind, "is_complex", False)  # of torch, without a `kind`
        if getattr(kind, "kind", "i") not in "iu" or is_real or str(kind) == "torch.bool":
            raise InputError(f"admit: tokens of {kind} are not token ids")
        is_good = not isinstance(prompt, np.ndarray) or not prompt.size or prompt.min() >= 0
        wrong = None if is_good else int(np.flatnonzero(prompt < 0)[0])
    if wrong is not None:
        raise InputError(f"admit: token {wrong} is {prompt[wrong]!r}, which is not a token id")


def _wrong_id(prompt: Any) -> int | None:
    """Return the place of the first item of a sequence that is no token id. Cost: some milliseconds for 100,000."""
    try:
        values = prompt if isinstance(prompt, (list, tuple)) else list(prompt)
    except TypeError:
        raise InputError(f"admit: {prompt!r} is neither a sequence of token ids nor their number") from None
    kinds = set(map(type, values))
    if kinds <= {int}:
        lowest = min(values, default=0)
    elif all(issubclass(kind, np.integer) for kind in kinds):
        lowest = np.array(values).min()
    else:
        lowest = -1
    if lowest >= 0:
        return None
    return next((i for i, value in enumerate(values) if (number := integer(value)) is None or number < 0), None)


def at_least_one(name: str, value: Any) -> int:
    """Return `value` as a positive int, or raise InputError."""
    number = integer(value)
    if number is None or number < 1:
        raise InputError(f"{name}: {value!r} is not a positive integer")
    return number


def device_counts(device: Device, rows: int, counts: Any, take_back: Any, accepted: Any) -> DeviceCounts | None:
    """Return the counts of a step that lie on the device, or None if none are given.

    Raises
    ------
    InputError
        If both `take_back` and `accepted` are given.
    InteropError, ShapeError
        If an array is not int32 [rows] in the memory of the target.
    """
    if counts is None and take_back is None and accepted is None:
        return None
    if take_back is not None and accepted is not None:
        raise InputError("take_back and accepted say the same in two ways; give one of them")
    number = _row_array(device, rows, "counts", counts)
    if accepted is not None:
        return DeviceCounts(number, _row_array(device, rows, "accepted", accepted), layout.ACCEPTED)
    if take_back is not None:
        return DeviceCounts(number, _row_array(device, rows, "take_back", take_back), layout.LAST_TAKE_BACK)
    return DeviceCounts(number, None, layout.NO_BACK)


def _row_array(device: Device, rows: int, name: str, value: Any) -> Tensor | None:
    if value is None:
        return None
    tensor = as_tensor(device, value, name)
    if tensor.dtype.name != "int32" or tensor.shape != (rows,) or not tensor.is_contiguous:
        raise ShapeError(f"{name}: {tensor.dtype} {list(tensor.shape)} given, a dense int32 [{rows}] wanted (one a row)")
    return tensor
