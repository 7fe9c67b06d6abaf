"""Packed reads of rows, and slots that are found once for all layers of a group: what `gather` reads, in other places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InteropError, ShapeError, StateError
from tests.helpers.kv_model import KVModel, opened_io, uploaded
from tests.helpers.kv_pools import NUMPY, numbers, same_bits
from tests.helpers.models import chunked, tiny_config


def int32(io: kv.KVIO, values: Any) -> Tensor:
    return uploaded(io, np.array(values, np.int32))


def slots_of(io: kv.KVIO, *shape: int) -> Tensor:
    tensor = io._device.tensor(shape, dtype("int64"))
    tensor.fill_from(np.full(shape, 77))
    return tensor


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("kind", "given"), [("float32", "float32"), ("float8_e4m3", "bfloat16")])
def test_packed_rows_are_the_dense_ones_without_their_gaps(kind: str, given: str, layout: str) -> None:
    config = tiny_config(
        None, 6, chunked(8), None, heads=[(2, 16), (2, 16), (1, 16), (3, 5)], max_batch_size=4, max_batch_tokens=96,
        kv_cache_dtype=kind, kv_layout=layout,
    )  # fmt: skip
    with opened_io(config) as (batch, io):
        sequences = batch.update(admit=[13, 5, 1])
        view = batch.step({s: s.pending_tokens for s in sequences})
        random = np.random.default_rng(2)
        for layer in range(4):
            storage = batch.resources.cache_managers[0].storage(layer)
            if kind == "float8_e4m3":
                io.set_scales(layer, 0.5, [1.0 + h for h in range(storage.num_kv_heads)])
            k, v = (numbers(random, (view.num_tokens, storage.num_kv_heads, storage.head_dim), given) for _ in range(2))
            io.write(layer, uploaded(io, k), uploaded(io, v), view)
        batch.step({sequences[0]: 1})
        lengths = int32(io, [14, 5, 1, 0])
        for starts, counts, rows, low in (
            ([0, 0, 0, 0], [14, 5, 1, 0], None, 0),
            ([9, 0, 0, 0], [5, 0, 0, 3], None, 0),
            ([-2, 3, 0, 5], [4, 6, 2, 2], [2, 0, 1, -1], 1),  # before and behind rows, rows in another order, no row
        ):
            cumulative = np.cumsum([0, *counts])
            named = rows if rows is not None else [0, 1, 2, 3]
            ends = int32(io, lengths.to_host()[np.maximum(named, 0)])
            options: dict[str, Any] = {"low": low, "rows": None if rows is None else int32(io, rows)}
            for layer in range(4):
                storage = batch.resources.cache_managers[0].storage(layer)
                shape = (storage.num_kv_heads, storage.head_dim)
                wide = [uploaded(io, np.ones((4, max(counts), *shape), NUMPY[given])) for _ in range(2)]
                io.gather(layer, *wide, ends, starts=int32(io, starts), **options)
                packed = [uploaded(io, np.ones((cumulative[-1] + 2, *shape), NUMPY[given])) for _ in range(2)]
                io.gather_ragged(layer, *packed, int32(io, cumulative), ends, starts=int32(io, starts), **options)
                for dense, found in zip((t.to_host() for t in wide), (t.to_host() for t in packed), strict=True):
                    rows_of = [dense[b, : counts[b]] for b in range(4)]
                    assert same_bits(found, np.concatenate([*rows_of, np.zeros((2, *shape), NUMPY[given])]))


def test_windows_give_their_live_tokens() -> None:
    config = tiny_config(None, 6, heads=(2, 8), max_batch_size=2, max_batch_tokens=96, kv_cache_dtype="float32")
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        first, second = batch.update(admit=[23, 4])
        model.step({first: 23, second: 4})
        model.step({first: 1, second: 1})
        live = [max(0, s.length - 5) for s in (first, second)]  # what the next query sees of a window of 6
        counts = [s.length - n for s, n in zip((first, second), live, strict=True)]
        k, v = (uploaded(io, np.ones((sum(counts), 2, 8), np.float32)) for _ in range(2))
        io.gather_ragged(1, k, v, int32(io, [0, *np.cumsum(counts)]), int32(io, [24, 5]), starts=int32(io, live))
        told = [model.told[s][1][n:] for s, n in zip((first, second), live, strict=True)]
        wanted = np.array([pair for rows in told for pair in rows])
        assert np.array_equal(k.to_host(), wanted[:, 0])
        assert np.array_equal(v.to_host(), wanted[:, 1])
        whole = [uploaded(io, np.ones((24, 2, 8), np.float32)) for _ in range(2)]
        io.gather_ragged(1, *whole, int32(io, [0, 24]), int32(io, [24]))
        assert not whole[0].to_host()[:12].any()  # pages that have left the window
        assert np.array_equal(whole[0].to_host()[19:], wanted[:5, 0])


@pytest.mark.parametrize("is_ragged", [False, True])
def test_slots_are_found_once_for_all_layers_of_a_group(is_ragged: bool) -> None:
    config = tiny_config(None, 6, None, heads=(2, 8), max_batch_size=2, max_batch_tokens=96, kv_cache_dtype="float32")
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        sequences = batch.update(admit=[9, 4])
        model.step({s: s.pending_tokens for s in sequences})
        lengths, shape = int32(io, [9, 4]), (13,) if is_ragged else (2, 9)
        slots, cumulative = slots_of(io, *shape), int32(io, [0, 9, 13]) if is_ragged else None
        k, v = (uploaded(io, np.ones((*shape, 2, 8), np.float32)) for _ in range(2))
        reads = {layer: io.bind_gather_slots(layer, k, v, slots) for layer in (0, 2)}

        def work(stream: object) -> None:
            io.find_slots(0, slots, lengths, cu_seqlens=cumulative, stream=stream)

        with io._device.active():
            graph = io._device.capture(work)
            graph.launch(io._device.stream)
        for layer, read in reads.items():
            read()
            found = k.to_host().reshape(-1, 2, 8)
            told = [np.array(model.told[s][layer])[:, 0] for s in sequences]
            gap = [] if is_ragged else [np.zeros((5, 2, 8), np.float32)]
            assert np.array_equal(found, np.concatenate([*told, *gap]))
        before = batch.resources.cache_managers[0].kv(1).to_host()
        io.write_slots(2, v, v, slots)  # back, as `scatter` does
        io.gather(2, k.device.tensor((2, 9, 2, 8), dtype("float32")), wide := k.device.tensor((2, 9, 2, 8), k.dtype), lengths)
        assert same_bits(wide.to_host()[0], v.to_host().reshape(-1, 2, 8)[:9])
        assert same_bits(batch.resources.cache_managers[0].kv(1).to_host(), before)
        graph.close()


def test_bad_input_changes_nothing() -> None:
    with opened_io(tiny_config(None, heads=(2, 8), kv_cache_dtype="float32")) as (batch, io):
        batch.step({batch.admit(num_tokens=5): 5})
        k, v = (uploaded(io, np.ones((6, 2, 8), np.float32)) for _ in range(2))
        lengths, cumulative, slots = int32(io, [5, 0]), int32(io, [0, 5, 5]), slots_of(io, 6)
        square = slots_of(io, 2, 3)
        many = int32(io, [0] * 4)
        closed = int32(io, [5, 0])
        closed._memory.close(io._device.stream)
        for error, message, call in (
            (ShapeError, r"k: 2 axes given, \[T, H, D\]", lambda: io.gather_ragged(0, k[0], v, cumulative, lengths)),
            (ShapeError, "cu_seqlens: .* at least 2", lambda: io.gather_ragged(0, k, v, cumulative[:0], lengths)),
            (ShapeError, "cu_seqlens: .* at least 2", lambda: io.gather_ragged(0, k, v, cumulative[:1], lengths)),
            (ShapeError, "cu_seqlens: 3 rows given, but there are 2", lambda: io.gather_ragged(0, k, v, many, many)),
            (ShapeError, "lengths: .* at least 2", lambda: io.gather_ragged(0, k, v, cumulative, lengths[:1])),
            (ShapeError, "lengths: ", lambda: io.gather_ragged(0, k, v, cumulative, slots)),
            (StateError, "given back", lambda: io.gather_ragged(0, k, v, cumulative, closed)),
            (InteropError, "cu_seqlens: ", lambda: io.gather_ragged(0, k, v, 3, lengths)),
            (InputError, "layer: 4", lambda: io.gather_ragged(4, k, v, cumulative, lengths)),
            (InputError, "each lies in the other", lambda: io.gather_ragged(0, k, k, cumulative, lengths)),
            (ShapeError, r"slots: 1 axes given, \[B, n\]", lambda: io.find_slots(0, slots, lengths)),
            (ShapeError, r"slots: 2 axes given, \[T\]", lambda: io.find_slots(0, square, lengths, cu_seqlens=cumulative)),
            (ShapeError, "slots: int32", lambda: io.find_slots(0, lengths, lengths)),
            (ShapeError, "slots: 3 rows given", lambda: io.find_slots(0, slots_of(io, 3, 1), int32(io, [1] * 3))),
            (InputError, "low: ", lambda: io.find_slots(0, square, lengths, low=True)),
            (InputError, "slots: overlaps lengths", lambda: io.find_slots(0, square, words(square))),
        ):
            with pytest.raises(error, match=message):
                call()
        assert (k.to_host() == 1).all()
        assert (square.to_host() == 77).all()
        rows, ones, tall = int32(io, [0, 0, 0]), int32(io, [1] * 3), slots_of(io, 3, 1)

        def captured() -> None:
            graph = io._device.capture(lambda stream: io.find_slots(0, tall, ones, rows=rows, stream=stream))
            graph.launch(io._device.as_stream(None))  # on a host, where a graph is a call

        with pytest.raises(ShapeError, match="starts: None given for 3 rows in a capture"):
            captured()
        io.find_slots(0, tall, ones, rows=rows, stream=io._device.stream)
        assert len(set(tall.to_host().ravel().tolist())) == 1


def words(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as int32."""
    return Tensor(tensor._memory, tensor.device, dtype("int32"), (2 * tensor.size,))
