"""Prompt: a sequence to be admitted, by its tokens and all else that says what its K and V are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numba_kv.errors import InputError

if TYPE_CHECKING:
    from numba_kv.ledger.reuse.content import MediaSpan
    from numba_kv.ledger.reuse.policy import PublishPolicy

__all__ = ["Prompt"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What `Batch.update` takes for one sequence, where its tokens alone do not say all.

    Attributes
    ----------
    tokens : sequence of int
        The prompt.
    policy : PublishPolicy or None
        What the sequence reuses and leaves behind; None: that of the batch's options.
    salt : bytes or None
        A tenant's secret: sequences with different ones share nothing.
    rope : bytes or None
        Which of several rotary tables its positions are turned by.
    media : iterable of MediaSpan
        Items that tokens of the prompt stand for.
    most_reused : int or None
        Most of its first tokens that are reused; None: as many as are kept.
    """

    tokens: Any
    policy: PublishPolicy | None = None
    salt: bytes | None = None
    rope: bytes | None = None
    media: Iterable[MediaSpan] = ()
    most_reused: int | None = None

    def check_plain(self) -> None:
        """Check that it says no more than its tokens.

        Raises
        ------
        InputError
            If it does.
        """
        told = (self.policy, self.salt, self.rope, self.most_reused)
        if any(value is not None for value in told) or tuple(self.media):
            raise InputError(
                "admit: policy, salt, rope, media and most_reused are for tokens, and for a Batch that was made with "
                "reuse=ReuseOptions()"
            )
