"""The `cpu` target: the work item in a compiled loop."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba_kv.device.build_cache import write_product
from numba_kv.kernels.source import build_key, call_arguments, unpack_lines

if TYPE_CHECKING:
    from numba_kv.device.stream import Stream
    from numba_kv.kernels.jit import Kernel, Launch

__all__ = ["cpu_runner"]

_loops: dict[str, Any] = {}
_lock = threading.Lock()

_TEMPLATE = '''"""Loop over the items of `{name}`; made by numba_kv.kernels.on_cpu."""
import numba
from numba_kv.kernels.jit import all_kernels, specialise
from numba_kv.kernels.numba_targets import array_from_address

{makers}
_inline = numba.njit(forceinline=True, _nrt=False)
_work = _inline(specialise(all_kernels()["{name}"].function, _inline))


@numba.njit("void(int64, int64[::1])", _nrt=False, cache={cache})
def loop(items, block):
    {unpack}
    for item in range(items):
        _work(item, {lead}{arguments})
'''


def _source(kernel: Kernel, cache: bool) -> str:
    kinds = {
        (a.dtype.storage_name if a.dtype.is_extension else a.dtype.name, a.ndim) for a in kernel.arguments.values() if a.dtype
    }
    return _TEMPLATE.format(
        name=kernel.name,
        makers="\n".join(f'{kind}_{ndim} = array_from_address("{kind}", {ndim}, False)' for kind, ndim in sorted(kinds)),
        cache=cache,
        unpack="\n    ".join(unpack_lines(kernel, "block[{i}]")),
        lead="0, 1, " if kernel.block_form else "",
        arguments=call_arguments(kernel),
    )


def _loop(kernel: Kernel) -> Any:
    """Return the compiled loop. Its source is a file in the build cache, so that Numba can keep the machine code beside it."""
    with _lock:
        if kernel.name in _loops:
            return _loops[kernel.name]
        text = _source(kernel, cache=True)
        key = f"cpu-{build_key()}"
        path = write_product(key, f"{kernel.name}.py", text.encode())
        if path is None:
            scope: dict[str, Any] = {}
            text = _source(kernel, cache=False)
            filename = f"<numba_kv loop {kernel.name}>"
            linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
            exec(compile(text, filename, "exec"), scope)
            _loops[kernel.name] = scope["loop"]
        else:
            spec = importlib.util.spec_from_file_location(f"numba_kv_loop_{kernel.name}", path)
            module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            sys.modules[module.__name__] = module  # Numba's cache looks the module up by name
            spec.loader.exec_module(module)  # type: ignore[union-attr]
            _loops[kernel.name] = module.loop
        return _loops[kernel.name]


def cpu_runner(launch: Launch) -> Callable[[int, Stream], None]:
    """Return a function that runs the bound kernel over items; it has finished when it returns."""
    loop, block = _loop(launch.kernel), launch.block

    def run(items: int, stream: Stream) -> None:
        loop(items, block)

    return run


