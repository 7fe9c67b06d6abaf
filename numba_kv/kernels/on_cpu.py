"""The `cpu` target: the work item in a compiled loop."""

from __future__ import annotations

import contextlib
import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from numba_kv.device.build_cache import checksum_of, read_product, write_product
from numba_kv.kernels.routines import specialise
from numba_kv.kernels.source import array_kinds, build_key, call_arguments, product_name, unpack_lines

if TYPE_CHECKING:
    from numba_kv.device.stream import Stream
    from numba_kv.kernels.jit import Kernel, Launch

__all__ = ["cpu_runner"]

_loops: dict[Kernel, Any] = {}
#: Compiled routines by the identity of their code, which is kept beside them: most kernels call the same ones.
_routines: dict[int, tuple[Any, Any]] = {}
_lock = threading.RLock()  # an interrupt must not lock its own thread out

_SIGNATURE = "void(int64, int64[::1])"
_TEMPLATE = '''"""Loop over the items of `{name}`; made by numba_kv.kernels.on_cpu."""
import numba
from numba_kv.kernels.numba_targets import array_from_address

{makers}


@numba.njit(_nrt=False, cache={cache})
def loop(items, block):
    {unpack}
    for item in range(items):
        _work(item, {lead}{arguments})
'''


def _source(kernel: Kernel, cache: bool) -> str:
    return _TEMPLATE.format(
        name=kernel.name,
        makers="\n".join(f'{kind}_{ndim} = array_from_address("{kind}", {ndim}, False)' for kind, ndim in array_kinds(kernel)),
        cache=cache,
        unpack="\n    ".join(unpack_lines(kernel, "block[{i}]")),
        lead="0, 1, " if kernel.block_form else "",
        arguments=call_arguments(kernel),
    )


def _inlined(function: Any) -> Any:
    """Return `function` as what Numba puts into its callers; no Python calls it, so that it needs no wrapper."""
    import numba

    return numba.njit(forceinline=True, _nrt=False, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def _routine(function: Any) -> Any:
    code = function.__code__
    if id(code) not in _routines:
        _routines[id(code)] = code, _inlined(function)
    return _routines[id(code)][1]


def _work_item(kernel: Kernel) -> Any:
    return _inlined(specialise(kernel.function, _routine))


class _MachineCode:
    """The files that Numba keeps of a loop, and the checksum over them that `numba_kv` keeps beside its source.

    Numba unpickles and links what it finds, whatever it is: a damaged file would raise anything, or run.
    """

    def __init__(self, key: str, name: str, folder: str) -> None:
        self._key = key
        self._name = f"{name}.machine_code"
        self._files = (Path(folder), f"{name}.loop-*.nb[ic]")

    def _paths(self) -> list[Path]:
        folder, pattern = self._files
        return sorted(folder.glob(pattern))

    def _checksum(self) -> bytes:
        return checksum_of(part for path in self._paths() for part in (path.name.encode(), path.read_bytes()))

    @property
    def is_there(self) -> bool:
        """Whether there is any file."""
        return bool(self._paths())

    def is_intact(self) -> bool:
        """Return whether the files are those that were noted, or there are none."""
        try:
            return not self.is_there or read_product(self._key, self._name) == self._checksum()
        except OSError:
            return False

    def note(self) -> None:
        """Write down what the files are now."""
        with contextlib.suppress(OSError):
            write_product(self._key, self._name, self._checksum())

    def discard(self) -> None:
        """Delete the files."""
        for path in self._paths():
            with contextlib.suppress(OSError):
                path.unlink()


def _cached_loop(kernel: Kernel) -> Any:
    """Return the loop from a file in the build cache, so that Numba keeps the machine code beside it; None if it cannot."""
    key, name = f"cpu-{build_key()}", product_name(kernel)
    text = _source(kernel, cache=True)
    path = write_product(key, f"{name}.py", text.encode())
    if path is None:
        return None
    try:
        return _load(kernel, key, name, text, path)
    except Exception:  # Numba found no place for its own files or no room in it, or trips over something that is there
        sys.modules.pop(_module_name(name), None)
        return None


def _module_name(name: str) -> str:
    return f"numba_kv_loop_{name}"


def _load(kernel: Kernel, key: str, name: str, text: str, path: Path) -> Any:
    # Not by an import, which would run bytecode from one more file.
    module = ModuleType(_module_name(name))
    module.__dict__.update(__file__=str(path), _work=_work_item(kernel))
    sys.modules[module.__name__] = module  # Numba's cache looks the module up by name
    exec(compile(text, str(path), "exec"), module.__dict__)
    loop = module.__dict__["loop"]
    code = _MachineCode(key, name, loop.stats.cache_path)
    if not code.is_intact():
        code.discard()
        if code.is_there:
            raise OSError(f"{path}: the machine code beside it is damaged and cannot be deleted")
    had_code = code.is_there
    try:
        loop.compile(_SIGNATURE)
    except Exception:
        if not had_code:
            raise
        code.discard()
        loop.compile(_SIGNATURE)
    if loop.stats.cache_misses:
        code.note()
    loop.disable_compile()
    return loop


def _uncached_loop(kernel: Kernel) -> Any:
    text, filename = _source(kernel, cache=False), f"<numba_kv loop {kernel.name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    scope: dict[str, Any] = {"_work": _work_item(kernel)}
    exec(compile(text, filename, "exec"), scope)
    loop = scope["loop"]
    loop.compile(_SIGNATURE)
    loop.disable_compile()
    return loop


def _loop(kernel: Kernel) -> Any:
    with _lock:
        if kernel not in _loops:
            _loops[kernel] = _cached_loop(kernel) or _uncached_loop(kernel)
        return _loops[kernel]


def cpu_runner(launch: Launch) -> Callable[[int, Stream], None]:
    """Return a function that runs the bound kernel over items; it has finished when it returns."""
    loop, block = _loop(launch.kernel), launch.block

    def run(items: int, stream: Stream) -> None:
        loop(items, block)

    return run
