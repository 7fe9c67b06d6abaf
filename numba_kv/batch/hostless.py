"""HostlessSteps: the calls of a Batch for steps that run without the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba_kv.batch.arguments import at_least_one, integer
from numba_kv.batch.capture import CapturedStep
from numba_kv.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.batch.guard import CallGuard
    from numba_kv.batch.launches import DeviceCounts
    from numba_kv.batch.stepper import Stepper
    from numba_kv.plan import MemoryPlan
    from numba_kv.shared_resources import SharedResources

__all__ = ["HostlessSteps"]


class HostlessSteps:
    """Part of Batch: capture a step, or enqueue it into a capture of the caller's; make room before, note it after."""

    resources: SharedResources
    plan: MemoryPlan
    guard: CallGuard
    stepper: Stepper

    def capture(
        self, tokens: int = 1, *, steps: int = 1, counts: Any = None, take_back: Any = None, accepted: Any = None
    ) -> CapturedStep:
        """Capture a step that appends `tokens` to every active sequence, to be replayed without the host.

        The captured step reads rows, lengths and pages from the device when it runs: it stays right when sequences join,
        leave or move, for any batch of the same resources. Retired rows write nothing.

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
            return CapturedStep(self, number, at_least_one("steps", steps), driven)

    def enqueue_step(
        self, stream: object, tokens: int = 1, *, counts: Any = None, take_back: Any = None, accepted: Any = None
    ) -> None:
        """Enqueue the kernels of a step into a capture of the caller's own, or on the resources' stream.

        Allocates, compiles, synchronises and sends nothing, and touches no other stream. The host notes nothing: call
        `reserve` before and `advanced` after the steps have run.

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
            self.guard.is_enqueueing = True
            self.stepper.enqueue(number, driven, target)

    def reserve(self, steps: int, tokens: int = 1) -> None:
        """Map the pages that `steps` steps of `tokens` tokens need, before they run without the host.

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
        with self.guard:
            number = self._captured_tokens(tokens)
            self.stepper.reserve(self._even_counts(number), at_least_one("steps", steps))

    def advanced(self, steps: int, tokens: int = 1, *, counts: Any = None, take_back: Any = None, accepted: Any = None) -> None:
        """Note that `steps` steps of `tokens` tokens ran without the host, with the same arguments as they were enqueued.

        Raises
        ------
        StateError
            If more steps are noted than `reserve` made room for.

        Stream: host only.
        """
        with self.guard:
            number = self._captured_tokens(tokens)
            driven = self._driven(counts, take_back, accepted)
            self.stepper.advanced(number, at_least_one("steps", steps), driven)

    def _captured_tokens(self, tokens: Any) -> int:
        number, limit = integer(tokens), self.plan.config.max_step_tokens
        if number is None or not 1 <= number <= limit:
            raise InputError(f"tokens: {tokens!r} is not in 1..{limit} (max_step_tokens); longer steps cannot be captured")
        return number

    def _driven(self, counts: Any, take_back: Any, accepted: Any) -> DeviceCounts | None:
        raise InputError("HostlessSteps is a part of Batch")

    def _even_counts(self, tokens: Any) -> NDArray[np.int64]:
        raise InputError("HostlessSteps is a part of Batch")
