"""The tools: the choice of the environment, when it is installed anew, and what happens without a GPU."""

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("demo", "test", "gpu_check", "_environment.py")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return tools/_environment.py as a module, in a process that has no environment active."""
    spec = importlib.util.spec_from_file_location("_environment", ROOT / "tools" / "_environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    return module


def loaded(tool: str) -> ModuleType:
    """Return a tool without a suffix as a module."""
    loader = importlib.machinery.SourceFileLoader(tool, str(ROOT / "tools" / tool))
    spec = importlib.util.spec_from_loader(tool, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def fake_prefix(where: Path) -> Path:
    python = where / ("python.exe" if os.name == "nt" else "bin/python")
    python.parent.mkdir(parents=True)
    python.touch()
    return where


def facts(major: int, minor: int, prefix: str = "env") -> dict:
    return {"version": [major, minor], "prefix": prefix, "pip": "23.0.1", "project": None}


@pytest.mark.parametrize("name", TOOLS)
def test_an_old_python_can_read_the_tools(name: str) -> None:
    tree = ast.parse((ROOT / "tools" / name).read_text(encoding="utf-8"), feature_version=(3, 7))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert imported <= {*sys.stdlib_module_names, "_environment"}


@pytest.mark.parametrize("name", ["tools/demo", "tools/test", "tools/gpu_check", ".ci/run"])
@pytest.mark.skipif(os.name == "nt", reason="Windows has no executable bit")
def test_commands_are_executable(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
    assert (ROOT / name).read_text(encoding="utf-8").startswith("#!/usr/bin/env ")


def test_no_environment_is_active(environment: ModuleType) -> None:
    assert environment.active_python() is None


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_environment_that_the_shell_names_is_used(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    monkeypatch.setenv(variable, str(fake_prefix(tmp_path / "env")))
    assert Path(environment.active_python()).is_relative_to(tmp_path / "env")


def test_a_virtual_environment_comes_before_a_conda_one(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CONDA_PREFIX", str(fake_prefix(tmp_path / "conda")))
    monkeypatch.setenv("VIRTUAL_ENV", str(fake_prefix(tmp_path / "venv")))
    assert Path(environment.active_python()).is_relative_to(tmp_path / "venv")


def test_the_running_environment_comes_first(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setenv("VIRTUAL_ENV", str(fake_prefix(tmp_path / "venv")))
    assert environment.active_python() == sys.executable


def test_without_a_supported_python_the_error_says_what_to_install(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "probe", lambda python: facts(3, 8))
    with pytest.raises(environment.SetupError, match=r"3\.10 to 3\.13.*found 3\.8.*apt install"):
        environment.find_python()


def test_an_active_environment_with_an_old_python_is_refused(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CONDA_PREFIX", str(fake_prefix(tmp_path / "env")))
    monkeypatch.setattr(environment, "probe", lambda python: facts(3, 9))
    with pytest.raises(environment.SetupError, match=r"env has Python 3\.9; numba_kv needs 3\.10 to 3\.13"):
        environment.prepare(("viz",))


def test_a_system_without_venv_says_which_package_brings_it(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "find_python", lambda: "/usr/bin/python3")
    monkeypatch.setattr(environment.subprocess, "call", lambda command, cwd: 1)
    with pytest.raises(environment.SetupError, match="sudo apt install python3-venv"):
        environment.own_python()


class Installer:
    """Stand in for pip: count its calls in an environment that is only a folder."""

    def __init__(self, environment: ModuleType, monkeypatch: pytest.MonkeyPatch, prefix: Path) -> None:
        self.facts = facts(3, 11, str(prefix))
        self.commands: list[str] = []
        self.environment = environment
        monkeypatch.setattr(environment, "active_python", lambda: "python")
        monkeypatch.setattr(environment, "probe", lambda python: dict(self.facts))
        monkeypatch.setattr(environment, "_run", self.run)
        monkeypatch.setattr(environment, "_check_modules", lambda python, extras: None)

    def run(self, command: list[str], failure: str) -> None:
        self.commands.append(" ".join(command))
        self.facts["project"] = "0.1.0"

    def prepare(self, *extras: str) -> list[str]:
        self.commands.clear()
        self.environment.prepare(extras)
        return self.commands


@pytest.fixture
def installer(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installer:
    return Installer(environment, monkeypatch, tmp_path)


def test_a_second_call_installs_nothing(installer: Installer) -> None:
    assert [command.rsplit(" ", 1)[1] for command in installer.prepare("viz")] == [".[viz]"]
    assert installer.prepare("viz") == []


def test_further_extras_are_added_and_kept(installer: Installer) -> None:
    installer.prepare("viz")
    assert installer.prepare("test")[-1].endswith(".[test,viz]")
    assert installer.prepare("viz") == []


def test_a_changed_pyproject_is_installed_anew(installer: Installer, tmp_path: Path) -> None:
    installer.prepare("viz")
    stamp = tmp_path / installer.environment.STAMP
    content = json.loads(stamp.read_text())
    stamp.write_text(json.dumps({**content, "pyproject": "another"}))
    assert len(installer.prepare("viz")) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"root": "another checkout"}', "\x00"])
def test_a_damaged_or_foreign_stamp_is_not_believed(installer: Installer, tmp_path: Path, content: str) -> None:
    installer.prepare("viz")
    (tmp_path / installer.environment.STAMP).write_text(content)
    assert len(installer.prepare("viz")) == 1


def test_an_uninstalled_project_is_installed_anew(installer: Installer) -> None:
    installer.prepare("viz")
    installer.facts["project"] = None
    assert len(installer.prepare("viz")) == 1


def test_an_old_pip_is_upgraded_first(installer: Installer) -> None:
    installer.facts["pip"] = "21.2.3"
    assert [" --upgrade pip" in command for command in installer.prepare("viz")] == [True, False]


def test_a_missing_pip_is_made_first(installer: Installer) -> None:
    installer.facts["pip"] = None
    assert installer.prepare("viz")[0].endswith("-m ensurepip")


def test_what_conda_has_no_package_of_is_named_for_pip(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment.MODULES, "models", ("json", "gguf_of_nobody"))
    with pytest.raises(environment.SetupError, match="lacks gguf_of_nobody: `pip install gguf_of_nobody` brings"):
        environment._check_modules(sys.executable, ("models",))


def test_in_a_conda_environment_pip_adds_no_package(installer: Installer, tmp_path: Path) -> None:
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "conda-meta" / "numba-cuda-0.30.4-py312_0.json").touch()
    (command,) = installer.prepare("viz", "cu13")
    assert command.endswith("--no-deps --editable .")


def test_the_compilers_of_the_tests_exclude_cuda_12(environment: ModuleType) -> None:
    assert environment.merge_extras(("viz", "cu12"), []) == ["cu12", "viz"]
    assert environment.merge_extras(("viz", "cu12"), ["test"]) == ["test", "viz"]


def test_the_test_tool_explains_itself() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "test", "--help"], capture_output=True, text=True, check=True)
    assert "--fast" in done.stdout
    assert "--gpu" in done.stdout
    assert "--frameworks" in done.stdout
    assert "--models" in done.stdout


def test_real_models_are_a_run_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = loaded("test")
    options = argparse.Namespace(fast=False, gpu=False, models=True, frameworks=False)
    ((_, command, extra),) = tool.plan("python", options, ["-k", "padded"])
    assert command[3:] == ["-v", "-m", "model", "tests/adapters", "-k", "padded"]
    assert extra["NUMBA_KV_TARGET"] == "cpu"


@pytest.mark.parametrize(("frameworks", "switch"), [(True, "1"), (False, None)])
def test_promised_frameworks_have_to_be_there(monkeypatch: pytest.MonkeyPatch, frameworks: bool, switch: str | None) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    options = argparse.Namespace(fast=False, gpu=False, models=False, frameworks=frameworks)
    steps = {name: extra for name, _, extra in loaded("test").plan("python", options, [])}
    assert steps["pytest on cpu"].get("NUMBA_KV_FRAMEWORKS") == switch
    assert "NUMBA_KV_FRAMEWORKS" not in steps["pytest in the simulator"]


def test_extras_of_each_kind_of_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool, wanted = loaded("test"), []
    monkeypatch.setattr(tool._environment, "prepare", lambda extras: wanted.append(extras) or "python")
    monkeypatch.setattr(tool, "run_all", lambda steps: 0)
    for option in ([], ["--frameworks"], ["--models"]):
        monkeypatch.setattr(sys, "argv", ["tools/test", *option])
        assert tool.main() == 0
    assert wanted == [("test",), ("test", "frameworks"), ("test", "models")]


def test_ci_runs_the_frameworks() -> None:
    last = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert last == 'exec python3 tools/test --frameworks "$@"'


def test_missing_frameworks_are_named_with_their_versions(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environment.MODULES, "frameworks", ("json", "torch_of_nobody"))
    monkeypatch.setitem(environment.FRAMEWORKS, "torch_of_nobody", "torch_of_nobody==1.2")
    with pytest.raises(environment.SetupError, match=r"`pip install torch_of_nobody==1\.2` brings"):
        environment._check_modules(sys.executable, ("frameworks",))


CHECKPOINT = "tests/adapters/test_transformers_checkpoint.py"


@pytest.mark.parametrize("choice", [[], ["-m", "not gpu"], ["-k", "gather"]], ids=["none", "markers", "names"])
def test_real_models_are_left_out_of_other_runs(choice: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", CHECKPOINT, *choice]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 5, done.stdout
    assert "no tests collected (12 deselected)" in done.stdout


def test_real_models_that_are_not_installed_fail_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is planted')\n")  # found before an installed one
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "model", "-k", "512-paged", CHECKPOINT]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_KV_TARGET": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 1
    assert "torch is planted; `tools/test --models` installs what is missing" in done.stdout


NO_DEVICE = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize("command", [["test", "--gpu", "--no-install"], ["gpu_check", "--out", "never"]], ids=lambda c: c[0])
def test_without_a_gpu_the_tools_refuse_in_one_line(command: list[str], tmp_path: Path) -> None:
    tool, *arguments = command
    called = [sys.executable, ROOT / "tools" / tool, *arguments]
    done = subprocess.run(called, capture_output=True, text=True, check=False, env=NO_DEVICE, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"tools/{tool}: ")
    assert "no CUDA device is usable: " in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_the_project_is_no_gpu(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "does not run" in environment.cuda_problem(str(tmp_path / "python"))
    (tmp_path / "numba_kv.py").write_text("raise ImportError('made to fail')\n")  # found before an installed one
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    problem = environment.cuda_problem(sys.executable)
    assert "cannot import numba_kv" in problem
    assert "made to fail" in problem


def test_a_gpu_without_nvidia_smi_has_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    module = loaded("gpu_check")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module.gpu() == {}
    assert "python" in module.versions()
