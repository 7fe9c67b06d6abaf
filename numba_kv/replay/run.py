"""A replay: the scheduler drives a `Batch` with a trace, audits it and keeps count.

Knows the public face of `Batch` and the clock. Does not know files, tables or pictures.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.errors import InputError
from numba_kv.geometry import ceil_div
from numba_kv.replay.figures import GroupFigures, Latency, PageHistory, ReplayFigures
from numba_kv.replay.request import Trace
from numba_kv.replay.reuse import ReplayReuse, ReusingScheduler, TracePolicy, check_hash_ids, reuse_json
from numba_kv.replay.schedule import SchedulerOptions
from numba_kv.replay.scheduler import Scheduler
from numba_kv.replay.speculation import ReplaySpeculation, SpeculativeScheduler

if TYPE_CHECKING:
    from numba_kv.batch import Batch, Sequence, SpeculativeBatch
    from numba_kv.context import ReuseOptions
    from numba_kv.shared_resources import SharedResources

__all__ = ["ReplayOptions", "ReplayResult", "replay"]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """How a trace is replayed.

    Attributes
    ----------
    chunk : int
        Most prompt tokens of all rows in one step.
    audit_every : int
        Steps between two audits; 0: one audit at the end.
    progress_every_s : float
        Seconds between two calls of `on_progress`.
    reuse : ReplayReuse or None
        Whether prompts begin with what earlier ones left; every request has `hash_ids` then.
    speculation : ReplaySpeculation or None
        How tokens are proposed and accepted; the resources have a draft then.
    """

    chunk: int = 2048
    audit_every: int = 1000
    progress_every_s: float = 0.1
    reuse: ReplayReuse | None = None
    speculation: ReplaySpeculation | None = None

    def __post_init__(self) -> None:
        if self.audit_every < 0:
            raise InputError(f"audit_every: {self.audit_every} steps; 0 (only at the end) or more is wanted")


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Figures of a replay and the pages over its course (one series per entry of ``figures.groups``)."""

    figures: ReplayFigures
    history: PageHistory


