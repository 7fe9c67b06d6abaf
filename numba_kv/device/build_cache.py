"""A folder of build products, so that a second process starts warm.

`NUMBA_KV_CACHE_DIR` names it; default is the user's cache folder. A folder that cannot be written only costs time, and so does
a damaged file: beside every product lies a checksum, and what does not match it is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["cache_folder", "checksum_of", "read_product", "write_product"]

_CHECKSUM = ".blake2b"


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


def checksum_of(parts: Iterable[bytes]) -> bytes:
    """Return a checksum of `parts`, each with its length."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest().encode()


def read_product(key: str, name: str) -> bytes | None:
    """Return the bytes of a product, or None if it is not there or not what was written."""
    folder = cache_folder(key)
    if folder is None:
        return None
    content = _read(folder / name)
    if content is None or _read(folder / (name + _CHECKSUM)) != checksum_of([content]):
        return None
    return content


def write_product(key: str, name: str, content: bytes) -> Path | None:
    """Store a product and its checksum, each in one step, and return the product's path; None where nothing can be stored.

    A product that is there already with the same bytes stays as it is: what other tools derived from it stays valid.
    """
    folder = cache_folder(key)
    if folder is None:
        return None
    path = folder / name
    is_stored = _store(path, content) and _store(folder / (name + _CHECKSUM), checksum_of([content]))
    return path if is_stored else None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _store(path: Path, content: bytes) -> bool:
    if _read(path) == content:
        return True
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True
