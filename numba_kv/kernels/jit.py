"""`@kernel`: one function, three targets.

A kernel is written as the work of one item::

    @kernel(lengths=array("int32"), limit=scalar())
    def clamp(row, lengths, limit): ...                        # one thread an item

    @kernel(block_form=True, table=array("int32", 2))
    def clear(row, lane, lanes, table): ...                    # one block an item; lanes stride over its columns

`cuda` runs it over threads or blocks, `cpu` in a compiled loop, `sim` in Numba's simulator. `Kernel.bind` packs the
arguments once; a launch is then one call that passes nothing but the parameter block::

    word    0      1 ..............................
            items  address, extents | value | ...          in the order of declaration
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from numba_kv.device.device import CudaDevice, Device
from numba_kv.errors import InputError
from numba_kv.kernels.spec import Argument

if TYPE_CHECKING:
    from numba_kv.device.stream import Stream

__all__ = ["Kernel", "Launch", "Routine", "all_kernels", "kernel", "routine", "specialise"]

#: Items below this are one block of the thread form; more are split.
_THREADS = 128
_REGISTRY: dict[str, Kernel] = {}


class Routine:
    """A function that kernels call; compiled into them for each target, an ordinary function in the simulator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        """Run the function as ordinary Python."""
        return self.function(*arguments)


def routine(function: Callable[..., Any]) -> Routine:
    """Declare a function that kernels call."""
    return Routine(function)


def specialise(function: Callable[..., Any], compile_routine: Callable[[Any], Any]) -> FunctionType:
    """Return `function` with every routine that it names compiled by `compile_routine`."""
    scope = dict(function.__globals__)
    for name in function.__code__.co_names:
        value = scope.get(name)
        if isinstance(value, Routine):
            scope[name] = compile_routine(specialise(value.function, compile_routine))
    return FunctionType(function.__code__, scope, function.__name__, function.__defaults__)


class Kernel:
    """A declared kernel.

    Attributes
    ----------
    name : str
        Its function's name.
    function : callable
        The work of one item.
    arguments : dict of str to Argument
        Declarations in order.
    block_form : bool
        Whether an item is a block whose lanes share it.
    """

    def __init__(self, function: Callable[..., None], arguments: dict[str, Argument], block_form: bool) -> None:
        self.name = function.__name__
        self.function = function
        self.arguments = arguments
        self.block_form = block_form
        leading = ["item", "lane", "lanes"] if block_form else ["item"]
        names = list(inspect.signature(function).parameters)
        if names[len(leading) :] != list(arguments):
            raise InputError(f"kernel {self.name}: parameters {names[len(leading) :]} and declarations {list(arguments)} differ")

    @property
    def num_words(self) -> int:
        """64-bit words of the parameter block, the item count included."""
        return 1 + sum(a.words for a in self.arguments.values())

    def bind(self, device: Device, *, threads: int | None = None, **values: Any) -> Launch:
        """Compile for `device` and pack the arguments.

        Parameters
        ----------
        device : Device
            Where it will run.
        threads : int, optional
            Threads of a block.
        **values : Tensor or int
            One for each declared argument.

        Raises
        ------
        InputError, ShapeError
            If a value is missing, unknown or not as declared.

        Cost: compiles on first use (seconds; cached on disk). Enqueues nothing.
        """
        if set(values) != set(self.arguments):
            missing, extra = set(self.arguments) - set(values), set(values) - set(self.arguments)
            raise InputError(f"kernel {self.name}: missing {sorted(missing)}, unknown {sorted(extra)}")
        for name, value in values.items():
            owner = getattr(value, "device", None)
            if owner is not None and owner is not device:
                raise InputError(f"{name}: the tensor is on another device object than the launch")
        return Launch(self, device, values, threads or (256 if self.block_form else _THREADS))

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


class Launch:
    """A kernel bound to its arguments. Keeps every tensor it was bound to alive."""

    def __init__(self, kernel: Kernel, device: Device, values: dict[str, Any], threads: int) -> None:
        import numpy as np

        self.kernel = kernel
        self.device = device
        self.threads = threads
        self._values = values
        words, self._places = [0], {}
        for name, argument in kernel.arguments.items():
            if argument.dtype is None:
                self._places[name] = len(words)
            words += argument.pack(name, values[name])
        self.block = np.array(words, np.int64)
        self._run = _runner(self)

    def __call__(self, items: int, stream: Stream, **scalars: int) -> None:
        """Run the kernel over `items` items.

        Parameters
        ----------
        items : int
            Number of items; 0 runs nothing.
        stream : Stream
            Enqueues one kernel.
        **scalars : int
            Values of scalar arguments that differ from the bound ones; they stay.
        """
        for name, value in scalars.items():
            self.block[self._places[name]] = value
        if items > 0:
            self._run(items, stream)


def _runner(launch: Launch) -> Callable[[int, Stream], None]:
    device = launch.device
    if isinstance(device, CudaDevice):
        from numba_kv.kernels.on_cuda import cuda_runner

        return cuda_runner(launch)
    if device.target == "sim":
        from numba_kv.kernels.on_sim import sim_runner

        return sim_runner(launch)
    from numba_kv.kernels.on_cpu import cpu_runner

    return cpu_runner(launch)


def kernel(*, block_form: bool = False, **arguments: Argument) -> Callable[[Callable[..., None]], Kernel]:
    """Declare a kernel; see the module docstring."""

    def decorate(function: Callable[..., None]) -> Kernel:
        made = Kernel(function, arguments, block_form)
        _REGISTRY[made.name] = made
        return made

    return decorate


def all_kernels() -> dict[str, Kernel]:
    """Return every kernel of the package by name (imports them)."""
    import importlib
    import pkgutil

    import numba_kv.kernels as package

    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("on_"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    return dict(_REGISTRY)
