"""SequenceContext: what a batch knows of a sequence's tokens, and what of it is to be published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.ledger.reuse.content import TokenContent

if TYPE_CHECKING:
    from numba_kv.ledger.reuse.identity import ContextIdentity
    from numba_kv.ledger.reuse.policy import PublishPolicy

__all__ = ["SequenceContext"]


@dataclass(slots=True)
class SequenceContext:
    """Tokens and identity of a sequence.

    Attributes
    ----------
    identity, content : ContextIdentity, TokenContent
        What it is; a sequence may be longer than its content, if nobody said which tokens were generated.
    policy : PublishPolicy
        What it leaves behind.
    prompt_tokens, matched_tokens : int
        Of its prompt; of them, those that were kept when it was admitted.
    published : int
        Tokens that were offered to the cache.
    """

    identity: ContextIdentity
    content: TokenContent
    policy: PublishPolicy
    prompt_tokens: int
    matched_tokens: int
    published: int

    def copy(self) -> SequenceContext:
        """Return the same for another sequence, which grows on its own. Cost: O(tokens)."""
        page, content = self.content.page_tokens, self.content
        twin = TokenContent(page, content.tokens, content.media)
        return SequenceContext(self.identity, twin, self.policy, self.prompt_tokens, self.matched_tokens, self.published)

    def truncate(self, tokens: int) -> None:
        """Forget which tokens lie behind the first `tokens`; an item that is cut is forgotten whole. Cost: O(tokens)."""
        content = self.content
        if tokens >= content.num_tokens:
            return
        cut = next((span.start for span in content.media if span.stop > tokens), tokens)
        stop = min(tokens, cut)
        whole = [span for span in content.media if span.stop <= stop]
        self.content = TokenContent(content.page_tokens, content.tokens[:stop], whole)
        self.published = min(self.published, stop)

    def steps(self, length: int, *, settled: int, is_last: bool, has_points: bool) -> list[tuple[int, bool]]:
        """Return up to which tokens to publish now, rising, and which of these are points.

        Parameters
        ----------
        length : int
            Tokens that the sequence has at least, and whose K and V are written.
        settled : int
            Of these, those that nobody takes back. Prompt tokens are not taken back either.
        is_last : bool
            Whether the sequence ends here.
        has_points : bool
            Whether there is anything to keep at points beside whole pages: copies of windows, or states.
        """
        policy, prompt, page = self.policy, self.prompt_tokens, self.content.page_tokens
        known = min(length, self.content.num_tokens)
        stop = policy.last_token(prompt, known)
        if not is_last:
            stop = min(stop, max(settled, prompt))
        if stop <= self.published:
            return []
        points = set(policy.points(prompt, self.published, stop, self.matched_tokens, page))
        if is_last and policy.publish == "all" and policy.at_end:
            points.add(stop)
        found = points if policy.tails or has_points else set()
        if stop // page > self.published // page:
            found = found | {stop}
        return [(tokens, tokens in points) for tokens in sorted(found)]
