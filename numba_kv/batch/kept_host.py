"""What a batch keeps on the host: joins the host tier's decisions to copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.cache.host_pages import HostPages, StateSlots
from numba_kv.config.state_layout import slot_nbytes
from numba_kv.context.host_rooms import host_rooms
from numba_kv.ledger.reuse.host_tier import HostTier

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.batch.stepper import Stepper
    from numba_kv.cache.kv_cache import KVCacheManager
    from numba_kv.context.options import ReuseOptions
    from numba_kv.device import Memory
    from numba_kv.ledger.reuse.prefix_cache import PrefixCache

__all__ = ["KeptMoves", "open_host", "state_slots"]


class KeptMoves:
    """Enqueues the copies of a host tier and counts them. Borrows the pages."""

    def __init__(self, stepper: Stepper, pages: HostPages) -> None:
        self._stepper = stepper
        self._pages = pages

    def move(self, line: int, pairs: NDArray[np.int32], *, out: bool) -> None:
        """Copy pages or snapshots; see `TierMoves`. Stream: enqueues one copy and one kernel for each slab."""
        self._stepper.start_copies()
        stats = self._stepper.stats
        stats.launches += self._pages.move(line, pairs, out=out)
        nbytes = len(pairs) * self._pages.id_nbytes(line)
        stats.kept_out_bytes += nbytes * out
        stats.kept_in_bytes += nbytes * (not out)


def state_slots(stepper: Stepper, kept_states: Memory | None) -> StateSlots | None:
    """Return where snapshots of states are on the device; None if the model has none."""
    if kept_states is None:
        return None
    config = stepper.plan.config
    return StateSlots(kept_states, slot_nbytes(config), config.kept_states)


def open_host(
    cache: PrefixCache, options: ReuseOptions, stepper: Stepper, pools: KVCacheManager, kept_states: Memory | None
) -> HostPages:
    """Give a cache a host tier; return its memory, which the caller closes.

    Raises
    ------
    ConfigError
        If the memory is too little for a page of each group.
    CapacityError
        If the host has not that much.
    """
    rooms = host_rooms(stepper.plan, options.host_bytes)
    pages = HostPages(stepper.device, pools, rooms, state_slots(stepper, kept_states))
    cache.store.lower = HostTier(
        cache.groups,
        pages=rooms.pages[0],
        window_slots=rooms.pages[1:],
        snapshot_slots=rooms.states,
        moves=KeptMoves(stepper, pages),
        naming=options.naming,
        on_event=options.on_event,
    )
    return pages
