"""Importing numba_kv loads no heavy package; neither does importing its pure rooms."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"numpy", "ml_dtypes", "numba", "llvmlite", "cuda", "numba_cuda", "rich", "matplotlib", "typing", "dataclasses"}
#: What the rooms of pure integers are free to use all the same.
CHEAP = {"typing", "dataclasses"}
LOADED = "import sys; before = set(sys.modules); {code}; print(*sorted(set(sys.modules) - before))"


def loaded_by(code: str) -> set[str]:
    """Return the modules that `code` loads into a bare Python (-S -E: no start-up hook may have loaded them before)."""
    path = f"import sys; sys.path[:] = {sys.path!r}"
    command = [sys.executable, "-S", "-E", "-c", f"{path}; {LOADED.format(code=code)}"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_loads_nothing_but_itself() -> None:
    loaded = loaded_by("import numba_kv")
    assert "numba_kv" in loaded
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("numba_kv")} == {"numba_kv"}


@pytest.mark.parametrize("name", ["errors", "dtypes", "geometry", "config", "plan"])
def test_pure_rooms_load_no_heavy_package(name: str) -> None:
    assert not loaded_by(f"import numba_kv.{name}") & (HEAVY - CHEAP)


@pytest.mark.parametrize("name", ["flash_attention", "flashinfer", "torch_arrays", "jax_arrays", "cupy_arrays"])
def test_adapters_load_their_framework_when_it_is_used(name: str) -> None:
    assert not loaded_by(f"import numba_kv.adapters.{name}") & {"torch", "jax", "cupy", "flash_attn", "vllm", "transformers"}


def test_listing_the_public_names_loads_nothing() -> None:
    assert not loaded_by("import numba_kv; dir(numba_kv); numba_kv.__all__") & HEAVY


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ("import numba_kv; numba_kv.dtype('bfloat16').numpy()", "numpy"),
        ("import numba_kv; numba_kv.dtype('bfloat16').numpy()", "ml_dtypes"),
        ("import numba_kv; numba_kv.ConfigError", "numba_kv.errors"),
        ("import numba", "numba"),
    ],
)
def test_the_check_can_fail(code: str, module: str) -> None:
    assert module in loaded_by(code)
