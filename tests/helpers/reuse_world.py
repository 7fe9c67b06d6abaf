"""A world in which every page remembers what it holds: the exact beginning of a sequence, token by token.

Rows are served through a PrefixCache. Whatever a lease gives them is compared with what they need, so a wrong page, a stale one
or one that somebody wrote over is seen at once. Brute force over what is kept tells how much could have been reused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numba_kv.errors import CapacityError
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import CacheLimits, PrefixCache
from numba_kv.ledger.reuse.publish_plan import PublishRequest, RingView
from numba_kv.ledger.reuse.reuse_plan import ReusePlan
from numba_kv.ledger.reuse.run import Run, Tail

#: What one position of a page holds: identity and all tokens up to it (for a draft also those it looks ahead at).
Cell = tuple[Any, ...]


class ConstantHash:
    """Gives every block the same name: the worst hash there is."""

    def root(self, identity: ContextIdentity) -> bytes:
        return bytes(16)

    def blocks(self, identity: ContextIdentity, parent: bytes, tokens: np.ndarray, media: dict) -> list[bytes]:
        return [bytes(16)] * len(tokens)


@dataclass
class Row:
    """A sequence in work."""

    identity: ContextIdentity
    content: TokenContent
    prompt: int
    policy: PublishPolicy
    matched: int
    pages: np.ndarray
    draft_pages: np.ndarray
    length: int = 0
    draft_length: int = 0
    rings: list[list[Cell]] = field(default_factory=list)  # all positions of each window; only some are in the ring
    valid_from: list[int] = field(default_factory=list)
    state: Cell = ()


def depth(node: Run | Tail, place: int) -> int:
    """Return the place of a block in its sequence."""
    return node.run.start + node.offset if isinstance(node, Tail) else node.start + place


class World:
    """Pools with contents, rows, and the cache between them."""

    def __init__(
        self,
        groups: ReuseGroups,
        pages: int,
        *,
        slots: int,
        snapshots: int,
        limits: CacheLimits | None = None,
        naming: Any = None,
    ) -> None:
        self.groups = groups
        self.page = groups.page_tokens
        self.refused = 0
        self.pool = PageIdPool(pages, 2) if groups.has_full else None
        self.draft_pool = PageIdPool(pages, 2) if groups.has_draft else None
        self.cells: dict[tuple[str, int], list[Cell]] = {}  # (pool, page) -> what each position holds
        self.rows: list[Row] = []
        self.cache = PrefixCache(
            groups,
            pool=self.pool,
            draft_pool=self.draft_pool,
            window_slots=[(100 * (w + 1), slots) for w in range(len(groups.windows))],
            snapshot_slots=snapshots if groups.is_recurrent else 0,
            limits=limits,
            naming=naming,
        )

    # -- contents ------------------------------------------------------------------------------------------------------

    def cell(self, row: Row, position: int) -> Cell:
        tokens = tuple(row.content.tokens[: position + 1].tolist())
        return (row.identity, tokens, row.content.media_of(0, position + 1))

    def draft_cell(self, row: Row, position: int) -> Cell:
        ahead = self.groups.draft.future_tokens if self.groups.draft else 0
        return (row.identity, tuple(row.content.tokens[: position + 1 + ahead].tolist()))

    def write(self, pool: str, page: int, offset: int, cell: Cell) -> None:
        kept = self.cache.store.full if pool == "full" else self.cache.store.draft
        assert kept is not None
        assert not kept.kept[page], f"page {page} is written while the cache has it"
        assert kept.pool.shares[page] == 0, f"page {page} is written while others read it"
        self.cells.setdefault((pool, page), [()] * self.page)[offset] = cell

    # -- serving -------------------------------------------------------------------------------------------------------

    def admit(self, identity: ContextIdentity, content: TokenContent, policy: PublishPolicy) -> Row | None:
        """Start a row; None if there is no room, which brute force must confirm."""
        cache, before = self.cache, self.picture()
        plan = cache.lookup(identity, content, reuse=policy.reuse)
        assert self.picture() == before
        if policy.reuse:
            self.check_plan(identity, content, plan)
        try:
            lease = cache.admit(identity, content, reuse=policy.reuse, priority=policy.priority)
        except CapacityError:
            self.refused += 1
            assert self.picture() == before
            pages = -(-content.num_tokens // self.page)
            assert min(self.most_free("full", pages), self.most_free("draft", pages)) < pages
            return None
        plan = lease.plan
        none = np.zeros(0, np.int32)
        row = Row(identity, content, content.num_tokens, policy, plan.matched_tokens, none, none)
        row.length = row.draft_length = plan.reused_tokens
        rest = plan.reused_tokens % self.page
        if self.pool is not None:
            fresh = self.pool.acquire(plan.fresh_pages)
            row.pages = np.concatenate([plan.pages, fresh])
            if rest:
                assert plan.partial_page not in fresh
                self.cells["full", int(fresh[0])] = list(self.cells["full", plan.partial_page])
        if self.draft_pool is not None:
            fresh = self.draft_pool.acquire(plan.fresh_draft_pages)
            row.draft_pages = np.concatenate([plan.draft_pages, fresh])
            if rest:
                assert plan.draft_partial_page not in fresh
                self.cells["draft", int(fresh[0])] = list(self.cells["draft", plan.draft_partial_page])
        self.restore(row, plan)
        lease.copied()
        lease.handed_over()
        self.check_row(row)
        self.rows.append(row)
        return row

    def lease_for_nothing(self, identity: ContextIdentity, content: TokenContent) -> None:
        """Lease what a row would start with, if there is room, and give it back: nothing is held that was not held before."""
        before = self.holders()
        try:
            lease = self.cache.admit(identity, content)
        except CapacityError:
            assert self.holders() == before
            return
        plan = lease.plan
        if len(plan.pages) or len(plan.draft_pages):  # a window of one token and no full group can be hit for nothing
            assert self.holders() != before
        for pool, copies in zip(self.cache.store.windows, plan.windows if plan.is_hit else (), strict=False):
            assert all(pool.is_pinned(slot) for slot in copies.slots.tolist())
        lease.release()
        assert self.holders() == before

    def holders(self) -> tuple[Any, ...]:
        """Return who holds what, beside the cache."""
        slots = (*self.cache.store.windows, self.cache.store.snapshots)
        shares = [pool.shares.tobytes() for pool in (self.pool, self.draft_pool) if pool is not None]
        return tuple(shares), tuple(tuple(sorted(s for s, _ in pool.kept() if pool.is_pinned(s))) for pool in slots)

    def restore(self, row: Row, plan: ReusePlan) -> None:
        """Bring window copies and states of a plan into a row."""
        for w in range(len(self.groups.windows)):
            row.rings.append([()] * plan.reused_tokens)
            row.valid_from.append(plan.reused_tokens)
            if plan.is_hit:
                copies = plan.windows[w]
                for i, slot in enumerate(copies.slots.tolist()):
                    for offset, cell in enumerate(self.cells[f"window {w}", slot]):
                        position = (copies.first_block + i) * self.page + offset
                        if position < plan.reused_tokens:
                            row.rings[w][position] = cell
                if len(copies.slots):  # else a chunk of attention begins here, perhaps inside a page
                    row.valid_from[w] = copies.first_block * self.page
        if self.groups.is_recurrent and plan.is_hit:
            (row.state,) = self.cells["state", plan.snapshot]

    def compute(self, row: Row, stop: int) -> None:
        """Compute the tokens up to `stop`."""
        for position in range(row.length, stop):
            block, offset = divmod(position, self.page)
            if self.pool is not None:
                self.write("full", int(row.pages[block]), offset, self.cell(row, position))
            for ring in row.rings:
                ring.append(self.cell(row, position))
        row.length = stop
        if self.draft_pool is not None and self.groups.draft is not None:
            for position in range(row.draft_length, min(stop, row.content.num_tokens - self.groups.draft.future_tokens)):
                block, offset = divmod(position, self.page)
                self.write("draft", int(row.draft_pages[block]), offset, self.draft_cell(row, position))
                row.draft_length = position + 1
        row.state = self.cell(row, stop - 1)

    def prefill(self, row: Row, ring_blocks: int) -> None:
        """Compute the prompt, pausing at every point."""
        while row.length < row.prompt:
            stop = row.policy.chunk_end(row.prompt, row.length, row.prompt, row.matched, self.page)
            points = row.policy.points(row.prompt, row.length, stop, row.matched, self.page)
            self.compute(row, stop)
            self.publish(row, is_point=stop in points, ring_blocks=ring_blocks)

    def decode(self, row: Row, tokens: list[int], ring_blocks: int, *, is_end: bool) -> bool:
        """Append generated tokens; False if pages have run out."""
        content = row.content
        wanted = -(-(content.num_tokens + len(tokens)) // self.page) - len(row.pages)
        if self.pool is not None and wanted > 0:
            try:
                self.cache.make_room(wanted, draft_pages=wanted if self.draft_pool is not None else 0)
            except CapacityError:
                return False
            row.pages = np.concatenate([row.pages, self.pool.acquire(wanted)])
            if self.draft_pool is not None:
                row.draft_pages = np.concatenate([row.draft_pages, self.draft_pool.acquire(wanted)])
        content.extend(tokens)
        self.compute(row, content.num_tokens)
        self.publish(row, is_point=is_end, ring_blocks=ring_blocks)
        return True

    def publish(self, row: Row, *, is_point: bool, ring_blocks: int) -> None:
        tokens = row.policy.last_token(row.prompt, row.length)
        if self.groups.has_draft:
            tokens = min(tokens, row.draft_length)  # the last position of a draft that looks ahead is not known yet
        if tokens <= 0:
            return
        end = -(-tokens // self.page)
        first = max(0, end - ring_blocks, *[-(-v // self.page) for v in row.valid_from], 0)
        rings = tuple(RingView(first, np.arange(first, max(first, end), dtype=np.int32)) for _ in self.groups.windows)
        has_state = self.groups.is_recurrent and is_point and tokens == row.length
        done = self.cache.publish(
            PublishRequest(
                identity=row.identity, content=row.content, tokens=tokens, pages=row.pages, draft_pages=row.draft_pages,
                rings=rings, is_point=is_point, has_state=has_state, with_tail=row.policy.tails and is_point,
                priority=row.policy.priority,
            )
        )  # fmt: skip
        for copy in done.copies:
            if copy.group == 0:
                cells = self.cells["full", copy.source][: copy.tokens]
                self.cells["full", copy.target] = cells + [()] * (self.page - copy.tokens)
            else:
                ring, start = row.rings[copy.group - 1], copy.source * self.page  # a ring's page is named by its block
                self.cells[f"window {copy.group - 1}", copy.target] = ring[start : start + copy.tokens]
        if done.snapshot >= 0:
            self.cells["state", done.snapshot] = [row.state]

    def retire(self, row: Row) -> None:
        self.rows.remove(row)
        if self.pool is not None:
            self.pool.drop(row.pages)
        if self.draft_pool is not None:
            self.draft_pool.drop(row.draft_pages)

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_row(self, row: Row) -> None:
        """Compare everything a row holds with what its tokens need."""
        for position in range(row.length):
            block, offset = divmod(position, self.page)
            wanted = self.cell(row, position)
            if self.pool is not None:
                assert self.cells["full", int(row.pages[block])][offset] == wanted
            if self.draft_pool is not None and position < row.draft_length:
                assert self.cells["draft", int(row.draft_pages[block])][offset] == self.draft_cell(row, position)
            for w, window in enumerate(self.groups.windows):
                if position >= window.lowest_key(row.length):
                    assert row.rings[w][position] == wanted
        if self.groups.is_recurrent and row.length:
            assert row.state == self.cell(row, row.length - 1)

    def check(self) -> None:
        """Audit, and compare every row."""
        self.cache.audit()
        for row in self.rows:
            self.check_row(row)
        for pool, name in ((self.pool, "full"), (self.draft_pool, "draft")):
            if pool is None:
                continue
            rows = [row.pages if name == "full" else row.draft_pages for row in self.rows]
            kept = self.cache.store.full if name == "full" else self.cache.store.draft
            assert kept is not None
            pool.check(np.concatenate([*rows, np.flatnonzero(kept.kept)]).astype(np.int32))
            assert kept.classes().total == pool.usable_pages

    def picture(self) -> tuple[Any, ...]:
        """Return everything that a call which changes nothing must not change."""
        tree, found = self.cache.store.tree, []
        for run in tree.runs():
            found.append((run.uid, run.size, run.lines[:, : run.size].tobytes(), tuple(run.recency._steps)))
        for tail in tree.tails():
            found.append((tail.uid, tail.lines.tobytes(), tail.snapshot, tail.time))
        pools = [(p.free_pages, p.stack.tobytes(), p.shares.tobytes()) for p in (self.pool, self.draft_pool) if p is not None]
        slots = [(tuple(s for s, _ in p.kept()), p.num_pinned) for p in (*self.cache.store.windows, self.cache.store.snapshots)]
        return tuple(sorted(found)), tuple(pools), tuple(slots)

    def nodes(self) -> list[tuple[ContextIdentity, tuple[int, ...], int, np.ndarray, Run | Tail, int]]:
        """Return every kept block and tail: identity, key of the whole prefix, tokens in its block, entries."""
        found = []
        for identity, root in self.cache.store.tree.roots.items():
            waiting: list[tuple[Run, bytes]] = [(root, b"")]
            while waiting:
                run, before = waiting.pop()
                prefixes = [before]
                for block in range(run.size):
                    prefixes.append(prefixes[-1] + run.key_of(block))
                    found.append((identity, prefixes[-1], self.page, run.lines[:, block], run, block))
                for offset, branch in run.branches.items():
                    for node in branch.nodes:
                        if isinstance(node, Run):
                            waiting.append((node, prefixes[offset]))
                        else:
                            found.append((identity, prefixes[offset] + node.key, node.tokens, node.lines, node, 0))
        return found

    def best(self, identity: ContextIdentity, content: TokenContent, *, aligned: bool) -> int:
        """Return the longest usable prefix by trying every length and every kept block."""
        groups, page, n = self.groups, self.page, content.num_tokens
        nodes = [node for node in self.nodes() if node[0] == identity]
        whole = {key: (lines, node, place) for _, key, count, lines, node, place in nodes if count == page}
        states = {key for _, key, _, _, node, _ in nodes if isinstance(node, Tail) and node.snapshot >= 0}
        for length in range(n - 1, 0, -1):
            blocks, rest = divmod(length, page)
            if aligned and rest:
                continue
            if groups.is_recurrent and content.key(0, length) not in states:
                continue
            keys = [content.key(0, (b + 1) * page) for b in range(blocks)]
            if not all(key in whole for key in keys):
                continue
            begun = []
            if rest:
                start = content.key(0, length)
                begun = [
                    (lines, node, count)
                    for _, key, count, lines, node, place in nodes
                    if count and key.startswith(start) and depth(node, place) == blocks
                ]
                if not begun:
                    continue
            if all(self._window_fits(w, length, keys, whole, begun) for w in range(len(groups.windows))) and (
                not groups.has_draft or self._draft_fits(content, length, keys, whole, begun)
            ):
                return length
        return 0

    def _window_fits(self, w: int, length: int, keys: list, whole: dict, begun: list) -> bool:
        lowest = self.groups.windows[w].lowest_key(length)
        for position in range(lowest, length):
            block = position // self.page
            if block < len(keys):
                if whole[keys[block]][0][1 + w] < 0:
                    return False
            elif not any(lines[1 + w] >= 0 for lines, _, _ in begun):
                return False
        return True

    def _draft_fits(self, content: TokenContent, length: int, keys: list, whole: dict, begun: list) -> bool:
        line, ahead = self.groups.draft_line, self.groups.draft.future_tokens if self.groups.draft else 0
        for block, key in enumerate(keys):
            lines, node, place = whole[key]
            if lines[line] < 0:
                return False
            if ahead:
                at = (block + 1) * self.page
                following = int(content.tokens[at]) if at < content.num_tokens else -2
                if lines[line + 1] != following and (place, following) not in node.variants:
                    return False
        return not begun or any(lines[line] >= 0 for lines, _, _ in begun)

    def check_plan(self, identity: ContextIdentity, content: TokenContent, plan: ReusePlan) -> None:
        """Compare a plan with brute force."""
        whole_only = self.cache.limits.whole_pages
        most = self.best(identity, content, aligned=whole_only and not self.groups.is_recurrent)
        assert plan.reused_tokens <= most
        assert plan.reused_tokens < content.num_tokens
        assert all(miss.tokens >= plan.reused_tokens for miss in plan.misses)
        assert plan.misses
        assert plan.misses[0].tokens == plan.reused_tokens
        if len(self.groups.windows) == 0 and not self.groups.has_draft:
            assert plan.reused_tokens == most
        else:
            assert plan.reused_tokens >= self.best(identity, content, aligned=True) or self.groups.is_recurrent

    def most_free(self, name: str, enough: int) -> int:
        """Return how many pages of a pool can be free at most, by taking leaves away until none can go."""
        kept = self.cache.store.full if name == "full" else self.cache.store.draft
        if kept is None:
            return enough
        pool, line = kept.pool, 0 if name == "full" else self.groups.draft_line
        full = self.cache.store.full
        nodes = [(identity, key, lines, node) for identity, key, _, lines, node, _ in self.nodes() if lines[0] >= 0]
        gone = pool.free_pages
        while True:
            for item in nodes:
                identity, key, lines, _ = item
                has_child = any(o[0] == identity and o[1].startswith(key) and len(o[1]) > len(key) for o in nodes)
                in_use = full is not None and full.pool.shares[lines[0]] > 0
                draft = self.cache.store.draft
                if draft is not None and lines[self.groups.draft_line] >= 0:
                    in_use = in_use or draft.pool.shares[lines[self.groups.draft_line]] > 0
                if not has_child and not in_use:
                    gone += int(lines[line] >= 0)
                    nodes.remove(item)
                    break
            else:
                return gone
