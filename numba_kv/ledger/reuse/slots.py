"""SlotPool: ids that only the cache holds (copies of window pages, snapshots of states), in order of last use."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from numba_kv.errors import CapacityError, InvariantError, StateError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SlotPool"]

T = TypeVar("T")


class SlotPool(Generic[T]):
    """Free ids, and kept ones with what they are kept for; the one used longest ago goes first.

    Every id is free or kept; `check` proves it. A kept id may be pinned for as long as something reads it.

    Parameters
    ----------
    first, count : int
        The ids are ``first .. first + count - 1``.

    Attributes
    ----------
    epoch : int
        Raised each time an id is given up.
    generation : int64 [count]
        Epoch in which an id was last given up, so that one in an older plan is seen to be stale.
    """

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.epoch = 0
        self.generation = np.zeros(count, np.int64)
        self._free = list(range(first + count - 1, first - 1, -1))
        self._kept: dict[int, T] = {}  # oldest use first
        self._pins: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Ids that nobody holds."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Ids that are kept for something."""
        return len(self._kept)

    @property
    def num_pinned(self) -> int:
        """Kept ids that something reads."""
        return len(self._pins)

    def kept(self) -> Iterable[tuple[int, T]]:
        """Return ids and what they are kept for, oldest use first."""
        return self._kept.items()

    def owner(self, slot: int) -> T:
        """Return what an id is kept for.

        Raises
        ------
        StateError
            If it is not kept.
        """
        if slot not in self._kept:
            raise StateError(f"slot {slot} is not kept, so it is kept for nothing")
        return self._kept[slot]

    def oldest(self, count: int, protected: set[int] | frozenset[int] = frozenset()) -> list[int]:
        """Return up to `count` kept ids that could be given up, oldest use first; changes nothing."""
        return list(islice((i for i in self._kept if i not in self._pins and i not in protected), count))

    def keep(self, owner: T) -> int:
        """Take a free id for `owner`.

        Raises
        ------
        CapacityError
            If none is free.
        """
        if not self._free:
            raise CapacityError(f"slots: 1 is wanted, none of {self.count} free", needed=1, free=0, evictable=len(self._kept))
        slot = self._free.pop()
        self._kept[slot] = owner
        return slot

    def touch(self, slots: Iterable[int]) -> None:
        """Note that kept ids are used now."""
        for slot in slots:
            self._kept[slot] = self._kept.pop(slot)

    def give_up(self, slot: int) -> T:
        """Free a kept id; returns what it was kept for.

        Raises
        ------
        StateError
            If it is not kept, or pinned.
        """
        if slot in self._pins or slot not in self._kept:
            raise StateError(f"slot {slot} is {'still read' if slot in self._pins else 'not kept'}; it cannot be given up")
        owner = self._kept.pop(slot)
        self.epoch += 1
        self.generation[slot - self.first] = self.epoch
        self._free.append(slot)
        return owner

    def pin(self, slots: Iterable[int]) -> None:
        """Hold kept ids while something reads them."""
        for slot in slots:
            self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slots: Iterable[int]) -> None:
        """Undo one `pin` of each id."""
        for slot in slots:
            left = self._pins[slot] - 1
            if left:
                self._pins[slot] = left
            else:
                del self._pins[slot]

    def is_pinned(self, slot: int) -> bool:
        """Return whether something reads an id."""
        return slot in self._pins

    def are_current(self, slots: NDArray[np.int32], epoch: int) -> bool:
        """Return whether ids that were kept in `epoch` have been kept ever since."""
        return epoch == self.epoch or bool((self.generation[slots - self.first] <= epoch).all())

    def check(self) -> None:
        """Check that every id is free or kept, once.

        Raises
        ------
        InvariantError
            Naming the first id that is not.
        """
        seen = sorted([*self._free, *self._kept])
        wanted = list(range(self.first, self.first + self.count))
        if seen != wanted:
            odd = next((i for i in wanted if seen.count(i) != 1), -1)
            raise InvariantError(f"slot {odd} is accounted for {seen.count(odd)} times")
        if not self._pins.keys() <= self._kept.keys():
            raise InvariantError("a slot is pinned that is not kept")
