"""Figures of ``numba-kv bench`` as rich tables, for people.

Knows how figures are laid out. Does not know how they are measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType

from numba_kv.replay.figure_table import FigureTable

__all__ = ["bench_table"]

#: Head, key and meaning of each column.
_STEP_COLUMNS = (
    ("rows", "rows", "sequences, each of which appends one token"),
    ("context", "context", "tokens of a row"),
    ("groups", "groups", "full attention and windows"),
    ("P", "page_tokens", "tokens of a page"),
    ("step", "step_host_us", "batch.step(1), on the host"),
    ("bound", "bound_host_us", "the launch alone, its arguments bound before, on the host"),
    ("captured host", "captured_host_us", "a step of a graph of 100, on the host"),
    ("loop host", "captured_loop_host_us", "the same with the reservation of the steps and their note"),
    ("1000 host", "captured_1000_loop_host_us", "the same in loops of 1,000 steps"),
    ("captured GPU", "captured_gpu_us", "a step of the graph, on the GPU"),
    ("dispatcher", "dispatcher_host_us", "the same kernel through Numba's own launch path, on the host"),
    ("plain", "plain_host_us", "the same work in plain Python, and one upload"),
    ("update", "update_16_host_us", "a sixteenth of the rows leaves and as many join, on the host"),
)

_KV_COLUMNS = (
    ("what", "what", "write: tokens into pages; gather: out of them; rotate: write that rotates too; decode: 256 tokens"),
    ("pool", "pool", "element type of the pages; what is moved in or out is bfloat16"),
    ("layout", "layout", "of a page: tokens before heads (NHD), or behind them"),
    ("tokens", "tokens", "tokens of the call"),
    ("us", "us", "microseconds of the call, median"),
    ("GB/s", "gb_per_s", "bytes read once and bytes written once"),
    ("of copy", "of_copy", "speed beside a plain copy of as many bytes"),
    ("torch", "torch_us", "torch's indexing, microseconds"),
    ("Triton", "triton_us", "a Triton kernel, microseconds; for rotate two of them; copy_pages: no upload of pairs"),
    ("host", "host_us", "microseconds of the call on the host"),
    ("captured", "captured_us", "microseconds on the GPU inside a graph of 100 calls"),
    ("graph host", "captured_host_us", "microseconds on the host for one of them"),
)
_REUSE_COLUMNS = (
    ("pages", "pages", "pages of 16 tokens that a prompt finds"),
    ("hit", "hit_us", "lookup, acquire and release of their lease, on the host"),
    ("lookup", "lookup_us", "what is kept of the prompt, its tokens compared"),
    ("acquire", "acquire_us", "the pages are held, and room is made"),
    ("release", "release_us", "they are given back"),
    ("plain hit", "plain_hit_us", "the same three in plain Python, with a record a block"),
    ("faster", "times_faster", "plain Python's time beside ours"),
    ("naming", "hash_us", "128-bit names of all blocks"),
    ("plain naming", "plain_hash_us", "the same names, a call of hashlib for each block"),
)

_HOST_COLUMNS = (
    ("page KiB", "page_kib", "one page in all layers"),
    ("MiB", "mib", "bytes of a move"),
    ("plain out", "plain_out_gb_per_s", "GB/s of a plain copy to page-locked memory"),
    ("plain back", "plain_back_gb_per_s", "GB/s of a plain copy from there"),
    ("out", "pages_out_of_plain", "kept pages to the host, beside that copy"),
    ("back", "pages_back_of_plain", "kept pages from the host, beside that copy"),
    ("swap out", "swap_out_of_plain", "a sequence swapped out, its bookkeeping included"),
    ("swap back", "swap_back_of_plain", "a sequence swapped in"),
)

_SPEC_COLUMNS = (
    ("what", "what", "round: draft steps, verification and commit in both models; else a commit of accepted states"),
    ("layers", "layers", "recurrent layers"),
    ("host", "host_us", "microseconds of the calls on the host"),
    ("graph host", "captured_host_us", "microseconds on the host for one round of a graph of 20"),
    ("captured", "captured_us", "microseconds on the GPU for one round of the graph"),
    ("commit", "captured_commit_us", "microseconds on the GPU for a commit alone, of rows that verified nothing"),
    ("us", "us", "microseconds of a commit of all rows and layers, median"),
    ("GB/s", "gb_per_s", "bytes read once and bytes written once"),
    ("of copy", "of_copy", "speed beside a plain copy of as many bytes"),
)
_LOAD_COLUMNS = (
    ("files", "files", "safetensors files of the checkpoint, all in the page cache"),
    ("bytes", "nbytes", "of all tensors"),
    ("copy", "pinned_copy_gb_per_s", "GB/s of a plain copy of as many bytes from page-locked memory"),
    ("first", "first_load_gb_per_s", "GB/s of a first load that `external_weights_nbytes` announced"),
    ("of copy", "first_ratio", "the same beside the plain copy"),
    ("later", "later_load_gb_per_s", "GB/s of later loads, into new device memory"),
    ("later of copy", "later_ratio", "the same beside the plain copy"),
    ("unannounced", "first_unannounced_ratio", "a first load that nothing announced, beside the plain copy"),
    ("staging", "staging_nbytes", "page-locked bytes of the loads"),
)
Columns = tuple[tuple[str, str, str], ...]
#: Title, columns, how many of them say what a point is, and key of the points.
_SWEEPS: Mapping[str, tuple[str, Columns, int, str]] = {
    "step": ("step: bookkeeping of a decode step, median microseconds", _STEP_COLUMNS, 4, "points"),
    "reuse": ("reuse: prefix hits, lower quartile of microseconds", _REUSE_COLUMNS, 1, "points"),
    "kv": ("kv: K and V into pages and out of them", _KV_COLUMNS, 4, "points"),
    "load": ("load: weights onto the device", _LOAD_COLUMNS, 1, "checkpoints"),
    "host": ("host: pages to page-locked memory and back", _HOST_COLUMNS, 2, "points"),
    "spec": ("spec: speculative rounds, and commits of accepted states", _SPEC_COLUMNS, 2, "points"),
}


def bench_table(figures: Mapping[str, Mapping[str, object]]) -> RenderableType:
    """Return the figures: points of a sweep as a table of their own, all else one line each, nested ones with their path."""
    table = FigureTable("Measured on this machine", "measure", "figure", "value", words=3)
    sweeps: list[RenderableType] = []
    for measure, found in figures.items():
        rest = dict(found)
        if measure in _SWEEPS:
            title, columns, words, key = _SWEEPS[measure]
            points: Any = rest.pop(key, ())
            sweeps += _sweep(title, columns, words, points) if points else []
        for i, (path, value) in enumerate(_flat(rest)):
            table.add_row(measure if i == 0 else "", path, _shown(path, value, rest))
        table.add_section()
    return Group(*([table] if table.row_count else []), *sweeps)


def _sweep(title: str, all_columns: Columns, words: int, points: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    is_shown = [any(point.get(key) is not None for point in points) for _, key, _ in all_columns]
    columns = [column for column, shown in zip(all_columns, is_shown, strict=True) if shown]
    table = FigureTable(title, *(head for head, _, _ in columns), words=sum(is_shown[:words]))
    for point in points:
        table.add_row(*(_cell(point.get(key)) for _, key, _ in columns))
    return [table, "\n".join(f"{head}: {meaning}" for head, _, meaning in columns)]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3f}" if value < 2 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _shown(path: str, value: object, beside: Mapping[str, object]) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if path == "import_ms" and beside.get("is_within_noise"):
        return f"{value} (within noise)"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _flat(found: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for name, value in found.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, item in enumerate(value):
                pairs += _flat(item, f"{prefix}{name}[{i}].")
        else:
            pairs.append((prefix + name, value))
    return pairs
