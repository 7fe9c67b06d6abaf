"""KVIO over a real batch: what was written is what is read, whatever happens to rows and windows in between."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.cache import KVIO
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InteropError, ShapeError, StateError
from tests.helpers.batches import opened
from tests.helpers.kv_pools import NUMPY, converted, numbers, same_bits
from tests.helpers.models import chunked, tiny_config


@contextmanager
def opened_io(config: kv.LLMEngineConfig) -> Iterator[tuple[kv.Batch, KVIO]]:
    resources = kv.SharedResources.create_for_llm(config)
    try:
        with KVIO(resources.cache_managers[0]) as io:
            yield kv.Batch(resources), io
    finally:
        resources.close()


def uploaded(io: KVIO, values: np.ndarray) -> Tensor:
    tensor = io._device.tensor(values.shape, dtype(values.dtype.name))
    tensor.fill_from(values)
    return tensor


class Model:
    """Writes every step's K and V of all layers, and remembers them as a list a sequence."""

    def __init__(self, batch: kv.Batch, io: KVIO, kind: str = "float32") -> None:
        self.batch, self.io, self.kind = batch, io, kind
        self.random = np.random.default_rng(5)
        self.layers = [i for i, layer in enumerate(batch.plan.config.layers) if layer.owns_kv]
        self.told: dict[kv.Sequence, dict[int, list[np.ndarray]]] = {}

    def step(self, counts: dict[kv.Sequence, int]) -> None:
        view = self.batch.step(counts)
        order = sorted((s.row, s, n) for s, n in counts.items())
        for layer in self.layers:
            storage = self.batch.resources.cache_managers[0].storage(layer)
            shape = (view.num_tokens, storage.num_kv_heads, storage.head_dim)
            k, v = (numbers(self.random, shape, self.kind) for _ in range(2))
            self.io.write(layer, uploaded(self.io, k), uploaded(self.io, v), view)
            at = 0
            for _, sequence, count in order:
                told = self.told.setdefault(sequence, {i: [] for i in self.layers})[layer]
                told += [np.stack([k[t], v[t]]) for t in range(at, at + count)]
                at += count

    def rewind(self, sequence: kv.Sequence, count: int) -> None:
        self.batch.rewind({sequence: count})
        for told in self.told[sequence].values():
            del told[len(told) - count :]

    def check(self) -> None:
        """Gather all that a next token sees of every sequence, and some positions before and behind."""
        sequences = [s for s in self.batch.sequences if s in self.told]
        if not sequences:
            return
        lengths = uploaded(self.io, np.array([s.length for s in sequences], np.int32))
        rows = uploaded(self.io, np.array([s.row for s in sequences], np.int32))
        columns = max(s.length for s in sequences) + 3
        for layer in self.layers:
            storage = self.batch.resources.cache_managers[0].storage(layer)
            shape = (len(sequences), columns, storage.num_kv_heads, storage.head_dim)
            k, v = (uploaded(self.io, np.ones(shape, NUMPY[self.kind])) for _ in range(2))
            self.io.gather(layer, k, v, lengths, rows=rows)
            found = np.stack([k.to_host(), v.to_host()], 2)
            for b, sequence in enumerate(sequences):
                told = self.told[sequence][layer]
                assert len(told) == sequence.length
                for position in range(storage.window.lowest_key(sequence.length), sequence.length):
                    wanted = converted(told[position], self.kind)
                    assert same_bits(found[b, position], wanted), (layer, sequence.length, position)
                assert not found[b, sequence.length :].astype(np.float32).any()
                unmapped = storage.window.lowest_key(max(0, sequence.length - 1)) - storage.page_tokens
                if not storage.window.is_full and self.batch.plan.config.max_step_tokens == 1 and unmapped > 0:
                    left = found[b, : unmapped // storage.page_tokens * storage.page_tokens].astype(np.float32)
                    assert not left.any()


@pytest.mark.parametrize("page", [1, 4, 16])
def test_windows_keep_what_a_token_sees(page: int) -> None:
    config = tiny_config(
        None, 6, chunked(8), 6, heads=[(2, 8), (1, 8), (2, 4), (3, 7)], page_tokens=page, max_batch_size=3,
        max_step_tokens=3, max_batch_tokens=96, kv_cache_dtype="float32",
    )  # fmt: skip
    with opened_io(config) as (batch, io):
        model = Model(batch, io)
        first, second = batch.admit(num_tokens=11), batch.admit(num_tokens=2)
        model.step({first: 11, second: 2})
        model.check()
        for _ in range(7):
            model.step({first: 1, second: 3})
            model.check()
        model.rewind(second, 2)
        model.rewind(first, 1)
        model.check()
        model.step({first: 3, second: 1})
        batch.retire(first)
        third = batch.admit(num_tokens=20)
        model.step({second: 2, third: 20})
        model.check()
        batch.compact()
        model.step({third: 1, second: 1})
        model.check()
        batch.audit()


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_random_steps(kind: str) -> None:
    config = tiny_config(None, 5, heads=(2, 4), page_tokens=2, max_batch_size=3, max_batch_tokens=64, kv_cache_dtype=kind)
    with opened_io(config) as (batch, io):
        model, random = Model(batch, io, kind), np.random.default_rng(6)
        for _ in range(12 if io._device.target == "sim" else 60):
            if batch.free_rows and random.random() < 0.4:
                batch.admit(num_tokens=int(random.integers(1, 9)))
            sequences = list(batch.sequences)
            choice = random.random()
            if sequences and choice < 0.15:
                batch.retire(sequences[0])
            elif sequences and choice < 0.3 and sequences[-1].length and not sequences[-1].pending_tokens:
                model.rewind(sequences[-1], 1)
            counts = {s: s.pending_tokens or 1 for s in batch.sequences if s.length < 40}
            if counts:
                model.step(counts)
            model.check()


def test_a_long_step_finds_the_tokens_before_it_by_carry_slots() -> None:
    with opened_io(tiny_config(5, heads=(1, 8), max_batch_size=2, kv_cache_dtype="float32")) as (batch, io):
        model = Model(batch, io)
        sequence = batch.admit(num_tokens=9)
        model.step({sequence: 9})
        view = batch.step({sequence: 6})
        slots = view.carry_slots[1]
        assert slots is not None
        k, v = (uploaded(io, np.ones((2, 4, 1, 8), np.float32)) for _ in range(2))
        io.gather_slots(0, k, v, slots)
        assert np.array_equal(k.to_host()[0, :, 0], [told[0, 0] for told in model.told[sequence][0][5:]])
        assert np.array_equal(v.to_host()[0, :, 0], [told[1, 0] for told in model.told[sequence][0][5:]])
        assert not k.to_host()[1].any()


def test_scales_are_of_a_layer_and_a_head() -> None:
    config = tiny_config(None, None, heads=(2, 8), kv_cache_dtype="float8_e4m3")
    with opened_io(config) as (batch, io):
        sequence = batch.admit(num_tokens=5)
        view = batch.step({sequence: 5})
        values = numbers(np.random.default_rng(7), (5, 2, 8), "bfloat16")
        k = uploaded(io, values)
        with pytest.raises(StateError, match="layer 1 is stored as float8_e4m3 and has no scales"):
            io.write(1, k, k, view)
        io.set_scales(0, 2.0, 1.0)
        io.set_scales(1, [0.5, 4.0], np.float32(0.1))
        lengths = uploaded(io, np.array([5], np.int32))
        for layer, k_scale, v_scale in ((0, [2, 2], [1, 1]), (1, [0.5, 4], [0.1, 0.1])):
            io.write(layer, k, k, view)
            out = [uploaded(io, np.ones((1, 5, 2, 8), np.float32)) for _ in range(2)]
            io.gather(layer, *out, lengths)
            raw = [uploaded(io, np.ones((1, 5, 2, 8), NUMPY["float8_e4m3"])) for _ in range(2)]
            io.gather(layer, *raw, lengths)
            for scale, found, stored in zip((k_scale, v_scale), out, raw, strict=True):
                scale = np.array(scale, np.float32)
                wanted = converted(values, "float8_e4m3", np.float32(1) / scale)
                assert same_bits(stored.to_host()[0], wanted)
                assert same_bits(found.to_host()[0], converted(wanted, "float32", scale))
        for bad in (0.0, -1.0, np.nan, np.inf, 1e-39, 1e39, [1.0, 0.0], "a", [1.0] * 3):
            with pytest.raises(InputError, match="v_scale: "):
                io.set_scales(0, 1.0, bad)
    with opened_io(tiny_config(kv_cache_dtype="float16")) as (_, io), pytest.raises(InputError, match="only float8_e4m3"):
        io.set_scales(0, 1.0, 1.0)


def test_scatter_is_the_reverse_of_gather() -> None:
    with opened_io(tiny_config(None, 6, heads=(2, 4), max_batch_size=3, max_batch_tokens=96)) as (batch, io):
        sequences = [batch.admit(num_tokens=n) for n in (13, 3)]
        batch.step({s: s.pending_tokens for s in sequences})
        lengths = uploaded(io, np.array([13, 3], np.int32))
        starts = uploaded(io, np.array([8, 0], np.int32))
        kind = batch.plan.config.kv_cache_dtype
        for layer in range(2):
            values = [numbers(np.random.default_rng(layer + i), (2, 7, 2, 4), kind) for i in (10, 20)]
            k, v = (uploaded(io, a) for a in values)
            io.scatter(layer, k, v, lengths, starts=starts, low=1)
            io.gather(layer, k, v, lengths, starts=starts, low=1)
            for given, tensor in zip(values, (k, v), strict=True):
                found = tensor.to_host()
                assert same_bits(found[0, :4], given[0, :4])
                assert same_bits(found[1, :2], given[1, :2])
                assert not found[0, 4:].astype(np.float32).any()
                assert not found[1, 2:].astype(np.float32).any()


def snapshot(batch: kv.Batch) -> list[np.ndarray]:
    pools = batch.resources.cache_managers[0]
    return [pools.kv(i).to_host() for i in range(pools.num_layers)]


@pytest.mark.parametrize(("heads", "dim"), [(2, 8), (1, 1), (3, 5)])
@pytest.mark.parametrize("page", [1, 16])
def test_pages_are_copied_in_every_layer_of_a_group(heads: int, dim: int, page: int) -> None:
    layers = (None, 6, None, None)
    shapes = [(heads, dim), (heads, dim), (heads, dim), (1, 8)]
    with opened_io(tiny_config(*layers, heads=shapes, page_tokens=page, kv_cache_dtype="float8_e4m3")) as (batch, io):
        random, pools = np.random.default_rng(8), batch.resources.cache_managers[0]
        for layer in range(4):
            usable = pools.kv(layer).shape[1] - 2
            part = pools.kv(layer)[:, :usable]
            part.fill_from(random.integers(0, 256, part.shape, np.uint8).view(NUMPY["float8_e4m3"]))
        expected = snapshot(batch)
        usable = pools.storage(0).num_pages - 2
        pairs = [(0, 1), (0, 2), (usable, 3)]  # the last one from the null page
        io.copy_pages(0, pairs)
        for layer in (0, 2, 3):
            for source, target in pairs:
                expected[layer][:, target] = expected[layer][:, source]
        for found, wanted in zip(snapshot(batch), expected, strict=True):
            assert same_bits(found, wanted)
        io.copy_pages(0, [])
        for bad, message in (
            ([(0, usable)], "target"),
            ([(0, -1)], "target"),
            ([(usable + 1, 0)], "source"),
            ([(0, 1), (2, 1)], "target twice"),
            ([(0, 1), (1, 2)], "both source and target"),
            ([(1, 1)], "both source and target"),
            ([(1, 2, 3)], "pairs of page ids"),
            ([(0.5, 1)], "pairs of page ids"),
        ):
            with pytest.raises(InputError, match=message):
                io.copy_pages(0, bad)
        for group in (2, -1, "a", True, False):
            with pytest.raises(InputError, match="group: "):
                io.copy_pages(group, [(0, 1)])
        for found, wanted in zip(snapshot(batch), expected, strict=True):
            assert same_bits(found, wanted)


def test_more_pairs_than_one_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba_kv.cache.kv_pages.MAX_PAIRS", 2)
    monkeypatch.setattr("numba_kv.cache.kv_pages.PART_NBYTES", 64)
    with opened_io(tiny_config(None, heads=(3, 8), kv_cache_dtype="float32")) as (batch, io):
        pool = batch.resources.cache_managers[0].kv(0)
        values = np.random.default_rng(9).normal(size=pool.shape).astype(np.float32)
        pool.fill_from(values)
        pairs = [(i, i + 5) for i in range(5)]
        io.copy_pages(0, pairs)
        values[:, 5:10] = values[:, :5]
        assert same_bits(pool.to_host(), values)


def test_arrays_of_other_libraries_are_used_in_place() -> None:
    with opened_io(tiny_config(heads=(2, 8), kv_cache_dtype="bfloat16")) as (batch, io):
        if io._device.target == "cuda":
            pytest.skip("NumPy arrays are not in device memory")
        sequence = batch.admit(num_tokens=5)
        view = batch.step({sequence: 5})
        packed = numbers(np.random.default_rng(3), (7, 6, 8), "float32")  # q of 2 heads, k, v; 2 rows too many
        for stream in (None, None, io._device.stream):  # bound once
            io.write(0, packed[:, 2:4], packed[:, 4:], view, stream=stream)
        assert len(io._launches) == 1
        k, v = np.ones((1, 6, 2, 8), np.float16), np.ones((1, 6, 2, 8), np.float16)
        io.gather(0, k, v, np.array([5], np.int32))
        for found, heads in ((k, slice(2, 4)), (v, slice(4, 6))):
            assert same_bits(found[0, :5], converted(converted(packed[:5, heads], "bfloat16"), "float16"))
            assert not found[0, 5].any()
        k.flags.writeable = False
        with pytest.raises(InteropError, match="k: the array is read-only"):
            io.gather(0, k, v, np.array([5], np.int32))


def test_layers_are_named_as_the_caller_counts_them() -> None:
    """Decoder layers, of which not all have attention; what a message advises can be done."""
    config = tiny_config(None, None, None, heads=(2, 8), donors={2: 1}, kv_cache_dtype="float8_e4m3")
    types = ("none", "attention", "none", "attention", "attention")
    for kind in ("float8_e4m3", "float32"):
        with opened_io(replace(config, layer_types=types, kv_cache_dtype=kind)) as (batch, io):
            sequence = batch.admit(num_tokens=5)
            view = batch.step({sequence: 5})
            k = uploaded(io, np.ones((5, 2, 8), np.float32))
            with pytest.raises(InputError, match="layer: 4 borrows K and V of layer 3, and writes none"):
                io.write(4, k, k, view)
            with pytest.raises(InputError, match="layer: 4 borrows K and V of layer 3, and writes none"):
                io.set_scales(4, 1.0, 1.0)
            if kind == "float32":
                with pytest.raises(InputError, match="layer: 3 is stored as float32"):
                    io.set_scales(3, 1.0, 1.0)
                continue
            with pytest.raises(StateError, match=r"layer 3 is stored .* set_scales\(3, 1.0, 1.0\) is to say so"):
                io.write(3, k, k, view)
            with pytest.raises(StateError, match=r"layer 4 is stored .* set_scales\(3, 1.0, 1.0\) is to say so"):
                io.scales(4)
            io.set_scales(3, 1.0, 1.0)
            io.write(3, k, k, view)
            assert io.scales(4) is not None


def test_bad_input_changes_nothing() -> None:
    with opened_io(tiny_config(None, None, heads=(2, 8), donors={1: 0}, kv_cache_dtype="float32")) as (batch, io):
        sequence = batch.admit(num_tokens=5)
        view = batch.step({sequence: 5})
        before = snapshot(batch)
        good = uploaded(io, np.ones((5, 2, 8), np.float32))
        square = uploaded(io, np.ones((1, 5, 2, 8), np.float32))
        other = uploaded(io, np.ones((1, 5, 2, 8), np.float32))
        lengths = uploaded(io, np.array([5], np.int32))
        with pytest.raises(InputError, match="layer: 7"):
            io.write(7, good, good, view)
        with pytest.raises(InputError, match="layer: array"):
            io.write(np.array(0), good, good, view)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="layer: 1 borrows K and V of layer 0"):
            io.write(1, good, good, view)
        with pytest.raises(InputError, match="layer: 1 borrows K and V of layer 0"):
            io.scatter(1, square, other, lengths)
        with pytest.raises(ShapeError, match="k, v: 4 tokens given, 5 wanted"):
            io.write(0, good[:4], good[:4], view)
        with pytest.raises(ShapeError, match="k, v: .* differ"):
            io.write(0, good[:4], good, view)
        with pytest.raises(ShapeError, match="slots: int32"):
            io.write_slots(0, good, good, lengths)
        with pytest.raises(ShapeError, match=r"k: 3 axes given, \[B, n, H, D\] wanted"):
            io.gather(0, good, good, lengths)
        with pytest.raises(ShapeError, match="lengths: "):
            io.scatter(0, square, other, view.slot_mapping[0])
        with pytest.raises(ShapeError, match="starts: "):
            io.scatter(0, square, other, lengths, starts=lengths[:0])
        with pytest.raises(InputError, match="low: 0.5 is not an integer"):
            io.scatter(0, square, other, lengths, low=0.5)
        many = uploaded(io, np.ones((3, 5, 2, 8), np.float32))
        with pytest.raises(ShapeError, match="k: 3 rows given, but there are 2"):
            io.scatter(0, many, many, uploaded(io, np.array([5] * 3, np.int32)))
        with pytest.raises(InputError, match="each lies in the other"):
            io.gather(0, square, square, lengths)
        io.gather(1, square, other, lengths)  # a borrower reads
        assert not square.to_host().any()
        for found, wanted in zip(snapshot(batch), before, strict=True):
            assert same_bits(found, wanted)


