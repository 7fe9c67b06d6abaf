"""Arrays of NumPy, torch, JAX and CuPy and tensors of the library: one memory, both ways, whatever the element type."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from numba_kv.adapters.cupy_arrays import to_cupy
from numba_kv.adapters.jax_arrays import to_jax
from numba_kv.adapters.torch_arrays import to_torch
from numba_kv.device import Device, Tensor, create_device
from numba_kv.device.dlpack import read_capsule
from numba_kv.device.interop import as_tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InteropError, StateError

KINDS = ["float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2", "int64", "int32", "int8", "uint8"]


@dataclass(frozen=True)
class Library:
    """How a library makes an array of NumPy values, what it makes of a tensor, and where an array of it is."""

    make: Callable[[np.ndarray], Any]
    take: Callable[[Tensor], Any]
    address: Callable[[Any], int]
    values: Callable[[Any], np.ndarray]


def numpy_library(target: str) -> Library:
    if target == "cuda":
        pytest.skip("NumPy has no arrays in device memory")
    return Library(np.ndarray.copy, Tensor.numpy, lambda a: a.ctypes.data, lambda a: a)


def torch_library(target: str) -> Library:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    place = "cuda" if target == "cuda" else "cpu"

    def make(values: np.ndarray) -> Any:
        raw = torch.from_numpy(values.view(f"u{values.itemsize}").copy()).to(place)
        return raw.view(getattr(torch, values.dtype.name))

    def values(array: Any) -> np.ndarray:
        raw = array.view(getattr(torch, f"uint{8 * array.element_size()}")).cpu().numpy()
        return raw.view(dtype(str(array.dtype)).numpy())

    return Library(make, to_torch, lambda a: a.data_ptr(), values)


def jax_library(target: str) -> Library:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of the GPU's memory
    jax = pytest.importorskip("jax", reason="JAX is not installed (pip install jax)")
    if jax.default_backend() != ("gpu" if target == "cuda" else "cpu"):
        pytest.skip(f"this JAX works on {jax.default_backend()}")
    jax.config.update("jax_enable_x64", True)
    return Library(jax.numpy.asarray, to_jax, lambda a: a.unsafe_buffer_pointer(), np.asarray)


def cupy_library(target: str) -> Library:
    if target != "cuda":
        pytest.skip("CuPy has no arrays in host memory")
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    return Library(cupy.asarray, to_cupy, lambda a: a.data.ptr, cupy.asnumpy)


LIBRARIES = {"numpy": numpy_library, "torch": torch_library, "jax": jax_library, "cupy": cupy_library}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, target: str) -> Library:
    return LIBRARIES[request.param](target)


@pytest.fixture
def device(target: str) -> Device:
    return create_device(target)


def numbers(kind: str) -> np.ndarray:
    return np.arange(24).reshape(4, 6).astype(dtype(kind).numpy())


def filled(device: Device, kind: str) -> Tensor:
    tensor = device.tensor((4, 6), dtype(kind))
    tensor.fill_from(numbers(kind))
    return tensor


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_becomes_an_array_of_the_same_memory(kind: str, library: Library, device: Device) -> None:
    tensor = filled(device, kind)
    array = library.take(tensor)
    assert library.address(array) == tensor.address
    assert tuple(array.shape) == (4, 6)
    found = library.values(array)
    assert np.array_equal(found.view(numbers(kind).dtype), numbers(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_becomes_a_tensor_of_the_same_memory(kind: str, library: Library, device: Device) -> None:
    if library.take is to_cupy and dtype(kind).is_extension:
        pytest.skip("CuPy lacks the element type")
    array = library.make(numbers(kind))
    as_tensor(device, array, "array")
    tensor = as_tensor(device, array, "array", ordered=True)
    assert (tensor.address, tensor.dtype.name, tensor.shape) == (library.address(array), kind, (4, 6))
    assert np.array_equal(tensor.to_host(), numbers(kind))


def test_an_array_outlives_the_tensor_and_its_memory(library: Library, device: Device) -> None:
    memory = device.allocate(1 << 21)
    tensor = Tensor(memory, device, dtype("int32"), (1 << 19,))
    device.fill(tensor, 5, device.stream)
    array = library.take(tensor)
    memory.close(device.stream)
    assert device.memory.current_bytes == 0
    del tensor, memory
    gc.collect()
    others = [device.tensor((1 << 19,), dtype("int32")) for _ in range(3)]
    assert (library.values(array) == 5).all()
    del others


def test_a_tensor_outlives_the_array(library: Library, device: Device) -> None:
    array = library.make(np.full(1 << 18, 7, np.int32))
    tensor = as_tensor(device, array, "array")
    view = tensor[5:9]
    del array, tensor
    gc.collect()
    others = [library.make(np.zeros(1 << 18, np.int32)) for _ in range(3)]
    assert view.to_host().tolist() == [7] * 4
    del others


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int32", "bfloat16"])
def test_the_device_s_stream_waits_for_the_array_s(kind: str, device: Device) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    array = torch.zeros(1 << 10, dtype=getattr(torch, kind), device="cuda")
    busy, side = torch.zeros(1 << 27, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(100):
            busy.add_(1)
        array.fill_(3)
        tensor = as_tensor(device, array, "array", ordered=True)
        assert not side.query(), "the delay was too short to show anything"
    assert (tensor.to_host().astype(np.float32) == 3).all()


@pytest.mark.gpu
def test_the_stream_of_an_interface_is_waited_for(device: Device) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    array = torch.zeros(1 << 10, dtype=torch.int32, device="cuda")
    busy, side = torch.zeros(1 << 27, device="cuda"), torch.cuda.Stream()
    interface = {**array.__cuda_array_interface__, "stream": side.cuda_stream, "version": 3}
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(100):
            busy.add_(1)
        array.fill_(3)
    tensor = as_tensor(device, SimpleNamespace(__cuda_array_interface__=interface, keep=array), "array", ordered=True)
    assert not side.query(), "the delay was too short to show anything"
    assert (tensor.to_host() == 3).all()


def test_an_array_is_let_go_of_with_the_last_tensor(device: Device, target: str) -> None:
    """Nobody takes the capsule: its owner's destructor runs, once, when the memory is not used any more."""
    if target == "cuda":
        pytest.skip("NumPy has no arrays in device memory")
    values = np.arange(6, dtype=np.float32)
    alive = weakref.ref(values)
    tensor = as_tensor(device, SimpleNamespace(__dlpack__=values.__dlpack__, __dlpack_device__=lambda: (1, 0)), "x")
    part = tensor[2:4]
    del values, tensor
    gc.collect()
    assert alive() is not None
    assert part.to_host().tolist() == [2, 3]
    del part
    gc.collect()
    assert alive() is None


