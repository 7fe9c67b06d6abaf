"""Sequences that share a model's caches, and what one forward pass over them reads."""

from __future__ import annotations

from numba_kv.batch.audit import AuditReport
from numba_kv.batch.batch import Batch
from numba_kv.batch.capture import CapturedStep
from numba_kv.batch.captured_round import CapturedRound, RoundSteps
from numba_kv.batch.prompt import Prompt
from numba_kv.batch.reuse_together import update_together
from numba_kv.batch.sequence import Sequence
from numba_kv.batch.snapshot import KVSnapshot
from numba_kv.batch.speculative import SpeculativeBatch
from numba_kv.batch.stats import BatchStats
from numba_kv.batch.step_rope import StepRope
from numba_kv.batch.swapped import SwappedSequence
from numba_kv.batch.view import StepView

__all__ = [
    "AuditReport",
    "Batch",
    "BatchStats",
    "CapturedRound",
    "CapturedStep",
    "KVSnapshot",
    "Prompt",
    "RoundSteps",
    "Sequence",
    "SpeculativeBatch",
    "StepRope",
    "StepView",
    "SwappedSequence",
    "update_together",
]
