"""The `sim` target: the work item in Numba's CUDA simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba_kv.kernels.jit import SIM_LANES
from numba_kv.kernels.numba_targets import cuda

if TYPE_CHECKING:
    from numba_kv.device.stream import Stream
    from numba_kv.kernels.jit import Kernel, Launch

__all__ = ["lane_values", "sim_runner"]

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


def lane_values(value: Any, lane: int, lanes: int) -> list[Any]:
    """Return the float32 that each lane of the block gives. Called in a kernel, by all lanes."""
    import numpy as np

    shared = cuda.shared.array(1024, np.float32)
    cuda.syncthreads()  # what the lanes gave last time has been read
    shared[lane] = value
    cuda.syncthreads()
    return [shared[i] for i in range(lanes)]


def sim_runner(launch: Launch) -> Callable[[int, Stream], None]:
    """Return a function that runs the bound kernel over items in the simulator; it has finished when it returns."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    kernel, block = launch.kernel, launch.block
    entry = _entry(kernel)
    constant: dict[str, Any] = {}  # arrays, and scalars that are fixed
    places: dict[str, int] = {}
    at = 1
    for name, argument in kernel.arguments.items():
        if argument.value is not None:
            constant[name] = argument.value
        elif argument.dtype is None:
            places[name] = at
        else:
            constant[name] = FakeCUDAArray(launch.values[name].numpy().view(argument.storage_name))
        at += argument.words

    def run(items: int, stream: Stream) -> None:
        arguments = [constant[n] if n in constant else int(block[places[n]]) for n in kernel.arguments]
        if kernel.block_form:
            entry[items, SIM_LANES](items, *arguments)
        else:
            entry[-(-items // SIM_LANES), SIM_LANES](items, *arguments)

    return run
