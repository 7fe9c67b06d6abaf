"""Multimodal tables: rows of positions with three axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numba_kv.config.rope_axes import pair_axes
from numba_kv.errors import InputError
from tests.helpers.ropes import expected, opened, plain, rope


def wanted(position_ids: np.ndarray, axes: tuple[int, ...], theta: float) -> np.ndarray:
    """Return the rows [places, D] of position ids [3, places]."""
    angles = position_ids[list(axes)].T * plain(2 * len(axes), theta)
    return np.concatenate([np.cos(angles), np.sin(angles)], -1)


CASES = [
    (128, 4096, 2, 1e4, (16, 24, 24), False),
    (128, 8192, 1, 1e4, (16, 24, 24), False),
    (128, 4096, 2, 5e6, (24, 20, 20), True),
    (128, 500, 1, 5e6, (24, 20, 20), True),
    (64, 4096, 2, 1e7, (11, 11, 10), True),
    (64, 500, 1, 1e7, (11, 11, 10), True),
    (8, 6, 2, 1e4, (2, 1, 1), False),
    (6, 5, 3, 1e4, (1, 1, 1), True),
]


@pytest.mark.parametrize(("dim", "length", "rows", "theta", "section", "interleaved"), CASES)
@pytest.mark.parametrize("step", [1, 3.25, 6.5])
def test_rows_of_their_own(
    target: str, dim: int, length: int, rows: int, theta: float, section: tuple[int, ...], interleaved: bool, step: float
) -> None:
    if target == "sim" and length > 10:
        pytest.skip("the simulator interprets every pair of every position")
    config = rope("mrope", theta, dim, length, mrope_section=section, mrope_interleaved=interleaved)
    place = np.arange(length)
    ids = np.stack([[place * step, place // 7 + r, place % 7 + 2 * r] for r in range(rows)])
    with opened() as cache:
        table = cache.table(config, length, num_rows=rows)
        table.set_positions(range(rows), ids if step % 1 else ids.astype(np.int64))
        found = table.tensor.to_host()
    for r in range(rows):
        assert np.abs(found[r] - wanted(ids[r], pair_axes(config), theta)).max() < 1e-6


def test_text_until_positions_come_and_behind_them() -> None:
    config = rope("mrope", mrope_section=(2, 1, 1))
    text = expected(plain(8, 1e4), range(6))
    with opened() as cache:
        table = cache.table(config, 6, num_rows=2)
        assert np.abs(table.tensor.to_host() - text).max() < 2e-7
        ids = np.array([[0, 0], [0, 3], [1, 1]])
        table.set_positions(1, ids[None])
        found = table.tensor.to_host()
    full = np.concatenate([ids, np.tile([4, 5, 6, 7], (3, 1))], 1)
    assert np.abs(found[0] - text).max() < 2e-7
    assert np.abs(found[1] - wanted(full, (0, 0, 1, 2), 1e4)).max() < 2e-7


def test_other_types_can_have_axes() -> None:
    """A stretched multimodal model: the sections and the factors are each other's business."""
    parameters = {"factor": 4.0, "original_max_position_embeddings": 16, "mrope_section": (2, 1, 1)}
    with opened() as cache:
        table = cache.table(rope("yarn", **parameters), 4, num_rows=2)
        plain_yarn = cache.table(rope("yarn", factor=4.0, original_max_position_embeddings=16), 4)
        assert np.array_equal(table.tensor.to_host()[1], plain_yarn.tensor.to_host()[0])
        table.set_positions([0], np.array([[[2], [2], [2]]]))
        assert np.array_equal(table.tensor.to_host()[0, :2], plain_yarn.tensor.to_host()[0, 2:4])


GOOD = np.zeros((1, 3, 2))
BAD: list[tuple[Any, Any]] = [
    ([2], GOOD),
    ([-1], GOOD),
    ([0.5], GOOD),
    ([True], GOOD),
    ([0, 0], np.zeros((2, 3, 2))),
    ([0, 1], GOOD),
    ([[0]], GOOD),
    ([0], np.zeros((1, 2, 2))),
    ([0], np.zeros((1, 3, 0))),
    ([0], np.zeros((1, 3, 5))),
    ([0], np.zeros((3, 2))),
    ([0], np.full((1, 3, 2), np.nan)),
    ([0], np.full((1, 3, 2), 2.0**31)),
    ([0], np.zeros((1, 3, 2), complex)),
    ([0], np.full((1, 3, 2), "x")),
]


@pytest.mark.parametrize(("rows", "ids"), BAD)
def test_bad_positions_change_nothing(rows: Any, ids: Any) -> None:
    with opened() as cache:
        table = cache.table(rope("mrope", mrope_section=(2, 1, 1)), 4, num_rows=2)
        before = table.tensor.to_host()
        with pytest.raises(InputError):
            table.set_positions(rows, ids)
        assert np.array_equal(table.tensor.to_host(), before)


def test_a_table_with_one_axis_takes_no_positions() -> None:
    with opened() as cache, pytest.raises(InputError, match="no mrope_section"):
        cache.table(rope(), 4).set_positions([0], GOOD)


def test_positions_leave_no_memory_behind() -> None:
    with opened() as cache:
        table = cache.table(rope("mrope", mrope_section=(2, 1, 1)), 4, num_rows=2)
        before = cache._device.memory.current_bytes
        for _ in range(3):
            table.set_positions([0, 1], np.zeros((2, 3, 4)))
        assert cache._device.memory.current_bytes == before
