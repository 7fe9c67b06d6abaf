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


MODULES = ["transformers", "transformers_decoder", "transformers_packed"]


def imported(module: str, path: Path) -> subprocess.CompletedProcess[str]:
    """Import an adapter in a process that finds the modules in `path` before all others."""
    found = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", f"import numba_kv.adapters.{module}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": found})


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_adapters_say_what_is_missing(tmp_path: Path, missing: str, module: str) -> None:
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('it is not there', name={missing!r})\n")
    if missing == "transformers":
        (tmp_path / "torch.py").write_text("")
    done = imported(module, tmp_path)
    assert done.returncode == 1
    assert f"need {missing}: pip install 'numba-kv[interop]'" in done.stderr


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("version", ["4.57.1", "5.3.0.dev0", "5.23.0"])
def test_adapters_say_that_transformers_is_too_old(tmp_path: Path, version: str, module: str) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "transformers.py").write_text(f"__version__ = {version!r}\n")
    done = imported(module, tmp_path)
    assert done.returncode == 1
    wanted = f"InteropError: transformers {version} is installed; numba_kv.adapters need 5.24 or newer: pip install -U"
    assert wanted in done.stderr
    assert "During handling" not in done.stderr


@pytest.mark.parametrize("version", ["5.24.0.dev0", "5.100.0", "6.0.0rc1"])
def test_newer_ones_are_let_through(tmp_path: Path, version: str) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "transformers.py").write_text(f"__version__ = {version!r}\n")
    done = imported("frameworks", tmp_path)
    assert done.returncode == 0, done.stderr
