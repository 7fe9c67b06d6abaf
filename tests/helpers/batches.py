"""Batches of small models, and everything that can be seen of one at a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import numba_kv as kv

_STATE = (
    "lengths",
    "high_water",
    "appended",
    "floors",
    "leased",
    "status",
    "mapped_begin",
    "seq_lens",
    "context_lens",
    "cu_seqlens_q",
)


@contextmanager
def opened(config: kv.LLMEngineConfig, target: str | None = None) -> Iterator[kv.Batch]:
    """Open the resources of a model and a batch on them; everything has been given back afterwards."""
    resources = kv.SharedResources.create_for_llm(config, target=target)
    try:
        yield kv.Batch(resources)
    finally:
        resources.close()
    assert resources.device.memory.current_bytes == 0


def metadata(batch: kv.Batch) -> dict[str, np.ndarray]:
    """Return every device array of a batch's steps by name."""
    buffers = batch.resources.cache_managers[0].step_buffers
    found = {name: getattr(buffers, name).to_host() for name in (*_STATE, "positions")}
    for kind in ("page_tables", "block_tables", "slot_mapping", "carry_slots"):
        for g, tensor in enumerate(getattr(buffers, kind)):
            if tensor is not None:
                found[f"{kind}[{g}]"] = tensor.to_host()
    return found


def everything(batch: kv.Batch) -> dict[str, Any]:
    """Return all that a caller can see of a batch: device arrays, figures, sequences, and that it audits."""
    sequences = [(s, s.row, s.generation, s.length, s.pending_tokens, s.state) for s in batch.sequences]
    return {
        **metadata(batch),
        "stats": vars(batch.stats),
        "report": batch.audit(),
        "sequences": sequences,
        "free": (batch.free_rows, batch.free_pages),
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that two of these are equal, bit by bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype, name
            assert np.array_equal(found[name], value), f"{name}: {found[name].tolist()} found, {value.tolist()} expected"
        else:
            assert found[name] == value, name


def mapped(batch: kv.Batch, sequence: kv.Sequence, g: int) -> list[int]:
    """Return the logical pages that a sequence's row has in the page table of group `g`."""
    table = batch.resources.cache_managers[0].step_buffers.page_tables[g].to_host()
    return np.flatnonzero(table[sequence.row, 0] >= 0).tolist()


def pages_of(batch: kv.Batch, sequence: kv.Sequence, g: int) -> list[int]:
    """Return the page ids that a sequence's row has in the page table of group `g`."""
    table = batch.resources.cache_managers[0].step_buffers.page_tables[g].to_host()[sequence.row, 0]
    return table[table >= 0].tolist()