def test_nothing_is_possible_after_close() -> None:
    with opened(tiny_config(kv_cache_dtype="float32")) as batch:
        io = KVIO(batch.resources.cache_managers[0])
        io.copy_pages(0, [(0, 1)])
        view = batch.step({batch.admit(num_tokens=1): 1})
        io.close()
        io.close()
        with pytest.raises(StateError, match="KVIO is closed"):
            io.write(0, 0, 0, view)
        with pytest.raises(StateError, match="KVIO is closed"):
            io.copy_pages(0, [(0, 1)])


def test_everything_is_given_back() -> None:
    with opened(tiny_config(kv_cache_dtype="float8_e4m3")) as batch:  # it looks for bytes that are left
        device = batch.resources.device
        before = device.memory.current_bytes
        with KVIO(batch.resources.cache_managers[0]) as io:
            io.set_scales(0, 1.0, 2.0)
            io.copy_pages(0, [(0, 1)])
            io.gather(
                0,
                *[device.tensor((9, 4, 1, 8), dtype("float16")) for _ in range(2)],
                device.tensor((9,), dtype("int32")),
                rows=device.tensor((9,), dtype("int32")),
            )
        gc.collect()
        assert device.memory.current_bytes == before


def test_what_was_moved_is_not_kept() -> None:
    """Dropped arrays of K, V, slots and lengths give their memory back although their launches stay bound."""
    with opened_io(tiny_config(None, heads=(2, 8), kv_cache_dtype="float32")) as (batch, io):
        sequence = batch.admit(num_tokens=5)
        view = batch.step({sequence: 5})
        held = io._device.memory.current_bytes
        references = []
        for _ in range(3):
            k, v = (uploaded(io, np.ones((5, 2, 8), np.float32)) for _ in range(2))
            slots, lengths = uploaded(io, np.arange(5, dtype=np.int64)), uploaded(io, np.array([5], np.int32))
            io.write(0, k, v, view)
            io.write_slots(0, k, v, slots)
            io.gather(0, *(uploaded(io, np.ones((1, 5, 2, 8), np.float32)) for _ in range(2)), lengths)
            references += [weakref.ref(tensor._memory) for tensor in (k, v, slots, lengths)]
            del k, v, slots, lengths
        gc.collect()
        assert [r for r in references if r() is not None] == []
        assert io._device.memory.current_bytes <= held + 4096  # the found slots


