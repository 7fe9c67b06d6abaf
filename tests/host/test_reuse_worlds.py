"""Many sequences through the prefix cache: every lease is checked by content, every plan and refusal by brute force."""

from __future__ import annotations

from hypothesis import given, strategies as st

from numba_kv.ledger.reuse.groups import DraftContract, ReuseGroups
from numba_kv.ledger.reuse.prefix_cache import CacheLimits
from tests.helpers.reuse_requests import NAMINGS, WINDOWS, run
from tests.helpers.reuse_world import World


@st.composite
def worlds(draw: st.DrawFn, *, windows: bool = False, states: bool = False, draft: bool = False) -> World:
    page = draw(st.sampled_from([1, 2, 4]))
    groups = ReuseGroups(
        page_tokens=page,
        has_full=draft or draw(st.integers(0, 4)) > 0 or not (windows or states),
        windows=tuple(draw(st.lists(st.sampled_from(WINDOWS), min_size=1, max_size=2))) if windows else (),
        is_recurrent=states,
        draft=DraftContract(future_tokens=draw(st.integers(0, 1))) if draft else None,
    )
    limits = CacheLimits(max_blocks=draw(st.sampled_from([None, 0, 5, 12])), whole_pages=draw(st.booleans()))
    return World(
        groups,
        draw(st.integers(4, 24)),
        slots=draw(st.integers(0, 8)),
        snapshots=draw(st.integers(1, 4)),
        limits=limits,
        naming=draw(st.sampled_from(NAMINGS)),
    )


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


@given(st.data())
def test_drafts(data: st.DataObject) -> None:
    run(data, data.draw(worlds(draft=True)))


@given(st.data())
def test_everything_at_once(data: st.DataObject) -> None:
    run(data, data.draw(worlds(windows=True, states=True, draft=True)))
