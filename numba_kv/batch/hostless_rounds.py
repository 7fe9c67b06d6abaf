"""HostlessRounds: speculative rounds that run without the host, captured or enqueued into a capture of the caller's own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.batch.arguments import at_least_one
from numba_kv.batch.captured_round import CapturedRound, RoundSteps
from numba_kv.batch.proposals import Proposals
from numba_kv.batch.round_arguments import accepted_array, node_array
from numba_kv.errors import CapacityError, InputError

if TYPE_CHECKING:
    from numba_kv.batch.round_launches import RoundLaunches
    from numba_kv.cache.mamba_cache import MambaCacheManager
    from numba_kv.device import Tensor

__all__ = ["HostlessRounds"]


class HostlessRounds(Proposals):
    """Part of SpeculativeBatch: capture a round, or enqueue its parts; make room before, note it after."""

    rounds: RoundLaunches
    _states: MambaCacheManager
    _most: int
    _enqueued_parents: Tensor | None = None  # of the verification step that was enqueued last

    @property
    def round_steps(self) -> RoundSteps:
        """What a round of the mode is made of.

        A step that catches up stands for the first one of a chain: it appends what the draft lacks, and begins new proposals.
        """
        spec, verified = self.spec, self.spec.verify_tokens
        if self.draft is None:
            return RoundSteps(verify_tokens=verified)
        steps = 1 if spec.proposes_blocks else spec.steps - 1
        return RoundSteps(
            verify_tokens=verified, draft_steps=steps, draft_tokens=self.draft_tokens, catch_up=int(self.keeps_drafts)
        )

    def capture(
        self, accepted: Any, nodes: Any = None, *, tree: Any = None, rounds: int = 1, steps: RoundSteps | None = None
    ) -> CapturedRound:
        """Capture rounds of every active sequence, to be replayed without the host: their bookkeeping and the commit.

        Parameters
        ----------
        accepted, nodes : int32 device arrays
            As in `commit`, read at each replay.
        tree : int32 device array, optional
            As in `verify_step`.
        rounds : int
            Rounds that one launch makes.
        steps : RoundSteps, optional
            What a round is made of; default `round_steps`, with as many tokens verified as `tree` has nodes.

        Raises
        ------
        InputError, InteropError, ShapeError
            If an argument is wrong.
        CapacityError
            If there are more rounds than a row has tokens.

        Stream: enqueues nothing. Cost: one graph.
        """
        with self.guard:
            rows, device = self.base.plan.config.max_batch_size, self.resources.device
            parents = None if tree is None else node_array(device, "tree", rows, self._most, tree)
            chosen = self._checked_steps(steps, parents)
            counts = accepted_array(device, rows, accepted)
            paths = None if nodes is None else node_array(device, "nodes", rows, chosen.verify_tokens, nodes)
            if parents is not None and paths is None:
                raise InputError("nodes: None given, but a tree is verified; the ids of each row's path are wanted")
            number = self._checked_rounds(rounds)
            self._pack_states(chosen.verify_tokens)
            self.rounds.prepare(counts, paths, parents)
            return CapturedRound(self, chosen, number, counts, paths, parents)

    def reserve(self, rounds: int, steps: RoundSteps | None = None) -> None:
        """Map the pages that `rounds` rounds need in both models, before they run without the host.

        Raises
        ------
        InputError, StateError, CapacityError
            As `Batch.reserve`; or if a verification step is not committed.

        Stream: as `Batch.reserve`, for each model.
        """
        with self.guard:
            number, chosen = self._checked_rounds(rounds), self._checked_steps(steps, None)
            self._check_committed("reserve")
            self._check_members()
            verified, each = chosen.verify_tokens, chosen.draft_steps
            if self.draft is None or not (each or chosen.catch_up is not None):
                self.base.reserve(number, verified)
                self._committed = None
                return
            base, draft = self.base.stepper.ledger, self.draft.stepper.ledger
            behind = base.hi + number * verified + each * chosen.draft_tokens + (chosen.catch_up or 0) - draft.hi
            most = max(1, number * each, -(-int(behind[draft.live].max(initial=0)) // chosen.draft_tokens))
            if chosen.catch_up is None:
                with self.draft.guard.host:
                    counts = self.draft._even_counts(chosen.draft_tokens)
            else:  # what the draft lacks of a prompt is appended by the rounds themselves
                counts = np.where(draft.live, chosen.draft_tokens, 0)
            self.draft.stepper.check_step(counts, most)
            self.base.reserve(number, verified)
            self._committed = None
            self.guard.is_enqueueing = True
            with self.draft.guard:
                self.draft.stepper.reserve(counts, most, False)

    def advanced(self, rounds: int, steps: RoundSteps | None = None) -> None:
        """Note that `rounds` rounds ran without the host: lengths are known within bounds until `sync_lengths`.

        Raises
        ------
        InputError, CapacityError
            If `rounds` is not a positive integer, or more than a row has tokens.
        StateError
            If more are noted than `reserve` made room for, or were launched.

        Stream: host only.
        """
        with self.guard:
            self._note_rounds(self._checked_rounds(rounds), self._checked_steps(steps, None))
            self._note_hostless()

    def enqueue_draft_step(self, stream: object, tokens: int | None = None) -> None:
        """Enqueue a step of the draft, as `Batch.enqueue_step`; a draft without a cache has none."""
        with self.guard:
            if self.draft is not None:
                self.draft.enqueue_step(stream, self.draft_tokens if tokens is None else tokens)

    def enqueue_catch_up(self, stream: object, ahead: int = 0) -> None:
        """Enqueue what `catch_up` does into a capture of the caller's own, as `Batch.enqueue_step`.

        What a forward pass in that capture reads is the view of an earlier `catch_up`: its tensors stay where they are.
        """
        with self.guard:
            number = self._checked_ahead(ahead)
            if self._catch_up is not None:
                self._catch_up.enqueue(number, self.resources.device.as_capturing_stream(stream))

    def enqueue_verify_step(self, stream: object, tokens: int | None = None, *, tree: Any = None) -> None:
        """Enqueue what `verify_step` does, as `Batch.enqueue_step`; the capture has to commit it too."""
        with self.guard:
            rows, device = self.base.plan.config.max_batch_size, self.resources.device
            parents = None if tree is None else node_array(device, "tree", rows, self._most, tree)
            if parents is not None and tokens is not None:
                raise InputError("tokens: given beside a tree, whose nodes are counted")
            default = self.spec.verify_tokens if parents is None else parents.shape[1]
            number = self._checked_verify(default if tokens is None else tokens)
            target = device.as_capturing_stream(stream)
            if parents is not None:
                self.rounds.prepare_tree(parents)
            self.base.enqueue_step(stream, number)
            self._pack_states(number)
            if parents is not None:
                self.rounds.place_nodes(parents, target)
            self._enqueued_parents = parents

    def enqueue_commit(self, stream: object, accepted: Any, nodes: Any = None) -> None:
        """Enqueue what `commit` does with arrays of the device, for the verification step that was enqueued last."""
        with self.guard:
            rows, device = self.base.plan.config.max_batch_size, self.resources.device
            counts = accepted_array(device, rows, accepted)
            paths = None if nodes is None else node_array(device, "nodes", rows, self._most, nodes)
            if self._enqueued_parents is not None and paths is None:
                raise InputError("nodes: None given, but a tree was verified; the ids of each row's path are wanted")
            target = device.as_capturing_stream(stream)
            self.rounds.commit(counts, paths, self._enqueued_parents, target)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _checked_rounds(self, rounds: Any) -> int:
        number, limit = at_least_one("rounds", rounds), self.base.plan.config.max_kv_cache_capacity
        if number > limit:
            reason = f"rounds: {number} are more than the {limit} tokens of a row (max_kv_cache_capacity)"
            raise CapacityError(reason, needed=number, free=limit)
        return number

    def _checked_verify(self, tokens: Any) -> int:
        number = at_least_one("tokens", tokens)
        if number > self._most:
            raise InputError(f"tokens: {number} of a row, at most {self._most} can be verified and taken back in a step")
        return number

    def _checked_steps(self, steps: Any, parents: Tensor | None) -> RoundSteps:
        chosen = self.round_steps if steps is None else steps
        if not isinstance(chosen, RoundSteps):
            raise InputError(f"steps: {type(steps).__name__} is not a RoundSteps")
        if parents is not None:
            if steps is not None and chosen.verify_tokens != parents.shape[1]:
                raise InputError(f"steps: {chosen.verify_tokens} tokens are verified, the tree has {parents.shape[1]} nodes")
            chosen = replace(chosen, verify_tokens=parents.shape[1])
        self._checked_verify(chosen.verify_tokens)
        if chosen.catch_up is not None:
            self._checked_ahead(chosen.catch_up)
        if self.draft is None:
            return RoundSteps(verify_tokens=chosen.verify_tokens)
        self._check_round(chosen)
        return chosen

    def _check_round(self, steps: RoundSteps) -> None:
        """Raise if the draft of a round cannot be taken back."""
        most = 0 if self.draft is None else self.draft.plan.config.max_step_tokens
        drafted = steps.draft_steps * steps.draft_tokens + (steps.catch_up or 0)
        if drafted > most:
            raise InputError(f"steps: {drafted} tokens drafted, 0 to {most} can be taken back (the draft's max_step_tokens)")

    def _pack_states(self, tokens: int) -> None:
        if self._states.has_commits:
            self._states.reshape_intermediate_states(self.base.plan.config.max_batch_size, tokens)

    def _note_rounds(self, rounds: int, steps: RoundSteps) -> None:
        base, each = self.base.stepper, rounds * steps.draft_steps
        if self.draft is not None and each:
            self.draft.stepper.reservation.check_take(each, steps.draft_tokens)
        lowest = base.ledger.lo.copy()
        base.advanced(steps.verify_tokens, rounds, None)
        base.note_bounds(lowest)
        if self.draft is None:
            return
        draft = self.draft.stepper
        lowest = np.minimum(lowest, draft.ledger.lo)
        if each:
            draft.advanced(steps.draft_tokens, each, None)
        ahead = steps.draft_steps * steps.draft_tokens + (steps.catch_up or 0)
        draft.note_bounds(lowest, np.where(draft.ledger.live, base.ledger.hi + ahead, 0))

    def _note_hostless(self) -> None:
        """Forget what the host knew of the round before: others ran since."""
        self._drafted, self._committed = 0, None
