"""Plans and figures as rich tables, for people.

Knows how numbers are laid out. Does not know where they come from, nor the console they go to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from numba_kv.config.state_layout import state_plans
from numba_kv.dtypes import dtype
from numba_kv.plan import PARTS, MemoryPlan
from numba_kv.replay.figure_table import FigureTable
from numba_kv.replay.figures import Latency, ReplayFigures
from numba_kv.replay.sizes import format_bytes

if TYPE_CHECKING:
    from numba_kv.config import LLMEngineConfig

__all__ = ["Budget", "figure_rows", "group_notes", "group_rows", "plan_json", "plan_table", "replay_table"]


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory that was given, and the most rows that all have their full capacity within it."""

    nbytes: int
    most_rows: int


def plan_json(plan: MemoryPlan, budget: Budget | None, name: str) -> dict[str, object]:
    """Return a plan as plain objects; `name` is what the model is called."""
    config = plan.config
    return {
        "config": name,
        "model_type": config.model_type,
        "batch": config.max_batch_size,
        "capacity": config.max_kv_cache_capacity,
        "page_tokens": config.page_tokens,
        "kv_cache_dtype": str(config.kv_cache_dtype),
        "max_step_tokens": config.max_step_tokens,
        "max_batch_tokens": config.max_batch_tokens,
        "memory_bytes": budget.nbytes if budget else None,
        "groups": [
            {
                "index": g.index,
                "window": str(g.window),
                "layers": len(g.layers),
                "kv_layers": sum(len(s.layers) for s in g.slabs),
                "slabs": [
                    {"layers": len(s.layers), "num_kv_heads": s.num_kv_heads, "head_dim": s.head_dim, "nbytes": s.nbytes}
                    for s in g.slabs
                ],
                "page_tokens": g.page_tokens,
                "kv_layout": g.kv_layout,
                "ring_pages": g.ring,
                "usable_pages": g.usable_pages,
                "num_pages": g.num_pages,
                "page_nbytes": g.page_nbytes,
                "pool_nbytes": g.nbytes,
            }
            for g in plan.groups
        ],
        "regions": [{"name": r.name, "shape": list(r.shape), "dtype": r.dtype, "nbytes": r.nbytes} for r in plan.regions],
        "pool_nbytes": plan.pool_nbytes,
        "parts": plan.parts,
        "nbytes": plan.nbytes,
        "max_sequences": plan.max_sequences,
        "max_tokens": plan.max_tokens,
        "rows_in_budget": budget.most_rows if budget else None,
    }


def plan_table(plan: MemoryPlan, budget: Budget | None, name: str, notes: Iterable[str] = ()) -> RenderableType:
    """Return the tables of a plan: one row per window group that has layers, then notes and the sums."""
    config = plan.config
    rows, capacity = config.max_batch_size, config.max_kv_cache_capacity
    columns = ("group", "heads x dim", "layers", "ring R", "pages N", "page", "pool")
    title = f"KV caches of {name}: {rows:,} rows of {capacity:,} tokens"
    groups, borrows = FigureTable(title, *columns, words=2), False
    for g in plan.groups:
        if g.is_empty:
            continue
        shapes = ", ".join(f"{s.num_kv_heads}x{s.head_dim}" for s in g.slabs) or "-"
        borrowed = len(g.layers) - sum(len(s.layers) for s in g.slabs)
        layers = f"{len(g.layers)}\n{borrowed} borrow" if borrowed else str(len(g.layers))
        borrows = borrows or borrowed > 0
        ring = str(g.ring) if g.ring else "-"
        groups.add_row(
            f"{g.index}: {g.window}",
            shapes,
            layers,
            ring,
            f"{g.num_pages:,}",
            format_bytes(g.page_nbytes),
            format_bytes(g.nbytes),
        )
    sums = FigureTable("", "total", "")
    sums.show_header = False
    for part, words in PARTS.items():
        if part in plan.parts:
            sums.add_row(words, format_bytes(plan.parts[part]))
    sums.add_row("everything", f"{format_bytes(plan.nbytes)} ({plan.nbytes:,} B)")
    if budget:
        sums.add_row("left of the budget", format_bytes(budget.nbytes - plan.nbytes))
    if groups.row_count:
        if plan.max_sequences < rows:
            sums.add_row(f"of the {rows:,} rows planned, at full capacity at once", f"{plan.max_sequences:,}")
        sums.add_row("tokens that all rows hold at once", f"{plan.max_tokens:,}")
    if budget:
        sums.add_row("largest --batch that has all its rows at full capacity", f"{budget.most_rows:,}")
    parts: list[RenderableType] = [groups] if groups.row_count else [title]
    if borrows:
        parts.append("borrow: so many of these layers read K and V of another layer and have no pages of their own")
    if groups.row_count:
        parts.append(f"pages of {config.page_tokens} tokens, {config.kv_cache_dtype}; N counts the null and the trash page")
        steps = "steps of up to so many tokens a row read every key from pages, and can be rewound"
        parts.append(f"C = {config.max_step_tokens} (--max-step-tokens): {steps}")
    if config.num_recurrent_layers:
        parts.append(_states(config))
    return Group(*parts, *notes, sums)


