"""Frameworks are there where a run promises them, and are asked for by name where they are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif("NUMBA_KV_FRAMEWORKS" not in os.environ, reason="this run promises no frameworks (tools/test --frameworks)")
def test_promised_frameworks_are_there() -> None:
    import torch
    import transformers

    assert torch.__version__
    assert transformers.__version__


@pytest.mark.parametrize("module", ["transformers", "transformers_decoder", "transformers_packed"])
@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_adapters_say_what_is_missing(tmp_path: Path, missing: str, module: str) -> None:
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('it is not there', name={missing!r})\n")
    if missing == "transformers":
        (tmp_path / "torch.py").write_text("")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", f"import numba_kv.adapters.{module}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1
    assert f"need {missing}: pip install 'numba-kv[interop]'" in done.stderr
