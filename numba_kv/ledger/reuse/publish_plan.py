"""What a sequence leaves behind, decided before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.errors import InputError, StateError
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.path import Path
from numba_kv.ledger.reuse.run import Tail
from numba_kv.ledger.reuse.tree import PrefixTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PublishPlan", "PublishRequest", "RingView", "WindowWish", "plan_publish"]


def _none() -> NDArray[np.int32]:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class RingView:
    """The blocks of a row that a ring holds: ``pages[i]`` has block ``first_block + i``; the last may be filled in part."""

    first_block: int
    pages: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PublishRequest:
    """A sequence and where its K and V are.

    Attributes
    ----------
    identity, content : ContextIdentity, TokenContent
        What it is.
    tokens : int
        Its first tokens to publish; all their K and V are written (for a draft: as far as target and draft both are).
    pages, draft_pages : int32 array
        The row's pages of the full group, block after block; those of the draft, perhaps fewer.
    rings : tuple of RingView
        For each window group.
    is_point : bool
        Whether window pages are to be copied here (`PublishPolicy.points`).
    has_state : bool
        Whether recurrent states are now those behind `tokens` tokens, and to be kept.
    with_tail : bool
        Whether a last block that is not full is to be kept.
    priority : int
        Of the request.
    """

    identity: ContextIdentity
    content: TokenContent
    tokens: int
    pages: NDArray[np.int32] = field(default_factory=_none)
    draft_pages: NDArray[np.int32] = field(default_factory=_none)
    rings: tuple[RingView, ...] = ()
    is_point: bool = False
    has_state: bool = False
    with_tail: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class WindowWish:
    """Pages of one window group to be copied, of those from `first_block` on that are seen from here.

    Whole blocks, and the block in which the tokens end (-1: none).
    """

    window: int
    first_block: int
    blocks: NDArray[np.int64]
    sources: NDArray[np.int32]
    partial_source: int = -1

    @property
    def slots(self) -> int:
        """Slots that the copies take."""
        return len(self.blocks) + (self.partial_source >= 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PublishPlan:
    """What publishing a sequence will do.

    Attributes
    ----------
    path : Path
        What is kept of it already.
    lines : int32 [lines, n]
        Entries of the blocks that are new.
    duplicates, canonical : int64 [m], int32 [m]
        Blocks that are kept in another page than the row's, and that page: the first one published stays.
    windows : tuple of WindowWish
        For each window group of which copies are wanted.
    unreachable : tuple of int
        Window groups whose ring no longer holds what would have to be copied.
    tail_tokens, tail : int, Tail or None
        Tokens of a last block to be kept; the tail that has them already.
    wants_state : bool
        Whether a snapshot is to be taken.
    drafts : tuple of (int, int, int)
        Kept blocks that get a page of the draft: block, page, next token (-1: not known yet).
    version : int
        Of the tree.
    """

    path: Path
    lines: NDArray[np.int32]
    duplicates: NDArray[np.int64]
    canonical: NDArray[np.int32]
    windows: tuple[WindowWish, ...] = ()
    unreachable: tuple[int, ...] = ()
    tail_tokens: int = 0
    tail: Tail | None = None
    wants_state: bool = False
    drafts: tuple[tuple[int, int, int], ...] = ()
    version: int = 0


def plan_publish(tree: PrefixTree, groups: ReuseGroups, request: PublishRequest, kept: Any = None) -> PublishPlan:
    """Return what publishing will do. Changes nothing.

    Parameters
    ----------
    kept : bool array, optional
        Pages of the full group that the cache holds: a new block cannot lie in one.

    Raises
    ------
    InputError
        If tokens, pages or rings do not fit each other or the model.
    StateError
        If a page of a new block is kept for another one already.
    """
    _check(groups, request)
    page, tokens = groups.page_tokens, request.tokens
    stop, rest = divmod(tokens, page)
    path = tree.match(request.identity, request.content, tokens)
    have = path.blocks
    lines = np.full((groups.num_lines, stop - have), -1, np.int32)
    duplicates, canonical = np.zeros(0, np.int64), _none()
    if groups.has_full:
        lines[0] = request.pages[have:stop]
        _check_new(lines[0], kept)
        held = path.line(0, 0, have)
        duplicates = np.flatnonzero(held != request.pages[:have])
        canonical = held[duplicates]
    if groups.has_draft:
        _fill_draft(groups, request, have, stop, lines)
    tail_tokens = rest if request.with_tail or (request.has_state and groups.is_recurrent) else 0
    wants_state = request.has_state and groups.is_recurrent and tokens > 0
    tail = _kept_tail(path, request, have, stop, tail_tokens)
    windows, unreachable = _window_wishes(groups, request, path, stop, tail_tokens, tail)
    return PublishPlan(
        path=path,
        lines=lines,
        duplicates=duplicates,
        canonical=canonical,
        windows=windows,
        unreachable=unreachable,
        tail_tokens=tail_tokens,
        tail=tail,
        wants_state=wants_state and (tail is None or tail.snapshot < 0),
        drafts=_draft_upgrades(groups, request, path) if groups.has_draft else (),
        version=tree.version,
    )


def _check(groups: ReuseGroups, request: PublishRequest) -> None:
    tokens, page = request.tokens, groups.page_tokens
    if not 0 <= tokens <= request.content.num_tokens:
        raise InputError(f"tokens: {tokens} are to be published, the ids of {request.content.num_tokens} are known")
    if request.content.page_tokens != page or request.identity.page_tokens != page:
        raise InputError(
            f"page_tokens: {request.content.page_tokens} of the content and {request.identity.page_tokens} of the identity; "
            f"the cache has {page}"
        )
    needed = tokens // page + ((request.with_tail or request.has_state) and tokens % page > 0)
    if groups.has_full and len(request.pages) < needed:
        raise InputError(f"pages: {len(request.pages)} given for {tokens} tokens, which take {needed} of {page}")
    if len(request.rings) not in (0, len(groups.windows)) or (request.is_point and len(request.rings) != len(groups.windows)):
        raise InputError(f"rings: {len(request.rings)} given, the model has {len(groups.windows)} window groups")


def _check_new(pages: NDArray[np.int32], kept: Any) -> None:
    if kept is not None and kept[pages].any():
        page = int(pages[kept[pages]][0])
        raise StateError(f"pages: page {page} is kept for another block; a page is published once")
    if len(np.unique(pages)) != len(pages):
        raise InputError("pages: a page is given for two blocks")


def _next_token(request: PublishRequest, block: int, page: int) -> int:
    at = (block + 1) * page
    return int(request.content.tokens[at]) if at < request.content.num_tokens else -1


def _fill_draft(groups: ReuseGroups, request: PublishRequest, have: int, stop: int, lines: NDArray[np.int32]) -> None:
    given = request.draft_pages[have:stop]
    lines[groups.draft_line, : len(given)] = given
    for i in range(len(given)):
        lines[groups.draft_line + 1, i] = _next_token(request, have + i, groups.page_tokens)


def _draft_upgrades(groups: ReuseGroups, request: PublishRequest, path: Path) -> tuple[tuple[int, int, int], ...]:
    """Return kept blocks for which the row has a page of the draft that is missing, or was computed with another next token."""
    count = min(path.blocks, len(request.draft_pages))
    pages, following = path.line(groups.draft_line, 0, count), path.line(groups.draft_line + 1, 0, count)
    looks_ahead = groups.draft is not None and groups.draft.future_tokens > 0
    found = []
    mine = np.full(count, -1, np.int32)
    ahead = request.content.tokens[groups.page_tokens :: groups.page_tokens][:count]
    mine[: len(ahead)] = ahead
    wanted = (pages < 0) | ((mine != following) & (mine >= 0) & looks_ahead)
    for block in np.flatnonzero(wanted).tolist():
        node, place = path.place(block)
        if pages[block] >= 0 and (isinstance(node, Tail) or (place, int(mine[block])) in node.variants):
            continue
        found.append((block, int(request.draft_pages[block]), int(mine[block])))
    return tuple(found)


def _kept_tail(path: Path, request: PublishRequest, have: int, stop: int, tokens: int) -> Tail | None:
    """Return the tail at exactly the published length, if there is one."""
    if have < stop or path.root is None:
        return None
    run, offset = path.end
    branch = run.branches.get(offset)
    start = stop * request.content.page_tokens
    node = branch.find(request.content.key(start, start + tokens)) if branch is not None else None
    return node if isinstance(node, Tail) else None


def _window_wishes(
    groups: ReuseGroups, request: PublishRequest, path: Path, stop: int, tail_tokens: int, tail: Tail | None
) -> tuple[tuple[WindowWish, ...], tuple[int, ...]]:
    if not request.is_point:
        return (), ()
    wishes, unreachable = [], []
    page = groups.page_tokens
    for w, ring in enumerate(request.rings):
        # A snapshot is used at its own length only; pages alone at the end of the last whole block too.
        first = groups.first_block(w, request.tokens if groups.is_recurrent else stop * page)
        have = np.full(max(0, stop - first), -1, np.int32)
        known = path.line(1 + w, first, min(stop, path.blocks)) if path.blocks > first else _none()
        have[: len(known)] = known
        blocks = first + np.flatnonzero(have < 0)
        partial = -1
        sees_rest = groups.windows[w].lowest_key(request.tokens) < request.tokens
        if tail_tokens and sees_rest and (tail is None or tail.lines[1 + w] < 0):
            partial = int(ring.pages[stop - ring.first_block]) if 0 <= stop - ring.first_block < len(ring.pages) else -2
        places = blocks - ring.first_block
        if partial == -2 or (len(places) and (places[0] < 0 or places[-1] >= len(ring.pages))):
            unreachable.append(w)
        elif len(blocks) or partial >= 0:
            wishes.append(WindowWish(w, first, blocks, ring.pages[places], partial))
    return tuple(wishes), tuple(unreachable)
