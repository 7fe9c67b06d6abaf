"""PagedAttention over real batches. Before each call, all of every pool that its queries must not see becomes NaN."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.cache.attention import PagedAttention
from numba_kv.cache.kv_io import KVIO
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InteropError, ShapeError, StateError
from tests.helpers.attention import attention, close
from tests.helpers.kv_pools import NUMPY, converted
from tests.helpers.models import chunked, tiny_config

SCALES = (0.5, 2.0)


class Model:
    """Runs every layer of every step: writes K and V, attends, and compares with all that was ever written."""

    def __init__(self, resources: kv.SharedResources, group: int = 2, kind: str = "float32", seed: int = 0) -> None:
        self.resources, self.group, self.kind = resources, group, kind
        self.caches = resources.cache_managers[0]
        self.batch = kv.Batch(resources)
        self.io = KVIO(self.caches)
        self.attention = PagedAttention(self.caches, self.io)
        self.config = resources.plan.config
        self.random = np.random.default_rng(seed)
        self.told: dict[kv.Sequence, dict[int, list[np.ndarray]]] = {}
        self.exact: dict[kv.Sequence, dict[int, list[np.ndarray]]] = {}
        self.options: dict[str, Any] = {}
        self.long_layers = 0
        if self.config.kv_cache_dtype == "float8_e4m3":
            for layer in self.owners():
                self.io.set_scales(layer, *SCALES)

    def owners(self) -> list[int]:
        return [i for i, layer in enumerate(self.config.layers) if layer.owns_kv]

    def up(self, values: np.ndarray) -> Tensor:
        tensor = self.resources.device.tensor(values.shape, dtype(values.dtype.name))
        tensor.fill_from(values)
        return tensor

    def drawn(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=shape).astype(np.float32).astype(NUMPY[self.kind])

    def step(self, counts: dict[kv.Sequence, int] | int) -> None:
        view = self.batch.step(counts)
        if isinstance(counts, int):
            counts = dict.fromkeys(self.batch.sequences, counts)
        order = [(s, counts[s]) for s in sorted(counts, key=lambda s: s.row)]
        given: dict[int, tuple[Tensor, ...]] = {}
        for layer, described in enumerate(self.config.layers):
            storage = self.caches.storage(layer)
            heads, dim = storage.num_kv_heads, storage.head_dim
            owner = storage.owner
            needs = self.attention.needs_step_kv(layer, view)
            self.long_layers += needs
            if described.owns_kv:
                k, v = (self.drawn(view.num_tokens, heads, dim) for _ in range(2))
                width = self.resources.plan.groups[storage.group].carry_width
                carry = [self.up(np.zeros((self.config.max_batch_size, width, heads, dim), NUMPY[self.kind])) for _ in range(2)]
                given[layer] = (self.up(k), self.up(v), *carry)
                if needs:
                    self.attention.gather_carry(layer, *carry, view)
                self.io.write(layer, *given[layer][:2], view)
                self.note(layer, k, v, order)
            q = self.drawn(view.num_tokens, heads * self.group, dim)
            out = self.up(np.full((view.num_tokens + 1, *q.shape[1:]), 7, q.dtype))
            queries = self.up(q)
            pool = self.caches.kv(layer)
            before = pool.to_host()
            pool.fill_from(self.poisoned(before, layer, order, needs))
            if needs:
                self.attention.attend_long(layer, queries, *given[owner], out, view, **self.options)
            else:
                self.attention.attend(layer, queries, out, view, **self.options)
            found = out.to_host()
            pool.fill_from(before)
            assert (found[view.num_tokens :] == 7).all()
            self.compare(found, q, layer, order, needs)

    def note(self, layer: int, k: np.ndarray, v: np.ndarray, order: list[tuple[kv.Sequence, int]]) -> None:
        """Remember K and V as given, and as the pool holds them."""
        kind = self.config.kv_cache_dtype
        held = []
        for values, scale in zip((k, v), SCALES, strict=True):
            if kind == "float8_e4m3":
                inverse = np.full(values.shape[1], 1 / scale, np.float32)
                held.append(converted(values, kind, inverse).astype(np.float32) * np.float32(scale))
            else:
                held.append(converted(values, kind).astype(np.float32))
        at = 0
        for sequence, count in order:
            for store, pair in ((self.told, held), (self.exact, (k, v))):
                rows = store.setdefault(sequence, {i: [] for i in self.owners()})[layer]
                rows += [np.stack([a[t].astype(np.float32) for a in pair]) for t in range(at, at + count)]
            at += count

    def rewind(self, sequence: kv.Sequence, count: int) -> None:
        self.batch.rewind({sequence: count})
        for store in (self.told, self.exact):
            for rows in store[sequence].values():
                del rows[len(rows) - count :]

    def is_long(self, count: int, needs: bool) -> bool:
        return needs and count > self.config.max_step_tokens

    def poisoned(self, pool: np.ndarray, layer: int, order: list[tuple[kv.Sequence, int]], needs: bool) -> np.ndarray:
        """Return the pool with NaN everywhere but where keys of the step's queries are."""
        storage = self.caches.storage(layer)
        table = self.caches.step_buffers.page_tables[storage.group].to_host()
        changed = np.full(pool.shape, np.nan, pool.dtype)
        for sequence, count in order:
            if self.is_long(count, needs):
                continue
            for position in range(storage.window.lowest_key(sequence.length - count), sequence.length):
                page, offset = divmod(position, storage.page_tokens)
                page_id = table[sequence.row, 0, page]
                assert page_id >= 0
                changed[:, page_id, offset] = pool[:, page_id, offset]
        return changed

    def compare(self, out: np.ndarray, q: np.ndarray, layer: int, order: list[tuple[kv.Sequence, int]], needs: bool) -> None:
        storage = self.caches.storage(layer)
        at = 0
        options = {**self.options}
        if options.get("sinks") is not None:
            options["sinks"] = options["sinks"].to_host()
        for sequence, count in order:
            start = sequence.length - count
            rows = self.told[sequence][storage.owner]
            assert len(rows) == sequence.length
            k, v = np.stack(rows, 1)
            if self.is_long(count, needs):  # the step's own are not rounded to the pool's type
                k[start:], v[start:] = np.stack(self.exact[sequence][storage.owner][start:], 1)
            for i in range(count):
                close(out[at + i], attention(q[at + i], k, v, start + i, storage.window, **options), v)
            at += count

    def close(self) -> None:
        self.attention.close()
        self.io.close()


