"""Tensors of torch as tensors of the library, bfloat16 included."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from numba_kv.adapters.torch_arrays import as_kv_tensor, to_torch
from numba_kv.device import create_device
from numba_kv.device.interop import as_tensor
from numba_kv.errors import InputError, InteropError

torch: Any = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")


@pytest.fixture
def device(target: str) -> Any:
    return create_device(target, 0, None)


def place(target: str) -> str:
    return "cuda" if target == "cuda" else "cpu"


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "int32", "int64", "float8_e4m3fn", "uint8"])
def test_memory_is_shared(kind: str, device: Any, target: str) -> None:
    array = torch.arange(24, device=place(target)).reshape(2, 3, 4).to(getattr(torch, kind))
    tensor = as_kv_tensor(device, array, "array")
    assert tensor.address == array.data_ptr()
    assert (tensor.shape, tensor.strides) == ((2, 3, 4), (12, 4, 1))
    array[1, 2, 3] = 1
    if target == "cuda":
        torch.cuda.synchronize()
    assert float(tensor.to_host()[1, 2, 3]) == 1.0


def test_strides_and_offsets(device: Any, target: str) -> None:
    array = torch.arange(120, dtype=torch.float32, device=place(target)).reshape(2, 3, 4, 5)[:, 1:, ::2, 1:4].transpose(1, 2)
    tensor = as_kv_tensor(device, array, "array")
    assert (tensor.shape, tensor.strides) == (tuple(array.shape), tuple(array.stride()))
    if target != "cuda":
        assert (tensor.numpy() == array.numpy()).all()


def test_nothing_at_all(device: Any, target: str) -> None:
    assert as_kv_tensor(device, torch.zeros((3, 0, 2), device=place(target)), "array").size == 0


def test_the_tensor_keeps_the_array(device: Any, target: str) -> None:
    array = torch.zeros(4, device=place(target))
    told = weakref.ref(array)
    tensor = as_kv_tensor(device, array, "array")
    del array
    gc.collect()
    assert told() is not None
    del tensor
    gc.collect()
    assert told() is None


def test_memory_that_does_not_hold_its_elements(device: Any, target: str) -> None:
    """Lazy negation and conjugation are bits of the array, which no protocol of exchange tells."""
    values = torch.tensor([1 + 2j, 3 - 4j], device=place(target))
    for take in (as_kv_tensor, as_tensor):
        with pytest.raises(InteropError, match=r"k: the negative bit of the array is set.* give resolve_neg\(\)"):
            take(device, values.conj().imag, "k")
        with pytest.raises(InteropError, match=r"k: the conjugate bit of the array is set.* give resolve_conj\(\)"):
            take(device, values.conj(), "k")
        resolved = values.conj().imag.resolve_neg()
        if target == "cuda":
            torch.cuda.synchronize()
        assert take(device, resolved, "k").to_host().tolist() == [-2.0, 4.0]


@pytest.mark.parametrize("value", [None, 5, torch.zeros(2)])
def test_what_is_no_tensor_of_ours(value: Any) -> None:
    with pytest.raises(InputError, match=f"tensor: {type(value).__name__} given, a Tensor of numba_kv wanted"):
        to_torch(value)


def test_what_is_refused(device: Any, target: str) -> None:
    with pytest.raises(InteropError, match=f"k: the tensor is on meta, the cache on {place(target)}:0"):
        as_kv_tensor(device, torch.zeros(3, device="meta"), "k")
    with pytest.raises(InteropError, match="k: elements of torch.complex128 are not known"):
        as_kv_tensor(device, torch.zeros(3, dtype=torch.complex128, device=place(target)), "k")
