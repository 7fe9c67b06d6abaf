"""The examples with transformers run as they stand, and their tool says what it cannot do."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.helpers.transformers_models import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["transformers_generate.py", "transformers_serve.py"])
def test_an_example(name: str, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the host, where they leave their model."""
    if target == "sim":
        pytest.skip("the simulator takes too long")
    torch.manual_seed(0)
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    out = capsys.readouterr().out
    assert "AuditReport" in out
    assert "the same tokens as with transformers' own cache" in out or out.count(" as by generate") == 5
    assert "not as by" not in out


@pytest.mark.parametrize("tokens", ["1", "0"])
def test_a_check_without_a_step_to_time_is_refused(
    tokens: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["transformers_check", "--tokens", tokens])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(ROOT / "tools" / "transformers_check"), run_name="__main__")
    assert f"argument --tokens: {tokens} is less than 2" in capsys.readouterr().err
