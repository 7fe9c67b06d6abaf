"""RowAdapters: which LoRA adapter each sequence of a batch computes with, wherever its row is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from numba_kv.errors import InputError, InvariantError

if TYPE_CHECKING:
    from numba_kv.weights import LoRAManager
    from numba_kv.weights.lora_slots import LoRAAdapter

__all__ = ["RowAdapters"]


class _Holder(Protocol):
    """A sequence, in a row or waiting on the host."""

    adapter: LoRAAdapter | None


class RowAdapters:
    """Holds the adapters of sequences and keeps `LoRAManager.adapter_ids` in step with their rows.

    Borrows the manager; None: the model takes no adapters. As long as a sequence has an adapter, the batch decides about all
    rows, and `LoRAManager.assign` and `switch` are refused; before and after, rows are left to whoever calls those.

    Attributes
    ----------
    in_use : bool
        Whether a sequence has an adapter, or had one until the next `follow`.
    """

    def __init__(self, manager: LoRAManager | None, rows: int) -> None:
        self._manager = manager
        self._rows = rows
        self.in_use = False

    def hold(self, adapters: Any, count: int) -> list[LoRAAdapter | None]:
        """Return the adapters of `count` new sequences, kept loaded until `release`; the bytes that the names have now.

        Raises
        ------
        InputError
            If there are not as many, one is not loaded, or the model takes none.
        """
        if isinstance(adapters, (str, bytes)) or not isinstance(adapters, Iterable):
            raise InputError(f"adapters: {adapters!r} is not a list; give a name or None for each admitted sequence")
        names = list(adapters)
        if len(names) != count:
            raise InputError(f"adapters: {len(names)} given for {count} admitted sequences")
        wrong = next((name for name in names if name is not None), None)
        if self._manager is None and wrong is not None:
            raise InputError(f"adapters: {wrong!r} given, but the model takes none; see max_lora_rank and lora_targets")
        held: list[LoRAAdapter | None] = []
        try:
            for name in names:
                held.append(None if name is None else self._of(name))
        except BaseException:
            self.release(held)
            raise
        return held

    def release(self, held: Iterable[LoRAAdapter | None]) -> None:
        """Give back what `hold` returned."""
        for adapter in held:
            if adapter is not None and self._manager is not None:
                self._manager.let_go(adapter)

    def start(self, holders: Iterable[_Holder], held: Iterable[LoRAAdapter | None]) -> None:
        """Give each sequence the adapter that was held for it."""
        for holder, adapter in zip(holders, held, strict=True):
            holder.adapter = adapter
            self.in_use |= adapter is not None

    def end(self, holders: Iterable[_Holder]) -> None:
        """Take the adapters of sequences that end away from them."""
        if self.in_use:
            for holder in holders:
                self.release([holder.adapter])
                holder.adapter = None

    def inherit(self, parents: Mapping[Any, _Holder]) -> None:
        """Give sequences the adapters of others: sequence -> whose."""
        if self.in_use:
            wanted = {holder: parent.adapter for holder, parent in parents.items()}
            for holder, adapter in wanted.items():
                before, holder.adapter = holder.adapter, self._again(adapter)
                self.release([before])

    def audit(self, sequences: Mapping[int, _Holder]) -> None:
        """Check that every row computes with the adapter of the sequence in it.

        Raises
        ------
        InvariantError
            Naming the first row that does not.
        """
        if self.in_use and self._manager is not None and not self._manager.is_closed:
            for row, adapter in enumerate(self._manager.rows):
                expected = sequences[row].adapter if row in sequences else None
                if adapter != expected:
                    raise InvariantError(f"adapter_ids[{row}]: {adapter} is there, {expected} is the sequence's")

    def follow(self, sequences: Mapping[int, _Holder]) -> None:
        """Tell the device which row has which adapter. Stream: enqueues one copy if any changed."""
        if self.in_use and self._manager is not None and not self._manager.is_closed:
            rows = {row: sequence.adapter for row, sequence in sequences.items()}
            self._manager.assign_held({row: rows.get(row) for row in range(self._rows)})
            self.in_use = self._manager.is_driven

    def _of(self, name: Any) -> LoRAAdapter:
        if not isinstance(name, str):
            raise InputError(f"adapters: {name!r} is neither the name of an adapter nor None")
        return self._manager.hold(name)  # type: ignore[union-attr]

    def _again(self, adapter: LoRAAdapter | None) -> LoRAAdapter | None:
        """Hold an adapter that is held already once more: the same bytes, whatever its name means now."""
        if adapter is None or self._manager is None or self._manager.is_closed:
            return None
        return self._manager.hold(adapter)
