"""A batch whose K and V are a function of all that they should depend on: a wrong page is seen at once."""

from __future__ import annotations

from typing import Any

import numpy as np

import numba_kv as kv
from numba_kv.ledger.reuse.policy import PublishPolicy
from tests.helpers.kv_model import KVModel, uploaded
from tests.helpers.kv_pools import numbers
from tests.helpers.states import kinds_of

#: Whose context, and all tokens up to a position.
Key = tuple[Any, tuple[int, ...]]


class ReuseModel(KVModel):
    """Computes K and V of every token from its context; what a sequence reuses has to be just that."""

    def __init__(self, batch: kv.Batch, io: kv.KVIO, kind: str = "float32") -> None:
        super().__init__(batch, io, kind)
        self.ids: dict[object, list[int]] = {}
        self.owner: dict[object, Any] = {}
        self.hits = 0
        self.values: dict[tuple[int, Key], np.ndarray] = {}
        self.marks: dict[Key, float] = {}

    def cell(self, layer: int, sequence: object, position: int) -> np.ndarray:
        """Return K and V of one position."""
        key = (layer, (self.owner[sequence], tuple(self.ids[sequence][: position + 1])))
        if key not in self.values:
            storage = self.caches.storage(layer)
            self.values[key] = numbers(self.random, (2, storage.num_kv_heads, storage.head_dim), self.kind)
        return self.values[key]

    def admit(self, tokens: list[int], *, salt: bytes | None = None, policy: PublishPolicy | None = None) -> kv.Sequence:
        """Admit a sequence; what it reuses counts as told."""
        sequence = self.batch.admit(tokens, salt=salt, policy=policy)
        self._admitted(sequence, tokens, salt)
        return sequence

    def update(self, retire: list[kv.Sequence], admit: list[kv.Prompt]) -> None:
        """Retire and admit in one call."""
        made = self.batch.update(retire=retire, admit=admit)
        for sequence in retire:
            for names in (self.told, self.ids, self.owner):
                del names[sequence]
            self.rewound.discard(sequence)
        for sequence, prompt in zip(made, admit, strict=True):
            self._admitted(sequence, prompt.tokens, prompt.salt)

    def _admitted(self, sequence: kv.Sequence, tokens: list[int], salt: bytes | None) -> None:
        self.ids[sequence], self.owner[sequence] = list(tokens), salt
        reused = sequence.reused_tokens
        assert sequence.length == reused < len(tokens)
        self.hits += reused
        self.check_state(sequence)
        self.told[sequence] = {i: [self.cell(i, sequence, p) for p in range(reused)] for i in self.layers}

    def step(self, counts: dict[kv.Sequence, int]) -> None:
        """Append tokens: those of the prompt, then generated ones, which the batch is told."""
        if not counts:
            return
        before = {s: s.length for s in counts}
        view = self.batch.step(counts)
        for sequence, count in counts.items():
            missing = before[sequence] + count - len(self.ids[sequence])
            self.ids[sequence] += self.random.integers(0, 3, max(0, missing)).tolist()
        order = sorted((s.row, s, n) for s, n in counts.items())
        places = [(s, before[s] + i) for _, s, n in order for i in range(n)]
        for layer in self.layers:
            cells = np.stack([self.cell(layer, s, p) for s, p in places])
            k, v = (np.ascontiguousarray(cells[:, i]) for i in range(2))
            self.io.write(layer, uploaded(self.io, k), uploaded(self.io, v), view)
            for sequence, position in places:
                told = self.told[sequence].setdefault(layer, [])
                assert len(told) == position
                told.append(self.cell(layer, sequence, position))
        self.rewound -= set(counts)
        for sequence in counts:
            self.set_state(sequence)
            self.tell(sequence)

    def mark(self, sequence: kv.Sequence) -> float:
        """Return the number that all states of a sequence are."""
        key = (self.owner[sequence], tuple(self.ids[sequence][: sequence.length]))
        return self.marks.setdefault(key, 1.0 + len(self.marks)) if sequence.length else 0.0

    def set_state(self, sequence: kv.Sequence) -> None:
        """Write the states behind the last token of a sequence, as its layers do."""
        states = self.caches.mamba_cache
        for name in kinds_of(states):
            for layer in range(states.num_layers):
                slot = states.state(name, layer)[self.slot(sequence)]
                slot.fill_from(np.full(slot.shape, self.mark(sequence), np.float32))

    def check_state(self, sequence: kv.Sequence) -> None:
        """Compare all states of a sequence."""
        states = self.caches.mamba_cache
        for name in kinds_of(states):
            for layer in range(states.num_layers):
                assert (states.state(name, layer)[self.slot(sequence)].to_host() == self.mark(sequence)).all()

    def slot(self, sequence: kv.Sequence) -> int:
        """Return where the states of a sequence are."""
        return int(self.caches.step_buffers.state_index.to_host()[sequence.row])

    def tell(self, sequence: kv.Sequence) -> None:
        """Tell the batch which tokens a sequence has."""
        known = self.batch.known_tokens(sequence)
        self.batch.note_tokens(sequence, self.ids[sequence][known:])

    def rewind(self, sequence: kv.Sequence, count: int) -> None:
        """Take tokens back; others follow."""
        target = sequence.length - count
        super().rewind(sequence, count)
        del self.ids[sequence][target:]
        pending = max(0, sequence.prompt_tokens - target)
        self.ids[sequence] += self.random.integers(0, 3, pending).tolist()
        assert self.batch.known_tokens(sequence) <= target

    def inherit(self, source: object, heir: object) -> None:
        """Note that `heir` has the tokens of `source`."""
        super().inherit(source, heir)
        self.ids[heir], self.owner[heir] = list(self.ids[source]), self.owner[source]

    def move(self, source: object, heir: object) -> None:
        """Note that `heir` takes the place of `source`."""
        self.inherit(source, heir)
        for names in (self.told, self.ids, self.owner):
            del names[source]

    def retire(self, sequence: kv.Sequence) -> None:
        """End a sequence."""
        super().retire(sequence)
        del self.ids[sequence], self.owner[sequence]

    def check_all(self) -> None:
        """Audit, and compare all that is read."""
        if self.layers:
            self.check()
        for sequence in self.batch.sequences:
            self.check_state(sequence)
        self.batch.audit()
