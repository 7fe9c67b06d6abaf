"""A host device whose copies and fills run late, on streams that run each on its own: what a busy GPU does, without one."""

from __future__ import annotations

from collections.abc import Callable

from numba_kv.device import Tensor
from numba_kv.device.host_device import HostDevice
from numba_kv.device.stream import Event, HostStream, Stream


class LateEvent(Event):
    """Done once the stream has run everything before it."""

    def __init__(self, stream: LateStream, after: int) -> None:
        super().__init__()
        self._stream, self._after = stream, after

    @property
    def is_done(self) -> bool:
        return self._stream.num_run >= self._after

    def synchronize(self) -> None:
        self._stream.waits += not self.is_done
        self.reach()

    def reach(self) -> None:
        """Let the stream run up to the event."""
        self._stream.run(self._after - self._stream.num_run)


class LateStream(HostStream):
    """Queues work until somebody waits for it, or `run` is called. `waits` counts how often the host waited."""

    def __init__(self, handle: int = 1) -> None:
        self.handle = handle
        self.queue: list[Callable[[], None]] = []
        self.num_run = 0
        self.waits = 0

    def record(self, *, timing: bool = False, again: Event | None = None) -> Event:
        return LateEvent(self, self.num_run + len(self.queue))

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self.queue.append(event.reach)

    def synchronize(self) -> None:
        self.run(len(self.queue))

    def run(self, count: int) -> None:
        """Run the next `count` pieces of work."""
        for _ in range(max(0, count)):
            self.queue.pop(0)()
            self.num_run += 1


class LateDevice(HostDevice):
    """Copies to the device read their source, and fills write, when their stream comes to them."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.stream: LateStream = LateStream()
        self._num_streams = 1

    def as_stream(self, stream: object | None) -> Stream:
        if stream is None:
            self._num_streams += 1
            return LateStream(self._num_streams)
        return super().as_stream(stream)

    def _copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        copy = super()._copy
        queue_of(stream).append(lambda: copy(destination, source, nbytes, stream))

    def copy_to_host(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        stream.synchronize()
        super().copy_to_host(destination, source, nbytes, stream)

    def _fill_bits(self, tensor: Tensor, pattern: int, stream: Stream) -> None:
        fill = super()._fill_bits
        queue_of(stream).append(lambda: fill(tensor, pattern, stream))


def queue_of(stream: Stream) -> list[Callable[[], None]]:
    assert isinstance(stream, LateStream)
    return stream.queue
