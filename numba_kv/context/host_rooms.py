"""How page-locked memory is divided among what a model keeps. Pure."""

from __future__ import annotations

from numba_kv.cache.host_pages import HostRooms
from numba_kv.config.state_layout import slot_nbytes
from numba_kv.errors import ConfigError
from numba_kv.plan import MemoryPlan

__all__ = ["host_rooms"]


def host_rooms(plan: MemoryPlan, nbytes: int) -> HostRooms:
    """Return of how many pages and snapshots there is room in `nbytes`, in the proportions that they have on the device.

    Raises
    ------
    ConfigError
        If it is too little for one of each.
    """
    state = slot_nbytes(plan.config)
    sizes = [group.page_nbytes for group in plan.groups] + [state]
    counts = [group.kept_pages if group.index else group.usable_pages for group in plan.groups]
    counts.append(plan.config.kept_states if state else 0)
    total = sum(size * count for size, count in zip(sizes, counts, strict=True))
    rooms = [nbytes * count // total if size else 0 for size, count in zip(sizes, counts, strict=True)] if total else []
    if not all(room for room, size, count in zip(rooms, sizes, counts, strict=False) if size and count):
        least = max(-(-total // count) for size, count in zip(sizes, counts, strict=True) if size and count)
        raise ConfigError(f"host_bytes: {nbytes} are too few for a page of each group; at least {least} are wanted")
    return HostRooms(tuple(rooms[:-1]), rooms[-1])
