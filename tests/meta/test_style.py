"""House rules that no linter knows or that must not depend on a comment: sizes, docstrings, no assert, no print."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import numba_kv

PACKAGE = Path(numba_kv.__file__).parent
MAX_LINES = 500
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
#: The command line talks to people, through a rich console.
MAY_PRINT = {"cli"}


def complaints(package: Path) -> list[str]:
    """Return one line for every broken rule."""
    found = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > MAX_LINES:
            found.append(f"{where}: {lines} lines, at most {MAX_LINES}")
        tree = ast.parse(text)
        found += [f"{where}:{line}: {reason}" for line, reason in _broken(tree, where.parts[0].removesuffix(".py"))]
    return found


def _broken(tree: ast.Module, room: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert vanishes under -O: raise a typed error"
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print" and room not in MAY_PRINT:
            yield node.lineno, "print in a library"
    yield from _undocumented(tree, "module", 1)


def _undocumented(node: ast.Module | Definition, name: str, line: int) -> Iterator[tuple[int, str]]:
    if not ast.get_docstring(node):
        yield line, f"{name} has no docstring"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return  # what is inside a function is not public
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_") and not _is_repeated(child):
            yield from _undocumented(child, child.name, child.lineno)


def _is_repeated(node: Definition) -> bool:
    """Whether a definition is an overload or the setter of a property, which is documented once, at the other one."""
    names = {getattr(decorator, "attr", getattr(decorator, "id", "")) for decorator in node.decorator_list}
    return bool(names & {"overload", "setter", "deleter"})


def test_the_package_keeps_the_house_rules() -> None:
    assert complaints(PACKAGE) == []


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


PLANTED = [
    ("plan.py", '"""M."""\nassert True\n', "assert vanishes"),
    ("plan.py", '"""M."""\nprint("x")\n', "print in a library"),
    ("plan.py", "x = 1\n", "module has no docstring"),
    ("plan.py", '"""M."""\n\n\ndef f():\n    pass\n', "f has no docstring"),
    ("plan.py", '"""M."""\n\n\nclass A:\n    x = 1\n', "A has no docstring"),
    ("cache/table.py", '"""M."""\n\n\nclass A:\n    """A."""\n\n    def f(self):\n        pass\n', "f has no docstring"),
    ("plan.py", '"""M."""\n' + "x = 1\n" * MAX_LINES, "501 lines"),
]


@pytest.mark.parametrize(("file", "source", "complaint"), PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    found = complaints(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


def test_private_things_need_no_docstring(tmp_path: Path) -> None:
    (tmp_path / "cli.py").write_text('"""M."""\n\n\ndef _f():\n    print()\n\n\nclass _A:\n    def g(self):\n        pass\n')
    assert complaints(tmp_path) == []
