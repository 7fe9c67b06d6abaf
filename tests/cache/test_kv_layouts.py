"""HND pages beside NHD pages: two batches of one model do the same, and every byte of their pools must agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.cache import KVIO, PagedAttention
from numba_kv.dtypes import dtype
from tests.helpers.kv_model import uploaded
from tests.helpers.kv_pools import NUMPY, numbers, same_bits
from tests.helpers.models import chunked, tiny_config

LAYOUTS = [("NHD", "HND", "NHD"), ("HND", "NHD", "HND"), "HND"]
CASES = [
    ("float32", 4, [(2, 8), (2, 8), (3, 4), (1, 8)]),
    ("bfloat16", 1, [(2, 16), (2, 16), (3, 5), (2, 16)]),
    ("float8_e4m3", 2, [(2, 16), (3, 16), (2, 7), (2, 16)]),
]
if kv.target() == "sim":  # where a thread takes as long as a small kernel elsewhere
    LAYOUTS, CASES = LAYOUTS[:1], CASES[:1]


class Twin:
    """One of the two: a batch, what moves its K and V, and the sequences by name."""

    def __init__(self, config: kv.LLMEngineConfig, **options: Any) -> None:
        self.resources = kv.SharedResources.create_for_llm(config)
        self.caches = self.resources.cache_managers[0]
        self.batch = kv.Batch(self.resources, **options)
        self.io = KVIO(self.caches)
        self.attention = PagedAttention(self.caches, self.io)
        self.sequences: dict[str, kv.Sequence] = {}

    def by_token(self, layer: int) -> np.ndarray:
        """Return a pool as [2, N, P, H, D]."""
        pool = self.caches.kv(layer).to_host()
        return pool if self.caches.storage(layer).kv_layout == "NHD" else np.ascontiguousarray(pool.swapaxes(2, 3))

    def counts(self, tokens: dict[str, int]) -> dict[kv.Sequence, int]:
        return {self.sequences[name]: count for name, count in tokens.items()}

    def close(self) -> None:
        self.attention.close()
        self.io.close()
        self.resources.close()


class Twins:
    """Does the same to a batch of NHD pages and to one of another layout."""

    def __init__(self, config: kv.LLMEngineConfig, layout: str | tuple[str, ...], **options: Any) -> None:
        self.config = config
        self.twins = [Twin(replace(config, kv_layout=each), **options) for each in ("NHD", layout)]
        self.owners = [i for i, layer in enumerate(config.layers) if layer.owns_kv]
        self.random = np.random.default_rng(3)

    def both(self, work: Callable[[Twin], Any]) -> list[Any]:
        """Do `work` with both, and compare what it returns, and all pools."""
        found = [work(twin) for twin in self.twins]
        self.check(str(work))
        if isinstance(found[0], np.ndarray):
            assert same_bits(*found)
        return found

    def check(self, what: str = "") -> None:
        for layer in self.owners:
            mine, other = (twin.by_token(layer) for twin in self.twins)
            assert same_bits(mine, other), (layer, what)

    def admit(self, **prompts: int) -> None:
        for twin in self.twins:
            twin.sequences |= zip(prompts, twin.batch.update(admit=list(prompts.values())), strict=True)

    def step(self, attends: bool = False, **tokens: int) -> None:
        """Append tokens: K and V of each layer, which is written as is or rotated, and attend."""
        views = [twin.batch.step(twin.counts(tokens)) for twin in self.twins]
        kind = self.config.kv_cache_dtype if self.config.kv_cache_dtype != "float8_e4m3" else "bfloat16"
        for layer in self.owners:
            storage = self.twins[0].caches.storage(layer)
            heads, dim = storage.num_kv_heads, storage.head_dim
            q, k, v = (numbers(self.random, (views[0].num_tokens, n, dim), kind) for n in (2 * heads, heads, heads))
            table = self.random.uniform(-1, 1, (64, dim // 2 * 2)).astype(np.float32)
            outputs = []
            for twin, view in zip(self.twins, views, strict=True):
                queries, ks, vs = (uploaded(twin.io, a) for a in (q, k, v))
                if layer % 2 and dim > 1:
                    twin.io.write_rotated(layer, queries, ks, vs, view, uploaded(twin.io, table))
                elif layer % 3:
                    twin.io.bind_write(layer, ks, vs, view)()
                else:
                    twin.io.write(layer, ks, vs, view)
                if attends:
                    out = uploaded(twin.io, np.zeros_like(q))
                    twin.attention.attend(layer, queries, out, view)
                    outputs.append(out.to_host())
            if attends:
                assert same_bits(*outputs)
                assert outputs[0].astype(np.float32).any()
        self.check("step")

    def close(self) -> None:
        for twin in self.twins:
            twin.close()


@contextmanager
def opened_twins(config: kv.LLMEngineConfig, layout: str | tuple[str, ...], **options: Any) -> Iterator[Twins]:
    twins = Twins(config, layout, **options)
    try:
        if config.kv_cache_dtype == "float8_e4m3":
            for layer in twins.owners:
                for twin in twins.twins:
                    heads = twin.caches.storage(layer).num_kv_heads
                    twin.io.set_scales(layer, [0.5 * (h + 1) for h in range(heads)], 2.0)
        yield twins
    finally:
        twins.close()


def model(kind: str, page: int, heads: Any, **limits: Any) -> kv.LLMEngineConfig:
    return tiny_config(
        None, 6, chunked(8), 6, heads=heads, page_tokens=page, max_batch_size=4, max_step_tokens=4,
        max_batch_tokens=96, kv_cache_dtype=kind, **limits,
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "page", "heads"), CASES)
def test_whatever_happens_to_sequences_every_byte_agrees(kind: str, page: int, heads: Any, layout: Any) -> None:
    with opened_twins(model(kind, page, heads), layout, scrub="poison") as twins:
        twins.admit(a=9, b=3)
        twins.step(a=9, b=3)
        for _ in range(3):
            twins.step(a=1, b=2)
        twins.both(lambda t: t.batch.rewind(t.counts({"b": 2})))
        twins.both(lambda t: t.sequences.update(c=t.batch.fork(t.sequences["a"])))
        twins.step(a=1, b=1, c=2)
        twins.both(lambda t: t.batch.reorder({t.sequences["b"]: t.sequences["c"]}))
        twins.step(a=2, b=1, c=1)
        paths = np.array([[0, 2, 3], [1, 3, -1], [0, -1, -1], [-1, -1, -1]], np.int32)
        twins.step(a=4, b=4, c=4)
        twins.both(lambda t: t.batch.move_tokens(uploaded(t.io, paths)))
        waiting = twins.both(lambda t: t.batch.swap_out(t.sequences.pop("a")))
        twins.step(b=1, c=1)
        for twin, swapped in zip(twins.twins, waiting, strict=True):
            twin.sequences["a"] = twin.batch.swap_in(swapped)
        twins.check("swap_in")
        twins.step(attends=True, a=1, b=1)
        twins.both(lambda t: t.batch.retire(t.sequences.pop("b")))
        for twin in twins.twins:
            twin.batch.audit()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_captured_tokens_know_no_layout(layout: Any) -> None:
    """What was captured of one is restored into the other, and the other way round."""
    with opened_twins(model("float32", 4, [(2, 8), (1, 8), (3, 5), (2, 4)]), layout) as twins:
        twins.admit(a=7)
        twins.step(a=7)
        snapshots = [twin.batch.capture_kv(twin.sequences["a"], 0, 7, place="host") for twin in twins.twins]
        for twin in twins.twins:
            twin.resources.stream.synchronize()
        for layer in twins.owners:
            assert same_bits(*(snapshot.kv(layer).numpy() for snapshot in snapshots))
        for twin, snapshot in zip(twins.twins, reversed(snapshots), strict=True):
            twin.sequences["b"] = twin.batch.admit(num_tokens=8)
            twin.batch.restore_kv(twin.sequences["b"], snapshot)
        twins.check("restored")
        twins.step(attends=True, b=1)
        for snapshot in snapshots:
            snapshot.close()


@pytest.mark.parametrize("layout", ["HND", ("NHD", "HND")])
def test_a_prompt_that_is_reused(layout: Any) -> None:
    config = tiny_config(None, 6, heads=[(2, 8), (2, 4)], page_tokens=4, max_batch_size=3, kv_cache_dtype="float32")
    with opened_twins(replace(config, kept_window_pages=20), layout, reuse=kv.ReuseOptions()) as twins:
        prompt = [i % 17 for i in range(30)]
        twins.both(lambda t: t.sequences.update(a=t.batch.admit(prompt)))
        while twins.twins[0].sequences["a"].pending_tokens:
            twins.step(a=twins.twins[0].batch.prefill_chunk(twins.twins[0].sequences["a"], 8))
        twins.both(lambda t: t.batch.retire(t.sequences.pop("a")))
        twins.both(lambda t: t.sequences.update(b=t.batch.admit(prompt[:27] + [40] * 3)))
        reused = [twin.sequences["b"].reused_tokens for twin in twins.twins]
        assert reused[0] == reused[1] >= 16
        twins.step(b=twins.twins[0].sequences["b"].pending_tokens)
        twins.step(attends=True, b=1)


@pytest.mark.parametrize("kind", ["float32", "float8_e4m3"])
def test_pages_and_rows_are_moved(kind: str) -> None:
    with opened_twins(model(kind, 4, [(2, 16), (3, 5), (2, 16), (1, 8)]), "HND") as twins:
        twins.admit(a=11)
        twins.step(a=11)
        twins.both(lambda t: t.io.copy_pages(0, [(0, 5), (1, 7)]))
        for layer in twins.owners:
            storage = twins.twins[0].caches.storage(layer)
            values = numbers(twins.random, (1, 6, storage.num_kv_heads, storage.head_dim), "float32")

            def moved(twin: Twin, layer: int = layer, values: np.ndarray = values) -> np.ndarray:
                k, v = uploaded(twin.io, values), uploaded(twin.io, -values)
                lengths = uploaded(twin.io, np.array([11], np.int32))
                twin.io.scatter(layer, k, v, lengths, low=4)
                k_out, v_out = (uploaded(twin.io, np.ones_like(values)) for _ in range(2))
                twin.io.gather(layer, k_out, v_out, lengths, low=6)
                return np.stack([k_out.to_host(), v_out.to_host()])

            found = twins.both(moved)[0]
            if kind == "float32":
                assert same_bits(found[0, :, :4], values[:, 2:])
                assert same_bits(found[1, :, :4], -values[:, 2:])
            assert found[:, :, :4].any()


def test_pools_and_plans_say_how_they_lie() -> None:
    config = tiny_config(None, 6, heads=(2, 8), donors={}, kv_cache_dtype="bfloat16", kv_layout=("NHD", "HND"))
    plan = kv.plan_memory(config)
    full, sliding = plan.groups
    assert (full.kv_layout, sliding.kv_layout) == ("NHD", "HND")
    assert full.slabs[0].shape == (1, 2, full.num_pages, 4, 2, 8)
    assert sliding.slabs[0].shape == (1, 2, sliding.num_pages, 2, 4, 8)
    assert plan.region("kv.1.2x8").shape == sliding.slabs[0].shape
    assert plan.nbytes == kv.plan_memory(replace(config, kv_layout="NHD")).nbytes
    with kv.SharedResources.create_for_llm(config) as resources:
        caches = resources.cache_managers[0]
        for layer, group in enumerate(plan.groups):
            assert caches.storage(layer).kv_layout == group.kv_layout
            assert caches.kv(layer).shape == group.slabs[0].shape[1:]
            assert caches.kv(layer).is_contiguous
            assert caches.by_token(layer).shape == (2, group.num_pages, 4, 2, 8)
            assert caches.k(layer).shape == caches.v(layer).shape == group.slabs[0].shape[2:]
        pool, seen = caches.kv(1), caches.by_token(1)
        values = np.arange(np.prod(pool.shape)).reshape(pool.shape) % 251
        pool.fill_from(values.astype(NUMPY["bfloat16"]))
        assert np.array_equal(seen.to_host().astype(int), values.swapaxes(2, 3))
        batch = kv.Batch(resources)
        tensors = kv.bind(resources, batch.step({batch.admit(num_tokens=1): 1}))
        assert tensors["past_key_values_1"].shape == pool.shape
        with pytest.raises(kv.ConfigError, match="kv_layout: 2 layouts given, one for each group wanted: full$"):
            replace(config, use_bounded_swa=False)
        assert seen.dtype is dtype("bfloat16")
