"""HostTier: what the device gives up is kept on the host, and comes back for a prompt that begins with it. Moves no byte.

The host has a store of its own, of which every block is found as on the device, tokens compared. A block that goes from the
device gets a page there; what stands before it in the tree, but is on the device still, stands there without one::

    device   [b0 b1 b2 b3]                 b2 and b3 go          [b0 b1]
    host                                   ───────────>          ( -  - ) [b2 b3]

So all of a prefix is on the device or on the host, up to its end. What comes back stays on the host too, until room is wanted
there: if it goes again, nothing has to be copied. All copies are enqueued on one stream, in the order of the decisions, so a
page can be another's at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from numba_kv.errors import InputError, InvariantError
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.reuse.block_hash import BlockHash
from numba_kv.ledger.reuse.cargo import Cargo, Moved, TailCargo, content_of, settled, stow
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.events import BlockEvent, ReuseFigures
from numba_kv.ledger.reuse.groups import SNAPSHOTS, ReuseGroups
from numba_kv.ledger.reuse.host_picture import HOST, find_return
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.run import Run, Tail
from numba_kv.ledger.reuse.store import KeptStore

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["HostTier", "TierMoves"]


class TierMoves(Protocol):
    """Copies between the pools of the device and those of the host."""

    def move(self, line: int, pairs: NDArray[np.int32], *, out: bool) -> None:
        """Enqueue copies of pages, or of snapshots (line `SNAPSHOTS`).

        Parameters
        ----------
        line : int
            0 the full group, 1 + w window group w.
        pairs : int32 [n, 2]
            Ids where they are and where they go; no id is gone to twice.
        out : bool
            Whether to the host.
        """
        ...


class HostTier:
    """What is kept on the host. One for each device store, whose `lower` it is.

    Parameters
    ----------
    groups : ReuseGroups
        The model, without a draft of its own.
    pages : int
        Pages of the full group.
    window_slots : sequence of int
        Pages of each window group.
    snapshot_slots : int
        Snapshots of recurrent states.
    moves : TierMoves
        Copies.
    naming, on_event
        See `KeptStore`.

    Attributes
    ----------
    store : KeptStore
        What is there.
    """

    def __init__(
        self,
        groups: ReuseGroups,
        *,
        pages: int = 0,
        window_slots: Sequence[int] = (),
        snapshot_slots: int = 0,
        moves: TierMoves,
        naming: BlockHash | None = None,
        on_event: Callable[[BlockEvent], None] | None = None,
    ) -> None:
        if groups.has_draft:
            raise InputError("groups: pages of a draft are not kept on the host")
        self.groups = groups
        self.store = KeptStore(
            groups,
            pool=PageIdPool(pages, 0) if groups.has_full else None,
            window_slots=[(0, count) for count in window_slots],
            snapshot_slots=snapshot_slots,
            naming=naming,
            on_event=on_event,
            medium="host",
        )
        self._moves = moves
        self._figures = ReuseFigures()  # of the device's store, as soon as anything moves
        self._out: list[Moved] = []  # what is to be copied to the host
        self._identities: dict[Run, ContextIdentity] = {}

    # -- what goes -----------------------------------------------------------------------------------------------------

    def take_blocks(self, upper: KeptStore, run: Run, size: int) -> None:
        """Keep the blocks of a run from `size` on, and tails without pages behind them, which are about to go."""
        self._take(upper, run, run.size, run.lines[:, size : run.size].copy())
        for offset, branch in run.branches.items():
            if offset > size or offset == size == 0:
                for node in branch.nodes:
                    if isinstance(node, Tail):
                        self.take_tail(upper, node)

    def take_tail(self, upper: KeptStore, tail: Tail) -> None:
        """Keep a tail, which is about to go."""
        cargo = TailCargo(tail.key, tail.tokens, tail.lines.copy(), tail.snapshot)
        empty = np.full((self.groups.num_lines, 0), -1, np.int32)
        self._take(upper, tail.run, tail.offset, empty, cargo)

    def take_copies(self, upper: KeptStore, window: int, slots: Sequence[int]) -> None:
        """Keep copies of window pages, which are about to go."""
        pool = upper.windows[window]
        places: dict[Run, list[int]] = {}
        for slot in slots:
            node, block = pool.owner(slot)
            if isinstance(node, Tail):
                self.take_tail(upper, node)
            else:
                places.setdefault(node, []).append(block)
        for run, blocks in places.items():
            first, stop = min(blocks), max(blocks) + 1
            lines = np.full((self.groups.num_lines, stop - first), -1, np.int32)
            at = np.array(blocks) - first
            lines[1 + window, at] = run.lines[1 + window, blocks]
            self._take(upper, run, stop, lines)

    def flush(self) -> None:
        """Enqueue the copies of all that was taken since the last call."""
        waiting, self._out = self._out, []
        for line, pairs in settled(waiting).items():
            self._move(line, pairs, out=True)

    def _take(self, upper: KeptStore, run: Run, size: int, lines: NDArray[np.int32], tail: TailCargo | None = None) -> None:
        self._figures = upper.figures
        block = max(0, size - 1)
        cargo = Cargo(
            identity=self._identity(upper, run),
            content=content_of(run, size),
            start=run.start + size - lines.shape[1],
            lines=lines,
            tail=tail,
            priority=run.recency.rank(block)[0],
        )
        self._out += stow(self.store, cargo)

    def _identity(self, upper: KeptStore, run: Run) -> ContextIdentity:
        while run.parent is not None:
            run = run.parent
        if run not in self._identities:
            self._identities = {root: identity for identity, root in upper.tree.roots.items()}
        return self._identities[run]

    # -- what comes back -----------------------------------------------------------------------------------------------

    def bring_back(
        self,
        upper: KeptStore,
        identity: ContextIdentity,
        content: TokenContent,
        *,
        max_blocks: int | None = None,
        whole_pages: bool = False,
        priority: int = 0,
        spare: int = 0,
    ) -> int:
        """Bring what a sequence could reuse back to the device, if with it more can be reused; return how many tokens more.

        Nothing comes where there is no room: what is leased, and what the sequence could reuse without it, stays, and `spare`
        pages stay free.

        Cost: nothing for sequences of which nothing is on the host; else that of three lookups.
        """
        if identity not in self.store.tree.roots:
            return 0
        found = find_return(self.groups, upper, self.store, identity, content, whole_pages=whole_pages)
        if found is None:
            return 0
        self._figures = upper.figures
        host = found.host
        upper.hold(found.device, 1)
        self.store.hold(host, 1)
        try:
            moved: list[Moved] = []
            for cargo in found.cargoes(identity, content, priority) if self._fits(upper, host) else ():
                moved += stow(upper, cargo, max_blocks, spare)
            for line, pairs in settled(moved).items():
                self._move(line, pairs - np.array([HOST, 0], np.int32), out=False)
        finally:
            self.store.hold(host, -1)
            upper.hold(found.device, -1)
        if not moved:
            return 0
        self._touch(identity, content, host, priority)
        gain = found.gained(self.groups, upper, identity, content, whole_pages=whole_pages)
        upper.figures.host_hits += gain > 0
        upper.figures.host_tokens += gain
        return gain

    def _fits(self, upper: KeptStore, wanted: dict[int, list[int]]) -> bool:
        """Return whether copies and snapshots find slots on the device that nothing reads."""
        slots = [(pool, wanted.get(1 + w, [])) for w, pool in enumerate(upper.windows)]
        slots.append((upper.snapshots, wanted.get(SNAPSHOTS, [])))  # type: ignore[arg-type]
        return all(len(ids) <= pool.count - pool.num_pinned for pool, ids in slots)

    def _touch(self, identity: ContextIdentity, content: TokenContent, used: dict[int, list[int]], priority: int) -> None:
        store, now = self.store, self.store.tree.tick()
        path = store.tree.match(identity, content)
        store.tree.touch(path, priority, now)
        for w, pool in enumerate(store.windows):
            pool.touch(used.get(1 + w, ()))
        store.snapshots.touch(used.get(SNAPSHOTS, ()))

    def _move(self, line: int, pairs: NDArray[np.int32], *, out: bool) -> None:
        figures, count = self._figures, len(pairs)
        if line == SNAPSHOTS:
            figures.states_to_host += count * out
            figures.states_to_device += count * (not out)
        else:
            figures.pages_to_host += count * out
            figures.pages_to_device += count * (not out)
        self._moves.move(line, pairs, out=out)

    # -- state ---------------------------------------------------------------------------------------------------------

    def check(self, upper: KeptStore) -> None:
        """Check the store, and that all before a block that is there is there too, or on the device.

        Raises
        ------
        InvariantError
            Naming what is not. Cost: O(tokens of every run).
        """
        self.store.check()
        if self._out:
            raise InvariantError("host tier: copies are decided and not enqueued")
        roots = {root: identity for identity, root in self.store.tree.roots.items()}
        for run in self.store.tree.runs() if self.store.full is not None else ():
            if run.is_root:
                continue
            root = run
            while root.parent is not None:
                root = root.parent
            content = content_of(run, run.size)
            page = content.page_tokens
            there = self.store.tree.match(roots[root], content).line(0, 0, run.start + run.size) >= 0
            last = np.flatnonzero(there)
            on_device = upper.tree.match(roots[root], content, content.num_tokens // page * page).blocks
            if len(last) and not there[on_device : last[-1]].all():
                raise InvariantError(f"host tier: {run} has pages behind blocks that are nowhere")
