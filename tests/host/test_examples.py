"""Every program in examples/ runs, says what it shows, and is named in the README."""

from __future__ import annotations

import contextlib
import re
import runpy
from pathlib import Path

import pytest

from numba_kv.device.target import simulator_is_on

ROOT = Path(__file__).resolve().parents[2]
#: Program -> packages that it cannot do without, and what it says at the end.
EXAMPLES = {
    "decode_loop.py": ((), "the same tokens as without caches"),
    "flash_attention.py": ((), "skipped: |away from numba_kv's own attention"),
    "flashinfer_wrappers.py": ((), "skipped: |away from numba_kv's own attention"),
    "prefix_and_lora.py": ((), "switched to None: .* begins with 0.000, 0.000"),
    "torch_cuda_graph.py": (("torch",), "at most 4 pages of the sliding layer; as step by step"),
    "transformers_generate.py": (("torch", "transformers"), "AuditReport"),
    "transformers_serve.py": (("torch", "transformers"), "AuditReport"),
}


def test_every_program_is_here_and_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted(EXAMPLES)
    assert [name for name in EXAMPLES if f"`examples/{name}`" not in readme] == []


@pytest.mark.skipif(simulator_is_on(), reason="the examples run hundreds of steps, which takes minutes in the simulator")
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_it_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    packages, said = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed (pip install 'numba-kv[interop]')")
    monkeypatch.setattr("sys.argv", [name])
    with contextlib.suppress(SystemExit):  # how a program ends that cannot show anything here, after it said so
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert re.search(said, capsys.readouterr().out)
