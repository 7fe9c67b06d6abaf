"""Tables that show figures whole: in one piece, in several with the same words, or broken where nothing else is left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from numba_kv.replay.figure_table import FigureTable

HEADS, ROW = ("what it is", "first", "of copy", "third"), ("a b", "1,234,567", "0.95", "98 MiB")


def shown(width: int, words: int = 1, rows: int = 2) -> list[str]:
    table = FigureTable("Title", *HEADS, words=words)
    for _ in range(rows):
        table.add_row(*ROW)
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue().splitlines()


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def test_in_one_piece_where_there_is_room() -> None:
    assert cells(shown(80)) == [list(ROW)] * 2
    assert "Title" in shown(80)[0]


def test_what_does_not_fit_stands_below_with_the_same_words() -> None:
    found = shown(28)
    assert cells(found) == [["a b", "1,234,567", "0.95"]] * 2 + [["a b", "98 MiB"]] * 2
    assert sum("Title" in line for line in found) == 1
    assert sum(line.startswith("┏") for line in found) == 2


def test_rows_that_have_no_number_in_a_further_table_are_left_out_there() -> None:
    table = FigureTable("Title", *HEADS)
    for row in (ROW, ("c", "5", "0.1", "-"), ("d", "-", "-", "1")):
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=28).print(table)
    first = [["a b", "1,234,567", "0.95"], ["c", "5", "0.1"], ["d", "-", "-"]]
    assert cells(out.getvalue().splitlines()) == [*first, ["a b", "98 MiB"], ["d", "1"]]


def test_words_break_at_spaces_and_heads_of_numbers_too() -> None:
    heads = [line for line in shown(40) if line.startswith("┃")]
    assert [[cell.strip() for cell in line.strip("┃").split("┃")] for line in heads] == [
        ["what it", "", "of", ""],
        ["is", "first", "copy", "third"],
    ]


def test_where_not_even_one_number_fits_a_number_is_broken() -> None:
    found = cells(shown(18, rows=1))
    assert ["".join(column) for column in zip(*found, strict=True)] == ["ab", "1,234,567", "0.95", "98MiB"]


def test_without_rows_and_without_numbers() -> None:
    assert any("third" in line for line in shown(80, rows=0))
    assert cells(shown(30, words=4))  # words alone


@pytest.mark.parametrize("width", range(18, 70, 3))
def test_nothing_is_wider_than_the_room(width: int) -> None:
    assert max(map(len, shown(width))) <= width
