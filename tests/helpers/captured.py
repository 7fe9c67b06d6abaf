"""What tests of captured steps start from: a model whose windows rotate often, and a batch beside its naive model."""

from __future__ import annotations

from typing import Any

import numba_kv as kv
from tests.helpers.models import chunked, tiny_config
from tests.helpers.naive_batch import NaiveBatch

ROWS = 4
PROMPTS = [5, 40, 1, 17]


def model(**limits: Any) -> kv.LLMEngineConfig:
    """Return a model with a full, a sliding and a chunked group: 4 rows of 640 tokens, pages of 4."""
    return tiny_config(
        None, 10, chunked(24), **{"max_batch_size": ROWS, "max_kv_cache_capacity": 640, "max_batch_tokens": 64, **limits}
    )


def prefilled(resources: kv.SharedResources, prompts: list[int]) -> tuple[kv.Batch, NaiveBatch, list[kv.Sequence]]:
    """Open a batch with its model and append the prompts."""
    batch = kv.Batch(resources)
    naive = NaiveBatch(batch)
    return batch, naive, admitted(batch, naive, prompts)


def admitted(batch: kv.Batch, naive: NaiveBatch, prompts: list[int]) -> list[kv.Sequence]:
    """Admit sequences and append their prompts, one after the other."""
    sequences = batch.update(admit=prompts)
    naive.admitted(sequences)
    for sequence in sequences:
        counts = {sequence: sequence.pending_tokens}
        naive.stepped(batch.step(counts), counts)
    return sequences


def addresses(batch: kv.Batch) -> list[int]:
    """Return where every device array of a batch is."""
    return [getattr(t, "address", 0) for t in vars(batch._buffers).values()]
