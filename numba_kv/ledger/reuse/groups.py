"""ReuseGroups: what has to be there for a prefix to be usable, by groups of layers."""

from __future__ import annotations

from dataclasses import dataclass

from numba_kv.errors import ConfigError
from numba_kv.geometry import Window, check_count
from numba_kv.plan import MemoryPlan

__all__ = ["SNAPSHOTS", "DraftContract", "ReuseGroups", "reuse_groups"]

#: The line of snapshots of recurrent states, where lines of blocks are counted from 0.
SNAPSHOTS = -1


@dataclass(frozen=True, slots=True)
class DraftContract:
    """What a draft model's K and V depend on.

    Attributes
    ----------
    owns_pages : bool
        Whether it has pages of its own (a draft that reads the target's needs nothing).
    future_tokens : int
        Tokens behind a position that its K and V depend on: 1 for EAGLE and MTP heads, 0 for block drafts.
    """

    owns_pages: bool = True
    future_tokens: int = 0

    def __post_init__(self) -> None:
        if self.future_tokens not in (0, 1):
            raise ConfigError(f"future_tokens: {self.future_tokens} given; 0 or 1 is supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseGroups:
    """The groups of a model.

    Attributes
    ----------
    page_tokens : int
        P, of all groups.
    has_full : bool
        Whether any layer sees every key: then each block has a page.
    windows : tuple of Window
        One for each window group, in the order of `MemoryPlan.groups`.
    is_recurrent : bool
        Whether any layer keeps a state.
    draft : DraftContract or None
        The draft model, if there is one.
    """

    page_tokens: int
    has_full: bool = True
    windows: tuple[Window, ...] = ()
    is_recurrent: bool = False
    draft: DraftContract | None = None

    def __post_init__(self) -> None:
        check_count("page_tokens", self.page_tokens)
        if any(window.is_full for window in self.windows):
            raise ConfigError("windows: full attention is no window; say has_full")

    @property
    def has_draft(self) -> bool:
        """Whether a draft has pages of its own."""
        return self.draft is not None and self.draft.owns_pages

    @property
    def draft_line(self) -> int:
        """Line of the draft's pages; the next one holds the token that the last position of each depends on."""
        return 1 + len(self.windows)

    @property
    def num_lines(self) -> int:
        """Entries of a block: the full page, a copy for each window, the draft's page and its next token."""
        return 1 + len(self.windows) + 2 * self.has_draft

    def first_block(self, window: int, tokens: int) -> int:
        """Return the first block that the token behind `tokens` tokens sees in a window group."""
        return min(self.windows[window].lowest_key(tokens), tokens) // self.page_tokens


def reuse_groups(plan: MemoryPlan, draft: DraftContract | None = None) -> ReuseGroups:
    """Return the groups of a memory plan.

    Raises
    ------
    ConfigError
        If groups have different page sizes.
    """
    sizes = {group.page_tokens for group in plan.groups}
    if len(sizes) != 1:
        raise ConfigError(f"page_tokens: groups have pages of {sorted(sizes)} tokens; reuse wants one size")
    return ReuseGroups(
        page_tokens=sizes.pop(),
        has_full=not plan.groups[0].is_empty,
        windows=tuple(group.window for group in plan.groups[1:]),
        is_recurrent=plan.config.recurrent_layer is not None,
        draft=draft,
    )
