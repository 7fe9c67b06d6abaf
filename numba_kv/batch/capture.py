"""CapturedStep: a step that replays without the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.batch.arguments import at_least_one
from numba_kv.errors import StateError

if TYPE_CHECKING:
    from numba_kv.batch.hostless import HostlessSteps
    from numba_kv.batch.launches import DeviceCounts
    from numba_kv.device import Stream

__all__ = ["CapturedStep"]


class CapturedStep:
    """A captured step of a batch. Made by `Batch.capture`; keeps what it captured alive.

    Call ``reserve(k)`` before and ``advanced(k)`` after k steps; until they are noted, the batch's lengths on the host
    are those from before.

    Attributes
    ----------
    tokens, steps : int
        Tokens that each active row appends in a step, and steps of one launch.
    launched : int
        Steps launched that `advanced` has not noted yet.
    """

    def __init__(self, batch: HostlessSteps, tokens: int, steps: int, driven: DeviceCounts | None) -> None:
        self.tokens = tokens
        self.steps = steps
        self.launched = 0
        self._batch = batch
        self._stepper = batch.stepper
        self._guard = batch.guard
        self._driven = driven

        def work(stream: Stream) -> None:
            for _ in range(steps):
                self._stepper.enqueue(tokens, driven, stream)

        self._graph = batch.resources.device.capture(work)

    def reserve(self, steps: int) -> None:
        """Make room for `steps` steps; see `Batch.reserve`."""
        self._batch.reserve(steps, self.tokens)

    def launch(self, stream: object | None = None) -> None:
        """Replay the step.

        Parameters
        ----------
        stream : stream, optional
            Must be the resources' stream, which is the default.

        Raises
        ------
        StateError
            If not enough reserved steps are left, `stream` is another stream, or the step is closed.

        Stream: enqueues one graph launch. Sends nothing, allocates nothing.
        """
        with self._guard:
            device = self._batch.resources.device
            if stream is not None and device.as_stream(stream).handle != device.stream.handle:
                raise StateError(f"stream: {stream!r} is not the resources' stream; hand_over() moves them to it")
            if self._graph.is_closed:
                raise StateError("launch: the captured step is closed; capture another")
            stepper = self._stepper
            if stepper.launched + self.steps > stepper.reserved:
                reserved = stepper.reserved
                raise StateError(f"launch: {reserved} steps were reserved and {stepper.launched} launched; reserve more")
            self._guard.is_enqueueing = True
            self._graph.launch(device.stream)
            self.launched += self.steps
            stepper.launched += self.steps

    def advanced(self, steps: int | None = None) -> None:
        """Note steps (default: all that are not noted yet); see `Batch.advanced`. Host only."""
        with self._guard:
            number = self.launched if steps is None else at_least_one("steps", steps)
            if number > self.launched:
                raise StateError(f"steps: {number} are noted, {self.launched} were launched")
            if number:
                self._stepper.advanced(self.tokens, number, self._driven)
                self.launched -= number

    def close(self) -> None:
        """Give the graph back."""
        self._graph.close()
