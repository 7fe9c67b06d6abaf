"""Tensors: views, copies and element types on the target under test, against NumPy."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InteropError, ShapeError

SHAPE = (4, 3, 5)


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def filled(device: Device, shape: tuple[int, ...] = SHAPE, kind: str = "int32") -> tuple[Tensor, np.ndarray]:
    """Return a tensor that counts up, and the same in NumPy."""
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype(kind).numpy())
    tensor = device.tensor(shape, dtype(kind))
    tensor.fill_from(values)
    return tensor, values


def test_a_new_tensor_is_zero(device: Device) -> None:
    tensor = device.tensor(SHAPE, dtype("float32"))
    assert (tensor.shape, tensor.strides, tensor.ndim, tensor.size, tensor.nbytes) == (SHAPE, (15, 5, 1), 3, 60, 240)
    assert tensor.address % 256 == 0
    assert tensor.is_contiguous
    assert len(tensor) == 4
    assert repr(tensor) == f"Tensor(float32, [4, 3, 5], {device.target})"
    assert not tensor.to_host().any()


bounds = st.one_of(st.none(), st.integers(-7, 7))
steps = st.one_of(st.none(), st.integers(-3, 3).filter(bool))
parts = st.one_of(st.integers(-3, 2), st.builds(slice, bounds, bounds, steps))


@given(index=st.lists(parts, max_size=3).map(tuple), second=st.lists(parts, max_size=2).map(tuple))
def test_slices_are_those_of_numpy(device: Device, index: tuple[object, ...], second: tuple[object, ...]) -> None:
    tensor, values = filled(device)
    view, expected = tensor[index], values[(*index, ...)]  # the ellipsis keeps NumPy from returning a scalar
    for _ in range(2):
        assert view.shape == expected.shape
        assert np.array_equal(view.to_host(), expected)
        if expected.size:
            assert (
                view.address == tensor.address + expected.__array_interface__["data"][0] - values.__array_interface__["data"][0]
            )
            assert view.is_contiguous == expected.flags.c_contiguous
        try:
            expected = expected[(*second, ...)]
        except IndexError:
            with pytest.raises(InputError):
                view[second]
            return
        view = view[second]


@given(index=st.lists(parts, max_size=3).map(tuple))
def test_views_of_any_stride_can_be_written(device: Device, index: tuple[object, ...]) -> None:
    tensor, values = filled(device)
    new = -1 - np.arange(values[index].size, dtype=np.int32).reshape(values[index].shape)
    values[index] = new
    tensor[index].fill_from(new)
    assert np.array_equal(tensor.to_host(), values)


@pytest.mark.parametrize("number", [np.int32(2), np.int64(2), np.uint8(2)])
def test_numpy_integers_are_indices(device: Device, number: np.integer) -> None:
    tensor, values = filled(device)
    assert np.array_equal(tensor[number].to_host(), values[2])
    assert np.array_equal(tensor[number:, : number - 1].to_host(), values[2:, :1])
    assert np.array_equal(tensor[-np.int64(number)].to_host(), values[-2])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (4, r"4 on axis 0 is not in -4\.\.3"),
        (-5, r"-5 on axis 0 is not in -4\.\.3"),
        ((0, 3), r"3 on axis 1 is not in -3\.\.2"),
        ((0, 0, 0, 0), "4 indices for 3 axes"),
        (1.0, "1.0 on axis 0 is neither an integer nor a slice"),
        (None, "None on axis 0 is neither"),
        (..., "Ellipsis on axis 0 is neither"),
        ([0, 1], "on axis 0 is neither"),
        (np.array([0, 1]), "on axis 0 is neither"),
        (slice(0, 2, 0), "slice step cannot be zero"),
        (slice(0.5, 2), "slice indices must be integers"),
    ],
)
def test_wrong_indices_are_refused(device: Device, index: object, message: str) -> None:
    tensor, _ = filled(device)
    with pytest.raises(InputError, match=message):
        tensor[index]


def test_a_tensor_without_axes(device: Device) -> None:
    tensor, _ = filled(device)
    element = tensor[1, 1, 1]
    assert element.shape == element.strides == ()
    assert element.to_host() == 21
    element.fill_from(np.array(7, np.int32))
    assert tensor[1, 1, 1].to_host() == 7
    with pytest.raises(InputError, match="without axes"):
        len(element)
    with pytest.raises(InputError, match="1 indices for 0 axes"):
        element[0]


def test_iteration_ends(device: Device) -> None:
    tensor, values = filled(device)
    assert [row.to_host().tolist() for row in tensor] == values.tolist()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
def test_empty_tensors(device: Device, shape: tuple[int, ...]) -> None:
    tensor = device.tensor(shape, dtype("bfloat16"))
    assert (tensor.size, tensor.nbytes, tensor.reach) == (0, 0, (0, 0))
    assert tensor.is_contiguous
    assert tensor.to_host().shape == shape
    assert tensor[::-1].to_host().shape == shape
    tensor.fill_from(np.empty(shape, dtype("bfloat16").numpy()))
    device.fill(tensor, -1, device.stream)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "float8_e4m3", "int64", "int32", "int8", "uint8"])
def test_every_element_type_is_kept(device: Device, kind: str) -> None:
    tensor, values = filled(device, (3, 4), kind)
    back = tensor[:, ::2].to_host()
    assert back.dtype == values.dtype == dtype(kind).numpy()
    assert back.astype(np.float64).tolist() == values[:, ::2].astype(np.float64).tolist()


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "float8_e4m3", "int32", "int8", "uint8"])
@pytest.mark.parametrize("value", [0, 1, -1, 0x7F])
def test_fill_sets_bits(device: Device, kind: str, value: int) -> None:
    tensor, values = filled(device, (5, 4), kind)
    device.fill(tensor[1:3], value, device.stream)
    size = values.dtype.itemsize
    bits = values.view(f"uint{8 * size}").copy()
    bits[1:3] = value & (2 ** (8 * size) - 1)
    assert np.array_equal(tensor.to_host().view(f"uint{8 * size}"), bits)


def test_fill_wants_dense_tensors_of_small_elements(device: Device) -> None:
    tensor, _ = filled(device)
    with pytest.raises(InputError, match="a dense tensor of at most 4-byte elements"):
        device.fill(tensor[:, 1], 0, device.stream)
    with pytest.raises(InputError, match="a dense tensor of at most 4-byte elements"):
        device.fill(device.tensor((2,), dtype("int64")), 0, device.stream)


def test_values_of_another_shape_or_type_are_refused(device: Device) -> None:
    tensor, values = filled(device)
    for wrong in (values[:2], values.astype(np.int64), values.reshape(4, 15)):
        with pytest.raises(ShapeError, match=r"given, int32 \(4, 3, 5\) wanted"):
            tensor.fill_from(wrong)
    assert np.array_equal(tensor.to_host(), values)


def test_strided_values_are_taken(device: Device) -> None:
    tensor, values = filled(device)
    tensor.fill_from(values[::-1, :, ::-1])
    assert np.array_equal(tensor.to_host(), values[::-1, :, ::-1])


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((65,), None, 0),
        ((64,), None, 4),
        ((2,), (64,), 0),
        ((2,), (-1,), 0),
        ((1,), None, -4),
        ((2, 33), None, 0),
    ],
)
def test_a_tensor_must_lie_inside_its_memory(
    device: Device, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int
) -> None:
    memory = device.allocate(256)
    with pytest.raises(ShapeError, match="does not fit 256 bytes"):
        Tensor(memory, device, dtype("int32"), shape, strides=strides, offset_nbytes=offset)
    Tensor(memory, device, dtype("int32"), (64,), strides=(-1,), offset_nbytes=252)


def test_negative_extents_are_refused(device: Device) -> None:
    with pytest.raises(ShapeError, match="is not a tuple of extents"):
        device.tensor((2, -1), dtype("int32"))


def test_a_view_keeps_the_memory_alive(device: Device) -> None:
    tensor, values = filled(device)
    view = tensor[2, ::-1]
    del tensor
    gc.collect()
    device.tensor(SHAPE, dtype("int32"))
    assert np.array_equal(view.to_host(), values[2, ::-1])


def test_arguments_of_other_types_are_refused() -> None:
    device = create_device("cpu")
    tensor = device.tensor((2, np.int64(3)), dtype("int32"))  # type: ignore[arg-type]
    assert tensor.shape == (2, 3)
    for shape in ((1.0,), (None,), (True,), ("2",), 5, None):
        with pytest.raises(ShapeError, match="shape: .* is not a tuple of extents"):
            device.tensor(shape, dtype("int32"))  # type: ignore[arg-type]
    for value in (1.5, None, "a"):
        with pytest.raises(InputError, match="fill: value: .* is not an integer"):
            device.fill(tensor, value, device.stream)  # type: ignore[arg-type]
    for values in ([[1, 2, 3], [4, 5, 6]], None, 7):
        with pytest.raises(ShapeError, match="values: .* given, an array of int32"):
            tensor.fill_from(values)  # type: ignore[arg-type]
    for place in (5, 1.5):
        with pytest.raises(InteropError, match="dl_device: .* is not a pair"):
            tensor.__dlpack__(dl_device=place)
    for call in (lambda: tensor.__dlpack__(stream="x"), lambda: tensor.to_host("x")):  # type: ignore[arg-type]
        with pytest.raises(InputError, match="stream: 'x' cannot be used"):
            call()
