"""Calls in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["in_a_thread"]


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Return what `call` returns in a fresh thread; raise what it raises."""
    found: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    value, error = found[0]
    if error is not None:
        raise error
    return value