def test_a_closed_tensor_is_refused(library: Library, device: Device) -> None:
    memory = device.allocate(256)
    tensor = Tensor(memory, device, dtype("bfloat16"), (8,))
    memory.close()
    for take in (library.take, Tensor.as_storage):
        with pytest.raises(StateError, match="given back"):
            take(tensor)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float8_e4m3"])
def test_torch_strides_and_offsets(kind: str, device: Device, target: str) -> None:
    library = torch_library(target)
    array = library.make(numbers(kind))[1:, ::2].T
    tensor = as_tensor(device, array, "array")
    assert (tensor.address, tensor.shape, tensor.strides) == (array.data_ptr(), (3, 3), (2, 6))
    part = filled(device, kind)[1:, 1::2]
    back = library.take(part)
    assert (back.data_ptr(), tuple(back.shape), back.stride()) == (part.address, (3, 3), (6, 2))
    assert np.array_equal(tensor.to_host(), numbers(kind)[1:, ::2].T)


def test_what_torch_cannot_give_is_refused(device: Device, target: str) -> None:
    torch_library(target)
    import torch

    place = "cuda" if target == "cuda" else "cpu"
    for array, message in (
        (torch.zeros(3, device=place, requires_grad=True), "k: Tensor cannot be exchanged .*grad"),
        (torch.zeros(3, dtype=torch.complex128, device=place), "complex128|DLPack's type 5 with 128 bits"),
    ):
        with pytest.raises(InteropError, match=message):
            as_tensor(device, array, "k")


