"""The free list of a pool: every page has one owner, refusals change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.errors import CapacityError, InputError, InvariantError
from numba_kv.ledger.pages import PageIdPool


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_the_first_pages_come_first() -> None:
    pool = PageIdPool(5, 2)
    assert pool.acquire(3).tolist() == [0, 1, 2]
    assert pool.acquire(2).tolist() == [3, 4]
    assert (pool.usable_pages, pool.free_pages, pool.owned_pages) == (5, 0, 5)


def test_pages_returned_last_are_used_first() -> None:
    pool = PageIdPool(5, 2)
    pool.acquire(4)
    pool.release(ids(1, 3))
    assert pool.acquire(3).tolist() == [3, 1, 4]


def test_peek_shows_what_acquire_takes() -> None:
    pool = PageIdPool(6, 2)
    pool.acquire(4)
    pool.release(ids(2, 0))
    for count in range(5):
        assert len(pool.peek(count)) == count
    seen = pool.peek(4)
    assert pool.free_pages == 4
    seen_again = pool.peek(4)
    assert seen.tolist() == seen_again.tolist() == pool.acquire(4).tolist()
    assert seen.dtype == np.int32


def test_a_refused_request_keeps_the_order_of_the_free_list() -> None:
    pool = PageIdPool(8, 2)
    pool.acquire(8)
    pool.release(ids(5, 1, 7))
    before, figures = pool.peek(3).tolist(), pool.figures()
    with pytest.raises(CapacityError, match="5 are wanted, 3 free") as caught:
        pool.acquire(5)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (5, 3, 0)
    assert pool.peek(3).tolist() == before == [7, 1, 5]
    assert pool.figures() == figures


def test_a_negative_count_is_refused() -> None:
    pool = PageIdPool(4, 2)
    with pytest.raises(InputError, match="-1 are wanted"):
        pool.acquire(-1)
    assert pool.figures().free == 4


def test_more_than_is_owned_cannot_be_returned() -> None:
    pool = PageIdPool(4, 2)
    owned = pool.acquire(3)
    with pytest.raises(InvariantError, match="4 are given back, 3 are owned"):
        pool.release(ids(0, 1, 2, 3))
    assert (pool.free_pages, pool.owned_pages) == (1, 3)
    pool.check(owned)
    pool.release(owned)
    with pytest.raises(InvariantError, match="1 are given back, 0 are owned"):
        pool.release(owned[:1])


@pytest.mark.parametrize("wrong", [(3,), (0, 0), (4,), (-1,), (2**31 - 1,)])
def test_the_check_finds_pages_that_were_returned_wrongly(wrong: tuple[int, ...]) -> None:
    pool = PageIdPool(4, 2)
    owned = pool.acquire(3)
    pool.release(ids(*wrong))
    with pytest.raises(InvariantError, match="accounted for|in the free list"):
        pool.check(owned[len(wrong) :])


def test_returned_pages_are_a_copy() -> None:
    pool = PageIdPool(4, 2)
    owned = pool.acquire(3)
    pool.release(owned)
    owned[:] = 3
    pool.check(ids())


def test_returning_nothing_is_legal() -> None:
    pool = PageIdPool(4, 2)
    pool.release(ids())
    assert pool.figures().free == 4


def test_a_pool_without_usable_pages() -> None:
    pool = PageIdPool(0, 2)
    assert pool.acquire(0).tolist() == []
    pool.check(ids())
    assert pool.figures().total == 2
    with pytest.raises(CapacityError):
        pool.acquire(1)


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ((0, 1), "page 2 is accounted for 0 times"),
        ((0, 1, 1), "page 1 is accounted for 2 times"),
        ((0, 1, 2, 3), "page 3 is accounted for 2 times"),
        ((0, 1, 9), "page 9 is held by a row, but pages are 0..3"),
        ((0, 1, -1), "page -1 is held by a row"),
    ],
)
def test_the_check_names_the_page(owned: tuple[int, ...], message: str) -> None:
    pool = PageIdPool(4, 2)
    pool.acquire(3)
    with pytest.raises(InvariantError, match=message):
        pool.check(ids(*owned))


@given(
    usable=st.integers(0, 40),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 45)), max_size=200),
    seed=st.integers(0, 2**16),
)
def test_pages_are_conserved(usable: int, moves: list[tuple[bool, int]], seed: int) -> None:
    pool, rng = PageIdPool(usable, 2), np.random.default_rng(seed)
    free, owned, peak = list(range(usable)), [], 0
    for take, count in moves:
        if take:
            if count > len(free):
                with pytest.raises(CapacityError):
                    pool.acquire(count)
            else:
                taken = pool.acquire(count).tolist()
                assert taken == free[:count]
                del free[:count]
                owned += taken
        else:
            given_back = [owned.pop(rng.integers(len(owned))) for _ in range(min(count, len(owned)))]
            pool.release(ids(*given_back))
            free = given_back[::-1] + free
        peak = max(peak, len(owned))
        pool.check(ids(*owned))
        figures = pool.figures()
        assert (figures.free, figures.owned, figures.reserved) == (len(free), len(owned), 2)
        assert figures.total == usable + 2
        assert figures.peak_owned == peak
