"""Replaying a trace with context reuse: prompts as tokens, made of the ids of their blocks.

A trace with `hash_ids` says which prompts begin alike and not what they say; any tokens that are equal where the ids are do.
Knows the public face of `Batch`. Does not know files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.errors import TraceError
from numba_kv.geometry import INT32_MAX, ceil_div
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.replay.request import Request, Trace
from numba_kv.replay.scheduler import Scheduler, Waiting

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch import Batch, Sequence
    from numba_kv.ledger.reuse.store import KeptStore
    from numba_kv.replay.schedule import SchedulerOptions

__all__ = ["HASH_BLOCK_TOKENS", "ReplayReuse", "ReusingScheduler", "TracePolicy", "check_hash_ids", "prompt_of", "reuse_json"]

#: Tokens that one id of a trace stands for.
HASH_BLOCK_TOKENS = 512
#: Tokens that are generated are of these ids and the line of their request: nobody else has them.
_FIRST_GENERATED = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ReplayReuse:
    """How a replay keeps what it has computed.

    Attributes
    ----------
    every_tokens : int
        Window pages and states are kept after so many tokens of a prompt, beside its end and branches; 0: only there.
    max_blocks : int or None
        Most pages of the full group that are kept; None: as many as there is room for.
    host_bytes : int
        Page-locked memory for what the device gives up.
    """

    every_tokens: int = 4096
    max_blocks: int | None = None
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePolicy(PublishPolicy):
    """Also a point where the last whole block of the trace ends.

    The next turn of a conversation goes on where the prompt ended, but its ids say so only for whole blocks: it seems to leave
    the prompt up to 511 tokens before its end, where a window behind the end does not reach.
    """

    def points(self, prompt_tokens: int, start: int, stop: int, matched_tokens: int, page_tokens: int) -> tuple[int, ...]:
        """Return the points in (start, stop], rising; see `PublishPolicy.points`."""
        found = set(PublishPolicy.points(self, prompt_tokens, start, stop, matched_tokens, page_tokens))
        last = prompt_tokens // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
        if self.publish != "none" and self.at_end and start < last <= stop:
            found.add(last)
        return tuple(sorted(found))


def check_hash_ids(trace: Trace) -> None:
    """Check that every request says of which blocks its prompt is made.

    Raises
    ------
    TraceError
        Naming the first one that does not.
    """
    for request in trace.requests:
        wanted = ceil_div(request.input_tokens, HASH_BLOCK_TOKENS)
        where = f"{trace.name}, line {request.line}" if request.line else trace.name
        if len(request.hash_ids) != wanted:
            raise TraceError(
                f"{where}: {len(request.hash_ids)} hash_ids for a prompt of {request.input_tokens} tokens, {wanted} are wanted "
                f"(one for each {HASH_BLOCK_TOKENS} tokens); without them nobody knows which prompts begin alike, so leave "
                "--reuse out"
            )
        if not 0 <= min(request.hash_ids) <= max(request.hash_ids) < _FIRST_GENERATED:
            raise TraceError(f"{where}: hash_ids are not all in 0..{_FIRST_GENERATED - 1}, so they cannot stand for tokens")


def prompt_of(request: Request, tokens: int) -> NDArray[np.int32]:
    """Return the first `tokens` tokens of a request, int32: those of its prompt, and generated ones behind it."""
    ids = np.repeat(np.array(request.hash_ids, np.int32), HASH_BLOCK_TOKENS)[: min(tokens, request.input_tokens)]
    own = _FIRST_GENERATED + request.line % (INT32_MAX - _FIRST_GENERATED)
    return np.concatenate([ids, np.full(tokens - len(ids), own, np.int32)])


class ReusingScheduler(Scheduler["Sequence"]):
    """Admits requests by their tokens, so that they begin with what is kept of them."""

    def __init__(self, batch: Batch, requests: Iterable[Request], options: SchedulerOptions) -> None:
        super().__init__(batch, requests, options)
        self._reusing = batch

    def _change(self, done: list[Sequence], joining: list[Waiting]) -> list[tuple[Sequence, int]]:
        prompts = [prompt_of(job.request, job.prompt) for job in joining]
        made = self._reusing.update(retire=done, admit=prompts)
        return [(sequence, sequence.reused_tokens) for sequence in made]

    def _chunk(self, handle: Sequence, tokens: int) -> int:
        return self._reusing.prefill_chunk(handle, tokens)

    def _free_pages(self) -> int:
        return self._reusing.free_pages + self._reusing.evictable_pages


def reuse_json(batch: Batch) -> dict[str, Any]:
    """Return what was reused, kept and given up, as plain objects."""
    if batch.reuse is None:
        return {}
    figures, kept = batch.reuse.figures, batch.reuse.cache.store
    return {
        "hit_rate": round(figures.hit_rate, 6),
        "lookups": figures.lookups,
        "hits": figures.hits,
        "looked_up_tokens": figures.looked_up_tokens,
        "matched_tokens": figures.matched_tokens,
        "reused_tokens": figures.reused_tokens,
        "misses": dict(sorted((figures.misses or {}).items())),
        "published_blocks": figures.published_blocks,
        "duplicate_blocks": figures.duplicate_blocks,
        "kept_blocks": batch.reuse.cache.num_blocks,
        "kept_window_pages": [pool.num_kept for pool in kept.windows],
        "kept_states": kept.snapshots.num_kept,
        "cold_retries": figures.cold_retries,
        "evictions": {
            "blocks": figures.evicted_blocks,
            "copies": figures.evicted_copies,
            "snapshots": figures.evicted_snapshots,
            "tails": figures.evicted_tails,
        },
        "skipped": {
            "blocks": figures.skipped_blocks,
            "copies": figures.skipped_copies,
            "snapshots": figures.skipped_snapshots,
        },
        "copied_pages": batch.stats.copied_pages,
        **({} if kept.lower is None else {"host": _host_json(batch, kept.lower.store)}),
    }


def _host_json(batch: Batch, kept: KeptStore) -> dict[str, Any]:
    if batch.reuse is None:
        return {}
    figures, stats = batch.reuse.figures, batch.stats
    return {
        "hits": figures.host_hits,
        "reused_tokens": figures.host_tokens,
        "kept_pages": 0 if kept.full is None else kept.full.num_kept,
        "kept_window_pages": [pool.num_kept for pool in kept.windows],
        "kept_states": kept.snapshots.num_kept,
        "moved": {
            "pages_out": figures.pages_to_host,
            "pages_in": figures.pages_to_device,
            "states_out": figures.states_to_host,
            "states_in": figures.states_to_device,
            "bytes_out": stats.kept_out_bytes,
            "bytes_in": stats.kept_in_bytes,
        },
        "evicted_blocks": kept.figures.evicted_blocks,
    }
