"""Which target the kernels run on.

`cuda` where a driver and a device are, `cpu` otherwise, `sim` when Numba's CUDA simulator is switched on. The choice is a
property of each `SharedResources`; this file only says what this machine can do.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec

from numba_kv.errors import TargetError

__all__ = ["TARGETS", "cuda_problem", "resolve_target", "simulator_is_on", "target"]

TARGETS = ("cuda", "cpu", "sim")


def simulator_is_on() -> bool:
    """Return whether Numba's CUDA simulator is switched on for this process."""
    return _is_set("NUMBA_ENABLE_CUDASIM")


def _compiler_is_off() -> bool:
    return _is_set("NUMBA_DISABLE_JIT")


def _is_set(variable: str) -> bool:
    try:  # as Numba reads it: what is not a number switches nothing on
        return int(os.environ.get(variable, "0")) != 0
    except ValueError:
        return False


@lru_cache(maxsize=1)
def cuda_problem() -> str | None:
    """Return what keeps the `cuda` target from working here and how to get it, or None if it works."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None or find_spec("cuda.core") is None:
        return "cuda-python is not installed (pip install 'numba-kv[cu13]' or 'numba-kv[cu12]', to match the driver)"
    if find_spec("numba_cuda") is None:
        return "numba-cuda is not installed (pip install 'numba-kv[cu13]' or 'numba-kv[cu12]', to match the driver)"
    try:
        from cuda.bindings import driver

        status = driver.cuInit(0)[0]
        count_status, count = driver.cuDeviceGetCount() if not int(status) else (status, 0)
    except (ImportError, RuntimeError, OSError) as error:
        return f"the NVIDIA driver library cannot be loaded; install the driver of the GPU ({error})"
    if int(status):
        return f"the NVIDIA driver does not start ({status.name}); check it with nvidia-smi"
    version_status, version = driver.cuDriverGetVersion()
    bindings = int(driver.CUDA_VERSION)
    if not int(version_status) and version // 1000 < bindings // 1000:
        return (
            f"the driver supports CUDA {version // 1000}, the installed cuda-python is for CUDA {bindings // 1000}; "
            f"pip install 'numba-kv[cu{version // 1000}]' or update the driver"
        )
    if int(count_status) or count < 1:
        return "the NVIDIA driver reports no device; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def resolve_target(name: str | None = None) -> str:
    """Return the target to use: `name`, else `NUMBA_KV_TARGET`, else the best that works here.

    Raises
    ------
    TargetError
        If the wanted target is unknown or cannot work, with what is missing and how to get it.
    """
    source = "target"
    if name is None:
        name, source = os.environ.get("NUMBA_KV_TARGET") or None, "NUMBA_KV_TARGET"
    if name is None:
        if simulator_is_on():
            return "sim"
        if not cuda_problem():
            return "cuda"
        name = "cpu"
    if not isinstance(name, str) or name not in TARGETS:
        raise TargetError(f"{source}: {name!r} is not one of {', '.join(TARGETS)}")
    if name == "sim" and not simulator_is_on():
        raise TargetError(f"{source}: 'sim' needs NUMBA_ENABLE_CUDASIM=1 in the environment before Python starts")
    if name == "cpu" and _compiler_is_off():
        raise TargetError(f"{source}: 'cpu' cannot work while NUMBA_DISABLE_JIT is set; unset it and start again")
    if name == "cuda":
        if simulator_is_on():
            raise TargetError(f"{source}: 'cuda' cannot work while NUMBA_ENABLE_CUDASIM is set; unset it and start again")
        problem = cuda_problem()
        if problem:
            raise TargetError(f"{source}: 'cuda' cannot work here: {problem}")
    return name


def target() -> str:
    """Return the default target of this process: ``"cuda"``, ``"cpu"`` or ``"sim"``.

    Raises
    ------
    TargetError
        If `NUMBA_KV_TARGET` asks for one that cannot work.
    """
    return resolve_target(None)
