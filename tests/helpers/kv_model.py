"""A batch whose K and V are known: what every step wrote, as a list a sequence, whatever is done to the sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

import numba_kv as kv
from numba_kv.cache import KVIO
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from tests.helpers.kv_pools import NUMPY, numbers, same_bits


@contextmanager
def opened_io(config: kv.LLMEngineConfig, **options: object) -> Iterator[tuple[kv.Batch, KVIO]]:
    """Open the resources of a model, a batch with `options` and what reads and writes its pools."""
    resources = kv.SharedResources.create_for_llm(config)
    try:
        with KVIO(resources.cache_managers[0]) as io:
            yield kv.Batch(resources, **options), io
    finally:
        resources.close()
    assert resources.device.pinned.current_bytes == 0


def uploaded(io: KVIO, values: np.ndarray) -> Tensor:
    """Return host values as a tensor on the device."""
    names = {**{value: name for name, value in NUMPY.items()}, np.dtype(np.int32): "int32"}
    tensor = io._device.tensor(values.shape, dtype(names[values.dtype]))
    tensor.fill_from(values)
    return tensor


class KVModel:
    """Writes random K and V of all layers in every step, and checks that each sequence still reads its own."""

    def __init__(self, batch: kv.Batch, io: KVIO, kind: str = "float32") -> None:
        self.batch, self.io, self.kind = batch, io, kind
        self.caches = batch.resources.cache_managers[0] if io is None else io.caches
        self.random = np.random.default_rng(5)
        config = batch.plan.config  # layers are decoder layers
        places = enumerate(config.attention_indices)
        self.layers = [layer for layer, place in places if place >= 0 and config.layers[place].owns_kv]
        self.told: dict[object, dict[int, list[np.ndarray]]] = {}
        self.rewound: set[object] = set()  # since their last step: pages below are mapped again by the next one

    def step(self, counts: dict[kv.Sequence, int]) -> None:
        """Append tokens."""
        if not counts:
            return
        self.write(self.batch.step(counts), counts)

    def write(self, view: kv.StepView, counts: Mapping[kv.Sequence, int]) -> None:
        """Write K and V of a step in which sequences appended so many tokens."""
        starts = view.cu_seqlens_q.to_host()
        for layer in self.layers:
            storage = self.caches.storage(layer)
            shape = (view.num_tokens, storage.num_kv_heads, storage.head_dim)
            k, v = (numbers(self.random, shape, self.kind) for _ in range(2))
            self.io.write(layer, uploaded(self.io, k), uploaded(self.io, v), view)
            for sequence, count in counts.items():
                told = self.told.setdefault(sequence, {i: [] for i in self.layers})[layer]
                at = int(starts[sequence.row])
                told += [np.stack([k[t], v[t]]) for t in range(at, at + count)]
        self.rewound -= {sequence for sequence, count in counts.items() if count}

    def rewind(self, sequence: kv.Sequence, count: int) -> None:
        """Take tokens back."""
        self.batch.rewind({sequence: count})
        self.rewound.add(sequence)
        for told in self.told[sequence].values():
            del told[len(told) - count :]

    def fork(self, sequence: kv.Sequence) -> kv.Sequence:
        """Fork a sequence."""
        child = self.batch.fork(sequence)
        self.inherit(sequence, child)
        return child

    def inherit(self, source: object, heir: object) -> None:
        """Note that `heir` has the tokens of `source`."""
        self.told[heir] = {layer: list(told) for layer, told in self.told[source].items()}
        if source in self.rewound:
            self.rewound.add(heir)

    def retire(self, sequence: kv.Sequence) -> None:
        """End a sequence."""
        self.batch.retire(sequence)
        del self.told[sequence]

    def check(self) -> None:
        """Read all that a next token sees of every sequence."""
        sequences = [s for s in self.batch.sequences if s in self.told]
        if not sequences or not self.layers:
            return
        lengths = uploaded(self.io, np.array([s.length for s in sequences], np.int32))
        rows = uploaded(self.io, np.array([s.row for s in sequences], np.int32))
        columns = max(s.length for s in sequences) + 1
        begins = self.caches.step_buffers.mapped_begin.to_host()
        for layer in self.layers:
            storage = self.caches.storage(layer)
            shape = (len(sequences), columns, storage.num_kv_heads, storage.head_dim)
            k, v = (uploaded(self.io, np.ones(shape, NUMPY[self.kind])) for _ in range(2))
            self.io.gather(layer, k, v, lengths, rows=rows)
            found = np.stack([k.to_host(), v.to_host()], 2)
            for b, sequence in enumerate(sequences):
                told = self.told[sequence][layer]
                assert len(told) == sequence.length
                low = storage.window.lowest_key(sequence.length)
                if sequence in self.rewound:
                    low = max(low, int(begins[storage.group, sequence.row]) * storage.page_tokens)
                for position in range(low, sequence.length):
                    assert same_bits(found[b, position], told[position]), (layer, sequence, position)
