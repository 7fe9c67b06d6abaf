"""Does one thing after another to a batch that reuses, at random; small models of every kind to do it to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import numba_kv as kv
from numba_kv.context.options import ReuseOptions
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import CacheLimits
from tests.helpers.kv_model import opened_io
from tests.helpers.models import chunked, tiny_config
from tests.helpers.reuse_model import ReuseModel
from tests.helpers.states import delta_net, mamba2, recurrent_config, short_conv

POLICIES = [
    PublishPolicy(),
    PublishPolicy(publish="all"),
    PublishPolicy(publish="all", tails=True, every_blocks=1),
    PublishPolicy(tails=True, every_blocks=2),
    PublishPolicy(publish="none"),
    PublishPolicy(reuse=False),
]


@contextmanager
def opened_model(config: kv.LLMEngineConfig, limits: CacheLimits, **more: Any) -> Iterator[tuple[kv.Batch, kv.KVIO | None]]:
    """Open a batch that reuses, and what reads and writes its pools, if it has any."""
    options = ReuseOptions(limits=limits, **more)
    if config.layers:
        with opened_io(config, reuse=options) as opened:
            yield opened
        return
    with kv.SharedResources.create_for_llm(config) as resources:
        yield kv.Batch(resources, reuse=options), None


class Driver:
    """Does one thing after another to a batch, and counts."""

    def __init__(self, model: ReuseModel, seed: int) -> None:
        self.model = model
        self.random = np.random.default_rng(seed)
        self.stems = [self.random.integers(0, 3, 40).tolist() for _ in range(3)]
        self.waiting: list[kv.SwappedSequence] = []
        self.refused = self.rewinds = self.too_far = 0

    def act(self) -> None:
        batch, choice, sequences = self.model.batch, self.random.random(), self.model.batch.sequences
        if not sequences or (choice < 0.3 and batch.free_rows):
            self.admit()
            return
        sequence = sequences[int(self.random.integers(len(sequences)))]
        if choice < 0.36 and batch.free_rows:
            self.fork(sequence)
        elif choice < 0.45 or sequence.length > 40:
            self.model.retire(sequence)
        elif choice < 0.57:
            self.rewind(sequence)
        elif choice < 0.6:
            batch.compact()
        elif choice < 0.65:
            self.reorder(sequences)
        elif choice < 0.7:
            self.swap(sequence)
        else:
            self.step(sequences)

    def admit(self) -> None:
        if self.model.batch.free_rows:
            prompt = self.prompt()
            self.model.admit(prompt.tokens, salt=prompt.salt, policy=prompt.policy)

    def prompt(self) -> kv.Prompt:
        stem = self.stems[int(self.random.integers(3))]
        tokens = stem[: int(self.random.integers(1, 30))] + self.random.integers(0, 3, int(self.random.integers(0, 5))).tolist()
        salt = [None, None, b"one"][int(self.random.integers(3))]
        return kv.Prompt(tokens, POLICIES[int(self.random.integers(len(POLICIES)))], salt)

    def fork(self, sequence: kv.Sequence) -> None:
        try:
            self.model.fork(sequence)
        except kv.CapacityError:
            self.refused += 1

    def rewind(self, sequence: kv.Sequence) -> None:
        if not sequence.length:
            return
        count = int(self.random.integers(1, min(6, sequence.length) + 1))
        if self.random.random() < 0.1:
            count = sequence.length
        try:
            self.model.rewind(sequence, count)
            self.rewinds += 1
        except kv.RewindTooFar:
            self.too_far += 1
        except kv.CapacityError:
            self.refused += 1

    def reorder(self, sequences: list[kv.Sequence]) -> None:
        parents = {s: sequences[int(self.random.integers(len(sequences)))] for s in sequences}
        try:
            self.model.batch.reorder(parents)
        except kv.CapacityError:
            self.refused += 1
            return
        before = {s: (self.model.told[s], self.model.ids[s], self.model.owner[s], s in self.model.rewound) for s in sequences}
        for heir, parent in parents.items():
            told, ids, owner, rewound = before[parent]
            self.model.told[heir] = {layer: list(cells) for layer, cells in told.items()}
            self.model.ids[heir], self.model.owner[heir] = list(ids), owner
            (self.model.rewound.add if rewound else self.model.rewound.discard)(heir)

    def swap(self, sequence: kv.Sequence) -> None:
        batch = self.model.batch
        if not self.waiting:
            swapped = batch.swap_out(sequence)
            self.model.move(sequence, swapped)
            self.waiting.append(swapped)
        elif batch.free_rows:
            try:
                back = batch.swap_in(self.waiting[0])
            except kv.CapacityError:
                self.refused += 1
                return
            self.model.move(self.waiting.pop(), back)

    def step(self, sequences: list[kv.Sequence]) -> None:
        counts = {}
        for sequence in sequences:
            limit = int(self.random.integers(1, 12))
            counts[sequence] = self.model.batch.prefill_chunk(sequence, limit) or int(self.random.integers(1, 3))
        try:
            self.model.step(counts)
        except kv.CapacityError:
            self.refused += 1
            self.model.retire(sequences[int(self.random.integers(len(sequences)))])


LIMITS = {"max_batch_size": 4, "lookahead_pages": 1, "kv_cache_dtype": "float32", "max_batch_tokens": 64}
MORE = WINDOWS = {"kept_window_pages": 20, **LIMITS}
SHORT = {"num_kv_pages": 30, **LIMITS}
FLOAT_STATES = {"recurrent_state_dtype": "float32", "conv_state_dtype": "float32"}
MODELS: dict[str, tuple[kv.LLMEngineConfig, CacheLimits]] = {
    "full": (
        tiny_config(None, None, heads=[(1, 4), (2, 8)], num_kv_pages=30, max_step_tokens=3, **LIMITS),
        CacheLimits(),
    ),
    "few blocks": (tiny_config(None, heads=(1, 4), page_tokens=2, num_kv_pages=48, **LIMITS), CacheLimits(max_blocks=9)),
    "whole pages": (tiny_config(None, heads=(1, 4), page_tokens=8, num_kv_pages=12, **LIMITS), CacheLimits(whole_pages=True)),
    "windows": (
        tiny_config(None, 6, chunked(8), 6, heads=[(1, 4), (1, 8), (2, 4), (1, 4)], num_kv_pages=30, max_step_tokens=3, **MORE),
        CacheLimits(),
    ),
    "small pages": (tiny_config(None, 5, heads=(1, 4), page_tokens=1, num_kv_pages=100, **WINDOWS), CacheLimits()),
    "windows alone": (tiny_config(6, chunked(5), heads=(1, 4), max_step_tokens=2, **WINDOWS), CacheLimits(max_blocks=30)),
    "states": (
        recurrent_config(mamba2(**FLOAT_STATES), types=("both", "recurrent"), num_kv_pages=30, kept_states=5, **LIMITS),
        CacheLimits(),
    ),
    "convolutions": (
        recurrent_config(short_conv(conv_state_dtype="float32"), types=("both", "recurrent"), kept_states=5, **SHORT),
        CacheLimits(),
    ),
    "states alone": (
        recurrent_config(delta_net(**FLOAT_STATES), types=("recurrent",) * 2, kept_states=9, **LIMITS),
        CacheLimits(max_blocks=40),
    ),
}
