"""Closing SharedResources: every byte comes back, also when the construction fails half way."""

from __future__ import annotations

from typing import Any

import pytest

import numba_kv as kv
from numba_kv.device import Device, Memory, create_device
from numba_kv.errors import CapacityError, StateError
from tests.helpers.models import chunked, tiny_config

MIXED = tiny_config(None, 8)
SEVERAL = tiny_config(None, 8, chunked(16), 12)


def create(config: kv.LLMEngineConfig = MIXED) -> kv.SharedResources:
    return kv.SharedResources.create_for_llm(config)


def test_close_gives_everything_back_once() -> None:
    resources = create(SEVERAL)
    stats, pinned = resources.device.memory, resources.device.pinned
    assert stats.current_bytes == resources.plan.nbytes
    resources.close()
    assert (stats.current_bytes, pinned.current_bytes) == (0, 0)
    assert stats.frees == stats.allocations
    resources.close()
    assert stats.frees == stats.allocations
    assert resources.is_closed
    assert repr(resources).endswith("closed)")


def test_use_after_close_is_an_error() -> None:
    resources = create()
    manager, table = resources.cache_managers[0], resources.kv_page_tables[0]
    pool, lengths = manager.kv(0), manager.lengths
    resources.close()
    for call in (
        lambda: resources.get_swa_kv_page_table(0),
        lambda: kv.allocate_zero_buffer(resources, 10),
        lambda: resources.__enter__(),
        lambda: kv.Batch(resources),
        lambda: manager.kv(0),
        lambda: table.set_identity(),
        lambda: table.tensor,
        lambda: table.upload(),
        lambda: pool.to_host(),
        lambda: lengths.to_host(),
        lambda: resources.zero_buffer.to_host(),
    ):
        with pytest.raises(StateError):
            call()


def test_close_closes_the_batch_first() -> None:
    resources = create()
    batch = kv.Batch(resources)
    seq = batch.admit(num_tokens=3)
    batch.step({seq: 3})
    with pytest.raises(StateError, match="in use by"):
        kv.Batch(resources)
    resources.close()
    assert resources.device.memory.current_bytes == resources.device.pinned.current_bytes == 0
    with pytest.raises(StateError):
        batch.step(1)


def test_a_closed_batch_gives_the_tables_back() -> None:
    with create() as resources:
        with kv.Batch(resources) as batch:
            batch.step({batch.admit(num_tokens=3): 3})
            with pytest.raises(StateError, match="is lent to Batch"):
                resources.kv_page_tables[0].set_identity()
        assert (resources.kv_page_tables[0].tensor.to_host() == -1).all()
        resources.kv_page_tables[0].set_identity()
        assert resources.kv_page_tables[0].upload()
        with kv.Batch(resources) as batch:
            batch.audit()


def test_a_hundred_lives_leave_nothing() -> None:
    device_stats = set()
    for _ in range(100):
        with create() as resources:
            pass
        device_stats.add((resources.device.memory.current_bytes, resources.device.pinned.current_bytes))
    assert device_stats == {(0, 0)}


class FailingDevice:
    """Patches a device so that its k-th allocation of either sort fails."""

    def __init__(self, fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = create_device()
        self.calls, self.fails_at = 0, fails_at
        for name in ("allocate", "allocate_staging"):
            monkeypatch.setattr(self.device, name, self.wrapped(getattr(self.device, name)))
        monkeypatch.setattr("numba_kv.shared_resources.create_device", self.give)

    def give(self, *arguments: object) -> Device:
        return self.device

    def wrapped(self, allocate: Any) -> Any:
        def call(nbytes: int) -> Memory:
            self.calls += 1
            if self.calls == self.fails_at:
                raise CapacityError("device memory: none is left", needed=nbytes, free=0)
            memory: Memory = allocate(nbytes)
            return memory

        return call


def test_a_failed_allocation_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 1
    while True:
        failing = FailingDevice(number, monkeypatch)
        try:
            resources = create(SEVERAL)
        except CapacityError as error:
            assert "none is left" in str(error)  # noqa: PT017 - the loop ends where nothing fails
            assert failing.device.memory.current_bytes == 0
            assert failing.device.pinned.current_bytes == 0
            number += 1
        else:
            assert failing.calls == number - 1
            resources.close()
            assert failing.device.memory.current_bytes == 0
            break
    assert number > 20


def test_a_table_that_somebody_else_borrowed_stays_theirs() -> None:
    resources = create(SEVERAL)
    table = resources.kv_page_tables[0]
    loan = table.lend("me")
    with pytest.raises(StateError, match="is lent to me"):
        kv.Batch(resources)
    assert table.is_lent_for(loan)
    table.give_back(loan)
    with kv.Batch(resources):
        for call in (lambda: table.give_back(loan), table.close):
            with pytest.raises(StateError, match="is lent to Batch"):
                call()
    assert not table.is_lent
    table.lend("me")
    resources.close()  # whoever still has a table then has lost it
    assert resources.device.memory.current_bytes == 0
