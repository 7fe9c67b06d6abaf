"""Replays compile to machine code without a GPU: wide accesses of states, memory near the lanes, nothing spilled."""

from __future__ import annotations

import re

import pytest

from numba_kv.device.target import simulator_is_on
from numba_kv.kernels.bits import BFLOAT16, FLOAT16, FLOAT32
from numba_kv.kernels.jit import Kernel
from numba_kv.kernels.replay_delta_net import replay_delta_net
from numba_kv.kernels.replay_mamba import replay_mamba

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: nothing can be compiled for a GPU")
pytest.importorskip("cuda.core", reason="cuda-python is not installed: nothing can be assembled for a GPU")
if simulator_is_on():
    pytest.skip("Numba's simulator replaces its compiler", allow_module_level=True)

from numba_kv.device.module import ptx_to_cubin
from numba_kv.kernels.on_cuda import compile_ptx


def mamba(kind: int) -> Kernel:
    return replay_mamba.fixed(kind=kind, layers=48, heads=128, dim=64, groups=8, size=128, part_rows=64)


def net(kind: int, value_kind: int, columns: int) -> Kernel:
    sizes = {"layers": 48, "heads": 32, "key_heads": 16, "dim": 128, "size": 128, "part_columns": columns}
    return replay_delta_net.fixed(kind=kind, value_kind=value_kind, **sizes)


#: A kernel, where it is compiled, and what its PTX has.
FORMS = {
    "mamba bfloat16": (mamba(BFLOAT16), (9, 0), "ld.global.u64", "st.global.[bu]64", "cvt.rn.bf16x2.f32"),
    "mamba float16": (mamba(FLOAT16), (8, 0), "ld.global.u64", "st.global.[bu]64", "cvt.rn.f16x2.f32"),
    "mamba float32": (mamba(FLOAT32), (12, 0), "ld.global.v2.u64", "st.global.v2.u64", "mul.rn.f32"),
    "net float32": (net(FLOAT32, BFLOAT16, 64), (9, 0), "ld.shared.v4", "st.shared.v4", "mul.rn.f32"),
    "net bfloat16": (net(BFLOAT16, FLOAT32, 64), (10, 0), "ld.shared.v4", "st.shared.v4", "bf16x2"),
}


@pytest.mark.parametrize("name", FORMS)
def test_replays_compile(name: str) -> None:
    kernel, architecture, *instructions = FORMS[name]
    ptx = compile_ptx(kernel, architecture)
    assert [text for text in instructions if re.search(text, ptx) is None] == []
    assert "fma.rn" not in ptx  # sums and products are rounded one by one
    cubin, log = ptx_to_cubin(ptx, architecture)
    assert cubin[:4] == b"\x7fELF"
    assert [int(n) for n in re.findall(r"Used (\d+) registers", log)][0] <= 96
    assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log) == [("0", "0", "0")]
