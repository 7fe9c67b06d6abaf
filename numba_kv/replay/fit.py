"""How many rows a budget would hold.

Knows only how to ask the planner. Every row is counted at full capacity, window rings and tables included.
"""

from __future__ import annotations

from dataclasses import replace

from numba_kv.config import LLMEngineConfig
from numba_kv.errors import PlanError
from numba_kv.plan import plan_memory

__all__ = ["most_rows"]

_MOST = 1 << 20


def most_rows(config: LLMEngineConfig, memory_bytes: int) -> int:
    """Return the largest `max_batch_size` with which every row has its full capacity within `memory_bytes`; 0 if none has.

    Never above 2^20.
    """

    def fits(rows: int) -> bool:
        tokens = max(config.max_batch_tokens, rows)
        try:
            # Without a budget the planner gives every row its full length.
            plan = plan_memory(replace(config, max_batch_size=rows, max_batch_tokens=tokens, num_kv_pages=None))
        except PlanError:  # more pages than page ids
            return False
        return plan.nbytes <= memory_bytes

    low, high = 0, 1
    while high <= _MOST and fits(high):
        low, high = high, 2 * high
    high = min(high, _MOST + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
