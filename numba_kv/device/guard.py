"""CallGuard: one call at a time, on a live object, in a thread whose current device is right."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

from numba_kv.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from numba_kv.device.device import Device

__all__ = ["CallGuard", "CallParts", "HostCalls", "ReadCalls"]


class CallGuard:
    """Wraps every public call of an object, as ``with guard:``.

    Parameters
    ----------
    device : Device
        Current inside.
    name : str
        What messages call the object.
    poisons : bool
        Whether a failed call can end the object. If so, an error raised before anything was enqueued leaves it usable, but
        anything that goes wrong while work is being enqueued poisons it, because host and device may then disagree, and so
        does an interrupt at any time. If not, it is usable after every error: for objects that change their own state only
        after the work is enqueued.

    Attributes
    ----------
    lock : RLock
        What a call holds. `take` and `release` are the way to it; a call of a few microseconds on an object that cannot be
        spoiled takes it by itself, without waiting, and looks at `is_closed`.
    host : HostCalls
        The same for calls that do not touch the device: cheaper, as the current device is left alone.
    part : CallParts
        The same for a part of a call, which does not end with it; another part, or `finish`, does what follows the call.
    reads : ReadCalls
        The same for calls that leave the object as it is: nobody but a running call keeps them out (`drive`).
    after : callable or None
        Called when a call has ended, however it has, and the next one can be made. Set by the object.
    is_closed : bool
        Whether `close` was called.
    is_enqueueing : bool
        Set by a call that begins to enqueue work; reset when it ends.
    poison : BaseException or None
        What ended the object.
    """

    def __init__(self, device: Device, name: str, *, poisons: bool = True) -> None:
        self._device = device
        self._name = name
        self._poisons = poisons
        self.lock = threading.RLock()  # the thread that was interrupted in a call can still close the object
        self._is_busy = False
        self._held: list[object] = []  # one a call: an object that cannot be spoiled may be called inside a call
        self.host = HostCalls(self)
        self.part = CallParts(self)
        self.reads = ReadCalls(self)
        self._driver: CallGuard | None = None
        self._driver_calls = ""
        self.after: Callable[[], None] | None = None
        self.is_closed = False
        self.is_enqueueing = False
        self.poison: BaseException | None = None

    def __enter__(self, is_reading: bool = False) -> None:
        self.take()
        try:
            if self._driver is not None and not (is_reading or self._driver.is_busy):
                name = self._driver._name
                raise StateError(f"{self._name} is a part of {name}, which changes its parts together; {self._driver_calls}")
            self._held.append(self._device.hold())
        except BaseException:
            self.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.leave(error)
        if self.after is not None:
            self.after()

    def drive(self, driver: CallGuard, calls: str) -> None:
        """Refuse calls other than `reads` from now on, unless one of `driver` is running; `calls` says what to do instead."""
        self._driver, self._driver_calls = driver, calls

    @property
    def is_busy(self) -> bool:
        """Whether a call is running, or was interrupted."""
        return self._is_busy

    def leave(self, error: BaseException | None) -> None:
        """End a part of a call, with what it raised."""
        if error is not None and self._poisons and (self.is_enqueueing or not isinstance(error, Exception)):
            self.poison = error
        self.is_enqueueing = False
        try:
            self._device.let_go(self._held.pop())
        finally:
            self.release()

    def finish(self) -> None:
        """Do what follows a call whose parts have ended."""
        if self.after is not None:
            self.after()

    def take(self) -> None:
        """Keep every other call out until `release`.

        Raises
        ------
        StateError
            If another call is running, or the object is closed or poisoned.
        """
        if not self.lock.acquire(False):
            self._refuse_thread()
        try:
            if self.is_closed or self.poison is not None or (self._is_busy and self._poisons):
                self._refuse()
            self._is_busy = True
        except BaseException:
            self.lock.release()
            raise

    def _refuse(self) -> NoReturn:
        self.check_open()
        if self.poison is not None:
            reason = f"{self._name} failed while work was being enqueued ({self.poison!r}); close it"
            raise StateError(reason) from self.poison
        # what cannot be spoiled just goes on, and does not come here
        raise StateError(f"{self._name}: a call is running in this thread, or was interrupted; close it")

    def release(self) -> None:
        """Let the next call in."""
        self._is_busy = False
        self.lock.release()

    def check_open(self) -> None:
        """Raise StateError after `close`."""
        if self.is_closed:
            raise StateError(f"{self._name} is closed")

    def close(self) -> None:
        """Refuse every later call; a second call does nothing.

        Raises
        ------
        StateError
            If a call is running in another thread.
        """
        if not self.lock.acquire(False):
            self._refuse_thread()
        self.is_closed = True
        self.lock.release()

    def _refuse_thread(self) -> NoReturn:
        raise StateError(f"{self._name} is in use by another thread; calls must not overlap")


class CallParts:
    """A guard's view for calls in several parts."""

    __slots__ = ("_guard",)

    def __init__(self, guard: CallGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._guard.leave(error)


class ReadCalls:
    """A guard's view for calls that leave the object as it is."""

    __slots__ = ("_guard",)

    def __init__(self, guard: CallGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.__enter__(True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._guard.__exit__(kind, error, trace)


class HostCalls:
    """A guard's view for calls that stay on the host and change nothing if they raise."""

    __slots__ = ("_guard",)

    def __init__(self, guard: CallGuard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        self._guard.take()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._guard.release()