def test_index_arrays_are_checked_at_every_call() -> None:
    with opened_io(tiny_config(None, heads=(2, 8), kv_cache_dtype="float32")) as (batch, io):
        sequence = batch.admit(num_tokens=5)
        batch.step({sequence: 5})
        k, v = (uploaded(io, np.ones((1, 5, 2, 8), np.float32)) for _ in range(2))
        lengths, slots = uploaded(io, np.array([5], np.int32)), uploaded(io, np.arange(5, dtype=np.int64))
        io.gather(0, k, v, lengths)
        io.gather_slots(0, k, v, slots)
        lengths._memory.close(io._device.stream)
        slots._memory.close(io._device.stream)
        with pytest.raises(StateError):
            io.gather(0, k, v, lengths)
        with pytest.raises(StateError):
            io.gather_slots(0, k, v, slots)


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 1, 2, 3)])
def test_heads_or_tokens_first(axes: tuple[int, ...]) -> None:
    """A dense cache [B, H, n, D], as model code has it, is written and read in place; so is one position of a longer one."""
    with opened_io(tiny_config(None, heads=(2, 8), kv_cache_dtype="float32")) as (batch, io):
        if io._device.target == "cuda":
            pytest.skip("NumPy arrays are not in device memory")
        sequence = batch.admit(num_tokens=5)
        view = batch.step({sequence: 5})
        told = numbers(np.random.default_rng(3), (1, 5, 2, 8), "float32")
        io.write(0, told, told, view)
        lengths = np.array([5], np.int32)
        k, v = (np.zeros(tuple(told.shape[a] for a in axes), np.float32).transpose(axes) for _ in range(2))
        io.gather(0, k, v, lengths)
        assert np.array_equal(k, told)
        assert np.array_equal(v, told)
        mixed = np.zeros((5, 2, 8), np.float32)
        with pytest.raises(InputError, match="k: overlaps the slots"):
            io.gather_slots(0, mixed, mixed.copy(), mixed.reshape(-1)[:10].view(np.int64))
        longer = np.zeros((1, 9, 2, 8), np.float32)
        io.gather(0, longer[:, 3:4], v[:, :1].copy(), lengths, low=2)
        assert np.array_equal(longer[:, 3], told[:, 2])
        assert not longer[:, :3].any()
        assert not longer[:, 4:].any()


