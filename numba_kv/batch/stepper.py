"""Stepper: what a batch does to ledger and device, once its arguments are known to be right.

Every method plans first, enqueues, and notes the outcome last, so that an error before the first launch changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.batch.edits import EditBlock
from numba_kv.batch.even_steps import EvenSteps
from numba_kv.batch.launches import StepLaunches
from numba_kv.batch.permutation import cycles_of
from numba_kv.batch.stats import BatchStats
from numba_kv.batch.view import StepView
from numba_kv.errors import CapacityError, InputError, StateError
from numba_kv.ledger.leases import LeasePlan, plan_leases
from numba_kv.ledger.rows import RowLedger

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.guard import CallGuard
    from numba_kv.batch.launches import DeviceCounts
    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.device import Stream

__all__ = ["Stepper"]


class Stepper:
    """Carries out composition changes, steps and rewinds. Owns the ledger and the bound launches.

    Attributes
    ----------
    ledger : RowLedger
        The host mirror; `settle` brings it up to date.
    stats : BatchStats
        Counters.
    """

    def __init__(self, buffers: StepBuffers, guard: CallGuard) -> None:
        rows = buffers.plan.config.max_batch_size
        self.buffers = buffers
        self.plan = buffers.plan
        self.device = buffers.device
        self.ledger = RowLedger(self.plan)
        self.stats = BatchStats()
        self.launches = StepLaunches(buffers)
        self.reserved = 0  # steps that may run without the host
        self.launched = 0  # ... of which a captured step has launched, and nobody noted
        self._rows = rows
        self._guard = guard
        self._even = EvenSteps(rows)
        self._layout = np.zeros(rows, np.int64)  # counts that the device's layout says now
        self._layout_tokens = 0  # tokens of that layout
        self._last = np.zeros(rows, np.int64)  # most tokens that each row's last step appended

    # -- composition ---------------------------------------------------------------------------------------------

    def update(self, leaving: list[int], prompts: list[int]) -> list[int]:
        """Empty rows and start sequences in the lowest free ones; return the rows of the new sequences."""
        self.change()
        ledger = self.ledger
        left = np.array(leaving, np.int64)
        joining = ledger.peek_rows(len(prompts), left)
        changes = np.zeros(self._rows, np.int8)  # 1: the row becomes empty, 2: a sequence starts in it
        changes[left] = 1
        changes[joining] = 2
        rows = np.flatnonzero(changes)
        rings = ledger.rings[1][rows] if len(ledger.rings) == 2 else np.hstack([ring[rows] for ring in ledger.rings])
        block = EditBlock()
        block.set_resets(rows, changes[rows] == 2, ledger.leased[rows], ledger.lo[rows], ledger.hi[rows], rings)
        self._send(block)
        self.stats.rotated_pages += int(ledger.mapped_begin[1:, left].sum())
        ledger.retire(left)
        ledger.admit(joining, np.array(prompts, np.int64))
        self._last[rows] = 0
        self._layout[rows] = -1  # the device's counts of these rows are 0 now: the next step sends its layout
        self.stats.retired += len(left)
        self.stats.admitted += len(joining)
        return [int(row) for row in joining]

    def permute(self, sources: NDArray[np.int64]) -> None:
        """Make row i what row ``sources[i]`` was."""
        self.change()
        self._guard.is_enqueueing = True
        before = self.device.bytes_to_device
        self.launches.permute(cycles_of(sources))
        self._count(before)
        self.ledger.permute(sources)
        self._last = self._last[sources]
        self._layout[:] = -1  # the device's counts have the old order: the next step sends its layout

    # -- steps ---------------------------------------------------------------------------------------------------

    def repeats(self, tokens: object) -> bool:
        """Return whether a step of `tokens` for every row is the last one again, with pages in place."""
        return self._even.repeats(tokens)

    def step_again(self) -> StepView:
        """Repeat an even step: nothing is sent, nothing is decided."""
        even, stats, device = self._even, self.stats, self.device
        before = device.bytes_to_device
        self._guard.is_enqueueing = True
        stats.launches += self.launches.step(even.total, even.count, even.is_long, device.stream)
        even.again()
        stats.steps += 1
        stats.decode_steps += 1
        stats.tokens += even.total
        stats.steady_bytes_to_device += device.bytes_to_device - before
        return StepView(self.buffers, even.num_rows, even.total, even.count, even.upper, True, even.is_long)

    def step(self, counts: NDArray[np.int64], *, even: bool = False, driven: DeviceCounts | None = None) -> StepView:
        """Append `counts` tokens to the rows; with `driven`, as many of them as the device says."""
        self.change()
        total, longest = int(counts.sum()), int(counts.max(initial=0))
        is_long = longest > self.plan.config.max_step_tokens
        self._check_total(total)
        leases = self._prepare(counts, 1)
        self._guard.is_enqueueing = True
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

    def reserve(self, counts: NDArray[np.int64], steps: int) -> None:
        """Map the pages of `steps` steps of `counts` tokens, and tell the device that layout."""
        self.change()
        total = int(counts.sum())
        self._check_total(total)
        self._check_capacity(counts * steps)
        plan_leases(self.ledger, counts * steps)  # a refusal comes before the first block is sent
        stride = max(1, self.plan.config.max_batch_tokens // total)  # steps whose pages one block holds
        for part in (*range(stride, steps, stride), steps):
            self.stats.page_blocks += self._prepare(counts, part)
        self.reserved = steps

    def advanced(self, tokens: int, steps: int, driven: DeviceCounts | None) -> None:
        """Note `steps` steps that ran without the host."""
        if steps > self.reserved:
            raise StateError(f"steps: {steps} are noted, {self.reserved} were reserved")
        if not np.array_equal(np.unique(self._layout), [0, tokens]) and not (self._layout == tokens).all():
            raise StateError(f"tokens: {tokens} a row are noted, but another count was reserved")
        counts, reserved, launched = self._layout, self.reserved, self.launched
        self.launched = 0
        self.change()
        self.reserved, self.launched = reserved - steps, max(0, launched - steps)
        self._note(counts, driven, steps)
        self.stats.steps += steps
        self.stats.tokens += steps * int(counts.sum())

    def rewind(self, back: NDArray[np.int64]) -> None:
        """Take `back` tokens of the rows back."""
        self.change()
        block = EditBlock()
        block.set_take_back(back)
        self._send(block)
        self.launches.rewind()
        self.stats.launches += 1
        rows = np.flatnonzero(back)
        for row in rows:
            self.ledger.note_rewind(int(row), int(self.ledger.lo[row] - back[row]))
        self._last[:] = 0  # the device's last step is the rewind
        self.stats.rewinds += len(rows)

    # -- the host mirror -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bring the host mirror up to date after repeated even steps."""
        repeats = self._even.take_repeats()
        if repeats:
            self.ledger.note_even_steps(repeats * self._even.counts, self._even.counts)

    def waiting_row(self) -> tuple[int, int]:
        """Return a row with prompt tokens that no step has appended, and how many; (0, 0) if there is none."""
        self.settle()
        left = self.ledger.prompt - self.ledger.hi
        row = int(left.argmax())
        return (row, int(left[row])) if left[row] > 0 else (0, 0)

    def change(self) -> None:
        """Begin something that changes more than an even step does.

        Raises
        ------
        StateError
            If captured steps were launched and not noted: the host would decide on old lengths.
        """
        if self.launched:
            raise StateError(f"{self.launched} captured steps were launched and not noted; call advanced() first")
        self.settle()
        self._even.end()
        self.reserved = 0

    def learn(self) -> None:
        """Read lengths from the device where the host only knows bounds. Waits."""
        self.change()
        if not self.ledger.is_exact:
            lengths, peaks = self.buffers.lengths[0].to_host(), self.buffers.high_water[0].to_host()
            self.ledger.learn(lengths, peaks, self.buffers.mapped_begin.to_host())

    def close(self) -> None:
        """Give the staging blocks back. Waits for copies in flight."""
        self.launches.close()

    # -- parts ---------------------------------------------------------------------------------------------------

    def _prepare(self, counts: NDArray[np.int64], steps: int) -> bool:
        """Send the pages and the layout that `steps` steps need and the device lacks; return whether pages moved."""
        self._check_capacity(counts * steps)
        leases = plan_leases(self.ledger, counts * steps)
        block = EditBlock()
        ids = self._lease(leases, block) if leases is not None else None
        if not np.array_equal(counts, self._layout):
            block.set_layout(counts, np.concatenate([[0], np.cumsum(counts)]), self._layout_tokens)
            self._layout_tokens = int(counts.sum())
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

    def _note(self, counts: NDArray[np.int64], driven: DeviceCounts | None, steps: int) -> None:
        """Move the mirror by `steps` steps."""
        if driven is None:
            self.ledger.note_even_steps(steps * counts, counts)
        else:
            least = counts if driven.counts is None else np.zeros_like(counts)
            back = np.zeros_like(counts) if driven.back is None else self._last
            for _ in range(steps):
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
        self._guard.is_enqueueing = True
        before = self.device.bytes_to_device
        self.launches.apply(block)
        self._count(before)

    def _count(self, bytes_before: int) -> None:
        self.stats.launches += 1
        self.stats.bytes_to_device += self.device.bytes_to_device - bytes_before
