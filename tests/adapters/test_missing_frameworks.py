"""An adapter without its framework says which one it needs, and how it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_transformers_without_a_framework(tmp_path: Path, missing: str) -> None:
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('it is not there', name={missing!r})\n")
    if missing == "transformers":
        (tmp_path / "torch.py").write_text("")
    code = "import numba_kv.adapters.transformers"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert f"numba_kv.adapters.transformers needs {missing}: pip install 'numba-kv[interop]'" in done.stderr
