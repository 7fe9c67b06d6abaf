"""Which target is chosen, and what a forced one that cannot work says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

import numba_kv
from numba_kv.device.device import create_device
from numba_kv.device.target import TARGETS, cuda_problem, resolve_target, simulator_is_on
from numba_kv.errors import InputError, TargetError

MODULE = sys.modules["numba_kv.device.target"]  # as an attribute of the room, `target` is the function


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Neither variable is set."""
    monkeypatch.delenv("NUMBA_KV_TARGET", raising=False)
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    return monkeypatch


def without_cuda(monkeypatch: pytest.MonkeyPatch, problem: str | None = "there is no driver") -> None:
    monkeypatch.setattr(MODULE, "cuda_problem", lambda: problem)


def test_the_best_target_is_the_default(environment: pytest.MonkeyPatch) -> None:
    without_cuda(environment, None)
    assert resolve_target() == "cuda"
    without_cuda(environment)
    assert resolve_target() == "cpu"
    environment.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert resolve_target() == "sim"


@pytest.mark.parametrize("value", ["", "0", "false", "true", "yes"])
def test_what_is_not_a_number_does_not_switch_the_simulator_on(environment: pytest.MonkeyPatch, value: str) -> None:
    environment.setenv("NUMBA_ENABLE_CUDASIM", value)  # Numba ignores it too
    assert not simulator_is_on()


def test_the_variable_forces_a_target(environment: pytest.MonkeyPatch) -> None:
    without_cuda(environment, None)
    environment.setenv("NUMBA_KV_TARGET", "cpu")
    assert resolve_target() == numba_kv.target() == "cpu"
    environment.setenv("NUMBA_KV_TARGET", "")
    assert resolve_target() == "cuda"


def test_an_argument_wins_over_the_variable(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("NUMBA_KV_TARGET", "cuda")
    assert resolve_target("cpu") == "cpu"


@pytest.mark.parametrize("name", ["gpu", "CUDA", 3, ["cpu"]])
def test_unknown_targets_are_refused(environment: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(TargetError, match="target: .* is not one of cuda, cpu, sim"):
        resolve_target(name)
    if isinstance(name, str):
        environment.setenv("NUMBA_KV_TARGET", name)
        with pytest.raises(TargetError, match=f"NUMBA_KV_TARGET: '{name}' is not one of"):
            resolve_target()


def test_a_forced_simulator_needs_its_variable(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="'sim' needs NUMBA_ENABLE_CUDASIM=1 in the environment before Python starts"):
        resolve_target("sim")
    environment.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert resolve_target("sim") == "sim"


def test_cuda_excludes_the_simulator(environment: pytest.MonkeyPatch) -> None:
    without_cuda(environment, None)
    environment.setenv("NUMBA_ENABLE_CUDASIM", "1")
    with pytest.raises(TargetError, match="'cuda' cannot work while NUMBA_ENABLE_CUDASIM is set; unset it"):
        resolve_target("cuda")


def test_a_forced_cuda_says_what_is_missing(environment: pytest.MonkeyPatch) -> None:
    without_cuda(environment)
    with pytest.raises(TargetError, match="target: 'cuda' cannot work here: there is no driver"):
        create_device("cuda")


def test_a_process_that_forces_what_cannot_work_is_told_so() -> None:
    code = "import numba_kv\ntry:\n    numba_kv.target()\nexcept numba_kv.TargetError as error:\n    print(error)"
    found = {}
    for name in ("sim", "tpu"):
        environment = {**os.environ, "NUMBA_KV_TARGET": name, "NUMBA_ENABLE_CUDASIM": "0"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
        found[name] = done.stdout
    assert "NUMBA_KV_TARGET: 'sim' needs NUMBA_ENABLE_CUDASIM=1" in found["sim"]
    assert "NUMBA_KV_TARGET: 'tpu' is not one of cuda, cpu, sim" in found["tpu"]


# -- what keeps cuda from working: every answer says what to do


@pytest.fixture
def fresh() -> Iterator[None]:
    """What was found out about this machine is asked again, before and after."""
    cuda_problem.cache_clear()
    yield
    cuda_problem.cache_clear()


class Code(int):
    """A driver status: its number and its name."""

    name = "CUDA_ERROR_SOMETHING"


def driver(monkeypatch: pytest.MonkeyPatch, *, init: int = 0, count: int = 1, version: int = 13000) -> None:
    bindings = pytest.importorskip("cuda.bindings", reason="cuda-python is not installed")
    fake = SimpleNamespace(
        CUDA_VERSION=13000,
        cuInit=lambda flags: (Code(init),),
        cuDeviceGetCount=lambda: (Code(0), count),
        cuDriverGetVersion=lambda: (Code(0), version),
    )
    monkeypatch.setattr(bindings, "driver", fake, raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("cuda", r"cuda-python is not installed \(pip install 'numba-kv\[cu13\]' or 'numba-kv\[cu12\]'"),
        ("cuda.core", "cuda-python is not installed"),
        ("numba_cuda", "numba-cuda is not installed"),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, missing: str, message: str) -> None:
    monkeypatch.setattr(MODULE, "find_spec", lambda name: None if name == missing else object())
    problem = cuda_problem()
    assert problem is not None
    assert re.search(message, problem)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"init": 100}, "the NVIDIA driver does not start (CUDA_ERROR_SOMETHING); check it with nvidia-smi"),
        ({"count": 0}, "the NVIDIA driver reports no device; check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        ({"version": 12080}, "pip install 'numba-kv[cu12]' or update the driver"),
    ],
)
def test_a_driver_that_does_not_serve_is_described(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, int], message: str
) -> None:
    driver(monkeypatch, **state)
    problem = cuda_problem()
    assert problem is not None
    assert message in problem


