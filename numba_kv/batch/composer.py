"""Composer: which rows a batch has and which pages they hold, on the ledger and on the device.

Every method plans first, enqueues, and notes the outcome last, so that an error before the first launch changes nothing.
"""

from __future__ import annotations

from struct import pack_into
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.batch.edits import EditBlock
from numba_kv.batch.even_steps import EvenSteps
from numba_kv.batch.launches import StepLaunches
from numba_kv.batch.page_needs import PageNeeds
from numba_kv.batch.permutation import cycles_of
from numba_kv.batch.reservation import Reservation
from numba_kv.batch.stats import BatchStats
from numba_kv.errors import StateError
from numba_kv.kernels import layout
from numba_kv.kernels.driver_calls import CaptureQuery
from numba_kv.kernels.row_changes import RowArrays, note_change_at, write_change_at
from numba_kv.kernels.row_growth import note_even_steps
from numba_kv.ledger.leases import LeasePlan
from numba_kv.ledger.rows import FIRST_WINDOW, RowLedger

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.scrub import RowScrubs
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device.guard import CallGuard
    from numba_kv.plan import GroupPlan

__all__ = ["Composer"]


class Composer:
    """Carries out changes of composition. Owns the ledger and the bound launches.

    Attributes
    ----------
    ledger : RowLedger
        The host mirror; `settle` brings it up to date.
    stats : BatchStats
        Counters.
    scrubs : RowScrubs or None
        Scrubs pages that become free; None: nobody does. Set by the batch.
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
        self._rows = rows
        self._guard = guard
        self._even = EvenSteps(rows)
        self._layout = np.zeros(rows, np.int64)  # counts that the device's layout says now
        self._layout_tokens = 0  # tokens of that layout
        self._request = np.zeros(3 * rows, np.int64)  # of `write_change`, as the next
        self._request_words = self._request.data
        self._changes = np.zeros(rows, np.int8)
        self._last = np.zeros(rows, np.int64)  # most tokens that each row's last step appended
        ledger = self.ledger
        self._arrays = RowArrays(
            request=self._request,
            live=ledger.live,
            changes=self._changes,
            numbers=ledger.numbers,
            rings=ledger.ring_pages,
            pages=ledger.pages,
            stack=ledger.pool.stack,
            shares=ledger.pool.shares,
            last=self._last,
            layout=self._layout,
        )
        self._needs = PageNeeds(self.ledger)
        self._is_captured = CaptureQuery() if self.device.target == "cuda" else None
        self._windows = np.array([_window_words(group) for group in self.plan.groups], np.int64)

    # -- composition ---------------------------------------------------------------------------------------------

    def update(self, leaving: list[int], prompts: list[int]) -> list[int]:
        """Empty rows and start sequences in the lowest free ones; return the rows of the new sequences."""
        self.begin()
        ledger, pool = self.ledger, self.ledger.pool
        request, leave, join = self._request, len(leaving), len(prompts)
        total = leave + join
        pack_into(f"{total}q", self._request_words, 0, *leaving, *prompts)  # half of NumPy's time, for so few
        block = self.launches.acquire_block()
        records, num_words = write_change_at(self._arrays.address, block.address, len(block.words), leave, join)
        self._start_change()
        if self.scrubs is not None:
            self.stats.launches += self.scrubs.leaving(leaving)
        before = self.device.bytes_sent
        self.launches.send(num_words, records)
        self._count(before)
        top, rotated = note_change_at(
            self._arrays.address, leave, join, ledger.admitted, pool.free_pages, FIRST_WINDOW
        )  # the device's counts of these rows are 0 now: the next step sends its layout
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
        before = self.device.bytes_sent
        self.launches.permute(cycles_of(sources))
        self._count(before)
        self.ledger.permute(sources)
        self._last[:] = self._last[sources]
        self._layout[:] = -1  # the device's counts have the old order: the next step sends its layout

    def align_states(self) -> int:
        """Move recurrent states so that row i's are in slot i; return how many moved."""
        states = self.launches.states
        cycles = [] if states is None else states.strays
        if states is None or not cycles:
            return 0
        self.begin()
        self._start_change()
        before = self.device.bytes_sent
        self.launches.align_states(states, cycles)
        self._count(before)
        return sum(map(len, cycles))

    def move_pages(self, leases: LeasePlan) -> None:
        """Move pages between rows and the pool, at most as many to rows as one block holds."""
        block = EditBlock()
        ids = self._lease(leases, block)
        self._scrub_shrinking(leases)
        self._send(block)
        self.ledger.move_pages(leases.rows, leases.targets, ids)

    def map_pages(self, maps: list[tuple[int, int, NDArray[np.int32]]]) -> None:
        """Map ids as the last pages of rows, as many as one block holds: (row, logical page of the first, ids), a row once."""
        ledger, block = self.ledger, EditBlock()
        rows, firsts = (np.array([item[i] for item in maps]) for i in range(2))
        sizes = np.array([len(ids) for _, _, ids in maps])
        block.set_pages(rows, firsts, sizes, np.concatenate([ids for _, _, ids in maps]), ledger.leased[rows])
        self._send(block)
        for row, first, ids in maps:
            ledger.pages[row, first : first + len(ids)] = ids
        ledger.leased[rows] = firsts + sizes

    def set_floors(self, floors: dict[int, int]) -> None:
        """Set the end of what may not be rewritten of some rows."""
        rows = np.array(list(floors))
        values, held, block = np.array(list(floors.values())), self.ledger.leased[rows], EditBlock()
        block.lower_floors(rows, values, held, held)
        self._send(block)
        self.ledger.floor[rows] = values

    def start_work(self) -> None:
        """Begin to enqueue what ends no run of even steps; from here on a failure poisons the batch."""
        self._start_work()

    def start_copies(self) -> None:
        """Begin a change of rows with copies of their pages."""
        self._start_change()

    def place(self, records: NDArray[np.int32]) -> None:
        """Give rows the lengths and pages that `records` say; see `kernels/place.py`."""
        self._start_change()
        before = self.device.bytes_sent
        self.launches.place(records)
        self._count(before)
        self._last[records[:, layout.PLACE_ROW]] = 0

    # -- the host mirror -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring the host mirror up to date after repeated even steps."""
        repeats = self._even.take_repeats()
        if repeats:
            self._note_even(self.ledger.numbers, self._even.counts, repeats)

    def bounds(self, row: int) -> tuple[int, int]:
        """Return the shortest and the longest that a row can be now; changes nothing."""
        ahead = self._even.repeats_since * int(self._even.counts[row])
        return int(self.ledger.lo[row]) + ahead, int(self.ledger.hi[row]) + ahead

    def exact_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return tokens of the last step [B], lengths [B] and first mapped pages [G, B], as the device has them.

        Raises
        ------
        StateError
            If the host only knows bounds, or steps were launched and not noted.
        """
        self.begin()
        if not self.ledger.is_exact:
            raise StateError("the device decided about lengths that the host does not know; call sync_lengths() first")
        return np.maximum(self._layout, 0), self.ledger.lo, self.ledger.mapped_begin

    def counters(self) -> BatchStats:
        """Return a copy of the counters, pages rotated by sequences that are still active included; changes nothing."""
        copy = BatchStats(**vars(self.stats))
        ledger, repeats = self.ledger, self._even.repeats_since
        numbers = ledger.numbers
        if repeats:
            numbers = numbers.copy()
            self._note_even(numbers, self._even.counts, repeats)
        copy.rotated_pages += int(numbers[FIRST_WINDOW:, ledger.live].sum())
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
        stream = self.device.stream
        if stream.is_capturing if self._is_captured is None else self._is_captured(stream):
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

    def _note_even(self, numbers: NDArray[np.int64], counts: NDArray[np.int64], steps: int) -> None:
        note_even_steps(numbers, counts, steps, self.plan.config.max_kv_cache_capacity, self._needs.page_tokens, self._windows)

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

    def _send(self, block: EditBlock) -> None:
        self._start_change()
        before = self.device.bytes_sent
        self.launches.apply(block)
        self._count(before)

    def _count(self, bytes_before: int) -> None:
        self.stats.launches += 1
        self.stats.bytes_to_device += self.device.bytes_sent - bytes_before


def _window_words(group: GroupPlan) -> tuple[int, int, int, int]:
    """Return a group as `note_even_steps` takes it."""
    kinds = {"full": layout.FULL, "sliding": layout.SLIDING, "chunked": layout.CHUNKED}
    return kinds[group.window.kind], group.window.tokens, group.page_tokens, group.ring
