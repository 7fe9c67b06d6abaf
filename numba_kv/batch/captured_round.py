"""CapturedRound: speculative rounds that replay without the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.batch.arguments import integer
from numba_kv.batch.reservation import Launched
from numba_kv.device.unique import Unique
from numba_kv.errors import InputError, StateError
from numba_kv.geometry import INT32_MAX

if TYPE_CHECKING:
    from numba_kv.batch.batch import Batch
    from numba_kv.batch.hostless_rounds import HostlessRounds
    from numba_kv.device import Stream, Tensor

__all__ = ["CapturedRound", "RoundSteps"]


@dataclass(frozen=True, kw_only=True)
class RoundSteps:
    """What a round that runs without the host is made of.

    Attributes
    ----------
    verify_tokens : int
        Tokens of every row in the verification step; at least 1.
    draft_steps, draft_tokens : int
        Steps of the draft, and tokens of every row in each; at least 0 and 1.
    catch_up : int or None
        A step that catches up comes before them, 0 or 1 token ahead; None: it does not.

    Raises
    ------
    InputError
        If one is no integer, or out of range.
    """

    verify_tokens: int
    draft_steps: int = 0
    draft_tokens: int = 1
    catch_up: int | None = None

    def __post_init__(self) -> None:
        allowed = {"verify_tokens": (1, INT32_MAX), "draft_steps": (0, INT32_MAX), "draft_tokens": (1, INT32_MAX)}
        if self.catch_up is not None:
            allowed["catch_up"] = (0, 1)
        for name, (least, most) in allowed.items():
            value = getattr(self, name)
            number = integer(value)
            if number is None or not least <= number <= most:
                raise InputError(f"{name}: {value!r} is not an integer in {least}..{most}")
            object.__setattr__(self, name, number)  # of any kind of integer, the plain one


class CapturedRound(Unique):
    """Captured rounds of a SpeculativeBatch. Made by `SpeculativeBatch.capture`; keeps what it captured alive.

    Call ``reserve(n)`` before and ``advanced()`` after n rounds; until they are noted, other calls are refused.

    Attributes
    ----------
    steps : RoundSteps
        What a round is made of.
    rounds : int
        Rounds of one launch.
    """

    def __init__(
        self,
        batch: HostlessRounds,
        steps: RoundSteps,
        rounds: int,
        accepted: Tensor,
        nodes: Tensor | None,
        parents: Tensor | None,
    ) -> None:
        self.steps, self.rounds = steps, rounds
        self._batch = batch
        self._held = (accepted, nodes, parents)
        self._launched = 0
        base, draft = batch.base.stepper, None if batch.draft is None else batch.draft.stepper

        def work(stream: Stream) -> None:
            for _ in range(rounds):
                if draft is not None:
                    if batch._catch_up is not None and steps.catch_up is not None:
                        batch._catch_up.enqueue(steps.catch_up, stream)
                    for _ in range(steps.draft_steps):
                        draft.enqueue(steps.draft_tokens, None, stream)
                base.enqueue(steps.verify_tokens, None, stream)
                batch._pack_states(steps.verify_tokens)
                if parents is not None:
                    batch.rounds.place_nodes(parents, stream)
                batch.rounds.commit(accepted, nodes, parents, stream)

        self._graph = batch.resources.device.capture(work)

    def reserve(self, rounds: int) -> None:
        """Make room for `rounds` rounds; see `SpeculativeBatch.reserve`."""
        self._batch.reserve(rounds, self.steps)

    def launch(self) -> None:
        """Replay the rounds.

        Raises
        ------
        StateError
            If not enough reserved rounds are left, or it is closed.

        Stream: enqueues one graph launch. Sends nothing, allocates nothing.
        """
        batch, steps, rounds = self._batch, self.steps, self.rounds
        with batch.guard:
            if self._graph.is_closed:
                raise StateError("launch: the captured round is closed; capture another")
            batch._check_committed("launch")
            parts: list[tuple[Batch, int, int]] = [(batch.base, steps.verify_tokens, rounds)]
            if batch.draft is not None and steps.draft_steps:
                parts.append((batch.draft, steps.draft_tokens, rounds * steps.draft_steps))
            for member, tokens, number in parts:
                member.stepper.reservation.check_launch(tokens, number)
                with member.guard.host:
                    member.stepper.check_can_change()
            batch.guard.is_enqueueing = True
            self._graph.launch(batch.resources.stream)
            batch._note_hostless()
            for member, tokens, number in parts:
                member.stepper.reservation.launch(Launched(number, tokens, None, self))
            self._launched += rounds

    def advanced(self) -> None:
        """Note the rounds that were launched and not noted. Host only."""
        if self._launched:
            self._batch.advanced(self._launched, self.steps)
            self._launched = 0

    def close(self) -> None:
        """Give the graph back."""
        self._graph.close()
