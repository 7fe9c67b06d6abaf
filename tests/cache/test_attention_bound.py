"""Bound attention: the bits of `attend`, step after step, and what it refuses."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.cache import BoundAttention, PagedAttention
from numba_kv.errors import InputError, ShapeError, StateError
from tests.helpers.batches import opened
from tests.helpers.kv_model import opened_io, uploaded
from tests.helpers.kv_pools import numbers, same_bits
from tests.helpers.models import tiny_config
from tests.helpers.threads import in_a_thread


def written(io: kv.KVIO, view: object, layers: int, seed: int) -> None:
    """Write K and V of a step to all layers."""
    random = np.random.default_rng(seed)
    for layer in range(layers):
        k, v = (uploaded(io, numbers(random, (view.num_tokens, 2, 8), "float32")) for _ in range(2))  # type: ignore[attr-defined]
        io.write(layer, k, v, view)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["float32", "float8_e4m3"])
def test_a_loop_over_layers_does_what_attend_does(kind: str) -> None:
    config = tiny_config(None, 6, heads=(2, 8), max_batch_size=3, max_batch_tokens=96, max_step_tokens=4, kv_cache_dtype=kind)
    with opened_io(config) as (batch, io), PagedAttention(io.caches, io) as attention:
        if kind == "float8_e4m3":
            for layer in range(2):
                io.set_scales(layer, 0.5, 2.0)
        values = numbers(np.random.default_rng(1), (12, 4, 8), "float32")
        q, out = uploaded(io, values), uploaded(io, np.zeros_like(values))
        sinks = uploaded(io, np.linspace(-1, 1, 4, dtype=np.float32))
        options = [{}, {"scale": 0.5, "soft_cap": 3.0, "sinks": sinks}]
        bound = [attention.bind_attend(layer, q, out, **options[layer]) for layer in range(2)]  # type: ignore[arg-type]
        assert [b.max_tokens for b in bound] == [12, 12]
        sequences = batch.update(admit=[7, 4, 1])
        for number in range(3 if io._device.target == "sim" else 7):
            counts = {s: min(s.pending_tokens, 4) for s in sequences if s.pending_tokens} or dict.fromkeys(sequences, 1)
            view = batch.step(counts)
            written(io, view, 2, number)
            for layer in range(2):
                found = []
                for call in (
                    lambda layer=layer, view=view: attention.attend(layer, q, out, view, **options[layer]),  # type: ignore[arg-type]
                    lambda layer=layer, view=view: bound[layer](view),
                ):
                    out.fill_from(np.zeros_like(values))
                    call()
                    found.append(out.to_host())
                assert same_bits(*found)
                assert found[0][: view.num_tokens].any()
                assert not found[0][view.num_tokens :].any()
                with io._device.active():
                    graph = io._device.capture(lambda stream, layer=layer, view=view: bound[layer](view, stream))
                    out.fill_from(np.zeros_like(values))
                    graph.launch(io._device.stream)
                np.testing.assert_allclose(out.to_host(), found[0], rtol=1e-5, atol=1e-6)  # a graph may cut otherwise
                graph.close()


def test_what_it_refuses() -> None:
    config = tiny_config(None, 6, heads=(2, 8), max_batch_tokens=64, kv_cache_dtype="float32")
    with opened_io(config) as (batch, io), opened(config) as other, PagedAttention(io.caches, io) as attention:
        values = np.ones((4, 4, 8), np.float32)
        q, out = uploaded(io, values), uploaded(io, np.zeros_like(values))
        full, sliding = (attention.bind_attend(layer, q, out) for layer in range(2))
        strange = other.step({other.admit(num_tokens=1): 1})
        sequence = batch.admit(num_tokens=20)
        long = batch.step({sequence: 3})
        written(io, long, 2, 1)
        with pytest.raises(InputError, match="layer 1 keeps a window .* use attend_long"):
            sliding(long)
        full(long)
        before = out.to_host()
        assert before[:3].any()
        many = batch.step({sequence: 5})
        with pytest.raises(ShapeError, match="q, out: 4 tokens given, 5 wanted"):
            full(many)
        for view in (strange, None, 3):
            with pytest.raises(InputError, match="view: .* is not a step of this model"):
                full(view)
        view = batch.step({sequence: 1})
        for stream in ("stream", 1.5):
            with pytest.raises((InputError, StateError), match="stream: "):
                full(view, stream)
        with attention._guard, pytest.raises(StateError, match="in use by another thread"):
            in_a_thread(lambda: full(view))
        with pytest.raises(InputError, match="out: overlaps q"):
            attention.bind_attend(0, q, q)
        with pytest.raises(InputError, match="soft_cap: "):
            attention.bind_attend(0, q, out, soft_cap=0.0)
        with pytest.raises(ShapeError, match="sinks: "):
            attention.bind_attend(0, q, out, sinks=q)
        assert same_bits(out.to_host(), before)
        attention.close()
        with pytest.raises(StateError, match="PagedAttention is closed"):
            full(view)


def test_its_arrays_live_as_long_as_it_and_scales_as_long_as_they() -> None:
    config = tiny_config(None, heads=(2, 8), kv_cache_dtype="float8_e4m3")
    resources = kv.SharedResources.create_for_llm(config)
    with resources:
        batch, caches = kv.Batch(resources), resources.cache_managers[0]
        io = kv.KVIO(caches)
        io.set_scales(0, 1.0, 1.0)
        view = batch.step({batch.admit(num_tokens=1): 1})

        def bound(attention: PagedAttention) -> tuple[BoundAttention, list[weakref.ref[object]]]:
            q, out = (uploaded(io, np.ones((1, 4, 8), np.float32)) for _ in range(2))
            return attention.bind_attend(0, q, out), [weakref.ref(tensor._memory) for tensor in (q, out)]

        with PagedAttention(caches, io) as attention:
            call, references = bound(attention)
            gc.collect()
            assert all(r() is not None for r in references)
            call(view)
            io.close()
            with pytest.raises(StateError, match="closed"):
                call(view)
            del call
            gc.collect()
            assert all(r() is None for r in references)


def test_pools_that_are_gone() -> None:
    resources = kv.SharedResources.create_for_llm(tiny_config(None, heads=(2, 8), kv_cache_dtype="float32"))
    with resources:
        batch, caches = kv.Batch(resources), resources.cache_managers[0]
        view = batch.step({batch.admit(num_tokens=1): 1})
        q, out = (resources.device.tensor((1, 2, 8), kv.dtype("float32")) for _ in range(2))
        call = PagedAttention(caches).bind_attend(0, q, out)
        call(view)
    with pytest.raises(StateError, match="closed"):
        call(view)