def test_wrong_owners_views_and_scales_are_named() -> None:
    config = tiny_config(None, heads=(2, 8), kv_cache_dtype="float8_e4m3")
    with opened_io(config) as (batch, io):
        sequence = batch.admit(num_tokens=5)
        batch.step({sequence: 5})
        k = uploaded(io, np.ones((5, 2, 8), np.float32))
        for view in (None, 5, "x"):
            with pytest.raises(InputError, match="view: .* is not a step of this model"):
                io.write(0, k, k, view)  # type: ignore[arg-type]
        for scale in ("1.5", True, 10**400, None, [1.0, "x"]):
            with pytest.raises(InputError, match="k_scale: "):
                io.set_scales(0, scale, 1.0)
        with pytest.raises(StateError, match="cop"):
            copy.copy(io)
        for pairs in ([(True, 1)], [(0, False)], [(0, "1")], [0]):
            with pytest.raises(InputError, match="pairs: "):
                io.copy_pages(0, pairs)  # type: ignore[arg-type]
        for wrong in (None, batch.resources, batch.resources.cache_managers[0].kv_cache):
            with pytest.raises(InputError, match="caches: .* is no HybridCacheManager"):
                KVIO(wrong)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="closed"), io:
        pass
    with pytest.raises(StateError):
        KVIO(batch.resources.cache_managers[0])


