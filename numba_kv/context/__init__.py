"""Prefix reuse on a model's own resources: whose context it is, and what is asked for.

Decisions are made in `numba_kv.ledger.reuse`.
"""

from numba_kv.context.engine_identity import engine_identity, row_identity
from numba_kv.context.options import ReuseOptions

__all__ = ["ReuseOptions", "engine_identity", "row_identity"]
