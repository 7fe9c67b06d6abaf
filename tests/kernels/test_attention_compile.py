"""attend compiles to machine code without a GPU: memory near the lanes, words of K and V, nothing spilled."""

from __future__ import annotations

import re
from typing import Any

import pytest

from numba_kv.device.target import simulator_is_on

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: nothing can be compiled for a GPU")
pytest.importorskip("cuda.core", reason="cuda-python is not installed: nothing can be assembled for a GPU")
if simulator_is_on():
    pytest.skip("Numba's simulator replaces its compiler", allow_module_level=True)

from numba_kv.device.module import ptx_to_cubin
from numba_kv.kernels.attention import attend
from numba_kv.kernels.bits import BFLOAT16, FLOAT8, FLOAT16
from numba_kv.kernels.on_cuda import compile_ptx

BASE = {"kind": BFLOAT16, "wide": 1, "is_dense": 0, "size": 128}
#: Changes of the form, architecture, registers, and the load of a unit of four channels. Blocks have 128 threads.
FORMS: list[tuple[dict[str, Any], tuple[int, int], int, str]] = [
    ({}, (8, 0), 255, "ld.global.u64"),
    ({}, (9, 0), 128, "ld.global.u64"),
    ({}, (10, 0), 128, "ld.global.u64"),
    ({}, (12, 0), 128, "ld.global.u64"),
    ({"is_dense": 1}, (9, 0), 128, "ld.global.u64"),
    ({"kind": FLOAT8}, (9, 0), 128, "ld.global.u32"),
    ({"kind": FLOAT16, "wide": 0, "size": 7}, (9, 0), 128, "ld.global.u8"),
]


@pytest.mark.parametrize(("changes", "architecture", "registers", "load"), FORMS)
def test_machine_code(changes: dict[str, Any], architecture: tuple[int, int], registers: int, load: str) -> None:
    ptx = compile_ptx(attend.fixed(**{**BASE, **changes}), architecture)
    accesses = re.findall(r"\b((?:ld|st|atom|red)(?:\.[a-z]\w*)+)", ptx)
    assert {access.split(".")[1] for access in accesses} == {"global", "param", "shared"}
    assert load in accesses
    assert "call" not in ptx
    assert not re.findall(r"\bmad\.lo\.[su]32", ptx), "an offset of 32 bits"
    _, log = ptx_to_cubin(ptx, architecture)
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log) == [("0", "0", "0")]
    assert int(re.findall(r"Used (\d+) registers", log)[0]) <= registers
