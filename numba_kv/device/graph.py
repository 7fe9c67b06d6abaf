"""Graphs: work that is captured once and launched as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba_kv.device.stream import CudaStream, Stream
from numba_kv.errors import StateError

if TYPE_CHECKING:
    from numba_kv.device.cuda_device import CudaDevice

__all__ = ["CudaGraph", "Graph", "HostGraph"]


class Graph:
    """Captured work. Owns the graph, not what the work touches."""

    def launch(self, stream: Stream) -> None:
        """Run the work. Stream: enqueues."""
        raise StateError("Graph is abstract; a device captures one")

    def close(self) -> None:
        """Give the graph back; a second call does nothing."""


class HostGraph(Graph):
    """Graph of the `cpu` and `sim` targets: the work is called again."""

    def __init__(self, work: Callable[[Stream], None]) -> None:
        self._work: Callable[[Stream], None] | None = work

    def launch(self, stream: Stream) -> None:
        """Do the work."""
        if self._work is None:
            raise StateError("the graph is closed")
        self._work(stream)

    def close(self) -> None:
        """Forget the work."""
        self._work = None


class CudaGraph(Graph):
    """Graph of the `cuda` target, captured through cuda.core."""

    def __init__(self, device: CudaDevice, work: Callable[[Stream], None]) -> None:
        builder = device.native.create_graph_builder()
        builder.begin_building("thread_local")
        try:
            work(CudaStream(builder.stream, owns=False, owner=builder))
        except BaseException:
            builder.end_building()
            builder.close()
            raise
        self._graph: Any = builder.end_building().complete()
        builder.close()

    def launch(self, stream: Stream) -> None:
        """Enqueue the graph."""
        if self._graph is None:
            raise StateError("the graph is closed")
        self._graph.launch(stream.native)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Destroy the graph."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.close()
