"""write_kv against a loop over tokens: every pair of types, both layouts, odd sizes, slots that name no page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from numba_kv.cache.kv_operands import bind_rows, dense
from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InteropError, ShapeError
from tests.helpers.kv_pools import NUMPY, Guarded, converted, numbers, same_bits

NHD, HND = (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def uploaded(device: Device, values: np.ndarray) -> Tensor:
    tensor = device.tensor(values.shape, dtype(values.dtype.name))
    tensor.fill_from(values)
    return tensor


def slots_of(random: np.random.Generator, tokens: int, usable: int) -> np.ndarray:
    """Return slots of which none is there twice: of pages, of reserved pages, -1, and far outside."""
    slots = np.full(tokens, -1, np.int64)
    real = min(tokens, usable)
    slots[:real] = random.permutation(usable)[:real]
    random.shuffle(slots)
    outside = [-1, -2, usable, usable + 1, 2**31, 2**62, -(2**63)]
    for token in range(0, tokens, 5):
        slots[token] = random.choice(outside)
    return slots


def write(device: Device, pool: Guarded, k: Tensor, v: Tensor, slots: np.ndarray, factors: np.ndarray | None = None) -> str:
    """Run the write; return the name of the kernel's function."""
    scale = None if factors is None else uploaded(device, factors.reshape(-1))
    _, _, _, heads, dim = pool.tensor.shape
    operands = dense(device, k, "k", heads, dim), dense(device, v, "v", heads, dim)
    bound = bind_rows(pool.tensor, *operands, uploaded(device, slots), scale, write=True)
    bound.run(len(slots), device.stream)
    return bound.kernel.function.__name__


