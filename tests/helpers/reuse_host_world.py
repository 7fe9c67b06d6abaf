"""The world of `reuse_world` with a host below: what goes there and comes back is compared too."""

from __future__ import annotations

from typing import Any

import numpy as np

from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.groups import SNAPSHOTS, ReuseGroups
from numba_kv.ledger.reuse.host_tier import HostTier
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.policy import PublishPolicy
from tests.helpers.reuse_world import Row, World


class HostWorld(World):
    """A world whose cache has a host tier; copies between the tiers move what pages hold, at once."""

    def __init__(self, groups: ReuseGroups, pages: int, *, host: tuple[int, int, int], **options: Any) -> None:
        super().__init__(groups, pages, **options)
        host_pages, slots, states = host
        self.gained = 0
        self.tier = HostTier(
            groups,
            pages=host_pages,
            window_slots=[slots] * len(groups.windows),
            snapshot_slots=states if groups.is_recurrent else 0,
            moves=self,
            naming=options.get("naming"),
        )
        self.cache.store.lower = self.tier

    def move(self, line: int, pairs: np.ndarray, *, out: bool) -> None:
        """Copy as one launch does: everything is read before anything is written."""
        assert pairs.dtype == np.int32
        assert len(set(pairs[:, 1].tolist())) == len(pairs), "a page is gone to twice"
        name = "state" if line == SNAPSHOTS else "full" if line == 0 else f"window {line - 1}"
        source, target = (name, f"host {name}") if out else (f"host {name}", name)
        read = [list(self.cells[source, page]) for page in pairs[:, 0].tolist()]
        self.cells |= {(target, page): cells for page, cells in zip(pairs[:, 1].tolist(), read, strict=True)}

    def admit(self, identity: ContextIdentity, content: TokenContent, policy: PublishPolicy) -> Row | None:
        """Bring back what the row can use, then start it."""
        if policy.reuse:
            cache, host = self.cache, self.tier.store
            before = cache.lookup(identity, content).reused_tokens
            gain = cache.bring_back(identity, content, priority=policy.priority)
            assert cache.lookup(identity, content).reused_tokens == before + gain
            self.gained += gain
            assert host.full is None or not host.full.pool.shares.any()
            assert not any(pool.num_pinned for pool in (*host.windows, host.snapshots))
            self.cache.audit()
        return super().admit(identity, content, policy)
