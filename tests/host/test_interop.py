"""Foreign arrays as tensors on the host targets: what is shared, and what is refused by name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from numba_kv.device import Device, create_device
from numba_kv.device.interop import as_tensor
from numba_kv.errors import InteropError


@pytest.fixture(scope="module")
def device() -> Device:
    device = create_device()
    if device.target == "cuda":
        pytest.skip("device memory cannot be a NumPy array")
    return device


@pytest.mark.parametrize("kind", ["int32", "<i4", "=i4", "float16", "uint8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_memory_is_shared(device: Device, kind: object) -> None:
    array = np.arange(6).reshape(2, 3).astype(kind)
    tensor = as_tensor(device, array[:, ::2], "counts")
    array[1, 2] = 9
    assert tensor.address == array.ctypes.data
    assert tensor.numpy().astype(np.int64).tolist() == [[0, 2], [3, 9]]


@pytest.mark.parametrize(("kind", "native"), [(">i4", "<i4"), (">f2", "<f2"), (">i8", "<i8")])
def test_the_other_byte_order_is_refused(device: Device, kind: str, native: str) -> None:
    array = np.arange(4).astype(kind)
    with pytest.raises(
        InteropError, match=f"counts: elements of type '{kind}' have the other byte order; convert .* '{native}'"
    ):
        as_tensor(device, array, "counts")
    assert as_tensor(device, array.astype(native), "counts").shape == (4,)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(4, np.complex128), "elements of type complex128 are not known here"),
        (np.zeros(4, np.int32)[::-1], "are not whole, positive elements of int32"),
        ([1, 2], "list is not an array in host memory"),
        (None, "NoneType is not an array in host memory"),
    ],
)
def test_what_cannot_be_shared_is_refused(device: Device, value: object, message: str) -> None:
    with pytest.raises(InteropError, match=f"counts: .*{message}"):
        as_tensor(device, value, "counts")


def test_a_tensor_of_another_device_is_refused(device: Device) -> None:
    other = create_device()
    tensor = other.tensor((4,), as_tensor(device, np.zeros(1, np.int32), "x").dtype)
    assert as_tensor(other, tensor, "counts") is tensor
    with pytest.raises(InteropError, match="counts: the tensor belongs to another SharedResources"):
        as_tensor(device, tensor, "counts")
