"""`@routine` and `@primitive`: functions that kernels call, compiled into them for each target.

Kernels and routines are functions of a module: what they name is found there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from numba_kv.errors import InputError

__all__ = ["Architecture", "Primitive", "Routine", "module_function", "primitive", "routine", "routines_of", "specialise"]

#: Compute capability.
Architecture = tuple[int, int]


class Routine:
    """A function that kernels call; compiled into them for each target, an ordinary function in the simulator."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        """Run the function as ordinary Python."""
        return self.function(*arguments)


def routine(function: Callable[..., Any]) -> Routine:
    """Declare a function that kernels call.

    Raises
    ------
    InputError
        If it closes over variables of another function.
    """
    return Routine(module_function(function))


class Primitive(Routine):
    """A routine for which a GPU has instructions of its own. Its function is what `cpu` runs, and `sim` if `sim` is None."""

    def __init__(self, function: FunctionType, gpu: Callable[[Architecture], Any], sim: Callable[..., Any] | None) -> None:
        super().__init__(function)
        self.gpu = gpu
        self._simulated = sim or function

    def __call__(self, *arguments: Any) -> Any:
        """Run it in the simulator."""
        return self._simulated(*arguments)


def primitive(
    *, gpu: Callable[[Architecture], Any], sim: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Primitive]:
    """Declare a routine that a GPU does otherwise.

    Parameters
    ----------
    gpu : callable
        Returns what Numba's CUDA compiler calls instead for a compute capability, None for the function itself. It is asked
        whenever a kernel is compiled.
    sim : callable, optional
        What the simulator runs instead.
    """

    def decorate(function: Callable[..., Any]) -> Primitive:
        return Primitive(module_function(function), gpu, sim)

    return decorate


def specialise(
    function: FunctionType,
    compile_routine: Callable[[Any], Any],
    gpu: Architecture | None = None,
    made: dict[Routine, Any] | None = None,
) -> FunctionType:
    """Return `function` with every routine that it names compiled by `compile_routine`; for a GPU, with its primitives.

    `made` holds the routines that are compiled already: each is, once.
    """
    scope, made = dict(function.__globals__), {} if made is None else made
    for name, found in routines_of(function):
        if found not in made:
            own = found.gpu(gpu) if gpu is not None and isinstance(found, Primitive) else None
            made[found] = compile_routine(specialise(found.function, compile_routine, gpu, made)) if own is None else own
        scope[name] = made[found]
    return FunctionType(function.__code__, scope, function.__name__, function.__defaults__)


def routines_of(function: FunctionType) -> Iterator[tuple[str, Routine]]:
    """Yield the routines that a function names, each with the name."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, Routine):
            yield name, value


def module_function(function: Callable[..., Any]) -> FunctionType:
    """Return `function` if it closes over no variables: a compiled kernel is cached by its source, which does not hold them."""
    if not isinstance(function, FunctionType):
        raise InputError(f"kernel: {function!r} is not a Python function")
    if function.__code__.co_freevars:
        names = ", ".join(function.__code__.co_freevars)
        raise InputError(f"kernel {function.__name__}: it closes over {names}; define it, and what it names, in a module")
    return function
