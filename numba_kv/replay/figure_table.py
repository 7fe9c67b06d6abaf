"""FigureTable: a rich table that shows its figures whole, in whatever room there is.

Knows words, numbers and widths. Does not know what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table

__all__ = ["FigureTable"]

#: A cell of a number that is not there.
_NONE = "-"
#: A border and a space on each side.
_BETWEEN = 3


class FigureTable(Table):
    """A table whose first `words` columns say what a row is and the others are numbers.

    Numbers stay in one line; words, and heads, break at their spaces. Numbers that do not fit stand below, in further tables
    with the same words but without rows that have "-" alone. Only where not even one of them fits a cell is broken anywhere.
    """

    def __init__(self, title: str, *columns: str, words: int = 1) -> None:
        super().__init__(title=title, title_justify="left", header_style="bold")
        self._words = words
        for i, column in enumerate(columns):
            is_number = i >= words
            head = column.replace(" ", "\n") if is_number else column
            self.add_column(head, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out for the room that there is."""
        for column in self.columns:
            column.min_width = _least(column)
        parts = list(self._fitting(options.max_width))
        if len(parts) == 1:
            yield from super().__rich_console__(console, options)
            return
        for number, places in enumerate(parts):
            yield self._part(places, self.title if number == 0 else None)

    def _fitting(self, room: int) -> Iterator[list[int]]:
        """Yield the places of the columns of each table that fits; one of all where none would."""
        widths = [(column.min_width or 0) + _BETWEEN for column in self.columns]
        words, numbers = list(range(self._words)), range(self._words, len(widths))
        left = room - 1 - sum(widths[: self._words])
        if not numbers or left < max(widths[place] for place in numbers):
            for column in self.columns:
                column.no_wrap, column.min_width = False, None
            yield [*words, *numbers]
            return
        part, used = list(words), 0
        for place in numbers:
            if used + widths[place] > left:
                yield part
                part, used = list(words), 0
            part.append(place)
            used += widths[place]
        yield part

    def _part(self, places: list[int], title: object) -> Table:
        """Return a table of some columns."""
        found = Table(title=str(title) if title else None, title_justify="left", header_style="bold")
        found.show_header = self.show_header
        for place in places:
            column = self.columns[place]
            found.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, min_width=column.min_width)
        cells = [list(self.columns[place].cells) for place in places]
        for row, each in enumerate(zip(*cells, strict=True)):
            if title is None and all(cell == _NONE for cell in each[self._words :]):
                continue
            found.add_row(*each, end_section=self.rows[row].end_section)
        return found


def _least(column: Column) -> int:
    """Return the least width in which nothing of a column is broken but at spaces, and numbers nowhere."""
    cells = (str(cell) for cell in (column.header, *column.cells))
    pieces = (piece for cell in cells for piece in (cell.splitlines() if column.no_wrap else cell.split()))
    return max(map(cell_len, pieces), default=0)
