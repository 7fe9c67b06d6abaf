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
#: Channel by channel, where nothing is aligned: one block of 256 threads is enough.
MORE_REGISTERS = {"rotate_kv_13_20_13_1_0_0": 255}

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: nothing can be compiled for a GPU")
pytest.importorskip("cuda.core", reason="cuda-python is not installed: nothing can be assembled for a GPU")
if simulator_is_on():
    pytest.skip("Numba's simulator replaces its compiler", allow_module_level=True)

from numba_kv.device.module import ptx_to_cubin  # noqa: E402 - not in the simulator
from numba_kv.errors import InvariantError  # noqa: E402
from numba_kv.kernels.bits import BFLOAT16, FLOAT8, FLOAT16, FLOAT32  # noqa: E402
from numba_kv.kernels.kv_copy import copy_page_units  # noqa: E402
from numba_kv.kernels.kv_move import move_kv  # noqa: E402
from numba_kv.kernels.kv_rotate import NO_NORM, rotate_kv  # noqa: E402
from numba_kv.kernels.on_cuda import _check_parameters, compile_ptx, entry_name  # noqa: E402
from numba_kv.kernels.wide_rows import RAW  # noqa: E402
from tests.helpers.machine_code import MEMORY_OPERATIONS, WAIT, accesses, operations  # noqa: E402


def rotation(
    kind: int,
    pool_kind: int,
    weight_kind: int = NO_NORM,
    interleaved: int = 0,
    wide: int = 1,
    single: int = 1,
    exact: int = 0,
    parts: int = 0,
    **known: int,
) -> Kernel:
    return rotate_kv.fixed(
        team_shift=3,
        has_table=1,
        has_k_out=0,
        kind=kind,
        pool_kind=pool_kind,
        weight_kind=weight_kind,
        interleaved=interleaved,
        wide=wide,
        single=single,
        exact=exact,
        parts=parts,
        **known,
    )


#: What a kernel of one model knows when it is compiled.
MODEL = {"exact": 1, "dim": 128, "rotary": 128, "q_heads": 32, "heads": 8}
SHAPES = {
    **{"units": 128, "by_units": 1 << 25, "row": 16, "by_row": 1 << 28, "heads": 8, "shift": 4},
    **{"pool_page": 1 << 15, "pool_token": 2048, "pool_head": 256},
    **{"k_token": 2048, "k_head": 256, "v_token": 2048, "v_head": 256},
}
AS_IT_IS = {"kind": RAW, "pool_kind": RAW, "has_heads": 0, "has_span": 0}

#: Fixed forms that stand for the others, and how wide their accesses are.
WIDE = {
    "bfloat16 write": (move_kv.fixed(write=1, **AS_IT_IS), {"LDG.64", "LDG.128", "STG.128"}),
    "bfloat16 write of a model": (move_kv.fixed(write=1, **AS_IT_IS, **SHAPES), {"LDG.64", "LDG.128", "STG.128"}),
    "bfloat16 read": (move_kv.fixed(write=0, **AS_IT_IS), {"LDG.64", "LDG.128", "STG.128"}),
    "float8 write": (
        move_kv.fixed(write=1, kind=BFLOAT16, pool_kind=FLOAT8, has_heads=1, has_span=1),
        {"LDG.32", "LDG.64", "LDG.128", "STG.64"},
    ),
    "float8 read": (
        move_kv.fixed(write=0, kind=BFLOAT16, pool_kind=FLOAT8, has_heads=1, has_span=1),
        {"LDG.32", "LDG.64", "STG.128"},
    ),
    "float16 to bfloat16": (
        move_kv.fixed(write=1, kind=FLOAT16, pool_kind=BFLOAT16, has_heads=0, has_span=0),
        {"LDG.64", "LDG.128", "STG.128"},
    ),
    "rotation": (rotation(BFLOAT16, BFLOAT16, **MODEL), {"LDG.32", "LDG.64", "LDG.128", "STG.128"}),
    "rotation of few tokens": (rotation(BFLOAT16, BFLOAT16, parts=2, **MODEL), {"LDG.32", "LDG.64", "LDG.128", "STG.128"}),
    "rotation of few tokens to float8": (
        rotation(BFLOAT16, FLOAT8, parts=2, **MODEL),
        {"LDG.32", "LDG.64", "LDG.128", "STG.64", "STG.128"},
    ),
    "rotation to float8": (rotation(BFLOAT16, FLOAT8, **MODEL), {"LDG.32", "LDG.64", "LDG.128", "STG.64", "STG.128"}),
    "norm and rotation": (rotation(BFLOAT16, BFLOAT16, BFLOAT16, **MODEL), {"LDG.32", "LDG.64", "LDG.128", "STG.128"}),
    "pages": (copy_page_units, {"LDG.32", "LDG.128", "STG.128"}),
}
#: Forms that know their model.
OF_MODEL = {WIDE[name][0].name for name in WIDE if "rotation" in name or "model" in name}
FORMS = (
    rotation(BFLOAT16, BFLOAT16),
    rotation(FLOAT16, FLOAT8, FLOAT16, interleaved=1, wide=0, single=0),
    move_kv.fixed(write=1, kind=FLOAT32, pool_kind=FLOAT16, has_heads=1, has_span=1),
)
KERNELS = {
    **{name: each for name, each in all_kernels().items() if not name.startswith(("move_kv", "rotate_kv"))},
    **{each.name: each for each in (*(kernel for kernel, _ in WIDE.values()), *FORMS)},
}


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
def test_no_memory_is_touched_before_the_kernel_in_front_is_done(name: str, architecture: tuple[int, int]) -> None:
    """Also not through ``.nc``, which promises that nobody writes the memory meanwhile: its loads could go anywhere."""
    body = ptx_of(name, architecture).partition("{")[2]
    wait, start = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
    assert ".nc." not in body
    if architecture < (9, 0):
        assert "griddepcontrol" not in body
        return
    before, _, behind = body.partition(wait)
    assert (body.count(wait), start in before) == (1, False)
    assert not re.findall(r"\b(?:ld|st|atom|red|cp)\.(?!param)", before)
    assert not re.findall(r"\bbra\b", before), "some threads would not wait"
    assert body.count(start) == (KERNELS[name].followed != "done")
    assert (start in behind.partition("bra")[0]) == (KERNELS[name].followed == "early")
    done = operations(assembled(name, architecture)[0])
    assert done.count(WAIT) == 1
    assert not MEMORY_OPERATIONS & set(done[: done.index(WAIT)])
    assert MEMORY_OPERATIONS & set(done)


