"""Proposals: what a draft appends in a round before the base verifies it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.batch.arguments import at_least_one, integer
from numba_kv.batch.catch_up import CatchUp
from numba_kv.batch.pair import PairedBatches
from numba_kv.batch.view import StepView
from numba_kv.errors import CapacityError, InputError, StateError

if TYPE_CHECKING:
    from numba_kv.config import SpecDecodeConfig

__all__ = ["Proposals"]


class Proposals(PairedBatches):
    """Part of SpeculativeBatch: steps of the draft."""

    spec: SpecDecodeConfig
    keeps_drafts: bool
    _catch_up: CatchUp | None = None
    _draft_view: StepView | None = None
    _drafted = 0  # tokens of the draft's rows beyond those of the base

    @property
    def draft_view(self) -> StepView:
        """What the draft's forward pass reads: its last step; for a draft without a cache, the base's rows as they are.

        Raises
        ------
        StateError
            If nothing was appended yet.
        """
        if self.draft is None:
            return self._base_rows()
        if self._draft_view is None:
            raise StateError("draft_view: the draft has made no step yet")
        return self._draft_view

    def draft_step(self, tokens: int | None = None) -> StepView:
        """Append proposals, or places for them, to every row of the draft.

        Parameters
        ----------
        tokens : int, optional
            Of each row: one of a chain, the branches of a tree's level, a block. Default: what the mode says.

        Returns
        -------
        StepView
            `draft_view`. A draft without a cache appends nothing, and nothing is enqueued.

        Raises
        ------
        InputError, StateError, CapacityError
            As `Batch.step`.
        CapacityError
            If proposals run further ahead of the last commit than the plan can take back (`max_step_tokens` of the draft).

        Stream and cost: as `Batch.step`.
        """
        with self.guard:
            if self.draft is None:
                return self._base_rows()
            number = self.draft_tokens if tokens is None else at_least_one("tokens", tokens)
            self._check_drafted(number)
            self._check_members()
            self._draft_view = self.draft.step(number)
            self._drafted += number
            return self._draft_view

    def catch_up(self, ahead: int = 0) -> StepView:
        """Append to each row of the draft what the base has and it has not, as the device finds.

        Parameters
        ----------
        ahead : int
            1: and one token more, the last one that the base has chosen, which begins the next round; only where the draft
            keeps its proposals.

        Returns
        -------
        StepView
            `draft_view`: a step with places for `catch_up_tokens` of every row, in use or not. Those of tokens that a row does
            not lack have slot -1. `KVIO` and `PagedAttention` take it; for what it is not good, see `CatchUpView`.

        Raises
        ------
        InputError
            If `ahead` is something else.
        StateError
            If no sequence is active, or a verification step is not committed.
        CapacityError
            If the pool has too few pages, or a row lacks more than `catch_up_tokens`. If only the device knows that, it refuses
            the row.

        Stream: enqueues two kernels; with new pages one copy and one kernel before them. Cost: no allocation.
        """
        with self.guard:
            self._check_committed("catch_up")
            number = self._checked_ahead(ahead)
            if self.draft is None or self._catch_up is None:
                return self._base_rows()
            self._check_members()
            if not self.base.sequences:
                raise StateError("catch_up: no sequence is active; admit one first")
            base, draft = self.base.stepper.ledger, self.draft.stepper.ledger
            lacking = np.where(draft.live, np.maximum(base.hi + number - draft.lo, 0), 0)
            room = self.draft.plan.config.max_kv_cache_capacity - draft.hi
            most = np.minimum(lacking, np.minimum(room, self._catch_up.width))
            is_exact = base.is_exact and draft.is_exact
            if is_exact and (lacking > most).any():
                row = int((lacking - most).argmax())
                reason = f"the draft lacks {lacking[row]} tokens of row {row}, {most[row]} can be appended"
                raise CapacityError(f"catch_up: {reason}; see catch_up_tokens", needed=int(lacking[row]), free=int(most[row]))
            enqueue = self._catch_up.enqueue
            with self.draft.guard:
                self.draft.stepper.step_beside(most, is_exact, lambda stream: enqueue(number, stream))
            self._drafted = max(self._drafted, number)
            self._draft_view = self._catch_up.view()
            return self._draft_view

    @property
    def catch_up_tokens(self) -> int:
        """Places of a row in a step that catches up; 0 without a cache of the draft."""
        return 0 if self._catch_up is None else self._catch_up.width

    @property
    def draft_tokens(self) -> int:
        """Tokens of a row in a step of the draft: one of a chain, a level of a tree, or a block; 0 without a cache."""
        spec = self.spec
        if self.draft is None:
            return 0
        if spec.proposes_blocks:
            return spec.draft_tokens
        return 1 if spec.drafts_fan_out else spec.top_k

    # -- parts ---------------------------------------------------------------------------------------------------

    def _noted_draft_step(self, view: StepView) -> None:
        self._draft_view = view

    def _base_rows(self) -> StepView:
        """Return the base's rows as they are now, with no token of a step."""
        ledger = self.base.stepper.ledger
        if not ledger.live.any():
            raise StateError("draft_view: no sequence is active; admit one first")
        self.base.stepper.settle()
        rows, exact = int(np.flatnonzero(ledger.live)[-1]) + 1, ledger.is_exact
        return StepView(self.base.stepper.buffers, rows, 0, 0, int(ledger.hi.max()), exact, False)

    def _checked_ahead(self, ahead: Any) -> int:
        allowed = (0, 1) if self.keeps_drafts else (0,)
        number = integer(ahead)
        if number is None or number not in allowed:
            raise InputError(f"ahead: {ahead!r} is not {' or '.join(map(str, allowed))}")
        return number

    def _check_drafted(self, tokens: int) -> None:
        if self.draft is None:
            return
        most = self.draft.plan.config.max_step_tokens
        if self._drafted + tokens > most:
            raise CapacityError(
                f"draft_step: {tokens} tokens behind {self._drafted} since the last commit, but {most} can be taken back "
                "(max_step_tokens of the draft's plan); verify and commit first, or plan with more steps",
                needed=tokens,
                free=most - self._drafted,
            )

    def _checked_width(self, tokens: Any) -> int:
        """Return the places of a row in a step that catches up."""
        most = 0 if self.draft is None else self.draft.plan.config.max_step_tokens
        if tokens is None:
            return 2 if self.keeps_drafts else self.spec.max_accepted_tokens
        number = at_least_one("catch_up_tokens", tokens)
        if number > most:
            raise InputError(f"catch_up_tokens: {number} is above {most}, the most of a step of the draft (max_step_tokens)")
        return number
