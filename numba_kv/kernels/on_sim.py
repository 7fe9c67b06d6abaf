"""The `sim` target: the work item in Numba's CUDA simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba_kv.kernels.numba_targets import cuda

if TYPE_CHECKING:
    from numba_kv.device.stream import Stream
    from numba_kv.kernels.jit import Kernel, Launch

__all__ = ["sim_runner"]

#: The simulator starts one Python thread a lane; a few already show that lanes share an item.
_LANES = 4
_entries: dict[Kernel, Any] = {}


def _entry(kernel: Kernel) -> Any:
    if kernel not in _entries:
        work, block_form = kernel.function, kernel.block_form

        def entry(items, *arguments):
            if block_form:
                work(cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x, *arguments)
            else:
                item = cuda.grid(1)
                if item < items:
                    work(item, *arguments)

        _entries[kernel] = cuda.jit(entry)
    return _entries[kernel]


def sim_runner(launch: Launch) -> Callable[[int, Stream], None]:
    """Return a function that runs the bound kernel over items in the simulator; it has finished when it returns."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    kernel, block = launch.kernel, launch.block
    entry = _entry(kernel)
    arrays: dict[str, Any] = {}
    places: dict[str, int] = {}
    at = 1
    for name, argument in kernel.arguments.items():
        if argument.dtype is None:
            places[name] = at
        else:
            arrays[name] = FakeCUDAArray(launch.values[name].numpy().view(argument.storage_name))
        at += argument.words

    def run(items: int, stream: Stream) -> None:
        arguments = [arrays[n] if n in arrays else int(block[places[n]]) for n in kernel.arguments]
        if kernel.block_form:
            entry[items, _LANES](items, *arguments)
        else:
            entry[-(-items // _LANES), _LANES](items, *arguments)

    return run
