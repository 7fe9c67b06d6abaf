"""Captures without garbage collection: memory that garbage gives back meanwhile would end them.

Knows the collector of this process. Does not know graphs.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_paused"]

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep the collector from starting by itself, in all threads, until the last of those who asked for it is through.

    What loses its last reference goes at once, as ever: work that is captured must drop no device memory.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
