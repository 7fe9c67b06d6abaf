"""Sums and maxima over lanes: every lane gets the same bits, in the order that is promised."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels.jit import Kernel
from numba_kv.kernels.lanes import lanes_max, lanes_sum, team_sum
from numba_kv.kernels.spec import array, scalar

SIM_LANES = 4
SIZES = (32, 64, 96, 256, 1024)


def add_and_compare(item, lane, lanes, values, sums, largest, repeats, again):
    value = np.float32(0.0)
    if lane < values.shape[0]:
        value = values[lane]
    for i in range(repeats):  # calls in a row must not see each other's numbers
        total = lanes_sum(value + np.float32(i), lane, lanes)
        sums[item, i, lane] = total
        largest[item, i, lane] = lanes_max(value - np.float32(i), lane, lanes)
        again[item, i, lane] = lanes_sum(total, lane, lanes)


def add_in_teams(item, lane, lanes, values, sums, team):
    sums[lane] = team_sum(values[lane], lane, lanes, team)


ALL = Kernel(
    add_and_compare,
    {
        "values": array("float32"),
        "sums": array("float32", 3),
        "largest": array("float32", 3),
        "repeats": scalar(),
        "again": array("float32", 3),
    },
    True,
)
TEAMS = Kernel(add_in_teams, {"values": array("float32"), "sums": array("float32"), "team": scalar()}, True, ["team"])


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def lanes_of(device: Device, threads: int) -> int:
    return {"cpu": 1, "sim": SIM_LANES, "cuda": threads}[device.target]


def uploaded(device: Device, values: np.ndarray) -> Tensor:
    tensor = device.tensor(values.shape, dtype(values.dtype.name))
    tensor.fill_from(values)
    return tensor


def tree(values: np.ndarray) -> np.float32:
    """Return the sum, neighbours first."""
    while len(values) > 1:
        values = np.append(values, np.float32(0.0)) if len(values) % 2 else values
        values = values[::2] + values[1::2]
    return values[0]


@pytest.mark.parametrize("threads", SIZES)
def test_every_lane_gets_the_sum_and_the_maximum(device: Device, threads: int) -> None:
    lanes, items, repeats = lanes_of(device, threads), 3, 3
    random = np.random.default_rng(threads)
    values = random.normal(size=lanes).astype(np.float32) * np.float32(10.0) ** random.integers(-3, 4, lanes).astype(np.float32)
    found = {name: device.tensor((items, repeats, lanes), dtype("float32")) for name in ("sums", "largest", "again")}
    given = {"values": uploaded(device, values), "repeats": repeats}
    ALL.bind(device, {**given, **found}, threads=threads)(items, device.stream)
    for i in range(repeats):
        total = tree(values + np.float32(i))
        assert (found["sums"].to_host()[:, i] == total).all()
        assert (found["largest"].to_host()[:, i] == (values - np.float32(i)).max()).all()
        assert (found["again"].to_host()[:, i] == tree(np.full(lanes, total))).all()


def test_nan_is_summed_but_is_no_maximum(device: Device) -> None:
    lanes = lanes_of(device, 64)
    values = np.full(lanes, 2.0, np.float32)
    values[0] = np.nan
    found = {name: device.tensor((1, 1, lanes), dtype("float32")) for name in ("sums", "largest", "again")}
    ALL.bind(device, {"values": uploaded(device, values), "repeats": 1, **found}, threads=64)(1, device.stream)
    assert np.isnan(found["sums"].to_host()).all()
    assert (np.isnan(found["largest"].to_host()) if lanes == 1 else found["largest"].to_host() == 2.0).all()


@pytest.mark.parametrize("team", [1, 2, 4, 8, 16, 32])
def test_teams_are_neighbours(device: Device, team: int) -> None:
    lanes = lanes_of(device, 96)
    if team > lanes:
        pytest.skip(f"a block has {lanes} lanes on {device.target}")
    values = np.random.default_rng(team).normal(size=lanes).astype(np.float32)
    sums = device.tensor((lanes,), dtype("float32"))
    TEAMS.fixed(team=team).bind(device, {"values": uploaded(device, values), "sums": sums}, threads=96)(1, device.stream)
    assert np.array_equal(sums.to_host(), np.repeat([tree(part) for part in values.reshape(-1, team)], team))
