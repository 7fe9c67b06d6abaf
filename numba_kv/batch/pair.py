"""PairedBatches: a batch of a base model and one of its draft whose rows hold the same sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.batch.arguments import integer, listed, one_prompt
from numba_kv.batch.audit import AuditReport
from numba_kv.batch.batch import Batch
from numba_kv.batch.sequence import Sequence
from numba_kv.batch.view import StepView
from numba_kv.device.guard import CallGuard
from numba_kv.device.unique import Unique
from numba_kv.errors import InputError, InvariantError, RewindTooFar, StateError
from numba_kv.kernels.layout import Status
from numba_kv.shared_resources import SharedResources

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from numba_kv.batch.round_launches import RoundLaunches

__all__ = ["PairedBatches"]

#: What a call of one part alone is told to call.
_CALLS = (
    "call that one's admit, retire, clear, update, compact, step, rewind, draft_step, catch_up, verify_step, commit, refusals, "
    "reserve, advanced, capture or enqueue_... instead"
)


class _BaseBatch(Batch):
    """The batch of the base; when it closes, what the pair made for it closes too."""

    rounds: RoundLaunches | None = None

    def _close_moves(self) -> None:
        super()._close_moves()
        if self.rounds is not None:
            self.rounds.close()


class PairedBatches(Unique, ABC):
    """Part of SpeculativeBatch: what base and draft do alike.

    A draft without a cache of its own reads the base's: then there is only the base's batch, and `draft` is None.
    """

    #: Tokens of each row in the last verification step, if that is committed and still what the base did last.
    _committed: NDArray[np.int64] | None = None

    def __init__(self, resources: SharedResources, *, scrub: str = "never") -> None:
        if not isinstance(resources, SharedResources):
            raise InputError(f"resources: {type(resources).__name__} is not a SharedResources")
        if resources.deployment.spec is None:
            raise InputError("resources: made without a draft; Batch serves one model, create_for_spec_decode makes two")
        self.resources = resources
        self.base = _BaseBatch(resources, scrub=scrub)
        self.draft: Batch | None = None
        if not resources.deployment.shares_target_kv:
            with self._or_close():
                self.draft = Batch(resources, index=1, scrub=scrub)
        self.guard = CallGuard(resources.device, type(self).__name__)
        for batch in self._members:
            batch.guard.drive(self.guard, _CALLS)

    # -- composition ---------------------------------------------------------------------------------------------

    def admit(self, tokens: Any = None, *, num_tokens: int | None = None, adapter: str | None = None) -> Sequence:
        """Give a new sequence a row of both models. Parameters and errors as `Batch.admit`, without reuse."""
        prompt = one_prompt(tokens, num_tokens)
        return self.update(admit=[prompt], adapters=None if adapter is None else [adapter])[0]

    def retire(self, sequence: Sequence) -> None:
        """End a sequence in both models; as `Batch.retire`."""
        self.update(retire=[sequence])

    def clear(self) -> None:
        """Retire every sequence. Addresses stay."""
        self.update(retire=self.sequences)

    def update(
        self, *, retire: Iterable[Sequence] = (), admit: Iterable[Any] = (), adapters: Iterable[str | None] | None = None
    ) -> list[Sequence]:
        """Retire and admit several sequences at once, in both models; as `Batch.update`.

        Raises
        ------
        StateError
            If sequences are admitted while a verification step is not committed.

        Stream: enqueues one copy and one kernel a model.
        """
        leaving, prompts = listed("retire", retire), listed("admit", admit)
        with self.guard:
            if prompts:
                self._check_committed("update")
            self._check_members()
            made = self.base.update(retire=leaving, admit=prompts, adapters=adapters)
            if prompts:
                self._committed = None
            if self.draft is not None:
                self.guard.is_enqueueing = True
                gone = self._partners([sequence.row for sequence in leaving])
                self.draft.update(retire=gone, admit=[sequence.prompt_tokens for sequence in made])
            return made

    def compact(self, order: Iterable[Sequence] | None = None) -> dict[Sequence, int]:
        """Move sequences to the lowest rows, in both models; as `Batch.compact`.

        Raises
        ------
        StateError
            If a verification step is not committed: what it left for the commit lies by rows.
        """
        with self.guard:
            self._check_committed("compact")
            self._check_members()
            given = None if order is None else listed("order", order)
            rows = {sequence: sequence.row for sequence in self.base.sequences}
            moved = self.base.compact(given)
            self._committed = None
            if self.draft is not None and moved:
                self.guard.is_enqueueing = True
                self.draft.compact(None if given is None else self._partners([rows[sequence] for sequence in given]))
            return moved

    # -- tokens that both append or lose -------------------------------------------------------------------------

    def step(self, tokens: int | Mapping[Sequence, int] = 1) -> StepView:
        """Append tokens in both models, as those of a prompt; as `Batch.step`.

        Returns
        -------
        StepView
            What the base's forward pass reads; `draft_view` is what the draft's does.

        Raises
        ------
        StateError
            If a verification step is not committed, or an int is given while either model lacks tokens of a prompt.
        CapacityError
            If a row of either model would be too long, or a pool has too few pages; nothing was changed.
        """
        with self.guard:
            self._check_committed("step")
            self._check_members()
            if self.draft is None:
                view = self.base.step(tokens)
                self._committed = None
                return view
            counts, is_even = self._step_counts(tokens), not isinstance(tokens, Mapping)
            if is_even:
                self._check_draft_prompts()
            self.draft.stepper.check_step(counts)
            view = self.base.step(tokens)
            self._committed = None
            self.guard.is_enqueueing = True
            drafts = {s: int(counts[s.row]) for s in self.draft.sequences if counts[s.row]}
            self._noted_draft_step(self.draft.step(tokens if is_even else drafts))
            return view

    def rewind(self, tokens: Mapping[Sequence, int]) -> None:
        """Take back the last tokens of sequences in both models; as `Batch.rewind`.

        A draft that is behind its base loses what it has beyond the base's new length. What it has proposed and nobody has
        verified goes too.

        Raises
        ------
        StateError
            If a verification step is not committed: `commit` takes its tokens back.
        """
        with self.guard:
            self._check_committed("rewind")
            self._check_members()
            back: dict[Sequence, int] = {}
            if self.draft is not None and isinstance(tokens, Mapping):
                for sequence, count in tokens.items():
                    row, number = self.base._row_of(sequence, "rewind"), integer(count)
                    target = self.base._exact_length(row, "rewind") - (number or 0)
                    own = self.draft._exact_length(row, "rewind")
                    problem = self.draft.stepper.ledger.rewind_problem(row, target) if 0 <= target < own else None
                    if problem:
                        raise RewindTooFar(f"rewind: {sequence!r} cannot go back to {target} tokens in the draft: {problem}")
                    if 0 <= target < own:
                        back[self._partners([row])[0]] = own - target
            self.base.rewind(tokens)
            self._committed = None
            if self.draft is not None and back:
                self.guard.is_enqueueing = True
                self.draft.rewind(back)

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> list[Sequence]:
        """The active sequences by row."""
        return self.base.sequences

    @property
    def free_rows(self) -> int:
        """Rows without a sequence."""
        return self.base.free_rows

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds, of the full-attention pool that has fewer of them; 0 without one."""
        return min((batch.free_pages for batch in self._members if not batch.plan.groups[0].is_empty), default=0)

    @property
    def is_exact(self) -> bool:
        """Whether the host knows the lengths of all rows exactly; if not, `sync_lengths` asks the device."""
        return all(batch.stepper.ledger.is_exact for batch in self._members)

    def draft_length(self, sequence: Sequence) -> int:
        """Return the tokens of a sequence in the draft, which may differ from `Sequence.length` within a round.

        Raises
        ------
        InputError, StateError
            If it is not active, or the host does not know the length exactly (`sync_lengths`).
        """
        with self.guard.host:
            batch = self.base if self.draft is None else self.draft
            return batch._exact_length(self.base._row_of(sequence, "draft_length"), "draft_length")

    def sync_lengths(self) -> None:
        """Read the lengths of both models from the device; as `Batch.sync_lengths`. Stream: waits if anything is to be read."""
        with self.guard:
            for batch in self._members:
                batch.sync_lengths()

    def refusals(self) -> dict[Sequence, Status]:
        """Return the sequences of which the device refused a step or a commit, and why; their status words are cleared.

        A row whose commit was refused has all tokens of its verification step. It may be committed again if this is asked right
        after that round: once rows have changed, moved or been verified anew, or `reserve` made room for rounds without the
        host, the refusal is told and nothing waits for a commit.

        Stream: waits.
        """
        with self.guard:
            found = self.base.refusals()
            refused = [s.row for s, status in found.items() if status in (Status.BAD_COUNT, Status.BAD_PATH)]
            if self.draft is not None:
                own = {sequence.row: sequence for sequence in self.base.sequences}
                found = {own[s.row]: status for s, status in self.draft.refusals().items()} | found
            if refused:
                self._commit_again(refused)
            return found

    def audit(self) -> tuple[AuditReport, ...]:
        """Prove of both models what `Batch.audit` does, and that their rows hold the same sequences.

        Returns
        -------
        tuple of AuditReport
            Of the base, and of the draft if it has a cache of its own.

        Raises
        ------
        InvariantError, StateError
            As `Batch.audit`.
        """
        with self.guard:
            reports = tuple(batch.audit() for batch in self._members)
            if self.draft is not None:
                base, draft = self.base.stepper.ledger, self.draft.stepper.ledger
                for name in ("live", "generation", "prompt"):
                    if not np.array_equal(getattr(base, name), getattr(draft, name)):
                        raise InvariantError(f"{name}: rows of base and draft differ")
            return reports

    def close(self) -> None:
        """Retire everything and give the tables back, once; as `Batch.close`."""
        self.guard.close()
        try:
            if self.draft is not None:
                self.draft.close()
        finally:
            self.base.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def _members(self) -> tuple[Batch, ...]:
        return (self.base,) if self.draft is None else (self.base, self.draft)

    @contextmanager
    def _or_close(self) -> Iterator[None]:
        """Close what there is if the rest cannot be made."""
        try:
            yield
        except BaseException:
            for batch in reversed(self._members):
                batch.close()
            raise

    def _check_members(self) -> None:
        """Raise if a call of either model would be refused whatever it is, so that not one alone is changed."""
        for batch in self._members:
            with batch.guard.host:
                batch.stepper.check_can_change()
                batch.stepper.begin()

    def _check_draft_prompts(self) -> None:
        """Raise StateError if the draft lacks tokens of a prompt, so that steps of all its rows would be refused."""
        row, lacking = (0, 0) if self.draft is None else self.draft.stepper.waiting_row()
        if lacking:
            raise StateError(
                f"step: {self.base._sequences[row]!r} has {lacking} unprefilled tokens in the draft; "
                "catch_up() first, or name sequences and counts in a mapping"
            )

    def _partners(self, rows: Iterable[int]) -> list[Sequence]:
        """Return the draft's sequences in these rows."""
        return [] if self.draft is None else [self.draft._sequences[row] for row in rows]

    def _step_counts(self, tokens: Any) -> NDArray[np.int64]:
        with self.base.guard.host:
            return self.base._counts(tokens) if isinstance(tokens, Mapping) else self.base._even_counts(tokens)

    @abstractmethod
    def _check_committed(self, call: str) -> None:
        """Raise StateError if a verification step waits for its commit."""

    @abstractmethod
    def _commit_again(self, rows: list[int]) -> None:
        """Allow another commit of the last verification step of these rows: their first was refused."""

    @abstractmethod
    def _noted_draft_step(self, view: StepView) -> None:
        """Note what the draft's forward pass reads now."""
