"""The collector is off while anybody asks for it, and on again as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from numba_kv.device.collection import collection_paused


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    gc.enable()


def test_it_is_on_again_afterwards() -> None:
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_after_an_error_too() -> None:
    with pytest.raises(KeyError), collection_paused():
        raise KeyError
    assert gc.isenabled()


def test_what_was_off_stays_off() -> None:
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_the_first_thread_to_end_leaves_it_off_for_the_other() -> None:
    inside, ended = threading.Event(), threading.Event()

    def other() -> None:
        with collection_paused():
            inside.set()
            ended.wait(10)

    thread = threading.Thread(target=other)
    with collection_paused():
        thread.start()
        assert inside.wait(10)
    assert not gc.isenabled()
    ended.set()
    thread.join()
    assert gc.isenabled()
