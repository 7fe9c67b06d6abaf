"""Functions of the host that are compiled when they are defined: nothing is left to compile where a model waits.

They hold no references of Numba's runtime, which would double the cost of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["called_back", "compiled", "part"]


def compiled(signature: str, *, waits: bool = False) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function of the host for `signature`, as in ``int64(int64[::1], int64)``.

    With `waits` other threads run Python meanwhile; what ends in microseconds is better off without them. The machine code is
    kept on disk, or made for this process alone where there is no place for it.
    """

    def decorate(function: Any) -> Any:
        import numba

        return _kept(lambda cache: numba.njit(signature, nogil=waits, cache=cache, _nrt=False)(function))

    return decorate


def called_back(signature: str) -> Callable[[Any], Any]:
    """Return a decorator as `compiled`, for a function that C calls by its `address`."""

    def decorate(function: Any) -> Any:
        import numba

        return _kept(lambda cache: numba.cfunc(signature, cache=cache, _nrt=False)(function))

    return decorate


def _kept(make: Callable[[bool], Any]) -> Any:
    """Return what `make` compiles with its machine code kept on disk or, where there is no place, without."""
    try:
        return make(True)
    except (OSError, RuntimeError):
        return make(False)


def part(function: Any) -> Any:
    """Return a function that compiled ones call; it is compiled with them, and by itself only if Python calls it."""
    import numba

    return numba.njit(_nrt=False)(function)
