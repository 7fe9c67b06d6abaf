"""PageNeeds: which pages of the full group a step, or a run of them, needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import CapacityError
from numba_kv.kernels.row_growth import find_needs, least_steps
from numba_kv.ledger.leases import LeasePlan, find_leases, plan_leases

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.ledger.rows import RowLedger

__all__ = ["PageNeeds"]


class PageNeeds:
    """Decides for one ledger. Plans where the pool has enough are compiled; the rest is `ledger/leases.py`.

    Parameters
    ----------
    ledger : RowLedger
        Read, and changed by nothing here but that kept pages are let go where `plan` needs them.

    Attributes
    ----------
    page_tokens : int
        P of the full group; 0 if the model has no full-attention layer.
    targets : int64 [B]
        Pages that each row should hold, by the last `find` that found enough.
    """

    def __init__(self, ledger: RowLedger) -> None:
        full, config = ledger.plan.groups[0], ledger.plan.config
        self.page_tokens = 0 if full.is_empty else full.page_tokens
        self.targets = np.zeros(config.max_batch_size, np.int64)
        self._ledger = ledger
        self._row_pages = full.row_pages
        self._ahead = config.lookahead_pages
        self._capacity = config.max_kv_cache_capacity

    def find(self, tokens: NDArray[np.int64]) -> tuple[int, int, int]:
        """Return what rows lack so that each can append its `tokens`, and how they grow.

        Returns
        -------
        missing, grown, rows : int
            Pages that are missing; pages by which rows grow if so many are free, else 0; rows that grow.
        """
        if not self.page_tokens:
            return 0, 0, 0
        ledger = self._ledger
        free = ledger.pool.free_pages
        found: tuple[int, int, int] = find_needs(
            tokens, ledger.live, ledger.numbers, self.page_tokens, self._row_pages, self._ahead, free, self.targets
        )
        return found

    def plan(self, tokens: NDArray[np.int64]) -> LeasePlan | None:
        """Return how pages move so that rows can append `tokens`; None if they need not.

        Raises
        ------
        CapacityError
            See `find_leases`.
        """
        missing, grown, _ = self.find(tokens)
        if not missing:
            return None
        if not grown:
            return find_leases(self._ledger, tokens)
        return LeasePlan(np.flatnonzero(self.targets != self._ledger.leased), self.targets.copy())

    def check(self, tokens: NDArray[np.int64]) -> None:
        """Raise CapacityError if rows and pool have too few pages for `tokens`; let kept ones go if they are wanted."""
        missing, grown, _ = self.find(tokens)
        if missing and not grown:
            find_leases(self._ledger, tokens)

    def is_short(self, tokens: NDArray[np.int64]) -> bool:
        """Return whether rows and pool have too few pages for `tokens`, kept ones included."""
        missing, grown, _ = self.find(tokens)
        if not missing or grown:
            return False
        try:
            plan_leases(self._ledger, tokens)
        except CapacityError as error:
            kept = self._ledger.kept
            return kept is None or not kept.can_free(error.needed - error.free - error.evictable)
        return False

    def fitting(self, counts: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
        """Return the tokens of `steps` steps of `counts` tokens, at most what fits the rows."""
        room = np.maximum(self._capacity - self._ledger.hi, 0)
        tokens: NDArray[np.int64] = np.minimum(counts * steps, room // np.maximum(counts, 1) * counts)
        return tokens

    def steps_left(self, counts: NDArray[np.int64]) -> int:
        """Return the steps of `counts` tokens that every row can take without a new page."""
        return int(least_steps(counts, self._ledger.numbers, self._capacity, self.page_tokens))
