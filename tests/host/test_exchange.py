"""Tensors in other libraries without a copy: array interfaces and DLPack."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numba_kv.device import Device, Tensor, create_device
from numba_kv.device.dlpack import _DLTensor, to_capsule
from numba_kv.dtypes import dtype
from numba_kv.errors import InteropError, StateError

VIEWS = {
    "whole": (slice(None),),
    "rows": (slice(1, 3),),
    "column": (slice(None), 2),
    "every second": (slice(None), slice(None, None, 2)),
    "backwards": (slice(None, None, -1), slice(None, None, -2)),
    "element": (1, 2),
    "nothing": (slice(0, 0),),
}
PLAIN = ["float32", "float16", "int64", "int32", "int8", "uint8"]


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.fixture
def host(device: Device) -> Device:
    if device.target == "cuda":
        pytest.skip("device memory cannot be a NumPy array")
    return device


def record_of(capsule: object) -> _DLTensor:
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    return _DLTensor.from_address(pointer_of(capsule, b"dltensor"))


def filled(device: Device, kind: str = "int32") -> tuple[Tensor, np.ndarray]:
    values = np.arange(20).reshape(4, 5).astype(dtype(kind).numpy())
    tensor = device.tensor((4, 5), dtype(kind))
    tensor.fill_from(values)
    return tensor, values


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", PLAIN)
def test_numpy_reads_dlpack(host: Device, view: str, kind: str) -> None:
    tensor, values = filled(host, kind)
    array = np.from_dlpack(tensor[VIEWS[view]])
    assert array.dtype == values.dtype
    assert np.array_equal(array, values[VIEWS[view]])
    if array.size:
        assert array.__array_interface__["data"][0] == tensor[VIEWS[view]].address


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", [*PLAIN, "bfloat16", "float8_e4m3"])
def test_numpy_reads_the_array_interface(host: Device, view: str, kind: str) -> None:
    tensor, values = filled(host, kind)
    array = np.asarray(tensor[VIEWS[view]])
    assert array.dtype == (dtype(kind).storage_name if dtype(kind).is_extension else kind)
    assert np.array_equal(array.view(values.dtype), values[VIEWS[view]])
    if array.size:
        assert array.__array_interface__["data"][0] == tensor[VIEWS[view]].address


@pytest.mark.parametrize("exchange", [np.from_dlpack, np.asarray, Tensor.numpy], ids=["dlpack", "interface", "numpy"])
def test_both_sides_see_writes(host: Device, exchange: object) -> None:
    tensor, values = filled(host)
    array = exchange(tensor[1:, ::2])  # type: ignore[operator]
    tensor[2].fill_from(np.full(5, -7, np.int32))
    assert array[1].tolist() == [-7, -7, -7]
    if array.flags.writeable:
        array[0, 0] = 99
        assert tensor[1, 0].to_host() == 99


@pytest.mark.parametrize("exchange", [np.from_dlpack, np.asarray, Tensor.numpy], ids=["dlpack", "interface", "numpy"])
@pytest.mark.parametrize("size", [16, 1 << 20])
def test_an_array_outlives_the_tensor_and_even_close(host: Device, exchange: object, size: int) -> None:
    memory = host.allocate(4 * size)
    tensor = Tensor(memory, host, dtype("int32"), (size,))
    host.fill(tensor, 5, host.stream)
    array = exchange(tensor)  # type: ignore[operator]
    memory.close()
    del tensor, memory
    gc.collect()
    host.tensor((size,), dtype("int32"))
    assert (array == 5).all()


def owners() -> int:
    from numba_kv.device.dlpack import _Owner

    gc.collect()
    return sum(type(item) is _Owner for item in gc.get_objects())  # isinstance would ask the items, some of which warn


def test_records_of_exported_tensors_are_dropped(device: Device) -> None:
    before = owners()
    tensor, _ = filled(device)
    capsule = tensor.__dlpack__(stream=-1 if device.target == "cuda" else None)
    assert owners() == before + 1
    del capsule  # nobody took it
    assert owners() == before
    if device.target != "cuda":
        arrays = [np.from_dlpack(tensor) for _ in range(3)]
        assert owners() == before + 3
        del arrays
        assert owners() == before


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3"])
def test_a_consumer_s_refusal_arrives_and_drops_the_record(host: Device, kind: str) -> None:
    """A capsule that nobody took is freed while the consumer's exception is pending."""
    before = owners()
    tensor = host.tensor((2,), dtype(kind))
    with pytest.raises((BufferError, RuntimeError), match="(?i)dtype|type") as refusal:
        np.from_dlpack(tensor)
    assert not isinstance(refusal.value, SystemError)
    del refusal
    assert owners() == before


