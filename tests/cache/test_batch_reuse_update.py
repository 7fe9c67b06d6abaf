"""`Batch.update` with reuse: several sequences leave and begin with what is kept, in one change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import numba_kv as kv
from tests.helpers.batches import everything, opened, pages_of, same
from tests.helpers.lora_files import OUT, SIZES, pairs, reference
from tests.helpers.models import tiny_config
from tests.helpers.reuse_driver import MODELS, Driver, opened_model
from tests.helpers.reuse_model import ReuseModel
from tests.helpers.ropes import rope

CONFIG = tiny_config(max_batch_size=3, num_kv_pages=20, lookahead_pages=0, max_batch_tokens=64)
TARGETS = tuple(kv.LoRATarget(name=name, k=k, n=n) for name, (k, n) in SIZES.items())


@contextmanager
def reusing(config: kv.LLMEngineConfig = CONFIG, **options: Any) -> Iterator[kv.Batch]:
    with kv.SharedResources.create_for_llm(config) as resources:
        yield kv.Batch(resources, reuse=kv.ReuseOptions(**options))
    assert resources.device.memory.current_bytes == 0


def left(batch: kv.Batch, tokens: list[int], **options: Any) -> None:
    """Compute a prompt and let it go."""
    sequence = batch.admit(tokens, **options)
    batch.step({sequence: sequence.pending_tokens})
    batch.retire(sequence)


def test_all_that_join_reuse_together() -> None:
    with reusing() as batch:
        left(batch, list(range(12)))
        left(batch, list(range(50, 60)))
        first = batch.admit(num_tokens=3)
        launches = batch.stats.launches
        made = batch.update(retire=[first], admit=[[*range(10), 99], list(range(50, 62)), 7])
        assert [(s.reused_tokens, s.pending_tokens) for s in made] == [(10, 1), (8, 4), (0, 7)]
        # one composition change, one block of page ids, one of lengths, one copy of a page for each slab
        assert batch.stats.launches - launches == 3 + len(batch.plan.groups[0].slabs)
        assert pages_of(batch, made[0], 0)[2] not in pages_of(batch, made[1], 0)
        report = batch.audit().pools[0]
        assert (report.leased, report.owned) == (4, 1)
        batch.step({s: s.pending_tokens for s in made})
        batch.audit()


def test_pages_of_those_that_leave_hold_the_beginnings_of_pages() -> None:
    with reusing() as batch:
        left(batch, list(range(7)), policy=kv.PublishPolicy(tails=True))
        full = batch.admit(list(range(100, 164)))
        batch.step({full: 64})
        other = batch.admit(num_tokens=8)
        batch.step({other: 8})
        assert batch.free_pages == 0
        second, third = batch.update(retire=[other], admit=[[*range(7), 9], [*range(7), 8]])
        assert (second.reused_tokens, third.reused_tokens) == (7, 7)
        assert batch.reuse.figures.evicted_blocks == batch.reuse.figures.evicted_tails == 0
        batch.audit()


def test_a_prompt_that_cannot_be_admitted_leaves_all_as_it_was() -> None:
    with reusing() as batch:
        left(batch, list(range(12)))
        first = batch.admit(list(range(30, 40)))
        batch.step({first: 10})
        batch.publish()
        before, figures = everything(batch), batch.reuse.figures
        good = [*range(12), 1]
        for bad in (
            [-1],
            [1.5],
            [[1]],
            [],
            kv.Prompt(good, policy="all"),
            kv.Prompt(good, salt="text"),
            0,
            65,
            list(range(65)),
        ):
            with pytest.raises((kv.InputError, kv.ShapeError, kv.CapacityError)):
                batch.update(retire=[first], admit=[good, bad])
        with pytest.raises(kv.InputError, match="adapters: 'fr' given"):
            batch.update(retire=[first], admit=[good], adapters=["fr"])
        with pytest.raises(kv.CapacityError, match="rows: 4 sequences"):
            batch.update(retire=[first], admit=[good] * 4)
        same(everything(batch), before)
        assert batch.reuse.figures == figures


def test_a_prompt_says_more_than_its_tokens() -> None:
    factors = {"long_factor": (2.0,) * 4, "short_factor": (1.0,) * 4, "original_max_position_embeddings": 16}
    tokens = list(range(12))
    with reusing(replace(CONFIG, ropes=(rope("longrope", **factors),))) as batch:
        with pytest.raises(kv.InputError, match="rope: the model rotates"):
            batch.update(admit=[tokens])
        left(batch, tokens, rope=b"short")
        made = batch.update(
            admit=[
                kv.Prompt(tokens, rope=b"long"),
                kv.Prompt(tokens, rope=b"short"),
                kv.Prompt(tokens, rope=b"short", salt=b"s"),
            ]
        )
        assert [s.reused_tokens for s in made] == [0, 11, 0]
    with opened(CONFIG) as batch:
        assert batch.update(admit=[kv.Prompt(tokens)])[0].prompt_tokens == 12
        with pytest.raises(kv.InputError, match="made with reuse="):
            batch.update(admit=[kv.Prompt(tokens, salt=b"s")])


def test_each_sequence_reuses_what_its_adapter_computed() -> None:
    config = replace(CONFIG, max_lora_rank=4, max_loras=3, lora_targets=TARGETS)
    with reusing(config) as batch:
        batch.resources.lora_manager.load("fr", reference(pairs(OUT, seed=1)))
        left(batch, list(range(12)), adapter="fr")
        made = batch.update(admit=[list(range(12))] * 2, adapters=[None, "fr"])
        assert [s.reused_tokens for s in made] == [0, 11]
        assert made[1].adapter.name == "fr"
        batch.audit()


class Updating(Driver):
    """Admits several at once, as others leave."""

    def admit(self) -> None:
        batch = self.model.batch
        done = [s for s in batch.sequences if not s.pending_tokens][:2]
        count = int(self.random.integers(batch.free_rows + len(done) + 1))
        self.model.update(done, [self.prompt() for _ in range(count)])


@pytest.mark.parametrize("name", ["full", "windows", "states"])
def test_what_joins_together_holds_what_its_tokens_say(name: str, target: str) -> None:
    with opened_model(*MODELS[name]) as (batch, io):
        driver = Updating(ReuseModel(batch, io), 1)
        for _ in range(6 if target == "sim" else 200):
            driver.act()
            driver.model.check_all()
        if target != "sim":
            assert driver.model.hits == batch.reuse.figures.reused_tokens > 20
