"""A host device whose copies run late: what a busy GPU does, without one."""

from __future__ import annotations

from collections.abc import Callable

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
        self._stream.run(self._after - self._stream.num_run)


class LateStream(HostStream):
    """Queues work until somebody waits for it, or `run` is called."""

    handle = 1

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.num_run = 0
        self.waits = 0

    def record(self) -> Event:
        return LateEvent(self, self.num_run + len(self.queue))

    def synchronize(self) -> None:
        self.run(len(self.queue))

    def run(self, count: int) -> None:
        """Run the next `count` pieces of work."""
        for _ in range(max(0, count)):
            self.queue.pop(0)()
            self.num_run += 1


class LateDevice(HostDevice):
    """Copies to the device read their source when the stream comes to them."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.stream: LateStream = LateStream()

    def copy_to_device(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        copy = super().copy_to_device
        self.stream.queue.append(lambda: copy(destination, source, nbytes, stream))
