"""The longest prefix that all groups of a model can use, and for each group why it is not longer. Pure.

Full groups use all pages of the prefix. A window group needs copies of those pages only that the next token sees. Recurrent
layers need a snapshot at exactly that length, a draft its own pages. So the lengths to try are few: that of the full
group, ends of blocks, begins of attention chunks, snapshots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.path import Path, entry
from numba_kv.ledger.reuse.reuse_plan import Miss, MissReason
from numba_kv.ledger.reuse.run import Run, Tail

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["Found", "PrefixLookup", "longest_kept"]

#: A usable length and, for recurrent layers, the tail that has the snapshot.
Found = tuple[int, Tail | None]


def longest_kept(path: Path, tokens: int, page_tokens: int, *, whole_pages: bool) -> tuple[int, int, tuple[Miss, ...]]:
    """Return how many of a sequence's `tokens` are kept, how many of them full attention can use, and why it is not more.

    Parameters
    ----------
    path : Path
        Where the sequence leads.
    whole_pages : bool
        Whether what is used must end with a block.
    """
    matched = top = path.blocks * page_tokens + path.partial_tokens
    if matched >= tokens:
        top, reason = tokens - 1, MissReason.LAST_TOKEN
    elif path.has_siblings:
        reason = MissReason.DIVERGED
    else:
        reason = MissReason.NOT_KEPT if path.root is not None else MissReason.UNKNOWN_IDENTITY
    miss = Miss("full", reason, top)
    rest = top % page_tokens
    if not whole_pages or not rest:
        return matched, top, (miss,)
    return matched, top - rest, (Miss("full", MissReason.WHOLE_PAGES, top - rest), miss)


class PrefixLookup:
    """What groups beside full attention can use of what is kept.

    Parameters
    ----------
    groups : ReuseGroups
        The model.
    content, path : TokenContent, Path
        The sequence, and where it leads.
    whole_pages : bool
        Whether a prefix must end with a block.
    """

    def __init__(self, groups: ReuseGroups, content: TokenContent, path: Path, *, whole_pages: bool = False) -> None:
        self._groups = groups
        self._content = content
        self._path = path
        self._page = groups.page_tokens
        self._whole = whole_pages
        self._presence: dict[int, NDArray[np.bool_]] = {}
        self._variants: dict[int, int] = {}
        self.draft_tokens, self._draft_reason = self._draft_reach()

    def find(self, top: int) -> tuple[Found, list[Miss]]:
        """Return the longest prefix of at most `top` tokens that all groups can use, and why it is not `top`."""
        found = self._longest(top, range(len(self._groups.windows)), self._groups.has_draft, self._groups.is_recurrent)
        return found, self._misses(top, found[0]) if found[0] < top else []

    def slots(self, window: int, tokens: int, tail: Tail | None) -> tuple[int, NDArray[np.int32]]:
        """Return the first block and the slots of the copies that a window group needs for a prefix."""
        first, whole = self._groups.first_block(window, tokens), tokens // self._page
        found = self._path.line(1 + window, first, whole)
        if self._needs_partial(window, tokens):
            found = np.append(found, np.int32(self._partial_slot(window, tokens, tail)))
        return first, found

    def draft_pages(self, tokens: int) -> NDArray[np.int32]:
        """Return the draft's whole pages of a prefix."""
        pages = self._path.line(self._groups.draft_line, 0, tokens // self._page)
        for block, page in self._variants.items():
            if block < len(pages):
                pages[block] = page
        return pages

    # -- one length ----------------------------------------------------------------------------------------------------

    def _needs_partial(self, window: int, tokens: int) -> bool:
        """Whether a prefix ends inside a block of which the next token sees something."""
        return tokens % self._page > 0 and self._groups.windows[window].lowest_key(tokens) < tokens

    def _partial_slot(self, window: int, tokens: int, tail: Tail | None) -> int:
        if tail is not None and tail.tokens and tail.lines[1 + window] >= 0:
            return int(tail.lines[1 + window])
        return entry(self._path.place(tokens // self._page), 1 + window)

    def _has_window(self, window: int, tokens: int, tail: Tail | None = None) -> bool:
        first, whole = self._groups.first_block(window, tokens), tokens // self._page
        if np.count_nonzero(self._present(window)[first:whole]) < whole - first:
            return False
        return not self._needs_partial(window, tokens) or self._partial_slot(window, tokens, tail) >= 0

    def _present(self, window: int) -> NDArray[np.bool_]:
        found = self._presence.get(window)
        if found is None:
            found = self._presence[window] = self._path.line(1 + window, 0, self._path.blocks) >= 0
        return found

    # -- the longest of several ----------------------------------------------------------------------------------------

    def _longest(self, top: int, windows: range | tuple[int, ...], with_draft: bool, recurrent: bool) -> Found:
        """Return the longest prefix of at most `top` tokens that the given groups can use."""
        limit = min(top, self.draft_tokens) if with_draft else top
        if recurrent:
            for tokens, tail in self._snapshots(limit):
                if all(self._has_window(w, tokens, tail) for w in windows):
                    return tokens, tail
            return 0, None
        best = self._longest_aligned(limit, windows)
        for tokens in self._odd_lengths(limit, windows):
            if tokens <= best:
                continue
            if all(self._has_window(w, tokens) for w in windows):
                best = tokens
        return best, None

    def _odd_lengths(self, limit: int, windows: range | tuple[int, ...]) -> Iterator[int]:
        """Yield lengths inside a block that may be usable: the longest one, and begins of attention chunks."""
        if self._whole:
            return
        if limit % self._page:
            yield limit
        for w in windows:
            window = self._groups.windows[w]
            if window.kind == "chunked":
                yield from range(limit // window.tokens * window.tokens, 0, -window.tokens)

    def _longest_aligned(self, limit: int, windows: range | tuple[int, ...]) -> int:
        """Return the longest prefix of whole blocks that the window groups can use."""
        most = min(limit // self._page, self._path.blocks)
        if all(self._has_window(w, most * self._page) for w in windows):
            return most * self._page
        ends = np.arange(most + 1)
        usable = np.ones(most + 1, bool)
        for w in windows:
            window, tokens = self._groups.windows[w], ends * self._page
            if window.kind == "sliding":
                first = np.minimum(np.maximum(tokens - window.tokens + 1, 0), tokens) // self._page
            else:
                first = tokens // window.tokens * window.tokens // self._page
            missing = np.where(self._present(w)[:most], -1, np.arange(most))
            last_missing = np.concatenate([[-1], np.maximum.accumulate(missing)])
            usable &= last_missing < first
        return int(np.flatnonzero(usable)[-1]) * self._page

    def _snapshots(self, limit: int) -> Iterator[tuple[int, Tail]]:
        """Yield snapshots of the sequence's own prefixes, the longest first."""
        for run, size in [*reversed(self._path.segments), (self._path.root, 0)]:
            if run is None:
                continue
            for offset in sorted(set(run.snapshots), reverse=True):
                if offset <= size:
                    yield from self._snapshots_at(run, offset, limit)

    def _snapshots_at(self, run: Run, offset: int, limit: int) -> Iterator[tuple[int, Tail]]:
        start = (run.start + offset) * self._page
        branch = run.branches[offset]
        most = min(self._page - 1, limit - start)
        if most < 0:
            return
        kept = {node.tokens for node in branch.nodes if isinstance(node, Tail) and node.snapshot >= 0 and node.tokens <= most}
        for count in sorted(kept, reverse=True):
            node = branch.find(self._content.key(start, start + count))
            if isinstance(node, Tail) and node.snapshot >= 0 and start + count > 0:
                yield start + count, node

    def _draft_reach(self) -> tuple[int, MissReason]:
        """Return for how many tokens the draft's pages are valid, and why not for more."""
        groups, path, page = self._groups, self._path, self._page
        if not groups.has_draft or groups.draft is None:
            return self._content.num_tokens, MissReason.NO_DRAFT_PAGES
        pages = path.line(groups.draft_line, 0, path.blocks)
        missing = np.flatnonzero(pages < 0)
        blocks = int(missing[0]) if len(missing) else path.blocks
        if groups.draft.future_tokens:
            expected = path.line(groups.draft_line + 1, 0, blocks)
            following = self._content.tokens[page::page][:blocks]
            wrong = [int(b) for b in np.flatnonzero(expected[: len(following)] != following)]
            wrong += list(range(len(following), blocks))  # the sequence ends with this block: nobody knows what follows
            for block in wrong:
                other = self._variant(block)
                if other < 0:
                    return (block + 1) * page - 1, MissReason.DRAFT_LOOKAHEAD
                self._variants[block] = other
        if blocks == path.blocks and path.partial is not None and entry(path.partial, groups.draft_line) >= 0:
            # What follows the part that is equal differs, or nobody knows it.
            tokens = blocks * page + path.partial_tokens - groups.draft.future_tokens
            return tokens, MissReason.DRAFT_LOOKAHEAD if groups.draft.future_tokens else MissReason.NO_DRAFT_PAGES
        return blocks * page, MissReason.NO_DRAFT_PAGES

    def _variant(self, block: int) -> int:
        """Return another page of the draft that was computed with this sequence's next token; -1: none."""
        at = (block + 1) * self._page
        node, place = self._path.place(block)
        if isinstance(node, Tail) or at >= self._content.num_tokens:
            return -1
        return node.variants.get((place, int(self._content.tokens[at])), -1)

    # -- reasons -------------------------------------------------------------------------------------------------------

    def _misses(self, top: int, found: int) -> list[Miss]:
        misses, groups, most = [], self._groups, top
        if groups.is_recurrent:
            most = self._longest(top, (), False, True)[0]
            if most < top:
                misses.append(Miss("recurrent", MissReason.NO_SNAPSHOT, most))
        for w in range(len(groups.windows)):
            alone = self._longest(most, (w,), False, groups.is_recurrent)[0]
            if alone < most:
                misses.append(Miss(f"window {w}", MissReason.WINDOW_COPIES, alone))
        if groups.has_draft and self.draft_tokens < top:
            misses.append(Miss("draft", self._draft_reason, self.draft_tokens))
        if all(miss.tokens > found for miss in misses):
            misses.append(Miss("all", MissReason.NO_COMMON_LENGTH, found))
        return misses
