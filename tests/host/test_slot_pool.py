"""SlotPool: who an id is kept for, and that giving one up does not look at all the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numba_kv.errors import StateError
from numba_kv.geometry import Window
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.slots import SlotPool
from numba_kv.ledger.reuse.store import KeptStore
from tests.helpers.reuse_host_world import HostWorld


def test_a_slot_says_what_it_is_kept_for() -> None:
    pool: SlotPool[str] = SlotPool(10, 2)
    first, second = pool.keep("a"), pool.keep("b")
    assert [pool.owner(slot) for slot in (second, first)] == ["b", "a"]
    assert pool.oldest(1) == [first]  # asking is no use
    pool.give_up(first)
    for slot in (first, 9, 12):
        with pytest.raises(StateError, match=f"slot {slot} is not kept"):
            pool.owner(slot)


def test_room_for_copies_and_snapshots_is_made_without_a_look_at_all_kept_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SlotPool[Any]] = []
    kept, making = SlotPool.kept, [False]

    def noted(pool: SlotPool[Any]) -> Any:
        if making[0]:
            asked.append(pool)
        return kept(pool)

    def within(method: Any) -> Any:
        def call(*args: Any) -> Any:
            making[0] = True
            try:
                return method(*args)
            finally:
                making[0] = False

        return call

    monkeypatch.setattr(SlotPool, "kept", noted)
    for name in ("take_window_slots", "take_snapshot_slot"):
        monkeypatch.setattr(KeptStore, name, within(getattr(KeptStore, name)))
    groups = ReuseGroups(page_tokens=4, windows=(Window("sliding", 7),), is_recurrent=True)
    world = HostWorld(groups, 60, host=(60, 60, 60), slots=6, snapshots=3)
    random = np.random.default_rng(2)
    for _ in range(12):
        content = TokenContent(4, random.integers(0, 3, 22).tolist())
        row = world.admit(ContextIdentity(page_tokens=4), content, PublishPolicy())
        assert row is not None
        world.prefill(row, 99)
        world.retire(row)
        world.check()
    figures = world.cache.figures
    assert figures.evicted_copies > 0
    assert figures.evicted_snapshots > 0
    assert figures.states_to_host > 0
    assert asked == []
