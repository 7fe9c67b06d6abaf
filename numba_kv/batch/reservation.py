"""Reservation: steps that may run without the host, and those that have been launched and not noted."""

from __future__ import annotations

from dataclasses import dataclass

from numba_kv.batch.launches import DeviceCounts
from numba_kv.errors import StateError

__all__ = ["Launched", "Reservation"]


@dataclass(frozen=True, slots=True)
class Launched:
    """Steps of one launch: how many, tokens of a row in each, the counts they read, and who launched them."""

    steps: int
    tokens: int
    driven: DeviceCounts | None
    owner: object


class Reservation:
    """What `Batch.reserve` made room for. The only place that counts hostless steps.

    Attributes
    ----------
    tokens, steps : int
        Tokens of a row in a step; steps that may still be noted.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.steps = 0
        self._launched: list[Launched] = []

    @property
    def launched_steps(self) -> int:
        """Steps that were launched and not noted."""
        return sum(launch.steps for launch in self._launched)

    def launched_by(self, owner: object) -> int:
        """Return the steps of `owner` that were launched and not noted."""
        return sum(launch.steps for launch in self._launched if launch.owner is owner)

    def steps_until(self, owner: object, steps: int) -> int:
        """Return the steps to note, in their order, until `steps` of `owner` are among them.

        Raises
        ------
        StateError
            If `owner` launched fewer.
        """
        total, left = 0, steps
        for launch in self._launched:
            if launch.owner is owner:
                part = min(left, launch.steps)
                total, left = total + part, left - part
                if not left:
                    return total
            else:
                total += launch.steps
        raise StateError(f"steps: {steps} are noted, {self.launched_by(owner)} were launched")

    def check_settled(self) -> None:
        """Raise StateError if steps were launched and not noted: the host would decide on old lengths."""
        if self._launched:
            raise StateError(f"{self.launched_steps} steps were launched and not noted; call advanced() first")

    def open(self, tokens: int, steps: int) -> None:
        """Make room for `steps` steps of `tokens` tokens a row; what was left of the last reservation is gone."""
        self.tokens, self.steps = tokens, steps

    def drop(self) -> None:
        """Forget what is left: pages or rows change."""
        self.tokens = self.steps = 0

    def check_launch(self, tokens: int, steps: int) -> None:
        """Raise StateError if a launch of `steps` steps of `tokens` tokens is not covered."""
        left = self.steps - self.launched_steps
        if steps > left:
            raise StateError(f"launch: {steps} steps, but {max(0, left)} reserved ones are left; reserve more")
        if tokens != self.tokens:
            raise StateError(f"launch: steps of {tokens} tokens a row, but steps of {self.tokens} were reserved")

    def launch(self, launched: Launched) -> None:
        """Count a launch."""
        self._launched.append(launched)

    def check_take(self, steps: int, tokens: int) -> None:
        """Raise StateError if `steps` steps of `tokens` tokens are more than were launched, or not what was reserved."""
        if self._launched:
            if steps > self.launched_steps:
                raise StateError(f"steps: {steps} are noted, {self.launched_steps} were launched")
            return
        if steps > self.steps:
            raise StateError(f"steps: {steps} are noted, {self.steps} were reserved")
        if tokens != self.tokens:
            raise StateError(f"tokens: steps of {tokens} a row are noted, steps of {self.tokens} were reserved")

    def take(self, steps: int, tokens: int, driven: DeviceCounts | None) -> list[Launched]:
        """Take `steps` steps off and return what they were, in order.

        Launches that were counted say themselves what they were; steps that the caller ran in a graph of its own are what
        the caller says.

        Raises
        ------
        StateError
            See `check_take`.
        """
        self.check_take(steps, tokens)
        if self._launched:
            taken, left = [], steps
            while left:
                head = self._launched.pop(0)
                part = min(left, head.steps)
                taken.append(Launched(part, head.tokens, head.driven, head.owner))
                if head.steps > part:
                    self._launched.insert(0, Launched(head.steps - part, head.tokens, head.driven, head.owner))
                left -= part
        else:
            taken = [Launched(steps, tokens, driven, None)]
        self.steps -= steps
        return taken
