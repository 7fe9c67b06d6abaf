"""Kernels of rotary tables against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import ShapeError
from numba_kv.kernels.rope_tables import cos_sin, fill_rope, fill_rope_axes, gather_rope, gather_rope_sets
from tests.helpers.ropes import expected, plain

TWO_PI = 2 * math.pi


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def on(device: Device, values: np.ndarray) -> Tensor:
    tensor = device.tensor(values.shape, dtype(values.dtype.name))
    tensor.fill_from(values)
    return tensor


@pytest.mark.parametrize("turns", [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 7.5, -0.25, -3.1, 1e-300])
def test_the_polynomials_at_the_edges_of_the_quadrants(turns: float) -> None:
    for near in (np.nextafter(turns, -9.0), turns, np.nextafter(turns, 9.0)):
        cosine, sine = cos_sin(float(near))
        assert cosine == pytest.approx(math.cos(TWO_PI * near), abs=1e-12)
        assert sine == pytest.approx(math.sin(TWO_PI * near), abs=1e-12)


@given(st.floats(-1e6, 1e6))
@settings(max_examples=200)
def test_the_polynomials_anywhere(turns: float) -> None:
    cosine, sine = cos_sin(turns)
    angle = TWO_PI * (turns - round(turns))
    assert cosine == pytest.approx(math.cos(angle), abs=1e-12)
    assert sine == pytest.approx(math.sin(angle), abs=1e-12)


@pytest.mark.parametrize("pairs", [1, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_fill_writes_every_row_set_and_nothing_else(device: Device, pairs: int, length: int) -> None:
    frequencies = np.stack([plain(2 * pairs, 10.0), plain(2 * pairs, 3.0)]).astype(np.float64)
    table = on(device, np.full((2 * length + 3, 2 * pairs), 7, np.float32))
    values = {
        "table": table,
        "frequencies": on(device, frequencies / TWO_PI),
        "magnitudes": on(device, np.array([1.0, 1.5])),
        "variant": 1,
        "first_row": 2,
        "length": length,
    }
    fill_rope.bind(device, values)(2 * length * pairs, device.stream)
    found = table.to_host()
    assert (found[:2] == 7).all()
    assert (found[2 + 2 * length :] == 7).all()
    rows = expected(frequencies[1], range(length), 1.5)
    assert np.abs(found[2 : 2 + 2 * length] - np.concatenate([rows, rows])).max() < 2e-7


def test_fill_axes_takes_each_pair_from_its_axis(device: Device) -> None:
    frequencies = plain(6, 10.0).astype(np.float64)[None]
    positions = np.array([[[0, 1.5], [2, 3], [-4, 5]], [[9, 9], [9, 9], [9, 10]]])
    table = on(device, np.full((3 * 4, 6), 7, np.float32))
    values = {
        "table": table,
        "frequencies": on(device, frequencies / TWO_PI),
        "magnitudes": on(device, np.array([2.0])),
        "axes": on(device, np.array([0, 2, 1], np.int32)),
        "positions": on(device, positions),
        "next_positions": on(device, np.array([6.0, 11.0])),
        "rows": on(device, np.array([2, 0])),
        "variant": 0,
        "first_row": 0,
        "length": 4,
    }
    fill_rope_axes.bind(device, values)(2 * 4 * 3, device.stream)
    found = table.to_host().reshape(3, 4, 6)
    assert (found[1] == 7).all()
    for k, row in enumerate((2, 0)):
        following = [6.0, 11.0][k]
        for place in range(4):
            at = positions[k, [0, 2, 1], place] if place < 2 else np.full(3, following + place - 2)
            angles = at * frequencies[0]
            assert np.allclose(found[row, place], 2 * np.concatenate([np.cos(angles), np.sin(angles)]), atol=1e-6)


def gather(device: Device, table: np.ndarray, positions: list[int], items: int) -> np.ndarray:
    gathered = on(device, np.full((len(positions), table.shape[1]), 99, np.float32))
    values = {"gathered": gathered, "positions": on(device, np.array(positions, np.int32)), "table": on(device, table)}
    gather_rope.bind(device, values, threads=32)(items, device.stream)
    return gathered.to_host()


@given(st.data())
@settings(max_examples=15)
def test_gather_copies_rows_or_zeros(device: Device, data: st.DataObject) -> None:
    length, width = data.draw(st.integers(1, 5)), 2 * data.draw(st.integers(1, 3))
    position = st.one_of(st.integers(-2, length + 1), st.sampled_from([-(2**31), 2**31 - 1]))
    positions = data.draw(st.lists(position, min_size=1, max_size=6))
    items = data.draw(st.integers(0, len(positions)))
    table = np.arange(1, length * width + 1, dtype=np.float32).reshape(length, width)
    found = gather(device, table, positions, items)
    for t, p in enumerate(positions):
        wanted = 99 if t >= items else table[p] if 0 <= p < length else 0
        assert (found[t] == wanted).all()


def test_rows_wider_than_a_block(device: Device) -> None:
    table = np.arange(2 * 70, dtype=np.float32).reshape(2, 70)
    assert np.array_equal(gather(device, table, [1, 0], 2), table[[1, 0]])


def gather_sets(
    device: Device,
    table: np.ndarray,
    sets: list[tuple[int, int]],
    positions: list[int],
    starts: list[int],
    row_sets: list[int],
    counts: list[int] | None,
) -> np.ndarray:
    def int32(values: list[int]) -> Tensor:
        return on(device, np.array(values, np.int32))

    gathered = on(device, np.full((len(positions), table.shape[1]), 99, np.float32))
    values = {
        "gathered": gathered,
        "positions": int32(positions),
        "table": on(device, table),
        "sets": on(device, np.array(sets, np.int64)),
        "cu_seqlens_q": int32(starts),
        "row_sets": int32(row_sets),
        "counts": int32(row_sets if counts is None else counts),
        "has_counts": int(counts is not None),
    }
    gather_rope_sets.bind(device, values, threads=32)(len(positions), device.stream)
    return gathered.to_host()


def test_gather_of_resident_rows(device: Device) -> None:
    """Three states of four positions; padding behind the valid token of a sequence is zero."""
    table = np.arange(24, dtype=np.float32).reshape(12, 2)
    sets = [(0, 4), (4, 4), (8, 4)]
    found = gather_sets(device, table, sets, [1, 3, -1, 0], [0, 1, 4], [2, 0], [1, 1])
    assert found.tolist() == [[18, 19], [6, 7], [0, 0], [0, 0]]


@given(st.data())
@settings(max_examples=15)
def test_gather_of_any_row_sets(device: Device, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    first = np.cumsum([0, *lengths])
    table = np.arange(1, 2 * first[-1] + 1, dtype=np.float32).reshape(-1, 2)
    q_lens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    starts = np.cumsum([0, *q_lens]).tolist()
    tokens = starts[-1] + data.draw(st.integers(0 if starts[-1] else 1, 2))
    positions = data.draw(st.lists(st.integers(-1, 4), min_size=tokens, max_size=tokens))
    row_sets = data.draw(st.lists(st.integers(-1, len(lengths)), min_size=len(q_lens), max_size=len(q_lens)))
    counts = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=len(q_lens), max_size=len(q_lens)))
    sets = list(zip(first.tolist(), lengths, strict=False))
    found = gather_sets(device, table, sets, positions, starts, row_sets, counts)
    wanted = np.zeros((tokens, 2), np.float32)
    for row, number in enumerate(row_sets):
        for i in range(q_lens[row] if counts is None else min(q_lens[row], counts[row])):
            t = starts[row] + i
            if 0 <= number < len(lengths) and 0 <= positions[t] < lengths[number]:
                wanted[t] = table[first[number] + positions[t]]
    assert np.array_equal(found, wanted)


def test_positions_are_int32(device: Device) -> None:
    table = on(device, np.zeros((2, 2), np.float32))
    with pytest.raises(ShapeError, match="positions: int64"):
        gather_rope.bind(device, {"gathered": table, "table": table, "positions": device.tensor((2,), dtype("int64"))})