@contextmanager
def opened(config: kv.LLMEngineConfig, **options: Any) -> Iterator[Model]:
    resources = kv.SharedResources.create_for_llm(config)
    model = Model(resources, **options)
    try:
        yield model
        model.batch.audit()
    finally:
        model.close()
        resources.close()


def serve(model: Model) -> None:
    """Prefill, decode past the windows, rewind, and let a row change hands."""
    first, second = model.batch.admit(num_tokens=9), model.batch.admit(num_tokens=2)
    model.step({first: 9, second: 2})
    for _ in range(3):
        model.step(1)
    model.rewind(first, 1)
    model.step({second: 1})
    model.step({first: 2, second: 1})
    model.batch.retire(first)
    third = model.batch.admit(num_tokens=5)
    model.step({second: 1, third: 5})
    model.step(1)
    assert model.long_layers or all(layer.window.is_full for layer in model.config.layers)


@pytest.mark.parametrize("page", [1, 4])
def test_windows_and_long_steps(page: int) -> None:
    config = tiny_config(
        None, 4, chunked(6), heads=[(2, 4), (1, 8), (1, 4)], page_tokens=page, max_batch_size=3, kv_cache_dtype="float32"
    )
    with opened(config) as model:
        serve(model)


@pytest.mark.parametrize("pool_kind", ["float16", "bfloat16", "float8_e4m3"])
def test_stored_types(pool_kind: str) -> None:
    config = tiny_config(None, 4, heads=(2, 4), kv_cache_dtype=pool_kind, max_batch_size=3)
    with opened(config, kind="bfloat16", group=3) as model:
        serve(model)


def test_layers_that_borrow_read_their_donors() -> None:
    config = tiny_config(
        None, 5, 5, None, heads=(1, 4), donors={2: 1, 3: 0}, max_batch_size=3, kv_cache_dtype="float32", max_step_tokens=2
    )
    with opened(config) as model:
        serve(model)


