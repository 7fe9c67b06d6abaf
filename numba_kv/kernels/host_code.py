"""Functions of the host that are compiled when they are defined: nothing is left to compile where a model waits.

They hold no references of Numba's runtime, which would double the cost of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from types import FunctionType
from typing import Any

from numba_kv.kernels.source import build_key, constants_of

__all__ = ["called_back", "compiled", "part"]


def compiled(signature: str, *, waits: bool = False) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function of the host for `signature`, as in ``int64(int64[::1], int64)``.

    With `waits` other threads run Python meanwhile; what ends in microseconds is better off without them. The machine code is
    kept on disk, or made for this process alone where there is no place for it.
    """

    def decorate(function: Any) -> Any:
        import numba

        made = _named(function)
        return _kept(lambda cache: numba.njit(signature, nogil=waits, cache=cache, _nrt=False)(made))

    return decorate


def called_back(signature: str) -> Callable[[Any], Any]:
    """Return a decorator as `compiled`, for a function that C calls by its `address`."""

    def decorate(function: Any) -> Any:
        import numba

        made = _named(function)
        return _kept(lambda cache: numba.cfunc(signature, cache=cache, _nrt=False)(made))

    return decorate


def _named(function: FunctionType) -> FunctionType:
    """Return the function under a name that says what it is compiled from: Numba looks at the stamp of its own file alone."""
    digest = blake2b(build_key().encode() + repr(constants_of(function)).encode(), digest_size=6).hexdigest()
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    made.__module__, made.__doc__ = function.__module__, function.__doc__
    made.__qualname__ = f"{function.__qualname__}_{digest}"
    return made


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
