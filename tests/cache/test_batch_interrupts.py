"""Ctrl-C anywhere: whatever was interrupted, closing works afterwards, gives all memory back, and can be followed by a new batch."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import numba_kv as kv
from tests.helpers.models import tiny_config

PACKAGE = str(Path(kv.__file__).parent)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that the package runs inside the block."""

    def __init__(self, line: int) -> None:
        self.left = line
        self.struck = False

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left < 0 and not self.struck:
                self.struck = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


def lines_of(work: Callable[[], object]) -> int:
    """Return how many lines of the package a call runs."""
    counter = Interrupt(1 << 60)
    with counter:
        work()
    return (1 << 60) - counter.left


def interrupted(work: Callable[[], object], line: int) -> None:
    """Run a call that is interrupted on the way; Python drops the exception if it strikes in a destructor."""
    with Interrupt(line) as interrupt, contextlib.suppress(KeyboardInterrupt):
        work()
    assert interrupt.struck


def life(resources: kv.SharedResources) -> None:
    """A batch from construction to the end of its first sequence."""
    batch = kv.Batch(resources)
    a, b = batch.update(admit=[5, 9])
    batch.step({a: 5, b: 9})
    batch.step(1)
    batch.step(1)
    batch.rewind({a: 1})
    batch.update(retire=[a], admit=[3])
    batch.compact()
    batch.close()


@pytest.fixture(scope="module", autouse=True)
def compiled(target: str) -> None:
    if target == "sim":
        pytest.skip("the simulator runs kernels in threads that are not traced")
    with kv.SharedResources.create_for_llm(tiny_config(None, 6)) as resources:
        life(resources)


def open_resources() -> kv.SharedResources:
    return kv.SharedResources.create_for_llm(tiny_config(None, 6, max_batch_size=3))


def test_an_interrupt_anywhere_in_a_batch_can_be_cleaned_up() -> None:
    with open_resources() as resources:
        total = lines_of(lambda: life(resources))
    for line in range(3, total, max(1, total // 150)):
        resources = open_resources()
        interrupted(lambda: life(resources), line)  # noqa: B023 - called at once
        if resources._user is not None:
            resources._user.close()
        with kv.Batch(resources) as again:
            again.admit(num_tokens=2)
            again.audit()
        resources.close()
        assert resources.device.memory.current_bytes == 0


def test_an_interrupt_while_resources_close_can_be_cleaned_up() -> None:
    resources = open_resources()
    batch = kv.Batch(resources)
    total = lines_of(resources.close)
    batch.close()
    for line in range(2, total - 5, max(1, total // 60)):
        resources = open_resources()
        batch = kv.Batch(resources)
        interrupted(resources.close, line)
        resources.close()
        batch.close()
        assert resources.is_closed
        left = resources.device.memory
        assert left.allocations - left.frees <= 1  # the block that was just being given back


def test_reading_never_keeps_a_step_out() -> None:
    """A thread that watches lengths and counters does not make the stepping thread fail."""
    with open_resources() as resources, kv.Batch(resources) as batch:
        sequence = batch.admit(num_tokens=4)
        batch.step({sequence: 4})
        stop, seen = threading.Event(), []

        def watch() -> None:
            while not stop.is_set():
                seen.append((sequence.length, batch.stats.steps))

        thread = threading.Thread(target=watch)
        thread.start()
        for _ in range(40):
            batch.step(1)
        stop.set()
        thread.join()
        assert [lengths for lengths, _ in seen] == sorted(lengths for lengths, _ in seen)
        batch.audit()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_that_holds_memory_can_be_copied(duplicate: Callable[[Any], Any]) -> None:
    """A copy would keep an address and not the memory."""
    with open_resources() as resources, kv.Batch(resources) as batch:
        sequence = batch.admit(num_tokens=4)
        view = batch.step({sequence: 4})
        for item in (resources, batch, sequence, view, batch.capture(), view.seq_lens, resources.kv_page_tables[0]):
            with pytest.raises(kv.StateError, match="cannot be copied or pickled"):
                duplicate(item)


def test_captured_steps_are_noted_with_what_ran_before_them() -> None:
    with open_resources() as resources, kv.Batch(resources) as batch:
        sequence = batch.admit(num_tokens=4)
        batch.step({sequence: 4})
        first, second = batch.capture(), batch.capture()
        batch.reserve(4)
        first.launch()
        second.launch()
        first.launch()
        second.advanced()
        assert (first.launched, second.launched) == (1, 0)
        with pytest.raises(kv.StateError, match="2 are noted, 1 were launched"):
            first.advanced(2)
        first.advanced()
        assert sequence.length == 7
        batch.audit()
