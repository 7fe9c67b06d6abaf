"""The check of a store: the tree and the pools that its entries point into agree, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError
from numba_kv.ledger.reuse.run import Run

if TYPE_CHECKING:
    from numba_kv.ledger.reuse.store import KeptStore

__all__ = ["check_store"]


def check_store(store: KeptStore) -> None:
    """Check that the tree and the pools agree.

    Raises
    ------
    InvariantError
        Naming what does not.
    """
    pages: list[list[int]] = [[] for _ in range(store.groups.num_lines)]
    blocks, held = 0, {}
    for run in store.tree.runs():
        blocks += run.size
        _check_run(store, run)
        for line in range(store.groups.num_lines):
            pages[line] += [p for p in run.lines[line, : run.size].tolist() if p >= 0]
        if store.draft is not None:
            pages[store.groups.draft_line] += run.variants.values()
    for tail in store.tree.tails():
        for line in range(store.groups.num_lines):
            pages[line] += [page for page in [int(tail.lines[line])] if page >= 0]
        if tail.snapshot >= 0:
            held[tail.snapshot] = tail
    if blocks != store.tree.num_blocks:
        raise InvariantError(f"index: {blocks} blocks are kept, {store.tree.num_blocks} counted")
    if store.full is not None:
        store.full.check(np.array(pages[0], np.int32), "full pages")
    if store.draft is not None:
        store.draft.check(np.array(pages[store.groups.draft_line], np.int32), "draft pages")
    for w, pool in enumerate(store.windows):
        pool.check()
        if sorted(pages[1 + w]) != sorted(slot for slot, _ in pool.kept()):
            raise InvariantError(f"window {w}: the index and the pool disagree on which copies are kept")
    store.snapshots.check()
    if held != dict(store.snapshots.kept()):
        raise InvariantError("snapshots: the index and the pool disagree on which are kept")


def _check_run(store: KeptStore, run: Run) -> None:
    if not run.is_root and not run.size:
        raise InvariantError(f"{run} is empty and still hangs in the tree")
    if store.full is not None and not store.has_gaps and (run.lines[0, : run.size] < 0).any():
        raise InvariantError(f"{run}: a block has no page")
    if store.tree.naming is not None and len(run.names) != run.size:
        raise InvariantError(f"{run}: {len(run.names)} names for {run.size} blocks")
    for offset, branch in run.branches.items():
        blockers = sum(isinstance(node, Run) or node.holds_pages for node in branch.nodes)
        runs = {node.first: node for node in branch.nodes if isinstance(node, Run)}
        if offset > run.size or branch.blockers != blockers or branch.keys != sorted(branch.keys) or not branch.keys:
            raise InvariantError(f"{run}: what hangs behind block {offset} is wrong")
        if branch.runs != runs:
            raise InvariantError(f"{run}: what hangs behind block {offset} is not found by its tokens")
        if (blockers > 0) != (offset in run.blocking):
            raise InvariantError(f"{run}: what hangs behind block {offset} is not noted")
    if store.tree.can_go(run) and not run.is_queued:
        raise InvariantError(f"{run}: could be evicted and is not queued")
