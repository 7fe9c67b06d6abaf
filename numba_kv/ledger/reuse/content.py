"""TokenContent: the tokens of a sequence and the media behind some of them, in blocks of P.

Blocks are compared, never only hashed: a token that stands for a part of an image is equal to another one only if the
image's digest and the place in the image are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import INT32_MAX, check_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MediaPart", "MediaSpan", "TokenContent", "as_token_ids", "block_key", "common_tokens"]

#: First byte of a media token in a key; text tokens are big-endian and not negative, so theirs is below 0x80.
_MEDIA = 0xFF
_BIG_ENDIAN = np.dtype(">i4")


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """One image, sound or other item: the placeholder tokens [start, start + length) stand for it.

    Attributes
    ----------
    start, length : int
        Place in the sequence, in tokens.
    digest : bytes
        16 to 64 bytes that name its content, from a hash without known collisions.
    """

    start: int
    length: int
    digest: bytes

    def __post_init__(self) -> None:
        check_count("media start", self.start, 0)
        check_count("media length", self.length)
        if not isinstance(self.digest, bytes) or not 16 <= len(self.digest) <= 64:
            raise InputError("media digest: 16 to 64 bytes are wanted, of the content and not of its name")

    @property
    def stop(self) -> int:
        """End of the span."""
        return self.start + self.length


#: (first token in the block, tokens, first token in the item, digest of the item)
MediaPart = tuple[int, int, int, bytes]


def as_token_ids(tokens: Any) -> NDArray[np.int32]:
    """Return token ids as int32 [n], a copy or a view.

    Raises
    ------
    InputError
        If one is negative or too large, or they are no integers.
    ShapeError
        If they are not a one-dimensional sequence.
    """
    try:
        given = np.asarray(tokens)
    except (ValueError, TypeError) as error:
        raise ShapeError(f"tokens: not a sequence of token ids ({error})") from None
    if given.ndim != 1:
        raise ShapeError(f"tokens: an array of {given.ndim} axes; token ids are a one-dimensional sequence")
    if given.dtype.kind not in "iu" and len(given):
        raise InputError(f"tokens: {given.dtype} are not token ids; integers are wanted")
    if len(given) and (int(given.min()) < 0 or int(given.max()) > INT32_MAX):
        place = int(np.flatnonzero((given < 0) | (given > INT32_MAX))[0])
        raise InputError(f"tokens: token {place} is {given[place]}; a token id is 0..{INT32_MAX}")
    return np.ascontiguousarray(given, np.int32)


class TokenContent:
    """Tokens and media of one sequence, which grows at its end.

    Parameters
    ----------
    page_tokens : int
        P.
    tokens : sequence of int
        The first tokens.
    media : iterable of MediaSpan
        Items, in their order, without overlap, inside `tokens`.
    placeholders : iterable of int, optional
        Token ids that stand for media. If given, every such token must lie in a span and every token of a span be one.

    Raises
    ------
    InputError
        If media do not match the tokens.

    Attributes
    ----------
    num_tokens : int
        Tokens so far.
    has_media : bool
        Whether any token stands for media.
    raw : memoryview
        The tokens as bytes, four each, and room behind them: compared with others in one go. Another one after `extend`.
    """

    def __init__(
        self,
        page_tokens: int,
        tokens: Any = (),
        media: Iterable[MediaSpan] = (),
        placeholders: Iterable[int] | None = None,
    ) -> None:
        self.page_tokens = check_count("page_tokens", page_tokens)
        self._placeholders = None if placeholders is None else np.array(sorted(set(placeholders)), np.int64)
        self._hold(np.zeros(1, np.int32))
        self._media: list[MediaSpan] = []
        self._starts: list[int] = []
        self.num_tokens = 0
        self.has_media = False
        self.extend(tokens, media)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens, int32 [n]; a view."""
        return self._buffer[: self.num_tokens]

    @property
    def media(self) -> Sequence[MediaSpan]:
        """All items."""
        return tuple(self._media)

    @property
    def num_blocks(self) -> int:
        """Blocks that are full."""
        return self.num_tokens // self.page_tokens

    def extend(self, tokens: Any, media: Iterable[MediaSpan] = ()) -> None:
        """Append tokens, and items that lie in them. Cost: amortised, what is appended.

        Raises
        ------
        InputError
            If media do not match the tokens; nothing was changed.
        """
        added = as_token_ids(tokens)
        stop = self.num_tokens + len(added)
        spans = self._checked(list(media), added, stop)
        if not self.num_tokens and len(added):
            self._hold(added.copy())  # the caller may change them
        else:
            if stop > len(self._buffer):
                grown = np.zeros(max(stop, len(self._buffer) * 2), np.int32)
                grown[: self.num_tokens] = self.tokens
                self._hold(grown)
            self._buffer[self.num_tokens : stop] = added
        self.num_tokens = stop
        self._media += spans
        self.has_media = bool(self._media)
        self._starts += [span.start for span in spans]

    def blocks(self, start: int, stop: int) -> NDArray[np.int32]:
        """Return the tokens of the full blocks [start, stop), int32 [stop - start, P]; a view."""
        page = self.page_tokens
        return self._buffer[start * page : stop * page].reshape(stop - start, page)

    def exact(self, block: int) -> bytes:
        """Return a full block as bytes that only an equal one has. Made sooner than its `key`, which has an order, too."""
        start, stop = block * self.page_tokens, (block + 1) * self.page_tokens
        parts = self.media_of(start, stop) if self.has_media else ()
        if parts:
            return block_key(self._buffer[start:stop], parts)  # longer than any text
        return bytes(self.raw[4 * start : 4 * stop])

    def media_of(self, start: int, stop: int) -> tuple[MediaPart, ...]:
        """Return the parts of items that lie in the tokens [start, stop), places relative to `start`."""
        if not self._media:
            return ()
        found = []
        first = max(0, bisect_right(self._starts, start) - 1)
        for span in self._media[first:]:
            if span.start >= stop:
                break
            low, high = max(span.start, start), min(span.stop, stop)
            if low < high:
                found.append((low - start, high - low, low - span.start, span.digest))
        return tuple(found)

    def media_blocks(self, start: int, stop: int) -> dict[int, tuple[MediaPart, ...]]:
        """Return what `media_of` says of each of the full blocks [start, stop) that has any."""
        page, found = self.page_tokens, {}
        for span in self._media:
            low, high = max(start, span.start // page), min(stop, -(-span.stop // page))
            for block in range(low, high):
                if block not in found:
                    found[block] = self.media_of(block * page, (block + 1) * page)
        return found

    def key(self, start: int, stop: int) -> bytes:
        """Return the tokens [start, stop) as bytes of which equal beginnings mean equal tokens, media included."""
        if not self.has_media:
            return self._buffer[start:stop].astype(_BIG_ENDIAN).tobytes()
        return block_key(self._buffer[start:stop], self.media_of(start, stop))

    def _hold(self, buffer: NDArray[np.int32]) -> None:
        self._buffer = buffer
        self.raw = buffer.data.cast("B")  # an array without elements has none

    def _checked(self, spans: list[MediaSpan], added: NDArray[np.int32], stop: int) -> list[MediaSpan]:
        if not spans and self._placeholders is None:
            return spans
        at = self.num_tokens
        inside = np.zeros(len(added), bool)
        for span in spans:
            if not isinstance(span, MediaSpan):
                raise InputError(f"media: {span!r} is not a MediaSpan")
            if span.start < at or span.stop > stop:
                raise InputError(
                    f"media: an item stands at tokens {span.start}..{span.stop}, which is not inside {at}..{stop}; items come "
                    "in their order, do not overlap and lie in the tokens they are given with"
                )
            inside[span.start - self.num_tokens : span.stop - self.num_tokens] = True
            at = span.stop
        if self._placeholders is not None:
            wrong = np.flatnonzero(np.isin(added, self._placeholders) != inside)
            if len(wrong):
                place = int(wrong[0])
                reason = "is no placeholder" if inside[place] else "is a placeholder without an item"
                raise InputError(f"media: token {place + self.num_tokens} ({added[place]}) {reason}; one item for each run")
        return spans


def block_key(tokens: NDArray[np.int32], parts: tuple[MediaPart, ...]) -> bytes:
    """Return tokens and the items they stand for as bytes of which equal beginnings mean equal tokens."""
    text = tokens.astype(_BIG_ENDIAN).tobytes()
    if not parts:
        return text
    pieces, at = [], 0
    for place, count, offset, digest in parts:
        pieces.append(text[4 * at : 4 * place])
        for i in range(count):
            token = text[4 * (place + i) : 4 * (place + i + 1)]
            pieces.append(bytes((_MEDIA, len(digest))) + digest + (offset + i).to_bytes(4, "big") + token)
        at = place + count
    pieces.append(text[4 * at :])
    return b"".join(pieces)


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many tokens two keys of `TokenContent.key` have in common at their beginning."""
    if one == other:
        limit = len(one)
    else:
        limit = min(len(one), len(other))
        low, high = 0, limit  # the longest common beginning, by halves: comparing slices is one memcmp each
        while low < high:
            middle = (low + high + 1) // 2
            if one[:middle] == other[:middle]:
                low = middle
            else:
                high = middle - 1
        limit = low
    if _MEDIA not in one[:limit]:
        return limit // 4
    count = at = 0
    while at < limit:
        if one[at] != _MEDIA:
            at += 4
        elif at + 1 < limit:
            at += 10 + one[at + 1]  # mark, length, digest, place, token
        else:
            break
        count += at <= limit
    return count
