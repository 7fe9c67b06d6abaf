"""`@kernel`: one function, three targets.

A kernel is written as the work of one item::

    @kernel(lengths=array("int32"), limit=scalar())
    def clamp(row, lengths, limit): ...                        # one thread an item

    @kernel(block_form=True, table=array("int32", 2))
    def clear(row, lane, lanes, table): ...                    # one block an item; lanes stride over its columns

`cuda` runs it over threads or blocks, `cpu` in a compiled loop, `sim` in Numba's simulator. `Kernel.bind` packs the
arguments once; a launch is then one call that passes nothing but the parameter block::

    word    0      1 ..............................
            items  address, extents | value | ...          in the order of declaration; of `memory` the address alone

What a kernel calls is declared in `routines`. `Kernel.fixed` makes scalars constants of the compiled kernel: what they decide
costs nothing when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b
from operator import index
from types import FunctionType
from typing import TYPE_CHECKING, Any

from numba_kv.device.cuda_device import CudaDevice
from numba_kv.device.device import Device
from numba_kv.device.tensor import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, InvariantError
from numba_kv.kernels.launch_words import FOLLOWED
from numba_kv.kernels.routines import module_function, routines_of
from numba_kv.kernels.spec import Argument

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device.stream import Stream

__all__ = ["SIM_LANES", "Kernel", "Launch", "all_kernels", "kernel", "lanes_of"]

#: Items below this are one block of the thread form; more are split.
_THREADS = 128
_MAX_THREADS = 1024
#: The simulator starts one Python thread a lane; a few already show that lanes share an item.
SIM_LANES = 4
_MOST_ITEMS = (1 << 63) - 1
_MOST_BLOCKS = (1 << 31) - 1  # of a grid's first axis
_REGISTRY: dict[str, Kernel] = {}


class Kernel:
    """A declared kernel.

    Attributes
    ----------
    function : function
        The work of one item.
    name : str
        Its function's name.
    arguments : dict of str to Argument
        Declarations in order.
    block_form : bool
        Whether an item is a block whose lanes share it.
    open : frozenset of str
        Scalars that have to be fixed before it can be bound.
    followed : str
        When blocks of the next kernel may start on `cuda`; see `launch_words`.
    """

    def __init__(
        self,
        function: Callable[..., None],
        arguments: dict[str, Argument],
        block_form: bool,
        open_scalars: Iterable[str] = (),
        followed: str = "done",
    ) -> None:
        self.followed = followed
        self.function = module_function(function)
        self.name = self.function.__name__
        self.arguments = arguments
        self.open = frozenset(open_scalars)
        self._variants: dict[tuple[int | None, ...], Kernel] = {}
        self.block_form = block_form
        leading = ["item", "lane", "lanes"] if block_form else ["item"]
        names = list(inspect.signature(function).parameters)
        if names[len(leading) :] != list(arguments):
            raise InputError(
                f"kernel {self.name}: parameters {names[len(leading) :]} and declarations {list(arguments)} differ"
            )

    def fixed(self, **values: int) -> Kernel:
        """Return the kernel whose open scalars, and others that are given, are constants; equal values give the same object.

        Raises
        ------
        InputError
            If an open scalar is missing, or what is given is none of its scalars.
        """
        if not self.open <= set(values) <= set(self.arguments):
            raise InputError(f"kernel {self.name}: {sorted(values)} given, its open scalars {sorted(self.open)} wanted")
        key = tuple(None if (value := values.get(name)) is None else index(value) for name in self.arguments)
        if key not in self._variants:
            arguments = {n: a.fixed(values[n]) if n in values else a for n, a in self.arguments.items()}
            made = Kernel(self.function, arguments, self.block_form, followed=self.followed)
            words = [str(index(values[n])) for n in self.arguments if n in self.open]
            if len(words) < len(values):  # the others can be many: a name is that of a file, too
                words.append(blake2b(repr(key).encode(), digest_size=6).hexdigest())
            made.name = "_".join([self.name, *words]).replace("-", "m")
            self._variants[key] = made
        return self._variants[key]

    def over(self, name: str, **kinds: str) -> Kernel:
        """Declare the kernel over arrays of other element types, under a name of its own: a definition less.

        Raises
        ------
        InputError
            If one of them is not an array of the kernel.
        """
        for each in kinds:
            if each not in self.arguments or self.arguments[each].dtype is None:
                raise InputError(f"kernel {self.name}: {each!r} is not one of its arrays")
        arguments = {n: a if n not in kinds else replace(a, dtype=dtype(kinds[n])) for n, a in self.arguments.items()}
        made = Kernel(self.function, arguments, self.block_form, self.open, self.followed)
        made.name = name
        return _registered(made)

    @property
    def num_words(self) -> int:
        """64-bit words of the parameter block, the item count included."""
        return 1 + sum(a.words for a in self.arguments.values())

    @property
    def functions(self) -> tuple[FunctionType, ...]:
        """Its function and the routines that it calls, directly or not."""
        found: list[FunctionType] = []
        pending = [self.function]
        while pending:
            function = pending.pop(0)
            if function not in found:
                found.append(function)
                pending += (called.function for _, called in routines_of(function))
        return tuple(found)

    def bind(self, device: Device, values: Mapping[str, Tensor | int], *, threads: int | None = None) -> Launch:
        """Compile for `device` and pack the arguments.

        Parameters
        ----------
        device : Device
            Where it will run.
        values : mapping of str to Tensor or int
            One for each declared argument.
        threads : int, optional
            Threads of a block on `cuda`; default 128, of the block form 256.

        Raises
        ------
        InputError, ShapeError
            If a value is missing, unknown or not as declared.

        Cost: compiles on first use (seconds; cached on disk). Enqueues nothing.
        """
        if not isinstance(device, Device):
            raise InputError(f"device: {type(device).__name__} is not a Device")
        if not isinstance(values, Mapping):
            raise InputError(f"values: {type(values).__name__} is not a mapping of argument names to values")
        if self.open:
            raise InputError(f"kernel {self.name}: its scalars {sorted(self.open)} are open; bind one of its fixed forms")
        wanted = {name for name, argument in self.arguments.items() if argument.value is None}
        missing, extra = wanted - set(values), set(values) - wanted
        if missing or extra:
            raise InputError(f"kernel {self.name}: missing {sorted(missing)}, unknown {sorted(extra, key=str)}")
        if threads is None:
            threads = 256 if self.block_form else _THREADS
        else:
            threads = _checked_threads(threads)
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device is not device:
                raise InputError(f"{name}: the tensor is on another device object than the launch")
        return Launch(self, device, values, threads)

    def __repr__(self) -> str:
        return f"Kernel({self.name})"


class Launch:
    """A kernel bound to its arguments. Keeps every tensor it was bound to alive."""

    def __init__(self, kernel: Kernel, device: Device, values: Mapping[str, Tensor | int], threads: int) -> None:
        import numpy as np

        self.kernel = kernel
        self.device = device
        self.threads = threads
        self.values: dict[str, Any] = dict(values)
        words: list[int] = [0]
        self._places: dict[str, int] = {}
        for name, argument in kernel.arguments.items():
            if argument.value is not None:
                continue
            if argument.dtype is None:
                self._places[name] = len(words)
            words += argument.pack(name, values[name])
        self.block = np.array(words, np.int64)
        self.addresses: NDArray[np.uint64] | None = None  # of the words, which a driver reads during a launch
        self._words = self.block.data  # takes integers alone, and faster than the array does
        self._per_block = 1 if kernel.block_form else threads
        self._run = _runner(self)

    def prepare(self, items: int) -> int:
        """Set the number of items, for a caller that launches by itself; return the blocks of threads that they take.

        Raises
        ------
        InputError
            If they are more than a grid has.
        """
        blocks = -(-items // self._per_block)
        if blocks > _MOST_BLOCKS:
            raise InputError(f"kernel {self.kernel.name}: items: {items} take {blocks} blocks, a grid has {_MOST_BLOCKS}")
        self._words[0] = items
        return blocks

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

        Raises
        ------
        InputError
            If a scalar is unknown or no 64-bit integer, or `items` is no number of items; nothing runs and nothing is changed.
        """
        if type(items) is not int or not 0 <= items <= _MOST_ITEMS:
            items = self._checked_items(items)
        if scalars:
            self.set(**scalars)
        if items:
            self._run(items, stream)

    def set(self, **scalars: int) -> None:
        """Set scalar arguments to other values than the bound ones; they stay.

        Raises
        ------
        InputError
            If one is unknown or no 64-bit integer; nothing is changed.
        """
        words, places = self._words, self._places
        before = words.tobytes()
        try:
            for name, value in scalars.items():
                words[places[name]] = value
        except (KeyError, TypeError, ValueError):
            words.cast("B")[:] = before
            raise self._refusal(scalars) from None

    def repeated(self, items: int) -> Callable[[Stream], None]:
        """Return a function that runs the kernel over `items` items each time: a call without its checks.

        It keeps the launch alive, and holds until the launch is called or repeated for another number of items. Scalars are
        those set last.

        Raises
        ------
        InputError
            If `items` is no number of items.
        """
        items = self._checked_items(items)
        if not items:
            return _nothing
        if isinstance(self.device, CudaDevice):
            from numba_kv.kernels.on_cuda import cuda_repeated

            return cuda_repeated(self, items)
        return lambda stream: self._run(items, stream)

    def _checked_items(self, items: Any) -> int:
        try:
            number = -1 if isinstance(items, bool) else index(items)
        except TypeError:
            number = -1
        if not 0 <= number <= _MOST_ITEMS:
            raise InputError(f"kernel {self.kernel.name}: items: {items!r} is not an integer in 0..{_MOST_ITEMS}")
        return number

    def _refusal(self, scalars: dict[str, int]) -> InputError:
        """Return the error of the first scalar that cannot be set."""
        for name, value in scalars.items():
            if name not in self._places:
                return InputError(f"kernel {self.kernel.name}: {name!r} is not one of its scalars {sorted(self._places)}")
            try:
                self.kernel.arguments[name].pack(name, value)
            except InputError as error:
                return error
        raise InvariantError(f"kernel {self.kernel.name}: scalars {scalars} were refused without a reason")