def _states(config: LLMEngineConfig) -> FigureTable:
    """Return the table of what recurrent layers keep of each row."""
    layers = config.num_recurrent_layers
    title = f"States of {layers} recurrent layer{'s' if layers > 1 else ''}"
    table = FigureTable(title, "state", "of a row, in each layer", "of a row", "of all rows", words=2)
    for state in state_plans(config):
        shape = " x ".join(f"{n:,}" for n in state.shape[2:])
        of_row = format_bytes(state.shape[0] * math.prod(state.shape[2:]) * dtype(state.dtype).itemsize)
        table.add_row(state.name, f"{shape} {state.dtype}", of_row, format_bytes(state.nbytes))
    return table


def figure_rows(figures: ReplayFigures) -> list[tuple[str, str]]:
    """Return the figures of a replay as pairs of words: for the table and for the HTML report."""
    f = figures
    skipped = f" ({f.skipped} too long, left out)" if f.skipped else ""
    recomputed = f", {f.recomputed_tokens:,} of them again" if f.recomputed_tokens else ""
    rows = [
        ("target", f.target),
        ("trace", f.trace),
        ("rows, capacity, chunk", f"{f.rows}, {f.capacity:,}, {f.chunk:,}"),
        ("sequences", f"{f.sequences:,}{skipped}"),
        ("steps", f"{f.steps:,} ({f.steady_steps:,} steady)"),
        ("tokens", f"{f.prefill_tokens:,} prompt{recomputed} + {f.decode_tokens:,} generated"),
        ("pages rotated out of windows", f"{f.rotations:,}"),
        ("preemptions", f"{f.preemptions:,}"),
        ("sent to the device", format_bytes(f.bytes_to_device)),
        ("sent in steady steps", format_bytes(f.bytes_to_device_steady)),
        ("audits", f"{f.audits:,} ok"),
        ("host time of a step", _latency(f.host)),
    ]
    if f.speculation is not None:
        s = f.speculation
        mean = s["accepted_tokens"] / max(1, s["verified_rows"])
        rows.insert(6, ("rounds", f"{s['rounds']:,}; {mean:.2f} of {s['verify_tokens']} tokens were kept"))
    if f.reuse is not None:
        r = f.reuse
        rows.append(("reused", f"{r['reused_tokens']:,} of {r['looked_up_tokens']:,} prompt tokens ({r['hit_rate']:.1%})"))
        gone = r["evictions"]
        rows.append(("evicted", f"{gone['blocks']:,} pages, {gone['copies']:,} copies, {gone['snapshots']:,} states"))
        if "host" in r:
            host, moved = r["host"], r["host"]["moved"]
            sizes = f"{format_bytes(moved['bytes_out'])} out, {format_bytes(moved['bytes_in'])} back"
            rows.append(("reused from the host", f"{host['reused_tokens']:,} tokens; {sizes}"))
    if f.host_steady.count:
        rows.append(("of a steady step", _latency(f.host_steady)))
    rows.append(("wall time", f"{f.wall_s:.1f} s"))
    of_states = f", {format_bytes(f.state_bytes)} of it states of recurrent layers" if f.state_bytes else ""
    rows.append(("planned memory", format_bytes(f.plan_bytes) + of_states))
    return rows


def _latency(found: Latency) -> str:
    return f"mean {found.mean:.1f}, p50 {found.p50:.1f}, p99 {found.p99:.1f} us"


def group_rows(figures: ReplayFigures) -> list[tuple[str, ...]]:
    """Return the heads and then one row per window group: for the table and for the HTML report.

    The audit at the end finds empty rows: without another one there is no column of what was mapped.
    """
    heads = ("group", "layers", "ring R", "peak pages", "bound", "peak bytes", "keeping all")
    rows = [
        (
            f"{g.index}: {g.window}",
            str(g.layers),
            str(g.ring_pages) if g.ring_pages else "-",
            f"{g.peak_pages:,}",
            f"{g.bound_pages:,}",
            format_bytes(g.peak_pages * g.page_nbytes),
            format_bytes(g.every_token_nbytes) if g.ring_pages else "-",
        )
        for g in figures.groups
    ]
    if not _was_audited_on_the_way(figures):
        return [heads, *rows]
    mapped = (f"{g.peak_mapped_pages:,}" for g in figures.groups)
    return [(*heads, "at audits"), *((*row, cell) for row, cell in zip(rows, mapped, strict=True))]


def group_notes(figures: ReplayFigures) -> list[str]:
    """Return what the columns of `group_rows` mean."""
    notes = ["Peak pages: what rows held at once. A window's ring is taken whole at admission; full rows hold pages ahead."]
    if any(g.ring_pages for g in figures.groups):
        notes.append("Keeping all: what the layers would have taken if they kept every token.")
    if _was_audited_on_the_way(figures):
        notes.append("At audits: the most pages that an audit found in the page table; the peak may lie between two.")
    return notes


def _was_audited_on_the_way(figures: ReplayFigures) -> bool:
    return any(g.peak_mapped_pages for g in figures.groups)


def replay_table(figures: ReplayFigures, notes: Iterable[str] = ()) -> RenderableType:
    """Return the tables of a replay: the figures, then pages of each group against their bound, then notes."""
    numbers = FigureTable(f"Replay on the caches of {figures.config}", "figure", "value", words=2)
    numbers.show_header = False
    for name, value in figure_rows(figures):
        numbers.add_row(name, value)
    heads, *rows = group_rows(figures)
    if not rows:
        return Group(numbers, "No layer keeps keys and values, so there are no pages.", *notes)
    groups = FigureTable("Pages", *heads)
    for row in rows:
        groups.add_row(*row)
    return Group(numbers, groups, *group_notes(figures), *notes)
