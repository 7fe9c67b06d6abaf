"""Prefix reuse on a model's own resources: whose context it is. Decisions are made in `numba_kv.ledger.reuse`."""

from numba_kv.context.engine_identity import engine_identity, row_identity

__all__ = ["engine_identity", "row_identity"]
