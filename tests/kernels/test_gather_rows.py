"""gather_rows against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import ShapeError
from numba_kv.kernels.gather import gather_rows


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def to_device(device: Device, values: np.ndarray) -> Tensor:
    tensor = device.tensor(values.shape, dtype("int32"))
    tensor.fill_from(values.astype(np.int32))
    return tensor


def run(device: Device, table: np.ndarray, slots: list[int], rows: int, spare: int, missing: int) -> np.ndarray:
    """Gather `rows` rows into a destination with `spare` more; 99 stands where nothing is written."""
    words = table.shape[1]
    destination = to_device(device, np.full((rows + spare) * words, 99))
    launch = gather_rows.bind(
        device,
        {
            "destination": destination,
            "table": to_device(device, table.reshape(-1)),
            "slots": to_device(device, np.array(slots)),
            "num_slots": len(table),
            "row_words": words,
            "missing": missing,
        },
    )
    launch(rows, device.stream)
    return destination.to_host().reshape(rows + spare, words)


def oracle(table: np.ndarray, slots: list[int], rows: int, spare: int, missing: int) -> np.ndarray:
    expected = np.full((rows + spare, table.shape[1]), 99, np.int32)
    for row in range(rows):
        expected[row] = table[slots[row]] if 0 <= slots[row] < len(table) else missing
    return expected


@settings(max_examples=15)
@given(data=st.data())
def test_rows_are_copied_or_missing(device: Device, data: st.DataObject) -> None:
    num_slots, words = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 11))
    table = np.arange(num_slots * words).reshape(num_slots, words)
    slots = data.draw(
        st.lists(st.one_of(st.integers(-2, num_slots + 1), st.sampled_from([-(2**31), 2**31 - 1])), min_size=1, max_size=5)
    )
    rows, spare = data.draw(st.integers(0, len(slots))), data.draw(st.integers(0, 1))
    missing = data.draw(st.sampled_from([-1, 12]))
    assert np.array_equal(run(device, table, slots, rows, spare, missing), oracle(table, slots, rows, spare, missing))


def test_rows_wider_than_a_block(device: Device) -> None:
    table = np.arange(2 * 1001).reshape(2, 1001)
    assert np.array_equal(run(device, table, [1, 5], 2, 0, -1), oracle(table, [1, 5], 2, 0, -1))


def test_slots_are_int32(device: Device) -> None:
    flat = device.tensor((2,), dtype("int32"))
    slots = device.tensor((1,), dtype("int64"))
    with pytest.raises(ShapeError, match="slots: int64"):
        gather_rows.bind(
            device, {"destination": flat, "table": flat, "slots": slots, "num_slots": 1, "row_words": 2, "missing": -1}
        )