def test_a_window_of_one_token_has_no_carry() -> None:
    with opened(tiny_config(1, heads=(1, 4), max_batch_size=3, kv_cache_dtype="float32")) as model:
        serve(model)


def test_options() -> None:
    with opened(tiny_config(None, 4, heads=(1, 4), max_batch_size=3, kv_cache_dtype="float32")) as model:
        model.options = {"scale": 0.9, "soft_cap": 1.5, "sinks": model.up(np.array([0.3, -2], np.float32))}
        serve(model)


def test_random_steps() -> None:
    config = tiny_config(
        None, 5, heads=(1, 4), page_tokens=2, max_batch_size=3, max_step_tokens=3, max_batch_tokens=64, kv_cache_dtype="float16"
    )
    with opened(config, kind="float16", group=4, seed=3) as model:
        random, highest = model.random, {}
        for _ in range(6 if model.resources.device.target == "sim" else 40):
            if model.batch.free_rows and random.random() < 0.5:
                model.batch.admit(num_tokens=int(random.integers(1, 9)))
            sequences = model.batch.sequences
            choice = random.random()
            if sequences and choice < 0.15:
                model.batch.retire(sequences[0])
            elif sequences and choice < 0.5 and not sequences[-1].pending_tokens:
                last = sequences[-1]
                most = min(last.length, last.length + 3 - highest[last])  # max_step_tokens below the longest it has been
                if most > 0:
                    model.rewind(last, int(random.integers(1, most + 1)))
            counts = {s: s.pending_tokens or int(random.integers(1, 4)) for s in model.batch.sequences if s.length < 40}
            if counts:
                model.step(counts)
            highest |= {s: max(s.length, highest.get(s, 0)) for s in counts}


def test_a_ring_of_all_pages_needs_no_carry() -> None:
    config = tiny_config(30, heads=(1, 4), max_kv_cache_capacity=32, kv_cache_dtype="float32")
    with opened(config) as model:
        model.step({model.batch.admit(num_tokens=31): 31})
        assert not model.long_layers


def test_counts_of_the_device_decide() -> None:
    with opened(tiny_config(None, 6, heads=(1, 4), max_step_tokens=3, kv_cache_dtype="float32")) as model:
        sequences = [model.batch.admit(num_tokens=2), model.batch.admit(num_tokens=4)]
        model.step({sequences[0]: 2, sequences[1]: 4})
        view = model.batch.step(3, counts=model.up(np.array([2, 0], np.int32)))
        k, v, q = (model.drawn(6, heads, 4) for heads in (1, 1, 2))
        for layer in range(2):
            model.io.write(layer, model.up(k), model.up(v), view)
            out = model.up(np.full(q.shape, 7, q.dtype))
            model.attention.attend(layer, model.up(q), out, view)
            model.batch.sync_lengths()
            found = out.to_host()
            assert not found[2:].any()
            rows = [*model.told[sequences[0]][layer], *(np.stack([k[t], v[t]]) for t in range(2))]
            keys, values = np.stack(rows, 1)
            for i in range(2):
                close(found[i], attention(q[i], keys, values, 2 + i, model.config.layers[layer].window), values)


def test_a_captured_call_follows_the_lengths() -> None:
    with opened(tiny_config(None, 4, heads=(1, 4), kv_cache_dtype="float32"), group=3) as model:
        batch, device = model.batch, model.resources.device
        sequences = [batch.admit(num_tokens=3), batch.admit(num_tokens=5)]
        model.step({sequences[0]: 3, sequences[1]: 5})
        model.step(1)
        view = batch.step(1)
        k, v, q, out = (model.up(model.drawn(2, heads, 4)) for heads in (1, 1, 3, 3))

        def forward(stream: object) -> None:
            for layer in range(2):
                model.io.write(layer, k, v, view, stream=stream)
                model.attention.attend(layer, q, out, view, stream=stream)

        forward(device.stream)
        for sequence in sequences:
            for layer in range(2):
                model.told[sequence][layer].append(np.stack([a.to_host()[sequence.row] for a in (k, v)]))
        graph = device.capture(forward)
        for _ in range(5):
            batch.step(1)
            held = device.memory.current_bytes
            for tensor in (k, v, q):
                tensor.fill_from(model.drawn(*tensor.shape))
            graph.launch(device.stream)
            assert device.memory.current_bytes == held
            found = out.to_host()
            for sequence in sequences:
                for layer in range(2):
                    model.told[sequence][layer].append(np.stack([a.to_host()[sequence.row] for a in (k, v)]))
                keys, values = np.stack(model.told[sequence][1], 1)
                wanted = attention(
                    q.to_host()[sequence.row], keys, values, sequence.length - 1, model.config.layers[1].window
                )
                close(found[sequence.row], wanted, values)
        graph.close()


