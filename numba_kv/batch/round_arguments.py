"""Checks of what callers pass to a speculative round: trees, and what was accepted, from the device or from the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.batch.arguments import integer, listed
from numba_kv.cache.kv_operands import check_aligned
from numba_kv.device import Device, Tensor
from numba_kv.device.interop import as_tensor
from numba_kv.errors import InputError, ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.sequence import Sequence

__all__ = ["accepted_array", "node_array", "parents_of", "told_counts", "told_paths"]


def accepted_array(device: Device, rows: int, value: Any) -> Tensor:
    """Return accepted counts on the device.

    Raises
    ------
    InteropError, ShapeError
        If they are not a dense int32 [rows] there.
    """
    tensor = as_tensor(device, value, "accepted")
    if tensor.dtype.name != "int32" or tensor.shape != (rows,) or not tensor.is_contiguous:
        raise ShapeError(f"accepted: {tensor.dtype} {list(tensor.shape)} given, a dense int32 [{rows}] wanted (one a row)")
    tensor.check_open()
    check_aligned(tensor, "accepted")
    return tensor


def node_array(device: Device, name: str, rows: int, most: int, value: Any) -> Tensor:
    """Return ids of nodes on the device: int32 [rows, 1 to most].

    Raises
    ------
    InteropError, ShapeError
        If they are not a dense array of that kind there.
    """
    tensor = as_tensor(device, value, name)
    is_fit = tensor.ndim == 2 and tensor.shape[0] == rows and 1 <= tensor.shape[1] <= most
    if tensor.dtype.name != "int32" or not is_fit or not tensor.is_contiguous:
        given = f"{tensor.dtype} {list(tensor.shape)}"
        raise ShapeError(f"{name}: {given} given, a dense int32 [{rows}, 1 to {most}] wanted (nodes of each row)")
    tensor.check_open()
    check_aligned(tensor, name)
    return tensor


def parents_of(values: Iterable[int], most: int) -> tuple[int, ...]:
    """Return the parents of a tree's nodes, checked.

    Raises
    ------
    InputError
        If there are no nodes or too many, the first is no root, or a parent does not come before its child: nothing is cyclic.
    """
    given = listed("parents", values)
    if not 1 <= len(given) <= most:
        raise InputError(f"parents: {len(given)} nodes, 1 to {most} can be verified in a step")
    found = []
    for node, value in enumerate(given):
        parent = integer(value)
        if parent is None or not (0 <= parent < node if node else parent == -1):
            wanted = f"one of the nodes 0 to {node - 1} before it" if node else "-1: it is the root"
            raise InputError(f"parents[{node}]: {value!r} is not {wanted}")
        found.append(parent)
    return tuple(found)


def told_counts(
    accepted: Mapping[Sequence, Any], active: Mapping[int, Sequence], verified: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return accepted counts by row, from a mapping of every sequence that was verified.

    Raises
    ------
    InputError
        If one is missing or was not verified, or a count is not 0 to its tokens in the step.
    """
    counts = np.zeros(len(verified), np.int32)
    for row, sequence, value in _by_row(accepted, active, verified):
        number = integer(value)
        if number is None or not 0 <= number <= verified[row]:
            raise InputError(f"accepted: {value!r} of {sequence!r} is not in 0..{verified[row]} (its tokens in the step)")
        counts[row] = number
    return counts


def told_paths(
    paths: Mapping[Sequence, Any],
    active: Mapping[int, Sequence],
    verified: NDArray[np.int64],
    parents: tuple[int, ...] | None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return accepted counts by row and paths [rows, most nodes], from a mapping of sequences to the nodes of their paths.

    Raises
    ------
    InputError
        As `told_counts`; if a node is out of range or does not come after the one before it; or, where `parents` are known,
        is not a child of it.
    """
    found: dict[int, list[int]] = {}
    for row, sequence, value in _by_row(paths, active, verified):
        before, path = -1, []
        for place, given in enumerate(listed(f"accepted: path of {sequence!r}", value)):
            node = integer(given)
            where = f"accepted: node {place} of the path of {sequence!r} is {given!r}"
            if node is None or not 0 <= node < verified[row]:
                raise InputError(f"{where}, not in 0..{verified[row] - 1} (its nodes in the step)")
            if node <= before:
                raise InputError(f"{where}, not after {before}: ids rise along a path, and no node is in it twice")
            if parents is not None and parents[node] != before:
                raise InputError(f"{where}, whose parent is {parents[node]} and not {before}")
            path.append(node)
            before = node
        found[row] = path
    nodes = np.full((len(verified), max(1, *map(len, found.values()))), -1, np.int32)
    for row, path in found.items():
        nodes[row, : len(path)] = path
    return np.array([len(found.get(row, ())) for row in range(len(verified))], np.int32), nodes


def _by_row(
    values: Mapping[Sequence, Any], active: Mapping[int, Sequence], verified: NDArray[np.int64]
) -> list[tuple[int, Sequence, Any]]:
    """Return row, sequence and value of every verified sequence."""
    given = {id(sequence): (sequence, value) for sequence, value in values.items()}
    found = []
    for row, sequence in active.items():
        pair = given.pop(id(sequence), None)
        if verified[row] and pair is None:
            raise InputError(f"accepted: {sequence!r} was verified and is missing; name every sequence of the step")
        if pair is not None:
            found.append((row, sequence, pair[1]))
    if given:
        stranger = next(iter(given.values()))[0]
        raise InputError(f"accepted: {stranger!r} is not active in this batch")
    return found
