"""KVPageTable against a naive model: mutators in any order, legal and not, uploads in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from numba_kv.cache.page_table import KVPageTable
from numba_kv.device import Device, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InvariantError, StateError

SLOTS, WIDTH, PAGES = 3, 4, 13
_devices: list[Device] = []


def shared_device() -> Device:
    if not _devices:
        _devices.append(create_device())
    return _devices[0]


class Model:
    """A table as a dict {(slot, logical): page}, and the flat list of what the device has."""

    def __init__(self, sparse: bool, reserved: int, stored: int) -> None:
        self.sparse, self.usable, self.stored = sparse, PAGES - reserved, stored
        self.pages: dict[tuple[int, int], int] = {}
        self.sent: list[int] | None = None
        self.identity = False

    def flat(self) -> list[int]:
        values = [-1] * (SLOTS * 2 * self.stored)
        for (slot, logical), page in self.pages.items():
            values[slot * 2 * self.stored + logical] = page
            values[slot * 2 * self.stored + self.stored + logical] = page + PAGES
        return values

    def row(self, slot: int) -> list[int]:
        return [self.pages.get((slot, logical), -1) for logical in range(WIDTH)]

    def allows_row(self, slot: int, ids: list[int]) -> bool:
        live = [page for page in ids if page != -1]
        legal = all(0 <= page < self.usable for page in live) and (self.sparse or len(live) == len(ids))
        return 0 <= slot < SLOTS and len(ids) <= WIDTH and legal and len(set(live)) == len(live)

    def set_row(self, slot: int, ids: list[int]) -> None:
        for logical in range(WIDTH):
            self.pages.pop((slot, logical), None)
        self.pages.update({(slot, logical): page for logical, page in enumerate(ids) if page != -1})

    def has_hole(self, slots: set[int]) -> bool:
        return any(a == -1 and b != -1 for slot in slots for a, b in zip(self.row(slot), self.row(slot)[1:], strict=False))

    def changed(self) -> list[int]:
        before = self.sent or [-1] * len(self.flat())
        return [i for i, (a, b) in enumerate(zip(before, self.flat(), strict=True)) if a != b]

    def changed_slots(self) -> list[int]:
        return sorted({i // (2 * self.stored) for i in self.changed()})


def count_runs(numbers: list[int]) -> int:
    return sum(n - 1 not in numbers for n in numbers)


slots = st.integers(-1, SLOTS)
logicals = st.integers(-1, WIDTH)
pages = st.integers(-2, PAGES)
page_lists = st.one_of(
    st.lists(pages, max_size=WIDTH + 1),
    st.lists(st.integers(0, PAGES - 3), max_size=WIDTH, unique=True),  # mostly legal, so that tables fill up
)


class PageTableMachine(RuleBasedStateMachine):
    table: KVPageTable
    model: Model

    @initialize(sparse=st.booleans(), reserved=st.sampled_from([0, 2]), extra=st.sampled_from([0, 1]))
    def start(self, sparse: bool, reserved: int, extra: int) -> None:
        device = shared_device()
        self.model = Model(sparse, reserved, WIDTH + extra)
        tensor = device.tensor((SLOTS, 2, WIDTH + extra), dtype("int32"))
        tensor.fill_from(np.full(tensor.shape, 77, np.int32))  # memory before the first upload
        mode: Any = "sparse" if sparse else "dense"
        self.table = KVPageTable(device, SLOTS, WIDTH, PAGES, mode, reserved_pages=reserved, tensor=tensor)
        self.counters = (0, 0)
        self.owner: str | None = None

    def attempt(self, legal: bool, call: str, *arguments: Any) -> bool:
        """Call a mutator; return whether the model has to follow."""
        refusal = StateError if self.owner else None if legal else InputError
        if refusal is not None:
            with pytest.raises(refusal):
                getattr(self.table, call)(*arguments)
            return False
        getattr(self.table, call)(*arguments)
        self.model.identity = call == "set_identity"
        return True

    @rule()
    def set_identity(self) -> None:
        if self.attempt(self.model.usable >= SLOTS * WIDTH, "set_identity"):
            for slot in range(SLOTS):
                self.model.set_row(slot, list(range(slot * WIDTH, (slot + 1) * WIDTH)))

    @rule(slot=slots, ids=page_lists, as_array=st.booleans())
    def set_row(self, slot: int, ids: list[int], as_array: bool) -> None:
        given = np.array(ids, np.int64) if as_array else ids
        if self.attempt(self.model.allows_row(slot, ids), "set_row", slot, given):
            self.model.set_row(slot, ids)

    @rule(rows=st.lists(st.tuples(slots, page_lists), max_size=SLOTS))
    def set_rows(self, rows: list[tuple[int, list[int]]]) -> None:
        legal = all(self.model.allows_row(*row) for row in rows) and len({slot for slot, _ in rows}) == len(rows)
        if self.attempt(legal, "set_rows", rows):
            for row in rows:
                self.model.set_row(*row)

    @rule(slot=slots, logical=logicals, page=pages)
    def set_entry(self, slot: int, logical: int, page: int) -> None:
        legal = 0 <= slot < SLOTS and 0 <= logical < WIDTH and 0 <= page < self.model.usable
        legal = legal and page not in [p for at, p in enumerate(self.model.row(slot)) if at != logical]
        if self.attempt(legal, "set_entry", slot, logical, np.int32(page)):
            self.model.pages[slot, logical] = page

    @rule(slot=slots, logical=logicals)
    def clear_entry(self, slot: int, logical: int) -> None:
        if self.attempt(0 <= slot < SLOTS and 0 <= logical < WIDTH, "clear_entry", slot, logical):
            self.model.pages.pop((slot, logical), None)

    @rule()
    def undo(self) -> None:
        """Go back to what was sent last, entry by entry: nothing is left to send."""
        if self.owner or self.model.sent is None:
            return
        sent = np.array(self.model.sent).reshape(SLOTS, 2, -1)[:, 0, :WIDTH]
        self.set_rows([(slot, []) for slot in range(SLOTS)])
        for (slot, logical), page in np.ndenumerate(sent):
            if page >= 0:
                self.set_entry(slot, logical, int(page))
        assert not self.model.changed()

    def expect_upload(self, call: str, refused: bool) -> bool | None:
        """Upload; return what the call returned, or None where it was refused as expected."""
        refusal = StateError if self.owner else InvariantError if refused else None
        if refusal is None:
            return bool(getattr(self.table, call)())
        with pytest.raises(refusal):
            getattr(self.table, call)()
        return None

    @rule()
    def upload(self) -> None:
        sent = list(range(SLOTS)) if self.model.sent is None else self.model.changed_slots()
        refused = not self.model.sparse and self.model.has_hole(set(sent))
        result = self.expect_upload("upload", refused)
        if result is None:
            return
        assert result == bool(sent)
        if sent:
            self.counters = (len(sent) * 2 * self.model.stored, count_runs(sent))
            self.model.sent = self.model.flat()

    @rule()
    def upload_dirty(self) -> None:
        changed, first = self.model.changed(), self.model.sent is None
        refused = not self.model.sparse and self.model.has_hole(set(self.model.changed_slots()))
        result = self.expect_upload("upload_dirty", refused)
        if result is None:
            return
        assert result == (first or bool(changed))
        self.counters = (len(changed), count_runs(changed))
        self.model.sent = self.model.flat()

    @precondition(lambda self: self.owner is None)
    @rule()
    def lend(self) -> None:
        self.loan = self.table.lend("Batch")
        self.owner = "Batch"
        self.model.pages.clear()
        self.model.sent, self.model.identity = None, False
        self.table.tensor.fill_from(np.full(self.table.tensor.shape, 55, np.int32))

    @precondition(lambda self: self.owner is not None)
    @rule()
    def give_back(self) -> None:
        self.table.give_back(self.loan)
        self.owner = None
        self.model.sent = self.model.flat()

    @invariant()
    def host_device_and_counters_are_the_model(self) -> None:
        assert self.table.host_entries.reshape(-1).tolist() == self.model.flat()
        assert self.table.is_identity == self.model.identity
        assert (self.table.last_upload_entries, self.table.last_upload_ranges) == self.counters
        if self.model.sent is not None:
            assert self.table.tensor.to_host().reshape(-1).tolist() == self.model.sent
        else:
            assert set(self.table.tensor.to_host().reshape(-1).tolist()) == {55 if self.owner else 77}
        if self.model.sparse or not self.model.has_hole(set(range(SLOTS))):
            self.table.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close(even_if_lent=True)


TestPageTable = PageTableMachine.TestCase
