"""BatchRoom: what still fits into a Batch."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING

from numba_kv.batch.arguments import integer
from numba_kv.device.unique import Unique
from numba_kv.errors import CapacityError, InputError
from numba_kv.geometry import ceil_div

if TYPE_CHECKING:
    from numba_kv.batch.reuse import BatchReuse
    from numba_kv.batch.stepper import Stepper
    from numba_kv.device.guard import CallGuard
    from numba_kv.plan import MemoryPlan

__all__ = ["BatchRoom"]


class BatchRoom(Unique, ABC):
    """Part of Batch: free rows and pages."""

    plan: MemoryPlan
    guard: CallGuard
    stepper: Stepper
    reuse: BatchReuse | None = None

    @property
    def free_rows(self) -> int:
        """Rows without a sequence."""
        self.guard.check_open()
        return self.stepper.ledger.free_rows

    @property
    def free_pages(self) -> int:
        """Pages of the full-attention pool that nobody holds."""
        self.guard.check_open()
        return self.stepper.ledger.pool.free_pages

    @property
    def evictable_pages(self) -> int:
        """Pages of the full-attention pool that are kept for reuse and that no row reads: they go where pages are wanted.

        Cost: O(pages), vectorised, if anything is kept.
        """
        self.guard.check_open()
        kept = self.stepper.ledger.kept
        return 0 if kept is None else kept.evictable

    def can_admit(self, num_tokens: int = 1) -> bool:
        """Return whether a row is free and the pool holds a prompt of `num_tokens` now."""
        self.guard.check_open()
        number = integer(num_tokens)
        if number is None or number < 1:
            raise InputError(f"num_tokens: {num_tokens!r} is not a positive integer")
        full = self.plan.groups[0]
        if number > self.plan.config.max_kv_cache_capacity or not self.free_rows:
            return False
        missing = 0 if full.is_empty else ceil_div(number, full.page_tokens) - self.free_pages
        kept = self.stepper.ledger.kept
        return missing <= 0 or (kept is not None and kept.can_free(missing))

    def _check_rows(self, wanted: int, leaving: int = 0) -> None:
        """Raise CapacityError if `wanted` sequences have no row when `leaving` have left theirs."""
        free = self.stepper.ledger.free_rows + leaving
        if wanted > free:
            raise CapacityError(
                f"rows: {wanted} sequences are to be admitted, {free} of {self.plan.config.max_batch_size} rows are free; "
                "retire some or plan with a larger max_batch_size",
                needed=wanted,
                free=free,
            )
