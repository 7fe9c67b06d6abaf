"""Words of packed elements against the conversions of single ones, which `test_bits.py` proves: the same bits on every target.

On a GPU the words are converted by instructions of its own.
"""

from __future__ import annotations

import numpy as np
import pytest

from numba_kv.device import Device, create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels.bits import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, KINDS, bits_of, float_of, from_float32, to_float32
from numba_kv.kernels.jit import Kernel
from numba_kv.kernels.spec import array, scalar
from numba_kv.kernels.wide_rows import (
    divided,
    floats_of,
    load_raw,
    load_some,
    product,
    raw_of,
    reciprocal,
    results_of,
    store_raw,
    store_some,
)
from numba_kv.kernels.wide_values import (
    bfloat16_results,
    float16_results,
    from_float16_any_nan,
    inverse_root,
    minus,
    plus,
    scaled,
    times,
)
from tests.kernels.test_bits import EDGES, SMALL, narrowed, patterns


def widen(item, memory, found, kind):
    floats = floats_of(load_raw(memory, np.int64(item) * 8 * (memory.shape[0] // found.shape[0]), kind, False), kind)
    for i in range(8):
        found[8 * item + i] = bits_of(floats[i])


def widen_any_nan(item, bits, found):
    floats = from_float16_any_nan(np.uint64(bits[item]))
    for i in range(4):
        found[4 * item + i] = bits_of(floats[i])


def narrow(item, memory, found, kind, nbytes):
    raw = raw_of(floats_of(load_raw(memory, 32 * np.int64(item), FLOAT32, False), FLOAT32), kind)
    store_raw(found, 8 * nbytes * np.int64(item), raw, kind, True)


def narrow_results(item, memory, found, kind, nbytes):
    raw = results_of(floats_of(load_raw(memory, 32 * np.int64(item), FLOAT32, False), FLOAT32), kind)
    store_raw(found, 8 * nbytes * np.int64(item), raw, kind, True)


def copy_some(item, memory, found, kind, nbytes, count):
    raw = load_some(memory, nbytes, kind, count)
    store_some(found, nbytes, raw, kind, count)


def calculate(item, a, b, found):
    x, y = float_of(a[item]), float_of(b[item])
    found[item, 0] = bits_of(plus(times(x, y), x))  # not fused
    found[item, 1] = bits_of(minus(times(x, y), times(y, y)))
    found[item, 2] = bits_of(inverse_root(times(x, x)))
    found[item, 3] = bits_of(scaled(x, float_of(b[item] & 0x7FFFFFFF)))


def round_results(item, bits, found, kind):
    at = 4 * np.int64(item)
    a, b, c, d = float_of(bits[at]), float_of(bits[at + 1]), float_of(bits[at + 2]), float_of(bits[at + 3])
    if kind == FLOAT16:
        word = float16_results(a, b, c, d)
    else:
        word = bfloat16_results(a, b, c, d)
    for i in range(4):
        found[at + i] = np.int64(word >> np.uint64(16 * i) & np.uint64(0xFFFF))


def divide(item, numbers, divisors, by, found):
    found[item] = divided(numbers[item], divisors[item], by[item])


WIDEN = Kernel(widen, {"memory": array("uint8"), "found": array("uint32"), "kind": scalar()}, False, ["kind"])
WIDEN_ANY_NAN = Kernel(widen_any_nan, {"bits": array("int64"), "found": array("uint32")}, False)
NARROW = Kernel(
    narrow, {"memory": array("uint8"), "found": array("uint8"), "kind": scalar(), "nbytes": scalar()}, False, ["kind"]
)
NARROW_RESULTS = Kernel(
    narrow_results, {"memory": array("uint8"), "found": array("uint8"), "kind": scalar(), "nbytes": scalar()}, False, ["kind"]
)
COPY = Kernel(
    copy_some,
    {"memory": array("uint8"), "found": array("uint8"), "kind": scalar(), "nbytes": scalar(), "count": scalar()},
    False,
    ["kind"],
)
CALCULATE = Kernel(calculate, {"a": array("uint32"), "b": array("uint32"), "found": array("uint32", 2)}, False)
RESULTS = Kernel(round_results, {"bits": array("uint32"), "found": array("uint32"), "kind": scalar()}, False, ["kind"])
DIVIDE = Kernel(
    divide,
    {"numbers": array("int64"), "divisors": array("int64"), "by": array("int64"), "found": array("int64")},
    False,
)


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def run(device: Device, kernel: Kernel, items: int, found: tuple[tuple[int, ...], str], **values: object) -> np.ndarray:
    arguments: dict = {"found": device.tensor(found[0], dtype(found[1]))}
    for name, value in values.items():
        arguments[name] = value
        if isinstance(value, np.ndarray):
            arguments[name] = device.tensor(value.shape, dtype(value.dtype.name))
            arguments[name].fill_from(value)
    kernel.bind(device, arguments)(items, device.stream)
    return arguments["found"].to_host()


def whole(values: np.ndarray) -> np.ndarray:
    """Return values repeated up to a multiple of eight."""
    return np.resize(values, -(-len(values) // 8) * 8)


@pytest.mark.parametrize("name", SMALL)
def test_every_pattern_widens_as_single_ones_do(device: Device, name: str) -> None:
    size = np.dtype(SMALL[name]).itemsize
    bits = whole(patterns(1 << (8 * size), 128, device.target))
    memory = bits.astype(f"u{size}").view(np.uint8)
    found = run(device, WIDEN.fixed(kind=KINDS[name]), len(bits) // 8, ((len(bits),), "uint32"), memory=memory)
    elements = bits.astype(f"u{size}").view(SMALL[name]).astype(np.float32)
    nan = np.isnan(elements)
    assert np.array_equal(found[~nan], elements.view(np.uint32)[~nan])
    assert np.isnan(found[nan].view(np.float32)).all()
    assert np.array_equal(found >> 31, bits >> (8 * size - 1))


def test_every_float16_widens_where_a_nan_may_have_any_bits(device: Device) -> None:
    bits = whole(patterns(1 << 16, 128, device.target)).astype(np.uint16)
    found = run(device, WIDEN_ANY_NAN, len(bits) // 4, ((len(bits),), "uint32"), bits=bits.view(np.int64))
    elements = bits.view(np.float16).astype(np.float32)
    nan = np.isnan(elements)
    assert nan.any()
    assert np.array_equal(found[~nan], elements.view(np.uint32)[~nan])
    assert np.isnan(found[nan].view(np.float32)).all()


@pytest.mark.parametrize("name", SMALL)
def test_float32_is_rounded_as_single_ones_are(device: Device, name: str) -> None:
    random = np.random.default_rng(3)
    count = 64 if device.target == "sim" else 1 << 20
    near = random.normal(size=count).astype(np.float32).view(np.uint32)
    small = patterns(1 << (8 * np.dtype(SMALL[name]).itemsize - 1), 64, device.target)
    with np.errstate(invalid="ignore"):
        steps = small.astype(f"u{np.dtype(SMALL[name]).itemsize}").view(SMALL[name]).astype(np.float32)
    steps = steps[np.isfinite(steps)]
    ties = ((steps[1:].astype(np.float64) + steps[:-1]) / 2).astype(np.float32).view(np.uint32)
    edges = np.array(EDGES, np.uint32)
    bits = np.r_[edges, edges | 0x80000000, random.integers(0, 1 << 32, count, np.uint32), near, ties, ties | 0x80000000]
    bits = whole(bits)
    size = np.dtype(SMALL[name]).itemsize
    given = {"memory": bits.view(np.uint8), "nbytes": size}
    found = run(device, NARROW.fixed(kind=KINDS[name]), len(bits) // 8, ((len(bits) * size,), "uint8"), **given)
    wanted = narrowed(bits, name).astype(f"u{size}")
    wrong = np.flatnonzero(found.view(f"u{size}") != wanted)
    assert not wrong.size, f"{bits[wrong[0]]:#x} became {found.view(f'u{size}')[wrong[0]]:#x}, {wanted[wrong[0]]:#x} expected"


def test_float32_keeps_its_bits(device: Device) -> None:
    bits = np.random.default_rng(4).integers(0, 1 << 32, 64, np.uint32)
    given = {"memory": bits.view(np.uint8), "nbytes": 4}
    found = run(device, NARROW.fixed(kind=FLOAT32), 8, ((256,), "uint8"), **given)
    assert np.array_equal(found.view(np.uint32), bits)


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("kind", [FLOAT32, FLOAT16, BFLOAT16, FLOAT8])
def test_some_of_eight_are_moved_and_no_byte_more(device: Device, kind: int, count: int) -> None:
    nbytes = {FLOAT32: 4, FLOAT8: 1}.get(kind, 2)
    memory = np.random.default_rng(count).integers(1, 256, 10 * nbytes, np.uint8)
    given = {"memory": memory, "nbytes": nbytes, "count": count}
    found = run(device, COPY.fixed(kind=kind), 1, ((10 * nbytes,), "uint8"), **given)
    wanted = np.zeros_like(memory)
    wanted[nbytes : (1 + count) * nbytes] = memory[nbytes : (1 + count) * nbytes]
    assert np.array_equal(found, wanted)


def test_operations_are_rounded_one_by_one(device: Device) -> None:
    random = np.random.default_rng(5)
    count = 64 if device.target == "sim" else 1 << 16
    a, b = (random.normal(size=count).astype(np.float32) for _ in range(2))
    found = run(device, CALCULATE, count, ((count, 4), "uint32"), a=a.view(np.uint32), b=b.view(np.uint32))
    wanted = np.stack([a * b + a, a * b - b * b, np.float32(1) / np.sqrt(a * a), a * np.abs(b)], 1)
    assert np.array_equal(found, wanted.view(np.uint32))


def test_numbers_are_divided_without_a_division(device: Device) -> None:
    random = np.random.default_rng(6)
    divisors = np.r_[1, 2, 3, 7, 128, 2**31 - 1, random.integers(1, 4096, 200), random.integers(1, 2**31, 50)]
    numbers = np.r_[2**31 - 1, 0, 2**31 - 2, 6, 127, 2**31 - 1, random.integers(0, 2**31, 250)]
    numbers[100:200] = numbers[100:200] // divisors[100:200] * divisors[100:200]
    by = np.array([reciprocal(d) for d in divisors.tolist()])
    found = run(device, DIVIDE, len(by), ((len(by),), "int64"), numbers=numbers, divisors=divisors, by=by)
    assert np.array_equal(found, numbers // divisors)


def test_single_and_packed_conversions_agree_on_nan() -> None:
    """As ordinary Python: what the simulator and the other tests build on."""
    for kind, nan in ((FLOAT16, 0x7E00), (BFLOAT16, 0x7FC0), (FLOAT8, 0x7F)):
        assert from_float32(0x7FC00001, kind) == nan
        assert to_float32(nan, kind) & 0x7FFFFFFF > 0x7F800000


@pytest.mark.parametrize("kind", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
def test_results_are_rounded_and_a_nan_is_that_of_a_gpu(device: Device, kind: int) -> None:
    """Rounded as single elements are; a NaN is stored with all bits set but the sign."""
    random = np.random.default_rng(3).integers(0, 2**32, 400, np.uint32)
    bits = np.concatenate(
        [random, np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 1, 0x477FF000], np.uint32)]
    )
    found = run(device, RESULTS.fixed(kind=kind), len(bits) // 4, ((len(bits),), "uint32"), bits=bits)
    is_nan = np.isnan(bits.view(np.float32))
    wanted = np.array([from_float32(int(b), kind) for b in bits], np.uint32)
    assert np.array_equal(found, np.where(is_nan, 0x7FFF, wanted))
    assert is_nan.sum() >= 2


@pytest.mark.parametrize("kind", [FLOAT32, FLOAT16, BFLOAT16], ids=["float32", "float16", "bfloat16"])
def test_results_with_positive_nan_are_what_elements_are(device: Device, kind: int) -> None:
    random = np.random.default_rng(4).integers(0, 2**32, 400, np.uint32)
    edges = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x7FFFFFFF, 0x7F7FFFFF, 0x477FF000], np.uint32)
    bits = np.concatenate([random, edges])
    bits[np.isnan(bits.view(np.float32))] = 0x7FFFFFFF  # what a GPU's operations make
    nbytes = 4 if kind == FLOAT32 else 2
    found = run(
        device,
        NARROW_RESULTS.fixed(kind=kind),
        len(bits) // 8,
        ((nbytes * len(bits),), "uint8"),
        memory=bits.view(np.uint8),
        nbytes=nbytes,
    )
    wanted = bits if kind == FLOAT32 else np.array([from_float32(int(b), kind) for b in bits], np.uint16)
    assert np.array_equal(found.view(wanted.dtype), wanted)


def test_products_of_32_bits_are_whole() -> None:
    for a, b in ((2**32 - 1, 2**31 - 1), (0, 2**32 - 1), (123456789, 987654321)):
        assert product(np.int64(a), np.int64(b)) == a * b
