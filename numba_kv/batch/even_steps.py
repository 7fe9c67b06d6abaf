"""EvenSteps: a run of equal decode steps, in which the host has nothing to decide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.view import StepView

__all__ = ["EvenSteps"]


class EvenSteps:
    """A run of steps that append the same number of tokens to every live row, so that nothing has to be looked at again."""

    def __init__(self, rows: int) -> None:
        self.counts = np.zeros(rows, np.int64)
        self.count = self.total = self.num_rows = self.upper = 0
        self.is_long = self.is_exact = False
        self._headroom = 0
        self._repeats = 0

    def repeats(self, tokens: Any) -> bool:
        """Return whether a step of `tokens` continues the run."""
        return type(tokens) is int and tokens == self.count and 0 < tokens <= self._headroom

    def start(self, count: int, counts: NDArray[np.int64], total: int, view: StepView, headroom: int) -> None:
        """Begin a run after its first step."""
        self.count, self.counts, self.total = count, counts, total
        self.num_rows, self.upper, self.is_long = view.num_rows, view.kv_len_upper, view.is_long
        self.is_exact = view.kv_len_is_exact
        self._headroom, self._repeats = headroom, 0

    def again(self) -> None:
        """Note one more step of the run."""
        self._headroom -= self.count
        self.upper += self.count
        self._repeats += 1

    @property
    def repeats_since(self) -> int:
        """Steps that nobody has noted yet."""
        return self._repeats

    def take_repeats(self) -> int:
        """Return the steps that nobody has noted yet; from now on they count as noted."""
        repeats, self._repeats = self._repeats, 0
        return repeats

    def end(self) -> None:
        """End the run: the next step is looked at."""
        self._headroom = 0