def test_layers_are_counted_as_the_model_counts_them() -> None:
    """In a model with recurrent layers between them, attention layers keep their decoder number, scales included."""
    state = kv.Mamba2Layer(num_heads=2, head_dim=4, state_size=4, conv_dim=16, conv_kernel=4)
    kinds = ("recurrent", "attention", "none", "attention")
    config = tiny_config(
        None, None, heads=(2, 8), kv_cache_dtype="float8_e4m3", layer_types=kinds, recurrent_layer=state
    )
    with opened_io(config) as (batch, io):
        sequence = batch.admit(num_tokens=5)
        view = batch.step({sequence: 5})
        told = {layer: numbers(np.random.default_rng(layer), (5, 2, 8), "float32") for layer in (1, 3)}
        for layer, values in told.items():
            io.set_scales(layer, 0.5 * layer, 0.5 * layer)
            io.write(layer, uploaded(io, values), uploaded(io, values), view)
        for layer, values in told.items():
            k, v = (uploaded(io, np.zeros((1, 5, 2, 8), np.float32)) for _ in range(2))
            io.gather(layer, k, v, view.seq_lens)
            scale = np.full(2, 0.5 * layer, np.float32)
            stored = converted(values, "float8_e4m3", np.float32(1.0) / scale)
            assert same_bits(k.to_host()[0], converted(stored, "float32", scale))
        for layer in (0, 2):
            with pytest.raises(InputError, match=f"decoder layer {layer} has no attention"):
                io.write(layer, k[0], v[0], view)
