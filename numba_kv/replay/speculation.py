"""Replaying a trace with a draft: rounds of proposals of which a random number is accepted.

Prompts go into both models first; then every sequence decodes in rounds. Knows the public face of `SpeculativeBatch`. Does not
know files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.config import DeploymentConfig, LLMEngineConfig, SpecDecodeConfig
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import CapacityError, InputError, InvariantError
from numba_kv.replay.request import Request
from numba_kv.replay.schedule import SchedulerOptions, StepOutcome
from numba_kv.replay.scheduler import Running, Scheduler

if TYPE_CHECKING:
    from numba_kv.batch import Sequence, SpeculativeBatch

__all__ = ["ReplaySpeculation", "SpeculativeScheduler", "chain_or_tree"]

#: Rounds between two looks at the device's lengths: what the host knows of them gets wider with each round.
_SYNC_ROUNDS = 16


@dataclass(frozen=True, kw_only=True)
class ReplaySpeculation:
    """How a replay proposes and accepts.

    Attributes
    ----------
    acceptance : float
        Probability that a proposal is accepted if those before it were; 0 to 1.
    seed : int
        Of the random numbers.
    """

    acceptance: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise InputError(f"--acceptance: {self.acceptance} is not a probability; 0 to 1 is wanted")


def chain_or_tree(base: LLMEngineConfig, draft: LLMEngineConfig, steps: int, branches: int) -> DeploymentConfig:
    """Return a deployment whose draft makes `steps` steps a round: of a chain or, with branches, of a tree.

    Raises
    ------
    ConfigError
        If the two do not fit each other.
    """
    if branches == 1:
        spec = SpecDecodeConfig(mode="mtp", steps=steps, has_reference_limits=False)
    else:
        nodes = 1 + steps * branches
        spec = SpecDecodeConfig(mode="mtp", steps=steps, top_k=branches, verify_tokens=nodes, has_reference_limits=False)
    return DeploymentConfig(base=base, draft=draft, spec=spec)


class SpeculativeScheduler(Scheduler["Sequence"]):
    """Decodes in rounds. A step with prompts has nothing else; a round is of every sequence.

    Attributes
    ----------
    rounds : int
        Rounds that were made.
    accepted, verified_rows : int
        Tokens that they kept, and sequences that took part, counted in each.
    """

    def __init__(
        self,
        batch: SpeculativeBatch,
        requests: Iterable[Request],
        options: SchedulerOptions,
        speculation: ReplaySpeculation,
    ) -> None:
        super().__init__(batch, requests, options)
        self._pair = batch
        self._speculation = speculation
        self._random = np.random.default_rng(speculation.seed)
        self._left: dict[Sequence, int] = {}  # tokens that a decoding sequence still generates
        spec, device, rows = batch.spec, batch.resources.device, batch.base.plan.config.max_batch_size
        self._depth = spec.max_accepted_tokens
        self._branches = spec.top_k
        take = batch.resources.take_once

        def words(name: str, *shape: int) -> Tensor:
            return Tensor(take(f"replay.{name}", 4 * math.prod(shape)), device, dtype("int32"), shape)

        self._accepted = words("accepted", rows)
        self._tree = batch.tree(_parents(spec.steps, spec.top_k)) if spec.is_tree else None
        self._nodes = words("nodes", rows, self._depth) if spec.is_tree else None
        self.rounds = self.accepted = self.verified_rows = 0

    def step(self) -> StepOutcome:
        """Append prompts, or make a round. Raises as `Scheduler.step`."""
        left, joined = self._change_composition()
        preempted, todo = 0, self._calls()
        while self._running:
            counts, grants = self._compose()
            start = time.perf_counter_ns()
            try:
                if grants:
                    self._pair.step(counts)
                while todo and not grants:
                    todo[0]()
                    del todo[0]
            except CapacityError as error:
                if not self._pair.is_exact:
                    self._pair.sync_lengths()  # lengths are shorter than the host feared
                    continue
                self._give_way(error)
                preempted += 1
                continue
            prefill, decode = sum(n for _, n in grants), 0 if grants else self._commit()
            host_ns = time.perf_counter_ns() - start
            self.tokens_held += prefill + decode
            self._step += 1
            self._grant(grants)
            return StepOutcome(prefill, decode, joined, left, preempted, host_ns)
        return StepOutcome(0, 0, joined, left, preempted, 0)

    def check_lengths(self) -> None:
        """Compare the lengths of all sequences with what the scheduler has given them.

        Raises
        ------
        InvariantError
            If one differs.
        """
        for running in self._running:
            generated = running.job.output - self._left[running.handle] if running.decode_from >= 0 else 0
            expected = running.job.prompt - running.prompt_left + generated
            if running.handle.length != expected:
                raise InvariantError(f"{running.handle!r}: {running.handle.length} tokens, {expected} were kept")

    def to_json(self) -> dict[str, Any]:
        """Return what happened in rounds, as plain objects."""
        spec, draft = self._pair.spec, self._pair.draft
        return {
            "mode": spec.mode,
            "steps": spec.steps,
            "branches": spec.top_k,
            "verify_tokens": spec.verify_tokens,
            "acceptance": self._speculation.acceptance,
            "rounds": self.rounds,
            "accepted_tokens": self.accepted,
            "verified_rows": self.verified_rows,
            "draft_steps": 0 if draft is None else draft.stats.steps,
            "draft_rotations": 0 if draft is None else draft.stats.rotated_pages,
        }

    # -- a round -------------------------------------------------------------------------------------------------------

    def _calls(self) -> list[Callable[[], object]]:
        """Return the calls of a round up to its commit; one that was made is not made again when a sequence gives way."""
        pair, steps = self._pair, self._pair.round_steps
        calls: list[Callable[[], object]] = []
        if steps.catch_up is not None:
            ahead = steps.catch_up
            calls.append(lambda: pair.catch_up(ahead))
        calls += [pair.draft_step] * steps.draft_steps
        calls.append(lambda: pair.verify_step(tree=self._tree))
        return calls

    def _commit(self) -> int:
        """Commit random numbers of tokens, on random paths; return how many."""
        rows = self._accepted.shape[0]
        counts, paths = np.zeros(rows, np.int32), np.full((rows, self._depth), -1, np.int32)
        total = 0
        for sequence, left in list(self._left.items()):
            kept = min(1 + self._lucky(), left)
            counts[sequence.row] = kept
            level = np.arange(1, kept)
            paths[sequence.row, 0] = 0
            paths[sequence.row, 1:kept] = 1 + (level - 1) * self._branches
            if kept > 1:  # the last node may be any branch of its level
                paths[sequence.row, kept - 1] += self._random.integers(self._branches)
            self._left[sequence] = left - kept
            total += kept
        self._accepted.fill_from(counts)
        if self._nodes is not None:
            self._nodes.fill_from(paths)
        self._pair.commit(self._accepted, self._nodes)
        self.rounds += 1
        self.accepted += total
        self.verified_rows += len(self._left)
        if self.rounds % _SYNC_ROUNDS == 0:
            self._pair.sync_lengths()
        for running in self._running:
            if self._left[running.handle] == 0:
                self._end_at(self._step + 1, running)
        return total

    def _lucky(self) -> int:
        """Return how many proposals in a row are accepted."""
        missed = np.flatnonzero(self._random.random(self._depth - 1) >= self._speculation.acceptance)
        return int(missed[0]) if len(missed) else self._depth - 1

    # -- parts of the scheduler ----------------------------------------------------------------------------------------

    def _beside(self) -> dict[Sequence, int]:
        return {}

    def _start_decoding(self, sequence: Running[Sequence]) -> None:
        self._decoding[sequence.handle] = 1
        self._left[sequence.handle] = sequence.job.output
        if not sequence.job.output:
            self._end_at(self._step, sequence)

    def _forget(self, sequence: Running[Sequence]) -> None:
        super()._forget(sequence)
        self._left.pop(sequence.handle, None)

    def _generated(self, sequence: Running[Sequence]) -> int:
        return sequence.job.output - self._left[sequence.handle]


def _parents(steps: int, branches: int) -> list[int]:
    """Return a tree of which the first node of each level has `branches` children."""
    return [-1, *(0 if level == 0 else 1 + (level - 1) * branches for level in range(steps) for _ in range(branches))]
