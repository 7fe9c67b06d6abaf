"""ReuseOptions: whether and how a batch keeps what it has computed for sequences that begin alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from numba_kv.errors import InputError
from numba_kv.ledger.reuse.block_hash import BlockHash
from numba_kv.ledger.reuse.events import BlockEvent
from numba_kv.ledger.reuse.policy import PublishPolicy
from numba_kv.ledger.reuse.prefix_cache import CacheLimits

__all__ = ["ReuseOptions"]


@dataclass(frozen=True, kw_only=True)
class ReuseOptions:
    """What `Batch` takes as `reuse`.

    Attributes
    ----------
    policy : PublishPolicy
        Of sequences that are admitted without one.
    limits : CacheLimits
        How much is kept.
    weights : bytes
        Digest of the weights; ``b""`` where what is kept never leaves the process.
    scales : bytes or None
        Digest of KV scales that are fixed for the model (FP8); what is kept of float8 pools leaves the process with one alone.
    naming : BlockHash or None
        Names blocks, for events; None: they have no names.
    on_event : callable or None
        Is told of blocks that come and go, in their order, after the batch's call in which they did. It may call the batch. The
        call has done its work by then: what `on_event` raises is logged by ``numba_kv.batch.reuse_events`` with
        its traceback and not raised, unless it is no Exception, as an interrupt.
    future_tokens : int
        For a batch of a draft: tokens behind a position that its K and V depend on, 1 for EAGLE and MTP heads, whose input at a
        position is the next token. The last token that is known leaves nothing to reuse then. `weights` has to tell the base's
        weights too.
    host_bytes : int
        Page-locked memory of the host for what the device has to give up, divided among pages, window copies and snapshots as
        the device's room is; 0: none, it is lost. Taken when the batch is made.
    """

    policy: PublishPolicy = field(default_factory=PublishPolicy)
    limits: CacheLimits = field(default_factory=CacheLimits)
    weights: bytes = b""
    scales: bytes | None = None
    naming: BlockHash | None = None
    on_event: Callable[[BlockEvent], None] | None = None
    future_tokens: int = 0
    host_bytes: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("policy", PublishPolicy), ("limits", CacheLimits)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise InputError(f"{name}: {value!r} is not a {kind.__name__}")
        if not isinstance(self.host_bytes, int) or isinstance(self.host_bytes, bool) or self.host_bytes < 0:
            raise InputError(f"host_bytes: {self.host_bytes!r} is not a number of bytes, an integer from 0 on")
        naming = self.naming
        if naming is not None and not all(callable(getattr(naming, name, None)) for name in ("root", "blocks")):
            raise InputError(f"naming: {naming!r} is not a BlockHash, which has the calls root and blocks")
        if self.on_event is not None and not callable(self.on_event):
            raise InputError(f"on_event: {self.on_event!r} cannot be called")
        if type(self.future_tokens) is not int or self.future_tokens not in (0, 1):
            raise InputError(f"future_tokens: {self.future_tokens!r} is not 0 or 1")
