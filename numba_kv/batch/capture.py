"""CapturedStep: a step that replays without the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.batch.arguments import at_least_one
from numba_kv.batch.reservation import Launched
from numba_kv.device.unique import Unique
from numba_kv.errors import StateError

if TYPE_CHECKING:
    from numba_kv.batch.hostless import HostlessSteps
    from numba_kv.batch.launches import DeviceCounts
    from numba_kv.device import Stream

__all__ = ["CapturedStep"]


class CapturedStep(Unique):
    """A captured step of a batch. Made by `Batch.capture`; keeps what it captured alive.

    Call ``reserve(k)`` before and ``advanced(k)`` after k steps; until they are noted, the batch's lengths on the host
    are those from before.

    Attributes
    ----------
    tokens, steps : int
        Tokens that each active row appends in a step, and steps of one launch.
    """

    def __init__(self, batch: HostlessSteps, tokens: int, steps: int, driven: DeviceCounts | None) -> None:
        self.tokens = tokens
        self.steps = steps
        self._batch = batch
        self._stepper = batch.stepper
        self._guard = batch.guard
        self._driven = driven

        def work(stream: Stream) -> None:
            for _ in range(steps):
                self._stepper.enqueue(tokens, driven, stream)

        self._graph = batch.resources.device.capture(work)

    @property
    def launched(self) -> int:
        """Steps of it that were launched and not noted."""
        return self._stepper.reservation.launched_by(self)

    def reserve(self, steps: int, *, partial: bool = False) -> int:
        """Make room for `steps` steps; see `Batch.reserve`."""
        return self._batch.reserve(steps, self.tokens, partial=partial)

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
            if stream is not None and not device.is_own_stream(stream):
                raise StateError(f"stream: {stream!r} is not the resources' stream; hand_over() moves them to it")
            if self._graph.is_closed:
                raise StateError("launch: the captured step is closed; capture another")
            self._stepper.replay(self._graph, Launched(self.steps, self.tokens, self._driven, self))

    def advanced(self, steps: int | None = None) -> None:
        """Note steps (default: all that are not noted yet), and what was launched before them. Host only.

        Raises
        ------
        InputError, StateError
            If `steps` is not a positive integer, or more than were launched.
        """
        number = self.launched if steps is None else at_least_one("steps", steps)
        if number:
            self._batch.advanced(self._stepper.reservation.steps_until(self, number))

    def close(self) -> None:
        """Give the graph back."""
        self._graph.close()
