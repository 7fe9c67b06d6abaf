"""Graphs: work that is captured once and launched as one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from numba_kv.device.collection import collection_paused
from numba_kv.device.stream import CudaStream, Stream
from numba_kv.errors import StateError

if TYPE_CHECKING:
    from numba_kv.device.cuda_device import CudaDevice

__all__ = ["CudaGraph", "Graph", "HostGraph", "is_capturing"]


def is_capturing(stream: Stream) -> bool:
    """Return whether what is enqueued on `stream` goes into a graph instead of running. Host only."""
    return stream.is_capturing


class Graph:
    """Captured work. Owns the graph, not what the work touches.

    Attributes
    ----------
    is_closed : bool
        Whether `close` was called.
    """

    is_closed = False

    def launch(self, stream: Stream) -> None:
        """Run the work. Stream: enqueues."""
        raise StateError("Graph is abstract; a device captures one")

    def close(self) -> None:
        """Give the graph back; a second call does nothing."""


class HostGraph(Graph):
    """Graph of the `cpu` and `sim` targets: the work is called again."""

    def __init__(self, work: Callable[[Stream], None]) -> None:
        self._work = work

    def launch(self, stream: Stream) -> None:
        """Do the work."""
        if self.is_closed:
            raise StateError("the graph is closed")
        self._work(stream)

    def close(self) -> None:
        """Forget the work."""
        self.is_closed = True
        self._work = _nothing


def _nothing(stream: Stream) -> None:
    """Do nothing: all that a closed graph still holds."""


class CudaGraph(Graph):
    """Graph of the `cuda` target, captured through cuda.core.

    Garbage is not collected meanwhile; `work` must not drop device memory itself, which would end the capture.
    """

    def __init__(self, device: CudaDevice, work: Callable[[Stream], None]) -> None:
        self._device = device
        with device.active(), collection_paused():
            builder = device.native.create_graph_builder()
            builder.begin_building("thread_local")
            try:
                work(CudaStream(builder.stream, device, owns=False, owner=builder))
            except BaseException:
                with suppress(Exception):  # a capture that the driver gave up ends with an error of its own
                    builder.end_building()
                builder.close()
                raise
            self._graph: Any = builder.end_building().complete()
            builder.close()

    def launch(self, stream: Stream) -> None:
        """Enqueue the graph."""
        if self.is_closed:
            raise StateError("the graph is closed")
        with self._device.active():
            self._graph.launch(stream.native)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Destroy the graph."""
        if not self.is_closed:
            self.is_closed = True
            with self._device.active():
                self._graph.close()
