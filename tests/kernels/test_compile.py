"""Every kernel compiles to machine code for each supported architecture, without a GPU: what it takes and what it uses."""

from __future__ import annotations

import re
from functools import cache

import pytest

from numba_kv.device.target import simulator_is_on
from numba_kv.kernels.jit import Kernel, all_kernels
from numba_kv.kernels.spec import array, scalar

ARCHITECTURES = ((8, 0), (9, 0), (10, 0), (12, 0))
MAX_REGISTERS = 128  # so that two blocks of 256 threads share a multiprocessor

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: nothing can be compiled for a GPU")
pytest.importorskip("cuda.core", reason="cuda-python is not installed: nothing can be assembled for a GPU")
if simulator_is_on():
    pytest.skip("Numba's simulator replaces its compiler", allow_module_level=True)

from numba_kv.device.module import ptx_to_cubin  # noqa: E402 - not in the simulator
from numba_kv.errors import InvariantError  # noqa: E402
from numba_kv.kernels.on_cuda import _check_parameters, compile_ptx, entry_name  # noqa: E402

KERNELS = all_kernels()


@cache
def ptx_of(name: str, architecture: tuple[int, int]) -> str:
    return compile_ptx(KERNELS[name], architecture)


@cache
def assembled(name: str, architecture: tuple[int, int]) -> tuple[bytes, str]:
    return ptx_to_cubin(ptx_of(name, architecture), architecture)


each = [
    pytest.mark.parametrize("architecture", ARCHITECTURES, ids=[f"sm_{major}{minor}" for major, minor in ARCHITECTURES]),
    pytest.mark.parametrize("name", KERNELS),
]


def for_each(test: object) -> object:
    for mark in each:
        test = mark(test)
    return test


@for_each
def test_parameters_are_the_declared_words(name: str, architecture: tuple[int, int]) -> None:
    ptx = ptx_of(name, architecture)
    header = re.search(r"\.visible\s+\.entry\s+\w+\(([^)]*)\)", ptx)
    assert header is not None
    assert re.findall(r"\.param\s+\.(\w+)", header[1]) == ["u64"] * KERNELS[name].num_words
    assert f".target sm_{architecture[0]}{architecture[1]}" in ptx
    assert entry_name(ptx) in ptx


@for_each
def test_memory_is_reached_through_the_global_space(name: str, architecture: tuple[int, int]) -> None:
    accesses = re.findall(r"\b((?:ld|st|atom|red)(?:\.[a-z]\w*)+)", ptx_of(name, architecture))
    spaces = {access.removeprefix("ld.").removeprefix("st.").split(".")[0] for access in accesses}
    assert "global" in spaces
    assert spaces <= {"global", "param"}


@for_each
def test_nothing_is_spilled(name: str, architecture: tuple[int, int]) -> None:
    cubin, log = assembled(name, architecture)
    assert cubin[:4] == b"\x7fELF"
    used = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert len(used) == 1
    assert used[0] <= MAX_REGISTERS
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log) == [("0", "0", "0")]


def widened(ptx: str) -> list[str]:
    """Return what narrow products and left shifts become a 64-bit number, directly or through narrow arithmetic."""
    narrow = set(re.findall(r"\b(?:mad\.lo\.[su]32|shl\.b32)\s+(%r\d+)", ptx))
    operations = "and|or|xor|not|add|sub|neg|min|max|selp|shr|mov"
    steps = re.findall(rf"^\s*(?:@!?%p\d+ )?(?:{operations})\.[busd]32\s+(%r\d+), ([^;]*);", ptx, re.MULTILINE)
    while True:
        more = {result for result, operands in steps if narrow & set(re.findall(r"%r\d+", operands))} - narrow
        if not more:
            break
        narrow |= more
    wide = re.findall(r"\b(?:cvt\.[su]64\.[su]32|mul\.wide\.[su]32|mad\.wide\.[su]32)\s+%rd\d+, ([^;]*);", ptx)
    return [operands for operands in wide if narrow & set(re.findall(r"%r\d+", operands))]


def test_a_widened_shift_is_found() -> None:
    assert widened("shl.b32 \t%r5, %r4, 13;\n\tand.b32  \t%r6, %r5, 1;\n\tcvt.u64.u32 \t%rd1, %r6;\n") == ["%r6"]


@pytest.mark.parametrize("name", KERNELS)
def test_offsets_are_products_of_64_bits(name: str) -> None:
    """An index into a pool can exceed 32 bits. The only narrow products are the remainders of narrow divisions."""
    ptx = ptx_of(name, (9, 0))
    assert not re.findall(r"\bmad\.lo\.[su]32", ptx)
    assert widened(ptx) == []
    for product in re.findall(r"mul\.lo\.[su]32\s+(%r\d+)", ptx):
        uses = re.findall(rf"^\s*(\w[\w.]*)\s[^\n]*, {product}\b", ptx, re.MULTILINE)
        assert set(uses) == {"sub.s32"}


def test_ptx_with_other_parameters_is_refused() -> None:
    name = next(iter(KERNELS))
    ptx = ptx_of(name, (9, 0))
    taken = Kernel(touch, {"values": array("int32"), "value": scalar()}, False)
    with pytest.raises(InvariantError, match="4 64-bit parameters expected"):
        _check_parameters(taken, ptx)
    with pytest.raises(InvariantError, match="64-bit parameters expected"):
        _check_parameters(KERNELS[name], ptx.replace(".param .u64", ".param .u32", 1))
    with pytest.raises(InvariantError, match="0 kernels, 1 expected"):
        entry_name("")


def touch(item, values, value):
    values[item] = value


def test_a_kernel_of_another_module_compiles() -> None:
    ptx = compile_ptx(Kernel(touch, {"values": array("bfloat16"), "value": scalar()}, False), (9, 0))
    assert "st.global.u16" in ptx
