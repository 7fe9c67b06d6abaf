"""``numba-kv bench reuse``: what a prefix hit costs on the host, beside plain Python, and the naming of its blocks.

Both caches hold the same prompts in the same pages, one that hits and others of as many pages in all. Tokens are arrays, or
bytes, before the clock starts. Calls are timed one by one, in turns for both; figures are lower quartiles, since whatever else
the machine does only adds time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from numba_kv.errors import InvariantError
from numba_kv.kernels.block_names import chain_names
from numba_kv.ledger.pages import PageIdPool
from numba_kv.ledger.reuse.block_hash import Blake2bHash, BlockHash, chain_hashes
from numba_kv.ledger.reuse.content import TokenContent
from numba_kv.ledger.reuse.groups import ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.prefix_cache import PrefixCache
from numba_kv.ledger.reuse.publish_plan import PublishRequest
from numba_kv.replay.plain_prefix_cache import PlainPrefixCache, PlainPrompt

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["measure_hits", "measure_reuse"]

_PAGE_TOKENS = 16
_OTHERS = 32
_VOCABULARY = 32000
_ROUNDS = 20
#: Times of lookup, acquire and release in nanoseconds.
_Times = tuple[int, int, int]


def measure_reuse() -> dict[str, object]:
    """Measure hits of 64, 512 and 4,096 pages of 16 tokens; microseconds."""
    return {"page_tokens": _PAGE_TOKENS, "points": [measure_hits(pages, repeat=400) for pages in (64, 512, 4096)]}


def measure_hits(pages: int, *, repeat: int) -> dict[str, object]:
    """Measure hits of `pages` pages, `repeat` calls of each kind; microseconds."""
    random = np.random.default_rng(pages)
    prompts = [_prompt(random, max(1, pages // _OTHERS)) for _ in range(_OTHERS)] + [_prompt(random, pages)]
    ids = random.permutation(2 * pages + 2 * len(prompts)).astype(np.int32)
    ours, plain = _our_hit(prompts, ids, pages), _plain_hit(prompts, ids, pages)
    times: tuple[list[_Times], list[_Times]] = [], []
    for _ in range(_ROUNDS):
        for hit, found in zip((ours, plain), times, strict=True):
            hit()  # what the other one pushed out of the processor's caches comes back
            found += [hit() for _ in range(max(1, repeat // _ROUNDS))]
    mine, other = (_figures(found) for found in times)
    content = TokenContent(_PAGE_TOKENS, prompts[-1])
    return {
        "pages": pages,
        **mine,
        **{f"plain_{name}": value for name, value in other.items()},
        "times_faster": round(other["hit_us"] / mine["hit_us"], 2),
        "hash_us": _naming_us(Blake2bHash(chain_names), content, repeat // 2),
        "plain_hash_us": _naming_us(Blake2bHash(), content, repeat // 4),
    }


def _prompt(random: np.random.Generator, pages: int) -> NDArray[np.int32]:
    """Return random tokens, int32: whole pages, and one more, which is left to be computed."""
    return random.integers(0, _VOCABULARY, pages * _PAGE_TOKENS + 1).astype(np.int32)


def _our_hit(prompts: list[NDArray[np.int32]], ids: NDArray[np.int32], pages: int) -> Callable[[], _Times]:
    """Return what looks the last prompt up, acquires and releases it, in our cache."""
    pool = PageIdPool(len(ids), 0)
    pool.stack[:] = ids
    cache = PrefixCache(ReuseGroups(page_tokens=_PAGE_TOKENS), pool=pool)
    identity, clock = ContextIdentity(page_tokens=_PAGE_TOKENS), time.perf_counter_ns
    for tokens in prompts:
        content = TokenContent(_PAGE_TOKENS, tokens)
        held = pool.acquire(content.num_blocks)
        cache.publish(PublishRequest(identity=identity, content=content, tokens=content.num_blocks * _PAGE_TOKENS, pages=held))
        pool.drop(held)
    content = TokenContent(_PAGE_TOKENS, prompts[-1])
    if len(cache.lookup(identity, content).pages) != pages:
        raise InvariantError("bench reuse: what was published is not found")

    def hit() -> _Times:
        begin = clock()
        plan = cache.lookup(identity, content)
        looked = clock()
        lease = cache.acquire(plan)
        acquired = clock()
        lease.release()
        return looked - begin, acquired - looked, clock() - acquired

    return hit


def _plain_hit(prompts: list[NDArray[np.int32]], ids: NDArray[np.int32], pages: int) -> Callable[[], _Times]:
    """Return what looks the last prompt up, acquires and releases it, in the plain cache."""
    cache = PlainPrefixCache(ids.tolist(), _PAGE_TOKENS)
    clock = time.perf_counter_ns
    for tokens in prompts:
        cache.publish("model", PlainPrompt.prepare(tokens.tobytes(), _PAGE_TOKENS))
    prompt = PlainPrompt.prepare(prompts[-1].tobytes(), _PAGE_TOKENS)
    if len(cache.lookup("model", prompt).found) != pages:
        raise InvariantError("bench reuse: what was published is not found")

    def hit() -> _Times:
        begin = clock()
        plan = cache.lookup("model", prompt)
        looked = clock()
        lease = cache.acquire(plan)
        acquired = clock()
        cache.release(lease)
        return looked - begin, acquired - looked, clock() - acquired

    return hit


def _figures(times: list[_Times]) -> dict[str, float]:
    lookups, acquires, releases = zip(*times, strict=True)
    return {
        "lookup_us": _quartile_us(lookups),
        "acquire_us": _quartile_us(acquires),
        "release_us": _quartile_us(releases),
        "hit_us": _quartile_us(map(sum, times)),
    }


def _quartile_us(times: Iterable[int]) -> float:
    ordered = sorted(times)
    return round(ordered[len(ordered) // 4] / 1e3, 2)


def _naming_us(naming: BlockHash, content: TokenContent, repeat: int) -> float:
    identity, times, names = ContextIdentity(page_tokens=_PAGE_TOKENS), [], [b""]
    for _ in range(max(1, repeat)):
        start = time.perf_counter_ns()
        names = chain_hashes(naming, identity, content, 0, content.num_blocks)  # those before live on until these are made
        times.append(time.perf_counter_ns() - start)
    if len(names) != content.num_blocks:
        raise InvariantError("bench reuse: blocks are left without names")
    return _quartile_us(times)
