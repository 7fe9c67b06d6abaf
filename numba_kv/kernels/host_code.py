"""Compiled functions of the host that hold neither the interpreter's lock nor references: `compiled_on_disk`."""

from __future__ import annotations

from typing import Any

__all__ = ["compiled_on_disk"]


def compiled_on_disk(signature: str, function: Any) -> Any:
    """Return `function` compiled, its machine code kept on disk, or for this process alone where there is no place for it."""
    import numba

    for cache in (True, False):
        try:
            return numba.njit(signature, nogil=True, cache=cache, _nrt=False)(function)
        except (OSError, RuntimeError):
            if not cache:
                raise
