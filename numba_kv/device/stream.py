"""Streams and events.

On `cuda` a stream is a `cuda.core.Stream`; on `cpu` and `sim` work is done when the call returns, so streams only keep
the order that a program states.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from numba_kv.device.driver import check_driver
from numba_kv.errors import InputError, StateError

if TYPE_CHECKING:
    from numba_kv.device.cuda_device import CudaDevice

__all__ = ["CudaStream", "Event", "HostStream", "Stream", "stream_handle"]


class Event:
    """A point in a stream. Created by `Stream.record`; borrows nothing. Every method works from any thread.

    Attributes
    ----------
    handle : int
        The driver's event address; 0 on the host targets.
    """

    def __init__(self, native: Any = None, device: CudaDevice | None = None) -> None:
        self.native = native
        self.handle = 0 if native is None else int(native.handle)
        self._device = device
        self._host_time = time.perf_counter()

    @property
    def is_done(self) -> bool:
        """Whether the work before the event has finished (host only, does not wait)."""
        native, device = self.native, self._device
        if native is None:
            return True
        if device is None:
            return bool(native.is_done)
        entered = device.enter()  # as `active` does, at half its cost: this is asked before every upload
        try:
            return bool(native.is_done)
        finally:
            if entered:
                device.leave()

    def synchronize(self) -> None:
        """Wait until the work before the event has finished."""
        if self.native is not None:
            with self._active():
                self.native.sync()

    def microseconds_since(self, earlier: Event) -> float:
        """Return the time between two events that were recorded with ``timing=True``. Waits for this one."""
        if self.native is None or earlier.native is None:
            return (self._host_time - earlier._host_time) * 1e6
        self.synchronize()
        with self._active():
            return float(self.native - earlier.native) * 1e3

    def _active(self) -> AbstractContextManager[None]:
        return nullcontext() if self._device is None else self._device.active()


class Stream:
    """An order of work on one device.

    Attributes
    ----------
    handle : int
        The driver's stream address; 0 on the host targets.
    is_closed : bool
        Whether it was given back: nothing can be enqueued any more.
    """

    handle: int = 0
    is_closed: bool = False

    @property
    def is_capturing(self) -> bool:
        """Whether what is enqueued now goes into a graph instead of running. Host only."""
        return False

    def record(self, *, timing: bool = False, again: Event | None = None) -> Event:
        """Enqueue and return an event after all work enqueued so far.

        Parameters
        ----------
        timing : bool
            Whether `Event.microseconds_since` is to work; then it is a new event.
        again : Event, optional
            An event of this device that nobody waits for any more: recorded anew and returned, which makes no driver object.
        """
        raise StateError("Stream is abstract; take one from a device")

    def wait(self, event: Event) -> None:
        """Make work enqueued from now on wait for `event`. Enqueues; the host does not wait."""
        raise StateError("Stream is abstract; take one from a device")

    def synchronize(self) -> None:
        """Wait until all work enqueued so far has finished."""
        raise StateError("Stream is abstract; take one from a device")

    def close(self) -> None:
        """Give the stream back if this object owns it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(0x{self.handle:x})"


class HostStream(Stream):
    """Stream of the `cpu` and `sim` targets: every call has finished when it returns."""

    def record(self, *, timing: bool = False, again: Event | None = None) -> Event:
        """Return an event that is done."""
        return Event()

    def wait(self, event: Event) -> None:
        """Wait for `event` (another device's stream may have recorded it)."""
        event.synchronize()

    def synchronize(self) -> None:
        """Return at once: nothing is ever pending."""


class CudaStream(Stream):
    """Stream of the `cuda` target. Owns the native stream only if it was created by the device.

    Every method works from any thread, whatever device is current there.
    """

    def __init__(self, native: Any, device: CudaDevice, *, owns: bool, owner: object = None) -> None:
        from cuda.bindings import driver

        self.native = native
        self.handle = int(native.handle)
        self._driver: Any = driver
        self.driver_stream = driver.CUstream(self.handle)
        self._device = device
        self._owns = owns
        self._owner = owner  # a foreign stream lives as long as its own object

    @classmethod
    def of_address(cls, handle: int, device: CudaDevice, owner: object) -> CudaStream:
        """Return a stream that can only be launched on: no driver call is made for it."""
        return cls(SimpleNamespace(handle=handle), device, owns=False, owner=owner)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the stream address."""
        return (0, self.handle)

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which the stream's device is current."""
        return self._device.active()

    @property
    def is_capturing(self) -> bool:
        """Whether what is enqueued now goes into a graph instead of running. Host only."""
        device = self._device
        entered = device.enter()  # as `active` does, at half its cost: this is asked in every step
        try:
            status, *found = self._driver.cuStreamIsCapturing(self.driver_stream)
        finally:
            if entered:
                device.leave()
        if status:
            check_driver((status,), "capture query")
        return bool(found[0])  # 0 is the driver's word for none

    def record(self, *, timing: bool = False, again: Event | None = None) -> Event:
        """Enqueue and return an event after all work enqueued so far."""
        with self.active():
            if not timing and again is not None and again.native is not None:
                self.native.record(again.native)
                return again
            if not timing:
                return Event(self.native.record(), self._device)
            from cuda.core import EventOptions

            return Event(self.native.record(options=EventOptions(timing_enabled=True)), self._device)

    def wait(self, event: Event) -> None:
        """Make work enqueued from now on wait for `event`."""
        if event.native is not None:
            with self.active():
                self.native.wait(event.native)

    def synchronize(self) -> None:
        """Wait until all work enqueued so far has finished."""
        with self.active():
            self.native.sync()

    def close(self) -> None:
        """Destroy the native stream if it is owned."""
        if self._owns:
            self._owns = False
            self.is_closed = True
            with self.active():
                self.native.close()


def stream_handle(stream: object) -> int:
    """Return the driver address of a foreign stream: an int, or an object with `__cuda_stream__` or `cuda_stream`.

    Raises
    ------
    InputError
        If `stream` is none of these.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        return int(pair[1])
    for name in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, Numba
        value = getattr(stream, name, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0)
    raise InputError(f"stream: {stream!r} is not a stream (an int handle, or an object with __cuda_stream__)")
