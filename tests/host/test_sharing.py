"""Pages that several rows hold: counted, read only, free when the last one lets go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.errors import CapacityError, InvariantError
from numba_kv.ledger.leases import plan_room
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.rows import RowLedger
from numba_kv.ledger.sharing import check_shared, held_ring, lower_floors, note_fork, plan_floors, plan_fork, shared_pages
from numba_kv.plan import plan_memory
from tests.helpers.models import tiny_config


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_a_shared_page_is_free_when_the_last_holder_drops_it() -> None:
    pool = PageIdPool(6, 2)
    held = pool.acquire(3)
    pool.share(held[:2], 2)
    figures = pool.figures()
    assert (figures.free, figures.owned, figures.shared, figures.total) == (3, 1, 2, 8)
    pool.check(np.concatenate([held, held[:2], held[:2]]))
    pool.drop(held)
    assert (pool.free_pages, pool.figures().shared) == (4, 2)
    pool.drop(held[:2])
    pool.check(held[:2])
    pool.drop(held[:2])
    assert pool.free_pages == 6
    pool.check(ids())


def test_the_check_counts_the_holders() -> None:
    pool = PageIdPool(4, 2)
    held = pool.acquire(2)
    pool.share(held[:1], 1)
    pool.check(ids(0, 1, 0))
    with pytest.raises(InvariantError, match="page 0 is accounted for 1 times, 2 expected"):
        pool.check(held)
    with pytest.raises(InvariantError, match="page 1 is accounted for 2 times, 1 expected"):
        pool.check(ids(0, 1, 0, 1))
    pool.release(held[:1])  # wrong: another holder reads it
    with pytest.raises(InvariantError, match="page 0 is accounted for 2 times, 2 expected, and it is free"):
        pool.check(ids(1, 0))


def ledger_with(lengths: list[int], leased: list[int], pages: int = 16) -> RowLedger:
    """Return rows of pages of 4 at these lengths that hold so many pages."""
    ledger = RowLedger(plan_memory(tiny_config(max_batch_size=4, num_kv_pages=pages, max_batch_tokens=64)))
    for row, (length, held) in enumerate(zip(lengths, leased, strict=True)):
        ledger.live[row] = True
        ledger.lo[row] = ledger.hi[row] = ledger.high_water[row] = length
        ledger.pages[row, :held] = ledger.pool.acquire(held)
        ledger.leased[row] = held
    return ledger


def test_a_fork_and_what_may_be_rewritten_after_it() -> None:
    ledger = ledger_with([14, 0], [6, 0])
    plan = plan_fork(ledger, 0)
    assert (plan.shared, plan.is_partial, plan.floor) == (3, True, 12)
    ledger.live[2] = True
    note_fork(ledger, 0, [2], plan, ledger.pool.acquire(1))
    assert (ledger.leased[2], ledger.hi[2], ledger.high_water[2]) == (4, 14, 14)
    assert ledger.floor.tolist() == [12, 0, 12, 0]
    assert [shared_pages(ledger, row) for row in range(3)] == [3, 0, 3]
    check_shared(ledger)
    assert ledger.rewind_problem(0, 12) is None
    assert "first 12 tokens" in str(ledger.rewind_problem(2, 11))
    assert ledger.rewind_problem(2, 0) is None
    both = np.array([0, 2])
    plans = plan_floors(ledger, both, np.array([0, 0]))
    assert plans is not None
    assert (plans.rows.tolist(), plans.floors.tolist(), plans.keep.tolist()) == ([0, 2], [0, 0], [0, 0])
    lower_floors(ledger, plans)
    assert ledger.pool.free_pages == 16
    assert ledger.leased.tolist() == ledger.floor.tolist() == [0, 0, 0, 0]


def test_a_floor_inside_a_shared_page_is_found() -> None:
    ledger = ledger_with([8], [2])
    ledger.live[1] = True
    note_fork(ledger, 0, [1], plan_fork(ledger, 0), ids())
    ledger.floor[1] = 7
    with pytest.raises(InvariantError, match="row 1: 2 pages are shared, but only 7 tokens"):
        check_shared(ledger)


@given(wanted=st.integers(0, 16))
def test_room_is_made_from_pages_that_run_ahead(wanted: int) -> None:
    ledger = ledger_with([4, 9, 1], [4, 3, 5])  # 1, 3, 1 are needed; 4 are free
    if wanted > 11:
        with pytest.raises(CapacityError, match="a test needs") as refused:
            plan_room(ledger, wanted, "a test")
        assert (refused.value.needed, refused.value.free, refused.value.evictable) == (wanted, 4, 7)
        return
    plan = plan_room(ledger, wanted, "a test")
    if wanted <= 4:
        assert plan is None
        return
    assert plan is not None
    assert int((ledger.leased - plan.targets).sum()) == wanted - 4
    assert (plan.targets[:3] >= [1, 3, 1]).all()


@pytest.mark.parametrize(
    ("length", "peak", "held"), [(0, 0, (0, 0)), (9, 9, (0, 3)), (30, 30, (5, 8)), (17, 30, (5, 5)), (21, 30, (5, 6))]
)
def test_what_a_ring_holds(length: int, peak: int, held: tuple[int, int]) -> None:
    group = plan_memory(tiny_config(6)).groups[1]
    assert group.ring == 3
    assert held_ring(group, length, peak) == held
