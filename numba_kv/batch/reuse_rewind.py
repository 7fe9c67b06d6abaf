"""Rewinds into pages that others hold too: the row gets pages of its own for what it will write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from numba_kv.ledger.sharing import shared_pages

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.batch.placement import RowPlacement
    from numba_kv.batch.stepper import Stepper

__all__ = ["unshare"]


def unshare(stepper: Stepper, placement: RowPlacement, targets: Mapping[int, int]) -> None:
    """Prepare rows to be rewound to so many tokens, where these end before or in pages that others hold too.

    Of a page that is used in part, the row gets a copy; the others keep theirs.

    Raises
    ------
    CapacityError
        If there are too few pages for the copies; nothing was changed.

    Stream: enqueues one copy and one kernel for page ids, for floors, and for each slab.
    """
    ledger, page = stepper.ledger, stepper.plan.config.page_tokens
    rows = {row: target for row, target in targets.items() if 0 < target < shared_pages(ledger, row) * page}
    if not rows:
        return
    stepper.check_can_change()
    fresh = sum(target % page > 0 for target in rows.values())
    placement.make_room(fresh, "a rewind into shared pages")
    pairs: list[tuple[int, int]] = []
    given_up: list[NDArray[np.int32]] = []
    floors: dict[int, int] = {}
    maps: dict[int, tuple[int, NDArray[np.int32]]] = {}
    for row, target in rows.items():
        keep, rest = divmod(target, page)
        old = ledger.pages[row, keep : ledger.leased[row]].copy()
        own = ledger.pool.acquire(int(rest > 0))
        floors[row] = max(keep * page, int(ledger.base[row]))
        maps[row] = keep, own
        pairs += zip(old[:1].tolist(), own.tolist(), strict=False)
        given_up.append(old)
    placement.map_pages(maps)
    for old in given_up:  # only now: none of them becomes another row's copy
        ledger.pool.drop(old)
    stepper.set_floors(floors)
    if pairs:
        placement.copy(0, pairs)
