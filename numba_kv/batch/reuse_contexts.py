"""SequenceContexts: what a batch knows of its sequences' tokens, through all that happens to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from numba_kv.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.batch.reuse_context import SequenceContext
    from numba_kv.batch.sequence import Sequence
    from numba_kv.ledger.reuse.content import MediaSpan
    from numba_kv.ledger.rows import RowLedger

__all__ = ["SequenceContexts"]


class SequenceContexts:
    """Contexts of the sequences of one batch, those without a row included. Host only.

    Attributes
    ----------
    due : set of Sequence
        Those that may have something to publish at the next call.
    """

    def __init__(self, ledger: RowLedger, page_tokens: int, future_tokens: int = 0) -> None:
        self.due: set[Sequence] = set()
        self._ledger = ledger
        self._page = page_tokens
        self._ahead = future_tokens  # contents are of the tokens behind: see `LookAhead`
        self._contexts: dict[Any, SequenceContext] = {}

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._contexts

    def __getitem__(self, sequence: Sequence) -> SequenceContext:
        return self._contexts[sequence]

    def start(self, sequence: Sequence, context: SequenceContext) -> None:
        """Note a sequence that was admitted."""
        self._contexts[sequence] = context
        if context.policy.publish != "none":
            self.due.add(sequence)

    def known_tokens(self, sequence: Sequence) -> int:
        """Return how many first tokens of a sequence are known."""
        context = self._contexts.get(sequence)
        return 0 if context is None else context.content.num_tokens + self._ahead

    def extend(self, sequence: Sequence, tokens: Any, media: Iterable[MediaSpan]) -> None:
        """Note which tokens follow those that are known.

        Raises
        ------
        InputError, ShapeError
            If they are no token ids, or nothing is known of the sequence; nothing was changed.
        """
        context = self._contexts.get(sequence)
        if context is None:
            raise InputError(f"note_tokens: {sequence!r} was admitted without its tokens, so nothing of it can be kept")
        context.content.extend(tokens, media)
        if context.policy.publish != "none" and context.content.num_tokens // self._page > context.published // self._page:
            self.due.add(sequence)

    def chunk(self, sequence: Sequence, length: int, count: int) -> int:
        """Return how many of `count` tokens a prefill step of a sequence should append."""
        context = self._contexts.get(sequence)
        if context is None or not count:
            return count
        args = (context.prompt_tokens + self._ahead, length, length + count, context.matched_tokens, self._page)
        return context.policy.chunk_end(*args) - length

    def shortened(self, lengths: Mapping[Sequence, int]) -> None:
        """Note that sequences were taken back to so many tokens: nobody knows what follows."""
        for sequence, length in lengths.items():
            context = self._contexts.get(sequence)
            if context is not None:
                context.truncate(max(0, length - self._ahead))

    def taken_back(self, back: NDArray[Any]) -> None:
        """Note that the device may take back up to so many tokens of each row, int64 [B], but none below its floor."""
        ledger = self._ledger
        for sequence, context in self._contexts.items():
            row = getattr(sequence, "row", None)  # a swapped sequence has none
            if row is not None and back[row]:
                context.truncate(max(int(ledger.lo[row] - back[row]), int(ledger.floor[row]), self._ahead) - self._ahead)

    def inherit(self, parents: Mapping[Sequence, Any]) -> None:
        """Note that sequences have the tokens of others, as these were before."""
        made = {heir: self._contexts.get(parent) for heir, parent in parents.items() if heir is not parent}
        twins = {heir: None if context is None else context.copy() for heir, context in made.items()}
        for heir, context in twins.items():
            self.forget(heir)
            if context is not None:
                self.start(heir, context)

    def leave(self, sequence: Sequence, swapped: Any) -> None:
        """Note that a sequence waits without a row."""
        context = self._contexts.get(sequence)
        self.forget(sequence)
        if context is not None:
            self._contexts[swapped] = context

    def resume(self, swapped: Any, sequence: Sequence) -> None:
        """Note that one that waited has a row again."""
        context = self._contexts.pop(swapped, None)
        if context is not None:
            self.start(sequence, context)

    def end(self, sequences: Iterable[Sequence]) -> None:
        """Note that sequences have left their rows."""
        for sequence in sequences:
            self.forget(sequence)

    def forget(self, sequence: Any) -> None:
        """Forget what is known of a sequence; nothing more of it is published."""
        self._contexts.pop(sequence, None)
        self.due.discard(sequence)
