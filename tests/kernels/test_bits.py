"""Conversions of elements against ml_dtypes and NumPy: every pattern of the small types, random float32 patterns."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from numba_kv.device import Device, create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels.bits import KINDS, from_float32, scale_float32, to_float32
from numba_kv.kernels.jit import Kernel
from numba_kv.kernels.spec import array, scalar

SMALL = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float8_e4m3": ml_dtypes.float8_e4m3fn}
#: Where rounding, saturation, subnormals and NaN begin.
EDGES = [
    *(0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),
    *(0x33000000, 0x33000001, 0x387FFFFF, 0x38800000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000),  # float16
    *(0x3A800000, 0x3A800001, 0x3C7FFFFF, 0x3C800000, 0x43E00000, 0x43E7FFFF, 0x43E80000, 0x43E80001, 0x461C4000),  # float8
]


def widen(item, bits, found, kind):
    found[item] = to_float32(bits[item], kind)


def narrow(item, bits, found, kind):
    found[item] = from_float32(bits[item], kind)


def scale(item, bits, factors, found):
    found[item] = scale_float32(bits[item], factors[item])


WIDEN = Kernel(widen, {"bits": array("uint32"), "found": array("uint32"), "kind": scalar()}, False)
NARROW = Kernel(narrow, {"bits": array("uint32"), "found": array("uint32"), "kind": scalar()}, False)
SCALE = Kernel(scale, {"bits": array("uint32"), "factors": array("float32"), "found": array("uint32")}, False)


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def run(device: Device, kernel: Kernel, **values: np.ndarray | int) -> np.ndarray:
    arguments: dict = {}
    for name, value in values.items():
        arguments[name] = value
        if isinstance(value, np.ndarray):
            arguments[name] = device.tensor(value.shape, dtype(value.dtype.name))
            arguments[name].fill_from(value)
    found = device.tensor(values["bits"].shape, dtype("uint32"))
    kernel.bind(device, {**arguments, "found": found})(found.size, device.stream)
    return found.to_host()


def patterns(size: int, few: int, target: str) -> np.ndarray:
    """Return all bit patterns, or in the slow simulator a few, ends included."""
    every = np.arange(size, dtype=np.uint32)
    return every if target != "sim" else np.unique(np.r_[every[:: max(1, size // few)], every[-3:], every[size // 2 - 3 :][:6]])


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_widens_exactly(device: Device, name: str) -> None:
    kind = np.dtype(SMALL[name])
    bits = patterns(1 << (8 * kind.itemsize), 128, device.target)
    elements = bits.astype(f"u{kind.itemsize}").view(kind)
    found = run(device, WIDEN, bits=bits, kind=KINDS[name])
    nan = np.isnan(elements.astype(np.float32))
    assert np.array_equal(found[~nan], elements.astype(np.float32).view(np.uint32)[~nan])
    assert np.isnan(found[nan].view(np.float32)).all()
    assert np.array_equal(found >> 31, bits >> (8 * kind.itemsize - 1))


def narrowed(bits: np.ndarray, name: str) -> np.ndarray:
    """Return what a float32 becomes: ml_dtypes' bits, but saturated for float8 and one NaN for each sign."""
    values = bits.view(np.float32)
    if name == "float8_e4m3":
        values = np.clip(values, -448, 448)  # keeps NaN
    with np.errstate(over="ignore", invalid="ignore"):
        found = values.astype(SMALL[name])
    unsigned = found.view(f"u{found.itemsize}").astype(np.uint32)
    nan = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float8_e4m3": 0x7F}[name]
    sign = (bits >> 31) << (8 * found.itemsize - 1)
    return np.where(np.isnan(values), nan | sign, unsigned)


@pytest.mark.parametrize("name", SMALL)
def test_float32_is_rounded_to_nearest_even(device: Device, name: str) -> None:
    random = np.random.default_rng(3)
    count = 64 if device.target == "sim" else 1 << 20
    near = random.normal(size=count).astype(np.float32).view(np.uint32)  # the numbers that K and V are made of
    edges = np.array(EDGES, np.uint32)
    bits = np.r_[edges, edges | 0x80000000, random.integers(0, 1 << 32, count, np.uint32), near]
    found = run(device, NARROW, bits=bits, kind=KINDS[name])
    wrong = np.flatnonzero(found != narrowed(bits, name))
    assert not wrong.size, f"{bits[wrong[0]]:#x} became {found[wrong[0]]:#x}, {narrowed(bits, name)[wrong[0]]:#x} expected"


@pytest.mark.parametrize("name", SMALL)
def test_every_tie_goes_to_even(device: Device, name: str) -> None:
    kind = np.dtype(SMALL[name])
    bits = patterns(1 << (8 * kind.itemsize - 1), 64, device.target)
    with np.errstate(invalid="ignore"):
        values = bits.astype(f"u{kind.itemsize}").view(kind).astype(np.float32)
    values = values[np.isfinite(values)]
    ties = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32).view(np.uint32)
    bits = np.r_[ties, ties - 1, ties + 1]
    bits = bits[(bits >> 23) != 0x1FF]
    assert np.array_equal(run(device, NARROW, bits=bits, kind=KINDS[name]), narrowed(bits, name))


@pytest.mark.parametrize("name", KINDS)
def test_narrowing_gives_back_what_was_widened(device: Device, name: str) -> None:
    if name == "float32":
        bits = np.array([*EDGES, *(e | 0x80000000 for e in EDGES)], np.uint32)
    else:
        bits = patterns(1 << (8 * np.dtype(SMALL[name]).itemsize), 128, device.target)
    wide = run(device, WIDEN, bits=bits, kind=KINDS[name])
    number = ~np.isnan(wide.view(np.float32))
    if name == "float32":
        number[:] = True
    with np.errstate(invalid="ignore"):
        number &= (name != "float8_e4m3") | np.isfinite(wide.view(np.float32))
    assert np.array_equal(run(device, NARROW, bits=wide, kind=KINDS[name])[number], bits[number])


def test_a_scaled_float32_is_rounded_once_and_nan_keeps_its_sign(device: Device) -> None:
    random = np.random.default_rng(4)
    count = 64 if device.target == "sim" else 1 << 16
    values = random.normal(size=count).astype(np.float32)
    values[:4] = [np.nan, -np.nan, np.inf, -0.0]
    factors = random.uniform(0.01, 100, count).astype(np.float32)
    found = run(device, SCALE, bits=values.view(np.uint32), factors=factors)
    assert np.array_equal(found[2:], (values * factors).view(np.uint32)[2:])
    assert found[:2].tolist() == [0x7FC00000, 0xFFC00000]
