"""Batch: sequences that share one model's caches, step by step.

A step's bookkeeping is one launch (`kernels/advance.py`). The host decides only what needs a decision: which rows are in
use, and which pages of the full-attention pool they hold. It keeps a mirror of the device's numbers for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.batch.arguments import integer, prompt_length
from numba_kv.batch.audit import AuditReport, audit_batch
from numba_kv.batch.edits import EditBlock
from numba_kv.batch.even_steps import EvenSteps
from numba_kv.batch.guard import CallGuard
from numba_kv.batch.launches import StepLaunches
from numba_kv.batch.permutation import cycles_of, fill_holes
from numba_kv.batch.sequence import Sequence
from numba_kv.batch.stats import BatchStats
from numba_kv.batch.view import StepView
from numba_kv.errors import CapacityError, InputError, RewindTooFar, StateError
from numba_kv.ledger.leases import plan_leases
from numba_kv.ledger.rows import RowLedger
from numba_kv.shared_resources import SharedResources

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["Batch"]


class Batch:
    """Takes over the tables of a SharedResources and serves sequences with them. One at a time; `close` gives them back.

    Parameters
    ----------
    resources : SharedResources
        Borrowed; must stay open as long as the batch is used.

    Notes
    -----
    Every call that raises an error of this library has changed nothing. Calls must not overlap in several threads. All
    work is enqueued on ``resources.stream``.
    """

    def __init__(self, resources: SharedResources) -> None:
        if not isinstance(resources, SharedResources):
            raise InputError(f"resources: {type(resources).__name__} is not a SharedResources")
        self.resources = resources
        self.plan = resources.plan
        rows = self.plan.config.max_batch_size
        self._sequences: dict[int, Sequence] = {}
        self._stats = BatchStats()
        self._ledger = RowLedger(self.plan)
        self._layout = np.zeros(rows, np.int64)  # counts that the device's layout says now
        self._even = EvenSteps(rows)
        self._guard = CallGuard(resources.device, "Batch")
        resources.attach(self)
        try:
            self._buffers = resources.cache_managers[0].step_buffers
            self._buffers.reset()
            self._launches = StepLaunches(self._buffers)
        except BaseException:
            self._guard.is_closed = True
            resources.detach(self)
            raise

    # -- composition ---------------------------------------------------------------------------------------------

    def admit(self, tokens: Any = None, *, num_tokens: int | None = None) -> Sequence:
        """Give a new sequence a row.

        Parameters
        ----------
        tokens : sequence of int, optional
            Its prompt.
        num_tokens : int, optional
            Instead: how many tokens the prompt has.

        Raises
        ------
        InputError
            If neither or both are given, or the prompt is empty or not one-dimensional.
        CapacityError
            If no row is free, or the prompt is longer than a row.

        Stream: enqueues one copy and one kernel.
        """
        if (tokens is None) == (num_tokens is None):
            raise InputError("admit: give either tokens or num_tokens")
        return self.update(admit=[num_tokens if tokens is None else tokens])[0]

    def retire(self, sequence: Sequence) -> None:
        """End a sequence: its row becomes empty and its pages are free.

        Raises
        ------
        StateError
            If it is not active in this batch.

        Stream: enqueues one copy and one kernel.
        """
        self.update(retire=[sequence])

    def update(self, *, retire: Iterable[Sequence] = (), admit: Iterable[Any] = ()) -> list[Sequence]:
        """Retire and admit several sequences at once; rows that become free can be taken again in the same call.

        Parameters
        ----------
        retire : iterable of Sequence
            Sequences that end.
        admit : iterable of (sequence of int) or int
            Prompts, or their token counts.

        Returns
        -------
        list of Sequence
            The admitted ones, in order.

        Raises
        ------
        StateError, InputError, CapacityError
            As `retire` and `admit`; nothing was changed then.

        Stream: enqueues one copy and one kernel, whatever the number.
        """
        with self._guard:
            leaving = [self._row_of(s, "retire") for s in retire]
            if len(set(leaving)) != len(leaving):
                raise InputError("retire: a sequence is named twice")
            prompts = [prompt_length(p, self.plan.config.max_kv_cache_capacity) for p in admit]
            if len(prompts) > self._ledger.free_rows + len(leaving):
                free = self._ledger.free_rows + len(leaving)
                raise CapacityError(
                    f"rows: {len(prompts)} sequences are to be admitted, {free} of {len(self._layout)} rows are free; "
                    "retire some or plan with a larger max_batch_size",
                    needed=len(prompts),
                    free=free,
                )
            if not leaving and not prompts:
                return []
            self._change()
            ledger = self._ledger
            rows = ledger.peek_rows(len(prompts), leaving)
            block = EditBlock()
            for row in {**dict.fromkeys(leaving), **dict.fromkeys(rows)}:
                rings = [ring[row] for ring in ledger.rings[1:]] if row in rows else None
                bounds = (int(ledger.lo[row]), int(ledger.hi[row]))
                block.reset(row, int(ledger.leased[row]), bounds, rings)
            self._send(block)
            for row in leaving:
                self._stats.rotated_pages += int(ledger.mapped_begin[1:, row].sum())
                ledger.retire(row)
                self._sequences.pop(row).state = "retired"
            made = []
            for row, prompt in zip(rows, prompts, strict=True):
                ledger.admit(row, prompt)
                sequence = Sequence(self, row, int(ledger.generation[row]), prompt)
                self._sequences[row] = sequence
                made.append(sequence)
            self._stats.retired += len(leaving)
            self._stats.admitted += len(made)
            return made

    def compact(self, order: Iterable[Sequence] | None = None) -> dict[Sequence, int]:
        """Move sequences to the lowest rows; no KV byte moves.

        Parameters
        ----------
        order : iterable of Sequence, optional
            Every active sequence in the order wanted: the i-th moves to row i. Default: the highest rows move into the
            holes below them.

        Returns
        -------
        dict of Sequence to int
            The rows of those that moved.

        Raises
        ------
        InputError, StateError
            If `order` is not a permutation of the active sequences.

        Stream: enqueues one copy and one kernel if anything moves. Cost: O(table rows moved).
        """
        with self._guard:
            rows = len(self._layout)
            if order is None:
                sources = fill_holes(self._ledger.live)
            else:
                wanted = [self._row_of(s, "order") for s in order]
                if sorted(wanted) != sorted(self._sequences):
                    raise InputError(
                        f"order: {len(wanted)} sequences given, the {len(self._sequences)} active ones once each wanted"
                    )
                sources = np.array(wanted + [r for r in range(rows) if r not in set(wanted)], np.int64)
            moved = np.flatnonzero(sources != np.arange(rows))
            if not len(moved):
                return {}
            self._change()
            self._guard.is_enqueueing = True
            self._count_bytes(lambda: self._launches.permute(cycles_of(sources)))
            self._ledger.permute(sources)
            self._layout = self._layout[sources]
            self._layout[:] = -1  # the device still has the old order: send counts with the next step
            self._sequences = {
                int(to): self._sequences[int(sources[to])] for to in range(rows) if int(sources[to]) in self._sequences
            }
            for row, sequence in self._sequences.items():
                sequence.row = row
            return {self._sequences[int(row)]: int(row) for row in moved if int(row) in self._sequences}

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, tokens: int | Mapping[Sequence, int] = 1) -> StepView:
        """Append tokens: all bookkeeping of one forward pass.

        Parameters
        ----------
        tokens : int or mapping of Sequence to int
            Tokens of every sequence, or of those named; the others append nothing. Any mix of prefill and decode.

        Returns
        -------
        StepView
            What the forward pass reads. Its tensors stay at their addresses; the next step overwrites them.

        Raises
        ------
        InputError
            If a count is not a positive integer, or all counts exceed `max_batch_tokens`.
        StateError
            If a sequence is not active, or an int is given while a sequence has unprefilled tokens.
        CapacityError
            If a row would exceed its capacity, or the pool has too few pages; nothing was changed.

        Stream: enqueues one kernel; with new rows, counts or pages one copy and one kernel before it; with more than 8
        tokens in a row one more after it, with more than `max_step_tokens` and windows another. Cost: no allocation, and
        no byte sent if every sequence appends what it did the step before and pages are there.
        """
        with self._guard:
            if isinstance(tokens, Mapping):
                return self._step(self._counts(tokens))
            if self._even.repeats(tokens):
                return self._step_again()
            return self._step(self._even_counts(tokens), even=True)

    def rewind(self, tokens: Mapping[Sequence, int]) -> None:
        """Take back the last tokens of sequences, as if they had never been appended.

        Parameters
        ----------
        tokens : mapping of Sequence to int
            Tokens to take back, 1 to the sequence's length.

        Raises
        ------
        InputError, StateError
            If a count is not in that range, or a sequence is not active.
        RewindTooFar
            If a window's ring no longer holds what the shorter sequence sees. Never up to `max_step_tokens` tokens below
            the longest length, and never for a whole sequence.

        Stream: enqueues one copy and two kernels.
        """
        with self._guard:
            if not isinstance(tokens, Mapping) or not tokens:
                raise InputError("rewind: a mapping of at least one sequence to its tokens is wanted")
            self._change()
            ledger = self._ledger
            back = np.zeros(len(self._layout), np.int64)
            for sequence, count in tokens.items():
                row = self._row_of(sequence, "rewind")
                length = int(ledger.lo[row])
                number = integer(count)
                if number is None or not 1 <= number <= length:
                    raise InputError(f"rewind: {count!r} tokens of {sequence!r} is not in 1..{length} (its length)")
                problem = ledger.rewind_problem(row, length - number)
                if problem:
                    raise RewindTooFar(f"rewind: {sequence!r} cannot go back to {length - number} tokens: {problem}")
                back[row] = number
            block = EditBlock()
            block.set_take_back(back)
            self._send(block)
            self._guard.is_enqueueing = True
            self._launches.rewind()
            self._stats.launches += 1
            for row in np.flatnonzero(back):
                ledger.note_rewind(int(row), int(ledger.lo[row] - back[row]))
            self._stats.rewinds += len(tokens)

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> list[Sequence]:
        """The active sequences by row."""
        return [self._sequences[row] for row in sorted(self._sequences)]

    @property
    def free_rows(self) -> int:
        """Rows without a sequence."""
        return self._ledger.free_rows

    @property
    def free_pages(self) -> int:
        """Pages of the full-attention pool that no row holds."""
        return self._ledger.pool.free_pages

    def can_admit(self, num_tokens: int = 1) -> bool:
        """Return whether a row is free and the pool holds a prompt of `num_tokens` now."""
        full, pool = self.plan.groups[0], self._ledger.pool
        if num_tokens > self.plan.config.max_kv_cache_capacity or not self._ledger.free_rows:
            return False
        return full.is_empty or -(-num_tokens // full.page_tokens) <= pool.free_pages

    @property
    def stats(self) -> BatchStats:
        """Counters; a copy."""
        self._settle()
        copy = BatchStats(**vars(self._stats))
        copy.rotated_pages += int(self._ledger.mapped_begin[1:, self._ledger.live].sum())
        return copy

    def audit(self) -> AuditReport:
        """Prove that ledger, host mirror and device tables agree.

        Raises
        ------
        InvariantError
            Naming the first disagreement.

        Stream: waits. Cost: reads every table once.
        """
        with self._guard:
            self._settle()
            return audit_batch(self._ledger, self._buffers)

    def close(self) -> None:
        """Retire everything and give the tables back, once. A second call does nothing."""
        if self._guard.is_closed:
            return
        self._guard.is_closed = True
        for sequence in self._sequences.values():
            sequence.state = "retired"
        self._sequences.clear()
        self._launches.close()
        self._buffers.reset()
        self.resources.detach(self)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Batch({len(self._sequences)} of {len(self._layout)} rows)"

    # -- the step path -------------------------------------------------------------------------------------------

    def _step(self, counts: NDArray[np.int64], even: bool = False) -> StepView:
        self._change()
        ledger, config = self._ledger, self.plan.config
        total, longest = int(counts.sum()), int(counts.max(initial=0))
        if total > config.max_batch_tokens:
            raise InputError(f"tokens: {total} in one step, max_batch_tokens is {config.max_batch_tokens}; take several steps")
        self._check_capacity(counts)
        leases = plan_leases(ledger, counts)
        block = EditBlock()
        ids = self._lease(leases.rows, leases.targets, block) if leases is not None else None
        if not np.array_equal(counts, self._layout):
            block.set_layout(counts, np.concatenate([[0], np.cumsum(counts)]))
        if block:
            self._send(block)
        self._guard.is_enqueueing = True
        self._stats.launches += self._launches.step(total, longest, longest > config.max_step_tokens)
        if leases is not None and ids is not None:
            ledger.move_pages(leases.rows, leases.targets, ids)
        ledger.note_step(counts)
        self._layout = counts
        self._stats.steps += 1
        self._stats.tokens += total
        self._stats.page_blocks += leases is not None
        upper = int(ledger.hi.max())
        last_row = int(np.flatnonzero(ledger.live)[-1])
        view = StepView(self._buffers, last_row + 1, total, longest, upper, True, longest > config.max_step_tokens)
        if even:
            self._stats.decode_steps += 1
            self._even.start(longest, counts, total, view, self._headroom())
        return view

    def _step_again(self) -> StepView:
        """Repeat an even step: nothing is sent, nothing is decided."""
        even = self._even
        stats, device = self._stats, self.resources.device
        before = device.bytes_to_device
        self._guard.is_enqueueing = True
        stats.launches += self._launches.step(even.total, even.count, even.is_long)
        even.again()
        stats.steps += 1
        stats.decode_steps += 1
        stats.tokens += even.total
        stats.steady_bytes_to_device += device.bytes_to_device - before
        return StepView(self._buffers, even.num_rows, even.total, even.count, even.upper, True, even.is_long)

    def _settle(self) -> None:
        """Bring the host mirror up to date after repeated even steps."""
        repeats = self._even.take_repeats()
        if repeats:
            self._ledger.note_even_steps(repeats * self._even.counts, self._even.counts)

    def _change(self) -> None:
        """Begin a call that changes more than an even step does."""
        self._settle()
        self._even.end()

    def settled_length(self, row: int) -> int:
        """Return a row's length, repeated even steps included (for Sequence)."""
        self._settle()
        return int(self._ledger.hi[row])

    def _headroom(self) -> int:
        """Return the tokens that every live row can still take without a new page."""
        ledger, full = self._ledger, self.plan.groups[0]
        limit = np.full(len(ledger.hi), self.plan.config.max_kv_cache_capacity)
        if not full.is_empty:
            np.minimum(limit, ledger.leased * full.page_tokens, out=limit)
        return int((limit - ledger.hi)[ledger.live].min())

    def _check_capacity(self, counts: NDArray[np.int64]) -> None:
        capacity = self.plan.config.max_kv_cache_capacity
        over = np.flatnonzero((self._ledger.hi + counts > capacity) & (counts > 0))
        if len(over):
            row = int(over[0])
            length = int(self._ledger.hi[row])
            raise CapacityError(
                f"tokens: {int(counts[row])} more for {self._sequences[row]!r} of length {length} exceed "
                f"max_kv_cache_capacity {capacity}",
                needed=int(counts[row]),
                free=capacity - length,
            )

    def _lease(self, rows: NDArray[np.int64], targets: NDArray[np.int64], block: EditBlock) -> NDArray[np.int32]:
        """Write into `block` how pages move between the pool and rows; return the ids that rows get, row after row."""
        ledger = self._ledger
        held, wanted = ledger.leased[rows], targets[rows]
        ids = ledger.peek_pages(rows, targets)
        block.set_pages(rows, np.minimum(held, wanted), np.maximum(wanted - held, 0), ids, held)
        return ids

    def _send(self, block: EditBlock) -> None:
        self._guard.is_enqueueing = True
        self._count_bytes(lambda: self._launches.apply(block))

    def _count_bytes(self, work: Any) -> None:
        before = self.resources.device.bytes_to_device
        work()
        self._stats.launches += 1
        self._stats.bytes_to_device += self.resources.device.bytes_to_device - before

    # -- checks --------------------------------------------------------------------------------------------------

    def _row_of(self, sequence: Any, call: str) -> int:
        if not isinstance(sequence, Sequence):
            raise InputError(f"{call}: {sequence!r} is not a Sequence")
        if sequence.state != "active" or self._sequences.get(sequence.row) is not sequence:
            raise StateError(f"{call}: {sequence!r} is not active in this batch")
        return sequence.row

    def _counts(self, tokens: Mapping[Sequence, int]) -> NDArray[np.int64]:
        if not tokens:
            raise InputError("tokens: the mapping is empty; name at least one sequence")
        counts = np.zeros(len(self._layout), np.int64)
        for sequence, count in tokens.items():
            row = self._row_of(sequence, "step")
            number = integer(count)
            if number is None or number < 1:
                raise InputError(f"tokens: {count!r} for {sequence!r} is not a positive integer; leave out who appends nothing")
            counts[row] = number
        return counts

    def _even_counts(self, tokens: Any) -> NDArray[np.int64]:
        number = integer(tokens)
        if number is None or number < 1:
            raise InputError(f"tokens: {tokens!r} is neither a positive integer nor a mapping of sequences to counts")
        if not self._sequences:
            raise StateError("step: no sequence is active; admit one first")
        self._settle()
        waiting = np.flatnonzero(self._ledger.prompt > self._ledger.hi)
        if len(waiting):
            sequence = self._sequences[int(waiting[0])]
            raise StateError(
                f"step: {sequence!r} has {sequence.pending_tokens} unprefilled tokens; name sequences and counts in a mapping"
            )
        return np.where(self._ledger.live, number, 0)