def test_launches_are_bound_once() -> None:
    with opened(tiny_config(heads=(1, 4), kv_cache_dtype="float32")) as model:
        sequence = model.batch.admit(num_tokens=1)
        q, out = (model.up(model.drawn(2, 2, 4)) for _ in range(2))
        held = model.resources.device.memory.current_bytes
        for _ in range(3):
            model.attention.attend(0, q, out, model.batch.step({sequence: 1}))
        assert len(model.attention._launches) == 1
        assert model.resources.device.memory.current_bytes == held


def test_closing_gives_everything_back() -> None:
    with opened(tiny_config(heads=(1, 4), kv_cache_dtype="float32")) as model:
        held = model.resources.device.memory.current_bytes
        with PagedAttention(model.caches, model.io) as attention_of:
            view = model.batch.step({model.batch.admit(num_tokens=1): 1})
            q, out = (model.up(model.drawn(1, 1, 4)) for _ in range(2))
            attention_of.attend(0, q, out, view)
        attention_of.close()
        del q, out
        gc.collect()  # a compiler that ran in the call may hold its frames
        assert model.resources.device.memory.current_bytes == held


def test_rows_may_lie_apart() -> None:
    """Q, K and V packed in one array, and the output beside other things."""
    with opened(tiny_config(heads=(2, 4), kv_cache_dtype="float32")) as model:
        sequence = model.batch.admit(num_tokens=6)
        view = model.batch.step({sequence: 6})
        packed = model.drawn(6, 4 + 2 + 2 + 4, 4)
        tensor = model.up(packed)
        model.io.write(0, tensor[:, 4:6], tensor[:, 6:8], view)
        model.attention.attend(0, tensor[:, :4], tensor[:, 8:], view)
        found = tensor.to_host()
        assert np.array_equal(found[:, :8], packed[:, :8])
        for i in range(6):
            wanted = attention(packed[i, :4], packed[:, 4:6], packed[:, 6:8], i, model.config.layers[0].window)
            close(found[i, 8:], wanted, packed[:, 6:8])