def expected(before: np.ndarray, k: np.ndarray, v: np.ndarray, slots: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    pool = before.copy()
    kind = next(name for name, found in NUMPY.items() if found == pool.dtype)
    page_tokens, usable = pool.shape[2], (pool.shape[1] - 2) * pool.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < usable:
            for half, values in enumerate((k, v)):
                factor = None if factors is None else factors[half]
                pool[half, slot // page_tokens, slot % page_tokens] = converted(values[token], kind, factor)
    return pool


def check(
    device: Device, kind: str, pool_kind: str, *, order=NHD, heads=2, dim=8, page=4, pages=5, tokens=13, skew=0, pitch=0,
    seed=0,
) -> str:  # fmt: skip
    random = np.random.default_rng(seed)
    pool = Guarded(device, (2, pages, page, heads, dim), pool_kind, order=order, skew=skew)
    before = pool.values()
    packed = Guarded(device, (tokens, 2 * heads + pitch, dim), kind, skew=skew)
    packed.fill(numbers(random, packed.tensor.shape, kind))
    k, v = packed.tensor[:, :heads], packed.tensor[:, pitch + heads :]
    scaled = pool_kind == "float8_e4m3" != kind
    factors = random.uniform(0.05, 4, (2, heads)).astype(np.float32) if scaled else None
    slots = slots_of(random, tokens, (pages - 2) * page)
    name = write(device, pool, k, v, slots, factors)
    assert same_bits(pool.values(), expected(before, k.to_host(), v.to_host(), slots, factors))
    packed.values()
    return name


@pytest.mark.parametrize("order", [NHD, HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("pool_kind", NUMPY)
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_every_pair_of_types(device: Device, kind: str, pool_kind: str, order: tuple[int, ...]) -> None:
    name = check(device, kind, pool_kind, order=order)
    by_words = kind == pool_kind and device.target == "cpu"
    assert name == ("write_kv_words" if by_words else "move_kv")
    name = check(device, kind, pool_kind, order=order, dim=12, skew=8)
    assert name == ("write_kv_words" if kind == pool_kind else "write_kv")


@pytest.mark.parametrize("order", [NHD, HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 2, 64, 256])
def test_page_sizes(device: Device, page: int, order: tuple[int, ...]) -> None:
    check(device, "bfloat16", "bfloat16", page=page, pages=4, order=order)
    check(device, "bfloat16", "float8_e4m3", page=page, pages=4, order=order)


@pytest.mark.parametrize("kind", NUMPY)
def test_equal_types_move_bit_by_bit(device: Device, kind: str) -> None:
    """NaN payloads too, whether whole words fit or not."""
    itemsize = NUMPY[kind].itemsize
    for dim, skew in ((8, 0), (7, 0), (8, itemsize)):
        pool = Guarded(device, (2, 6, 64, 1, dim), kind, skew=skew)
        bits = np.random.default_rng(1).integers(0, 256, (2, 256, 1, dim * itemsize), np.uint8).view(NUMPY[kind])
        k, v = (Guarded(device, bits.shape[1:], kind, skew=skew).fill(b).tensor for b in bits)
        write(device, pool, k, v, np.arange(256))
        assert same_bits(pool.values()[:, :4].reshape(2, 256, 1, dim), bits)


@pytest.mark.parametrize(
    ("dim", "skew", "name"),
    [
        (8, 0, "move_kv"),
        (12, 0, "write_kv_words"),
        (8, 8, "write_kv_words"),
        (7, 0, "write_kv"),
        (1, 0, "write_kv"),
        (8, 2, "write_kv"),
    ],
)
def test_the_widest_accesses_that_everything_is_aligned_to(device: Device, dim: int, skew: int, name: str) -> None:
    found = check(device, "bfloat16", "bfloat16", heads=1, dim=dim, skew=skew)
    if name == "move_kv" and device.target == "cpu":  # which has no accesses of 16 bytes
        name = "write_kv_words"
    assert found == name


def test_long_strides_take_products_of_64_bits(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba_kv.cache.kv_operands.NARROW", 64)
    assert check(device, "bfloat16", "float16") == "write_kv"


@pytest.mark.parametrize(
    ("shape", "strides", "meant"),
    [
        ((1, 1, 8), (999, 999, 1), (8, 8, 1)),
        ((2, 1, 8), (24, 999, 1), (24, 8, 1)),  # one head of packed Q, K and V
        ((1, 2, 8), (999, 8, 1), (16, 8, 1)),
        ((1, 2, 8), (48, 8, 1), (48, 8, 1)),  # what more tokens would have
        ((1, 2, 8), (8, 24, 1), (16, 24, 1)),  # heads apart
    ],
)
def test_strides_of_an_axis_of_one_say_nothing(device: Device, shape: tuple, strides: tuple, meant: tuple) -> None:
    """A kernel of a GPU is compiled with strides: those that nobody uses must not make another."""
    memory = device.tensor((64,), dtype("bfloat16"))
    given = Tensor(memory._memory, device, memory.dtype, shape, strides=strides)
    assert dense(device, given, "k", shape[1], 8).strides == meant


@pytest.mark.parametrize("pool_kind", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("order", [NHD, HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("span", [1, 3, 16])
def test_tokens_of_a_block(device: Device, monkeypatch: pytest.MonkeyPatch, span: int, order: tuple, pool_kind: str) -> None:
    """Several tokens a block, the last block not full; heads of three units, which no power of two divides."""
    monkeypatch.setattr("numba_kv.cache.kv_operands._MANY_TOKENS", 8)
    monkeypatch.setattr("numba_kv.cache.kv_operands._MANY_UNITS", span * 6)
    for tokens in (7, 8, 13):
        check(device, "bfloat16", pool_kind, order=order, heads=2, dim=24, tokens=tokens, pages=6)


@settings(max_examples=20)
@given(data=st.data())
def test_any_size(device: Device, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    pool_kind = data.draw(st.sampled_from(sorted(NUMPY)))
    check(
        device,
        kind,
        pool_kind,
        order=data.draw(st.sampled_from([NHD, HND])),
        heads=data.draw(st.integers(1, 3)),
        dim=data.draw(st.integers(1, 20)),
        page=data.draw(st.sampled_from([1, 2, 8])),
        pages=data.draw(st.integers(3, 6)),
        tokens=data.draw(st.integers(1, 12)),
        skew=data.draw(st.sampled_from([0, 4, 8])),
        pitch=data.draw(st.integers(0, 3)),
        seed=data.draw(st.integers(0, 99)),
    )


def test_float8_saturates_and_keeps_nan(device: Device) -> None:
    """Scales divide, 1e4 is 448, NaN is NaN, -0 is -0. vllm-xpu-kernels#475, pytorch#178817."""
    given = np.array([1e4, -1e4, np.inf, -np.inf, np.nan, -0.0, 3.0, 448 * 2 + 1], np.float32).reshape(1, 1, 8)
    pool = Guarded(device, (2, 3, 1, 1, 8), "float8_e4m3")
    write(device, pool, uploaded(device, given), uploaded(device, given), np.array([0]), np.array([[0.5], [1.0]], np.float32))
    k, v = pool.values()[:, 0, 0, 0].astype(np.float32)
    assert np.array_equal(k, [448, -448, 448, -448, np.nan, -0.0, 1.5, 448], equal_nan=True)
    assert np.array_equal(v, [448, -448, 448, -448, np.nan, -0.0, 3.0, 448], equal_nan=True)
    assert np.signbit(k[5])
    assert np.signbit(v[5])


def test_tokens_of_stride_zero_are_read(device: Device) -> None:
    one = uploaded(device, numbers(np.random.default_rng(2), (1, 1, 8), "float16"))
    k = Tensor(one._memory, device, one.dtype, (4, 1, 8), strides=(0, 8, 1))
    pool = Guarded(device, (2, 6, 1, 1, 8), "float16")
    write(device, pool, k, k, np.arange(4))
    assert same_bits(pool.values()[:, :4, 0], np.broadcast_to(one.to_host(), (2, 4, 1, 8)))


def test_offsets_are_of_64_bits(device: Device) -> None:
    """A pool of more than 2**32 elements, of which the first and the last page are written. vllm#1486, vllm#50427."""
    pages, shape = (1 << 19) + 3, (16, 2, 128)
    pool = device.tensor((2, pages, *shape), dtype("float8_e4m3"))  # memory that is not touched costs nothing
    assert pool.size > 1 << 32
    random = np.random.default_rng(3)
    slots = np.array([0, 1, (pages - 2) * 16 - 1, (pages - 2) * 16], np.int64)
    for kind in ("bfloat16", "float8_e4m3"):
        k, v = (uploaded(device, numbers(random, (4, *shape[1:]), kind)) for _ in range(2))
        factors = None if kind == "float8_e4m3" else uploaded(device, np.ones(4, np.float32))
        operands = dense(device, k, "k", 2, 128), dense(device, v, "v", 2, 128)
        bound = bind_rows(pool, *operands, uploaded(device, slots), factors, write=True)
        bound.run(4, device.stream)
        for half, values in enumerate((k, v)):
            wanted = converted(values.to_host(), "float8_e4m3")
            assert same_bits(pool[half, 0, :2].to_host(), wanted[:2])
            assert same_bits(pool[half, pages - 3, 15].to_host(), wanted[2])
            assert not pool[half, pages - 2].to_host().astype(np.float32).any()


def test_what_cannot_be_written_is_refused(device: Device) -> None:
    pool = Guarded(device, (2, 4, 2, 2, 8), "float8_e4m3")
    slots = uploaded(device, np.arange(3))
    good = device.tensor((3, 2, 8), dtype("float16"))

    def bound(k: Tensor, v: Tensor, slots: Tensor = slots) -> object:
        return bind_rows(pool.tensor, dense(device, k, "k", 2, 8), dense(device, v, "v", 2, 8), slots, None, write=True)

    with pytest.raises(ShapeError, match=r"k: shape \[3, 8, 2\] given"):
        bound(device.tensor((3, 8, 2), dtype("float16")), good)
    with pytest.raises(ShapeError, match="k, v: .* differ"):
        bound(good, good[:2])
    with pytest.raises(ShapeError, match="k, v: .* differ"):
        bound(good, device.tensor((3, 2, 8), dtype("float32")))
    with pytest.raises(ShapeError, match="k, v: int32 given"):
        bound(*[device.tensor((3, 2, 8), dtype("int32"))] * 2)
    with pytest.raises(ShapeError, match="last axis of stride 1"):
        bound(device.tensor((3, 2, 16), dtype("float16"))[:, :, ::2], good)
    with pytest.raises(ShapeError, match="no negative stride"):
        bound(good[::-1], good)
    with pytest.raises(ShapeError, match="rows that follow each other"):
        dense(device, device.tensor((2, 4, 2, 8), dtype("float16"))[:, :3], "k", 2, 8)
    with pytest.raises(ShapeError, match="not aligned"):
        bound(Guarded(device, (3, 2, 8), "float16", skew=1).tensor, good)
    with pytest.raises(ShapeError, match="slots: "):
        bound(good, good, device.tensor((3,), dtype("int32")))
    with pytest.raises(InputError, match="k: overlaps the pool"):
        bound(pool.tensor[0, :3, 0], device.tensor((3, 2, 8), dtype("float8_e4m3")))
    with pytest.raises(InputError, match="factors: None given"):
        bound(good, good)
    with pytest.raises(InteropError, match="k: "):
        bound([1.0], good)
