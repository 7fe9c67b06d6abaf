"""Windows, rings and pages against brute force: a row that keeps every token it was ever given."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from numba_kv.errors import ConfigError
from numba_kv.geometry import (
    FULL,
    INT32_MAX,
    MAX_POOL_PAGES,
    PAGE_TOKENS,
    Window,
    ceil_div,
    check_page_tokens,
    mapped_pages,
    reference_private_pages,
    reference_retained_pages,
    rewind_is_allowed,
    ring_pages,
    round_up,
    table_pages,
)

CAPACITY = 200


class Row:
    """One row of one window group: its tokens, and a ring that holds what was really written."""

    def __init__(self, window: Window, page: int, step: int) -> None:
        self.window, self.page, self.step = window, page, step
        self.ring = ring_pages(window, page, step, CAPACITY)
        self.slots: list[dict[int, tuple[int, int]]] = [{} for _ in range(self.ring)]
        self.tokens: list[int] = []
        self.high_water = 0
        self.made = 0

    def stored(self, position: int) -> tuple[int, int] | None:
        """Return (position, token) in the place where `position` belongs."""
        return self.slots[position // self.page % self.ring].get(position % self.page)

    def holds(self, first: int, last: int) -> bool:
        """Whether the ring has every token of [first, last)."""
        return all(self.stored(p) == (p, self.tokens[p]) for p in range(first, last))

    def append(self, count: int) -> None:
        """Append by the closed form, and check what the step's queries see."""
        start, stop = len(self.tokens), len(self.tokens) + count
        is_short = count <= self.step
        lowest = self.window.lowest_key(start)
        if not is_short:
            assert self.holds(lowest, start), "tokens that a long step carries are gone"
        begin, end = mapped_pages(self.window, self.page, self.ring, start, count)
        assert end - begin <= self.ring
        for position in range(start, stop):
            self.made += 1
            self.tokens.append(self.made)
            if position // self.page >= begin:
                self.slots[position // self.page % self.ring][position % self.page] = (position, self.made)
        self.high_water = max(self.high_water, stop)
        if is_short:
            assert begin == lowest // self.page, "a short step keeps every page of its window"
            assert self.holds(lowest, stop), "a key of a short step is gone"

    def rewind(self, target: int) -> bool:
        """Rewind if that is allowed, and check that the next query finds its keys then. Returns whether it was."""
        allowed = rewind_is_allowed(self.window, self.page, self.ring, self.high_water, target)
        if self.high_water - target <= self.step:
            assert allowed, "the tokens of one short step can always be taken back"
        if allowed:
            del self.tokens[target:]
            if target == 0:
                self.high_water = 0
            assert self.holds(self.window.lowest_key(target), target), "a rewind was allowed to what is gone"
        return allowed


windows = st.builds(Window, st.sampled_from(["sliding", "chunked"]), st.integers(1, 31))
moves = st.lists(st.tuples(st.sampled_from(["short", "long", "back"]), st.integers(0, 100)), max_size=30)


@given(window=windows, page=st.integers(1, 16), step=st.integers(1, 20), moves=moves)
def test_every_visible_key_is_in_the_ring(window: Window, page: int, step: int, moves: list[tuple[str, int]]) -> None:
    row = Row(window, page, step)
    for move, number in moves:
        length = len(row.tokens)
        if move == "back":
            row.rewind(length - number % (length + 1))
            continue
        count = 1 + number % step if move == "short" else step + 1 + number
        if length + count <= CAPACITY:
            row.append(count)


@given(window=windows, page=st.integers(1, 16), step=st.integers(1, 20), length=st.integers(1, CAPACITY))
def test_a_rewind_is_refused_exactly_when_the_keys_are_gone(window: Window, page: int, step: int, length: int) -> None:
    for target in range(length + 1):
        row = Row(window, page, step)
        row.append(length)  # one step: the ring holds the last R pages and nothing else
        lowest = window.lowest_key(target)
        is_there = row.holds(lowest, target)
        allowed = row.rewind(target)
        if target and lowest < target:
            assert allowed == is_there
        else:
            assert allowed or target > 0  # the start of a chunk needs no key, but its page is not guaranteed


@given(window=windows, page=st.integers(1, 16), step=st.integers(1, 20))
def test_the_ring_is_as_large_as_a_short_step_needs_and_no_larger(window: Window, page: int, step: int) -> None:
    starts = range(window.tokens * page + 2 * page)
    most = max(ceil_div(start + step, page) - window.lowest_key(start) // page for start in starts)
    assert ring_pages(window, page, step, 10**6) == most


@given(window=windows, page=st.integers(1, 16), step=st.integers(1, 20), capacity=st.integers(1, 40))
def test_a_ring_is_never_larger_than_the_row(window: Window, page: int, step: int, capacity: int) -> None:
    ring = ring_pages(window, page, step, capacity)
    assert ring == max(1, min(ring_pages(window, page, step, 10**6), ceil_div(capacity, page)))


@given(length=st.integers(0, 500), count=st.integers(1, 500), page=st.integers(1, 16))
def test_full_attention_maps_everything(length: int, count: int, page: int) -> None:
    assert ring_pages(FULL, page, 1, 1000) == 0
    assert mapped_pages(FULL, page, 0, length, count) == (0, ceil_div(length + count, page))
    assert rewind_is_allowed(FULL, page, 0, length + count, length)


@pytest.mark.parametrize(
    ("window", "page", "step", "capacity", "pages"),
    [
        (Window("sliding", 4096), 128, 1, 131072, 33),
        (Window("sliding", 512), 16, 1, 32768, 33),
        (Window("sliding", 1024), 16, 8, 32768, 66),
        (Window("sliding", 1), 16, 1, 4096, 1),
        (Window("sliding", 2), 16, 1, 4096, 2),
        (Window("sliding", 512), 16, 1, 256, 16),
        (Window("sliding", 512), 16, 2048, 32768, 161),
        (Window("chunked", 8192), 16, 1, 32768, 512),
        (Window("chunked", 8192), 16, 2, 32768, 513),
        (Window("chunked", 6), 4, 1, 4096, 2),
        (Window("chunked", 1), 1, 1, 4096, 1),
    ],
)
def test_ring_numbers(window: Window, page: int, step: int, capacity: int, pages: int) -> None:
    assert ring_pages(window, page, step, capacity) == pages


@pytest.mark.parametrize(
    ("window", "page", "replacement", "pages"),
    [
        (64, 128, 1, 5),
        (128, 128, 1, 5),
        (129, 128, 1, 7),
        (256, 128, 1, 7),
        (257, 128, 1, 9),
        (512, 128, 1, 11),
        (1024, 128, 1, 19),
        (4096, 128, 1, 67),
        (5, 4, 3, 9),
    ],
)
def test_reference_private_pages(window: int, page: int, replacement: int, pages: int) -> None:
    assert reference_private_pages(window, page, replacement) == pages
    assert 2 * reference_retained_pages(window, page) + replacement == pages


def test_the_ring_is_half_of_the_reference_s_reservation() -> None:
    for tokens in range(1, 700):
        assert ring_pages(Window("sliding", tokens), 128, 1, 10**6) <= reference_retained_pages(tokens)


@given(capacity=st.integers(1, 10**6), page=st.sampled_from(PAGE_TOKENS))
def test_table_width_is_the_least_number_of_whole_tiles(capacity: int, page: int) -> None:
    width = table_pages(capacity, page)
    assert width * page % 256 == 0
    assert width % max(1, 128 // page) == 0
    assert width >= ceil_div(capacity, page)
    assert width * page - round_up(capacity, page) < 256


@given(window=windows, query=st.integers(0, 200))
def test_lowest_key(window: Window, query: int) -> None:
    if window.kind == "sliding":
        visible = [key for key in range(query + 1) if key > query - window.tokens]
    else:
        visible = [key for key in range(query + 1) if key // window.tokens == query // window.tokens]
    assert window.lowest_key(query) == visible[0]
    assert FULL.lowest_key(query) == 0


@pytest.mark.parametrize(
    ("kind", "tokens", "message"),
    [
        ("local", 4, "'local' is not 'full', 'sliding' or 'chunked'"),
        ("sliding", 0, "0 is not in 1.."),
        ("sliding", -3, "-3 is not in 1.."),
        ("chunked", 0, "0 is not in 1.."),
        ("chunked", INT32_MAX + 1, "2147483648 is not in 1.."),
        ("full", 5, "full attention has no window, got 5"),
        ("sliding", 2.0, "2.0 is not an integer"),
        ("sliding", True, "True is not an integer"),
        ("sliding", None, "None is not an integer"),
    ],
)
def test_impossible_windows_are_refused(kind: str, tokens: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Window(kind, tokens)  # type: ignore[arg-type]


def test_windows_are_values() -> None:
    assert Window("sliding", 4) == Window("sliding", 4) != Window("chunked", 4)
    assert [str(w) for w in (FULL, Window("sliding", 4), Window("chunked", 8))] == ["full", "sliding 4", "chunked 8"]
    assert FULL.is_full


@pytest.mark.parametrize("page", PAGE_TOKENS)
def test_page_sizes(page: int) -> None:
    assert check_page_tokens(page) == page


@pytest.mark.parametrize("page", [0, -1, 3, 24, 512, 1.0, True, "16", None])
def test_impossible_page_sizes_are_refused(page: object) -> None:
    with pytest.raises(ConfigError, match="is not a power of two from 1 to 256"):
        check_page_tokens(page)  # type: ignore[arg-type]


def test_page_ids_of_both_halves_fit_int32() -> None:
    assert 2 * MAX_POOL_PAGES <= INT32_MAX < 2 * (MAX_POOL_PAGES + 1)
