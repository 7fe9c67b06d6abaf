"""attend and merge_splits against loops over queries: any table, layout, type, size and cut. What must not be read is NaN."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from numba_kv.cache.attention_launch import AttentionMemory, Cut
from numba_kv.cache.attention_operands import StepKV, bind_attention
from numba_kv.cache.kv_cache import LayerStorage
from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import FULL, Window, ceil_div
from tests.helpers.attention import attention, close
from tests.helpers.kv_pools import NUMPY, Guarded, same_bits

NHD, HND = (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)
KINDS = ["float32", "float16", "bfloat16"]


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def uploaded(device: Device, values: np.ndarray) -> Tensor:
    tensor = device.tensor(values.shape, dtype(values.dtype.name))
    tensor.fill_from(values)
    return tensor


def poisoned(shape: tuple[int, ...], kind: str) -> np.ndarray:
    return np.full(shape, np.nan, NUMPY[kind])


def drawn(random: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    return random.normal(size=shape).astype(np.float32).astype(NUMPY[kind])


class Case:
    """Rows of any length whose pages lie anywhere, some of them missing, and a step of a few tokens of each."""

    def __init__(
        self, device: Device, *, pool_kind: str = "float32", kind: str = "float32", out_kind: str = "float32", order=NHD,
        heads=2, group=2, dim=8, page=4, appended=(1, 1, 1), contexts=(9, 0, 3), room=None, missing=0.0, skew=0, pitch=0,
        seed=0, window: Window = FULL, splits=1, queries=None, sinks=False, scale=None, soft_cap=None, long=None,
    ) -> None:  # fmt: skip
        self.random = random = np.random.default_rng(seed)
        self.device, self.window, self.heads, self.dim = device, window, heads, dim
        room = list(appended) if room is None else list(room)
        lengths = np.array(contexts) + np.array(appended)
        rows, width = len(contexts), ceil_div(int(lengths.max(initial=1)), page) + 1
        pages = rows * width + 3
        ids = random.permutation(rows * width).reshape(rows, width).astype(np.int32)
        wrong = random.choice([-1, -1, pages, pages - 1, pages - 2, 2**31 - 1], ids.shape).astype(np.int32)
        ids = np.where(random.random(ids.shape) < missing, wrong, ids)
        table = np.stack([ids, np.where(ids >= 0, ids.astype(np.int64) + pages, -1).astype(np.int32)], 1)
        self.pool = Guarded(device, (2, pages, page, heads, dim), pool_kind, order=order, skew=skew)
        stored = poisoned(self.pool.tensor.shape, pool_kind)
        self.told: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.factors = random.uniform(0.5, 2, (2, heads)).astype(np.float32) if pool_kind == "float8_e4m3" else None
        step = poisoned((2, sum(room), heads, dim), kind)
        carry_width = window.tokens - 1 if long is not None else 0
        carried = poisoned((2, rows, carry_width, heads, dim), kind)
        firsts = np.concatenate([[0], np.cumsum(room)])
        for row, (context, count) in enumerate(zip(contexts, appended, strict=True)):
            is_long = long is not None and count > long
            length = int(lengths[row])
            k, v = (drawn(random, (length, heads, dim), kind if is_long else pool_kind) for _ in range(2))
            present = np.ones(length, bool)
            low = window.lowest_key(context) if count else length
            for position in range(low, length):
                if is_long:
                    column = position - context
                    into, at = (step, firsts[row] + column) if column >= 0 else (carried, (row, column + carry_width))
                    for half, values in enumerate((k, v)):
                        into[half][at] = values[position]
                    continue
                page_id = int(ids[row, position // page])
                present[position] = 0 <= page_id < pages - 2
                if present[position]:
                    stored[0, page_id, position % page] = k[position]
                    stored[1, page_id, position % page] = v[position]
            scale_of = [1, 1] if self.factors is None else self.factors[:, :, None].astype(np.float64)
            self.told.append((k.astype(np.float64) * scale_of[0], v.astype(np.float64) * scale_of[1], present))
        self.pool.fill(stored)
        q = poisoned((sum(room), heads * group + pitch, dim), kind)
        q[:, : heads * group] = drawn(random, (sum(room), heads * group, dim), kind)
        self.q, self.q_heads = q, heads * group
        self.out = Guarded(device, (sum(room), heads * group, dim), out_kind, skew=skew, fill=0xFF)
        self.sinks = random.normal(size=heads * group).astype(np.float32) if sinks else None
        self.scale, self.soft_cap = scale, soft_cap
        self.contexts, self.appended, self.firsts = contexts, appended, firsts
        memory = AttentionMemory(device, [dim])
        memory.partial = device.tensor((sum(room) * heads * group * splits * (2 + dim),), dtype("float32"))
        int32 = [uploaded(device, np.array(a, np.int32)) for a in (firsts, lengths, contexts)]
        buffers = SimpleNamespace(
            page_tables=(uploaded(device, table),), cu_seqlens_q=int32[0], seq_lens=int32[1], context_lens=int32[2],
            plan=SimpleNamespace(config=SimpleNamespace(max_step_tokens=long)),
        )  # fmt: skip
        storage = LayerStorage(
            group=0, window=window, num_pages=pages, logical_pages=width, page_tokens=page, num_kv_heads=heads, head_dim=dim,
            owner=0,
        )  # fmt: skip
        self.lent = [uploaded(device, q)[:, : heads * group]]  # launches keep none of the caller's arrays alive
        self.lent += [] if long is None else [uploaded(device, a) for a in (*step, *carried)]
        self.lent += [] if self.sinks is None else [uploaded(device, self.sinks)]
        self.bound = bind_attention(
            self.pool.tensor, self.lent[0], self.out.tensor, storage, buffers, buffers.cu_seqlens_q, memory,
            step_kv=None if long is None else StepKV(*self.lent[1:5]),
            factors=None if self.factors is None else uploaded(device, self.factors.reshape(-1)),
            sinks=None if self.sinks is None else self.lent[-1],
        )  # fmt: skip
        possible, near = memory.target.queries(group, dim, decodes=False)
        queries = min(queries or possible, possible)
        few = min(queries, group)
        works = ceil_div(sum(room), queries // few) * heads * ceil_div(group, few) * splits
        self.cut = Cut(sum(room), works, works if near else min(works, memory.target.workers), splits, queries)

    def check(self) -> None:
        """Run it and look at every token."""
        before = self.pool.values()
        self.bound.run(self.cut, self.device.stream, self.dim**-0.5 if self.scale is None else self.scale, self.soft_cap or 0.0)
        found = self.out.values()
        for row, (k, v, present) in enumerate(self.told):
            for i in range(self.firsts[row], self.firsts[row + 1]):
                position = self.contexts[row] + i - int(self.firsts[row])
                if i - self.firsts[row] >= self.appended[row]:
                    assert not found[i].astype(np.float32).any(), "a token that was not appended has an output"
                    continue
                wanted = attention(
                    self.q[i, : self.q_heads], k, v, position, self.window,
                    scale=self.scale, soft_cap=self.soft_cap, sinks=self.sinks, present=present,
                )  # fmt: skip
                close(found[i], wanted, v)
        assert same_bits(self.pool.values(), before)


@pytest.mark.parametrize("order", [NHD, HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("pool_kind", NUMPY)
def test_every_stored_type(device: Device, pool_kind: str, order: tuple[int, ...]) -> None:
    Case(device, pool_kind=pool_kind, order=order, appended=(1, 3, 1), contexts=(9, 0, 3)).check()


@pytest.mark.parametrize("out_kind", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_queries_and_outputs(device: Device, kind: str, out_kind: str) -> None:
    Case(device, kind=kind, out_kind=out_kind, pitch=3).check()


@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 2), (1, 8), (3, 5), (1, 19)])
def test_heads_in_groups(device: Device, heads: int, group: int) -> None:
    Case(device, heads=heads, group=group, appended=(2, 1, 0), contexts=(3, 8, 5)).check()
    Case(device, heads=heads, group=group, appended=(4, 1), contexts=(0, 2), queries=3).check()


@pytest.mark.parametrize("dim", [1, 3, 20, 40, 64, 80, 96, 112, 256])
def test_head_sizes(device: Device, dim: int) -> None:
    Case(device, dim=dim, heads=1, appended=(2,), contexts=(5,)).check()


def test_a_head_that_is_not_near(device: Device) -> None:
    """On a GPU, memory of a block does not hold this size: workers take turns over arrays."""
    Case(device, dim=4096 if device.target == "cuda" else 24, heads=1, group=1, appended=(1, 2), contexts=(6, 0)).check()


@pytest.mark.parametrize("window", [Window("sliding", n) for n in (1, 4, 5)] + [Window("chunked", n) for n in (1, 6)], ids=str)
def test_windows(device: Device, window: Window) -> None:
    Case(device, window=window, appended=(1, 7, 2), contexts=(11, 0, 5), heads=1).check()


def test_sinks_scale_and_soft_cap(device: Device) -> None:
    Case(device, sinks=True).check()
    Case(device, scale=1.7).check()
    Case(device, scale=-0.3, soft_cap=0.5).check()
    Case(device, sinks=True, scale=2.0, soft_cap=3.0, splits=3).check()


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_split_keys(device: Device, splits: int) -> None:
    Case(device, splits=splits, appended=(1, 1, 2), contexts=(13, 0, 4), room=(1, 1, 3), dim=12).check()


def test_keys_that_are_not_mapped_are_skipped(device: Device) -> None:
    for seed in range(3):
        Case(device, missing=0.4, appended=(2, 1, 1), contexts=(17, 5, 0), sinks=seed == 1, seed=seed).check()


def test_tokens_that_were_not_appended_get_zeros(device: Device) -> None:
    Case(device, appended=(1, 0, 2), contexts=(4, 3, 0), room=(3, 2, 2), sinks=True).check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [Window("sliding", 5), Window("chunked", 6), Window("sliding", 1)], ids=str)
def test_rows_whose_step_is_long_read_the_step(device: Device, window: Window, kind: str) -> None:
    Case(
        device, kind=kind, pool_kind="bfloat16", window=window, long=2, appended=(7, 1, 2, 4), contexts=(8, 9, 3, 0), heads=2
    ).check()


def test_more_tiles_than_one(device: Device) -> None:
    many = 19 if device.target == "sim" else 700
    Case(device, heads=1, appended=(1, 5), contexts=(many, many // 3), page=16, dim=4).check()
    half = Window("sliding", many // 2)
    Case(device, heads=1, group=1, appended=(1, 4), contexts=(many, many // 2), window=half, dim=4).check()


def test_large_scores_do_not_overflow(device: Device) -> None:
    Case(device, scale=200.0).check()
    Case(device, scale=200.0, splits=2).check()


@settings(max_examples=15)
@given(data=st.data())
def test_any_cut(device: Device, data: st.DataObject) -> None:
    draw = data.draw
    rows = draw(st.integers(1, 4))
    small = st.integers(0, 3)
    room = [draw(small) for _ in range(rows)]
    tokens = draw(st.integers(1, 9))
    Case(
        device,
        pool_kind=draw(st.sampled_from(["float32", "bfloat16"])),
        order=draw(st.sampled_from([NHD, HND])),
        heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 5)),
        dim=draw(st.sampled_from([4, 5, 8])),
        page=draw(st.sampled_from([1, 4, 8])),
        room=room,
        appended=[draw(st.integers(0, n)) for n in room],
        contexts=[draw(st.integers(0, 12)) for _ in range(rows)],
        missing=draw(st.sampled_from([0.0, 0.3])),
        window=draw(st.sampled_from([FULL, Window("sliding", tokens), Window("chunked", tokens)])),
        splits=draw(st.integers(1, 3)),
        queries=draw(st.integers(1, 8)),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    ).check()


def test_nan_of_a_later_token_stays_there(device: Device) -> None:
    """Tokens of one row are worked on together; what one of them brings must not reach those before it."""
    case = Case(device, heads=1, group=1, appended=(4,), contexts=(0,))
    stored = case.pool.values()
    last = case.told[0][0][3, 0].astype(np.float32)
    page, offset = np.argwhere((stored[0, :, :, 0] == last).all(-1))[0]
    stored[:, page, offset] = np.nan
    case.pool.fill(stored)
    case.bound.run(case.cut, device.stream, 1.0, 0.0)
    out = case.out.values()
    assert np.isfinite(out[:3]).all()
    assert np.isnan(out[3]).all()


def test_what_is_written_must_not_overlap(device: Device) -> None:
    pool = Guarded(device, (2, 5, 4, 2, 8), "float32").tensor
    many = device.tensor((6, 8, 8), dtype("float32"))
    tables = SimpleNamespace(
        page_tables=(uploaded(device, np.zeros((1, 2, 4), np.int32)),),
        **{name: uploaded(device, np.zeros(2, np.int32)) for name in ("cu_seqlens_q", "seq_lens", "context_lens")},
        plan=SimpleNamespace(config=SimpleNamespace(max_step_tokens=1)),
    )
    storage = LayerStorage(
        group=0, window=FULL, num_pages=5, logical_pages=4, page_tokens=4, num_kv_heads=2, head_dim=8, owner=0
    )

    def bound(q: Tensor, out: Tensor) -> object:
        memory = AttentionMemory(device, [8])
        starts = tables.cu_seqlens_q
        return bind_attention(pool, q, out, storage, tables, starts, memory, step_kv=None, factors=None, sinks=None)

    with pytest.raises(InputError, match="out: overlaps q"):
        bound(many[:3, :4], many[2:5, :4])
    with pytest.raises(InputError, match="out: overlaps q"):
        bound(many[:3, :4], many[:3, 2:6])
    with pytest.raises(InputError, match="out: overlaps the pool"):
        bound(many[:3, :2], pool[0, 1:4, 0])
    with pytest.raises(ShapeError, match="q, out: shapes"):
        bound(many[:3, :4], many[3:, :2])
    bound(many[:3, :4], many[3:5, :4])
    folded = Tensor(many._memory, device, many.dtype, (3, 4, 8), strides=(8, 8, 1))
    with pytest.raises(ShapeError, match="must not overlap itself"):
        bound(many[3:, :4], folded)
    bound(many[:3, :4], many[:3, 4:])
    bound(many[:3, :4], many[3:, :4])