def test_jax_shares_or_refuses(device: Device, target: str) -> None:
    library = jax_library(target)
    tensor = filled(device, "float32")
    for part in (tensor[:, ::2], tensor[:, 1:]):
        with pytest.raises(InteropError, match="leave gaps"):
            library.take(part)
    if target != "cuda":
        with pytest.raises(InteropError, match="not aligned as JAX wants"):
            library.take(tensor[1:])
    import jax

    jax.config.update("jax_enable_x64", False)
    try:
        with pytest.raises(InteropError, match="int64 would be copied"):
            library.take(filled(device, "int64"))
    finally:
        jax.config.update("jax_enable_x64", True)


def test_cupy_is_told_that_the_memory_is_the_host_s(device: Device, target: str) -> None:
    if target == "cuda":
        pytest.skip("the tensor is in device memory")
    with pytest.raises(InteropError, match="host memory .*CuPy takes arrays of a GPU"):
        to_cupy(filled(device, "float32"))


@pytest.mark.parametrize("kind", KINDS)
def test_storage_is_the_same_memory_as_integers(kind: str, device: Device) -> None:
    tensor = filled(device, kind)[1:, ::2]
    storage = tensor.as_storage()
    assert (storage.address, storage.shape, storage.strides) == (tensor.address, tensor.shape, tensor.strides)
    assert storage.dtype.numpy().kind in "ui"
    assert np.array_equal(storage.to_host(), tensor.to_host().view(storage.dtype.numpy()))


class Elsewhere:
    """An array that says it is on some device."""

    def __init__(self, kind: int, ordinal: int) -> None:
        self.place = kind, ordinal

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, stream: object = None) -> object:
        raise AssertionError("asked for memory that is of no use")


@pytest.mark.parametrize(
    ("kind", "place"), [(2, "the memory of device 1"), (13, "device type 13"), (10, "device type 10"), (1, "host memory")]
)
def test_memory_elsewhere_is_refused_without_asking_for_it(kind: int, place: str, device: Device, target: str) -> None:
    if (kind in (1, 3)) == (target != "cuda") or (kind in (2, 13) and target == "cuda"):
        pytest.skip("this is the target's own memory")
    with pytest.raises(InteropError, match=f"k: the array lies in .*{place}, not in "):
        as_tensor(device, Elsewhere(kind, 1), "k")


def test_capsules_are_read_as_they_are() -> None:
    """Byte offsets and strides count, and what is not a capsule without a version is refused. cuda-python#2592."""
    values = np.arange(24, dtype=np.float32).reshape(4, 6)[1:, ::3]
    found = read_capsule(values.__dlpack__(), "x")
    assert (found.address, found.dtype.name, found.shape, found.strides) == (values.ctypes.data, "float32", (3, 2), (6, 3))
    with pytest.raises(InteropError, match="x: no DLPack capsule of the form without a version"):
        read_capsule(SimpleNamespace(), "x")
    newer = values.__dlpack__(max_version=(1, 0))
    if "versioned" in repr(newer):
        with pytest.raises(InteropError, match="x: no DLPack capsule of the form without a version"):
            read_capsule(newer, "x")
    with pytest.raises(InteropError, match="DLPack's type 5 with 128 bits and 1 lanes"):
        read_capsule(np.zeros(3, np.complex128).__dlpack__(), "x")


def test_a_consumer_of_plain_bytes_gets_float8_back(device: Device, target: str) -> None:
    """The documented way for libraries without the type: bytes there, the type put on again here."""
    if target == "cuda":
        pytest.skip("NumPy has no arrays in device memory")
    array = np.from_dlpack(filled(device, "float8_e4m3").as_storage())
    assert np.array_equal(array.view(ml_dtypes.float8_e4m3fn), numbers("float8_e4m3"))
