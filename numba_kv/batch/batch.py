"""Batch: sequences that share one model's caches, step by step.

A step's bookkeeping is one launch (`kernels/advance.py`). The host decides only what needs a decision: which rows are in
use, and which pages of the full-attention pool they hold. It keeps a mirror of the device's numbers for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.batch.arguments import device_counts, integer, listed, positive
from numba_kv.batch.audit import AuditReport, audit_batch
from numba_kv.batch.derived import DerivedForms
from numba_kv.batch.launches import DeviceCounts
from numba_kv.batch.permutation import fill_holes
from numba_kv.batch.reuse_rewind import unshare
from numba_kv.batch.reusing import ReusingSequences
from numba_kv.batch.row_adapters import RowAdapters
from numba_kv.batch.sequence import Sequence
from numba_kv.batch.state_rows import StateRows, check_state_rewind
from numba_kv.batch.stats import BatchStats
from numba_kv.batch.stepper import Stepper
from numba_kv.batch.view import StepView
from numba_kv.device.guard import CallGuard
from numba_kv.errors import CapacityError, InputError, RewindTooFar, StateError
from numba_kv.kernels.layout import Status
from numba_kv.shared_resources import SharedResources

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from numpy.typing import NDArray

    from numba_kv.context.options import ReuseOptions

__all__ = ["Batch"]


class Batch(ReusingSequences):
    """Takes over the tables of a model and serves sequences with them. One at a time; `close` gives them back.

    Parameters
    ----------
    resources : SharedResources
        Borrowed; must stay open as long as the batch is used.
    index : int
        Model whose tables are taken: 0 is the base, 1 a draft with a cache of its own. Each has lengths of its own. Rows of
        both agree as long as both get the same admissions, retirements and moves.
    scrub : {"never", "on_nonfinite", "always", "poison"}
        What becomes of pages when they are free, before anybody else gets them: nothing; elements that are not finite become
        zero; all become zero; all become NaN, a test mode that finds readers of what is not theirs. One kernel for each slab
        and row; `close` alone scrubs nothing (`clear` does). The null page is never written.
    reuse : ReuseOptions, optional
        Keep what sequences have computed for later ones that begin alike; see `admit`. None: nothing is kept. K and V of a step
        must be enqueued on ``resources.stream`` before the next call that steps, admits or retires.

    Attributes
    ----------
    reuse : BatchReuse or None
        What is kept, and its figures.
    derived : DerivedForms
        Other shapes of a step's tables, on request.

    Raises
    ------
    InputError, StateError
        If `resources` is no SharedResources, is closed, has no such model, or has a batch of it.
    ConfigError
        If the model or `scrub` does not go together with `reuse`.
    CapacityError
        If the host has not enough memory.

    Notes
    -----
    Every call that raises an error of this library has changed nothing. Calls must not overlap in several threads. All
    work is enqueued on ``resources.stream``.
    """

    def __init__(
        self, resources: SharedResources, *, index: int = 0, scrub: str = "never", reuse: ReuseOptions | None = None
    ) -> None:
        if not isinstance(resources, SharedResources):
            raise InputError(f"resources: {type(resources).__name__} is not a SharedResources")
        self.resources = resources
        self.plan = resources.get_plan(index)
        caches = resources.cache_managers[index]
        self._sequences: dict[int, Sequence] = {}
        self._rows = self.plan.config.max_batch_size
        self.guard = CallGuard(resources.device, "Batch")
        self._has_given_back = False
        with resources.device.active():
            try:
                resources.attach(self, index)
                self._buffers = caches.step_buffers
                self._buffers.reset()
                self.stepper = Stepper(self._buffers, self.guard)
                if self.plan.config.num_recurrent_layers:
                    self.stepper.launches.states = StateRows(caches.mamba_cache, self._buffers)
                self._adapters = RowAdapters(None if index else resources.lora_manager, self._rows)
                self._open_moves(caches.kv_cache, scrub)
                self.derived = DerivedForms(self._buffers, self.guard, resources.taker(index), self.stepper)
                self._open_reuse(reuse, index, scrub)
            except BaseException as error:
                self.guard.is_closed = True
                resources.detach(self)
                if isinstance(error, MemoryError):
                    reason = f"host memory: the lists of pages of {self._rows} rows do not fit ({error}); plan with fewer rows"
                    raise CapacityError(reason, needed=self._rows, free=0) from error
                raise

    # -- composition ---------------------------------------------------------------------------------------------

    def retire(self, sequence: Sequence) -> None:
        """End a sequence: its row becomes empty and its pages are free.

        Raises
        ------
        StateError
            If it is not active in this batch.

        Stream: enqueues one copy and one kernel.
        """
        self.update(retire=[sequence])

    def clear(self) -> None:
        """Retire every sequence. Addresses stay, so captured steps stay right. Stream: as `retire`."""
        self.update(retire=self.sequences)

    def update(
        self, *, retire: Iterable[Sequence] = (), admit: Iterable[Any] = (), adapters: Iterable[str | None] | None = None
    ) -> list[Sequence]:
        """Retire and admit several sequences at once; rows that become free can be taken again in the same call.

        Parameters
        ----------
        retire : iterable of Sequence
            Sequences that end.
        admit : iterable of (sequence of int), Prompt or int
            Prompts, or their token counts. With `reuse`, prompts of tokens begin with what is kept of them; see `admit`.
        adapters : iterable of (str or None), optional
            LoRA adapter of each admitted sequence: the bytes that the name has now, loaded as long as the sequence lives. While
            a sequence has one, `LoRAManager.adapter_ids` follow the rows, and `LoRAManager.assign` and `switch` are refused.

        Returns
        -------
        list of Sequence
            The admitted ones, in order.

        Raises
        ------
        StateError, InputError, CapacityError
            As `retire` and `admit`.

        Stream: enqueues one copy and one kernel, whatever the number; one more copy if adapters of rows change. What is reused
        is brought to all rows together; see `admit`.
        """
        retired, admitted = listed("retire", retire), listed("admit", admit)
        if self.reuse is not None and admitted:
            self._publish_due()
        with self.guard:
            change = self._check_change(retired, admitted, adapters)
            try:
                self._leave(change)
                self._lease_change(change)
                return self._make_change(change)
            except BaseException:
                self._drop_change(change)
                raise

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
        given = None if order is None else listed("order", order)
        with self.guard:
            self.stepper.begin()
            if given is None:
                sources = fill_holes(self.stepper.ledger.live)
            else:
                wanted = [self._row_of(s, "order") for s in given]
                if sorted(wanted) != sorted(self._sequences):
                    raise InputError(
                        f"order: {len(wanted)} sequences given, the {len(self._sequences)} active ones once each wanted"
                    )
                rest = [row for row in range(self._rows) if row not in self._sequences]
                sources = np.array(wanted + rest, np.int64)
            moved = np.flatnonzero(sources != np.arange(self._rows))
            if not len(moved):
                return {}
            self.stepper.permute(sources)
            before = self._sequences
            self._sequences = {to: before[source] for to, source in enumerate(sources.tolist()) if source in before}
            for row, sequence in self._sequences.items():
                sequence.move(row)
            self._adapters.follow(self._sequences)
            return {self._sequences[row]: row for row in moved.tolist() if row in self._sequences}

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(
        self, tokens: int | Mapping[Sequence, int] = 1, *, counts: Any = None, take_back: Any = None, accepted: Any = None
    ) -> StepView:
        """Append tokens: all bookkeeping of one forward pass.

        Parameters
        ----------
        tokens : int or mapping of Sequence to int
            Tokens of every sequence, or of those named; the others append nothing. Any mix of prefill and decode.
        counts : int32 device array [B], optional
            Tokens that each row really appends, at most what `tokens` says; the places of the others get slot -1. Decided
            on the device, for example by a sampler.
        take_back, accepted : int32 device array [B], optional
            Tokens of each row's last step that are taken back first, or (the other way round) that stay. Not both.

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

        InteropError, ShapeError
            If a device array is not int32 [B] in the memory of the target.

        Notes
        -----
        With device arrays the host knows lengths only within bounds; pages are leased for the longest case. What needs an
        exact length is refused until `sync_lengths`. A row that cannot take its step is left as it is, its slots are -1
        and its status word is set.

        Stream: enqueues one kernel; with new rows, counts or pages one copy and one kernel before it; with more than 8
        tokens in a row one more after it, with more than `max_step_tokens` and windows another. Cost: no allocation, and
        no byte sent if every sequence appends what it did the step before and pages are there.
        """
        if self.reuse is not None:
            self._publish_due()
        with self.guard:
            driven = self._driven(counts, take_back, accepted)
            if isinstance(tokens, Mapping):
                return self.stepper.step(self._counts(tokens), driven=driven)
            if driven is None and self.stepper.repeats(tokens):
                return self.stepper.step_again()
            return self.stepper.step(self._even_counts(tokens), even=True, driven=driven)

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
            If a window's ring no longer holds what the shorter sequence sees: never up to `max_step_tokens` tokens below the
            longest length, and of what a sequence reuses there is no more than the next token sees. Or if the last tokens that
            stay, and more, lie in pages which other sequences read too (`fork`); with `reuse` such a page is copied instead.
            Or if the model has recurrent layers and more tokens are taken back than a verification step runs, whose states
            the caller commits (`MambaCacheManager.scatter_accepted_linear_states`). Never for a whole sequence.

        CapacityError
            If there are no pages for such copies.

        Stream: enqueues one copy and two kernels.
        """
        with self.guard:
            if not isinstance(tokens, Mapping) or not tokens:
                raise InputError("rewind: a mapping of at least one sequence to its tokens is wanted")
            self.stepper.begin()
            ledger = self.stepper.ledger
            back = np.zeros(self._rows, np.int64)
            for sequence, count in tokens.items():
                row = self._row_of(sequence, "rewind")
                length = self._exact_length(row, "rewind")
                number = integer(count)
                if number is None or not 1 <= number <= length:
                    allowed = f"in 1..{length} (its length)" if length else "possible: it has none"
                    raise InputError(f"rewind: {count!r} tokens of {sequence!r} is not {allowed}")
                if number < length:
                    check_state_rewind(self.plan.config, "rewind", number)
                problem = ledger.rewind_problem(row, length - number, self.reuse is not None)
                if problem:
                    raise RewindTooFar(f"rewind: {sequence!r} cannot go back to {length - number} tokens: {problem}")
                back[row] = number
            if self.reuse is not None:
                targets = {row: int(ledger.lo[row] - back[row]) for row in np.flatnonzero(back).tolist()}
                unshare(self.stepper, self._placement, targets)
            self.stepper.rewind(back)
            if self.reuse is not None:
                self.reuse.contexts.shortened({sequence: sequence.length for sequence in tokens})
            emptied = [row for row in np.flatnonzero(back).tolist() if not ledger.hi[row]]
            if emptied and self.stepper.launches.states is not None:
                self.stepper.launches.states.clear(emptied)

    def sync_lengths(self) -> None:
        """Read the lengths from the device, so that the host knows them exactly again.

        Stream: waits, if device counts were used since the last call; else host only.
        """
        with self.guard.reads:
            self.stepper.learn()

    def refusals(self) -> dict[Sequence, Status]:
        """Return the sequences whose last step the device refused, and why; their status words are cleared.

        Only steps with device counts, and steps that nobody reserved, can be refused there.

        Stream: waits.
        """
        with self.guard:
            words = self._buffers.status.to_host()
            if not words.any():
                return {}
            self.guard.is_enqueueing = True
            self.resources.device.fill(self._buffers.status, 0, self.resources.stream)
            found = np.flatnonzero(words)
            self.stepper.ledger.doubt(found)
            return {self._sequences[int(row)]: Status(int(words[row])) for row in found if int(row) in self._sequences}

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> list[Sequence]:
        """The active sequences by row."""
        return [self._sequences[row] for row in sorted(self._sequences)]

    @property
    def stats(self) -> BatchStats:
        """Counters; a copy. Keeps nobody out, so that any thread may look."""
        return self.stepper.counters()

    def audit(self) -> AuditReport:
        """Prove that ledger, host mirror and device tables agree.

        Raises
        ------
        InvariantError
            Naming the first disagreement.
        StateError
            If the device refused a step and `refusals` was not called since.

        Stream: waits. Cost: reads every table once. Lengths that came from the device are read first.
        """
        with self.guard.reads:
            self.stepper.learn()
            self._adapters.audit(self._sequences)
            if self.stepper.launches.states is not None:
                self.stepper.launches.states.audit(self.stepper.ledger.live)
            return audit_batch(self.stepper.ledger, self._buffers, None if self.reuse is None else self.reuse.cache)

    def close(self) -> None:
        """Retire everything and give the tables back, once. A second call does nothing, or ends what an interrupt left."""
        if self._has_given_back:
            return
        self.guard.close()
        for sequence in self._sequences.values():
            sequence.end()
        if not self.resources.is_closed:
            self._adapters.end(self._sequences.values())
        self._sequences.clear()
        if not self.resources.is_closed:  # which has given back what is below
            with self.resources.device.active():
                try:
                    self._close_moves()
                    self.stepper.close()
                    self._buffers.reset()
                finally:
                    self.resources.detach(self)
        self._has_given_back = True

    def __enter__(self) -> Batch:
        self.guard.check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Batch({len(self._sequences)} of {self._rows} rows)"

    def length_of(self, row: int) -> int:
        """Return the exact length of a row (for Sequence). Keeps nobody out, so that any thread may look.

        Raises
        ------
        StateError
            If the host only knows bounds.
        """
        return self._exact_length(row, "length")

    # -- checks --------------------------------------------------------------------------------------------------

    def _row_of(self, sequence: Any, call: str) -> int:
        if not isinstance(sequence, Sequence):
            raise InputError(f"{call}: {sequence!r} is not a Sequence, as admit and update return them")
        if sequence.state != "active" or self._sequences.get(sequence.row) is not sequence:
            raise StateError(f"{call}: {sequence!r} is not active in this batch")
        return sequence.row

    def _exact_length(self, row: int, call: str) -> int:
        low, high = self.stepper.bounds(row)
        if low != high:
            raise StateError(
                f"{call}: {self._sequences[row]!r} is {low} to {high} tokens long, as the device decided; "
                "call sync_lengths() first"
            )
        return high

    def _counts(self, tokens: Mapping[Sequence, int]) -> NDArray[np.int64]:
        if not tokens:
            raise InputError("tokens: the mapping is empty; name at least one sequence")
        counts = np.zeros(self._rows, np.int64)
        for sequence, count in tokens.items():
            row = self._row_of(sequence, "step")
            counts[row] = positive(count, self.plan.config.max_batch_tokens, f"for {sequence!r}")
        return counts

    def _even_counts(self, tokens: Any) -> NDArray[np.int64]:
        number = positive(tokens, self.plan.config.max_batch_tokens, "for every sequence")
        if not self._sequences:
            raise StateError("step: no sequence is active; admit one first")
        row, unprefilled = self.stepper.waiting_row()
        if unprefilled:
            raise StateError(
                f"step: {self._sequences[row]!r} has {unprefilled} unprefilled tokens; name sequences and counts in a mapping"
            )
        return np.where(self.stepper.ledger.live, number, 0)

    def _driven(self, counts: Any, take_back: Any, accepted: Any) -> DeviceCounts | None:
        driven = device_counts(self.resources.device, self._rows, counts, take_back, accepted)
        if driven is not None and driven.back is not None:
            check_state_rewind(self.plan.config, "take_back")
        return driven
