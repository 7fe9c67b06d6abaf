"""Stepper: what a batch does to ledger and device, once its arguments are known to be right.

Every method plans first, enqueues, and notes the outcome last, so that an error before the first launch changes nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from struct import pack_into
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.batch.edits import EditBlock
from numba_kv.batch.even_steps import EvenSteps
from numba_kv.batch.launches import StepLaunches
from numba_kv.batch.permutation import cycles_of
from numba_kv.batch.reservation import Launched, Reservation
from numba_kv.batch.stats import BatchStats
from numba_kv.batch.view import StepView
from numba_kv.errors import CapacityError, InputError, StateError
from numba_kv.kernels import layout
from numba_kv.kernels.row_changes import note_change, write_change
from numba_kv.ledger.leases import LeasePlan, find_leases, plan_leases
from numba_kv.ledger.rows import FIRST_WINDOW, RowLedger
from numba_kv.ledger.sharing import lower_floors, plan_floors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.launches import DeviceCounts
    from numba_kv.batch.scrub import RowScrubs
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device import Stream
    from numba_kv.device.graph import Graph
    from numba_kv.device.guard import CallGuard

__all__ = ["Stepper"]


class Stepper:
    """Carries out composition changes, steps and rewinds. Owns the ledger and the bound launches.

    Attributes
    ----------
    ledger : RowLedger
        The host mirror; `settle` brings it up to date.
    stats : BatchStats
        Counters.
    scrubs : RowScrubs or None
        Scrubs pages that become free; None: nobody does. Set by the batch.
    taken_back : callable or None
        Is told, before a step is noted in which the device takes tokens back, how many of each row at most. Set by the batch.
    """

    def __init__(self, buffers: StepBuffers, guard: CallGuard) -> None:
        rows = buffers.plan.config.max_batch_size
        self.buffers = buffers
        self.plan = buffers.plan
        self.device = buffers.device
        self.ledger = RowLedger(self.plan)
        self.stats = BatchStats()
        self.launches = StepLaunches(buffers)
        self.reservation = Reservation()
        self.scrubs: RowScrubs | None = None
        self.taken_back: Callable[[NDArray[np.int64]], None] | None = None
        self._rows = rows
        self._guard = guard
        self._even = EvenSteps(rows)
        self._layout = np.zeros(rows, np.int64)  # counts that the device's layout says now
        self._layout_tokens = 0  # tokens of that layout
        self._request = np.zeros(3 * rows, np.int64)  # of `write_change`, as the next
        self._request_words = self._request.data
        self._changes = np.zeros(rows, np.int8)
        self._last = np.zeros(rows, np.int64)  # most tokens that each row's last step appended

    # -- composition ---------------------------------------------------------------------------------------------

    def update(self, leaving: list[int], prompts: list[int]) -> list[int]:
        """Empty rows and start sequences in the lowest free ones; return the rows of the new sequences."""
        self.begin()
        ledger, pool = self.ledger, self.ledger.pool
        request, leave, join = self._request, len(leaving), len(prompts)
        total = leave + join
        pack_into(f"{total}q", self._request_words, 0, *leaving, *prompts)  # half of NumPy's time, for so few
        words = self.launches.acquire()
        numbers, live = ledger.numbers, ledger.live
        records, num_words = write_change(request, leave, join, words, live, self._changes, numbers, ledger.ring_pages)
        self._start_change()
        if self.scrubs is not None:
            self.stats.launches += self.scrubs.leaving(leaving)
        before = self.device.bytes_to_device
        self.launches.send(num_words, records)
        self._count(before)
        top, rotated = note_change(
            request,
            leave,
            join,
            ledger.admitted,
            live,
            numbers,
            ledger.pages,
            pool.stack,
            pool.free_pages,
            pool.shares,
            self._last,
            self._layout,  # the device's counts of these rows are 0 now: the next step sends its layout
            FIRST_WINDOW,
        )
        ledger.note_change(leave, join, top)
        if ledger.has_bases:
            ledger.base[request[:leave]] = ledger.base[request[total : total + join]] = 0
        stats = self.stats
        stats.rotated_pages += rotated
        stats.retired += leave
        stats.admitted += join
        return self._request_words[total : total + join].tolist()

    def permute(self, sources: NDArray[np.int64]) -> None:
        """Make row i what row ``sources[i]`` was."""
        self.begin()
        self._start_change()
        before = self.device.bytes_to_device
        self.launches.permute(cycles_of(sources))
        self._count(before)
        self.ledger.permute(sources)
        self._last = self._last[sources]
        self._layout[:] = -1  # the device's counts have the old order: the next step sends its layout

    def move_pages(self, leases: LeasePlan) -> None:
        """Move pages between rows and the pool, at most as many to rows as one block holds."""
        block = EditBlock()
        ids = self._lease(leases, block)
        self._scrub_shrinking(leases)
        self._send(block)
        self.ledger.move_pages(leases.rows, leases.targets, ids)

    def map_pages(self, row: int, first: int, ids: NDArray[np.int32]) -> None:
        """Map `ids`, at most as many as one block holds, as the last pages of a row, from logical page `first` on."""
        ledger, block, one = self.ledger, EditBlock(), np.array([row])
        block.set_pages(one, np.array([first]), np.array([len(ids)]), ids, ledger.leased[one])
        self._send(block)
        ledger.pages[row, first : first + len(ids)] = ids
        ledger.leased[row] = first + len(ids)

    def set_floors(self, floors: dict[int, int]) -> None:
        """Set the end of what may not be rewritten of some rows."""
        rows = np.array(list(floors))
        values, held, block = np.array(list(floors.values())), self.ledger.leased[rows], EditBlock()
        block.lower_floors(rows, values, held, held)
        self._send(block)
        self.ledger.floor[rows] = values

    def start_reads(self) -> None:
        """Begin to enqueue what changes nothing in the batch."""
        self._start_work()

    def start_copies(self) -> None:
        """Begin a change of rows with copies of their pages."""
        self._start_change()

    def place(self, records: NDArray[np.int32]) -> None:
        """Give rows the lengths and pages that `records` say; see `kernels/place.py`."""
        self._start_change()
        before = self.device.bytes_to_device
        self.launches.place(records)
        self._count(before)
        self._last[records[:, layout.PLACE_ROW]] = 0

    # -- steps ---------------------------------------------------------------------------------------------------

    def repeats(self, tokens: object) -> bool:
        """Return whether a step of `tokens` for every row is the last one again, with pages in place."""
        return self._even.repeats(tokens)

    def step_again(self) -> StepView:
        """Repeat an even step: nothing is sent, nothing is decided."""
        even, stats, device = self._even, self.stats, self.device
        before = device.bytes_to_device
        self._start_work()
        stats.launches += self.launches.step(even.total, even.count, even.is_long, device.stream)
        even.again()
        stats.steps += 1
        stats.decode_steps += 1
        stats.tokens += even.total
        stats.steady_bytes_to_device += device.bytes_to_device - before
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
        view = StepView(self.buffers, int(live[-1]) + 1, total, longest, upper, exact, is_long)
        if even and driven is None:
            self.stats.decode_steps += 1
            self._even.start(longest, counts, total, view, self.ledger.headroom)
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
        if not partial:
            self._check_capacity(counts * steps)
        wanted = self._wanted(counts, steps)
        stride = max(1, self.plan.config.max_batch_tokens // total)  # steps whose pages one block holds
        if partial:
            fitting = bisect.bisect_left(range(steps), True, key=lambda n: self._is_short(self._wanted(counts, n + 1)))
            wanted = self._wanted(counts, fitting)
        elif steps > stride:
            find_leases(self.ledger, wanted)  # a refusal comes before the first of several blocks is sent
        for part in (*range(stride, steps, stride), steps):
            self.stats.page_blocks += self._prepare(counts, np.minimum(wanted, counts * part))
        self._start_change()
        self.reservation.open(int(counts.max()), steps)
        return int(self.ledger.steps_left(counts)[counts > 0].min())

    def advanced(self, tokens: int, steps: int, driven: DeviceCounts | None) -> None:
        """Note `steps` steps that ran without the host."""
        taken = self.reservation.take(steps, tokens, driven)
        self.settle()
        counts = np.where(self._layout > 0, self._layout, 0)
        for launched in taken:
            self._note(counts, launched.driven, launched.steps)
            self.stats.steps += launched.steps
            self.stats.tokens += launched.steps * int(counts.sum())

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
        find_leases(self.ledger, counts * steps)

    def step_beside(self, most: NDArray[np.int64], is_exact: bool, enqueue: Callable[[Stream], int]) -> None:
        """Make a step with a layout of its own, in which rows append what the device says: `most` tokens, or up to so many."""
        self.begin()
        self._check_capacity(most)
        leases = find_leases(self.ledger, most)
        if leases is not None:
            self.move_pages(leases)
        self._start_change()
        self.stats.launches += enqueue(self.device.stream)
        self.stats.steps += 1
        self.stats.page_blocks += leases is not None
        if is_exact:
            self.ledger.note_even_steps(most, most)
        else:
            self.note_bounds(self.ledger.lo, self.ledger.hi + most)
        self._last = most.copy()

    def note_bounds(self, lowest: NDArray[np.int64], highest: NDArray[np.int64] | None = None) -> None:
        """Note that the device changes lengths, within these bounds; a run of even steps goes on."""
        self.settle()
        self.ledger.widen(lowest, highest)
        self._even.is_exact = False

    # -- the host mirror -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring the host mirror up to date after repeated even steps."""
        repeats = self._even.take_repeats()
        if repeats:
            self.ledger.note_even_steps(repeats * self._even.counts, self._even.counts)

    def bounds(self, row: int) -> tuple[int, int]:
        """Return the shortest and the longest that a row can be now; changes nothing."""
        ahead = self._even.repeats_since * int(self._even.counts[row])
        return int(self.ledger.lo[row]) + ahead, int(self.ledger.hi[row]) + ahead

    def counters(self) -> BatchStats:
        """Return a copy of the counters, pages rotated by sequences that are still active included; changes nothing."""
        copy = BatchStats(**vars(self.stats))
        ledger, repeats = self.ledger, self._even.repeats_since
        begin = ledger.mapped_begin
        if repeats:
            begin = ledger.mapped_after(repeats * self._even.counts, self._even.counts)
        copy.rotated_pages += int(begin[1:, ledger.live].sum())
        return copy

    def waiting_row(self) -> tuple[int, int]:
        """Return a row with prompt tokens that no step has appended, and how many; (0, 0) if there is none."""
        self.settle()
        left = self.ledger.prompt - self.ledger.hi
        row = int(left.argmax())
        return (row, int(left[row])) if left[row] > 0 else (0, 0)

    def begin(self) -> None:
        """Begin a call that needs the host mirror right.

        Raises
        ------
        StateError
            If steps were launched and not noted.
        """
        self.reservation.check_settled()
        self.settle()

    def learn(self) -> None:
        """Read lengths from the device where the host only knows bounds. Waits."""
        self.begin()
        if not self.ledger.is_exact:
            self._even.end()
            lengths, peaks = self.buffers.lengths[0].to_host(), self.buffers.high_water[0].to_host()
            self.ledger.learn(lengths, peaks, self.buffers.mapped_begin.to_host())

    def close(self) -> None:
        """Give the staging blocks back. Waits for copies in flight."""
        self.launches.close()

    # -- parts ---------------------------------------------------------------------------------------------------

    def check_can_change(self) -> None:
        """Check that work can be enqueued.

        Raises
        ------
        StateError
            If the stream is being captured: what the host decides cannot be replayed.
        """
        if self.device.stream.is_capturing:
            raise StateError("the resources' stream is being captured; only enqueue_step() and derived forms can be")

    def _start_work(self) -> None:
        """Begin to enqueue; from here on a failure poisons the batch.

        Raises
        ------
        StateError
            See `check_can_change`.
        """
        self.check_can_change()
        self._guard.is_enqueueing = True

    def _start_change(self) -> None:
        """Begin to enqueue something that ends a run of even steps and what was reserved."""
        self._start_work()
        self._even.end()
        self.reservation.drop()

    def _wanted(self, counts: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
        """Return the tokens of `steps` steps, at most what fits the rows."""
        room = self.plan.config.max_kv_cache_capacity - self.ledger.hi
        size = np.maximum(counts, 1)
        tokens: NDArray[np.int64] = np.minimum(counts * steps, np.maximum(room, 0) // size * counts)
        return tokens

    def _is_short(self, tokens: NDArray[np.int64]) -> bool:
        try:
            plan_leases(self.ledger, tokens)
        except CapacityError as error:
            kept = self.ledger.kept
            return kept is None or not kept.can_free(error.needed - error.free - error.evictable)
        return False

    def _prepare(self, counts: NDArray[np.int64], tokens: NDArray[np.int64]) -> bool:
        """Send the layout `counts` and the pages for `tokens` more, as far as the device lacks them; return if pages moved."""
        self._check_capacity(tokens)
        leases = find_leases(self.ledger, tokens)
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
        self._layout = counts.copy()  # not the array of `_last`, in which rows that leave are set to 0
        return leases is not None

    def _lease(self, leases: LeasePlan, block: EditBlock) -> NDArray[np.int32]:
        """Write into `block` how pages move between the pool and rows; return the ids that rows get, row after row."""
        held, wanted = self.ledger.leased[leases.rows], leases.targets[leases.rows]
        ids = self.ledger.peek_pages(leases.rows, leases.targets)
        block.set_pages(leases.rows, np.minimum(held, wanted), np.maximum(wanted - held, 0), ids, held)
        return ids

    def _scrub_shrinking(self, leases: LeasePlan) -> None:
        """Scrub pages that rows are about to lose."""
        if self.scrubs is not None:
            self._start_change()
            self.stats.launches += self.scrubs.shrinking(leases)

    def _note(self, counts: NDArray[np.int64], driven: DeviceCounts | None, steps: int) -> None:
        """Move the mirror by `steps` steps."""
        if driven is None:
            self.ledger.note_steps(counts, steps)
        else:
            least = counts if driven.counts is None else np.zeros_like(counts)
            back = np.zeros_like(counts) if driven.back is None else self._last
            for _ in range(steps):
                if driven.back is not None and self.taken_back is not None:
                    self.taken_back(back)
                self.ledger.note_uncertain_step(counts, least, back)
                back = back if driven.back is None else counts
        self._last = counts.copy()

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
                f"tokens: {int(tokens[row])} more for row {row} of length {length} exceed max_kv_cache_capacity {capacity}",
                needed=int(tokens[row]),
                free=capacity - high,
            )

    def _send(self, block: EditBlock) -> None:
        self._start_change()
        before = self.device.bytes_to_device
        self.launches.apply(block)
        self._count(before)

    def _count(self, bytes_before: int) -> None:
        self.stats.launches += 1
        self.stats.bytes_to_device += self.device.bytes_to_device - bytes_before
