"""Requests, and a trace of them.

Knows lengths in tokens and the capacity they are held against. Does not know files (`numba_kv.replay.trace`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from numba_kv.errors import TraceError

__all__ = ["Request", "Trace", "TraceFormat", "fit_to_capacity"]

TraceFormat = Literal["mooncake", "azure", "numba_kv", "generated"]


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes
    ----------
    arrival_s : float
        Seconds after the trace's start.
    input_tokens, output_tokens : int
        Tokens of the prompt and of the answer, both at least 1.
    hash_ids : tuple of int
        One id per block of the prompt, equal ids mean an equal prefix; empty where the trace has none.
    line : int
        Line of the file, from 1; 0 for a request that no file holds.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    line: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens the request's row holds when it is done."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their file, and where they came from."""

    name: str
    format: TraceFormat
    requests: tuple[Request, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer together; 0 for an empty trace."""
        return max((r.total_tokens for r in self.requests), default=0)

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(r.input_tokens for r in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(r.output_tokens for r in self.requests)


def fit_to_capacity(trace: Trace, capacity: int, *, skip_too_long: bool = False) -> tuple[Trace, int]:
    """Return the trace with every request at most `capacity` tokens long, and how many were skipped for it.

    Raises
    ------
    TraceError
        If a request is longer and `skip_too_long` is False, naming its line, its length and the capacity; or if no request
        is left.
    """
    fitting = tuple(r for r in trace.requests if r.total_tokens <= capacity)
    skipped = len(trace.requests) - len(fitting)
    if skipped and not skip_too_long:
        long = next(r for r in trace.requests if r.total_tokens > capacity)
        place = f"{trace.name}, line {long.line}" if long.line else trace.name
        raise TraceError(
            f"{place}: the request is {long.total_tokens} tokens long ({long.input_tokens} in, {long.output_tokens} out), "
            f"the capacity of a row is {capacity}; raise --capacity or leave such requests out with --skip-too-long "
            f"({skipped} of {len(trace.requests)} are too long)"
        )
    if not fitting:
        raise TraceError(
            f"{trace.name}: all {skipped} requests are longer than the capacity of {capacity} tokens; raise --capacity"
        )
    return replace(trace, requests=fitting), skipped
