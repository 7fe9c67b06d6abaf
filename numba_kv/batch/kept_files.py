"""Kept prefixes to a file and back: their bytes, between file, host and device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.batch.kept_host import state_slots
from numba_kv.cache.host_pages import HostPages, HostRooms
from numba_kv.config.state_layout import slot_nbytes
from numba_kv.context.prefix_file import PrefixFile, read_prefixes, write_prefixes
from numba_kv.ledger.reuse.cargo import Cargo, Moved, settled, stow
from numba_kv.ledger.reuse.groups import SNAPSHOTS
from numba_kv.ledger.reuse.host_picture import HOST
from numba_kv.ledger.reuse.prefix_image import gather

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.stepper import Stepper
    from numba_kv.cache.kv_cache import KVCacheManager
    from numba_kv.device import Memory
    from numba_kv.ledger.reuse.identity import ContextIdentity
    from numba_kv.ledger.reuse.prefix_cache import PrefixCache
    from numba_kv.ledger.reuse.store import KeptStore
    from numba_kv.plan import MemoryPlan

__all__ = ["KeptFiles"]

#: Page-locked bytes through which pages of the device go to a file and come from one.
_STAGING_NBYTES = 64 << 20


class KeptFiles:
    """Saves and loads what a batch keeps. Owns nothing; page-locked memory is taken for as long as a call runs.

    Parameters
    ----------
    cache : PrefixCache
        What is kept.
    engine : ContextIdentity
        What computes it.
    stepper : Stepper
        Of the batch.
    pools : KVCacheManager
        The device's pages.
    kept_states : Memory or None
        The device's snapshots.
    """

    def __init__(
        self, cache: PrefixCache, engine: ContextIdentity, stepper: Stepper, pools: KVCacheManager, kept_states: Memory | None
    ) -> None:
        self._cache = cache
        self._engine = engine
        self._stepper = stepper
        self._pools = pools
        self._states = state_slots(stepper, kept_states)
        self._layout, self._sizes = _layout(stepper.plan)

    def collect(self, host: HostPages | None) -> PrefixFile:
        """Return what is kept on the device and in `host`.

        Raises
        ------
        CapacityError
            If the host has not enough memory.

        Stream: enqueues copies and waits. Cost: host memory for all of it.
        """
        lower = self._cache.store.lower
        stores = [self._cache.store, *([] if lower is None else [lower.store])]
        image, pairs = gather(self._cache.groups, stores)
        none = np.zeros((0, 2), np.int32)
        found = {line: np.empty((len(pairs.get(line, none)), nbytes), np.uint8) for line, nbytes in self._sizes.items()}
        with self._staging({line: len(rows) for line, rows in found.items()}) as (pages, sizes):
            self._stepper.start_work()
            for line, rows in found.items():
                mine = pairs.get(line, none)
                there = mine[:, 0] >= HOST
                if host is not None and there.any():
                    rows[mine[there, 1]] = host.read(line, mine[there, 0] - np.int32(HOST))
                for part in _parts(mine[~there], sizes[line]):
                    slots = np.arange(len(part), dtype=np.int32)
                    pages.move(line, np.stack([part[:, 0], slots], axis=1), out=True)
                    rows[part[:, 1]] = pages.read(line, slots)
        return PrefixFile(image, found)

    def write(self, path: str | os.PathLike[str], found: PrefixFile) -> None:
        """Write a file; see `write_prefixes`."""
        write_prefixes(path, found, self._engine, self._layout)

    def read(self, path: str | os.PathLike[str]) -> PrefixFile:
        """Read a file; see `read_prefixes`."""
        return read_prefixes(path, self._engine, self._layout, self._cache.groups)

    def keep(self, found: PrefixFile, host: HostPages | None) -> int:
        """Keep what a file holds, in `host` if there is one, else on the device, as far as there is room.

        Returns how many blocks of it are there now.

        Raises
        ------
        CapacityError
            If the host has not enough memory for the copies.

        Stream: enqueues copies and waits.
        """
        lower = self._cache.store.lower
        store = self._cache.store if host is None or lower is None else lower.store
        with self._staging({line: 0 if host is not None else len(rows) for line, rows in found.rows.items()}) as (pages, sizes):
            self._stepper.start_copies()
            moved: list[Moved] = []
            for cargo in found.image.cargoes():
                fitting = cargo if host is not None else self._fitting(cargo)
                if fitting is not None:
                    moved += stow(store, fitting, self._cache.limits.max_blocks)
            for line, mine in settled(moved).items():
                if host is not None:
                    host.write(line, mine[:, 1], found.rows[line][mine[:, 0]])
                    continue
                for part in _parts(mine, sizes[line]):
                    slots = np.arange(len(part), dtype=np.int32)
                    pages.write(line, slots, found.rows[line][part[:, 0]])
                    pages.move(line, np.stack([slots, part[:, 1]], axis=1), out=False)
        return sum(self._held(store, cargo) for cargo in found.image.cargoes() if cargo.tail is None)

    @staticmethod
    def _held(store: KeptStore, cargo: Cargo) -> int:
        """Return how many blocks of a cargo a store has."""
        path = store.tree.match(cargo.identity, cargo.content, cargo.stop * cargo.content.page_tokens)
        return max(0, path.blocks - cargo.start)

    def _fitting(self, cargo: Cargo) -> Cargo | None:
        """Return the blocks of a cargo for which pages of the device are free; None if what is before them is not there."""
        store = self._cache.store
        path = store.tree.match(cargo.identity, cargo.content, cargo.stop * cargo.content.page_tokens)
        if path.blocks < cargo.start:
            return None
        full, most = store.full, self._cache.limits.max_blocks
        room = cargo.stop - path.blocks
        if full is not None:
            room = min(room, full.pool.free_pages)
        if most is not None:
            room = min(room, most - store.tree.num_blocks)
        stop = max(cargo.start, path.blocks + max(0, room))
        tail = cargo.tail if stop == cargo.stop else None
        return replace(cargo, lines=cargo.lines[:, : stop - cargo.start], tail=tail)

    @contextmanager
    def _staging(self, counts: dict[int, int]) -> Iterator[tuple[HostPages, dict[int, int]]]:
        """Open page-locked room for `counts` pages and snapshots of each line, or for fewer at a time; also yields how many."""
        sizes = {line: min(counts[line], max(1, _STAGING_NBYTES // max(1, nbytes))) for line, nbytes in self._sizes.items()}
        rooms = HostRooms(tuple(sizes[group.index] for group in self._stepper.plan.groups), sizes[SNAPSHOTS])
        pages = HostPages(self._stepper.device, self._pools, rooms, self._states)
        try:
            yield pages, sizes
        finally:
            pages.close()


def _parts(pairs: NDArray[np.int32], size: int) -> Iterator[NDArray[np.int32]]:
    """Yield `size` pairs at a time."""
    for first in range(0, len(pairs), max(1, size)):
        yield pairs[first : first + size]


def _layout(plan: MemoryPlan) -> tuple[list[Any], dict[int, int]]:
    """Return what pages are, for comparison, and the bytes of one of each line."""
    sizes = {group.index: group.page_nbytes for group in plan.groups}
    sizes[SNAPSHOTS] = slot_nbytes(plan.config)
    groups = [[group.window.kind, group.window.tokens, group.kv_layout] for group in plan.groups]
    return [groups, list(sizes.values())], sizes
