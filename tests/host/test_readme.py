"""The README stays true: its examples run and the files it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from numba_kv.device.target import simulator_is_on

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def python_blocks() -> list[tuple[int, str]]:
    """Return each fenced Python block and the line on which its code starts."""
    text = README.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)) + 1, block[1]) for block in found]


def named_files() -> set[str]:
    """Return the files and folders of the repository that the README names in backticks."""
    text = README.read_text(encoding="utf-8")
    return set(re.findall(r"`((?:numba_kv|tests|tools)/[\w./-]*|LICENSE)`", text))


def test_there_is_an_example() -> None:
    assert python_blocks()


@pytest.mark.skipif(simulator_is_on(), reason="the examples run hundreds of steps, which takes minutes in the simulator")
@pytest.mark.parametrize(("line", "code"), [pytest.param(*block, id=f"line{block[0]}") for block in python_blocks()])
def test_the_examples_run(line: int, code: str) -> None:
    # Blank lines before the code, so that a traceback shows the line of the README.
    exec(compile("\n" * (line - 1) + code, str(README), "exec"), {"__name__": "readme"})


def test_the_files_that_are_named_exist() -> None:
    names = named_files()
    assert len(names) > 20
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []
