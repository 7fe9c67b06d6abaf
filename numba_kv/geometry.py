"""Page and window arithmetic in plain integers.

Everything that decides where a token lives is here once, for the host; kernels repeat only the parts they run.

Symbols: P tokens of a page, W window in tokens (the query itself counts), C most tokens of a short step, R pages of a
ring, L logical pages of a row. All ranges are half-open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import index
from typing import Literal

from numba_kv.errors import ConfigError, InputError

__all__ = [
    "FULL",
    "INT32_MAX",
    "KV_LAYOUTS",
    "MAX_POOL_PAGES",
    "PAGE_TOKENS",
    "RESERVED_PAGES",
    "Window",
    "ceil_div",
    "check_count",
    "check_page_tokens",
    "mapped_pages",
    "reference_private_pages",
    "reference_retained_pages",
    "rewind_is_allowed",
    "ring_pages",
    "round_up",
    "table_pages",
]

INT32_MAX = 2**31 - 1
#: Largest page count of a pool: page ids of the V half (K id + pages) must fit int32 too.
MAX_POOL_PAGES = INT32_MAX // 2
#: The last two ids of a pool: the null page (zeros, never written) and the trash page (never read).
RESERVED_PAGES = 2
#: Legal page sizes.
PAGE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

#: How a page lies: tokens, each with its heads ([P, H, D]), or heads, each with its tokens ([H, P, D]).
KV_LAYOUTS = ("NHD", "HND")

WindowKind = Literal["full", "sliding", "chunked"]


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up, for b > 0."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `a`."""
    return ceil_div(a, multiple) * multiple


def check_count(name: str, value: object, low: int = 1, high: int = INT32_MAX) -> int:
    """Return `value` if it is an integer from `low` to `high`; `name` is for messages.

    Raises
    ------
    InputError
        Otherwise.
    """
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise InputError(f"{name}: {value!r} is not an integer from {low} to {high}")
    return number


def check_page_tokens(page_tokens: int) -> int:
    """Return `page_tokens` if it is a power of two from 1 to 256.

    Raises
    ------
    ConfigError
        Otherwise.
    """
    if isinstance(page_tokens, bool) or not isinstance(page_tokens, int) or page_tokens not in PAGE_TOKENS:
        raise ConfigError(f"page_tokens: {page_tokens!r} is not a power of two from 1 to 256")
    return page_tokens


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """Which keys a query may see.

    Attributes
    ----------
    kind : {"full", "sliding", "chunked"}
        All keys; the last `tokens` keys, the query's own included; the keys of the query's own chunk of `tokens`.
    tokens : int
        W or K; 0 for full attention.
    """

    kind: WindowKind
    tokens: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("full", "sliding", "chunked"):
            raise ConfigError(f"window kind: {self.kind!r} is not 'full', 'sliding' or 'chunked'")
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int):
            raise ConfigError(f"window tokens: {self.tokens!r} is not an integer")
        if self.kind == "full" and self.tokens != 0:
            raise ConfigError(f"window tokens: full attention has no window, got {self.tokens}")
        if self.kind != "full" and not 1 <= self.tokens <= INT32_MAX:
            raise ConfigError(f"window tokens: {self.tokens} is not in 1..{INT32_MAX}")

    @property
    def is_full(self) -> bool:
        """Whether every key is visible."""
        return self.kind == "full"

    def lowest_key(self, query: int) -> int:
        """Return the lowest position that the query at position `query` sees."""
        if self.kind == "sliding":
            return max(0, query - self.tokens + 1)
        if self.kind == "chunked":
            return query // self.tokens * self.tokens
        return 0

    def __str__(self) -> str:
        return "full" if self.is_full else f"{self.kind} {self.tokens}"


#: Full attention.
FULL = Window("full")


def ring_pages(window: Window, page_tokens: int, max_step_tokens: int, capacity: int) -> int:
    """Return R: the private pages a row needs for `window`, whatever its prompt and however it is cut into steps.

    Never more than the pages of `capacity` tokens. Full attention has no ring: 0.
    """
    if window.is_full:
        return 0
    if window.kind == "sliding":
        straddled = window.tokens + max_step_tokens - 2
    else:
        straddled = window.tokens + max_step_tokens - 1 - math.gcd(window.tokens, page_tokens)
    return max(1, min(ceil_div(straddled, page_tokens) + 1, ceil_div(capacity, page_tokens)))


def mapped_pages(window: Window, page_tokens: int, ring: int, length: int, count: int) -> tuple[int, int]:
    """Return the logical pages [begin, end) that are mapped after `count` tokens were appended at `length`."""
    end = ceil_div(length + count, page_tokens)
    if window.is_full:
        return 0, end
    return max(window.lowest_key(length) // page_tokens, end - ring), end


def rewind_is_allowed(window: Window, page_tokens: int, ring: int, high_water: int, target: int) -> bool:
    """Return whether the ring still holds every token that the next query after a rewind to `target` sees."""
    if window.is_full or target == 0:
        return True
    return window.lowest_key(target) // page_tokens >= ceil_div(high_water, page_tokens) - ring


def table_pages(capacity: int, page_tokens: int) -> int:
    """Return L: pages of `capacity` tokens, rounded up to whole tiles of the attention kernels.

    L * P is a multiple of 256 and L of max(1, 128 / P), so a kernel that loads whole tiles of entries stays inside its row.
    """
    multiple = max(1, 256 // page_tokens, 128 // page_tokens)
    return round_up(ceil_div(capacity, page_tokens), multiple)


def reference_retained_pages(window_tokens: int, page_tokens: int = 128) -> int:
    """Return the pages that TensorRT Edge-LLM keeps mapped for a window."""
    return ceil_div(window_tokens, page_tokens) + 1


def reference_private_pages(window_tokens: int, page_tokens: int = 128, replacement: int = 1) -> int:
    """Return the pages that TensorRT Edge-LLM reserves for a row's window: what its configurations are checked against."""
    return 2 * reference_retained_pages(window_tokens, page_tokens) + replacement
