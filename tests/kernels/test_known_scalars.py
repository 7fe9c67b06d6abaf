"""Scalars that kernels of a GPU are compiled with, and those that stay open. Nothing runs on a GPU."""

from __future__ import annotations

import pytest

from numba_kv.cache.kv_launch import known_scalars
from numba_kv.device import Device, Tensor, create_device
from numba_kv.device.cuda_device import CudaDevice
from numba_kv.dtypes import dtype


def lent(device: Device, *shape: int, transposed: bool = False) -> Tensor:
    """Return a tensor [T, H, D], whose heads lie together or, transposed, apart."""
    if not transposed:
        return device.tensor(shape, dtype("bfloat16"))
    tokens, heads, dim = shape
    tensor = device.tensor((heads, tokens, dim), dtype("bfloat16"))
    return Tensor(tensor._memory, device, tensor.dtype, shape, strides=(dim, tokens * dim, 1))


@pytest.fixture(scope="module")
def host() -> Device:
    return create_device("cpu")


@pytest.fixture
def gpu() -> CudaDevice:
    return CudaDevice.__new__(CudaDevice)


def scalars(array: Tensor) -> dict:
    return {"k": array, "units": 16, "tokens": 0, "num_slots": 64, "k_token": 32, "k_head": 16, "v_token": 8, "v_head": 4}


def test_a_gpu_knows_shapes_and_strides(host: Device, gpu: CudaDevice) -> None:
    k, one = lent(host, 5, 2, 8), lent(host, 5, 1, 8, transposed=True)
    given = scalars(k)
    known = known_scalars(gpu, given, {"k": k, "v": one, "q": None}, ("tokens", "num_slots"))
    assert known == {"units": 16, "k_token": 32, "k_head": 16, "v_token": 8, "v_head": 4}
    assert given == {"k": k, "tokens": 0, "num_slots": 64}  # each scalar is either known or given


def test_strides_that_differ_with_the_tokens_stay_open(host: Device, gpu: CudaDevice) -> None:
    k, v = lent(host, 5, 2, 8, transposed=True), lent(host, 5, 2, 8)
    known = known_scalars(gpu, scalars(k), {"k": k, "v": v}, ("tokens", "num_slots"))
    assert known == {"units": 16, "v_token": 8, "v_head": 4}


def test_other_targets_know_nothing(host: Device) -> None:
    k = lent(host, 5, 2, 8)
    given = scalars(k)
    assert known_scalars(host, given, {"k": k}, ()) == {}
    assert given == scalars(k)
