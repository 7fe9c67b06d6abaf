"""The examples with transformers run as they stand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.helpers.transformers_models import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("name", ["transformers_generate.py", "transformers_serve.py"])
def test_an_example(name: str, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the host, where they leave their model."""
    if target == "sim":
        pytest.skip("the simulator takes too long")
    torch.manual_seed(0)
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert "AuditReport" in capsys.readouterr().out.splitlines()[-1]
