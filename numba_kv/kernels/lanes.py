"""Sums and maxima over the lanes of a block: `lanes_sum`, `lanes_max`, and `team_sum` over neighbouring lanes.

Every lane gets the result, and every lane of the block must come to the call, equally often. Numbers are float32. A sum is
taken in one order on every target: a binary tree over the lanes, the nearest first; for equal lanes the bits are equal.

On `cuda` a block has a multiple of 32 lanes, 1,024 at most; on `cpu` one; in the simulator any number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numba_kv.kernels.numba_targets import cuda_device_function, cuda_module
from numba_kv.kernels.routines import primitive

__all__ = ["lanes_max", "lanes_sum", "team_sum"]

_WARP = 32


def _tree(values: list[Any], join: Callable[[Any, Any], Any], empty: Any) -> Any:
    """Join values pairwise, neighbours first."""
    while len(values) > 1:
        values = [*values, empty] if len(values) % 2 else values
        values = [join(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


def _simulated_sum(value: Any, lane: int, lanes: int) -> Any:
    from numba_kv.kernels.on_sim import lane_values

    return _tree(lane_values(value, lane, lanes), np.add, np.float32(0.0))


def _simulated_max(value: Any, lane: int, lanes: int) -> Any:
    from numba_kv.kernels.on_sim import lane_values

    return _tree(lane_values(value, lane, lanes), np.fmax, np.float32(-np.inf))


def _simulated_team_sum(value: Any, lane: int, lanes: int, team: int) -> Any:
    from numba_kv.kernels.on_sim import lane_values

    first = lane - lane % team
    return _tree(lane_values(value, lane, lanes)[first : first + team], np.add, np.float32(0.0))


def _gpu_sum(architecture: tuple[int, int]) -> Any:
    cuda = cuda_module()

    def lanes_sum(value, lane, lanes):
        value = np.float32(value)
        offset = 1
        while offset < _WARP:
            value += cuda.shfl_xor_sync(0xFFFFFFFF, value, offset)
            offset <<= 1
        if lanes > _WARP:
            of_warps = cuda.shared.array(32, np.float32)
            cuda.syncthreads()  # what the warps gave last time has been read
            if lane & 31 == 0:
                of_warps[lane >> 5] = value
            cuda.syncthreads()
            value = np.float32(0.0)
            if lane & 31 < lanes >> 5:
                value = of_warps[lane & 31]
            offset = 1
            while offset < _WARP:
                value += cuda.shfl_xor_sync(0xFFFFFFFF, value, offset)
                offset <<= 1
        return value

    return cuda_device_function(lanes_sum)


def _gpu_max(architecture: tuple[int, int]) -> Any:
    cuda = cuda_module()

    def lanes_max(value, lane, lanes):
        value = np.float32(value)
        offset = 1
        while offset < _WARP:
            value = cuda.libdevice.fmaxf(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, offset))
            offset <<= 1
        if lanes > _WARP:
            of_warps = cuda.shared.array(32, np.float32)
            cuda.syncthreads()
            if lane & 31 == 0:
                of_warps[lane >> 5] = value
            cuda.syncthreads()
            value = np.float32(-np.inf)
            if lane & 31 < lanes >> 5:
                value = of_warps[lane & 31]
            offset = 1
            while offset < _WARP:
                value = cuda.libdevice.fmaxf(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, offset))
                offset <<= 1
        return value

    return cuda_device_function(lanes_max)


def _gpu_team_sum(architecture: tuple[int, int]) -> Any:
    cuda = cuda_module()

    def team_sum(value, lane, lanes, team):
        value = np.float32(value)
        offset = 1
        while offset < team:
            value += cuda.shfl_xor_sync(0xFFFFFFFF, value, offset)
            offset <<= 1
        return value

    return cuda_device_function(team_sum)


@primitive(gpu=_gpu_sum, sim=_simulated_sum)
def lanes_sum(value, lane, lanes):
    """Return the sum of what the block's lanes give."""
    return value


@primitive(gpu=_gpu_max, sim=_simulated_max)
def lanes_max(value, lane, lanes):
    """Return the largest number that the block's lanes give; NaN if all are NaN."""
    return value


@primitive(gpu=_gpu_team_sum, sim=_simulated_team_sum)
def team_sum(value, lane, lanes, team):
    """Return the sum of what the lanes of a team give: `team` neighbours, the first of them a multiple of `team`.

    `team` is a power of two, at most 32, and divides `lanes`; on `cpu` it is 1.
    """
    return value
