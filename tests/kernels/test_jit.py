"""The kernel decorator on the target under test: declarations, checks, both forms, and what is kept on disk."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError, StateError
from numba_kv.kernels.jit import Launch, all_kernels, kernel
from numba_kv.kernels.routines import routine
from numba_kv.kernels.source import build_key, product_name
from numba_kv.kernels.spec import array, memory, scalar

FACTOR = 3


@routine
def scaled(value):
    """Scale a value."""
    return value * FACTOR


@routine
def scaled_twice(value):
    """Scale a value twice: a routine that calls one."""
    return scaled(scaled(value))


@kernel(values=array("int32"), sums=array("int64", 2), bits=array("bfloat16"), add=scalar(), subtract=scalar())
def threads(item, values, sums, bits, add, subtract):
    """Work of one thread: `sums[item]` gets what is seen of an item."""
    sums[item, 0] = np.int64(values[item]) + add - subtract
    sums[item, 1] = scaled_twice(np.int64(values[item])) + sums.shape[0] * 1000
    bits[item] = np.int64(bits[item]) + 1


@kernel(block_form=True, rows=array("int32", 2), seen=array("int32"))
def blocks(item, lane, lanes, rows, seen):
    """Work of one block: lanes add the item to their columns; the first says how many there are."""
    for column in range(lane, rows.shape[1], lanes):
        rows[item, column] += 10 * item + 1
    if lane == 0:
        seen[item] = lanes


@kernel(to=array("int64"), value=scalar())
def store(item, to, value):
    """Store a scalar."""
    to[item] = value


@kernel(open_scalars=("first",), to=memory("int64"), first=scalar(), second=scalar(), third=scalar())
def digits(item, to, first, second, third):
    """Store three scalars in one number."""
    to[item] = 100 * first + 10 * second + third


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def to_device(device: Device, values: object, kind: str = "int32") -> Tensor:
    given = np.asarray(values).astype(dtype(kind).numpy())
    tensor = device.tensor(given.shape, dtype(kind))
    tensor.fill_from(given)
    return tensor


# -- fixed forms

def test_open_scalars_are_fixed_and_others_may_be(device: Device) -> None:
    """A form differs in what is fixed, not in what it does; its parameters are what is left."""
    to = device.tensor((1,), dtype("int64"))
    for fixed in ({"first": 1}, {"first": 1, "third": 3}, {"first": 1, "second": 2, "third": 3}):
        form = digits.fixed(**fixed)
        assert form is digits.fixed(**dict(reversed(fixed.items())))
        assert form.num_words == 2 + 3 - len(fixed)  # items, the address of a memory without its extent
        left = {name: n for name, n in (("second", 2), ("third", 3)) if name not in fixed}
        to.fill_from(np.zeros(1, np.int64))
        form.bind(device, {"to": to, **left})(1, device.stream)
        assert to.to_host()[0] == 123
    names = {digits.fixed(first=1, **more).name for more in ({}, {"third": 3}, {"third": 4}, {"second": 3})}
    assert len(names) == 4
    assert all(name.startswith("digits_1") for name in names)


@pytest.mark.parametrize("values", [{}, {"third": 3}, {"first": 1, "fourth": 4}, {"first": 1, "to": 0}])
def test_what_cannot_be_fixed(values: dict) -> None:
    with pytest.raises(InputError):
        digits.fixed(**values)


# -- both forms


@pytest.mark.parametrize("items", [0, 1, 3, 4, 5, 200])
def test_the_thread_form(device: Device, items: int) -> None:
    values = np.arange(200) - 100
    bits = device.tensor((200,), dtype("bfloat16"))
    given = {"values": to_device(device, values), "sums": device.tensor((200, 2), dtype("int64")), "bits": bits}
    launch = threads.bind(device, {**given, "add": 7, "subtract": 1 << 40})
    launch(items, device.stream)
    expected = np.zeros((200, 2), np.int64)
    expected[:items, 0] = values[:items] + 7 - (1 << 40)
    expected[:items, 1] = 9 * values[:items] + 200_000
    assert np.array_equal(given["sums"].to_host(), expected)
    assert bits.to_host().view(np.uint16).tolist() == [1] * items + [0] * (200 - items)


@pytest.mark.parametrize("columns", [1, 3, 17])
@pytest.mark.parametrize("items", [0, 1, 3])
def test_the_block_form(device: Device, items: int, columns: int) -> None:
    rows, seen = device.tensor((3, columns), dtype("int32")), device.tensor((3,), dtype("int32"))
    blocks.bind(device, {"rows": rows, "seen": seen})(items, device.stream)
    expected = np.zeros((3, columns), np.int32)
    expected[:items] = 10 * np.arange(items)[:, None] + 1
    assert np.array_equal(rows.to_host(), expected)
    lanes = {"cpu": 1, "sim": 4, "cuda": 256}[device.target]
    assert seen.to_host().tolist() == [lanes] * items + [0] * (3 - items)


@settings(max_examples=20)
@given(values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4))
def test_scalars_are_64_bits_wide_and_stay(device: Device, values: list[int]) -> None:
    to = device.tensor((1,), dtype("int64"))
    launch = store.bind(device, {"to": to, "value": values[0]})
    for value in values:
        launch(1, device.stream, value=value)
        assert to.to_host()[0] == value
    launch(1, device.stream)
    assert to.to_host()[0] == values[-1]


@pytest.mark.parametrize("value", [np.int32(-5), np.int64(-5), np.int8(-5)])
def test_numpy_integers_are_scalars(device: Device, value: np.integer) -> None:
    to = device.tensor((1,), dtype("int64"))
    store.bind(device, {"to": to, "value": value})(1, device.stream)
    assert to.to_host()[0] == -5
    store.bind(device, {"to": to, "value": 0})(1, device.stream, value=value)
    assert to.to_host()[0] == -5


def test_an_array_is_found_where_it_is(device: Device) -> None:
    whole = device.tensor((10,), dtype("int64"))
    launch = store.bind(device, {"to": whole[4:7], "value": 1})
    launch(3, device.stream)
    assert whole.to_host().tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0]


def test_a_launch_keeps_its_arrays_alive(device: Device) -> None:
    to = device.tensor((3,), dtype("int64"))
    memory = weakref.ref(to._memory)
    launch = store.bind(device, {"to": to, "value": 1})
    del to
    gc.collect()
    assert memory() is not None
    launch(3, device.stream)
    device.stream.synchronize()
    del launch
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("items", [0, 1, 5, 200])
def test_a_repeated_launch_does_the_same_each_time(device: Device, items: int) -> None:
    bits, values = device.tensor((200,), dtype("bfloat16")), to_device(device, np.arange(200))
    given = {"values": values, "sums": device.tensor((200, 2), dtype("int64")), "bits": bits}
    launch = threads.bind(device, {**given, "add": 0, "subtract": 0})
    again = launch.repeated(items)
    again(device.stream)
    launch.set(add=5)
    again(device.stream)
    assert bits.to_host().view(np.uint16).tolist() == [2] * items + [0] * (200 - items)
    assert given["sums"].to_host()[:, 0].tolist() == [*range(5, items + 5), *[0] * (200 - items)]


def test_a_repeated_launch_keeps_its_arrays_alive(device: Device) -> None:
    to = device.tensor((3,), dtype("int64"))
    memory = weakref.ref(to._memory)
    again = store.bind(device, {"to": to, "value": 4}).repeated(2)
    del to
    gc.collect()
    assert memory() is not None
    again(device.stream)
    device.stream.synchronize()
    del again
    gc.collect()
    assert memory() is None


def test_a_kernel_over_other_elements_is_another_one(device: Device) -> None:
    small = store.over("store_32", to="int32")
    assert (small.name, repr(small)) == ("store_32", "Kernel(store_32)")
    to = device.tensor((3,), dtype("int32"))
    value = 5 if device.target == "sim" else (7 << 32) + 5  # NumPy refuses what an element cannot hold
    small.bind(device, {"to": to, "value": value})(2, device.stream)
    assert to.to_host().tolist() == [5, 5, 0]
    with pytest.raises(ShapeError, match="to: int64 with 1 axes given, int32 with 1 wanted"):
        small.bind(device, {"to": device.tensor((3,), dtype("int64")), "value": 1})
    for wrong in ("value", "from"):
        with pytest.raises(InputError, match=f"kernel store: '{wrong}' is not one of its arrays"):
            store.over("x", **{wrong: "int32"})


# -- checks


def bound(device: Device, **changes: object) -> Launch:
    values = {"to": device.tensor((3,), dtype("int64")), "value": 1, **changes}
    return store.bind(device, {k: v for k, v in values.items() if v is not None})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"value": None}, InputError, r"kernel store: missing \['value'\], unknown \[\]"),
        ({"more": 1}, InputError, r"kernel store: missing \[\], unknown \['more'\]"),
        ({"value": 1.0}, InputError, "value: 1.0 is not an integer"),
        ({"value": "1"}, InputError, "value: '1' is not an integer"),
        ({"value": np.zeros(2, np.int64)}, InputError, "value: .* is not an integer"),
        ({"value": 1 << 63}, InputError, "value: 9223372036854775808 does not fit 64 bits"),
        ({"to": 5}, InputError, "to: int is not a Tensor"),
        ({"to": np.zeros(3, np.int64)}, InputError, "to: ndarray is not a Tensor"),
    ],
)
def test_wrong_values_are_refused(device: Device, change: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bound(device, **change)


def test_wrong_tensors_are_refused(device: Device) -> None:
    with pytest.raises(ShapeError, match="to: int32 with 1 axes given, int64 with 1 wanted"):
        bound(device, to=device.tensor((3,), dtype("int32")))
    with pytest.raises(ShapeError, match="to: int64 with 2 axes given, int64 with 1 wanted"):
        bound(device, to=device.tensor((3, 1), dtype("int64")))
    with pytest.raises(ShapeError, match=r"to: strides \(2,\) given, a dense tensor wanted"):
        bound(device, to=device.tensor((6,), dtype("int64"))[::2])
    with pytest.raises(ShapeError, match=r"to: strides \(-1,\) given, a dense tensor wanted"):
        bound(device, to=device.tensor((6,), dtype("int64"))[::-1])
    with pytest.raises(InputError, match="value: .* is not an integer"):
        bound(device, value=device.tensor((1,), dtype("int64")))


def test_tensors_of_another_device_are_refused(device: Device) -> None:
    with pytest.raises(InputError, match="to: the tensor is on another device object than the launch"):
        bound(device, to=create_device().tensor((3,), dtype("int64")))


def test_closed_tensors_are_refused(device: Device) -> None:
    memory = device.allocate(24)
    tensor = Tensor(memory, device, dtype("int64"), (3,))
    memory.close(device.stream)
    with pytest.raises(StateError, match="given back"):
        bound(device, to=tensor)


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"value": 1.5}, "value: 1.5 is not an integer"),
        ({"value": None}, "value: None is not an integer"),
        ({"value": 1 << 63}, "does not fit 64 bits"),
        ({"value": 9, "valeu": 1}, r"'valeu' is not one of its scalars \['value'\]"),
        ({"value": 9, "to": 1}, r"'to' is not one of its scalars"),
    ],
)
def test_a_refused_launch_changes_nothing(device: Device, scalars: dict[str, int], message: str) -> None:
    to = device.tensor((3,), dtype("int64"))
    launch = store.bind(device, {"to": to, "value": 4})
    with pytest.raises(InputError, match=message):
        launch(3, device.stream, **scalars)
    assert to.to_host().tolist() == [0, 0, 0]
    launch(1, device.stream)
    assert to.to_host().tolist() == [4, 0, 0]


def test_negative_items_are_refused(device: Device) -> None:
    with pytest.raises(InputError, match="kernel store: items: -1 is not"):
        bound(device)(-1, device.stream)


@pytest.mark.parametrize("number", [0, -1, 1025])
def test_impossible_block_sizes_are_refused(device: Device, number: int) -> None:
    with pytest.raises(InputError, match=f"threads: {number} is not in 1..1024"):
        store.bind(device, {"to": device.tensor((3,), dtype("int64")), "value": 1}, threads=number)


@pytest.mark.parametrize("items", [1.5, True, "a", None, 2**70, -(2**70)])
def test_what_is_no_number_of_items_is_refused(device: Device, items: object) -> None:
    to = device.tensor((1,), dtype("int64"))
    launch = store.bind(device, {"to": to, "value": 1})
    with pytest.raises(InputError, match="kernel store: items: .* is not an integer in"):
        launch(items, device.stream)  # type: ignore[arg-type]
    launch(np.int64(1), device.stream)  # type: ignore[arg-type]
    assert to.to_host().tolist() == [1]


def test_what_cannot_be_bound_is_refused(device: Device) -> None:
    values = {"to": device.tensor((1,), dtype("int64")), "value": 1}
    for threads in (1.5, True, "a", 2**70):
        with pytest.raises(InputError, match="threads: .* is not in 1..1024"):
            store.bind(device, values, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="values: NoneType is not a mapping"):
        store.bind(device, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="device: NoneType is not a Device"):
        store.bind(None, values)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown"):
        store.bind(device, {**values, 1: 2, "a": 3})  # type: ignore[dict-item]


def test_declarations_must_match_the_function() -> None:
    with pytest.raises(InputError, match=r"kernel f: parameters \['a'\] and declarations \['b'\] differ"):

        @kernel(b=scalar())
        def f(item, a): ...

    with pytest.raises(InputError, match="kernel g: parameters"):

        @kernel(b=scalar(), a=scalar())
        def g(item, a, b): ...

    with pytest.raises(InputError, match="kernel h: parameters"):

        @kernel(block_form=True, a=scalar())
        def h(item, a): ...


def test_functions_that_close_over_variables_are_refused() -> None:
    outside = 5
    with pytest.raises(InputError, match="kernel f: it closes over outside"):

        @kernel(a=array("int32"))
        def f(item, a):
            a[item] = outside

    with pytest.raises(InputError, match="kernel r: it closes over outside"):

        @routine
        def r(a):
            return a + outside

    with pytest.raises(InputError, match="is not a Python function"):
        kernel(a=array("int32"))(np.add)


def test_a_routine_is_a_function_too() -> None:
    assert scaled_twice(2) == 18


def test_the_package_s_kernels_are_listed() -> None:
    kernels = all_kernels()
    assert {"advance", "fill_slots", "gather_rows"} <= set(kernels)
    assert "store" not in kernels
    assert all(name == each.name for name, each in kernels.items())
    assert repr(kernels["advance"]) == "Kernel(advance)"


# -- what is kept on disk

MODULE = """
import sys, time
import numpy as np
from numba_kv.device import create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels.jit import kernel
from numba_kv.kernels.routines import routine
from numba_kv.kernels.spec import array

