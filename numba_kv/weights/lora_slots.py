"""Slots: which adapter is where, and who uses it. Plain host state.

Knows names, versions and reference counts. Does not know devices or bytes. A slot is free, held by the newest bytes of a
name, or held by bytes that were replaced while something still used them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.errors import CapacityError, InputError, StateError

if TYPE_CHECKING:
    from numba_kv.weights.lora_adapter import HostAdapter

__all__ = ["LoRAAdapter", "SlotTable"]


@dataclass(frozen=True, kw_only=True)
class LoRAAdapter:
    """One version of a loaded adapter.

    Attributes
    ----------
    name : str
        Given by the user.
    version : int
        1 for the first bytes under the name; one more each time they change, also over an unload.
    slot : int
        Where it is: what `adapter_ids` of its rows hold.
    content_hash : bytes
        128 bits of what it computes; equal bytes under another name have the same.
    rank : int
        Largest rank of a target.
    targets : tuple of str
        Names of the targets that it changes.
    source : str
        Where it came from.
    """

    name: str
    version: int
    slot: int
    content_hash: bytes
    rank: int
    targets: tuple[str, ...]
    source: str


class SlotTable:
    """State of every slot and row.

    Parameters
    ----------
    num_slots : int
        Slot 0 is the zero adapter and never given away.
    max_adapters : int
        Names at once.
    num_rows : int
        Rows of the batch.

    Attributes
    ----------
    named : dict of str to LoRAAdapter
        Newest bytes of each name.
    held : dict of int to LoRAAdapter
        What each slot that is not free holds.
    row_slots : list of int
        Slot of each row.
    active : LoRAAdapter or None
        What the view shows.
    num_sequences : int
        Sequences of a batch that compute with an adapter.
    """

    def __init__(self, num_slots: int, max_adapters: int, num_rows: int) -> None:
        self.named: dict[str, LoRAAdapter] = {}
        self.held: dict[int, LoRAAdapter] = {}
        self.row_slots = [0] * num_rows
        self.active: LoRAAdapter | None = None
        self._max_adapters = max_adapters
        self._free = list(range(num_slots - 1, 0, -1))  # the lowest is at the end
        self._acquired = [0] * num_slots
        self._holds = [0] * num_slots
        self.num_sequences = 0
        self._history: dict[str, tuple[int, bytes]] = {}

    def of(self, name: object) -> LoRAAdapter:
        """Return the newest bytes of a name.

        Raises
        ------
        InputError
            If it is not loaded.
        """
        found = self.named.get(name) if isinstance(name, str) else None
        if found is None:
            loaded = ", ".join(map(repr, list(self.named)[:8])) or "none"
            raise InputError(f"adapter: {name!r} is not loaded; loaded are {loaded}")
        return found

    def slot_of(self, adapter: str | LoRAAdapter | None) -> int:
        """Return the slot of a name's newest bytes, of exactly those bytes, or 0 for None.

        Raises
        ------
        InputError, StateError
            If the name is not loaded, or the bytes are gone.
        """
        if adapter is None:
            return 0
        if not isinstance(adapter, LoRAAdapter):
            return self.of(adapter).slot
        if self.held.get(adapter.slot) != adapter:
            raise StateError(f"adapter: version {adapter.version} of {adapter.name!r} is not loaded any more")
        return adapter.slot

    def users(self, slot: int) -> int:
        """Return how many rows, acquisitions and views use a slot."""
        viewed = self.active is not None and self.active.slot == slot
        return self.row_slots.count(slot) + self._acquired[slot] + self._holds[slot] + viewed

    def take(self, name: str) -> int:
        """Take a free slot for new bytes of `name`.

        Raises
        ------
        CapacityError
            If there is none, or too many names are loaded.
        """
        idle = sum(not self.users(adapter.slot) for adapter in self.named.values())
        if name not in self.named and len(self.named) >= self._max_adapters:
            raise CapacityError(
                f"adapters: {len(self.named)} are loaded, as many as max_adapters allows; unload one ({idle} are not in use)",
                needed=1,
                free=0,
                evictable=idle,
            )
        if not self._free:
            old = [a for a in self.held.values() if self.named.get(a.name) is not a]
            said = ", ".join(f"version {a.version} of {a.name!r} ({self.users(a.slot)} users)" for a in old)
            raise CapacityError(
                f"adapters: no slot is free: {said} replaced but still in use; assign those rows again or release them",
                needed=1,
                free=0,
                evictable=idle,
            )
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Free a slot that was taken and not put to use."""
        self._free.append(slot)
        self._free.sort(reverse=True)

    def put(self, name: str, slot: int, adapter: HostAdapter) -> LoRAAdapter:
        """Make what was written to `slot` the newest bytes of `name`; the bytes before go once nothing uses them."""
        version, before = self._history.get(name, (0, b""))
        version += before != adapter.content_hash
        found = LoRAAdapter(
            name=name,
            version=version,
            slot=slot,
            content_hash=adapter.content_hash,
            rank=max(one.rank for one in adapter.matrices),
            targets=tuple(one.target.name for one in adapter.matrices if one.pieces),
            source=adapter.where,
        )
        self._history[name] = (version, adapter.content_hash)
        old = self.named.get(name)
        self.named[name] = self.held[slot] = found
        if old is not None:
            self._free_if_unused(old.slot)
        return found

    def drop(self, adapter: LoRAAdapter) -> None:
        """Forget the newest bytes of a name.

        Raises
        ------
        StateError
            If something uses them.
        """
        users = self.users(adapter.slot)
        if users:
            rows = [row for row, slot in enumerate(self.row_slots) if slot == adapter.slot]
            viewed = self.active is not None and self.active.slot == adapter.slot
            raise StateError(
                f"adapter {adapter.name!r} is in use by rows {rows[:8]}{'...' if len(rows) > 8 else ''}, "
                f"{self._holds[adapter.slot]} sequences, {self._acquired[adapter.slot]} acquisitions"
                f"{' and the view' if viewed else ''}; assign, retire or release them first"
            )
        del self.named[adapter.name]
        self._free_if_unused(adapter.slot)

    def acquire(self, slot: int) -> None:
        """Count a user of a slot."""
        self._acquired[slot] += 1

    def hold(self, slot: int) -> None:
        """Count a sequence of a batch that computes with a slot."""
        self._holds[slot] += 1
        self.num_sequences += 1

    def let_go(self, slot: int) -> None:
        """Count such a sequence less."""
        self._holds[slot] -= 1
        self.num_sequences -= 1
        self._free_if_unused(slot)

    def release(self, adapter: LoRAAdapter) -> None:
        """Count a user less.

        Raises
        ------
        StateError
            If there is none to give back.
        """
        if not isinstance(adapter, LoRAAdapter):
            raise InputError(f"adapter: {adapter!r} is not what acquire returned")
        if self.held.get(adapter.slot) != adapter or not self._acquired[adapter.slot]:
            raise StateError(f"adapter {adapter.name!r} version {adapter.version} was not acquired, or is given back already")
        self._acquired[adapter.slot] -= 1
        self._free_if_unused(adapter.slot)

    def set_rows(self, row_slots: list[int], active: int | None = None) -> None:
        """Set the slot of every row, and with `active` that of the view; free what nothing uses any more."""
        before = {*self.row_slots, *([self.active.slot] if self.active is not None else [])}
        self.row_slots = row_slots
        if active is not None:
            self.active = self.held.get(active)
        for slot in before:
            self._free_if_unused(slot)

    def _free_if_unused(self, slot: int) -> None:
        """Free a slot of replaced or unloaded bytes that nothing uses."""
        adapter = self.held.get(slot)
        if adapter is not None and self.named.get(adapter.name) is not adapter and not self.users(slot):
            del self.held[slot]
            self.give_back(slot)
