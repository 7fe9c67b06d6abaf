"""The `cpu` and `sim` targets: every call has finished when it returns."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

from numba_kv.device.device import Device
from numba_kv.device.graph import Graph, HostGraph
from numba_kv.device.memory import Memory, host_memory
from numba_kv.device.stream import HostStream, Stream
from numba_kv.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device.tensor import Tensor

__all__ = ["HostDevice"]


class HostDevice(Device):
    """Device of the `cpu` and `sim` targets, in NumPy memory."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
        self.stream = HostStream()

    def allocate(self, nbytes: int) -> Memory:
        """Return zeroed host memory; large blocks are committed as they are touched."""
        return host_memory(nbytes, self.memory)

    def allocate_staging(self, nbytes: int) -> Memory:
        """Return ordinary host memory."""
        return host_memory(nbytes, self.pinned)

    def lock_pages(self, array: NDArray[np.uint8]) -> Memory:
        """Return the same pages: on the host every copy has run when it returns."""
        return Memory(array.ctypes.data, array.nbytes, array, None, self.pinned)

    def as_stream(self, stream: object | None) -> Stream:
        """Return `stream` if it is a host stream, or a new one for None."""
        if stream is None:
            return HostStream()
        if isinstance(stream, HostStream):
            return stream
        raise InputError(f"stream: {stream!r} cannot be used on the {self.target!r} target; pass None")

    def as_capturing_stream(self, stream: object) -> Stream:
        """Return a host stream."""
        return self.as_stream(stream)

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        """Return a graph that calls `work` again."""
        return HostGraph(work)

    def _copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy bytes."""
        ctypes.memmove(destination, source, nbytes)

    def copy_to_host(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy bytes."""
        ctypes.memmove(destination, source, nbytes)

    def _fill_bits(self, tensor: Tensor, pattern: int, stream: Stream) -> None:
        """Set every element."""
        tensor.numpy().view(f"uint{8 * tensor.dtype.itemsize}").fill(pattern)

    def order_consumer(self, stream: object | None) -> None:
        """Return at once: nothing is ever pending."""
        if stream is not None and not isinstance(stream, int):
            raise InputError(f"stream: {stream!r} cannot be used on the {self.target!r} target; pass None")
