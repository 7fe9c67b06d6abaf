"""What a scheduler drives, what limits it, and what it tells of a step.

Knows no policy: that is `numba_kv.replay.scheduler`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from numba_kv.errors import InputError

__all__ = ["BatchLike", "SchedulerOptions", "StepOutcome"]

S = TypeVar("S")


class BatchLike(Protocol[S]):
    """What the scheduler needs of a batch."""

    @property
    def free_rows(self) -> int:
        """Rows that hold no sequence."""

    @property
    def free_pages(self) -> int:
        """Full-attention pages that hold nothing."""

    def update(self, *, retire: Sequence[S], admit: Sequence[int]) -> list[S]:
        """Change the composition; `admit` are prompt lengths."""

    def step(self, counts: int | Mapping[S, int], /) -> object:
        """Append tokens, or raise `CapacityError` and change nothing."""


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Limits of a schedule.

    Attributes
    ----------
    chunk : int
        Most prompt tokens of all rows in one step.
    max_batch_tokens : int
        Most tokens of all rows in one step, prompts and generated ones together.
    page_tokens : int or None
        P of the full-attention pool, to count the pages of a prompt; None: pages are no reason to wait.
    """

    chunk: int = 2048
    max_batch_tokens: int = 8192
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("chunk", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)} tokens; at least 1 is wanted")
        if self.page_tokens is not None and self.page_tokens < 1:
            raise InputError(f"page_tokens: {self.page_tokens}; at least 1 is wanted")


class StepOutcome(NamedTuple):
    """What one step did.

    Attributes
    ----------
    prefill_tokens, decode_tokens : int
        Tokens appended.
    joined, left, preempted : int
        Sequences that were admitted, that were done, and that gave way to others.
    host_ns : int
        Host time of the batch's `step` that went through, in nanoseconds.
    """

    prefill_tokens: int
    decode_tokens: int
    joined: int
    left: int
    preempted: int
    host_ns: int

    @property
    def is_steady(self) -> bool:
        """Whether every row decoded one token and the composition stayed."""
        return self.prefill_tokens == 0 and self.joined == self.left == self.preempted == 0
