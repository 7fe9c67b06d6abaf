"""Many sequences through a cache with a host tier: whatever comes back is compared by content."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.prefix_cache import CacheLimits
from tests.helpers.reuse_host_world import HostWorld
from tests.helpers.reuse_requests import NAMINGS, WINDOWS, run


@st.composite
def worlds(draw: st.DrawFn, *, windows: bool = False, states: bool = False) -> HostWorld:
    groups = ReuseGroups(
        page_tokens=draw(st.sampled_from([1, 2, 4])),
        has_full=draw(st.integers(0, 4)) > 0 or not (windows or states),
        windows=tuple(draw(st.lists(st.sampled_from(WINDOWS), min_size=1, max_size=2))) if windows else (),
        is_recurrent=states,
    )
    limits = CacheLimits(max_blocks=draw(st.sampled_from([None, 3, 5, 12])), whole_pages=draw(st.booleans()))
    host = draw(st.sampled_from([(1, 1, 1), (4, 2, 1), (9, 6, 3), (60, 20, 9)]))
    options: Any = {"limits": limits, "naming": draw(st.sampled_from(NAMINGS))}
    pages, slots, snapshots = draw(st.integers(4, 16)), draw(st.integers(0, 6)), draw(st.integers(1, 3))
    return HostWorld(groups, pages, host=host, slots=slots, snapshots=snapshots, **options)


@given(st.data())
def test_full_attention(data: st.DataObject) -> None:
    run(data, data.draw(worlds()))


@given(st.data())
def test_windows(data: st.DataObject) -> None:
    run(data, data.draw(worlds(windows=True)))


@given(st.data())
def test_states(data: st.DataObject) -> None:
    run(data, data.draw(worlds(states=True)))


@given(st.data())
def test_windows_and_states(data: st.DataObject) -> None:
    run(data, data.draw(worlds(windows=True, states=True)))
