"""HostlessSteps: the calls of a Batch for steps that run without the host."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from numba_kv.batch.arguments import at_least_one, integer
from numba_kv.batch.capture import CapturedStep
from numba_kv.batch.room import BatchRoom
from numba_kv.device.graph import is_capturing
from numba_kv.errors import CapacityError, InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.batch.launches import DeviceCounts
    from numba_kv.shared_resources import SharedResources

__all__ = ["HostlessSteps"]


class HostlessSteps(BatchRoom):
    """Part of Batch: capture a step, or enqueue it into a capture of the caller's; make room before, note it after."""

    resources: SharedResources

    def capture(
        self, tokens: int = 1, *, steps: int = 1, counts: Any = None, take_back: Any = None, accepted: Any = None
    ) -> CapturedStep:
        """Capture a step that appends `tokens` to every active sequence, to be replayed without the host.

        The captured step reads rows, lengths and pages from the device when it runs: it stays right when sequences join,
        leave or move in this batch. Retired rows write nothing.

        Parameters
        ----------
        tokens : int
            Tokens of a row, at most `max_step_tokens`.
        steps : int
            Steps that one launch of the graph makes.
        counts, take_back, accepted : int32 device array [B], optional
            As in `step`, read at each replay.

        Raises
        ------
        InputError, InteropError, ShapeError
            If an argument is wrong.

        Stream: enqueues nothing. Cost: one graph.
        """
        with self.guard:
            number = self._captured_tokens(tokens)
            driven = self._driven(counts, take_back, accepted)
            return CapturedStep(self, number, self._step_count(steps), driven)

    def enqueue_step(
        self, stream: object, tokens: int = 1, *, counts: Any = None, take_back: Any = None, accepted: Any = None
    ) -> None:
        """Enqueue the kernels of a step into a capture of the caller's own, or on the resources' stream.

        Allocates, compiles, synchronises and sends nothing, and touches no other stream. The host notes nothing: call
        `reserve` before and `advanced` after the steps have run. A graph of the caller's own must run on the resources'
        stream, or in order with it, and keep batch and arrays alive.

        Parameters
        ----------
        stream : stream
            A capturing stream (torch, cuda.core GraphBuilder, handle), or `resources.stream`.
        tokens, counts, take_back, accepted
            As in `capture`.

        Raises
        ------
        StateError
            If `stream` is another stream that is not capturing: work there has no order with the batch's own.
        """
        with self.guard:
            number = self._captured_tokens(tokens)
            driven = self._driven(counts, take_back, accepted)
            target = self.resources.device.as_capturing_stream(stream)
            if is_capturing(target):
                self.guard.is_enqueueing = True
                self.stepper.enqueue(number, driven, target)
            else:
                self.stepper.enqueue_counted(number, driven)

    def reserve(self, steps: int, tokens: int = 1, *, partial: bool = False) -> int:
        """Map the pages that `steps` steps of `tokens` tokens need, before they run without the host.

        A later call that changes rows or pages ends the reservation.

        Parameters
        ----------
        steps, tokens : int
            Steps, and tokens of every row in each.
        partial : bool
            Whether rows and pool may hold less: a row that cannot take a step then stops by itself, is left as it is and
            has its status set (`Batch.refusals`), and the others go on.

        Returns
        -------
        int
            Steps that every row can take.

        Raises
        ------
        InputError
            If an argument is not a positive integer.
        StateError
            If no sequence is active, or one has unprefilled tokens.
        CapacityError
            If a row or the pool does not hold that many; nothing was changed.

        Stream: enqueues one copy and one kernel for each `max_batch_tokens` tokens.
        """
        self._publish_due()
        with self.guard:
            number = self._captured_tokens(tokens)
            return self.stepper.reserve(self._even_counts(number), self._step_count(steps), partial)

    def advanced(self, steps: int, tokens: int = 1, *, counts: Any = None, take_back: Any = None, accepted: Any = None) -> None:
        """Note that `steps` steps ran without the host.

        Launches of a `CapturedStep`, and steps enqueued on the resources' stream, are noted in their order and say themselves
        what they were. Steps of a graph of the caller's own were of `tokens` tokens, with the same arrays as they were
        enqueued.

        Raises
        ------
        StateError
            If more steps are noted than were launched, or than `reserve` made room for.

        Stream: host only.
        """
        with self.guard:
            number = self._captured_tokens(tokens)
            driven = self._driven(counts, take_back, accepted)
            self.stepper.advanced(number, self._step_count(steps), driven)

    def _captured_tokens(self, tokens: Any) -> int:
        number, limit = integer(tokens), self.plan.config.max_step_tokens
        if number is None or not 1 <= number <= limit:
            raise InputError(f"tokens: {tokens!r} is not in 1..{limit} (max_step_tokens); longer steps cannot be captured")
        return number

    def _step_count(self, steps: Any) -> int:
        number, limit = at_least_one("steps", steps), self.plan.config.max_kv_cache_capacity
        if number > limit:
            raise CapacityError(
                f"steps: {number} are more than the {limit} tokens of a row (max_kv_cache_capacity)", needed=number, free=limit
            )
        return number

    @abstractmethod
    def _publish_due(self) -> None:
        """Publish what earlier steps have appended, as a call of its own."""

    @abstractmethod
    def _driven(self, counts: Any, take_back: Any, accepted: Any) -> DeviceCounts | None:
        """Return the counts of a step that lie on the device, checked."""

    @abstractmethod
    def _even_counts(self, tokens: Any) -> NDArray[np.int64]:
        """Return `tokens` for every active row, checked."""
