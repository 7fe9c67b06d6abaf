"""What a replay measured.

Knows numbers and their JSON form. Does not know how they are gathered or drawn.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["GroupFigures", "Latency", "PageHistory", "ReplayFigures"]


@dataclass(frozen=True, slots=True)
class Latency:
    """Host microseconds of a kind of step."""

    count: int
    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, nanoseconds: array[int]) -> Latency:
        """Return the figures of a list of measurements; zeros if there is none."""
        if not nanoseconds:
            return cls(0, 0.0, 0.0, 0.0)
        ordered = sorted(nanoseconds)
        last = len(ordered) - 1
        p50, p99 = (ordered[round(last * q)] / 1e3 for q in (0.5, 0.99))
        return cls(len(ordered), round(sum(ordered) / len(ordered) / 1e3, 3), p50, p99)


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """One window group after a replay.

    Attributes
    ----------
    index : int
        g; 0 is full attention.
    window : str
        What a query of the group sees.
    layers : int
        Attention layers of the group.
    page_tokens, ring_pages : int
        P and R; R is 0 for full attention.
    peak_pages : int
        Most pages that rows held at once.
    peak_mapped_pages : int
        Most mapped entries that an audit found in the device's page table.
    bound_pages : int
        What they may hold: R of every row, or the pool.
    page_nbytes : int
        Bytes of a page over the group's layers.
    every_token_nbytes : int
        What the group would have taken if it kept every token: the most tokens that rows held at once, in whole pages.
    """

    index: int
    window: str
    layers: int
    page_tokens: int
    ring_pages: int
    peak_pages: int
    peak_mapped_pages: int
    bound_pages: int
    page_nbytes: int
    every_token_nbytes: int


@dataclass(frozen=True, kw_only=True)
class ReplayFigures:
    """All figures of a replay; `tokens` counts what was appended, recomputed tokens of preempted sequences included.

    Attributes
    ----------
    target, config, trace : str
        What ran.
    rows, capacity, chunk, max_step_tokens : int
        B, tokens of a row, most prompt tokens of a step, C.
    sequences, skipped, steps, steady_steps, preemptions, rotations, launches : int
        Counts. A steady step appends one token to every row while nobody joins or leaves; a rotation is a page that a
        window has left behind, whose place in the ring the next page takes.
    prefill_tokens, decode_tokens, recomputed_tokens : int
        Tokens appended; the recomputed ones are among the prefill tokens. With reuse they are those of sequences that gave way,
        computed or reused again.
    bytes_to_device, bytes_to_device_steady : int
        Bytes sent in all, and in steady steps that mapped no page ahead.
    audits : int
        Audits that passed; a failed one ends the replay.
    host, host_steady : Latency
        Host time of the batch's step: all steps, and steady ones.
    wall_s : float
        From the first admission to the last audit.
    plan_bytes, state_bytes : int
        Device memory of the plan, and the part of it for states of recurrent layers; with a draft of both models.
    groups : tuple of GroupFigures
        One per window group that has layers.
    reuse : mapping or None
        What was reused, kept and given up (`numba_kv.replay.reuse`); None: nothing was kept.
    speculation : mapping or None
        Rounds, and what they kept (`numba_kv.replay.speculation`); None: there was no draft.
    """

    target: str
    config: str
    trace: str
    rows: int
    capacity: int
    chunk: int
    max_step_tokens: int
    sequences: int
    skipped: int
    steps: int
    steady_steps: int
    preemptions: int
    rotations: int
    launches: int
    prefill_tokens: int
    decode_tokens: int
    recomputed_tokens: int
    bytes_to_device: int
    bytes_to_device_steady: int
    audits: int
    host: Latency
    host_steady: Latency
    wall_s: float
    plan_bytes: int
    state_bytes: int
    groups: tuple[GroupFigures, ...]
    reuse: Mapping[str, Any] | None = None
    speculation: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, object]:
        """Return the figures as plain objects for `json.dump`."""
        return {
            "target": self.target,
            "config": self.config,
            "trace": self.trace,
            "rows": self.rows,
            "capacity": self.capacity,
            "chunk": self.chunk,
            "max_step_tokens": self.max_step_tokens,
            "sequences": self.sequences,
            "skipped": self.skipped,
            "steps": self.steps,
            "steady_steps": self.steady_steps,
            "tokens": {
                "prefill": self.prefill_tokens,
                "decode": self.decode_tokens,
                "recomputed": self.recomputed_tokens,
                "total": self.prefill_tokens + self.decode_tokens,
            },
            "groups": [asdict(group) for group in self.groups],
            "rotations": self.rotations,
            "preemptions": self.preemptions,
            "launches": self.launches,
            "bytes_to_device": self.bytes_to_device,
            "bytes_to_device_steady": self.bytes_to_device_steady,
            "audits": self.audits,
            "audit": "ok",
            "us_per_step": asdict(self.host),
            "us_per_steady_step": asdict(self.host_steady),
            "wall_s": round(self.wall_s, 3),
            "plan_bytes": self.plan_bytes,
            "state_bytes": self.state_bytes,
            **({} if self.reuse is None else {"reuse": dict(self.reuse)}),
            **({} if self.speculation is None else {"speculation": dict(self.speculation)}),
        }


class PageHistory:
    """Pages over time in a bounded number of samples: when full, every other one is dropped and the interval doubles.

    Parameters
    ----------
    num_groups : int
        Groups that are recorded.
    most : int
        Samples kept, at least 2.
    """

    def __init__(self, num_groups: int, most: int = 2048) -> None:
        self._most = max(2, most)
        self._interval = 1
        self.steps: list[int] = []
        self.tokens: list[int] = []
        self.pages: tuple[list[int], ...] = tuple([] for _ in range(num_groups))

    def is_due(self, step: int) -> bool:
        """Whether a sample is wanted at `step`."""
        return step % self._interval == 0

    def record(self, step: int, tokens: int, pages: list[int]) -> None:
        """Take a sample of the tokens that rows hold and the pages of each group."""
        self.steps.append(step)
        self.tokens.append(tokens)
        for series, value in zip(self.pages, pages, strict=True):
            series.append(value)
        if len(self.steps) > self._most:
            self._interval *= 2
            kept = [i for i, s in enumerate(self.steps) if s % self._interval == 0]
            for series in (self.steps, self.tokens, *self.pages):
                series[:] = [series[i] for i in kept]
