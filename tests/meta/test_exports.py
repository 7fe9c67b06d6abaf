"""The public names: one table, the same for importing, for listing and for type checkers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import numba_kv
from numba_kv import errors

NAMES = sorted(set(numba_kv.__all__) - {"__version__"})


def test_all_is_the_table() -> None:
    assert set(numba_kv.__all__) == {"__version__", *numba_kv._EXPORTS}
    assert len(numba_kv.__all__) == len(set(numba_kv.__all__))
    assert sum(map(len, numba_kv._MODULES.values())) == len(numba_kv._EXPORTS)


def test_every_exception_is_public() -> None:
    assert set(errors.__all__) == set(numba_kv._MODULES["numba_kv.errors"])
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == set(errors.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_importable(name: str) -> None:
    value = getattr(numba_kv, name)
    assert value is getattr(sys.modules[numba_kv._EXPORTS[name]], name)
    assert getattr(value, "__doc__", None)


def test_dir_lists_every_public_name() -> None:
    assert set(numba_kv.__all__) <= set(dir(numba_kv))


def test_star_import_brings_every_public_name() -> None:
    code = "from numba_kv import *; import numba_kv; print(set(numba_kv.__all__) - set(globals()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KVPageTabel'"):
        numba_kv.KVPageTabel  # noqa: B018


def test_type_checkers_see_the_same_table() -> None:
    tree = ast.parse(Path(numba_kv.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "only `X as X` is an export to a type checker"
            seen[alias.name] = node.module
    assert seen == numba_kv._EXPORTS


def test_the_version_is_that_of_the_installed_project() -> None:
    from importlib import metadata

    try:
        installed = metadata.version("numba-kv")
    except metadata.PackageNotFoundError:
        pytest.skip("numba-kv is run from its source folder without being installed")
    assert installed == numba_kv.__version__