@for_each
def test_nothing_is_spilled(name: str, architecture: tuple[int, int]) -> None:
    cubin, log = assembled(name, architecture)
    assert cubin[:4] == b"\x7fELF"
    used = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    assert len(used) == 1
    assert used[0] <= next((n for start, n in MORE_REGISTERS.items() if name.startswith(start)), MAX_REGISTERS)
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


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in OF_MODEL])
def test_offsets_are_products_of_64_bits(name: str) -> None:
    """An index into a pool can exceed 32 bits. The only narrow products are the remainders of narrow divisions.

    Of a kernel that knows its model the compiler narrows what it has proven to fit; its form that does not is among the others.
    """
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


COPY = """
.version 7.8
.target sm_{arch}
.address_size 64
.visible .entry copy(.param .u64 to, .param .u64 from)
{{
    .reg .b64 %rd<6>;
    .reg .b32 %r<2>;
    .reg .b16 %h<2>;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd2, [from];
    ld.global.{kind} {value}, [%rd2];
    st.global.{kind} [%rd1], {value};
    ret;
}}
"""


@pytest.mark.parametrize(
    ("kind", "value", "bits"),
    [("u8", "%h1", 8), ("u16", "%h1", 16), ("u32", "%r1", 32), ("u64", "%rd3", 64), ("v2.u64", "{%rd3, %rd4}", 128)],
)
def test_widths_are_read_from_machine_code(kind: str, value: str, bits: int) -> None:
    cubin, _ = ptx_to_cubin(COPY.format(arch=90, kind=kind, value=value), (9, 0))
    assert accesses(cubin) == {f"LDG.{bits}": 1, f"STG.{bits}": 1}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("architecture", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
def test_data_move_by_16_bytes(name: str, architecture: tuple[int, int]) -> None:
    """K and V by 128-bit accesses in machine code, eight float8 by 64; the rest are slots, pairs and scales."""
    kernel, wanted = WIDE[name]
    cubin, _ = ptx_to_cubin(compile_ptx(kernel, architecture), architecture)
    assert set(accesses(cubin)) == wanted


@pytest.mark.parametrize("name", ["bfloat16 write", "float8 write"])
def test_loads_wait_for_no_branch(name: str) -> None:
    """K and V are asked for before the first branch that depends on a slot."""
    ptx = compile_ptx(WIDE[name][0], (9, 0))
    loads = [m.start() for m in re.finditer(r"ld\.global\.v2\.u64", ptx)]
    stores = [m.start() for m in re.finditer(r"st\.global", ptx)]
    assert len(loads) == 2
    assert max(loads) < min(stores)
    assert not re.search(r"\bbra\b", ptx[loads[0] : loads[-1]])


def test_float8_is_converted_by_instructions_that_have_them() -> None:
    kernel = WIDE["float8 write"][0]
    assert "cvt.rn.satfinite.e4m3x2.f32" in compile_ptx(kernel, (9, 0))
    assert "cvt.rn.satfinite" not in compile_ptx(kernel, (8, 0))


def test_what_is_rotated_is_converted_without_a_branch() -> None:
    kernel = WIDE["rotation"][0]
    assert "set.nan.u32.bf16x2" in compile_ptx(kernel, (9, 0))
    assert "set.nan.u32.bf16x2" not in compile_ptx(kernel, (8, 0))


@pytest.mark.parametrize("name", ["rotation", "norm and rotation"])
def test_products_and_sums_stay_apart(name: str) -> None:
    """No product is fused with a sum: the host would not round as the GPU does."""
    ptx = compile_ptx(WIDE[name][0], (9, 0))
    assert "mul.rn.f32" in ptx
    assert "fma." not in ptx
    assert not re.search(r"\bmul\.f32", ptx)


def test_the_rotation_leaves_registers_for_six_blocks() -> None:
    _, log = assembled(WIDE["rotation"][0].name, (9, 0))
    assert int(re.findall(r"Used (\d+) registers", log)[0]) <= 80
