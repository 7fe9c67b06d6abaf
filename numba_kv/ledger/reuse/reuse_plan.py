"""ReusePlan: how much of a sequence is already computed, from where it comes, and why it is not more."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from numba_kv.ledger.reuse.path import Path
from numba_kv.ledger.reuse.run import Tail

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Miss", "MissReason", "ReusePlan", "WindowCopies"]


class MissReason(str, Enum):
    """Why a longer prefix cannot be used."""

    BYPASS = "bypass"
    """The request wanted nothing of the cache."""
    UNKNOWN_IDENTITY = "unknown_identity"
    """Nothing is kept for this model, adapter, salt and element type."""
    DIVERGED = "diverged"
    """Something is kept behind the prefix, but with other tokens or media."""
    NOT_KEPT = "not_kept"
    """Nothing is kept behind the prefix: it was never published, or evicted."""
    LAST_TOKEN = "last_token"
    """All is kept, but the last token has to be computed, for its logits."""
    WHOLE_PAGES = "whole_pages"
    """Parts of pages are kept, and the options allow whole ones only."""
    WINDOW_COPIES = "window_copies"
    """A window group lacks copies of the pages behind a longer prefix."""
    NO_SNAPSHOT = "no_snapshot"
    """Recurrent layers have no snapshot at a longer prefix."""
    NO_DRAFT_PAGES = "no_draft_pages"
    """The draft has no pages of a longer prefix."""
    DRAFT_LOOKAHEAD = "draft_lookahead"
    """The draft's last position depends on the token behind it, and that is another one."""
    NO_COMMON_LENGTH = "no_common_length"
    """Each group could use more, but not of the same length."""


class Miss(NamedTuple):
    """One limit of a plan.

    Attributes
    ----------
    part : str
        "full", "window 0" (of group 1), "recurrent", "draft", or "all".
    reason : MissReason
        Why.
    tokens : int
        The longest prefix that this part alone allows.
    """

    part: str
    reason: MissReason
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class WindowCopies:
    """Kept copies of window pages to bring into a row's ring.

    Attributes
    ----------
    first_block : int
        Logical page of the first copy; they are consecutive.
    slots : int32 [n]
        Where the copies are. The last one may be valid only up to the reused length.
    """

    first_block: int
    slots: NDArray[np.int32]


def _no_pages() -> NDArray[np.int32]:
    return np.zeros(0, np.int32)


@dataclass(slots=True, eq=False, kw_only=True)  # not frozen: that would take longer than all else of a short lookup
class ReusePlan:
    """What a lookup found. Holds nothing: `PrefixCache.acquire` makes it true, or refuses it if it has become stale.

    Attributes
    ----------
    num_tokens : int
        Tokens of the sequence.
    matched_tokens : int
        Tokens of its beginning that are kept in full groups, the last one included.
    reused_tokens : int
        Tokens that need not be computed: below `num_tokens`, and the same for all groups.
    pages, draft_pages : int32 [reused_tokens // P]
        Whole pages of the full group and of the draft, to be leased.
    partial_page, draft_partial_page : int
        Page whose first `reused_tokens` % P tokens are copied into a page of the row's own; -1: none.
    windows : tuple of WindowCopies
        For each window group.
    snapshot : int
        Slot of the recurrent states at `reused_tokens`; -1: none.
    misses : tuple of Miss
        Why it is not more, the closest limit first.
    fresh_pages, fresh_draft_pages : int
        Pages that the whole sequence takes beside `pages`.
    path, tail : Path, Tail or None
        Where it is in the tree; the tail that has the snapshot.
    epochs : tuple of int
        Of the pools, when it was made.
    """

    num_tokens: int
    matched_tokens: int = 0
    reused_tokens: int = 0
    pages: NDArray[np.int32] = field(default_factory=_no_pages)
    draft_pages: NDArray[np.int32] = field(default_factory=_no_pages)
    partial_page: int = -1
    draft_partial_page: int = -1
    windows: tuple[WindowCopies, ...] = ()
    snapshot: int = -1
    misses: tuple[Miss, ...] = ()
    fresh_pages: int = 0
    fresh_draft_pages: int = 0
    path: Path = field(default_factory=Path)
    tail: Tail | None = None
    epochs: tuple[int, ...] = ()

    @property
    def is_hit(self) -> bool:
        """Whether anything is reused."""
        return self.reused_tokens > 0

    @property
    def has_sources(self) -> bool:
        """Whether anything is copied or restored, beside the pages that are leased."""
        return self.partial_page >= 0 or self.snapshot >= 0 or bool(self.windows) or self.draft_partial_page >= 0
