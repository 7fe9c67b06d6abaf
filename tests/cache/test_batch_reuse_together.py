"""A base and its draft, each with reuse: both begin with the same tokens, and what the draft has fits what follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.batch.reuse_together import update_together
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import CacheLimits
from tests.helpers.batches import everything, opened, pages_of, same
from tests.helpers.deployments import pair
from tests.helpers.lora_files import OUT, SIZES, pairs, reference
from tests.helpers.models import tiny_config
from tests.helpers.reuse_model import ReuseModel
from tests.helpers.states import mamba2, recurrent_config

SIZE = {"max_batch_size": 3, "max_kv_cache_capacity": 64, "max_batch_tokens": 96, "kv_cache_dtype": "float32"}
BASE = tiny_config(None, 7, page_tokens=4, kept_window_pages=16, num_kv_pages=24, **SIZE)
FULL = tiny_config(None, page_tokens=4, num_kv_pages=24, **SIZE)
DRAFT = tiny_config(None, page_tokens=4, num_kv_pages=26, **{**SIZE, "max_kv_cache_capacity": 67})
ALL = PublishPolicy(publish="all", every_blocks=1)


class DraftModel(ReuseModel):
    """A draft whose K and V at a position depend on the token behind it."""

    def cell(self, layer: int, sequence: object, position: int) -> np.ndarray:
        """Return K and V of one position."""
        ids = self.ids[sequence]
        assert position + 1 < len(ids), "the token that this position depends on is not known"
        key = (layer, (self.owner[sequence], tuple(ids[: position + 2])))
        if key not in self.values:
            self.values[key] = self.random.standard_normal((2, 1, 8)).astype(np.float32)
        return self.values[key]


class Pair:
    """A base and a draft in step: the draft is always one token behind, because it wants the next one."""

    def __init__(self, models: tuple[ReuseModel, ReuseModel]) -> None:
        self.base, self.draft = models
        self.batches = (self.base.batch, self.draft.batch)

    def admit(self, prompts: list[list[int]], retire: list[tuple[Any, ...]] | None = None) -> list[tuple[Any, Any]]:
        made = update_together(self.batches, retire=retire or (), admit=[kv.Prompt(p, ALL) for p in prompts])
        for model in (self.base, self.draft):
            for group in retire or ():
                for names in (model.told, model.ids, model.owner):
                    names.pop(group[model is self.draft])
        for both, prompt in zip(made, prompts, strict=True):
            for sequence, model in zip(both, (self.base, self.draft), strict=True):
                model._admitted(sequence, prompt, None)
            assert both[0].reused_tokens == both[1].reused_tokens
            assert both[0].row == both[1].row
        self.check()
        return made

    def compute(self, both: tuple[Any, Any], generate: int = 0) -> None:
        """Append what is known of a prompt, and then generated tokens."""
        sequence, drafted = both
        while sequence.pending_tokens:
            self.base.step({sequence: self.base.batch.prefill_chunk(sequence)})
        self.step_draft(drafted)
        for _ in range(generate):
            self.base.step({sequence: 1})
            self.draft.ids[drafted] = list(self.base.ids[sequence])
            self.draft.tell(drafted)
            self.step_draft(drafted)
        self.check()

    def step_draft(self, drafted: Any) -> None:
        while (count := len(self.draft.ids[drafted]) - 1 - drafted.length) > 0:
            chunk = self.draft.batch.prefill_chunk(drafted, count) if drafted.pending_tokens else count
            self.draft.step({drafted: chunk})

    def check(self) -> None:
        self.base.check_all()
        self.draft.check_all()


@contextmanager
def opened_pair(base: kv.LLMEngineConfig = BASE, draft: kv.LLMEngineConfig = DRAFT, **options: Any) -> Iterator[Pair]:
    deployment = pair("mtp", base=base, draft=draft)
    with kv.SharedResources.create_for_spec_decode(deployment) as resources, ExitStack() as stack:
        batches = (
            kv.Batch(resources, reuse=kv.ReuseOptions(**options)),
            kv.Batch(resources, index=1, reuse=kv.ReuseOptions(future_tokens=1, **options)),
        )
        ios = [stack.enter_context(kv.KVIO(caches)) for caches in resources.cache_managers]
        yield Pair((ReuseModel(batches[0], ios[0]), DraftModel(batches[1], ios[1])))
    assert resources.device.memory.current_bytes == 0


def test_both_begin_with_the_same_tokens() -> None:
    with opened_pair() as both:
        (first,) = both.admit([list(range(20))])
        both.compute(first)
        made = both.admit([list(range(20)), [*range(18), 50, 51]])
        # whole pages: the base has copies of a window there
        assert [b.reused_tokens for b, _ in made] == [16, 16]
        for group in made:
            both.compute(group, generate=2)


def test_the_last_position_of_a_draft_depends_on_the_token_behind_it() -> None:
    with opened_pair(base=FULL) as both:
        (first,) = both.admit([list(range(24))])
        both.compute(first)
        alone = both.base.batch.admit([*range(18), 50, 51])
        assert alone.reused_tokens == 18
        both.base.batch.retire(alone)
        ((sequence, drafted),) = both.admit([[*range(18), 50, 51]])
        assert sequence.reused_tokens == drafted.reused_tokens == 17  # position 17 of the draft was computed with 18


def test_look_ahead_tells_pages_apart_that_base_shares() -> None:
    with opened_pair(base=FULL) as both:
        for last in (30, 40):  # the same 8 tokens, then another one
            (group,) = both.admit([[*range(8), last, last + 1, last + 2]])
            both.compute(group, generate=4)
            both.admit([], retire=[group])
        ((sequence, drafted),) = both.admit([[*range(8), 40, 41, 99]])
        assert sequence.reused_tokens == 9  # position 9 of the draft was computed with 42
        assert pages_of(both.base.batch, sequence, 0)[:2]
        both.compute((sequence, drafted), generate=3)
        ((other, _),) = both.admit([[*range(8), 77, 1]])
        assert other.reused_tokens == 7  # the base has 8


def test_the_first_token_belongs_to_the_identity() -> None:
    with opened_pair() as both:
        (first,) = both.admit([list(range(20))])
        both.compute(first)
        assert both.admit([[60, *range(1, 20)]])[0][1].reused_tokens == 0


@pytest.mark.parametrize("host", [0, 30_000])
def test_any_prompts_are_served_by_both(host: int, target: str) -> None:
    with opened_pair(host_bytes=host, limits=CacheLimits()) as both:
        random = np.random.default_rng(1)
        stems = [random.integers(0, 3, 30).tolist() for _ in range(3)]
        running: list[tuple[Any, Any]] = []
        hits = 0
        for _ in range(1 if target == "sim" else 40):
            leaving = [group for group in running if random.random() < 0.6]
            room = 3 - len(running) + len(leaving)
            prompts = []
            for _ in range(int(random.integers(0, room + 1))):
                stem = stems[int(random.integers(3))]
                prompts.append(stem[: int(random.integers(2, 30))] + random.integers(0, 3, int(random.integers(4))).tolist())
            made = both.admit(prompts, retire=leaving)
            hits += sum(sequence.reused_tokens for sequence, _ in made)
            running = [group for group in running if group not in leaving] + made
            for group in made:
                both.compute(group, generate=int(random.integers(4)))
        assert hits > 100 or target == "sim"


def test_a_draft_depends_on_the_adapter_of_its_base() -> None:
    targets = tuple(kv.LoRATarget(name=name, k=k, n=n) for name, (k, n) in SIZES.items())
    base = replace(FULL, max_lora_rank=4, max_loras=3, lora_targets=targets)
    with opened_pair(base=base) as both:
        both.base.batch.resources.lora_manager.load("fr", reference(pairs(OUT, seed=1)))
        (first,) = update_together(both.batches, admit=[list(range(20))], adapters=["fr"])
        for batch, sequence in zip(both.batches, first, strict=True):
            batch.step({sequence: 20})
        made = update_together(both.batches, admit=[list(range(20))] * 2, adapters=[None, "fr"])
        assert [[s.reused_tokens for s in group] for group in made] == [[0, 0], [16, 16]]


def test_what_cannot_be_done_together_is_refused_and_changes_nothing() -> None:
    with opened_pair(host_bytes=30_000) as both:
        (first,) = both.admit([list(range(20))])
        both.compute(first)
        free = [batch.free_rows for batch in both.batches]
        for wrong in (
            {"admit": [[1], [-1]]},
            {"admit": [[1]] * 4},
            {"retire": [first[:1]]},
            {"retire": [first[::-1]]},
            {"retire": first},
        ):
            with pytest.raises((kv.InputError, kv.StateError, kv.CapacityError)):
                update_together(both.batches, **wrong)
        with pytest.raises(kv.InputError, match="adapters: 'fr' given"):
            update_together(both.batches, admit=[[1]], adapters=["fr"])
        with pytest.raises(kv.InputError, match="media"):  # of the draft, when the base could do it
            update_together(both.batches, admit=[list(range(20)), kv.Prompt([1, 2], media=[kv.MediaSpan(0, 1, b"d" * 16)])])
        assert [batch.free_rows for batch in both.batches] == free
        for wrong in ((), (both.base.batch, both.base.batch), (both.base.batch, None), both.base.batch):
            with pytest.raises(kv.InputError, match="batches"):
                update_together(wrong)
        with opened(BASE) as other, pytest.raises(kv.InputError, match="one of each model of one SharedResources"):
            update_together((both.base.batch, other))
        both.check()
        made = update_together(both.batches, admit=[5, list(range(20))], retire=[first])
        assert [[s.reused_tokens for s in group] for group in made] == [[0, 0], [16, 16]]


def test_prompts_can_say_how_much_is_reused_at_most() -> None:
    with opened_pair(base=FULL) as both:
        (first,) = both.admit([list(range(20))])
        both.compute(first)
        batch = both.base.batch
        for most, found in ((0, 0), (3, 3), (9, 9), (100, 19)):
            sequence = batch.admit(list(range(20)), most_reused=most)
            assert sequence.reused_tokens == found
            batch.retire(sequence)
        for wrong in (-1, 1.5):
            with pytest.raises(kv.InputError, match="most_reused"):
                batch.admit([1, 2], most_reused=wrong)


def test_the_base_comes_first() -> None:
    with opened_pair() as both:
        batches = [both.base.batch, both.draft.batch]
        with pytest.raises(kv.InputError, match="base's is not the first"):
            kv.update_together(batches[::-1], admit=[[1, 2, 3]])
        assert not any(batch.sequences for batch in batches)
        assert len(kv.update_together(batches, admit=[[1, 2, 3]])) == 1


def test_look_ahead_is_for_drafts_of_attention() -> None:
    with kv.SharedResources.create_for_llm(BASE) as resources:
        with pytest.raises(kv.ConfigError, match="future_tokens: 1, but model 0 is the base"):
            kv.Batch(resources, reuse=kv.ReuseOptions(future_tokens=1))
        with pytest.raises(kv.InputError, match="future_tokens: 2"):
            kv.ReuseOptions(future_tokens=2)
    config = recurrent_config(mamba2(), kept_states=3)
    with kv.SharedResources.create_for_llm(config) as resources, pytest.raises(kv.ConfigError, match="future_tokens"):
        kv.Batch(resources, reuse=kv.ReuseOptions(future_tokens=1))
    with opened_pair() as both, pytest.raises(kv.InputError, match="media"):
        both.draft.batch.admit([1, 2, 3], media=[kv.MediaSpan(0, 2, b"d" * 16)])


@pytest.mark.parametrize("has_reuse", [False, True])
def test_a_step_that_is_not_noted_keeps_both_as_they_are(has_reuse: bool) -> None:
    with (
        kv.SharedResources.create_for_spec_decode(pair("mtp", base=FULL, draft=DRAFT)) as resources,
        kv.Batch(resources, reuse=kv.ReuseOptions() if has_reuse else None) as base,
        kv.Batch(resources, index=1, reuse=kv.ReuseOptions(future_tokens=1) if has_reuse else None) as draft,
    ):
        batches = (base, draft)

        def computed(prompt: list[int]) -> tuple[Any, ...]:
            (both,) = update_together(batches, admit=[kv.Prompt(prompt, ALL) if has_reuse else prompt])
            for batch, sequence in zip(batches, both, strict=True):
                batch.step({sequence: sequence.pending_tokens})
            return both

        computed(list(range(20)))
        second = computed(list(range(50, 60)))
        for batch in batches:
            batch.step({batch.sequences[0]: 1})  # publishes
        draft.reserve(1)
        graph = draft.capture()
        graph.launch()
        before = everything(base)
        for change in ({"admit": [list(range(20))]}, {"retire": [second]}, {"retire": [second], "admit": [list(range(20)), 5]}):
            with pytest.raises(kv.StateError, match="launched and not noted"):
                update_together(batches, **change)
            same(everything(base), before)
        graph.advanced()
        draft.audit()
        ((again, _),) = update_together(batches, admit=[list(range(20))], retire=[second])
        assert again.reused_tokens == (16 if has_reuse else 0)
        for batch in batches:
            batch.audit()
        graph.close()


@pytest.mark.parametrize("part", ["lease", "publish_last", "bring_back"])
def test_an_error_of_one_batch_leaves_nothing_held_in_another(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = tuple(kv.LoRATarget(name=name, k=k, n=n) for name, (k, n) in SIZES.items())
    base = replace(FULL, max_lora_rank=4, max_loras=3, lora_targets=targets)
    with opened_pair(base=base) as both:
        manager = both.base.batch.resources.lora_manager
        manager.load("fr", reference(pairs(OUT, seed=1)))
        (first,) = update_together(both.batches, admit=[list(range(20))], adapters=["fr"])
        for batch, sequence in zip(both.batches, first, strict=True):
            batch.step({sequence: 20})
            batch.publish()
        shares = [batch.stepper.ledger.pool.shares.copy() for batch in both.batches]
        held = list(manager._slots._holds)

        def fail(*_: Any, **__: Any) -> None:
            raise kv.CapacityError("no", needed=1, free=0, evictable=0)

        reuse = both.draft.batch.reuse
        with monkeypatch.context() as patch:
            patch.setattr(reuse.publishing if part == "publish_last" else reuse.admission, part, fail)
            with pytest.raises(kv.CapacityError):
                update_together(both.batches, admit=[list(range(20))] * 2, adapters=["fr", None])
        assert held == list(manager._slots._holds)
        for batch, before in zip(both.batches, shares, strict=True):
            assert np.array_equal(batch.stepper.ledger.pool.shares, before)
            batch.audit()
        made = update_together(both.batches, admit=[list(range(20))], adapters=["fr"], retire=[first])
        assert [[s.reused_tokens for s in group] for group in made] == [[16, 16]]
        both.base.batch.clear()
        assert list(manager._slots._holds) == [0] * len(held)
