"""A batch whose tokens have K and V: written into pages at every step, remembered, and attended in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import numba_kv as kv
from numba_kv.dtypes import dtype
from tests.helpers.attention import attention
from tests.helpers.kv_pools import converted

#: Query heads of a KV head.
GROUP = 2


class WrittenBatch:
    """Every layer's K and V of every sequence, as the pools hold them.

    `counts` are the tokens that the last step's sequences appended.
    """

    def __init__(self, resources: kv.SharedResources, scales: tuple[Any, Any] | None = None, seed: int = 0) -> None:
        self.resources = resources
        self.caches = resources.cache_managers[0]
        self.batch = kv.Batch(resources)
        self.io = kv.KVIO(self.caches)
        self.config = resources.plan.config
        self.random = np.random.default_rng(seed)
        self.scales = scales
        self.counts: dict[kv.Sequence, int] = {}
        self._held: dict[kv.Sequence, list[list[tuple[np.ndarray, np.ndarray]]]] = {}
        if scales is not None:
            for layer in self._owners():
                self.io.set_scales(layer, *scales)

    def _owners(self) -> list[int]:
        return [i for i, layer in enumerate(self.config.layers) if layer.owns_kv]

    def step(self, counts: dict[kv.Sequence, int], accepted: dict[kv.Sequence, int] | None = None) -> kv.StepView:
        """Append tokens and write their K and V; of those of the last step the device keeps `accepted`, and tells nobody."""
        driven = None
        if accepted is not None:
            driven = self.resources.device.tensor((self.config.max_batch_size,), dtype("int32"))
            kept = np.zeros(driven.shape, np.int32)
            for sequence, count in accepted.items():
                kept[sequence.row] = count
                for rows in self._held[sequence]:
                    del rows[len(rows) - self.counts[sequence] + count :]
            driven.fill_from(kept)
        view = self.batch.step(counts, accepted=driven)
        self.counts = dict(sorted(counts.items(), key=lambda item: item[0].row))
        kind = self.config.kv_cache_dtype
        for layer in self._owners():
            storage = self.caches.storage(layer)
            shape = (view.num_tokens, storage.num_kv_heads, storage.head_dim)
            given = [self.random.normal(size=shape).astype(np.float32) for _ in range(2)]
            tensors = [self.resources.device.tensor(shape, dtype("float32")) for _ in range(2)]
            for tensor, values in zip(tensors, given, strict=True):
                tensor.fill_from(values)
            self.io.write(layer, *tensors, view)
            held = []
            for values, scale in zip(given, self.scales or (None, None), strict=True):
                factor = None if scale is None else np.broadcast_to(np.float32(scale), shape[1])
                stored = converted(values, kind, None if factor is None else np.float32(1) / factor).astype(np.float64)
                held.append(stored if factor is None else stored * factor[:, None])
            at = 0
            for sequence, count in self.counts.items():
                rows = self._held.setdefault(sequence, [[] for _ in range(self.caches.num_layers)])[layer]
                rows += [(held[0][t], held[1][t]) for t in range(at, at + count)]
                at += count
        return view

    def rewind(self, sequence: kv.Sequence, count: int) -> None:
        """Take tokens back."""
        self.batch.rewind({sequence: count})
        for rows in self._held[sequence]:
            del rows[len(rows) - count :]

    def retire(self, sequence: kv.Sequence) -> None:
        """End a sequence."""
        self.batch.retire(sequence)
        del self._held[sequence]

    def queries(self, layer: int, view: kv.StepView) -> np.ndarray:
        """Return random queries [T, Hq, D] for the step's tokens."""
        storage = self.caches.storage(layer)
        return self.random.normal(size=(view.num_tokens, GROUP * storage.num_kv_heads, storage.head_dim))

    def expected(self, layer: int, q: np.ndarray) -> np.ndarray:
        """Return the attention of the last step's queries over all that their rows ever held."""
        window, at = self.caches.storage(layer).window, 0
        out = np.zeros(q.shape)
        for sequence, count in self.counts.items():
            rows = self._held[sequence][self.caches.storage(layer).owner]
            k, v = (np.stack([pair[half] for pair in rows]) for half in (0, 1))
            for i in range(count):
                out[at + i] = attention(q[at + i], k, v, len(rows) - count + i, window)
            at += count
        return out

    def tokens_of(self, sequence: kv.Sequence) -> slice:
        """Return where a sequence's tokens are in the last step."""
        before = 0
        for other, count in self.counts.items():
            if other is sequence:
                return slice(before, before + count)
            before += count
        raise KeyError(sequence)

    def poisoned(self, layer: int, half: int, row: int) -> np.ndarray:
        """Return K or V of a layer with NaN in every page that is not in the row's block table: others', free ones, trash."""
        storage = self.caches.storage(layer)
        pool = self.caches.by_token(layer)[half].to_host()
        own = np.unique(self.caches.step_buffers.block_tables[storage.group].to_host()[row])
        changed = np.full_like(pool, np.nan)
        changed[own] = pool[own]
        null = storage.num_pages - 2
        assert not pool[null].astype(np.float32).any(), "the null page was written"
        changed[null] = 0
        return changed

    def life(self, prompts: list[int], tokens: int, rounds: int) -> Iterator[kv.StepView]:
        """Drive four rows through their life, `tokens` at most a row in short steps; yield each step."""
        a, b, c = self.batch.update(admit=prompts)
        yield self.step({s: s.pending_tokens for s in (a, b)})  # long
        yield self.step({c: c.pending_tokens, b: 1})
        for _ in range(rounds):
            yield self.step({a: tokens, b: 1})  # c appends nothing
        yield self.step({a: 1, b: 1, c: 1})
        self.rewind(a, 1)
        self.rewind(b, 1)
        yield self.step({a: tokens, b: tokens, c: tokens})
        self.retire(a)  # row 0 is a hole
        yield self.step({b: 1, c: 1})
        self.batch.compact()
        yield self.step({b: 1, c: 1})
        (d,) = self.batch.update(admit=[3])
        yield self.step({d: 3, c: 1})
        yield self.step({b: 1, c: 1, d: 1})


@contextmanager
def written(config: kv.LLMEngineConfig, scales: tuple[Any, Any] | None = None) -> Iterator[WrittenBatch]:
    """Open resources, a batch and a KVIO."""
    with kv.SharedResources.create_for_llm(config) as resources:
        batch = WrittenBatch(resources, scales)
        with batch.io, batch.batch:
            yield batch
