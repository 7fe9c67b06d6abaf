"""Bound calls of KVIO do what the call does, whatever happens between them, and refuse what it refuses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.cache import KVIO, BoundCall, HeadNorm
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InteropError, ShapeError, StateError
from tests.helpers.batches import opened
from tests.helpers.kv_model import opened_io, uploaded
from tests.helpers.kv_pools import NUMPY, numbers, same_bits
from tests.helpers.models import tiny_config
from tests.helpers.threads import in_a_thread


def pools(batch: kv.Batch) -> list[np.ndarray]:
    caches = batch.resources.cache_managers[0]
    return [caches.kv(layer).to_host() for layer in range(caches.num_layers)]


def emptied(batch: kv.Batch) -> None:
    caches = batch.resources.cache_managers[0]
    for layer in range(caches.num_layers):
        pool = caches.kv(layer)
        pool.fill_from(np.zeros(pool.shape, pool.dtype.numpy()))


def rotations(io: KVIO, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    arrays = {
        name: uploaded(io, numbers(random, (16, heads, 16), "bfloat16")) for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    arrays["q_out"] = uploaded(io, np.zeros_like(arrays["q"].to_host()))
    arrays["table"] = uploaded(io, random.uniform(-1, 1, (64, 16)).astype(np.float32))
    weight = uploaded(io, numbers(random, (16,), "bfloat16"))
    return arrays | {"norm": HeadNorm(q=weight, k=weight)}


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("rotates", [False, True])
def test_a_loop_over_layers_does_what_the_calls_do(kind: str, rotates: bool) -> None:
    config = tiny_config(None, 6, None, heads=(2, 16), max_batch_size=3, max_batch_tokens=96, kv_cache_dtype=kind)
    with opened_io(config) as (batch, io):
        layers = range(3)
        given = [rotations(io, layer) for layer in layers]
        sequences = [batch.admit(num_tokens=n) for n in (9, 4, 1)]
        view = batch.step({s: s.pending_tokens for s in sequences})
        if kind == "float8_e4m3":
            for layer in layers:
                io.set_scales(layer, 0.5, [0.25, 2.0])

        def call(layer: int, view: object) -> None:
            a = given[layer]
            if rotates:
                io.write_rotated(layer, a["q"], a["k"], a["v"], view, a["table"], q_out=a["q_out"], norm=a["norm"])  # type: ignore[arg-type]
            else:
                io.write(layer, a["k"], a["v"], view)  # type: ignore[arg-type]

        def bind(layer: int) -> BoundCall:
            a = given[layer]
            if rotates:
                return io.bind_write_rotated(layer, a["q"], a["k"], a["v"], view, a["table"], q_out=a["q_out"], norm=a["norm"])
            return io.bind_write(layer, a["k"], a["v"], view)

        bound = [bind(layer) for layer in layers]
        assert [b.max_tokens for b in bound] == [16] * 3
        for counts in (None, dict.fromkeys(sequences, 1), {sequences[1]: 2}, dict.fromkeys(sequences, 1)):
            view = view if counts is None else batch.step(counts)
            emptied(batch)
            for layer in layers:
                given[layer]["q_out"].fill_from(np.zeros((16, 4, 16), given[layer]["q"].dtype.numpy()))
                call(layer, view)
            expected = [*pools(batch), *(given[layer]["q_out"].to_host() for layer in layers)]
            assert any(array.astype(np.float32).any() for array in expected[:3])
            emptied(batch)
            for layer in layers:
                given[layer]["q_out"].fill_from(np.zeros((16, 4, 16), given[layer]["q"].dtype.numpy()))
                bound[layer](view.num_tokens)
            for found, wanted in zip([*pools(batch), *(a["q_out"].to_host() for a in given)], expected, strict=True):
                assert same_bits(found, wanted)


def test_slots_are_written_and_read_in_a_graph_and_beside_other_calls() -> None:
    with opened_io(tiny_config(None, heads=(2, 8), kv_cache_dtype="float32")) as (batch, io):
        told = numbers(np.random.default_rng(1), (6, 2, 8), "float32")
        k, v = uploaded(io, told), uploaded(io, -told)
        k_out, v_out = (uploaded(io, np.ones_like(told)) for _ in range(2))
        slots = io._device.tensor((6,), dtype("int64"))
        slots.fill_from(np.array([3, 9, -1, 4, 20, 7]))
        write, read = io.bind_write_slots(0, k, v, slots), io.bind_gather_slots(0, k_out, v_out, slots)
        wanted = np.where((np.arange(6) == 2)[:, None, None], np.float32(0), told)

        def work(stream: object) -> None:
            write(stream=stream)
            read(None, stream)

        with io._device.active():
            graph = io._device.capture(work)
            graph.launch(io._device.stream)
        assert same_bits(k_out.to_host(), wanted)
        assert same_bits(v_out.to_host(), np.where(wanted == 0, np.float32(0), -wanted))
        emptied(batch)
        k_out.fill_from(np.ones_like(told))
        write(2)
        io.write_slots(0, k[3:], v[3:], slots[3:])  # another launch, over as many tokens as it likes
        read(1)
        read()  # as the time before
        assert same_bits(k_out.to_host(), np.concatenate([wanted[:1], np.ones_like(told[1:])]))
        read(6)
        assert same_bits(k_out.to_host()[[0, 1, 3, 4, 5]], wanted[[0, 1, 3, 4, 5]])
        k.fill_from(2 * told)  # what it reads is what is there then
        write(0)
        read(6)
        assert same_bits(k_out.to_host(), wanted)
        write(6)
        read()
        assert same_bits(k_out.to_host(), 2 * wanted)
        graph.close()


def test_scales_are_those_of_the_moment() -> None:
    with opened_io(tiny_config(None, heads=(2, 16), kv_cache_dtype="float8_e4m3")) as (batch, io):
        view = batch.step({batch.admit(num_tokens=1): 1})
        k = uploaded(io, np.full((1, 2, 16), 3, np.float32).astype(NUMPY["bfloat16"]))
        with pytest.raises(StateError, match="has no scales"):
            io.bind_write(0, k, k, view)
        io.set_scales(0, 1.0, 1.0)
        write = io.bind_write(0, k, k, view)
        for scale in (1.0, 0.5):
            io.set_scales(0, scale, 1.0)
            write()
            slot = int(view.slot_mapping[0].to_host()[0])
            stored = batch.resources.cache_managers[0].kv(0).to_host()[0, slot // 4, slot % 4].astype(np.float32)
            assert (stored == 3 / scale).all()


def test_a_borrower_rotates_its_queries() -> None:
    config = tiny_config(None, None, heads=(2, 16), donors={1: 0}, kv_cache_dtype="bfloat16")
    with opened_io(config) as (batch, io):
        view = batch.step({batch.admit(num_tokens=3): 3})
        a = rotations(io, 1)
        io.write_rotated(1, a["q"], None, None, view, a["table"], q_out=a["q_out"], norm=a["norm"])
        wanted = a["q_out"].to_host()
        a["q_out"].fill_from(np.zeros_like(wanted))
        io.bind_write_rotated(1, a["q"], None, None, view, a["table"], q_out=a["q_out"], norm=a["norm"])()
        assert same_bits(a["q_out"].to_host(), wanted)
        assert wanted[:3].any()
        assert not wanted[3:].any()


def test_its_arrays_live_as_long_as_it() -> None:
    with opened_io(tiny_config(None, heads=(2, 8), kv_cache_dtype="float32")) as (batch, io):
        view = batch.step({batch.admit(num_tokens=2): 2})
        k, v = (uploaded(io, np.full((2, 2, 8), n, np.float32)) for n in (1, 2))
        slots = io._device.tensor((2,), dtype("int64"))
        slots.fill_from(view.slot_mapping[0].to_host()[:2])
        references = [weakref.ref(tensor._memory) for tensor in (k, v, slots)]
        writes = [io.bind_write(0, k, v, view), io.bind_write_slots(0, k, v, slots)]
        del k, v, slots
        gc.collect()
        assert all(r() is not None for r in references)
        for write in writes:
            emptied(batch)
            write()
            assert pools(batch)[0].sum() == 2 * 2 * 8 * 3
        del write, writes
        gc.collect()
        assert all(r() is None for r in references)


def test_what_a_call_refuses_cannot_be_bound() -> None:
    config = tiny_config(None, None, heads=(2, 16), donors={1: 0}, kv_cache_dtype="bfloat16")
    with opened_io(config) as (batch, io), opened(config) as stranger:
        view = batch.step({batch.admit(num_tokens=5): 5})
        a = rotations(io, 1)
        q, k, v, table = a["q"], a["k"], a["v"], a["table"]
        strange = stranger.step({stranger.admit(num_tokens=5): 5})
        short = uploaded(io, np.zeros(4, np.int32))
        wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
            (InputError, "layer: 7", lambda: io.bind_write(7, k, v, view)),
            (InputError, "layer: 1 borrows", lambda: io.bind_write(1, k, v, view)),
            (InputError, "view: ", lambda: io.bind_write(0, k, v, strange)),
            (InputError, "view: ", lambda: io.bind_write(0, k, v, None)),  # type: ignore[arg-type]
            (ShapeError, "k, v: 4 tokens given, 5 wanted", lambda: io.bind_write(0, k[:4], v[:4], view)),
            (ShapeError, "q, k, v: 4 tokens", lambda: io.bind_write_rotated(0, q[:4], k[:4], v[:4], view, table)),
            (ShapeError, "positions: 4 tokens", lambda: io.bind_write_rotated(0, q, k, v, view, table, positions=short)),
            (ShapeError, "q: 4 tokens", lambda: io.bind_write_rotated(1, q[:4], None, None, view, table)),
            (ShapeError, "k, v: 3 tokens given, 64", lambda: io.bind_gather_slots(0, k[:3], v[:3], view.slot_mapping[0])),
            (InteropError, "k: ", lambda: io.bind_write(0, 3, v, view)),
        ]
        for error, message, call in wrong:
            with pytest.raises(error, match=message):
                call()
        assert not any(pool.astype(np.float32).any() for pool in pools(batch))


def test_tokens_streams_and_threads_are_looked_at() -> None:
    with opened_io(tiny_config(None, heads=(2, 8), max_batch_tokens=8, kv_cache_dtype="float32")) as (batch, io):
        view = batch.step({batch.admit(num_tokens=3): 3})
        k = uploaded(io, np.ones((20, 2, 8), np.float32))
        write = io.bind_write(0, k, k, view)
        assert write.max_tokens == 8  # more than the step's arrays have room for is never read
        for tokens in (9, -1, True, 2.5, "3"):
            with pytest.raises(InputError, match=r"tokens: .* an integer in 0\.\.8 wanted"):
                write(tokens)  # type: ignore[arg-type]
        for stream in ("stream", 1.5, io._device.as_stream(None) if io._device.target == "cuda" else object()):
            with pytest.raises((InputError, StateError), match="stream: "):
                write(stream=stream)
        assert not pools(batch)[0].any()
        with io._guard, pytest.raises(StateError, match="in use by another thread"):
            in_a_thread(write)
        in_a_thread(write)
        assert pools(batch)[0].sum() == 3 * 2 * 8 * 2
        assert repr(write).endswith("3 of 8 tokens)")


@pytest.mark.parametrize("closes_all", [False, True])
def test_nothing_runs_after_close(closes_all: bool) -> None:
    resources = kv.SharedResources.create_for_llm(tiny_config(None, heads=(2, 8), kv_cache_dtype="float32"))
    with resources:
        batch, io = kv.Batch(resources), KVIO(resources.cache_managers[0])
        view = batch.step({batch.admit(num_tokens=1): 1})
        k = uploaded(io, np.ones((1, 2, 8), np.float32))
        write = io.bind_write(0, k, k, view)
        if closes_all:
            resources.close()
        else:
            io.close()
        with pytest.raises(StateError, match="closed"):
            write()
        with pytest.raises(StateError, match="closed"):
            io.bind_write(0, k, k, view)
