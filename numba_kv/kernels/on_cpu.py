"""The `cpu` target: the work item in a compiled loop."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba_kv.device.build_cache import write_product
from numba_kv.kernels.jit import specialise
from numba_kv.kernels.source import array_kinds, build_key, call_arguments, product_name, unpack_lines

if TYPE_CHECKING:
    from numba_kv.device.stream import Stream
    from numba_kv.kernels.jit import Kernel, Launch

__all__ = ["cpu_runner"]

_loops: dict[Kernel, Any] = {}
_lock = threading.RLock()  # an interrupt must not lock its own thread out

_TEMPLATE = '''"""Loop over the items of `{name}`; made by numba_kv.kernels.on_cpu."""
import numba
from numba_kv.kernels.numba_targets import array_from_address

{makers}


@numba.njit("void(int64, int64[::1])", _nrt=False, cache={cache})
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


def _work_item(kernel: Kernel) -> Any:
    import numba

    inline = numba.njit(forceinline=True, _nrt=False)
    return inline(specialise(kernel.function, inline))


def _cached_loop(kernel: Kernel) -> Any:
    """Return the loop from a file in the build cache, so that Numba keeps the machine code beside it; None if it cannot."""
    name = product_name(kernel)
    path = write_product(f"cpu-{build_key()}", f"{name}.py", _source(kernel, cache=True).encode())
    spec = None if path is None else importlib.util.spec_from_file_location(f"numba_kv_loop_{name}", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["_work"] = _work_item(kernel)
    sys.modules[module.__name__] = module  # Numba's cache looks the module up by name
    try:
        spec.loader.exec_module(module)
    except (OSError, RuntimeError):  # Numba found no place for its own files, or no room in it
        del sys.modules[module.__name__]
        return None
    return module.__dict__["loop"]


def _uncached_loop(kernel: Kernel) -> Any:
    text, filename = _source(kernel, cache=False), f"<numba_kv loop {kernel.name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    scope: dict[str, Any] = {"_work": _work_item(kernel)}
    exec(compile(text, filename, "exec"), scope)
    return scope["loop"]


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
