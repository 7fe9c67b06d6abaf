"""CallGuard: one call at a time, on a live object, in a thread whose current device is right."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from numba_kv.errors import NumbaKVError, StateError

if TYPE_CHECKING:
    from types import TracebackType

    from numba_kv.device import Device

__all__ = ["CallGuard"]


class CallGuard:
    """Wraps every public call of a batch.

    A refusal (an error of this library raised before anything was enqueued) leaves the object usable; anything that goes
    wrong while work is being enqueued poisons it, because host and device may then disagree.
    """

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self._name = name
        self._lock = threading.Lock()
        self._entered = False
        self.is_closed = False
        self.is_enqueueing = False
        self.poison: BaseException | None = None

    def __enter__(self) -> None:
        self._acquire()
        try:
            self.check_open()
            if self.poison is not None:
                reason = f"{self._name} failed while work was being enqueued ({self.poison!r}); close it"
                raise StateError(reason) from self.poison
            self._entered = self._device.enter()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and (self.is_enqueueing or not isinstance(error, NumbaKVError)):
            self.poison = error
        self.is_enqueueing = False
        try:
            if self._entered:
                self._device.leave()
        finally:
            self._lock.release()

    def check_open(self) -> None:
        """Raise StateError after `close`."""
        if self.is_closed:
            raise StateError(f"{self._name} is closed")

    def close(self) -> bool:
        """Refuse every later call; return False if `close` was called before.

        Raises
        ------
        StateError
            If a call is running in another thread.
        """
        if self.is_closed:
            return False
        self._acquire()
        self.is_closed = True
        self._lock.release()
        return True

    def _acquire(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise StateError(f"{self._name} is in use by another thread; calls must not overlap")
