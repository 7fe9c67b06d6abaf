"""What the host tier promises: what goes, what comes back, what is copied for it, and what is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numba_kv.errors import InputError
from numba_kv.geometry import Window
from numba_kv.ledger.reuse.block_hash import Blake2bHash
from numba_kv.ledger.reuse.cargo import content_of, settled
from numba_kv.ledger.reuse.content import MediaSpan, TokenContent
from numba_kv.ledger.reuse.events import BlocksRemoved, BlocksStored
from numba_kv.ledger.reuse.groups import DraftContract, ReuseGroups
from numba_kv.ledger.reuse.host_tier import HostTier
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import CacheLimits
from tests.helpers.reuse_host_world import HostWorld
from tests.helpers.reuse_world import World

PAGE = 4
FULL = ReuseGroups(page_tokens=PAGE)
MINE = ContextIdentity(page_tokens=PAGE)
ALL = PublishPolicy(publish="all", every_blocks=2, tails=True)


def world(pages: int = 8, host: tuple[int, int, int] = (20, 0, 0), groups: ReuseGroups = FULL, **more: Any) -> HostWorld:
    return HostWorld(groups, pages, host=host, **{"slots": 0, "snapshots": 0, **more})


def serve(w: World, tokens: list[int], identity: ContextIdentity = MINE) -> int:
    """Serve a prompt to its end; return how much of it was reused."""
    row = w.admit(identity, TokenContent(w.page, tokens), PublishPolicy())
    assert row is not None
    reused = row.length
    w.prefill(row, 99)
    w.retire(row)
    w.check()
    return reused


def test_what_goes_comes_back() -> None:
    w = world()
    first, second = list(range(28)), list(range(100, 128))
    assert [serve(w, prompt) for prompt in (first, second, first, second)] == [0, 0, 27, 27]
    figures = w.cache.figures
    assert (figures.host_hits, figures.host_tokens) == (2, 27 * 2 - 4)  # one block of the first had stayed on the device
    assert figures.pages_to_device == 2 * 7 - 1
    assert w.tier.store.figures.evicted_blocks == 0


def test_what_goes_again_is_not_copied_again() -> None:
    w = world()
    for _ in range(3):
        for base in (0, 100):
            serve(w, list(range(base, base + 28)))
    assert w.cache.figures.pages_to_host == 14
    assert w.cache.figures.pages_to_device > 14


def test_the_host_is_bounded_and_gives_up_what_was_used_longest_ago() -> None:
    w = world(host=(9, 0, 0))
    for base in (0, 100, 200, 300):
        serve(w, list(range(base, base + 28)))
    full = w.tier.store.full
    assert full is not None
    assert full.num_kept == 9
    assert serve(w, list(range(28))) == 0
    assert serve(w, list(range(300, 328))) > 0


def test_other_identities_and_other_tokens_get_nothing() -> None:
    w = world()
    serve(w, list(range(28)))
    serve(w, list(range(100, 128)))
    assert serve(w, list(range(28)), ContextIdentity(page_tokens=PAGE, salt=b"other")) == 0
    assert serve(w, [*range(17), *range(50, 61)]) == 17


@pytest.mark.parametrize("name", ["full", "windows", "both", "windows alone"])
def test_events_say_where_blocks_are(name: str) -> None:
    told: list[Any] = []
    groups, _ = MODELS[name]
    w = HostWorld(groups, 16, host=(12, 5, 3), slots=4, snapshots=2, naming=Blake2bHash())
    w.cache.store.on_event = w.tier.store.on_event = told.append
    if not groups.has_full:
        w.cache.limits = CacheLimits(max_blocks=6)
    reused(w, 5)
    there: dict[str, set[bytes]] = {"device": set(), "host": set()}
    for event in told:
        if isinstance(event, BlocksStored):
            assert event.tokens.shape == (len(event.names), PAGE)
            assert not there[event.medium] & set(event.names)
            there[event.medium] |= set(event.names)
        else:
            assert isinstance(event, BlocksRemoved)
            assert set(event.names) <= there[event.medium]
            there[event.medium] -= set(event.names)
    assert {type(e) for e in told if e.medium == "host"} == {BlocksStored, BlocksRemoved}
    for medium, store in (("device", w.cache.store), ("host", w.tier.store)):
        found = [(run.names[b], run.lines[:, b]) for run in store.tree.runs() for b in range(run.size)]
        if medium == "host":
            found = [(block, lines) for block, lines in found if (lines[0] if groups.has_full else lines.max()) >= 0]
        assert {block for block, _ in found} == there[medium]


def test_nothing_comes_where_there_is_no_room() -> None:
    w = world()
    serve(w, list(range(28)))
    row = w.admit(MINE, TokenContent(PAGE, list(range(100, 128))), PublishPolicy())
    assert row is not None
    before = w.picture()
    assert w.cache.bring_back(MINE, TokenContent(PAGE, list(range(28)))) == 0
    assert w.picture() == before
    w.retire(row)
    assert serve(w, list(range(28))) == 27


def test_of_a_place_that_several_go_to_the_last_stays() -> None:
    def ids(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    found = settled([(0, ids(1, 2, 3), ids(7, 8, 9)), (-1, ids(4), ids(0)), (0, ids(5, 6), ids(8, 4))])
    assert {line: sorted(map(tuple, pairs.tolist())) for line, pairs in found.items()} == {
        0: [(1, 7), (3, 9), (5, 8), (6, 4)],
        -1: [(4, 0)],
    }


def test_clear_empties_both_tiers_without_a_copy() -> None:
    w = world()
    serve(w, list(range(28)))
    serve(w, list(range(100, 128)))
    copied = w.cache.figures.pages_to_host
    w.cache.clear()
    w.check()
    assert w.cache.figures.pages_to_host == copied
    assert w.tier.store.full is not None
    assert w.tier.store.full.num_kept == w.tier.store.tree.num_blocks == 0


def test_pages_of_a_draft_are_refused() -> None:
    groups = ReuseGroups(page_tokens=PAGE, draft=DraftContract(future_tokens=1))
    with pytest.raises(InputError, match="draft"):
        HostTier(groups, pages=4, moves=world())


def test_tokens_and_media_of_a_run_are_read_from_the_tree() -> None:
    w = world(pages=40)
    spans = [MediaSpan(2, 9, b"x" * 16), MediaSpan(11, 3, b"y" * 16), MediaSpan(14, 6, b"x" * 16)]
    content = TokenContent(PAGE, list(range(24)), spans)
    for tokens, media in ((list(range(24)), spans), ([*range(14), *range(50, 60)], spans[:2])):
        row = w.admit(MINE, TokenContent(PAGE, tokens, media), PublishPolicy())
        assert row is not None
        w.prefill(row, 99)
    runs = [run for run in w.cache.store.tree.runs() if run.size]
    assert len(runs) == 2
    found = content_of(runs[0], runs[0].size)
    assert np.array_equal(found.tokens, content.tokens)
    assert found.media_blocks(0, 6) == content.media_blocks(0, 6)
    branch = content_of(runs[1], runs[1].size)
    assert branch.tokens.tolist() == [*range(14), *range(50, 60)]
    assert list(branch.media) == spans[:2]


MODELS = {
    "full": (FULL, (400, 0, 0)),
    "windows": (ReuseGroups(page_tokens=PAGE, windows=(Window("sliding", 7), Window("chunked", 8))), (400, 400, 0)),
    "states": (ReuseGroups(page_tokens=PAGE, is_recurrent=True), (400, 0, 400)),
    "both": (ReuseGroups(page_tokens=PAGE, windows=(Window("sliding", 7),), is_recurrent=True), (400, 400, 400)),
    "windows alone": (ReuseGroups(page_tokens=PAGE, has_full=False, windows=(Window("sliding", 7),)), (0, 400, 0)),
    "states alone": (ReuseGroups(page_tokens=PAGE, has_full=False, is_recurrent=True), (0, 0, 400)),
}


def reused(w: World, seed: int) -> int:
    """Serve many prompts of few beginnings; return how much of them was reused."""
    random, total = np.random.default_rng(seed), 0
    stems = [random.integers(0, 3, 30).tolist() for _ in range(4)]
    for _ in range(40):
        stem = stems[int(random.integers(4))]
        tokens = stem[: int(random.integers(5, 30))] + random.integers(0, 3, int(random.integers(6))).tolist()
        row = w.admit(MINE, TokenContent(PAGE, tokens), ALL)
        assert row is not None
        total += row.length
        w.prefill(row, 99)
        assert w.decode(row, random.integers(0, 3, 3).tolist(), 99, is_end=True)
        w.retire(row)
        w.check()
    return total


@pytest.mark.parametrize("name", ["full", "windows", "states", "both", "states alone"])
def test_a_large_host_is_nearly_as_good_as_a_large_device(name: str) -> None:
    groups, host = MODELS[name]
    small = reused(World(groups, 24, slots=8, snapshots=4), 3)
    large = reused(World(groups, 4000, slots=4000, snapshots=4000), 3)
    tiered = reused(HostWorld(groups, 24, host=host, slots=8, snapshots=4), 3)
    assert small < 0.8 * large
    assert tiered >= (1.0 if name == "full" else 0.9) * large
