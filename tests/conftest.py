"""Settings of every test run: the target under test, hypothesis, the shared data.

Helper functions live in tests/helpers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

TARGETS = ("cpu", "sim", "cuda")
SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--target",
        choices=TARGETS,
        help="target under test; sim switches on Numba's simulator (default: NUMBA_KV_TARGET, else what this machine has)",
    )


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--target")
    if wanted is not None:
        _force(wanted)
    _load_hypothesis_profile()


def _force(target: str) -> None:
    """Set what numba_kv and Numba read. Numba chooses its simulator at import, so this has to come before."""
    simulate = target == "sim"
    if "numba" in sys.modules and simulate != (os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"):
        raise pytest.UsageError(f"--target {target}: Numba is imported already; set NUMBA_ENABLE_CUDASIM={int(simulate)}")
    os.environ["NUMBA_KV_TARGET"] = target
    os.environ["NUMBA_ENABLE_CUDASIM"] = str(int(simulate))


def _load_hypothesis_profile() -> None:
    text = os.environ.get("NUMBA_KV_MAX_EXAMPLES", "50")
    if not text.isdecimal() or int(text) == 0:
        raise pytest.UsageError(f"NUMBA_KV_MAX_EXAMPLES: {text!r} is not a positive number of examples")
    in_ci = bool(os.environ.get("CI"))
    hypothesis.settings.register_profile(
        "numba_kv",
        deadline=None,  # the first example compiles kernels
        derandomize=in_ci,  # a run in CI fails for what was changed, never by the luck of its draw
        max_examples=int(text),
        print_blob=in_ci,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],  # speed is what `numba-kv bench` is for
    )
    hypothesis.settings.load_profile("numba_kv")


def _target_under_test() -> str:
    import numba_kv

    return numba_kv.target()


@pytest.fixture(scope="session")
def target() -> str:
    """Name of the target under test: ``cpu``, ``sim`` or ``cuda``."""
    return _target_under_test()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests of real checkpoints out unless they are asked for: any other choice of markers would take them in."""
    if "model" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("model") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        found = _target_under_test()
        if found != "cuda":
            pytest.skip(f"needs the cuda target; this run tests {found}")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real configurations and traces that lies beside the repository on some machines."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real configurations and traces are not on this machine ({SHARED_DATA})")
    return SHARED_DATA
