"""A host device whose copies and fills run late, on streams that run each on its own: what a busy GPU does, without one."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from weakref import WeakValueDictionary

from numba_kv.device import Device, Tensor, create_device
from numba_kv.device.driver_functions import CopyFunctions
from numba_kv.device.host_device import HostDevice
from numba_kv.device.stream import Event, HostStream, Stream

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
_handles = itertools.count(1)


class LateEvent(Event):
    """Done once the stream has run everything before it."""

    of: WeakValueDictionary[int, LateEvent] = WeakValueDictionary()

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self.handle = next(_handles)
        self.of[self.handle] = self
        self.record(stream)

    def record(self, stream: LateStream) -> None:
        """Stand behind everything that `stream` has now."""
        with stream.turn:  # not between the end of a piece of work and its count
            self._stream, self._after = stream, stream.num_run + len(stream.queue)

    @property
    def is_done(self) -> bool:
        return self._stream.num_run >= self._after

    def synchronize(self) -> None:
        self._stream.waits += not self.is_done
        self.reach()

    def reach(self) -> None:
        """Let the stream run up to the event."""
        self._stream.run_to(self._after)


class LateStream(HostStream):
    """Queues work until somebody waits for it, or `run` is called. `waits` counts how often the host waited."""

    def __init__(self, handle: int = 1) -> None:
        self.handle = handle
        self.queue: list[Callable[[], None]] = []
        self.num_run = 0
        self.waits = 0
        self.turn = threading.RLock()

    def record(self, *, timing: bool = False, again: Event | None = None) -> Event:
        return LateEvent(self)

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        self.queue.append(event.reach)

    def synchronize(self) -> None:
        self.run(len(self.queue))

    def run(self, count: int) -> None:
        """Run the next `count` pieces of work."""
        self.run_to(self.num_run + count)

    def run_to(self, count: int) -> None:
        """Run until `count` pieces of work have run since the start."""
        with self.turn:
            while self.num_run < count:
                self.queue.pop(0)()
                self.num_run += 1


class LateDevice(HostDevice):
    """Copies to the device read their source, and fills write, when their stream comes to them.

    Uploads are staged, as for a GPU; `status` is what their copies return.
    """

    def __init__(self) -> None:
        super().__init__("cpu")
        self.stream: LateStream = LateStream()
        self._streams = {1: self.stream}
        self.status = 0
        # what is called by its address alone
        functions = {name: getattr(self, f"_{name}_block") for name in ("copy", "record", "query")}
        functions["make_current"] = lambda context, *rest: 0 if context == id(self) else 201
        self._functions = {name: FUNCTION(function) for name, function in functions.items()}

    def as_stream(self, stream: object | None) -> Stream:
        if stream is None:
            handle = len(self._streams) + 1
            return self._streams.setdefault(handle, LateStream(handle))
        return super().as_stream(stream)

    def copy_functions(self) -> CopyFunctions:
        addresses = {name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in self._functions.items()}
        return CopyFunctions(**addresses, context=id(self))

    def _copy_block(self, destination: int, source: int, nbytes: int, stream: int) -> int:
        self._copy(destination, source, nbytes, self._streams[stream])
        return self.status

    def _record_block(self, event: int, stream: int, *rest: int) -> int:
        LateEvent.of[event].record(self._streams[stream])
        return 0

    def _query_block(self, event: int, *rest: int) -> int:
        found = LateEvent.of[event]
        if found.is_done:
            return 0
        found.synchronize()
        return 600  # of when it was asked

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


def staged_device() -> Device:
    """Return a device with staging: the GPU, where the tests are for one."""
    device = create_device()
    return device if device.target == "cuda" else LateDevice()
