"""Gathered rows: those of each token's position, bound once, checked when bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError, StateError
from numba_kv.weights import RowSets
from tests.helpers.ropes import opened, rope

LONG = {"short_factor": (1.0, 1.1, 1.2, 1.3), "long_factor": (1.0, 2.0, 4.0, 8.0), "original_max_position_embeddings": 5}


def int32(device: Device, *values: int) -> Tensor:
    tensor = device.tensor((len(values),), dtype("int32"))
    tensor.fill_from(np.array(values, np.int32))
    return tensor


def test_ragged_rows() -> None:
    device = create_device()
    with opened(device) as cache:
        table = cache.table(rope(), 9)
        positions = int32(device, 3, 4, 8, 0, -1, 9)
        gather = cache.gather(table, positions, capacity=9)
        found = gather(6)
        assert (found.shape, found.address) == ((6, 8), gather.rows.address)
        rows = table.tensor.to_host()[0]
        assert np.array_equal(found.to_host(), np.concatenate([rows[[3, 4, 8, 0]], np.zeros((2, 8), np.float32)]))
        positions.fill_from(np.array([1, 1, 1, 7, 7, 7], np.int32))
        allocations, sent = device.memory.allocations, device.bytes_to_device
        again = gather(2, device.stream)
        assert (device.memory.allocations, device.bytes_to_device) == (allocations, sent)
        assert np.array_equal(again.to_host(), rows[[1, 1]])
        assert np.array_equal(gather.rows.to_host()[2], rows[8])
        assert gather(0).shape == (0, 8)


def test_rows_of_the_caller() -> None:
    device = create_device()
    with opened(device) as cache:
        table, rows = cache.table(rope(), 3), device.tensor((2, 8), dtype("float32"))
        held = cache.stats.nbytes
        gather = cache.gather(table, int32(device, 2, 0), capacity=3, rows=rows)
        assert gather(2).address == rows.address
        assert cache.stats.nbytes == held
        assert np.array_equal(rows.to_host(), table.tensor.to_host()[0, [2, 0]])


def test_short_and_long_sequences_in_one_step() -> None:
    device = create_device()
    with opened(device) as cache:
        table = cache.table(rope("longrope", positions=20, **LONG), 12)
        finals = [5, 12, 3]
        sets = RowSets(int32(device, 0, 2, 4, 5), int32(device, *(table.set_index(n) for n in finals)))
        positions = [3, 4, 3, 11, 2, 0]
        found = cache.gather(table, int32(device, *positions), capacity=12, row_sets=sets)(6).to_host()
        rows = [tensor.to_host()[0] for tensor in table.tensors]
        for t, (number, position) in enumerate([(0, 3), (0, 4), (1, 3), (1, 11), (0, 2)]):
            assert np.array_equal(found[t], rows[number][position])
        assert (found[5] == 0).all()  # behind the last sequence


def test_rows_of_a_multimodal_table_with_counts() -> None:
    device = create_device()
    with opened(device) as cache:
        table = cache.table(rope("mrope", mrope_section=(2, 1, 1)), 4, num_rows=3)
        table.set_positions([2], np.arange(6).reshape(1, 3, 2))
        sets = RowSets(int32(device, 0, 1, 4), int32(device, 2, 0), int32(device, 1, 1))
        found = cache.gather(table, int32(device, 1, 3, -1, 0), capacity=4, row_sets=sets)(4).to_host()
        rows = table.tensor.to_host()
        assert np.array_equal(found[:2], rows[[2, 0], [1, 3]])
        assert (found[2:] == 0).all()


def test_a_gather_is_part_of_a_graph() -> None:
    device = create_device()
    with opened(device) as cache:
        table, positions = cache.table(rope(), 6), int32(device, 0, 1)
        gather = cache.gather(table, positions, capacity=6)
        gather(2)
        graph = device.capture(lambda stream: gather(2, stream) and None)
        for values in ([5, 4], [2, 0]):
            positions.fill_from(np.array(values, np.int32))
            graph.launch(device.stream)
            assert np.array_equal(gather.rows.to_host(), table.tensor.to_host()[0, values])
        graph.close()


def test_what_does_not_fit_is_refused_when_bound() -> None:
    device = create_device()
    with opened(device) as cache:
        table, positions = cache.table(rope(), 8), int32(device, 1, 2)
        several = cache.table(rope("mrope", mrope_section=(2, 1, 1)), 8, num_rows=2)
        starts, numbers = int32(device, 0, 1, 2), int32(device, 0, 1)
        with pytest.raises(InputError, match="0 to 9 are wanted, it has 8"):
            cache.gather(table, positions, capacity=9)
        with pytest.raises(InputError, match="row_sets: the table has 2 row sets"):
            cache.gather(several, positions, capacity=8)
        wrong: list[dict[str, Any]] = [
            {"capacity": 0},
            {"positions": device.tensor((2,), dtype("int64"))},
            {"positions": device.tensor((2, 1), dtype("int32"))},
            {"positions": np.zeros(2, np.int32)},
            {"positions": int32(create_device(), 1, 2)},
            {"table": table.tensor},
            {"rows": device.tensor((3, 8), dtype("float32"))},
            {"rows": device.tensor((2, 8), dtype("int32"))},
            {"rows": device.tensor((2, 16), dtype("float32"))[:, ::2]},
            {"row_sets": RowSets(starts, int32(device, 0))},
            {"row_sets": RowSets(int32(device, 0), int32(device, 0))},
            {"row_sets": RowSets(starts, numbers, int32(device, 0))},
            {"row_sets": RowSets(starts, device.tensor((2,), dtype("int64")))},
        ]
        for change in wrong:
            with pytest.raises(InputError):
                cache.gather(**{"table": table, "positions": positions, "capacity": 8, **change})
        assert issubclass(ShapeError, InputError)


def test_calls_are_checked() -> None:
    device = create_device()
    with opened(device) as cache:
        gather = cache.gather(cache.table(rope(), 8), int32(device, 1, 2), capacity=8)
        for count in (-1, 3, 1.0, True, None):
            with pytest.raises(InputError, match="num_tokens"):
                gather(count)  # type: ignore[arg-type]
        cache.close()
        with pytest.raises(StateError, match="closed"):
            cache.gather(gather.table, int32(device, 1), capacity=8)
    with pytest.raises(StateError, match="given back"):
        gather(1)
