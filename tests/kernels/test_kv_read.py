"""gather_kv and find_slots against loops over tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from numba_kv.cache.kv_operands import bind_rows, dense
from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.kernels.kv_read import find_ragged_slots, find_slots
from tests.helpers.kv_pools import NUMPY, Guarded, converted, numbers, same_bits

NHD, HND = (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def uploaded(device: Device, values: np.ndarray) -> Tensor:
    tensor = device.tensor(values.shape, dtype(values.dtype.name))
    tensor.fill_from(values)
    return tensor


def check(
    device: Device, kind: str, pool_kind: str, *, order=NHD, heads=2, dim=8, page=4, pages=5, tokens=9, skew=0, pitch=0,
    seed=0,
) -> str:  # fmt: skip
    random = np.random.default_rng(seed)
    pool = Guarded(device, (2, pages, page, heads, dim), pool_kind, order=order, skew=skew)
    pool.fill(numbers(random, pool.tensor.shape, pool_kind))
    values = pool.values()
    usable = (pages - 2) * page
    slots = random.integers(-3, usable + 2 * page + 3, tokens)
    slots[:2] = [2**62, -(2**63)][: len(slots)]
    scaled = pool_kind == "float8_e4m3" != kind
    factors = random.uniform(0.05, 4, (2, heads)).astype(np.float32) if scaled else None
    packed = Guarded(device, (tokens, 2 * heads + pitch, dim), kind, skew=skew)
    wanted = packed.values()
    for token, slot in enumerate(slots.tolist()):
        for half, first in enumerate((0, heads + pitch)):
            row = np.zeros((heads, dim), NUMPY[kind])
            if 0 <= slot < usable:
                row = converted(values[half, slot // page, slot % page], kind, None if factors is None else factors[half])
            wanted[token, first : first + heads] = row
    k = dense(device, packed.tensor[:, :heads], "k", heads, dim)
    v = dense(device, packed.tensor[:, heads + pitch :], "v", heads, dim)
    scale = None if factors is None else uploaded(device, factors.reshape(-1))
    bound = bind_rows(pool.tensor, k, v, uploaded(device, slots), scale, write=False)
    bound.run(tokens, device.stream)
    assert same_bits(packed.values(), wanted)
    assert same_bits(pool.values(), values)
    return bound.kernel.function.__name__


@pytest.mark.parametrize("order", [NHD, HND], ids=["NHD", "HND"])
@pytest.mark.parametrize("pool_kind", NUMPY)
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_every_pair_of_types(device: Device, kind: str, pool_kind: str, order: tuple[int, ...]) -> None:
    name = check(device, kind, pool_kind, order=order)
    by_words = kind == pool_kind and device.target == "cpu"
    assert name == ("gather_kv_words" if by_words else "move_kv")
    name = check(device, kind, pool_kind, order=order, dim=12, skew=8)
    assert name == ("gather_kv_words" if kind == pool_kind else "gather_kv")


def test_float8_is_read_as_it_is(device: Device) -> None:
    widest = "gather_kv_words" if device.target == "cpu" else "move_kv"
    assert check(device, "float8_e4m3", "float8_e4m3", dim=16) == widest
    assert check(device, "float8_e4m3", "float8_e4m3", heads=1) == "gather_kv_words"
    assert check(device, "float8_e4m3", "float8_e4m3", dim=5) == "gather_kv"


@settings(max_examples=20)
@given(data=st.data())
def test_any_size(device: Device, data: st.DataObject) -> None:
    pool_kind = data.draw(st.sampled_from(sorted(NUMPY)))
    check(
        device,
        data.draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        pool_kind,
        order=data.draw(st.sampled_from([NHD, HND])),
        heads=data.draw(st.integers(1, 3)),
        dim=data.draw(st.integers(1, 20)),
        page=data.draw(st.sampled_from([1, 2, 8, 256])),
        pages=data.draw(st.integers(3, 6)),
        tokens=data.draw(st.integers(1, 12)),
        skew=data.draw(st.sampled_from([0, 4, 8])),
        pitch=data.draw(st.integers(0, 3)),
        seed=data.draw(st.integers(0, 99)),
    )


def test_what_is_written_must_not_overlap(device: Device) -> None:
    pool = Guarded(device, (2, 4, 2, 2, 8), "float16").tensor
    slots = uploaded(device, np.arange(3))
    many = device.tensor((6, 2, 8), dtype("float16"))

    def bound(k: Tensor, v: Tensor) -> object:
        return bind_rows(pool, dense(device, k, "k", 2, 8), dense(device, v, "v", 2, 8), slots, None, write=False)

    with pytest.raises(InputError, match="k, v: each lies in the other's range"):
        bound(many[:3], many[:3])
    with pytest.raises(InputError, match="k, v: each lies in the other's range"):
        bound(many[:3], many[2:5])
    with pytest.raises(InputError, match="v: overlaps the pool"):
        bound(many[:3], pool[1, 1:4, 0])
    folded = Tensor(many._memory, device, many.dtype, (3, 2, 8), strides=(8, 8, 1))
    with pytest.raises(ShapeError, match="must not overlap itself"):
        bound(folded, many[3:])
    bound(many[:3], many[3:])
    bound(many[::2], many[1::2])


@pytest.mark.parametrize("page", [1, 4, 16])
def test_positions_are_found_through_the_table(device: Device, page: int) -> None:
    random = np.random.default_rng(page)
    rows, width, num_pages, columns = 3, 4, 9, 11
    table = random.integers(-1, num_pages + 2, (rows, 2, width)).astype(np.int32)
    named = np.array([2, 0, 0, -1, 3, 1], np.int32)
    starts = np.array([0, -3, 2, 0, 0, width * page - 2], np.int32)
    lengths = np.array([width * page, 5, 3, 9, 9, 2**31 - 1], np.int32)
    for low in (0, 2, -1, 2**40):
        found = Guarded(device, (len(named), columns), "int64")
        values = {"page_table": table, "rows": named, "starts": starts, "lengths": lengths}
        launch = find_slots.bind(
            device,
            {
                **{name: uploaded(device, array) for name, array in values.items()},
                "slots": found.tensor,
                "low": low,
                "shift": page.bit_length() - 1,
                "num_pages": num_pages,
            },
        )
        launch(len(named) * columns, device.stream)
        expected = np.full((len(named), columns), -1)
        for b, row in enumerate(named):
            for column in range(columns):
                position = int(starts[b]) + low + column
                if 0 <= row < rows and 0 <= position < min(int(lengths[b]), width * page):
                    entry = int(table[row, 0, position // page])
                    if 0 <= entry < num_pages:
                        expected[b, column] = entry * page + position % page
        assert np.array_equal(found.values(), expected)


CUMULATIVE = [
    [0, 4, 4, 9, 10, 10, 14],  # rows without a token among them
    [0, 0, 0, 0, 0, 0, 0],
    [2, 5, 9, 9, 11, 30, 40],  # the first tokens are nobody's, and there are fewer than it says
    [0, 9, 3, -7, 2**31 - 1, -(2**31), 8],  # nonsense: whatever it finds is a slot of the table
]


@pytest.mark.parametrize("cumulative", CUMULATIVE)
@pytest.mark.parametrize("page", [1, 4])
def test_packed_positions_are_found_through_the_table(device: Device, page: int, cumulative: list[int]) -> None:
    random = np.random.default_rng(page)
    rows, width, num_pages, tokens = 3, 4, 9, 17
    table = random.integers(-1, num_pages + 2, (rows, 2, width)).astype(np.int32)
    named = np.array([2, 0, 1, -1, 3, 1], np.int32)
    starts = np.array([0, -3, 2, 0, 0, width * page - 2], np.int32)
    lengths = np.array([width * page, 5, 6, 9, 9, 2**31 - 1], np.int32)
    cu_seqlens = np.array(cumulative, np.int32)
    for low in (0, -1, 2**40):
        found = Guarded(device, (tokens,), "int64")
        values = {"page_table": table, "rows": named, "starts": starts, "lengths": lengths, "cu_seqlens": cu_seqlens}
        launch = find_ragged_slots.bind(
            device,
            {
                **{name: uploaded(device, array) for name, array in values.items()},
                "slots": found.tensor,
                "low": low,
                "shift": page.bit_length() - 1,
                "num_pages": num_pages,
            },
        )
        launch(tokens, device.stream)
        expected = np.full(tokens, -1)
        for b, row in enumerate(named):
            for token in range(max(0, cumulative[b]), min(tokens, cumulative[b + 1])):
                position = int(starts[b]) + low + token - cumulative[b]
                if 0 <= row < rows and 0 <= position < min(int(lengths[b]), width * page):
                    entry = int(table[row, 0, position // page])
                    if 0 <= entry < num_pages:
                        expected[token] = entry * page + position % page
        if cumulative == sorted(cumulative):
            assert np.array_equal(found.values(), expected)
        assert ((found.values() >= -1) & (found.values() < num_pages * page)).all()
