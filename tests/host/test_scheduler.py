"""The scheduler against a fake batch: budgets, order, preemption, and that it always ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import pytest
from hypothesis import given, strategies as st

from numba_kv.errors import CapacityError, InputError
from numba_kv.replay.request import Request
from numba_kv.replay.schedule import SchedulerOptions, StepOutcome
from numba_kv.replay.scheduler import Scheduler


class FakeSequence:
    def __init__(self, prompt: int, number: int) -> None:
        self.prompt = prompt
        self.number = number
        self.length = 0
        self.is_active = True


class FakeBatch:
    """Counts pages of full attention and refuses what a real batch refuses."""

    def __init__(self, rows: int, *, pages: int = 10**9, page_tokens: int = 4, max_batch_tokens: int = 10**9) -> None:
        self.rows = rows
        self.pages = pages
        self.page_tokens = page_tokens
        self.max_batch_tokens = max_batch_tokens
        self.active: list[FakeSequence] = []
        self.all: list[FakeSequence] = []
        self.steady_steps = 0
        self.calls: list[dict[int, int]] = []

    @property
    def free_rows(self) -> int:
        return self.rows - len(self.active)

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    @property
    def free_pages(self) -> int:
        return self.pages - sum(self.pages_of(s.length) for s in self.active)

    def update(self, *, retire: Sequence[FakeSequence], admit: Sequence[int]) -> list[FakeSequence]:
        assert retire or admit
        for sequence in retire:
            assert sequence.is_active
            sequence.is_active = False
            self.active.remove(sequence)
        new = [FakeSequence(n, len(self.all) + i) for i, n in enumerate(admit)]
        self.active += new
        self.all += new
        assert len(self.active) <= self.rows
        return new

    def step(self, counts: int | Mapping[FakeSequence, int], /) -> None:
        if isinstance(counts, int):
            assert counts == 1
            assert all(s.length >= s.prompt for s in self.active)
            self.steady_steps += 1
            counts = dict.fromkeys(self.active, 1)
        assert counts
        assert sum(counts.values()) <= self.max_batch_tokens
        for sequence, n in counts.items():
            assert sequence.is_active
            assert n >= 1
            assert n == 1 or sequence.length + n <= sequence.prompt
        needed = sum(self.pages_of(s.length + n) - self.pages_of(s.length) for s, n in counts.items())
        if needed > self.free_pages:
            raise CapacityError("pages have run out", needed=needed, free=self.free_pages)
        for sequence, n in counts.items():
            sequence.length += n
        self.calls.append({s.number: n for s, n in counts.items()})


def request(prompt: int, output: int) -> Request:
    return Request(0.0, prompt, output)


def drain(scheduler: Scheduler[FakeSequence], most: int = 100_000) -> list[StepOutcome]:
    outcomes = []
    while not scheduler.is_done:
        outcomes.append(scheduler.step())
        assert len(outcomes) <= most
    return outcomes


def test_one_request_by_hand() -> None:
    batch = FakeBatch(2)
    outcomes = drain(Scheduler(batch, [request(10, 3)], SchedulerOptions(chunk=4)))
    assert [(o.prefill_tokens, o.decode_tokens) for o in outcomes] == [(4, 0), (4, 0), (2, 0), (0, 1), (0, 1), (0, 1), (0, 0)]
    assert [o.is_steady for o in outcomes] == [False, False, False, True, True, True, False]
    assert batch.steady_steps == 3
    assert batch.free_rows == 2


def test_decode_comes_before_prompts_and_prompts_share_a_chunk() -> None:
    batch = FakeBatch(3, max_batch_tokens=8)
    drain(Scheduler(batch, [request(3, 9), request(5, 1), request(9, 1)], SchedulerOptions(chunk=6, max_batch_tokens=7)))
    assert batch.calls[0] == {0: 3, 1: 3}
    assert batch.calls[1] == {0: 1, 1: 2, 2: 4}
    assert batch.calls[2] == {0: 1, 1: 1, 2: 5}


def test_leaving_and_joining_are_one_update() -> None:
    batch = FakeBatch(1)
    outcomes = drain(Scheduler(batch, [request(2, 1), request(2, 1)], SchedulerOptions(page_tokens=4)))
    assert [(o.joined, o.left) for o in outcomes] == [(1, 0), (0, 0), (1, 1), (0, 0), (0, 1)]


def test_requests_are_served_in_order() -> None:
    batch = FakeBatch(2)
    drain(Scheduler(batch, [request(n, 2) for n in (5, 6, 7, 8)]))
    assert [s.prompt for s in batch.all] == [5, 6, 7, 8]


def test_preemption_recomputes_prompt_and_generated_tokens_in_front_of_the_queue() -> None:
    # 6 pages of 4: both prompts fit (2 pages each), their answers do not.
    batch = FakeBatch(2, pages=6)
    scheduler = Scheduler(batch, [request(8, 8), request(8, 8), request(1, 1)])
    outcomes = drain(scheduler)
    assert sum(o.preempted for o in outcomes) == 1
    # Both had generated 4 tokens when the third page of each was full; the second came back with 12 as its prompt.
    assert [s.prompt for s in batch.all] == [8, 8, 12, 1]
    assert batch.all[2].length == 16
    assert scheduler.finished == 3


def test_a_prompt_waits_for_its_pages() -> None:
    batch = FakeBatch(4, pages=8)
    outcomes = drain(Scheduler(batch, [request(20, 4), request(20, 4), request(20, 4)], SchedulerOptions(page_tokens=4)))
    assert sum(o.preempted for o in outcomes) == 0
    assert [o.joined for o in outcomes if o.joined] == [1, 1, 1]


@pytest.mark.parametrize("page_tokens", [None, 4])
def test_a_request_that_cannot_fit_alone_is_an_error(page_tokens: int | None) -> None:
    batch = FakeBatch(3, pages=4)
    scheduler = Scheduler(batch, [request(4, 4), Request(0.0, 15, 9, (), 77)], SchedulerOptions(page_tokens=page_tokens))
    with pytest.raises(CapacityError, match=r"line 77 \(24 tokens\) does not fit .* even alone") as caught:
        drain(scheduler)
    assert caught.value.needed > caught.value.free


def test_every_row_must_fit_into_a_step() -> None:
    with pytest.raises(InputError, match="max_batch_tokens: 3 is below the batch's 4 rows"):
        Scheduler(FakeBatch(4), [], SchedulerOptions(max_batch_tokens=3))


@pytest.mark.parametrize("bad", [{"chunk": 0}, {"max_batch_tokens": -1}, {"page_tokens": 0}], ids=str)
def test_options_refuse(bad: dict[str, int]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        SchedulerOptions(**bad)


def test_no_requests_is_done_at_once() -> None:
    assert Scheduler(FakeBatch(1), []).is_done


def test_errors_other_than_capacity_pass_through() -> None:
    batch = FakeBatch(1)

    def broken(counts: object, /) -> NoReturn:
        raise RuntimeError("driver")

    batch.step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="driver"):
        Scheduler(batch, [request(1, 1)]).step()


@given(
    requests=st.lists(st.builds(request, st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=25),
    rows=st.integers(1, 6),
    chunk=st.integers(1, 30),
    spare_tokens=st.integers(0, 20),
    spare_pages=st.integers(0, 30),
    counts_pages=st.booleans(),
)
def test_every_request_finishes_within_every_budget(
    requests: list[Request], rows: int, chunk: int, spare_tokens: int, spare_pages: int, counts_pages: bool
) -> None:
    most = rows + spare_tokens
    longest = max(r.total_tokens for r in requests)
    batch = FakeBatch(rows, pages=-(-longest // 4) + spare_pages, max_batch_tokens=most)
    options = SchedulerOptions(chunk=chunk, max_batch_tokens=most, page_tokens=4 if counts_pages else None)
    scheduler = Scheduler(batch, requests, options)
    outcomes = []
    oldest, oldest_length = None, 0
    while not scheduler.is_done:
        outcome = scheduler.step()
        outcomes.append(outcome)
        assert outcome.prefill_tokens <= chunk
        assert outcome.prefill_tokens + outcome.decode_tokens <= most
        assert scheduler.num_running == len(batch.active)
        assert scheduler.tokens_held == sum(s.length for s in batch.active)
        if batch.active:
            # Nobody starves: the sequence that joined first has appended in this very step, so the replay ends.
            first = batch.active[0]
            assert first.length > (oldest_length if first is oldest else 0)
            oldest, oldest_length = first, first.length
    assert scheduler.finished == len(requests)
    assert not batch.active
    # Each request left its row once at full length; every other row it had was taken from it.
    preempted = sum(o.preempted for o in outcomes)
    assert len(batch.all) == len(requests) + preempted
    assert sum(o.left for o in outcomes) == len(requests)
    decoded = sum(o.decode_tokens for o in outcomes)
    assert decoded == sum(r.output_tokens for r in requests)
    prefilled = sum(o.prefill_tokens for o in outcomes)
    assert prefilled >= sum(r.input_tokens for r in requests)
    if not preempted:
        assert prefilled == sum(r.input_tokens for r in requests)
        assert sorted(s.length for s in batch.all) == sorted(r.total_tokens for r in requests)
