"""LaunchCache: launches that stay bound for the arrays with which they were called."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from numba_kv.device import Tensor

__all__ = ["LaunchCache", "place"]

#: Launches that are kept: every layer of a large model with a few arrays each.
MAX_LAUNCHES = 512
_Launch = TypeVar("_Launch")


def place(tensor: Tensor | None) -> tuple[Any, ...]:
    """Return all of a tensor that a bound launch depends on."""
    return () if tensor is None else (tensor.address, tensor.shape, tensor.strides, tensor.dtype.name)


class LaunchCache(Generic[_Launch]):
    """Launches by what they depend on; the one that was not used for longest goes when they are many."""

    def __init__(self) -> None:
        self._launches: OrderedDict[tuple[Any, ...], _Launch] = OrderedDict()

    def get(self, key: tuple[Any, ...]) -> _Launch | None:
        """Return the launch of a key, which counts as a use, or None."""
        found = self._launches.get(key)
        if found is not None:
            self._launches.move_to_end(key)
        return found

    def keep(self, key: tuple[Any, ...], launch: _Launch) -> _Launch:
        """Keep a launch and return it."""
        self._launches[key] = launch
        if len(self._launches) > MAX_LAUNCHES:
            self._launches.popitem(last=False)
        return launch

    def forget(self, part: object) -> None:
        """Drop the launches in whose keys `part` is."""
        for key in [key for key in self._launches if part in key]:
            del self._launches[key]

    def clear(self) -> None:
        """Drop all."""
        self._launches.clear()

    def __len__(self) -> int:
        return len(self._launches)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._launches)
