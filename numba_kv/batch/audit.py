"""The audit: ledger, host mirror and device tables say the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError, StateError
from numba_kv.geometry import RESERVED_PAGES
from numba_kv.kernels.layout import Status
from numba_kv.ledger.pages import PoolFigures
from numba_kv.ledger.sharing import check_shared

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.cache.step_buffers import StepBuffers
    from numba_kv.ledger.reuse.prefix_cache import PrefixCache
    from numba_kv.ledger.rows import RowLedger

__all__ = ["AuditReport", "audit_batch"]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit counted.

    Attributes
    ----------
    rows : int
        Sequences.
    tokens : int
        Tokens of all rows.
    pools : tuple of PoolFigures
        Pages of each group by what they are.
    mapped_pages : tuple of int
        Entries of each group's page table that are mapped.
    """

    rows: int
    tokens: int
    pools: tuple[PoolFigures, ...]
    mapped_pages: tuple[int, ...]


def audit_batch(ledger: RowLedger, buffers: StepBuffers, cache: PrefixCache | None = None) -> AuditReport:
    """Compare everything, `cache` too, which keeps pages beside those of rows. Waits for the stream.

    Raises
    ------
    InvariantError
        At the first difference.
    StateError
        If the device refused a step and nobody asked for `Batch.refusals`.
    """
    _check_host(ledger, cache)
    status = buffers.status.to_host()
    if status.any():
        row = int(np.flatnonzero(status)[0])
        raise StateError(f"row {row}: the device refused a step ({Status(int(status[row])).name}); refusals() tells and clears")
    _same("floors", buffers.floors.to_host(), ledger.floor)
    _same("leased", buffers.leased.to_host(), ledger.leased)
    _same("live", buffers.live.to_host(), ledger.live.astype(np.int64))
    lengths, peaks = buffers.lengths.to_host(), buffers.high_water.to_host()
    mapped, pools = [], []
    device_begin = buffers.mapped_begin.to_host()
    for g, group in enumerate(ledger.plan.groups):
        _same(f"lengths of group {g}", lengths[g], ledger.hi)
        _same(f"high_water of group {g}", peaks[g], ledger.high_water)
        if group.window.is_full:
            blocks, pages = _full_tables(ledger)
        else:
            _same(f"mapped_begin of group {g}", device_begin[g], ledger.mapped_begin[g])
            blocks, pages = _window_tables(ledger, g)
        _same(f"block_tables[{g}]", buffers.block_tables[g].to_host(), blocks)
        _same(f"page_tables[{g}] (K)", buffers.page_tables[g][:, 0].to_host(), pages)
        _same(f"page_tables[{g}] (V)", buffers.page_tables[g][:, 1].to_host(), np.where(pages < 0, -1, pages + group.num_pages))
        mapped.append(int(np.count_nonzero(pages >= 0)))
        pools.append(_figures(ledger, g, cache))
    return AuditReport(int(ledger.live.sum()), int(ledger.hi.sum()), tuple(pools), tuple(mapped))


def _check_host(ledger: RowLedger, cache: PrefixCache | None) -> None:
    """Check that every page has one owner or only readers, and that rows hold what their lengths need."""
    full = ledger.plan.groups[0]
    held = [ledger.pages[row, : ledger.leased[row]] for row in np.flatnonzero(ledger.live)]
    if cache is not None:
        cache.audit()
        if cache.store.full is not None:
            held.append(np.flatnonzero(cache.store.full.kept).astype(np.int32))
    ledger.pool.check(np.concatenate(held) if held else np.zeros(0, np.int32))
    check_shared(ledger)
    if not full.is_empty and np.any(ledger.leased * full.page_tokens < ledger.hi):
        raise InvariantError("a row is longer than the pages it holds")
    for g, group in enumerate(ledger.plan.groups):
        if not np.array_equal(np.sort(ledger.rings[g], axis=None), np.arange(group.ring * len(ledger.live))):
            raise InvariantError(f"rings of group {g} do not hold every window page once")


def _figures(ledger: RowLedger, g: int, cache: PrefixCache | None) -> PoolFigures:
    group = ledger.plan.groups[g]
    if group.window.is_full:
        figures = ledger.pool.figures()
        classes = None if cache is None else cache.classes()
        if classes is not None:
            figures = PoolFigures(
                classes.free,
                classes.owned,
                figures.reserved,
                figures.peak_owned,
                classes.shared,
                classes.cached,
                classes.leased,
            )
    else:
        owned = int(ledger.live.sum()) * group.ring
        cached = 0 if cache is None else cache.store.windows[g - 1].num_kept
        free = group.usable_pages + group.kept_pages - owned - cached
        figures = PoolFigures(free, owned, RESERVED_PAGES, ledger.peak_rows * group.ring, cached=cached)
    if figures.total != group.num_pages:
        raise InvariantError(f"group {g}: {figures} sum to {figures.total}, the pool has {group.num_pages} pages")
    return figures


def _full_tables(ledger: RowLedger) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    group = ledger.plan.groups[0]
    blocks = np.full((len(ledger.live), group.table_width), group.null_page, np.int32)
    pages = np.full_like(blocks, -1)
    if not group.is_empty:
        held = np.arange(ledger.pages.shape[1]) < ledger.leased[:, None]
        blocks[:, : ledger.pages.shape[1]][held] = ledger.pages[held]
        pages[:, : ledger.pages.shape[1]][held] = ledger.pages[held]
    return blocks, pages


def _window_tables(ledger: RowLedger, g: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    group = ledger.plan.groups[g]
    columns = np.arange(group.table_width)
    blocks = ledger.rings[g][:, columns % group.ring]
    blocks[~ledger.live] = group.null_page
    end = -(-ledger.hi // group.page_tokens)
    is_mapped = (columns >= ledger.mapped_begin[g][:, None]) & (columns < end[:, None])
    return blocks, np.where(is_mapped, blocks, -1).astype(np.int32)


def _same(name: str, found: NDArray[np.int32], expected: NDArray[np.int64] | NDArray[np.int32]) -> None:
    if not np.array_equal(found, expected):
        place = tuple(int(i) for i in np.argwhere(found != expected)[0])
        raise InvariantError(
            f"{name}{list(place)}: the device holds {int(found[place])}, the host expects {int(expected[place])}"
        )