def test_bad_input_is_refused_and_changes_nothing() -> None:
    with opened(tiny_config(None, 4, heads=(2, 8), kv_cache_dtype="float32")) as model:
        sequence = model.batch.admit(num_tokens=6)
        view = model.batch.step({sequence: 6})
        q = model.up(model.drawn(6, 4, 8))
        out = model.up(np.full((6, 4, 8), 7, np.float32))
        attend = model.attention.attend
        short = model.up(model.drawn(5, 4, 8))
        odd, flat_q, narrow = (model.up(model.drawn(*shape)) for shape in ((6, 3, 8), (6, 32), (6, 4, 4)))
        whole = model.up(np.zeros((6, 4, 8), np.int32))
        for error, match, layer, arguments in (
            (InputError, "layer: 2 is not one of the 2", 2, (q, out, view)),
            (InputError, "view: .* is not a step of this model", 0, (q, out, None)),
            (ShapeError, "q: 3 query heads given, a multiple of the layer's 2", 0, (odd, odd, view)),
            (ShapeError, r"q: shape \[6, 32\] given", 0, (flat_q, out, view)),
            (ShapeError, r"q: shape \[6, 4, 4\] given", 0, (narrow, out, view)),
            (ShapeError, r"out: shape \[6, 4, 4\] given", 0, (q, narrow, view)),
            (ShapeError, "q, out: 5 tokens given, 6 wanted", 0, (short, model.up(model.drawn(5, 4, 8)), view)),
            (ShapeError, "q: int32 given, one of float32", 0, (whole, out, view)),
            (InputError, "out: overlaps q", 0, (q, q, view)),
            (InteropError, "q: list is not an array", 0, ([1.0], out, view)),
            (InputError, "max_step_tokens .* use attend_long", 1, (q, out, view)),
        ):
            with pytest.raises(error, match=match):
                attend(layer, *arguments)
        for options, match in (
            ({"scale": np.nan}, "scale: "), ({"scale": "1"}, "scale: "), ({"scale": 1e300}, "scale: "),
            ({"soft_cap": 0.0}, "soft_cap: "), ({"soft_cap": -1.0}, "soft_cap: "), ({"soft_cap": np.inf}, "soft_cap: "),
            ({"sinks": model.up(np.zeros(3, np.float32))}, r"sinks: .* dense float32 \[4\]"),
            ({"sinks": model.up(np.zeros(4, np.int32))}, r"sinks: .* dense float32 \[4\]"),
        ):  # fmt: skip
            with pytest.raises(InputError, match=match):
                attend(0, q, out, view, **options)
        k, v = (model.up(model.drawn(6, 2, 8)) for _ in range(2))
        carry = [model.up(model.drawn(2, 3, 2, 8)) for _ in range(2)]
        long = model.attention.attend_long
        with pytest.raises(ShapeError, match=r"carry_v: shape \[6, 2, 8\] given, \[2, 3, 2, 8\] wanted"):
            long(1, q, k, v, carry[0], v, out, view)
        with pytest.raises(ShapeError, match="k, v, carry_k, carry_v: float32, float32, float16, float32"):
            long(1, q, k, v, model.up(np.zeros((2, 3, 2, 8), np.float16)), carry[1], out, view)
        with pytest.raises(ShapeError, match="q, out, k, v: 5 tokens given, 6 wanted"):
            long(1, q, k[:5], v[:5], *carry, out, view)
        wide = model.up(model.drawn(6, 4, 8))
        with pytest.raises(InputError, match="out: overlaps k"):
            long(1, q, wide[:, :2], v, *carry, wide, view)
        with pytest.raises(InputError, match="layer: 0 finds all keys of this step in pages"):
            model.attention.gather_carry(0, *carry, view)
        with pytest.raises(StateError, match=r"PagedAttention\(caches, io\)"), PagedAttention(model.caches) as alone:
            alone.gather_carry(1, *carry, view)
        assert (out.to_host() == 7).all()
        if model.resources.device.target != "cuda":
            frozen = np.zeros((6, 4, 8), np.float32)
            frozen.flags.writeable = False
            with pytest.raises(InteropError, match="out: the array is read-only"):
                attend(0, q, frozen, view)


def test_what_it_is_made_of() -> None:
    with opened(tiny_config(heads=(1, 4), kv_cache_dtype="float8_e4m3")) as model:
        with pytest.raises(InputError, match="caches: int is no HybridCacheManager"):
            PagedAttention(3)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="io: 3 is not a KVIO of these caches"):
            PagedAttention(model.caches, 3)  # type: ignore[arg-type]
        view = model.batch.step({model.batch.admit(num_tokens=1): 1})
        q, out = (model.up(model.drawn(1, 1, 4)) for _ in range(2))
        with PagedAttention(model.caches) as alone, pytest.raises(StateError, match="whose scales are in KVIO"):
            alone.attend(0, q, out, view)
        with pytest.raises(StateError, match="PagedAttention is closed"):
            alone.attend(0, q, out, view)
        with KVIO(model.caches) as unscaled, PagedAttention(model.caches, unscaled) as other:
            with pytest.raises(StateError, match="layer 0 is stored as float8_e4m3 and has no scales"):
                other.attend(0, q, out, view)
            unscaled.set_scales(0, 1.0, 1.0)
            other.attend(0, q, out, view)
            unscaled.close()
            with pytest.raises(StateError, match="KVIO is closed"):
                other.attend(0, q, out, view)