def replay(
    resources: SharedResources,
    trace: Trace,
    options: ReplayOptions | None = None,
    *,
    config_name: str = "",
    skipped: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Serve every request of `trace` and return what happened.

    Requests join in the order of their arrival and as soon as rows and pages allow; nobody sleeps.

    Parameters
    ----------
    resources : SharedResources
        The caches; a `Batch` is made for the replay and closed after it.
    trace : Trace
        Requests, none longer than the capacity.
    options : ReplayOptions, optional
        How.
    config_name, skipped : optional
        Passed on to the figures: what the model is called, and how many requests were left out before.
    on_progress : callable, optional
        Called now and then with the tokens appended (recomputed ones do not count) and the requests served.

    Raises
    ------
    CapacityError
        If a request does not fit into the pool even alone.
    InvariantError
        If an audit fails.
    """
    from numba_kv.batch import Batch, SpeculativeBatch

    chosen = options or ReplayOptions()
    if chosen.speculation is not None:
        with SpeculativeBatch(resources) as pair:
            run = _Run(resources, pair.base, trace, chosen, pair)
            run.serve(on_progress)
            return ReplayResult(run.figures(config_name, skipped), run.history)
    reuse = None if chosen.reuse is None else _batch_options(chosen.reuse, trace, resources.plan.config.page_tokens)
    with Batch(resources, reuse=reuse) as batch:
        run = _Run(resources, batch, trace, chosen)
        run.serve(on_progress)
        return ReplayResult(run.figures(config_name, skipped), run.history)


def _batch_options(reuse: ReplayReuse, trace: Trace, page_tokens: int) -> ReuseOptions:
    from numba_kv.context import ReuseOptions
    from numba_kv.ledger.reuse.prefix_cache import CacheLimits

    check_hash_ids(trace)
    policy = TracePolicy(every_blocks=ceil_div(reuse.every_tokens, page_tokens))
    return ReuseOptions(policy=policy, limits=CacheLimits(max_blocks=reuse.max_blocks), host_bytes=reuse.host_bytes)


class _Run:
    """One replay in progress."""

    def __init__(
        self,
        resources: SharedResources,
        batch: Batch,
        trace: Trace,
        options: ReplayOptions,
        pair: SpeculativeBatch | None = None,
    ) -> None:
        plan = resources.plan
        self._pair = pair
        self._plan = plan
        self._plan_nbytes = sum(each.nbytes for each in resources.plans)
        self._state_nbytes = sum(each.state_nbytes for each in resources.plans)
        self._target = resources.device.target
        self._batch = batch
        self._trace = trace
        self._options = options
        self._groups = [g for g in plan.groups if not g.is_empty]
        full = plan.groups[0]
        requests = sorted(trace.requests, key=lambda r: r.arrival_s)
        limits = SchedulerOptions(
            chunk=options.chunk,
            max_batch_tokens=plan.config.max_batch_tokens,
            page_tokens=None if full.is_empty else full.page_tokens,
        )
        self._scheduler: Scheduler[Sequence]
        if pair is not None and options.speculation is not None:
            self._scheduler = SpeculativeScheduler(pair, requests, limits, options.speculation)
        elif options.reuse is None:
            self._scheduler = Scheduler(batch, requests, limits)
        else:
            self._scheduler = ReusingScheduler(batch, requests, limits)
        self.history = PageHistory(len(self._groups))
        self._held = [0] * len(self._groups)
        self._mapped = [0] * len(self._groups)
        self._peak_tokens = 0
        self._host_ns = array("q")
        self._steady_ns = array("q")
        self._steps = self._prefill = self._decode = self._preemptions = self._audits = 0
        self._wall_s = 0.0

    def serve(self, on_progress: Callable[[int, int], None] | None) -> None:
        """Run steps until every request has been served."""
        scheduler, every = self._scheduler, self._options.audit_every
        started = time.monotonic()
        next_progress = started
        most = self._trace.input_tokens + self._trace.output_tokens
        while not scheduler.is_done:
            outcome = scheduler.step()
            if not outcome.host_ns:  # the last ones have left: no step
                continue
            self._steps += 1
            self._peak_tokens = max(self._peak_tokens, scheduler.tokens_held)
            self._prefill += outcome.prefill_tokens
            self._decode += outcome.decode_tokens
            self._preemptions += outcome.preempted
            self._host_ns.append(outcome.host_ns)
            if outcome.is_steady:
                self._steady_ns.append(outcome.host_ns)
            self._look()
            if every and self._steps % every == 0:
                self._audit()
            if on_progress is not None and time.monotonic() >= next_progress:
                next_progress = time.monotonic() + self._options.progress_every_s
                on_progress(min(self._prefill + self._decode, most), scheduler.finished)
        self._audit()
        if on_progress is not None:
            on_progress(most, scheduler.finished)
        self._wall_s = time.monotonic() - started

    def _look(self) -> None:
        """Note the pages that rows hold now: leased ones of the full group, the private rings of the others."""
        if self.history.is_due(self._steps):
            running, free = self._scheduler.num_running, self._batch.free_pages
            held = [running * g.ring if g.ring else g.usable_pages - free for g in self._groups]
            self.history.record(self._steps, self._scheduler.tokens_held, held)

    def _audit(self) -> None:
        report = self._batch.audit() if self._pair is None else self._pair.audit()[0]
        if isinstance(self._scheduler, SpeculativeScheduler):
            self._scheduler.check_lengths()
        self._audits += 1
        for i, group in enumerate(self._groups):
            self._held[i] = report.pools[group.index].peak_owned
            self._mapped[i] = max(self._mapped[i], report.mapped_pages[group.index])

    def figures(self, config_name: str, skipped: int) -> ReplayFigures:
        """Return what was counted."""
        config, stats = self._plan.config, self._batch.stats
        reuse = None if self._batch.reuse is None else reuse_json(self._batch)
        reused = 0 if reuse is None else reuse["reused_tokens"]
        return ReplayFigures(
            target=self._target,
            config=config_name or config.model_type,
            trace=self._trace.name,
            rows=config.max_batch_size,
            capacity=config.max_kv_cache_capacity,
            chunk=self._options.chunk,
            max_step_tokens=config.max_step_tokens,
            sequences=len(self._trace.requests),
            skipped=skipped,
            steps=self._steps,
            steady_steps=len(self._steady_ns),
            preemptions=self._preemptions,
            rotations=stats.rotated_pages,
            launches=stats.launches,
            prefill_tokens=self._prefill,
            decode_tokens=self._decode,
            recomputed_tokens=self._prefill + self._decode + reused - self._trace.input_tokens - self._trace.output_tokens,
            bytes_to_device=stats.bytes_to_device,
            bytes_to_device_steady=stats.steady_bytes_to_device,
            audits=self._audits,
            host=Latency.of(self._host_ns),
            host_steady=Latency.of(self._steady_ns),
            wall_s=self._wall_s,
            plan_bytes=self._plan_nbytes,
            state_bytes=self._state_nbytes,
            groups=tuple(
                GroupFigures(
                    index=g.index,
                    window=str(g.window),
                    layers=len(g.layers),
                    page_tokens=g.page_tokens,
                    ring_pages=g.ring,
                    peak_pages=held,
                    peak_mapped_pages=mapped,
                    bound_pages=g.usable_pages,
                    page_nbytes=g.page_nbytes,
                    every_token_nbytes=ceil_div(self._peak_tokens, g.page_tokens) * g.page_nbytes,
                )
                for g, held, mapped in zip(self._groups, self._held, self._mapped, strict=True)
            ),
            reuse=reuse,
            speculation=self._scheduler.to_json() if isinstance(self._scheduler, SpeculativeScheduler) else None,
        )
