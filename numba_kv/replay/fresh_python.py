"""Measuring in a process that has done nothing yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from numba_kv.errors import DeviceError

__all__ = ["run_python"]


def run_python(code: str) -> str:
    """Return what a fresh Python that runs `code` writes to stdout.

    Raises
    ------
    DeviceError
        If it fails; carries the end of what it said.
    """
    # In the folder that holds the package, so that the copy that is running is the one that is measured.
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DeviceError(f"{sys.executable} -c {code!r} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout
