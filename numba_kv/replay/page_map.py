"""Where the pages of a few sequences are: what ``numba-kv inspect`` shows.

Knows how a page table reads. Takes every entry from the device; the closed form of the windows is not used, so what is
shown is what a kernel would find. One row of a sliding window, 8 pages of a row and a ring of 3::

    logical page    0  1  2  3  4  5  6  7
    page table     -1 -1 -1 22 20 21 -1 -1        pages 3, 4, 5 are mapped, the rest of the row is out of sight or not yet there
    ring position            0  1  2              logical page l sits at position l mod 3
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from numba_kv.geometry import ceil_div
from numba_kv.plan import GroupPlan
from numba_kv.replay.figure_table import FigureTable

if TYPE_CHECKING:
    from numba_kv.shared_resources import SharedResources

__all__ = ["GroupMap", "MappedPage", "PageMap", "RowMap", "page_map", "page_map_table"]

_BAR = 40


@dataclass(frozen=True, slots=True)
class MappedPage:
    """One mapped entry: logical page, the page's id in the pool, and its place in the ring (None: full attention)."""

    logical: int
    page_id: int
    ring_position: int | None


@dataclass(frozen=True, slots=True)
class RowMap:
    """The mapped pages of one row, in logical order."""

    row: int
    length: int
    pages: tuple[MappedPage, ...]


@dataclass(frozen=True, slots=True)
class GroupMap:
    """The rows of one window group."""

    index: int
    window: str
    page_tokens: int
    ring_pages: int
    row_pages: int
    rows: tuple[RowMap, ...]


@dataclass(frozen=True, slots=True)
class PageMap:
    """The page tables of every group that has layers."""

    target: str
    lookahead_pages: int
    groups: tuple[GroupMap, ...]

    def to_json(self) -> dict[str, object]:
        """Return the map as plain objects."""
        return asdict(self)


def page_map(resources: SharedResources, lengths: Sequence[int], steps: int) -> PageMap:
    """Admit prompts of `lengths` tokens, decode `steps` tokens each, and read the page tables back.

    Stream: waits. Cost: one prompt step, `steps` decode steps, one copy of each table to the host.
    """
    from numba_kv.batch import Batch

    with Batch(resources) as batch:
        sequences = batch.update(retire=[], admit=list(lengths))
        view = batch.step({sequence: sequence.pending_tokens for sequence in sequences})
        for _ in range(steps):
            view = batch.step(1)
        batch.audit()
        rows = [(sequence.row, sequence.length) for sequence in sequences]
        groups = tuple(
            _group_map(group, rows, view.page_tables[group.index].to_host()[:, 0].tolist())
            for group in resources.plan.groups
            if not group.is_empty
        )
    return PageMap(resources.device.target, resources.plan.config.lookahead_pages, groups)


def _group_map(group: GroupPlan, rows: list[tuple[int, int]], table: list[list[int]]) -> GroupMap:
    def place(logical: int) -> int | None:
        return logical % group.ring if group.ring else None

    return GroupMap(
        group.index,
        str(group.window),
        group.page_tokens,
        group.ring,
        group.row_pages,
        tuple(
            RowMap(row, length, tuple(MappedPage(i, page, place(i)) for i, page in enumerate(table[row]) if page >= 0))
            for row, length in rows
        ),
    )


def page_map_table(shown: PageMap, notes: Iterable[str] = ()) -> RenderableType:
    """Return one table per group: a bar of each row's logical pages, and the first and last mapped entries; then notes."""
    if not shown.groups:
        return Group(f"No layer keeps keys and values, so there are no pages ({shown.target}).", *notes)
    ahead = f"Rows of full attention are mapped up to {shown.lookahead_pages} pages ahead of their length (lookahead)."
    return Group(
        *(_group_table(group) for group in shown.groups),
        f"█ mapped  ▒ partly  ░ mapped ahead of the length  · behind the window  ({shown.target})",
        *([ahead] if any(not group.ring_pages for group in shown.groups) else []),
        *notes,
    )


def _group_table(group: GroupMap) -> FigureTable:
    span = _span(group)
    ring = f", ring of {group.ring_pages} pages, page l at l mod {group.ring_pages}" if group.ring_pages else ""
    title = f"Group {group.index}: {group.window} attention, pages of {group.page_tokens} tokens{ring}"
    table = FigureTable(title, "row", "tokens", "pages", "mapped", "logical@ring→id" if group.ring_pages else "logical→id")
    row_column, _, pages, *others = table.columns
    row_column.justify, pages.header = "right", f"logical pages [0, {span:,}) of {group.row_pages:,}"
    for column in (pages, *others):
        column.justify = "left"
    for row in group.rows:
        mapped = f"{len(row.pages)} in [{row.pages[0].logical}, {row.pages[-1].logical + 1})" if row.pages else "0"
        table.add_row(str(row.row), f"{row.length:,}", _bar(group, row, span), mapped, _entries(row))
    return table


def _span(group: GroupMap) -> int:
    """Return the logical pages that are drawn: up to the last one that any row of the group uses or has mapped."""
    used = [ceil_div(row.length, group.page_tokens) for row in group.rows]
    return max(used + [row.pages[-1].logical + 1 for row in group.rows if row.pages])


def _bar(group: GroupMap, row: RowMap, span: int) -> str:
    """Return the row's first `span` logical pages in at most `_BAR` cells, each of as many pages as it takes."""
    per_cell = ceil_div(span, _BAR)
    mapped = {page.logical for page in row.pages}
    used = ceil_div(row.length, group.page_tokens)
    cells = []
    for first in range(0, span, per_cell):
        pages = range(first, min(first + per_cell, span))
        count = sum(page in mapped for page in pages)
        if count and first >= used:
            cells.append("░")
        elif count == len(pages):
            cells.append("█")
        elif count:
            cells.append("▒")
        else:
            cells.append("·" if first < used else " ")
    return "".join(cells)


def _entries(row: RowMap) -> str:
    places = ("" if p.ring_position is None else f"@{p.ring_position}" for p in row.pages)
    words = [f"{p.logical}{place}→{p.page_id}" for p, place in zip(row.pages, places, strict=True)]
    return " ".join(words if len(words) <= 5 else [*words[:2], "…", *words[-2:]])
