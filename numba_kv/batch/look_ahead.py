"""LookAhead: what K and V of a position are computed of, where a model reads the token behind it.

A draft head whose input at position p is token p + 1 has K and V there that depend on the tokens up to p + 1. Its context is
the sequence without its first token, which becomes part of the identity::

    tokens            t0 t1 t2 ... t(n-1)                 K and V of position p: t0 ... t(p+1)
    identity                t0
    content           t1 t2 ... t(n-1) ?                  entry p is the last token that position p depends on

So two sequences share a position only if all that it depends on is equal, and the last known token has nothing to share: what
follows it is not known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.errors import InputError
from numba_kv.geometry import INT32_MAX
from numba_kv.ledger.reuse.content import TokenContent, as_token_ids

if TYPE_CHECKING:
    from numba_kv.ledger.reuse.content import MediaSpan
    from numba_kv.ledger.reuse.identity import ContextIdentity

__all__ = ["LookAhead"]

#: Stands for the token that follows a prompt, which nobody knows: no sequence has it.
_UNKNOWN = INT32_MAX


@dataclass(frozen=True, slots=True)
class LookAhead:
    """Makes contents of tokens.

    Attributes
    ----------
    page_tokens : int
        P.
    tokens : int
        Tokens that a position looks ahead: 0 or 1.
    """

    page_tokens: int
    tokens: int

    def content(self, tokens: Any, media: Iterable[MediaSpan]) -> TokenContent:
        """Return the content of a prompt, an entry for each of its tokens.

        Raises
        ------
        InputError, ShapeError
            If they are no token ids, or the media do not match them or the model.
        """
        if not self.tokens:
            return TokenContent(self.page_tokens, tokens, media)
        if tuple(media):
            raise InputError("media: a draft that looks ahead cannot reuse prompts with media")
        given = as_token_ids(tokens)
        return TokenContent(self.page_tokens, np.append(given[1:], _UNKNOWN) if len(given) else given)

    def known(self, content: TokenContent) -> TokenContent:
        """Return a content without the entry that is not known; what follows is appended to it. Cost: O(tokens)."""
        return TokenContent(self.page_tokens, content.tokens[:-1]) if self.tokens else content

    def identity(self, identity: ContextIdentity, tokens: Any) -> ContextIdentity:
        """Return the identity of a sequence that begins with `tokens`."""
        if not self.tokens:
            return identity
        return replace(identity, embedding=b"first token" + int(tokens[0]).to_bytes(4, "little"))
