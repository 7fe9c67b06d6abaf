"""What compiled code takes for constants is part of its name on disk, and generated names meet none of a kernel's own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from numba_kv.device import Device, create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels.host_code import _named
from numba_kv.kernels.jit import Kernel, kernel
from numba_kv.kernels.routines import routine
from numba_kv.kernels.source import constants_of, product_name
from numba_kv.kernels.spec import array, scalar

NUMBER, PAIR, ONE, WEIGHTS = 3, (0, 1), np.int64(1), np.arange(3)
elsewhere = ModuleType("elsewhere")
elsewhere.FACTOR = 2  # type: ignore[attr-defined]
elsewhere.unused = 5  # type: ignore[attr-defined]


class Compiled:
    """Stands for a function that Numba has compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.py_func = function


@Compiled
def called(x):  # type: ignore[no-untyped-def]
    return x + DEEP


DEEP = 11


@routine
def of_routine(x):  # type: ignore[no-untyped-def]
    return x + PAIR[1]


@kernel(to=array("int64"))
def constant(item, to):  # type: ignore[no-untyped-def]
    to[item] = elsewhere.FACTOR * NUMBER + ONE + WEIGHTS[1] + of_routine(item)


def host(x):  # type: ignore[no-untyped-def]
    """Add."""
    return called(x) + sum(NUMBER for _ in range(x))


@pytest.mark.parametrize(
    ("name", "value"),
    [("NUMBER", 4), ("PAIR", (0, 2)), ("ONE", np.int64(2)), ("ONE", np.int32(1)), ("WEIGHTS", np.arange(3) + 1)],
    ids=["number", "tuple", "numpy's value", "numpy's type", "array"],
)
def test_a_product_depends_on_constants_of_every_kind(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    before = product_name(constant)
    monkeypatch.setitem(globals(), name, value)
    assert product_name(constant) != before
    monkeypatch.undo()
    assert product_name(constant) == before


def test_constants_of_modules_count_where_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = product_name(constant)
    monkeypatch.setattr(elsewhere, "unused", 6)
    assert product_name(constant) == before
    monkeypatch.setattr(elsewhere, "FACTOR", 3)
    assert product_name(constant) != before


def test_package_kernels_depend_on_constants_of_other_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba_kv.kernels import state_copy

    before = product_name(state_copy.clear_fresh_states_words)
    monkeypatch.setattr(state_copy, "RECORD_WORDS", state_copy.RECORD_WORDS + 1)
    assert product_name(state_copy.clear_fresh_states_words) != before


def test_host_functions_are_named_by_what_they_are_compiled_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(constants_of(host)) == {"NUMBER": "3", "DEEP": "11"}
    names = {_named(host).__qualname__}
    for name in ("NUMBER", "DEEP"):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, 100)
            names.add(_named(host).__qualname__)
    assert len(names) == 3
    assert (_named(host).__doc__, _named(host).__module__) == (host.__doc__, host.__module__)


@pytest.fixture
def device(target: str) -> Device:
    return create_device(target)


@kernel(
    to=array("int64"), items=scalar(), item=scalar(), range=scalar(), w1=scalar(), cuda=scalar(), np=scalar(), block=scalar()
)
def plain(row, to, items, item, range, w1, cuda, np, block):  # type: ignore[no-untyped-def]
    to[row] = items + 10 * item + 100 * range + 1000 * w1 + 10000 * cuda + 100000 * np + 1000000 * block


@kernel(block_form=True, to=array("int64"), loop=scalar(), int64_1=scalar(), numba=scalar())
def blocked(each, mine, all_of_them, to, loop, int64_1, numba):  # type: ignore[no-untyped-def]
    if mine == 0:
        to[each] = loop + 10 * int64_1 + 100 * numba


@pytest.mark.parametrize(("made", "wanted"), [(plain, 1111111 * 7), (blocked, 777)], ids=["items", "blocks"])
def test_arguments_may_have_any_name(device: Device, made: Kernel, wanted: int) -> None:
    to = device.tensor((6,), dtype("int64"))
    to.fill_from(np.full(6, -1))
    values = {name: 7 for name in made.arguments if name != "to"}
    made.bind(device, {"to": to, **values})(4, device.stream)
    assert to.to_host().tolist() == [wanted] * 4 + [-1] * 2
