"""Prefix reuse as plain Python would do it, with dicts and lists and a record a block, to be measured beside ours.

It does for full attention what `numba_kv.ledger.reuse` does: prompts of different identities share nothing, a lookup changes
nothing and may become stale, tokens are compared on a hit, the last token is left to be computed, each block counts its
readers, room is made before a lease is given, what was read longest ago goes first and a block never before those behind it, a
lease is released once, hits and reasons of misses are counted. It has no parts of pages, priorities, windows, states or drafts.

A prompt is cut into blocks and these are named beforehand, by `prepare`: neither is part of a lookup. Blocks are bytes, the
quickest to compare of what Python has. Not used by the library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass

from numba_kv.errors import CapacityError, StateError

__all__ = ["PlainBlock", "PlainLease", "PlainPlan", "PlainPrefixCache", "PlainPrompt"]


@dataclass(slots=True)
class PlainPrompt:
    """Tokens of a prompt: its length, and all blocks but the one with the last token, by their chained names."""

    num_tokens: int
    names: list[bytes]
    blocks: list[bytes]

    @classmethod
    def prepare(cls, raw: bytes, page_tokens: int) -> PlainPrompt:
        """Cut and name a prompt; `raw` has four bytes a token."""
        size, tokens = 4 * page_tokens, len(raw) // 4
        stop = (tokens - 1) // page_tokens * size
        blocks = [raw[at : at + size] for at in range(0, stop, size)]
        names, name = [], bytes(16)
        for block in blocks:
            name = hashlib.blake2b(name + block, digest_size=16).digest()
            names.append(name)
        return cls(tokens, names, blocks)


class PlainBlock:
    """A kept block; `home` is the index that it is kept in."""

    __slots__ = ("home", "is_kept", "name", "page", "readers", "tokens")

    def __init__(self, name: bytes, tokens: bytes, page: int, home: dict[bytes, PlainBlock]) -> None:
        self.name = name
        self.tokens = tokens
        self.page = page
        self.home = home
        self.readers = 0
        self.is_kept = True


@dataclass(slots=True)
class PlainPlan:
    """What a lookup found: the blocks, how many pages the rest takes, why it is not more, and when that was."""

    found: list[PlainBlock]
    fresh_pages: int
    reason: str
    epoch: int


@dataclass(slots=True)
class PlainLease:
    """Blocks that a row reads."""

    found: list[PlainBlock]
    is_open: bool = True


class PlainPrefixCache:
    """Kept blocks of one model.

    Attributes
    ----------
    free : list of int
        Pages that nobody holds.
    kept : dict
        Identity -> name -> block.
    unread : dict of int to PlainBlock
        Kept blocks without readers by their page, the one read longest ago first.
    """

    def __init__(self, pages: list[int], page_tokens: int) -> None:
        self.free = pages
        self.kept: dict[Hashable, dict[bytes, PlainBlock]] = {}
        self.unread: dict[int, PlainBlock] = {}
        self.reused_tokens = 0
        self.misses: dict[str, int] = {}
        self._page_tokens = page_tokens
        self._epoch = 0

    def lookup(self, identity: Hashable, prompt: PlainPrompt) -> PlainPlan:
        """Return how much of a prompt is kept. Changes nothing."""
        found: list[PlainBlock] = []
        reason, index = "last token", self.kept.get(identity)
        if index is None:
            reason = "unknown identity"
        else:
            find, keep = index.get, found.append
            for name, tokens in zip(prompt.names, prompt.blocks, strict=True):
                block = find(name)
                if block is None or block.tokens != tokens:
                    reason = "not kept"
                    break
                keep(block)
        return PlainPlan(found, -(-prompt.num_tokens // self._page_tokens) - len(found), reason, self._epoch)

    def acquire(self, plan: PlainPlan) -> PlainLease:
        """Hold what a plan found and make room for the rest; all or nothing.

        Raises
        ------
        StateError
            If something of it has gone since.
        CapacityError
            If there is no room.
        """
        if plan.epoch != self._epoch and not all(block.is_kept for block in plan.found):
            raise StateError("acquire: the plan is stale; look up again")
        unread = self.unread
        for block in plan.found:
            if not block.readers:
                del unread[block.page]
            block.readers += 1
        lease = PlainLease(plan.found)
        if plan.fresh_pages > len(self.free):
            try:
                self.make_room(plan.fresh_pages)
            except CapacityError:
                self.release(lease)
                raise
        self.reused_tokens += len(plan.found) * self._page_tokens
        self.misses[plan.reason] = self.misses.get(plan.reason, 0) + 1
        return lease

    def release(self, lease: PlainLease) -> None:
        """Give a lease back.

        Raises
        ------
        StateError
            If that was done before.
        """
        if not lease.is_open:
            raise StateError("release: the lease was given back already")
        lease.is_open = False
        unread = self.unread
        for block in reversed(lease.found):  # so that a block goes after those behind it
            block.readers -= 1
            if not block.readers:
                unread[block.page] = block

    def publish(self, identity: Hashable, prompt: PlainPrompt) -> None:
        """Keep all blocks of a prompt, those that are new in pages taken now; nobody reads these.

        Raises
        ------
        CapacityError
            If there is no room.
        """
        plan = self.lookup(identity, prompt)
        lease = self.acquire(plan)
        index = self.kept.setdefault(identity, {})
        start = len(plan.found)
        for name, tokens in zip(prompt.names[start:], prompt.blocks[start:], strict=True):
            block = index[name] = PlainBlock(name, tokens, self.free.pop(), index)
            block.readers = 1
            lease.found.append(block)
        self.release(lease)

    def make_room(self, pages: int) -> None:
        """Evict until so many pages are free.

        Raises
        ------
        CapacityError
            If not enough can go; nothing was changed.
        """
        missing = pages - len(self.free)
        if missing > len(self.unread):
            raise CapacityError(
                f"pages: {pages} are wanted, {len(self.free)} free",
                needed=pages,
                free=len(self.free),
                evictable=len(self.unread),
            )
        for _ in range(missing):
            page = next(iter(self.unread))
            block = self.unread.pop(page)
            block.is_kept = False
            del block.home[block.name]
            self.free.append(page)
        self._epoch += missing > 0