def _nothing(stream: Stream) -> None:
    """Run over no items."""


def lanes_of(device: Device, threads: int) -> int:
    """Return the lanes of a block form's item, if blocks have `threads` threads where there are any."""
    if isinstance(device, CudaDevice):
        return threads
    return SIM_LANES if device.target == "sim" else 1


def _checked_threads(threads: Any) -> int:
    try:
        number = 0 if isinstance(threads, bool) else index(threads)
    except TypeError:
        number = 0
    if not 1 <= number <= _MAX_THREADS:
        raise InputError(f"threads: {threads!r} is not in 1..{_MAX_THREADS}")
    return number


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


def _registered(made: Kernel) -> Kernel:
    if made.function.__module__.startswith(f"{__package__}."):
        _REGISTRY[made.name] = made
    return made


def kernel(
    *, block_form: bool = False, open_scalars: Iterable[str] = (), followed: str = "done", **arguments: Argument
) -> Callable[[Callable[..., None]], Kernel]:
    """Declare a kernel; see the module docstring. One with open scalars is a pattern, see `Kernel.fixed`.

    `followed` says when the next kernel's blocks may start on a GPU, see `launch_words`.

    Raises
    ------
    InputError
        If `followed` is none of its words, or names and declarations differ.
    """
    if followed not in FOLLOWED:
        raise InputError(f"followed: {followed!r} is not one of {', '.join(FOLLOWED)}")

    def decorate(function: Callable[..., None]) -> Kernel:
        return _registered(Kernel(function, arguments, block_form, open_scalars, followed))

    return decorate


def all_kernels() -> dict[str, Kernel]:
    """Return every kernel of the package by name (imports them); kernels of other modules are not among them.

    Of a kernel with open scalars these are the fixed forms that exist so far.
    """
    import importlib
    import pkgutil

    import numba_kv.kernels as package

    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith("on_"):
            importlib.import_module(f"{package.__name__}.{module.name}")
    found: dict[str, Kernel] = {}
    for each in _REGISTRY.values():
        forms = each._variants.values() if each.open else (each,)
        found |= {form.name: form for form in forms}
    return found
