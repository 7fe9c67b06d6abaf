"""Stepper: the steps of a batch on ledger and device, once its arguments are known to be right.

Every method plans first, enqueues, and notes the outcome last, so that an error before the first launch changes nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.batch.composer import Composer
from numba_kv.batch.edits import EditBlock
from numba_kv.batch.reservation import Launched
from numba_kv.batch.view import StepView
from numba_kv.errors import CapacityError, InputError
from numba_kv.kernels import layout
from numba_kv.kernels.row_growth import note_growth, write_growth
from numba_kv.ledger.sharing import lower_floors, plan_floors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.launches import DeviceCounts
    from numba_kv.device import Stream
    from numba_kv.device.graph import Graph

__all__ = ["Stepper"]


class Stepper(Composer):
    """Carries out steps and rewinds, beside the changes of composition of its base.

    Attributes
    ----------
    taken_back : callable or None
        Is told, before a step is noted in which the device takes tokens back, how many of each row at most. Set by the batch.
    """

    taken_back: Callable[[NDArray[np.int64]], None] | None = None

    @property
    def step_counts(self) -> NDArray[np.int64]:
        """Tokens of each row in the last step: int64 [B], to be read. 0 for rows that came or went since; -1 if rows moved."""
        return self._layout

    # -- steps ---------------------------------------------------------------------------------------------------

    def repeats(self, tokens: object) -> bool:
        """Return whether a step of `tokens` for every row is the last one again, with pages in place."""
        return self._even.repeats(tokens)

    def step_again(self) -> StepView:
        """Repeat an even step: nothing is sent, nothing is decided."""
        even, stats, device = self._even, self.stats, self.device
        before = device.bytes_sent
        self._start_work()
        stats.launches += self.launches.step(even.total, even.count, even.is_long, device.stream)
        even.again()
        stats.steps += 1
        stats.decode_steps += 1
        stats.tokens += even.total
        stats.steady_bytes_to_device += device.bytes_sent - before
        return StepView(self.buffers, even.num_rows, even.total, even.count, even.upper, even.is_exact, even.is_long)

    def step(self, counts: NDArray[np.int64], *, even: bool = False, driven: DeviceCounts | None = None) -> StepView:
        """Append `counts` tokens to the rows; with `driven`, as many of them as the device says."""
        self.begin()
        total, longest = int(counts.sum()), int(counts.max(initial=0))
        is_long = longest > self.plan.config.max_step_tokens
        self._check_total(total)
        leases = self._prepare(counts, counts)
        self._start_change()
        self.stats.launches += self.launches.step(total, longest, is_long, self.device.stream, driven)
        self._note(counts, driven, 1)
        self.stats.steps += 1
        self.stats.tokens += total
        self.stats.page_blocks += leases
        live = np.flatnonzero(self.ledger.live)
        exact, upper = self.ledger.is_exact, int(self.ledger.hi.max())
        from_device = driven is not None and driven.counts is not None
        view = StepView(self.buffers, int(live[-1]) + 1, total, longest, upper, exact, is_long, from_device)
        if even and driven is None:
            self.stats.decode_steps += 1
            self._even.start(longest, counts, total, view, self._needs.steps_left(counts) * longest)
        return view

    def enqueue(self, tokens: int, driven: DeviceCounts | None, stream: Stream) -> None:
        """Enqueue the kernels of a step of `tokens` tokens a row; rows, pages and layout are the device's at that time."""
        self.launches.step(self._rows * tokens, tokens, False, stream, driven)

    def enqueue_counted(self, tokens: int, driven: DeviceCounts | None) -> None:
        """Enqueue such a step on the resources' own stream, where it runs: it has to be reserved, and noted."""
        self.reservation.check_launch(tokens, 1)
        self._start_work()
        self.enqueue(tokens, driven, self.device.stream)
        self.reservation.launch(Launched(1, tokens, driven, None))

    def replay(self, graph: Graph, launched: Launched) -> None:
        """Launch a captured step."""
        self.reservation.check_launch(launched.tokens, launched.steps)
        self._start_work()
        graph.launch(self.device.stream)
        self.reservation.launch(launched)

    def reserve(self, counts: NDArray[np.int64], steps: int, partial: bool) -> int:
        """Map the pages of `steps` steps of `counts` tokens, and tell the device that layout.

        With `partial`, rows and pool need not hold them all: each row gets what there is.

        Returns
        -------
        int
            Steps that every row can take.
        """
        self.begin()
        total = int(counts.sum())
        self._check_total(total)
        wanted = counts * steps
        if partial:
            needs = self._needs
            fitting = bisect.bisect_left(range(steps), True, key=lambda n: needs.is_short(needs.fitting(counts, n + 1)))
            wanted = needs.fitting(counts, fitting)
        else:
            self._check_capacity(wanted)
        stride = max(1, self.plan.config.max_batch_tokens // total)  # steps whose pages one block holds in any case
        if not partial and steps > stride:
            self._needs.check(wanted)  # a refusal comes before the first of several blocks is sent
        done = 0
        while done < steps:
            more, moved = steps - done, None
            if np.array_equal(counts, self._layout):
                while (moved := self._grow(np.minimum(wanted, counts * (done + more)))) is None and more > stride:
                    more = max(stride, more // 2)
            if moved is None:
                more = min(more, stride)
                moved = self._prepare(counts, np.minimum(wanted, counts * (done + more)))
            self.stats.page_blocks += moved
            done += more
        self._start_change()
        self.reservation.open(int(counts.max()), steps)
        return self._needs.steps_left(counts)

    def advanced(self, tokens: int, steps: int, driven: DeviceCounts | None) -> None:
        """Note `steps` steps that ran without the host."""
        taken = self.reservation.take(steps, tokens, driven)
        self.settle()
        counts = np.maximum(self._layout, 0)
        if all(launched.driven is None for launched in taken):
            self._note(counts, None, steps)
        else:
            for launched in taken:
                self._note(counts, launched.driven, launched.steps)
        self.stats.steps += steps
        self.stats.tokens += steps * int(counts.sum())

    def rewind(self, back: NDArray[np.int64]) -> None:
        """Take `back` tokens of the rows back."""
        self.begin()
        block, rows = EditBlock(), np.flatnonzero(back)
        floors = plan_floors(self.ledger, rows, self.ledger.lo[rows] - back[rows])
        if floors is not None:
            block.lower_floors(floors.rows, floors.floors, floors.keep, self.ledger.leased[floors.rows])
            if self.scrubs is not None:
                self._start_change()
                self.stats.launches += self.scrubs.emptied(floors)
        block.set_take_back(back)
        self._send(block)
        self.launches.rewind()
        self.stats.launches += 1
        if floors is not None:
            lower_floors(self.ledger, floors)
        for row in rows:
            self.ledger.note_rewind(int(row), int(self.ledger.lo[row] - back[row]))
        self._last[:] = 0  # the device's last step is the rewind
        self.stats.rewinds += len(rows)

    # -- steps that know of another model --------------------------------------------------------------------------

    def check_step(self, counts: NDArray[np.int64], steps: int = 1) -> None:
        """Raise what `steps` steps of `counts` would raise; changes nothing."""
        self.begin()
        self._check_total(int(counts.sum()))
        self._check_capacity(counts * steps)
        self._needs.check(counts * steps)

    def step_beside(self, most: NDArray[np.int64], is_exact: bool, enqueue: Callable[[Stream], int]) -> None:
        """Make a step with a layout of its own, in which rows append what the device says: `most` tokens, or up to so many."""
        self.begin()
        self._check_capacity(most)
        leases = self._needs.plan(most)
        if leases is not None:
            self.move_pages(leases)
        self._start_change()
        self.stats.launches += enqueue(self.device.stream)
        self.stats.steps += 1
        self.stats.page_blocks += leases is not None
        if is_exact:
            self._note_even(self.ledger.numbers, most, 1)
        else:
            self.note_bounds(self.ledger.lo, self.ledger.hi + most)
        self._last[:] = most

    def note_bounds(self, lowest: NDArray[np.int64], highest: NDArray[np.int64] | None = None) -> None:
        """Note that the device changes lengths, within these bounds; a run of even steps goes on."""
        self.settle()
        self.ledger.widen(lowest, highest)
        self._even.is_exact = False

    # -- parts ---------------------------------------------------------------------------------------------------

    def _prepare(self, counts: NDArray[np.int64], tokens: NDArray[np.int64]) -> bool:
        """Send the layout `counts` and the pages for `tokens` more, as far as the device lacks them; return if pages moved."""
        self._check_capacity(tokens)
        if np.array_equal(counts, self._layout):
            moved = self._grow(tokens)
            if moved is not None:
                return moved
        leases = self._needs.plan(tokens)
        block = EditBlock()
        ids = self._lease(leases, block) if leases is not None else None
        if not np.array_equal(counts, self._layout):
            block.set_layout(counts, np.concatenate([[0], np.cumsum(counts)]), self._layout_tokens)
            self._layout_tokens = int(counts.sum())
        if leases is not None:
            self._scrub_shrinking(leases)
        if block:
            self._send(block)
        if leases is not None and ids is not None:
            self.ledger.move_pages(leases.rows, leases.targets, ids)
        self._layout[:] = counts
        return leases is not None

    def _grow(self, tokens: NDArray[np.int64]) -> bool | None:
        """Send the pages for `tokens` more, and nothing else; return if there were any, None if one block does not do."""
        ledger, pool, targets = self.ledger, self.ledger.pool, self._needs.targets
        missing, grown, rows = self._needs.find(tokens)
        if not missing:
            return False
        if not grown or rows * layout.RECORD_WORDS + grown > self.buffers.edits.size:
            return None
        words = self.launches.acquire()
        num_words = write_growth(words, rows, targets, ledger.numbers, pool.stack, pool.free_pages)
        self._start_change()
        before = self.device.bytes_sent
        self.launches.send_pages(num_words, rows)
        self._count(before)
        note_growth(targets, ledger.numbers, ledger.pages, pool.stack, pool.free_pages)
        pool.take(grown)
        return True

    def _note(self, counts: NDArray[np.int64], driven: DeviceCounts | None, steps: int) -> None:
        """Move the mirror by `steps` steps."""
        if driven is None and self.ledger.is_exact:
            self._note_even(self.ledger.numbers, counts, steps)
        elif driven is None:
            self.ledger.note_steps(counts, steps)
        else:
            least = counts if driven.counts is None else np.zeros_like(counts)
            back = np.zeros_like(counts) if driven.back is None else self._last
            for _ in range(steps):
                if driven.back is not None and self.taken_back is not None:
                    self.taken_back(back)
                self.ledger.note_uncertain_step(counts, least, back)
                back = back if driven.back is None else counts
        self._last[:] = counts

    def _check_total(self, total: int) -> None:
        most = self.plan.config.max_batch_tokens
        if total > most:
            raise InputError(f"tokens: {total} in one step, max_batch_tokens is {most}; take several steps")

    def _check_capacity(self, tokens: NDArray[np.int64]) -> None:
        capacity = self.plan.config.max_kv_cache_capacity
        over = np.flatnonzero((self.ledger.hi + tokens > capacity) & (tokens > 0))
        if len(over):
            row = int(over[0])
            low, high = int(self.ledger.lo[row]), int(self.ledger.hi[row])
            length = f"{high}" if low == high else f"{low} to {high} (sync_lengths() tells)"
            raise CapacityError(
                f"tokens: {int(tokens[row])} more for row {row} of length {length} exceed max_kv_cache_capacity {capacity}; "
                "retire the sequence, or plan a larger one",
                needed=int(tokens[row]),
                free=capacity - high,
            )