def test_an_array_is_let_go_of_under_a_pending_exception(host: Device) -> None:
    before = owners()

    def fail() -> None:
        array = np.from_dlpack(host.tensor((4,), dtype("int32")))
        raise ValueError(f"with {array.size} elements")

    with pytest.raises(ValueError, match="with 4 elements"):
        fail()
    assert owners() == before


@pytest.mark.parametrize("view", VIEWS)
def test_the_record_of_device_memory(host: Device, view: str) -> None:
    """What a capsule of the `cuda` target says, without one: the address is stated and never read."""
    tensor = host.tensor((4, 5), dtype("bfloat16"))[VIEWS[view]]
    elsewhere = SimpleNamespace(
        shape=tensor.shape,
        strides=tensor.strides,
        dtype=tensor.dtype,
        address=0x7F0000000000,
        _memory=tensor._memory,
        device=SimpleNamespace(target="cuda", ordinal=3),
    )
    found = record_of(capsule := to_capsule(elsewhere))  # type: ignore[arg-type]
    assert (found.data, found.byte_offset, found.ndim) == (0x7F0000000000, 0, tensor.ndim)
    assert (found.device.kind, found.device.number) == (2, 3)
    assert (found.dtype.code, found.dtype.bits, found.dtype.lanes) == (4, 16, 1)
    assert tuple(found.shape[: found.ndim]) == tensor.shape
    assert tensor.is_contiguous if not found.strides else tuple(found.strides[: found.ndim]) == tensor.strides
    del capsule


def test_an_array_that_lives_until_exit_does_no_harm() -> None:
    code = (
        "import numpy as np, sys\n"
        "from numba_kv.device import create_device\n"
        "from numba_kv.dtypes import dtype\n"
        "sys.keep = np.from_dlpack(create_device('cpu').tensor((8,), dtype('int32')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_dlpack_says_where_the_tensor_is(device: Device) -> None:
    tensor, _ = filled(device)
    place = (2, device.ordinal) if device.target == "cuda" else (1, 0)
    assert tensor.__dlpack_device__() == place
    with pytest.raises(InteropError, match="copy: True"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(InteropError, match="is wanted, the tensor is on"):
        tensor.__dlpack__(dl_device=(3, 7))
    assert tensor.__dlpack__(dl_device=place, copy=False, max_version=(1, 0)) is not None


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3"])
def test_types_that_numpy_lacks_travel_with_their_codes(device: Device, kind: str) -> None:
    capsule = device.tensor((2,), dtype(kind)).__dlpack__()
    found = record_of(capsule).dtype
    assert (found.code, found.bits, found.lanes) == {"bfloat16": (4, 16, 1), "float8_e4m3": (10, 8, 1)}[kind]


def test_the_cuda_interface_is_absent_on_the_host(host: Device) -> None:
    tensor, _ = filled(host)
    assert not hasattr(tensor, "__cuda_array_interface__")
    assert hasattr(tensor, "__array_interface__")


def test_a_closed_tensor_is_not_exchanged(host: Device) -> None:
    memory = host.allocate(16)
    tensor = Tensor(memory, host, dtype("int32"), (4,))
    memory.close()
    for exchange in (np.from_dlpack, np.asarray, Tensor.numpy):
        with pytest.raises(StateError, match="given back"):
            exchange(tensor)


def test_the_interpreter_s_functions_are_left_as_they_are() -> None:
    """Other libraries declare the types of `ctypes.pythonapi` to their own liking."""
    code = (
        "import ctypes, numba_kv.device.dlpack\n"
        "names = ('PyCapsule_New', 'PyCapsule_GetPointer', 'PyCapsule_IsValid', 'Py_IncRef')\n"
        "assert all(getattr(ctypes.pythonapi, n).argtypes is None for n in names)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ["int32", "bfloat16"])
def test_the_cuda_interface(device: Device, view: str, kind: str) -> None:
    tensor, values = filled(device, kind)
    part, expected = tensor[VIEWS[view]], values[VIEWS[view]]
    interface = part.__cuda_array_interface__
    assert interface["shape"] == expected.shape
    assert interface["typestr"] == {"int32": "<i4", "bfloat16": "<u2"}[kind]
    assert interface["data"] == (part.address if part.size else 0, False)
    assert interface["strides"] == (None if part.is_contiguous else expected.strides)
    assert interface["version"] == 3
    assert interface["stream"] == device.stream.handle
    assert not hasattr(tensor, "__array_interface__")


@pytest.mark.gpu
@pytest.mark.parametrize("exchange", [np.asarray, Tensor.numpy], ids=["interface", "numpy"])
def test_numpy_is_told_to_copy(device: Device, exchange: object) -> None:
    tensor, _ = filled(device)
    with pytest.raises(InteropError, match=r"to_host\(\) copies it"):
        exchange(tensor)  # type: ignore[operator]