STEP = {step}

@routine
def next_one(value):
    return value + STEP

@kernel(a=array("int64"))
def count(item, a):
    a[item] = next_one(a[item])

if __name__ == "__main__":
    device = create_device("cpu")
    a = device.tensor((2,), dtype("int64"))
    count.bind(device, {{"a": a}})(2, device.stream)
    from numba_kv.kernels import on_cpu
    loop = on_cpu._loops[count]
    print(a.to_host().tolist(), sum(loop.stats.cache_hits.values()), sum(loop.stats.cache_misses.values()))
"""


def run(script: Path, cache: Path, step: int = 1) -> str:
    script.write_text(MODULE.format(step=step))
    environment = {**os.environ, "NUMBA_KV_CACHE_DIR": str(cache), "NUMBA_ENABLE_CUDASIM": "0"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_second_process_starts_warm(tmp_path: Path) -> None:
    script, cache = tmp_path / "counting.py", tmp_path / "cache"
    assert run(script, cache) == "[1, 1] 0 1"
    assert run(script, cache) == "[1, 1] 1 0"
    assert run(script, cache, step=5) == "[5, 5] 0 1"  # the kernel's own file is part of its key
    assert run(script, cache) == "[1, 1] 1 0"


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "counting.py", tmp_path / "file" / "cache").startswith("[1, 1] 0 ")


def test_products_depend_on_what_the_kernel_uses() -> None:
    names = {product_name(each) for each in (*all_kernels().values(), threads, blocks, store)}
    assert len(names) == len(all_kernels()) + 3
    assert product_name(store) == product_name(store)
    assert [f.__name__ for f in threads.functions] == ["threads", "scaled_twice", "scaled"]
    assert build_key() == build_key()
    before = product_name(threads)
    threads.function.__globals__["FACTOR"] = 4
    try:
        assert product_name(threads) != before
    finally:
        threads.function.__globals__["FACTOR"] = 3


def test_kernels_of_one_name_are_told_apart(device: Device) -> None:
    first, second = device.tensor((1,), dtype("int64")), device.tensor((1,), dtype("int64"))
    store.bind(device, {"to": first, "value": 7})(1, device.stream)
    other_store.bind(device, {"to": second, "value": 7})(1, device.stream)
    assert (first.to_host()[0], second.to_host()[0]) == (7, -7)


def _negative(item, to, value):
    to[item] = -value


_negative.__name__ = "store"
other_store = kernel(to=array("int64"), value=scalar())(_negative)


@pytest.mark.gpu
def test_more_blocks_than_a_grid_has_are_refused(device: Device) -> None:
    """The driver would take the number's lower 32 bits."""
    launch = store.bind(device, {"to": device.tensor((1,), dtype("int64")), "value": 1}, threads=1)
    with pytest.raises(InputError, match="items: 4294967297 take 4294967297 blocks, a grid has 2147483647"):
        launch(2**32 + 1, device.stream)
