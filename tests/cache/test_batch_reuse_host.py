"""A batch whose kept pages go to host memory and come back: every page is compared by what its tokens make it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import CacheLimits
from tests.helpers.kv_model import opened_io
from tests.helpers.models import chunked, tiny_config
from tests.helpers.reuse_driver import MODELS, Driver, opened_model
from tests.helpers.reuse_model import ReuseModel
from tests.helpers.states import mamba2, recurrent_config

CONFIG = tiny_config(
    None, heads=(2, 4), max_batch_size=3, num_kv_pages=16, lookahead_pages=0, max_batch_tokens=64, kv_cache_dtype="float32"
)
MANY = 1 << 20


@contextmanager
def model_of(config: kv.LLMEngineConfig = CONFIG, **options: Any) -> Iterator[ReuseModel]:
    with opened_io(config, reuse=kv.ReuseOptions(**{"host_bytes": MANY, **options})) as (batch, io):
        yield ReuseModel(batch, io)


def serve(model: ReuseModel, tokens: list[int], **options: Any) -> int:
    """Compute a prompt, compare all that it reads, and let it go; return how much was reused."""
    sequence = model.admit(tokens, **options)
    reused = sequence.reused_tokens
    while sequence.pending_tokens:
        model.step({sequence: model.batch.prefill_chunk(sequence)})
    model.check_all()
    model.retire(sequence)
    return reused


def test_pages_come_back_with_what_was_in_them() -> None:
    with model_of() as model:
        batch, prompts = model.batch, [list(range(base, base + 50)) for base in (0, 100, 200)]
        assert [serve(model, prompt) for prompt in prompts] == [0, 0, 0]
        assert [serve(model, prompt) for prompt in prompts] == [48, 48, 48]
        figures, page = batch.reuse.figures, batch.plan.groups[0].page_nbytes
        assert figures.host_hits == 3
        assert batch.stats.kept_out_bytes == figures.pages_to_host * page > 0
        assert batch.stats.kept_in_bytes == figures.pages_to_device * page > 0
        assert batch.audit().pools[0].cached == 16 - batch.free_pages


def test_what_goes_together_is_one_launch_a_slab() -> None:
    with model_of() as model:
        serve(model, list(range(50)))
        batch = model.batch
        other = batch.admit(num_tokens=60)
        before = batch.stats.launches
        batch.step({other: 60})
        # page ids, the step and its slots; 11 pages have gone by one launch
        assert batch.reuse.figures.pages_to_host == 11
        assert batch.stats.launches - before == 3 + len(batch.plan.groups[0].slabs)
        batch.retire(other)
        before = batch.stats.launches
        again = batch.admit(list(range(50)))
        assert again.reused_tokens == 48
        assert batch.stats.launches - before == 3 + len(batch.plan.groups[0].slabs)  # the change, page ids, lengths; back


def test_pages_go_while_others_come_in_one_admission() -> None:
    with model_of(replace(CONFIG, num_kv_pages=14, max_kv_cache_capacity=48)) as model:
        batch, prompts = model.batch, [list(range(base, base + 44)) for base in (0, 100)]
        for prompt in (*prompts, *prompts):
            serve(model, prompt)
        made = batch.update(admit=[[*prompts[0][:9], 7], [*prompts[1][:30], 7]])
        assert [s.reused_tokens for s in made] == [9, 30]
        for sequence, prompt in zip(made, ([*prompts[0][:9], 7], [*prompts[1][:30], 7]), strict=True):
            model._admitted(sequence, prompt, None)
        model.check_all()


def test_adapters_and_salts_get_nothing_of_each_other() -> None:
    with model_of() as model:
        prompt = list(range(50))
        serve(model, prompt, salt=b"one")
        serve(model, list(range(100, 150)))
        assert serve(model, prompt) == 0
        assert serve(model, prompt, salt=b"one") == 48


@pytest.mark.parametrize("nbytes", [1, 100])
def test_too_little_memory_is_refused_and_leaves_nothing(nbytes: int) -> None:
    config = tiny_config(None, 6, kept_window_pages=8)
    with kv.SharedResources.create_for_llm(config) as resources:
        with pytest.raises(kv.ConfigError, match="host_bytes: .* at least"):
            kv.Batch(resources, reuse=kv.ReuseOptions(host_bytes=nbytes))
        kv.Batch(resources).close()
    for wrong in (-1, 1.5, None):
        with pytest.raises(kv.InputError, match="host_bytes"):
            kv.ReuseOptions(host_bytes=wrong)


def test_host_memory_is_divided_as_that_of_the_device() -> None:
    config = recurrent_config(mamba2(), types=("both", "attention"), kept_states=6, num_kv_pages=30)
    with kv.SharedResources.create_for_llm(config) as resources:
        group = resources.plan.groups[0]
        on_device = group.page_nbytes * group.usable_pages + 6 * resources.cache_managers[0].mamba_cache.slot_nbytes
        batch = kv.Batch(resources, reuse=kv.ReuseOptions(host_bytes=2 * on_device))
        host = batch.reuse.cache.store.lower.store
        assert (host.full.pool.usable_pages, host.snapshots.count) == (2 * group.usable_pages, 12)
        assert resources.device.pinned.current_bytes > 1.9 * on_device


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(None, heads=(1, 3), kv_cache_dtype="float16", page_tokens=1, num_kv_pages=9, max_kv_cache_capacity=9),
        tiny_config(
            None,
            None,
            heads=[(1, 4), (2, 6)],
            kv_cache_dtype="float8_e4m3",
            page_tokens=2,
            num_kv_pages=10,
            max_kv_cache_capacity=16,
        ),
    ],
)
def test_pages_of_any_size_are_moved(config: kv.LLMEngineConfig) -> None:
    """Odd pages have layers whose halves do not follow each other at one distance, and units of 2 bytes."""
    random = np.random.default_rng(1)
    with kv.SharedResources.create_for_llm(config) as resources:
        batch = kv.Batch(resources, reuse=kv.ReuseOptions(host_bytes=MANY))
        pools, pages = resources.cache_managers[0], batch.reuse.host
        expected = []
        for layer in range(len(config.layers)):
            pool = pools.kv(layer)
            raw = random.integers(0, 100, pool.nbytes, np.uint8).view(pool.dtype.numpy()).reshape(pool.shape)
            pool.fill_from(raw)
            expected.append(raw)
        pages.move(0, np.array([[3, 1], [5, 0]], np.int32), out=True)
        pages.move(0, np.array([[1, 2], [0, 6]], np.int32), out=False)
        rows = pages.read(0, np.array([1, 0], np.int32))
        pages.write(0, np.array([4, 2], np.int32), rows)
        pages.move(0, np.array([[4, 7], [2, 8], [1 << 30, 1], [1, -1]], np.int32), out=False)
        for layer, raw in enumerate(expected):
            found = pools.kv(layer).to_host()
            for source, target in ((3, 2), (5, 6), (3, 7), (5, 8), (4, 4), (1, 1)):
                assert found[:, target].tobytes() == raw[:, source].tobytes()


HOSTS = {"full": 20_000, "few blocks": 3000, "whole pages": 1 << 16, "windows": 40_000, "small pages": 1 << 16}
HOSTS |= {"windows alone": 9000, "states": 60_000, "convolutions": 60_000, "states alone": 1 << 16}


@pytest.mark.parametrize("name", MODELS)
def test_whatever_comes_back_holds_what_its_tokens_say(name: str, target: str) -> None:
    config, limits = MODELS[name]
    with opened_model(config, limits, host_bytes=HOSTS[name]) as (batch, io):
        model = ReuseModel(batch, io)
        driver = Driver(model, 0)
        for i in range(8 if target == "sim" else 200):
            driver.act()
            if i % 3 == 0:
                model.check_all()
        figures = batch.reuse.figures
        if target != "sim":
            assert model.hits == figures.reused_tokens > 20
            assert figures.pages_to_host + figures.states_to_host > 0
            assert figures.pages_to_device + figures.states_to_device > 0
        batch.clear()
        batch.reuse.cache.clear()
        assert batch.audit().pools[0].cached == 0


def test_windows_come_back_for_chunked_attention_too() -> None:
    config = tiny_config(
        None, 6, chunked(8), heads=(1, 4), max_batch_size=3, kept_window_pages=6, num_kv_pages=20, max_batch_tokens=64,
        kv_cache_dtype="float32",
    )  # fmt: skip
    with model_of(config, policy=PublishPolicy(every_blocks=2), limits=CacheLimits(max_blocks=12)) as model:
        prompts = [list(range(base, base + 41)) for base in (0, 100, 200)]
        for prompt in prompts:
            serve(model, prompt)
        assert [serve(model, prompt) for prompt in prompts] == [40, 40, 40]
        assert model.batch.reuse.figures.evicted_copies > 0
