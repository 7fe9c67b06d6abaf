"""A folder of build products, so that a second process starts warm.

`NUMBA_KV_CACHE_DIR` names it; default is the user's cache folder. A folder that cannot be written only costs time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

__all__ = ["cache_folder", "read_product", "write_product"]


def cache_folder(key: str) -> Path | None:
    """Return the (existing, writable) folder for products of `key`, or None where there can be none."""
    root = os.environ.get("NUMBA_KV_CACHE_DIR")
    try:
        base = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba_kv"
        folder = base / key
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return folder if os.access(folder, os.W_OK) else None


def read_product(key: str, name: str) -> bytes | None:
    """Return the bytes of a product, or None if it is not there."""
    folder = cache_folder(key)
    if folder is None:
        return None
    try:
        return (folder / name).read_bytes()
    except OSError:
        return None


def write_product(key: str, name: str, content: bytes) -> Path | None:
    """Store a product in one step and return its path; None where nothing can be stored.

    A product that is there already with the same bytes stays as it is: what other tools derived from it stays valid.
    """
    folder = cache_folder(key)
    if folder is None:
        return None
    path = folder / name
    if read_product(key, name) == content:
        return path
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return None
    return path
