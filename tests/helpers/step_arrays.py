"""Small hand-made arrays for the step kernels: NumPy on this side, a launch over a copy of them on the device.

Between the groups' tables lie guard elements that nothing may write.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_kv.device import Device
from numba_kv.dtypes import dtype
from numba_kv.geometry import Window, ceil_div, mapped_pages, ring_pages
from numba_kv.kernels import layout
from numba_kv.kernels.jit import Kernel

#: Stands wherever no kernel may write, and wherever a kernel has not written yet.
UNWRITTEN = 77
#: State of rows that the device keeps once a group.
_PER_GROUP = ("lengths", "high_water", "appended")
_KINDS = {"full": layout.FULL, "sliding": layout.SLIDING, "chunked": layout.CHUNKED}


@dataclass(frozen=True)
class Group:
    """A window group as kernels see it; a full group without pages is the empty one."""

    window: Window
    page: int
    ring: int
    width: int
    num_pages: int

    @property
    def is_empty(self) -> bool:
        return self.window.is_full and self.num_pages == 2

    @property
    def null_page(self) -> int:
        return self.num_pages - 2

    def lowest(self, query: int) -> int:
        return self.window.lowest_key(query)


def full_group(page: int, width: int, pages: int) -> Group:
    """Return a full group of `pages` usable pages; 0 pages make the empty group."""
    return Group(Window("full"), page, 0, width, pages + 2)


def window_group(kind: Any, tokens: int, page: int, width: int, rows: int, max_step_tokens: int = 1) -> Group:
    """Return a window group with the rings of `rows` rows."""
    window = Window(kind, tokens)
    ring = ring_pages(window, page, max_step_tokens, page * width)
    return Group(window, page, ring, width, rows * ring + 2)


class StepArrays:
    """Row state, tables and step data of a few rows: NumPy arrays by the name that kernels know them under.

    The rows start empty. Window rows own a ring each, at shuffled ids; full rows hold nothing.
    """

    def __init__(self, groups: list[Group], rows: int, tokens: int, *, seed: int = 0, edit_words: int = 1) -> None:
        self.groups, self.rows, self.tokens = groups, rows, tokens
        self.arrays: dict[str, np.ndarray] = {}
        at = {"page_tables": 1, "block_tables": 1, "slot_mapping": 1, "carry_slots": 1}
        described = np.zeros((len(groups), 16), np.int64)
        for g, group in enumerate(groups):
            kind = layout.EMPTY if group.is_empty else _KINDS[group.window.kind]
            carry = max(0, group.window.tokens - 1)
            described[g, :11] = [
                group.page.bit_length() - 1, kind, group.window.tokens, group.ring, group.width, group.num_pages,
                at["page_tables"], at["block_tables"], at["slot_mapping"], at["carry_slots"], carry,
            ]  # fmt: skip
            for name, size in (
                ("page_tables", rows * 2 * group.width),
                ("block_tables", rows * group.width),
                ("slot_mapping", tokens),
                ("carry_slots", rows * carry),
            ):
                at[name] += size + 1  # a guard element behind each
        self.arrays["groups"] = described
        for name, size in at.items():
            kind = np.int64 if name in ("slot_mapping", "carry_slots") else np.int32
            self.arrays[name] = np.full(size, UNWRITTEN, kind)
        for name in (*_PER_GROUP, "floors", "leased", "live", "status", "counts", "take_back"):
            self.arrays[name] = np.zeros(rows, np.int32)
        self.arrays["live"][:] = 1
        for name, size in (("seq_lens", rows), ("context_lens", rows), ("positions", tokens)):
            self.arrays[name] = np.full(size, UNWRITTEN, np.int32)
        self.arrays["mapped_begin"] = np.zeros((len(groups), rows), np.int32)
        self.arrays["cu_seqlens_q"] = np.zeros(rows + 1, np.int32)
        self.arrays["edits"] = np.zeros(edit_words, np.int32)
        order = np.random.default_rng(seed)
        for g, group in enumerate(groups):
            self.page_table(g)[:] = -1
            self.blocks(g)[:] = group.null_page
            if not group.window.is_full:
                rings = order.permutation(rows * group.ring).reshape(rows, group.ring)
                self.blocks(g)[:] = rings[:, np.arange(group.width) % group.ring]

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.__dict__["arrays"][name]
        except KeyError:
            raise AttributeError(name) from None

    def page_table(self, g: int) -> np.ndarray:
        """Return the group's page table [B, 2, L], a view."""
        group, at = self.groups[g], int(self.arrays["groups"][g, layout.TABLE_AT])
        return self.arrays["page_tables"][at : at + self.rows * 2 * group.width].reshape(self.rows, 2, group.width)

    def blocks(self, g: int) -> np.ndarray:
        """Return the group's block table [B, L], a view."""
        group, at = self.groups[g], int(self.arrays["groups"][g, layout.BLOCK_AT])
        return self.arrays["block_tables"][at : at + self.rows * group.width].reshape(self.rows, group.width)

    def slots(self, g: int) -> np.ndarray:
        """Return the group's slot mapping [T], a view."""
        at = int(self.arrays["groups"][g, layout.SLOT_AT])
        return self.arrays["slot_mapping"][at : at + self.tokens]

    def carry(self, g: int) -> np.ndarray:
        """Return the group's carry slots [B, W - 1], a view."""
        at, width = (int(self.arrays["groups"][g, c]) for c in (layout.CARRY_AT, layout.CARRY_WIDTH))
        return self.arrays["carry_slots"][at : at + self.rows * width].reshape(self.rows, width)

    def lay_out(self, room: list[int]) -> None:
        """Give each row room for so many tokens of the step."""
        self.arrays["cu_seqlens_q"][1:] = np.cumsum(room)

    def lease(self, row: int, pages: list[int]) -> None:
        """Give a row its pages of the full group."""
        self.page_table(0)[row, 0, : len(pages)] = self.blocks(0)[row, : len(pages)] = pages
        self.page_table(0)[row, 1, : len(pages)] = np.array(pages) + self.groups[0].num_pages
        self.arrays["leased"][row] = len(pages)

    def slot(self, g: int, row: int, position: int) -> int:
        """Return where a position of a row lies, by the block table."""
        page = self.groups[g].page
        return int(self.blocks(g)[row, position // page]) * page + position % page

    def copy(self) -> StepArrays:
        """Return a copy."""
        other = StepArrays.__new__(StepArrays)
        other.__dict__.update(self.__dict__, arrays={name: values.copy() for name, values in self.arrays.items()})
        return other

    def launch(self, kernel: Kernel, device: Device, items: int, **scalars: int) -> StepArrays:
        """Run a kernel over a copy of the arrays on the device and return them as it left them.

        What kernels keep once a group is here once; it is copied before, and must be the same in all groups after.
        """
        copies = np.ones((len(self.groups), 1), np.int32)
        given = {name: a * copies if name in _PER_GROUP else a for name, a in self.arrays.items()}
        tensors = {name: device.tensor(a.shape, dtype(a.dtype.name)) for name, a in given.items()}
        for name, tensor in tensors.items():
            tensor.fill_from(given[name])
        named = {name: tensors[name] for name, argument in kernel.arguments.items() if argument.dtype is not None}
        kernel.bind(device, {**named, **scalars})(items, device.stream)
        after = self.copy()
        after.arrays = {name: tensor.to_host() for name, tensor in tensors.items()}
        for name in _PER_GROUP:
            found = after.arrays[name]
            assert (found == found[0]).all(), f"{name} differs between groups: {found.tolist()}"
            after.arrays[name] = found[0].copy()
        return after


def same(found: StepArrays, expected: StepArrays) -> None:
    """Check that all arrays are equal, guard elements included."""
    for name, values in expected.arrays.items():
        if not np.array_equal(found.arrays[name], values):
            place = tuple(int(i) for i in np.argwhere(found.arrays[name] != values)[0])
            raise AssertionError(f"{name}{list(place)}: {found.arrays[name][place]} found, {values[place]} expected")


def refusal(a: StepArrays, row: int, count: int, back: int, capacity: int) -> int:
    """Return the status of a row's step: why it cannot be, or 0."""
    start = int(a.lengths[row]) - back
    if not 0 <= count <= a.cu_seqlens_q[row + 1] - a.cu_seqlens_q[row] or back < 0 or start < 0:
        return layout.BAD_COUNT
    if start + count > capacity:
        return layout.OVER_CAPACITY
    if count and not a.groups[0].is_empty and ceil_div(start + count, a.groups[0].page) > a.leased[row]:
        return layout.PAGE_MISSING
    lost = any(g.lowest(start) // g.page < ceil_div(int(a.high_water[row]), g.page) - g.ring for g in a.groups[1:])
    return layout.REWIND_TOO_FAR if back and (start < a.floors[row] or (start and lost)) else layout.OK


def advanced(a: StepArrays, counts: list[int], back: list[int], capacity: int, write_slots: bool = True) -> StepArrays:
    """Return what `advance` makes of the arrays: the closed form, row by row."""
    b = a.copy()
    for row, (wanted, taken) in enumerate(zip(counts, back, strict=True)):
        n, k = int(wanted), int(taken)
        if n or k:
            status = refusal(a, row, n, k, capacity)
            if status:
                b.status[row], n, k = status, 0, 0
        start = int(a.lengths[row]) - k
        b.lengths[row] = b.seq_lens[row] = start + n
        b.context_lens[row] = start
        b.appended[row] = n
        if n or k:
            b.high_water[row] = max(start + n, a.high_water[row] if start else 0)
        for g, group in enumerate(a.groups[1:], 1):
            begin, end = int(a.mapped_begin[g, row]), ceil_div(start, group.page)
            if n:
                begin, end = mapped_pages(group.window, group.page, group.ring, start, n)
            elif k:
                begin = min(begin, end)
            b.mapped_begin[g, row] = begin
            b.page_table(g)[row] = -1
            b.page_table(g)[row, :, begin:end] = b.blocks(g)[row, begin:end] + [[0], [group.num_pages]]
        if write_slots:
            fill_tokens(b, row)
    return b


def fill_tokens(b: StepArrays, row: int) -> None:
    """Write slots and positions of a row's tokens in place, from its lengths."""
    first, stop = int(b.cu_seqlens_q[row]), int(b.cu_seqlens_q[row + 1])
    for token in range(first, stop):
        position = int(b.context_lens[row]) + token - first
        is_real = position < b.seq_lens[row]
        b.positions[token] = position if is_real else 0
        for g, group in enumerate(b.groups):
            keeps = is_real and not group.is_empty and position // group.page >= b.mapped_begin[g, row]
            b.slots(g)[token] = b.slot(g, row, position) if keeps else -1
