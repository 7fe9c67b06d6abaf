"""Continuous batching over any batch: who joins, who appends how many tokens, who has to go.

Knows rows, token budgets and pages as numbers; plain host code, so it runs against a fake batch in tests. Does not know
devices, tensors or models.

A step, in this order:

1. Sequences that are done leave and waiting ones join, in one `update`. A waiting request joins when a row is free and its
   prompt fits into the pages that nobody has a claim on.
2. Every sequence that has its prompt appends one token. Prompts then share what is left of the step, the oldest first,
   `chunk` tokens at most. If there is no prompt in work, the step is a steady one: ``step(1)``.
3. If pages run out, the sequence that joined last gives way: it leaves and waits in front of everybody else, its prompt
   grown by what it has generated (its K and V are computed anew). Nobody joins until somebody is done. The oldest
   sequence never gives way and always appends, so every replay ends.

Per step the work is a few dictionary operations, not one per row: a sequence's end is known when its prompt is in.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from numba_kv.errors import CapacityError, InputError
from numba_kv.geometry import ceil_div
from numba_kv.replay.request import Request
from numba_kv.replay.schedule import BatchLike, SchedulerOptions, StepOutcome

__all__ = ["Running", "Scheduler", "Waiting"]

S = TypeVar("S")


class Waiting:
    """A request without a row: at first, or again after it gave way.

    Attributes
    ----------
    request : Request
        What was asked for.
    prompt, output : int
        Tokens to be prefilled, and to be generated then.
    """

    __slots__ = ("output", "prompt", "request")

    def __init__(self, request: Request, prompt: int, output: int) -> None:
        self.request = request
        self.prompt = prompt
        self.output = output


class Running(Generic[S]):
    """A request in a row.

    Attributes
    ----------
    job, handle, order : Waiting, sequence, int
        What it is, its sequence in the batch, and its place among all that joined.
    prompt_left : int
        Prompt tokens that no step has appended.
    decode_from : int
        Steps done when its prompt was in; -1 while it is not.
    """

    __slots__ = ("decode_from", "handle", "job", "order", "prompt_left")

    def __init__(self, job: Waiting, handle: S, order: int) -> None:
        self.job = job
        self.handle = handle
        self.order = order
        self.prompt_left = job.prompt
        self.decode_from = -1


class Scheduler(Generic[S]):
    """Feeds requests to a batch until all are done.

    Parameters
    ----------
    batch : BatchLike
        Driven through `update` and `step`; its rows must all be free.
    requests : iterable of Request
        In the order they are to be served.
    options : SchedulerOptions
        Limits.

    Attributes
    ----------
    finished : int
        Requests that have been served and have left.
    tokens_held : int
        Tokens in the rows now.

    Raises
    ------
    InputError
        If a decode step of every row would be over `max_batch_tokens`.
    """

    def __init__(self, batch: BatchLike[S], requests: Iterable[Request], options: SchedulerOptions | None = None) -> None:
        self._batch = batch
        self._options = options or SchedulerOptions()
        self._num_rows = batch.free_rows
        if self._num_rows > self._options.max_batch_tokens:
            raise InputError(
                f"max_batch_tokens: {self._options.max_batch_tokens} is below the batch's {self._num_rows} rows; "
                "a decode step of every row must fit"
            )
        self._waiting = deque(Waiting(r, r.input_tokens, r.output_tokens) for r in requests)
        self._running: list[Running[S]] = []  # by the order they joined
        self._prefilling: deque[Running[S]] = deque()  # likewise
        self._decoding: dict[S, int] = {}  # handle -> 1, ready to be stepped
        self._ends: list[tuple[int, int, Running[S]]] = []  # heap of (steps after which it is done, order, sequence)
        self._step = 0
        self._joined = 0
        self._is_short = False  # somebody gave way and nobody has been done since
        self.finished = 0
        self.tokens_held = 0

    @property
    def num_waiting(self) -> int:
        """Requests that have no row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have a row."""
        return len(self._running)

    @property
    def is_done(self) -> bool:
        """Whether every request has been served and has left its row."""
        return not self._waiting and not self._running

    def step(self) -> StepOutcome:
        """Run one step.

        Raises
        ------
        CapacityError
            If one sequence alone does not fit into the batch's pages.
        """
        left, joined = self._change_composition()
        preempted = 0
        while self._running:
            counts, grants = self._compose()
            start = time.perf_counter_ns()
            try:
                self._batch.step(counts)
            except CapacityError as error:
                self._give_way(error)
                preempted += 1
                continue
            host_ns = time.perf_counter_ns() - start
            prefill_tokens, decode_tokens = sum(n for _, n in grants), len(self._decoding)
            self.tokens_held += prefill_tokens + decode_tokens
            self._step += 1
            self._grant(grants)
            return StepOutcome(prefill_tokens, decode_tokens, joined, left, preempted, host_ns)
        return StepOutcome(0, 0, joined, left, preempted, 0)

    # -- composition ---------------------------------------------------------------------------------------------------

    def _change_composition(self) -> tuple[int, int]:
        has_done = bool(self._ends) and self._ends[0][0] <= self._step
        if not has_done and (not self._waiting or self._is_short or len(self._running) == self._num_rows):
            return 0, 0
        done, freed = self._take_done()
        if done:
            self._is_short = False
        joining = self._take_joining(freed)
        if not done and not joining:
            return 0, 0
        for job, (handle, begun) in zip(joining, self._change(done, joining), strict=True):
            sequence = Running(job, handle, self._joined)
            sequence.prompt_left -= begun
            self.tokens_held += begun
            self._joined += 1
            self._running.append(sequence)
            self._prefilling.append(sequence)
        return len(done), len(joining)

    def _change(self, done: list[S], joining: list[Waiting]) -> list[tuple[S, int]]:
        """Let sequences leave and join; return handles of those that join, and how many tokens each begins with."""
        handles = self._batch.update(retire=done, admit=[job.prompt for job in joining])
        return [(handle, 0) for handle in handles]

    def _chunk(self, handle: S, tokens: int) -> int:
        """Return how many of `tokens` a prompt takes in its next step."""
        return tokens

    def _take_done(self) -> tuple[list[S], int]:
        """Return the sequences that leave, and the pages that come free with them (at least)."""
        done: list[S] = []
        freed = 0
        while self._ends and self._ends[0][0] <= self._step:
            _, _, sequence = heapq.heappop(self._ends)
            done.append(sequence.handle)
            tokens = sequence.job.request.total_tokens
            self.tokens_held -= tokens
            freed += self._pages(tokens)
            self._forget(sequence)
            self.finished += 1
        return done, freed

    def _take_joining(self, freed: int) -> list[Waiting]:
        joining: list[Waiting] = []
        free_rows = self._num_rows - len(self._running)
        if not self._waiting or not free_rows:
            return joining
        bounded = self._options.page_tokens is not None
        unclaimed = 0
        if bounded:
            # Prompts in work have a claim on their remaining pages, and everybody on one more to decode into.
            claimed = sum(self._pages(s.prompt_left) for s in self._prefilling) + len(self._running)
            unclaimed = self._free_pages() + freed - claimed
        while self._waiting and len(joining) < free_rows:
            unclaimed -= self._pages(self._waiting[0].prompt) + 1
            # Alone, a request is tried whatever the count says: if it cannot fit, the batch itself must refuse it.
            if bounded and unclaimed < 0 and (joining or self._running):
                break
            joining.append(self._waiting.popleft())
        return joining

    def _free_pages(self) -> int:
        """Return the pages that nobody has to keep."""
        return self._batch.free_pages

    def _pages(self, tokens: int) -> int:
        return ceil_div(tokens, self._options.page_tokens or 1)

    def _forget(self, sequence: Running[S]) -> None:
        """Take a sequence out of everything but the heap of ends."""
        self._running.remove(sequence)
        if sequence.decode_from < 0:
            self._prefilling.remove(sequence)
        else:
            del self._decoding[sequence.handle]

    # -- one step's tokens ---------------------------------------------------------------------------------------------

    def _compose(self) -> tuple[int | dict[S, int], list[tuple[Running[S], int]]]:
        """Return what to step, and which prompts get how many tokens of it."""
        if not self._prefilling:
            return 1, []
        counts = self._beside()
        budget = min(self._options.chunk, self._options.max_batch_tokens - len(counts))
        grants: list[tuple[Running[S], int]] = []
        for sequence in self._prefilling:
            if budget <= 0:
                break
            n = self._chunk(sequence.handle, min(sequence.prompt_left, budget))
            budget -= n
            counts[sequence.handle] = n
            grants.append((sequence, n))
        return counts, grants

    def _grant(self, grants: list[tuple[Running[S], int]]) -> None:
        for sequence, n in grants:
            sequence.prompt_left -= n
            if sequence.prompt_left == 0:
                self._prefilling.remove(sequence)  # in front, but for chunks that end early
                sequence.decode_from = self._step
                self._start_decoding(sequence)

    def _beside(self) -> dict[S, int]:
        """Return what a step with prompts appends beside them."""
        return dict(self._decoding)

    def _start_decoding(self, sequence: Running[S]) -> None:
        """Note that a prompt is in."""
        self._decoding[sequence.handle] = 1
        self._end_at(self._step + sequence.job.output, sequence)

    def _generated(self, sequence: Running[S]) -> int:
        """Return the tokens that a sequence has generated."""
        return self._step - sequence.decode_from

    def _end_at(self, step: int, sequence: Running[S]) -> None:
        """Note that a sequence is done when so many steps are."""
        heapq.heappush(self._ends, (step, sequence.order, sequence))

    def _give_way(self, error: CapacityError) -> None:
        """Put the sequence that joined last back in front of the queue.

        Raises
        ------
        CapacityError
            If it is the only one: nobody else holds pages that could be freed.
        """
        sequence = self._running[-1]
        job = sequence.job
        if len(self._running) == 1:
            where = f"the request of line {job.request.line}" if job.request.line else "a request"
            raise CapacityError(
                f"{where} ({job.request.total_tokens} tokens) does not fit into the pages of the pool even alone: {error}; "
                "give the pool more memory",
                needed=error.needed,
                free=error.free,
                evictable=error.evictable,
            ) from error
        self.tokens_held -= job.prompt - sequence.prompt_left
        generated = self._generated(sequence) if sequence.decode_from >= 0 else 0
        self._forget(sequence)
        if sequence.decode_from >= 0:
            self._ends = [end for end in self._ends if end[2] is not sequence]
            heapq.heapify(self._ends)
            self.tokens_held -= generated
            job = Waiting(job.request, job.prompt + generated, job.output - generated)
        self._is_short = True
        self._batch.update(retire=[sequence.handle], admit=[])
        self._waiting.appendleft(job)