@pytest.mark.usefixtures("fresh")
def test_a_missing_driver_library_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch)

    def fail(flags: int) -> None:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(sys.modules["cuda.bindings.driver"], "cuInit", fail)
    problem = cuda_problem()
    assert problem is not None
    assert "install the driver of the GPU (libcuda.so.1: " in problem


@pytest.mark.usefixtures("fresh")
def test_a_driver_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch)
    assert cuda_problem() is None


# -- devices


def test_devices_are_of_their_target(target: str) -> None:
    device = create_device()
    assert device.target == target
    assert device.target in TARGETS
    assert device.ordinal == 0
    assert create_device("cpu").target == "cpu"


@pytest.mark.parametrize("ordinal", [-1, 1.0, True, "0", None])
def test_impossible_device_numbers_are_refused(ordinal: object) -> None:
    with pytest.raises(InputError, match="is not a device number"):
        create_device("cpu", ordinal)  # type: ignore[arg-type]


def test_host_targets_have_one_device() -> None:
    with pytest.raises(InputError, match="has only device 0, got 1"):
        create_device("cpu", 1)


@pytest.mark.gpu
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="device: 4096 is not one of the"):
        create_device("cuda", 4096)


@pytest.mark.parametrize("name", [np.array([1, 1]), 5, ["cpu"], b"cpu"])
def test_a_target_is_a_name(name: object) -> None:
    with pytest.raises(TargetError, match="is not one of cuda, cpu, sim"):
        resolve_target(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["'cpu'", "None"])
def test_the_cpu_target_needs_numba_s_compiler(name: str) -> None:
    code = (
        "from numba_kv.device.target import cuda_problem, resolve_target\n"
        "from numba_kv.errors import TargetError\n"
        "try:\n"
        f"    print(resolve_target({name}))\n"
        "except TargetError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1", "NUMBA_ENABLE_CUDASIM": "0"}
    environment.pop("NUMBA_KV_TARGET", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "'cpu' cannot work while NUMBA_DISABLE_JIT is set" in done.stdout or (name == "None" and done.stdout == "cuda\n")
