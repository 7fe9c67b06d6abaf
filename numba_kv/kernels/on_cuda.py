"""The `cuda` target: compiled once to a cubin, launched by one driver call."""

from __future__ import annotations

import linecache
import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba_kv.device.build_cache import read_product, write_product
from numba_kv.device.module import Function, ptx_to_cubin
from numba_kv.errors import DeviceError, InvariantError
from numba_kv.kernels.driver_calls import DriverCalls
from numba_kv.kernels.gpu_intrinsics import grid_control
from numba_kv.kernels.launch_words import GRID, GRID_REST, STREAM, can_overlap, launch_words
from numba_kv.kernels.numba_targets import array_from_address, compile_to_ptx, cuda_device_function
from numba_kv.kernels.routines import specialise
from numba_kv.kernels.source import array_kinds, build_key, call_arguments, product_name, unpack_lines

if TYPE_CHECKING:
    from numba_kv.device.stream import Stream
    from numba_kv.kernels.jit import Kernel, Launch

__all__ = ["compile_ptx", "cuda_repeated", "cuda_runner", "entry_name", "launch_call"]

_functions: dict[tuple[Kernel, int], Function] = {}
_lock = threading.RLock()  # an interrupt must not lock its own thread out

_THREAD_ENTRY = """
def entry({parameters}):
    item = np.int64(np.uint32(cuda.blockIdx.x)) * np.int64(np.uint32(cuda.blockDim.x)) + np.int64(np.uint32(cuda.threadIdx.x))
    {begin}
    if item < w0:
        {unpack}
        _work(item, {arguments})
    {end}
"""

_BLOCK_ENTRY = """
def entry({parameters}):
    {begin}
    {unpack}
    item, lane = np.int64(np.uint32(cuda.blockIdx.x)), np.int64(np.uint32(cuda.threadIdx.x))
    _work(item, lane, np.int64(np.uint32(cuda.blockDim.x)), {arguments})
    {end}
"""


def _entry(kernel: Kernel, compute_capability: tuple[int, int]) -> Any:
    """Return the function that unpacks a parameter block of 64-bit words and does the work of one item."""
    import numpy as np
    from numba import cuda

    begin, end = "pass", "pass"
    if can_overlap(compute_capability):
        begin = "_wait(); _start_next()" if kernel.followed == "early" else "_wait()"
        end = "_start_next()" if kernel.followed == "late" else "pass"
    text = (_BLOCK_ENTRY if kernel.block_form else _THREAD_ENTRY).format(
        parameters=", ".join(f"w{i}" for i in range(kernel.num_words)),
        unpack=("\n    " if kernel.block_form else "\n        ").join(unpack_lines(kernel, "w{i}")),
        arguments=call_arguments(kernel),
        begin=begin,
        end=end,
    )
    scope: dict[str, Any] = {
        "np": np,
        "cuda": cuda,
        "_wait": grid_control("wait"),
        "_start_next": grid_control("launch_dependents"),
        "_work": cuda_device_function(specialise(kernel.function, cuda_device_function, compute_capability)),
    }
    for kind, ndim in array_kinds(kernel):
        scope[f"{kind}_{ndim}"] = array_from_address(kind, ndim, True)
    filename = f"<numba_kv entry {kernel.name}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(compile(text, filename, "exec"), scope)
    return scope["entry"]


def compile_ptx(kernel: Kernel, compute_capability: tuple[int, int]) -> str:
    """Return the kernel's PTX for one architecture. Needs no GPU."""
    ptx = compile_to_ptx(_entry(kernel, compute_capability), kernel.num_words, compute_capability)
    _check_parameters(kernel, ptx)
    return ptx


def dispatcher_launch(launch: Launch, items: int, stream: Stream) -> Callable[[], None]:
    """Return a function that runs a bound kernel through Numba's own dispatcher; for comparison only."""
    from numba import cuda

    words = launch.block.tolist()
    words[0] = items
    per_block = 1 if launch.kernel.block_form else launch.threads
    entry = _entry(launch.kernel, launch.device.compute_capability)  # type: ignore[attr-defined]
    configured = cuda.jit(entry)[-(-items // per_block), launch.threads, stream.native]  # type: ignore[attr-defined]
    return lambda: configured(*words)


def entry_name(ptx: str) -> str:
    """Return the name of the only kernel in `ptx`."""
    names = re.findall(r"\.visible\s+\.entry\s+(\w+)", ptx)
    if len(names) != 1:
        raise InvariantError(f"PTX holds {len(names)} kernels, 1 expected")
    return str(names[0])


def _check_parameters(kernel: Kernel, ptx: str) -> None:
    """Refuse PTX whose parameters are not exactly the block's 64-bit words."""
    header = ptx[ptx.index(".visible .entry") :]
    kinds = re.findall(r"\.param\s+\.(\w+)", header[: header.index(")")])
    if len(kinds) != kernel.num_words or set(kinds) - {"u64", "b64", "s64"}:
        raise InvariantError(f"kernel {kernel.name}: {kernel.num_words} 64-bit parameters expected, PTX has {kinds}")


def _cubin(kernel: Kernel, compute_capability: tuple[int, int]) -> tuple[bytes, str]:
    """Return machine code and entry name, from the build cache if they are there."""
    key = f"cuda-{build_key()}-sm{compute_capability[0]}{compute_capability[1]}"
    name = product_name(kernel)
    cubin, entry = read_product(key, f"{name}.cubin"), read_product(key, f"{name}.entry")
    if cubin and entry and entry in cubin:  # processes write in turns, and each names its entry itself
        return cubin, entry.decode()
    ptx = compile_ptx(kernel, compute_capability)
    cubin, _ = ptx_to_cubin(ptx, compute_capability)
    write_product(key, f"{name}.cubin", cubin)
    write_product(key, f"{name}.entry", entry_name(ptx).encode())
    return cubin, entry_name(ptx)


def launch_call(launch: Launch) -> tuple[Any, ...]:
    """Return a bound kernel's launch as a call for `DriverCalls`; see `launch_words`."""
    import numpy as np

    kernel, device, block = launch.kernel, launch.device, launch.block
    capability: tuple[int, int] = device.compute_capability  # type: ignore[attr-defined]
    with _lock, device.active():
        place = (kernel, device.ordinal)
        if place not in _functions:
            cubin, entry = _cubin(kernel, capability)
            _functions[place] = Function(cubin, entry)
        function = _functions[place]
    if launch.addresses is None:
        base = block.ctypes.data
        launch.addresses = np.arange(base, base + 8 * len(block), 8, dtype=np.uint64)
    return launch_words(function.handle, launch.threads, launch.addresses.ctypes.data, capability)


def cuda_runner(launch: Launch) -> Callable[[int, Stream], None]:
    """Return a function that enqueues the bound kernel over items by one driver call."""
    call = DriverCalls(launch_call(launch))
    words, prepare = call.words, launch.prepare

    def run(items: int, stream: Stream) -> None:
        words[GRID] = prepare(items) | GRID_REST
        words[STREAM] = stream.handle
        call()

    return run


def cuda_repeated(launch: Launch, items: int) -> Callable[[Stream], None]:
    """Return a function that enqueues the bound kernel over `items` items: the driver call and nothing else.

    It does not look whether the device is current in the calling thread: it nearly always is, and where it is not the driver
    refuses the launch, which is then made with the device current.
    """
    call = DriverCalls(launch_call(launch))
    words = call.words
    words[GRID] = launch.prepare(items) | GRID_REST

    def again(stream: Stream) -> None:
        words[STREAM] = stream.handle
        try:
            call()
        except DeviceError:
            with launch.device.active():
                call()

    return again
