"""Functions of the host that are compiled when they are defined: nothing is left to compile where a model waits.

They hold no references of Numba's runtime, which would double the cost of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["compiled", "part"]


def compiled(signature: str, *, waits: bool = False) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function of the host for `signature`, as in ``int64(int64[::1], int64)``.

    With `waits` other threads run Python meanwhile; what ends in microseconds is better off without them. The machine code is
    kept on disk, or made for this process alone where there is no place for it.
    """

    def decorate(function: Any) -> Any:
        import numba

        for cache in (True, False):
            try:
                return numba.njit(signature, nogil=waits, cache=cache, _nrt=False)(function)
            except (OSError, RuntimeError):
                if not cache:
                    raise

    return decorate


def part(function: Any) -> Any:
    """Return a function that compiled ones call; it is compiled with them, and by itself only if Python calls it."""
    import numba

    return numba.njit(_nrt=False)(function)
