"""Ctrl-C anywhere: closing works afterwards, gives the memory back, and can be followed by a new batch."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import numba_kv as kv
from numba_kv.batch.composer import Composer
from numba_kv.cache import KVPageTable, StepBuffers
from numba_kv.device import Memory, Staging
from numba_kv.device.guard import CallGuard
from numba_kv.kernels.jit import Launch
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.rows import RowLedger
from tests.helpers.models import tiny_config

#: Where Ctrl-C strikes: before or after any call of these.
PLACES = [
    (KVPageTable, "lend"),
    (KVPageTable, "give_back"),
    (StepBuffers, "reset"),
    (Staging, "acquire"),
    (Staging, "send_to"),
    (Staging, "close"),
    (Launch, "__call__"),
    (CallGuard, "take"),
    (CallGuard, "release"),
    (RowLedger, "note_change"),
    (Composer, "_note_even"),
    (PageIdPool, "take"),
    (RowLedger, "note_rewind"),
    (RowLedger, "permute"),
]


class Interrupt:
    """Raises KeyboardInterrupt once: before or after the n-th call of a method."""

    def __init__(self, owner: type, name: str, call: int, after: bool) -> None:
        self.owner, self.name, self.left, self.after = owner, name, call, after
        self.struck = False

    def __enter__(self) -> Interrupt:
        original = self.original = self.owner.__dict__[self.name]

        def strike(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left or self.struck:
                return original(*arguments, **named)
            self.struck = True
            if self.after:
                original(*arguments, **named)
            raise KeyboardInterrupt

        setattr(self.owner, self.name, strike)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.original)


def interrupts(work: Callable[[kv.SharedResources], object], owner: type, name: str) -> Iterator[kv.SharedResources]:
    """Yield resources on which `work` was interrupted, once for every call of a method, before and after it."""
    for after in (False, True):
        for call in range(1, 60):
            resources = open_resources()
            with Interrupt(owner, name, call, after) as interrupt, contextlib.suppress(KeyboardInterrupt):
                work(resources)
            if not interrupt.struck:
                resources.close()
                break
            yield resources


def life(resources: kv.SharedResources) -> None:
    """A batch from construction to the end of its first sequence."""
    batch = kv.Batch(resources)
    a, b = batch.update(admit=[5, 9])
    batch.step({a: 5, b: 9})
    batch.step(1)
    batch.step(1)
    batch.rewind({a: 1})
    batch.update(retire=[a], admit=[3])
    batch.retire(batch.sequences[0])
    assert batch.compact() == {b: 0}
    batch.close()


def open_resources() -> kv.SharedResources:
    return kv.SharedResources.create_for_llm(tiny_config(None, 6, max_batch_size=3))


@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_an_interrupted_batch_can_be_closed_and_followed(owner: type, name: str) -> None:
    found = 0
    for resources in interrupts(life, owner, name):
        found += 1
        for user in resources.users:
            user.close()
        with kv.Batch(resources) as again:
            again.admit(num_tokens=2)
            again.audit()
        resources.close()
        assert resources.device.memory.current_bytes == 0
    assert found


@pytest.mark.parametrize(("owner", "name"), [*PLACES[1:3], PLACES[5], (Memory, "close"), (KVPageTable, "close")])
def test_interrupted_resources_can_be_closed(owner: type, name: str) -> None:
    """At most the block that was just being given back is lost."""

    def work(resources: kv.SharedResources) -> None:
        kv.Batch(resources).admit(num_tokens=2)
        resources.close()

    for resources in interrupts(work, owner, name):
        resources.close()
        assert resources.is_closed
        left = resources.device.memory
        assert left.allocations - left.frees <= 1


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
