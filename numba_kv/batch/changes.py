"""RowChanges: sequences that leave and join a Batch, in two halves: all that can be refused, and what is done.

Between the halves a change can be dropped, so that several batches can agree on one (`reuse_together`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba_kv.batch.arguments import integer, prompt_length
from numba_kv.batch.prompt import Prompt
from numba_kv.batch.sequence import Sequence, end_sequences, rows_of, start_sequences
from numba_kv.batch.sequence_moves import SequenceMoves
from numba_kv.errors import InputError

if TYPE_CHECKING:
    from numba_kv.batch.reuse_admission import Admission
    from numba_kv.ledger.reuse.lease import Lease
    from numba_kv.weights.lora_slots import LoRAAdapter

__all__ = ["Change", "RowChanges"]


@dataclass(slots=True, eq=False)
class Change:
    """A change of composition that nothing stands in the way of.

    Attributes
    ----------
    retired, leaving : list of Sequence, list of int
        Who leaves, and which rows.
    prompts : list of int
        Tokens of those that join.
    held : list of LoRAAdapter or None
        Their adapters, kept loaded; None: the caller named none.
    admissions, leases : list
        Of a batch with reuse: what they are, and what they begin with; None for those of which nobody knows.
    """

    retired: list[Sequence]
    leaving: list[int]
    prompts: list[int]
    held: list[LoRAAdapter | None] | None
    admissions: Items[Admission | None] = ()
    leases: Items[Lease | None] = ()


class RowChanges(SequenceMoves):
    """Part of Batch: what `update` does."""

    def _check_change(
        self, retired: list[Any], admitted: list[Any], adapters: Any, owners: Items[LoRAAdapter | None] | None = None
    ) -> Change:
        """Return a change of composition, checked; adapters are held, all else is as it was.

        `owners` are adapters of sequences whose own model takes none, as that of a draft; their K and V depend on them.
        """
        leaving = rows_of(retired, self._sequences)
        if leaving is None:
            for sequence in retired:
                self._row_of(sequence, "retire")
            raise InputError("retire: a sequence is named twice")
        capacity, reuse = self.plan.config.max_kv_cache_capacity, self.reuse
        read: list[Any] = []
        if reuse is None:
            prompts = [p if type(p) is int and 0 < p <= capacity else self._plain_length(p) for p in admitted]
        else:
            self._check_ready()
            read = [None if integer(p) is not None else reuse.read(p) for p in admitted]
            known = [p if item is None else item[1].num_tokens for p, item in zip(admitted, read, strict=True)]
            prompts = [prompt_length(p, capacity) for p in known]
        self._check_rows(len(prompts), len(leaving))
        held = None if adapters is None else self._adapters.hold(adapters, len(prompts))
        change = Change(retired, leaving, prompts, held)
        if reuse is not None:
            change.admissions = reuse.admissions(read, owners or held or [None] * len(prompts))
        return change

    def _check_ready(self) -> None:
        """Check that rows can change now; a change of one batch alone finds out in time as it is made."""
        self.stepper.check_can_change()
        self.stepper.begin()

    def _leave(self, change: Change) -> None:
        """With reuse, let those that leave leave what they have."""
        if self.reuse is not None:
            self.reuse.publishing.publish_last(change.retired)

    def _lease_change(self, change: Change, most: Items[int | None] | None = None) -> None:
        """With reuse, hold what those that join begin with: at most `most` tokens of each."""
        reuse, admissions = self.reuse, change.admissions
        if reuse is None or not admissions:
            return
        if most is not None:
            admissions = [a if a is None else a.capped(cap) for a, cap in zip(admissions, most, strict=True)]
        change.leases = reuse.admission.lease(change.leaving, admissions)

    def _drop_leases(self, change: Change) -> None:
        """Give back what those that join would have begun with."""
        for lease in change.leases:
            if lease is not None and lease.is_open:
                lease.release()
        change.leases = ()

    def _drop_change(self, change: Change) -> None:
        """Give back all that a change still holds: what has become a sequence's stays with it."""
        self._drop_leases(change)
        held, change.held = change.held, None
        self._adapters.release(held or ())

    def _make_change(self, change: Change) -> list[Sequence]:
        """Do what a change says; return the sequences that joined. Whoever called drops it if this, or a part before, fails."""
        if not change.leaving and not change.prompts:
            return []
        first, active, reuse = self.stepper.ledger.admitted + 1, self._sequences, self.reuse
        rows = self.stepper.update(change.leaving, change.prompts)
        if reuse is not None:
            reuse.admission.fill(rows, change.leases)
        end_sequences(active, change.retired, change.leaving)
        made = start_sequences(self, active, rows, change.prompts, first)  # type: ignore[arg-type]
        if reuse is not None:
            reuse.contexts.end(change.retired)
            for sequence, admission, lease in zip(made, change.admissions, change.leases, strict=True):
                if admission is not None and lease is not None:
                    sequence.reused_tokens = lease.plan.reused_tokens
                    reuse.contexts.start(sequence, reuse.context(admission, lease))
        if change.held is not None:
            self._adapters.start(made, change.held)
            change.held = None
        if self._adapters.in_use:
            self._adapters.end(change.retired)
            self._adapters.follow(active)
        return made

    def _plain_length(self, prompt: Any) -> int:
        """Return the tokens of a prompt of which nothing is reused, checked."""
        if isinstance(prompt, Prompt):
            prompt.check_plain()
            prompt = prompt.tokens
        return prompt_length(prompt, self.plan.config.max_kv_cache_capacity)
