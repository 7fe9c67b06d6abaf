"""ReuseEvents: tells a listener which blocks came and went, when nothing that it does can be in a call's way."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numba_kv.device.guard import CallGuard
    from numba_kv.ledger.reuse.events import BlockEvent

__all__ = ["ReuseEvents"]

_log = logging.getLogger(__name__)


class ReuseEvents:
    """Takes the events of a batch's call, and passes them on in their order when the call has ended.

    The batch is idle then, and the thread's current device is the caller's: a listener may call the batch. What such calls tell
    comes behind the events that are waiting, not within one; and what several threads have to tell comes from one at a time.
    The call has done its work and has a result to return, so an error of the listener is not raised from it but logged, to
    ``numba_kv.batch.reuse_events``, and the next event is told. Only an interrupt is raised, and the rest told after the next
    call.

    Parameters
    ----------
    listener : callable
        Is told of each event.
    guard : CallGuard
        Of the batch's calls; its `after` is set.
    """

    def __init__(self, listener: Callable[[BlockEvent], None], guard: CallGuard) -> None:
        self._listener = listener
        self._guard = guard
        self._waiting: deque[BlockEvent] = deque()
        self._telling = threading.Lock()
        guard.after = self.tell

    def __call__(self, event: BlockEvent) -> None:
        """Take an event; outside of a call, as when somebody clears the cache, it is told at once."""
        self._waiting.append(event)
        if not self._guard.is_busy:
            self.tell()

    def tell(self) -> None:
        """Tell all events that are waiting, unless they are being told already: then these are among them."""
        while self._waiting and self._telling.acquire(blocking=False):
            try:
                while self._waiting:
                    self._tell(self._waiting.popleft())
            finally:
                self._telling.release()

    def _tell(self, event: BlockEvent) -> None:
        try:
            self._listener(event)
        except Exception:
            _log.exception("on_event raised for a %s event", type(event).__name__)
