"""What a cache tells others: which blocks are there now, and which are no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from numba_kv.ledger.reuse.identity import ContextIdentity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["BlockEvent", "BlocksRemoved", "BlocksStored", "Medium", "ReuseFigures"]

#: Where blocks are.
Medium = Literal["device", "host"]


@dataclass(frozen=True, slots=True, eq=False)
class BlocksStored:
    """Consecutive blocks can be reused now.

    Attributes
    ----------
    identity : ContextIdentity
        Of the sequence.
    parent : bytes or None
        Name of the block before them; None: they begin a sequence.
    names : tuple of bytes
        Names of the blocks.
    tokens : int32 [n, P]
        Their tokens.
    medium : {"device", "host"}
        Where they are now; perhaps elsewhere too.
    """

    identity: ContextIdentity
    parent: bytes | None
    names: tuple[bytes, ...]
    tokens: NDArray[np.int32]
    medium: Medium = "device"


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are no more where they were.

    Attributes
    ----------
    names : tuple of bytes
        Those that they were stored under.
    medium : {"device", "host"}
        From where they have gone; they may be elsewhere.
    """

    names: tuple[bytes, ...]
    medium: Medium = "device"


BlockEvent = BlocksStored | BlocksRemoved


@dataclass(slots=True)
class ReuseFigures:
    """Counts since the cache was made.

    Attributes
    ----------
    lookups, hits : int
        Sequences that were acquired; of them, those that reuse anything.
    looked_up_tokens, matched_tokens, reused_tokens : int
        Their tokens; those kept in full groups; those that need not be computed.
    cold_retries : int
        Acquisitions that had no room with what they would have reused, and were made without.
    published_blocks, duplicate_blocks : int
        Blocks that were new; those that another sequence had published.
    evicted_blocks, evicted_copies, evicted_snapshots, evicted_tails : int
        What was given up for something else.
    skipped_copies, skipped_snapshots, skipped_blocks : int
        What was not kept for want of room, or because a ring no longer had it.
    host_hits, host_tokens : int
        Sequences for which something came back from the host; tokens that they could reuse because of it.
    pages_to_host, pages_to_device, states_to_host, states_to_device : int
        Pages and snapshots that were moved between the tiers.
    misses : dict of str to int
        Acquisitions by the part and reason of their closest limit.
    """

    lookups: int = 0
    hits: int = 0
    looked_up_tokens: int = 0
    matched_tokens: int = 0
    reused_tokens: int = 0
    cold_retries: int = 0
    published_blocks: int = 0
    duplicate_blocks: int = 0
    evicted_blocks: int = 0
    evicted_copies: int = 0
    evicted_snapshots: int = 0
    evicted_tails: int = 0
    skipped_copies: int = 0
    skipped_snapshots: int = 0
    skipped_blocks: int = 0
    host_hits: int = 0
    host_tokens: int = 0
    pages_to_host: int = 0
    pages_to_device: int = 0
    states_to_host: int = 0
    states_to_device: int = 0
    misses: dict[str, int] | None = None

    @property
    def hit_rate(self) -> float:
        """Reused tokens of all that were looked up."""
        return self.reused_tokens / self.looked_up_tokens if self.looked_up_tokens else 0.0
