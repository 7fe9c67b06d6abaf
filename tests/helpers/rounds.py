"""Speculative rounds beside a model of them: what every token brought, as lists a sequence, for base, draft and states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numba_kv as kv
from tests.helpers.deployments import pair
from tests.helpers.kv_model import KVModel
from tests.helpers.models import chunked, tiny_config
from tests.helpers.state_model import StateModel
from tests.helpers.states import delta_net, int32, mamba2, recurrent_config, short_conv

#: Proposals of a chain; a step verifies one token more.
K = 3
ROWS = 3
LIMITS = {"max_batch_size": ROWS, "max_kv_cache_capacity": 48, "max_batch_tokens": 96}
BASE = tiny_config(None, 6, chunked(8), page_tokens=2, kv_cache_dtype="float32", **LIMITS)
DRAFT = tiny_config(None, 5, page_tokens=4, kv_cache_dtype="float32", **{**LIMITS, "max_kv_cache_capacity": 48 + K})
STATES = {"recurrent_state_dtype": "float32", "conv_state_dtype": "float32"}


def hybrid(layer: Any, mode: str = "snapshot", **limits: Any) -> kv.LLMEngineConfig:
    """Return a base of two recurrent layers around one of attention."""
    found = recurrent_config(layer, 2, kv_cache_dtype="float32", recurrent_spec_verify_mode=mode, **{**LIMITS, **limits})
    return replace(found, vocab_size=0)


def _pair(mode: str, base: kv.LLMEngineConfig = BASE, **changes: Any) -> kv.DeploymentConfig:
    own = {"draft": DRAFT, **changes}
    if mode == "gemma4_mtp":
        own.pop("draft")
    return pair(mode, base=base, **own)


#: Deployments of every mode and of every kind of commit.
DEPLOYMENTS: dict[str, kv.DeploymentConfig] = {
    "chain": _pair("mtp", steps=K),
    "tree": _pair("eagle3", steps=2, top_k=2, verify_tokens=4, draft=replace(DRAFT, max_kv_cache_capacity=52)),
    "block": _pair("dflash", draft=replace(DRAFT, max_kv_cache_capacity=52)),
    "jetspec": _pair("jetspec", draft=replace(DRAFT, max_kv_cache_capacity=52)),
    "dspark": _pair("dspark", draft=replace(DRAFT, max_kv_cache_capacity=52)),
    "shared": _pair("gemma4_mtp", steps=K),
    "snapshots": _pair("mtp", hybrid(mamba2(**STATES)), steps=K),
    "replay": _pair("mtp", hybrid(mamba2(**STATES), "replay"), steps=K),
    "delta net": _pair("mtp", hybrid(delta_net(**STATES), "replay"), steps=K),
    "room": _pair("mtp", hybrid(mamba2(**STATES), conv_state_room=4), steps=K),
    "convolutions": _pair("mtp", hybrid(short_conv(conv_state_dtype="float32"), conv_state_room=4), steps=K),
    "pure": _pair("mtp", hybrid(mamba2(**STATES), types=("recurrent", "recurrent")), steps=K),
}


class RoundModel:
    """Drives a SpeculativeBatch, writes what forward passes would, and knows what must be there."""

    def __init__(self, batch: kv.SpeculativeBatch, ios: Sequence[kv.KVIO]) -> None:
        self.batch = batch
        self.draft = None if batch.draft is None else KVModel(batch.draft, ios[-1])
        self.base = KVModel(batch.base, ios[0])  # of a base without attention this one writes nothing
        states = batch.resources.cache_managers[0].mamba_cache
        self.states = StateModel(states) if states.num_layers else None
        self.lengths: dict[kv.Sequence, int] = {}  # of the base
        self.draft_lengths: dict[kv.Sequence, int] = {}
        self.waiting: dict[kv.Sequence, int] = {}  # verified and not committed: tokens

    def own(self, counts: Mapping[kv.Sequence, int]) -> dict[kv.Sequence, int]:
        """Return counts of the draft's sequences in the same rows."""
        rows = {s.row: n for s, n in counts.items()}
        return {s: rows[s.row] for s in self.batch.draft.sequences if s.row in rows}

    def admit(self, *prompts: int) -> list[kv.Sequence]:
        """Admit sequences and append their prompts."""
        made = self.batch.update(admit=list(prompts))
        for sequence in made:
            self.lengths[sequence] = self.draft_lengths[sequence] = 0
        self.step({s: s.pending_tokens for s in made})
        return made

    def retire(self, sequence: kv.Sequence) -> None:
        """End a sequence."""
        row = sequence.row
        partner = None if self.draft is None else next(s for s in self.batch.draft.sequences if s.row == row)
        self.batch.retire(sequence)
        for model, gone in ((self.base, sequence), (self.draft, partner), (self.states, sequence)):
            if model is not None:
                model.told.pop(gone, None)
        for known in (self.lengths, self.draft_lengths, self.waiting):
            known.pop(sequence, None)

    def step(self, counts: Mapping[kv.Sequence, int]) -> None:
        """Append tokens to both models."""
        view = self.batch.step(dict(counts))
        self.base.write(view, counts)
        if self.states is not None:
            self.states.step(view, dict(counts))
        if self.draft is not None:
            self.draft.write(self.batch.draft_view, self.own(counts))
        for sequence, count in counts.items():
            self.lengths[sequence] += count
            self.draft_lengths[sequence] += count if self.draft is not None else 0

    def draft_step(self, tokens: int | None = None) -> None:
        """Append proposals."""
        view = self.batch.draft_step(tokens)
        if self.draft is not None:
            counts = dict.fromkeys(self.lengths, self.batch.draft_tokens if tokens is None else tokens)
            self.draft.write(view, self.own(counts))
            for sequence, count in counts.items():
                self.draft_lengths[sequence] += count

    def catch_up(self, ahead: int = 0) -> None:
        """Append what the draft lacks."""
        view = self.batch.catch_up(ahead)
        if self.draft is None:
            return
        counts = {s: max(0, n + ahead - self.draft_lengths[s]) for s, n in self.lengths.items()}
        self.draft.write(view, self.own(counts))
        for sequence, count in counts.items():
            self.draft_lengths[sequence] += count

    def verify(self, tokens: int | None = None, parents: tuple[int, ...] | None = None) -> None:
        """Run a verification step of every sequence, linear or of a tree."""
        tree = None if parents is None else self.batch.tree(parents)
        view = self.batch.verify_step(tokens, tree=tree)
        number = (tokens or self.batch.spec.verify_tokens) if parents is None else len(parents)
        self.waiting = dict.fromkeys(self.lengths, number)
        self.base.write(view, self.waiting)
        if self.states is not None:
            self.states.verify(view, self.waiting, parents)
        for sequence in self.lengths:
            self.lengths[sequence] += number

    def accepted(self, paths: Mapping[kv.Sequence, Sequence[int]]) -> None:
        """Note that these nodes of each sequence were kept."""
        keeps = self.batch.keeps_drafts
        for sequence, path in paths.items():
            verified = self.waiting.pop(sequence)
            before = self.lengths[sequence] - verified
            every: list[Any] = list(self.base.told.get(sequence, {}).values())
            every += [] if self.states is None else [self.states.told[sequence]]
            for told in every:
                told[before:] = [told[before + node] for node in path]
            self.lengths[sequence] = before + len(path)
            self.base.rewound.add(sequence)
            if self.draft is not None:
                own = next(iter(self.own({sequence: 0})))
                target = min(self.draft_lengths[sequence], before + (len(path) if keeps else 0))
                for told in self.draft.told[own].values():
                    del told[target:]
                self.draft_lengths[sequence] = target
                self.draft.rewound.add(own)

    def commit_on_device(self, counts: Mapping[int, int], paths: Mapping[int, Sequence[int]] | None = None) -> None:
        """Commit by arrays on the device: counts by row and, after a tree, ids by row, as they are given."""
        device, rows = self.batch.resources.device, range(ROWS)
        arrays = [int32(device, [counts.get(row, 77) for row in rows])]
        if paths is not None:
            width = max(1, *(len(path) for path in paths.values()))
            arrays.append(int32(device, [[*paths.get(row, ()), *[-1] * width][:width] for row in rows]))
        self.batch.commit(*arrays)
        device.stream.synchronize()
        for array in arrays:
            array._memory.close(device.stream)

    def commit(
        self,
        paths: Mapping[kv.Sequence, Sequence[int]],
        tree: tuple[int, ...] | None,
        on_device: bool,
        wrong: Mapping[kv.Sequence, int] | None = None,
    ) -> None:
        """Commit paths, as nodes after a tree, else as counts; `wrong` counts stand for those of some sequences."""
        counts = {**{s: len(path) for s, path in paths.items()}, **(wrong or {})}
        if on_device:
            rows = None if tree is None else {s.row: path for s, path in paths.items()}
            self.commit_on_device({s.row: n for s, n in counts.items()}, rows)
        else:
            self.batch.commit(counts if tree is None else dict(paths))

    def rewind(self, sequence: kv.Sequence, count: int) -> None:
        """Take tokens back in both models."""
        self.batch.rewind({sequence: count})
        self.lengths[sequence] -= count
        target = self.lengths[sequence]
        for told in self.base.told[sequence].values():
            del told[target:]
        self.base.rewound.add(sequence)
        if self.draft is not None:
            own = next(iter(self.own({sequence: 0})))
            self.draft_lengths[sequence] = min(self.draft_lengths[sequence], target)
            for told in self.draft.told[own].values():
                del told[target:]
            self.draft.rewound.add(own)

    def check(self) -> None:
        """Compare lengths, K and V of both models and states with what is known."""
        self.batch.sync_lengths()
        self.batch.audit()
        assert {s: s.length for s in self.batch.sequences} == self.lengths
        if self.draft is not None:
            assert {s: self.batch.draft_length(s) for s in self.batch.sequences} == self.draft_lengths
            self.draft.check()
        self.base.check()
        if self.states is not None:
            slots = self.batch.resources.cache_managers[0].step_buffers.state_index.to_host().tolist()
            self.states.check(slots, set(self.waiting))


@contextmanager
def opened_rounds(name: str, **options: Any) -> Iterator[RoundModel]:
    """Open a deployment, a batch on it and its model; everything has been given back afterwards."""
    resources = kv.SharedResources.create_for_spec_decode(DEPLOYMENTS[name])
    try:
        ios = [kv.KVIO(caches) for caches in resources.cache_managers if caches.kv_cache.num_layers]
        yield RoundModel(kv.SpeculativeBatch(resources, **options), ios)
        for io in ios:
            io.close()
    finally:
        resources.close()
    assert resources.device.memory.current_bytes == resources.device.pinned.current_bytes == 0
