"""The import rules of the package, read from the syntax tree of each file.

A *room* is a module or a folder directly under numba_kv. Rooms of one tier do not import each other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: From the ground up: a room imports only rooms of the tiers before its own.
TIERS = (
    ("errors",),
    ("dtypes", "geometry"),
    ("config",),
    ("plan",),
    ("plan_deployment",),
    ("ledger",),
    ("device",),
    ("kernels",),
    ("cache", "weights"),
    ("context",),
    ("shared_resources",),
    ("batch",),
    ("bindings",),
    ("adapters",),
    ("replay",),
    ("cli",),
    ("__main__",),
)
RANK = {room: rank for rank, rooms in enumerate(TIERS) for room in rooms}

#: Outside package -> the rooms that may import it, anywhere in their files.
ALLOWED = {
    "numba": {"kernels"},
    "numba_cuda": {"kernels"},
    "llvmlite": {"kernels"},
    "cuda": {"device", "kernels"},
    "torch": {"adapters"},
    "cupy": {"adapters"},
    "jax": {"adapters"},
    "transformers": {"adapters"},
    "flashinfer": {"adapters"},
    "flash_attn": {"adapters"},
    "vllm": {"adapters"},
    "sglang": {"adapters"},
    "rich": {"replay", "cli"},
    "matplotlib": {"replay", "cli"},
}
#: Rooms that a program may import before it wants an array.
NO_ARRAYS_AT_IMPORT = {"errors", "dtypes", "geometry", "config", "plan", "plan_deployment"}
ARRAY_PACKAGES = {"numpy", "ml_dtypes"}


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, the line, and whether importing the file runs it."""

    name: str
    line: int
    at_import: bool
    for_types: bool


def imports_of(path: Path, package: Path) -> Iterator[Import]:
    """Yield every import of a file, with relative ones resolved and constant dynamic ones included."""
    inside = ("numba_kv", *path.relative_to(package).with_suffix("").parts)
    parent = inside[:-1]  # of a module and of an __init__ alike, since "__init__" is dropped here
    yield from _walk(ast.parse(path.read_text(encoding="utf-8")), parent, at_import=True, for_types=False)


def _walk(node: ast.AST, parent: tuple[str, ...], *, at_import: bool, for_types: bool) -> Iterator[Import]:
    for name in _names(node, parent):
        yield Import(name, node.lineno, at_import and not for_types, for_types)  # type: ignore[attr-defined]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        at_import = False
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for child in node.body:
            yield from _walk(child, parent, at_import=at_import, for_types=True)
        for child in node.orelse:
            yield from _walk(child, parent, at_import=at_import, for_types=for_types)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, parent, at_import=at_import, for_types=for_types)


def _names(node: ast.AST, parent: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = [*parent[: len(parent) - node.level + 1]] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        if module == "numba_kv":  # from the package itself: a submodule or a name of its public face
            yield from (f"numba_kv.{alias.name}" for alias in node.names)
        else:
            yield module
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        first = node.args[0] if node.args else None
        if called in ("import_module", "__import__") and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def _is_type_checking(test: ast.expr) -> bool:
    return (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)) == "TYPE_CHECKING"


def violations(package: Path) -> list[str]:
    """Return one line for every import of the package that breaks a rule."""
    found = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package)
        room = where.parts[0].removesuffix(".py")
        if where == Path("__init__.py"):
            broken = _broken_by_face
        elif room in RANK:
            broken = _broken_by_room
        else:
            found.append(f"{where}: {room} is a room without a tier")
            continue
        for item in imports_of(path, package):
            reason = broken(room, item)
            if reason:
                found.append(f"{where}:{item.line}: {reason}")
    return found


def _broken_by_face(room: str, item: Import) -> str | None:
    """The package's face imports nothing when it is imported, except inside its lazy look-up."""
    return f"importing numba_kv would import {item.name}" if item.at_import else None


def _broken_by_room(room: str, item: Import) -> str | None:
    top, *rest = item.name.split(".")
    if top == "numba_kv":
        other = rest[0] if rest else ""
        if other in (room, "__version__"):
            return None
        if other not in RANK:
            return f"{room} imports {item.name}: only users import the public face"
        if RANK[other] >= RANK[room]:
            return f"{room} imports {other}, which is not below it"
        return None
    if room not in ALLOWED.get(top, {room}):
        return f"{room} imports {top}, which only {', '.join(sorted(ALLOWED[top]))} may"
    if top in ARRAY_PACKAGES and room in NO_ARRAYS_AT_IMPORT and item.at_import:
        return f"importing {room} would import {top}"
    return None
