"""Compiled kernels on a device: loading a cubin and launching it by one driver call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba_kv.device.driver import check_driver
from numba_kv.errors import DeviceError

if TYPE_CHECKING:
    from numba_kv.device.device import Device
    from numba_kv.device.stream import CudaStream

__all__ = ["Function", "ptx_to_cubin"]


def ptx_to_cubin(ptx: str, compute_capability: tuple[int, int]) -> tuple[bytes, str]:
    """Compile PTX for one architecture. Needs no GPU.

    Returns
    -------
    cubin : bytes
        Machine code.
    log : str
        What the assembler says of registers and spills.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    arch = f"sm_{compute_capability[0]}{compute_capability[1]}"
    options = LinkerOptions(arch=arch, ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    code = linker.link("cubin").code
    log = (linker.get_info_log() or "").rstrip("\0")
    linker.close()
    return bytes(code), log


class Function:
    """A kernel of a loaded cubin. Owns the module.

    Parameters
    ----------
    cubin : bytes
        Machine code for the current device.
    entry : str
        Name of the kernel in it.
    """

    def __init__(self, cubin: bytes, entry: str) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self._code = ObjectCode.from_cubin(cubin)
        kernel = self._code.get_kernel(entry)
        self._kernel = kernel
        self._function = check_driver(driver.cuKernelGetFunction(kernel.handle), f"loading {entry}")
        self._launch: Any = driver.cuLaunchKernel

    def launch(self, grid: int, block: int, parameters: int, stream: CudaStream) -> None:
        """Enqueue the kernel. `parameters` is the address of an array of parameter addresses; it is read during the call."""
        (status,) = self._launch(self._function, grid, 1, 1, block, 1, 1, 0, stream.driver_stream, parameters, 0)
        if status:
            raise DeviceError(f"kernel launch: the driver reports {status.name}")

    def repeated(self, grid: int, block: int, parameters: int, device: Device, keep: object) -> Callable[[CudaStream], None]:
        """Return a function that enqueues the kernel with these arguments; `keep` lives as long.

        It does not look whether the device is current in the calling thread: it nearly always is, and where it is not the
        driver refuses the launch, which is then made with the device current.
        """
        launch, function = self._launch, self._function

        def again(stream: CudaStream, _keep: object = keep) -> None:
            (status,) = launch(function, grid, 1, 1, block, 1, 1, 0, stream.driver_stream, parameters, 0)
            if status:
                with device.active():
                    self.launch(grid, block, parameters, stream)

        return again
