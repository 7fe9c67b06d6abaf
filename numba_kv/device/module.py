"""Compiled kernels on a device: from PTX to a cubin, and from a cubin to a function that can be launched."""

from __future__ import annotations

from numba_kv.device.driver import check_driver

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

    Attributes
    ----------
    handle : int
        The driver's function, which `cuLaunchKernelEx` takes.
    """

    def __init__(self, cubin: bytes, entry: str) -> None:
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self._code = ObjectCode.from_cubin(cubin)
        self._kernel = self._code.get_kernel(entry)
        self.handle = int(check_driver(driver.cuKernelGetFunction(self._kernel.handle), f"loading {entry}"))
