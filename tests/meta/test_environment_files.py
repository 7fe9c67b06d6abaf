"""environment.yml, pyproject.toml and the tools name the same packages, limits and Pythons."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it where the standard library has none

ROOT = Path(__file__).resolve().parents[2]
#: PyPI name -> conda-forge name, where they differ.
CONDA_NAME = {"matplotlib": "matplotlib-base"}
#: What conda needs and pip has no word for: Python and pip themselves, and the choice of cu12 or cu13.
ONLY_CONDA = {"python", "pip", "cuda-version"}
REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[([^\]]*)\])?\s*([^;]*)")


def pypi_packages(project: dict, extras: tuple[str, ...]) -> dict[str, set[str]]:
    """Return name -> version limits of the base and of `extras`, with references to other extras of the project followed."""
    found: dict[str, set[str]] = {}

    def add(lines: list[str]) -> None:
        for line in lines:
            match = REQUIREMENT.match(line)
            assert match, line
            name, inner, limits = match.group(1), match.group(2) or "", match.group(3)
            if name == project["name"]:
                for extra in inner.split(","):
                    add(project["optional-dependencies"][extra.strip()])
            else:
                found.setdefault(name, set()).update(filter(None, limits.replace(" ", "").split(",")))

    add(project["dependencies"])
    for extra in extras:
        add(project["optional-dependencies"][extra])
    return found


def conda_packages(text: str) -> dict[str, set[str]]:
    """Return name -> version limits of the list under ``dependencies:``."""
    lines = text.split("\ndependencies:\n", 1)[1].splitlines()
    found = {}
    for line in lines:
        item = line.split("#")[0].strip()
        if not item:
            continue
        match = re.fullmatch(r"- ([a-z0-9_.-]+)\s*(.*)", item)
        assert match, f"not an item of a plain list: {line!r}"
        found[match.group(1)] = set(filter(None, match.group(2).replace(" ", "").split(",")))
    return found


def differences(project: dict, environment: str) -> list[str]:
    """Return one line for each package or limit that only one of the two files has."""
    conda = conda_packages(environment)
    pypi = {CONDA_NAME.get(name, name): limits for name, limits in pypi_packages(project, ("test", "viz")).items()}
    major, pypi["cuda-python"] = pypi["cuda-python"], set()  # cu13's limit, which conda states as cuda-version
    found = [f"only in pyproject.toml: {name}" for name in sorted(pypi.keys() - conda.keys())]
    found += [f"only in environment.yml: {name}" for name in sorted(conda.keys() - pypi.keys() - ONLY_CONDA)]
    for name in sorted(pypi.keys() & conda.keys()):
        if pypi[name] != conda[name]:
            found.append(f"{name}: pyproject.toml says {sorted(pypi[name])}, environment.yml {sorted(conda[name])}")
    if conda.get("python") != set(project["requires-python"].replace(" ", "").split(",")):
        found.append(f"python: environment.yml says {sorted(conda.get('python', ()))}")
    if {f"={limit.removeprefix('==').removesuffix('.*')}" for limit in major} != conda.get("cuda-version"):
        found.append(f"cuda-version: environment.yml says {sorted(conda.get('cuda-version', ()))}")
    return found


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def environment() -> str:
    return (ROOT / "environment.yml").read_text(encoding="utf-8")


def test_the_two_files_are_in_step(project: dict, environment: str) -> None:
    assert differences(project, environment) == []


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("  - rich\n", "", "only in pyproject.toml: rich"),
        ("  - rich\n", "  - rich\n  - pandas\n", "only in environment.yml: pandas"),
        ("numpy <2.5", "numpy", "numpy: pyproject.toml says ['<2.5'], environment.yml []"),
        ("numba-cuda >=0.30.1,<0.31", "numba-cuda >=0.29,<0.31", "numba-cuda: "),
        ("python >=3.10,<3.14", "python >=3.11,<3.14", "python: "),
        ("cuda-version =13", "cuda-version =12", "cuda-version: "),
    ],
)
def test_a_planted_difference_is_found(project: dict, environment: str, old: str, new: str, difference: str) -> None:
    assert old in environment
    found = differences(project, environment.replace(old, new))
    assert len(found) == 1
    assert found[0].startswith(difference)


def test_cuda_packages_are_left_out_on_a_mac(project: dict) -> None:
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    cuda = [line for line in lines if line.startswith(("numba-cuda", "cuda-"))]
    assert len(cuda) >= 6
    assert all(line.endswith("; sys_platform != 'darwin'") for line in cuda)


def test_the_tools_name_the_versions_of_the_frameworks(project: dict) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import _environment
    finally:
        sys.path.pop(0)
    lines = project["optional-dependencies"]["frameworks"]
    pinned = [line for line in lines if not line.startswith(("numba-kv", "jax"))]  # not every Python has a JAX
    assert sorted(_environment.FRAMEWORKS.values()) == sorted(pinned)
    assert tuple(_environment.FRAMEWORKS) == _environment.MODULES["frameworks"]


def test_the_base_has_no_framework(project: dict) -> None:
    numeric, cuda = {"numba", "numpy", "ml_dtypes", "safetensors", "rich"}, {"numba-cuda", "cuda-python", "cuda-core"}
    assert pypi_packages(project, ()).keys() == numeric | cuda


def test_the_tools_accept_the_pythons_of_the_project(project: dict) -> None:
    tree = ast.parse((ROOT / "tools" / "_environment.py").read_text(encoding="utf-8"))
    assignments = [node for node in tree.body if isinstance(node, ast.Assign)]
    (limits,) = [node.value for node in assignments if "OLDEST, NEWEST" in ast.unparse(node.targets[0])]
    oldest, newest = ast.literal_eval(limits)
    assert project["requires-python"] == f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    named = {line.rsplit("::", 1)[1].strip() for line in project["classifiers"] if "Python :: 3." in line}
    assert named == {f"3.{minor}" for minor in range(oldest[1], newest[1] + 1)}
