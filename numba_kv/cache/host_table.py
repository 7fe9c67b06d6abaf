"""The host's side of a page table: its entries, who may write what, and what the device does not have yet.

Knows rows, pages and the last uploaded state. Does not know devices, streams or who owns the table. One row::

    column        0 ............ w-1   w ..... L-1
    K half        page id or -1        -1
    V half        K + N, or -1         -1

V follows from K, so changes are tracked on the K half alone. Of every slot are kept: how many K entries differ from what
was last uploaded (exact), and a range of columns that holds all of them (``[low, high)``, perhaps too wide). An entry
edit thus costs the same in a table of any size, and an upload looks only at what may have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.errors import InputError, InvariantError, ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["HostTable", "check_integer"]

UNUSED = -1


def check_integer(argument: str, value: object, low: int, high: int, hint: str = "") -> int:
    """Return `value` as an int if it is an integer (Python's or NumPy's, no bool) in ``low..high``.

    Raises
    ------
    InputError
        Otherwise.
    """
    try:
        # NumPy before 2.4 takes its bool for an index, with a warning.
        number = None if isinstance(value, (bool, np.bool_)) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise InputError(f"{argument}: {value!r} is not an integer")
    if not low <= number <= high:
        raise InputError(f"{argument}: {number} is not in {f'{low}..{high}' if low <= high else 'an empty range'}{hint}")
    return number


class HostTable:
    """Entries of a page table in host memory. Owns them.

    Parameters
    ----------
    max_batch, width, stored_width : int
        Slots, w and L.
    num_pages, usable_pages : int
        N, and the ids below which pages may be in the table.
    sparse : bool
        Whether rows may have holes.

    Attributes
    ----------
    entries : int32 array [max_batch, 2, L]
        What the device shall have.
    """

    def __init__(
        self, max_batch: int, width: int, stored_width: int, num_pages: int, usable_pages: int, *, sparse: bool
    ) -> None:
        self.max_batch = max_batch
        self.width = width
        self.stored_width = stored_width
        self.num_pages = num_pages
        self.usable_pages = usable_pages
        self.sparse = sparse
        self.entries = np.full((max_batch, 2, stored_width), UNUSED, np.int32)
        self._k = self.entries[:, 0]
        self._v = self.entries[:, 1]
        self._uploaded = np.full((max_batch, stored_width), UNUSED, np.int32)
        self._num_changed = np.zeros(max_batch, np.int64)
        self._low = np.full(max_batch, stored_width, np.int64)
        self._high = np.zeros(max_batch, np.int64)

    # -- mutators: each checks everything before it writes anything

    def set_identity(self) -> None:
        """Write page ``slot * w + column`` everywhere."""
        wanted = self.max_batch * self.width
        if wanted > self.usable_pages:
            raise InputError(
                f"set_identity: {self.max_batch} rows of {self.width} pages need {wanted}, the pool has {self.usable_pages}"
            )
        self._k[:, : self.width] = np.arange(wanted, dtype=np.int32).reshape(self.max_batch, self.width)
        self._v[:, : self.width] = self._k[:, : self.width] + np.int32(self.num_pages)
        self._num_changed[:] = (self._k != self._uploaded).sum(axis=1)
        self._low[:] = 0
        self._high[:] = self.width

    def set_rows(self, rows: Iterable[tuple[object, object]]) -> None:
        """Write whole rows, all of them or none."""
        checked: dict[int, NDArray[np.int32]] = {}
        try:
            pairs = [(slot, ids) for slot, ids in rows]
        except (TypeError, ValueError):
            raise InputError(f"rows: {rows!r} is not a sequence of pairs (slot, ids)") from None
        for given, ids in pairs:
            slot = self.check_slot(given)
            if slot in checked:
                raise InputError(f"rows: slot {slot} is given twice; give each slot once")
            checked[slot] = self._check_ids(slot, ids)
        for slot, row in checked.items():
            self._k[slot, : len(row)] = row
            self._k[slot, len(row) :] = UNUSED
            self._v[slot] = np.where(self._k[slot] < 0, np.int32(UNUSED), self._k[slot] + np.int32(self.num_pages))
            changed = np.flatnonzero(self._k[slot] != self._uploaded[slot])
            self._num_changed[slot] = changed.size
            self._low[slot] = changed[0] if changed.size else self.stored_width
            self._high[slot] = changed[-1] + 1 if changed.size else 0

    def set_entry(self, slot: object, logical: object, page: object) -> None:
        """Write one page."""
        row, column = self.check_slot(slot), self._check_logical(logical)
        page_id = check_integer("page", page, 0, self.usable_pages - 1, "; clear_entry() unmaps a page")
        held = np.flatnonzero(self._k[row] == page_id)
        if held.size and held[0] != column:
            raise InputError(f"page: {page_id} is at logical page {held[0]} of slot {row} already; clear that entry first")
        self._store(row, column, page_id)

    def clear_entry(self, slot: object, logical: object) -> None:
        """Unmap one page."""
        self._store(self.check_slot(slot), self._check_logical(logical), UNUSED)

    def clear(self) -> None:
        """Unmap everything and take that for what the device has."""
        self.entries.fill(UNUSED)
        self.mark_uploaded(np.arange(self.max_batch))

    # -- what the device lacks

    def changed_slots(self) -> NDArray[np.int64]:
        """Return the slots that differ from what was last uploaded, ascending."""
        return np.flatnonzero(self._num_changed)

    def changed_entries(self) -> NDArray[np.int64]:
        """Return the flat indices into `entries` that differ from what was last uploaded, ascending."""
        slots = self.changed_slots()
        low = self._low[slots]
        lengths = self._high[slots] - low
        starts = np.cumsum(lengths) - lengths
        rows = np.repeat(slots, lengths)
        columns = np.arange(rows.size) + np.repeat(low - starts, lengths)
        differs = self._k[rows, columns] != self._uploaded[rows, columns]
        in_k = rows[differs] * (2 * self.stored_width) + columns[differs]
        return np.sort(np.concatenate((in_k, in_k + self.stored_width)), kind="stable")  # merges the two ascending halves

    def mark_uploaded(self, slots: NDArray[np.int64]) -> None:
        """Take the entries of `slots` for what the device has."""
        self._uploaded[slots] = self._k[slots]
        self._num_changed[slots] = 0
        self._low[slots] = self.stored_width
        self._high[slots] = 0

    # -- invariants

    def check_invariants(self, slots: NDArray[np.int64] | None = None) -> None:
        """Raise InvariantError for the first violation in `slots` (default: all)."""
        k, v = (self._k, self._v) if slots is None else (self._k[slots], self._v[slots])
        live = k >= 0
        derived = np.where(k == UNUSED, np.int32(UNUSED), k + np.int32(self.num_pages))
        bad = (k < UNUSED) | (k >= self.usable_pages) | (v != derived)
        bad[:, self.width :] |= live[:, self.width :]
        if not self.sparse:
            bad[:, 1:] |= live[:, 1:] & ~live[:, :-1]
        ordered = np.sort(k, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        rows = np.flatnonzero(bad.any(axis=1) | twice.any(axis=1))
        if rows.size:
            slot = int(rows[0] if slots is None else slots[rows[0]])
            column, reason = self._first_violation(slot)
            raise InvariantError(f"slot {slot}, logical page {column}: {reason}")

    def _first_violation(self, slot: int) -> tuple[int, str]:
        seen: dict[int, int] = {}
        hole = None
        for column, (k, v) in enumerate(zip(self._k[slot].tolist(), self._v[slot].tolist(), strict=True)):
            if k == UNUSED:
                if v != UNUSED:
                    return column, f"K is unused but V is {v}"
                hole = column if hole is None else hole
                continue
            if not 0 <= k < self.usable_pages:
                return column, f"K {k} is neither -1 nor in 0..{self.usable_pages - 1}"
            if v != k + self.num_pages:
                return column, f"V is {v}, not K + num_pages = {k + self.num_pages}"
            if column >= self.width:
                return column, f"page {k} lies behind the {self.width} pages of a row"
            if hole is not None and not self.sparse:
                return column, f"page {k} follows the unused logical page {hole}; a dense row has no holes (mode='sparse' may)"
            if k in seen:
                return column, f"page {k} is mapped at logical page {seen[k]} too"
            seen[k] = column
        return self.stored_width, "the row changed while it was checked"

    # -- pieces

    def check_slot(self, slot: object) -> int:
        """Return `slot` if there is one of that number."""
        return check_integer("slot", slot, 0, self.max_batch - 1)

    def _check_logical(self, logical: object) -> int:
        return check_integer("logical", logical, 0, self.width - 1)

    def _check_ids(self, slot: int, given: Any) -> NDArray[np.int32]:
        ids = _as_array(slot, given)
        if ids.size > self.width:
            raise InputError(f"ids: {ids.size} pages given for slot {slot}, a row has at most {self.width}")
        lowest = UNUSED if self.sparse else 0
        wrong = np.flatnonzero((ids < lowest) | (ids >= self.usable_pages))
        if wrong.size:
            at = wrong[0]
            allowed = f"{lowest}..{self.usable_pages - 1}" if self.usable_pages else "a pool without usable pages"
            raise InputError(f"ids: page {ids[at]} at index {at} for slot {slot} is not in {allowed}")
        live = ids[ids >= 0]
        values, times = np.unique(live, return_counts=True)
        if values.size != live.size:
            page = values[times > 1][0]
            first, second = np.flatnonzero(ids == page)[:2]
            raise InputError(f"ids: page {page} is given at {first} and at {second} for slot {slot}; a row holds a page once")
        return ids.astype(np.int32)

    def _store(self, slot: int, column: int, page: int) -> None:
        before, uploaded = int(self._k[slot, column]), int(self._uploaded[slot, column])
        if page == before:
            return
        self._k[slot, column] = page
        self._v[slot, column] = page + self.num_pages if page >= 0 else UNUSED
        self._num_changed[slot] += int(page != uploaded) - int(before != uploaded)
        if page != uploaded:
            self._low[slot] = min(self._low[slot], column)
            self._high[slot] = max(self._high[slot], column + 1)
        elif not self._num_changed[slot]:
            self._low[slot], self._high[slot] = self.stored_width, 0


def _as_array(slot: int, ids: Any) -> NDArray[Any]:
    """Return page ids as a one-dimensional array of integers, exact whatever their size."""
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ShapeError(f"ids: {ids.dtype} array of shape {ids.shape} given for slot {slot}, one axis of integers wanted")
        return ids
    if isinstance(ids, (bytes, bytearray, Mapping, Set)):  # iterable, but of no ids or in no order
        raise InputError(f"ids: {type(ids).__name__} for slot {slot} is not a sequence of page ids")
    try:
        values = list(ids)
    except TypeError:
        raise InputError(f"ids: {ids!r} for slot {slot} is not a sequence of page ids") from None
    if not set(map(type, values)) <= {int}:
        values = [check_integer(f"ids[{i}]", value, -(2**63), 2**63 - 1) for i, value in enumerate(values)]
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array(values, object)  # refused by the range check, which names the value
