"""Rows that are reordered, repeated and dropped: beam search, and the calls it makes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.transformers_models import WINDOW, generated, prompt, tiny, torch, transformers

from numba_kv.adapters.transformers import PagedCache  # isort: skip  # behind the helper, which skips where there is no torch
from numba_kv.errors import CapacityError, InputError

BEAMS = ["llama", "gemma3", "mistral", "gemma4", "deepseek_v3", "mimo_v2_flash", "qwen3_next", "jamba"]


def opened(model: Any, target: str, **limits: Any) -> PagedCache:
    return PagedCache.for_model(model, **{"max_tokens": 96, "page_tokens": 4, "max_batch": 8, "target": target, **limits})


def forward(model: Any, cache: Any, ids: Any, mask: Any) -> Any:
    with torch.no_grad():
        return model(
            ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0)[:, -ids.shape[1] :], cache=cache
        ).logits


@pytest.mark.parametrize("name", BEAMS)
@pytest.mark.parametrize("pads", [(0,), (0, 6)], ids=["one", "padded"])
def test_beam_search(name: str, pads: tuple[int, ...], target: str) -> None:
    if target == "sim" and (name, pads) != ("gemma3", (0,)):
        pytest.skip("the simulator takes too long for every family")
    model, inputs = tiny(name, target), prompt(2 * WINDOW + 3, target, pads)
    steps = 4 if target == "sim" else 2 * WINDOW
    options = {"num_beams": 3, "num_return_sequences": 3, "output_logits": False, "output_scores": True}
    wanted = model.generate(**inputs, max_new_tokens=steps, do_sample=False, return_dict_in_generate=True, **options)
    with opened(model, target) as cache:
        found = model.generate(
            **inputs, max_new_tokens=steps, do_sample=False, return_dict_in_generate=True, cache=cache, **options
        )
        assert torch.equal(found.sequences, wanted.sequences)
        assert torch.equal(found.sequences_scores, wanted.sequences_scores)
        cache.batch.audit()
        stats = cache.batch.stats
        assert stats.forked > 0
        assert len(cache.stored_tokens) == 3 * len(pads)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5", "falcon_h1", "lfm2"])
def test_any_order_of_rows(name: str, target: str) -> None:
    """Every kind of reordering between steps: permutations, repeats, rows without a child, fewer rows and more."""
    if target == "sim" and name != "gemma3":
        pytest.skip("the simulator takes too long for every family")
    model, pads = tiny(name, target), (0, 3, 7, 1)
    inputs = prompt(14, target, pads)
    orders: list[tuple[str, Any]] = [
        ("reorder_cache", torch.tensor([1, 0, 3, 2])),
        ("reorder_cache", torch.tensor([2, 2, 2, 0])),
        ("reorder_cache", torch.tensor([3, 0, 0, 1])),
        ("batch_select_indices", torch.tensor([3, 1])),
        ("batch_repeat_interleave", 3),
        ("reorder_cache", torch.tensor([5, 4, 4, 0, 0, 1])),
        ("batch_select_indices", torch.tensor([True, False, True, True, False, False])),
    ]
    with opened(model, target) as cache:
        theirs = transformers.DynamicCache(config=model.config)
        mask = inputs["attention_mask"]
        ids = inputs["input_ids"]
        assert torch.equal(forward(model, cache, ids, mask), forward(model, theirs, ids, mask))
        for turn, (call, what) in enumerate(orders):
            getattr(cache, call)(what.to(mask.device) if hasattr(what, "to") else what)
            rows = torch.arange(len(mask), device=mask.device)
            rows = rows.repeat_interleave(what) if call == "batch_repeat_interleave" else rows[what.to(mask.device)]
            theirs.reorder_cache(rows)  # the one call that its recurrent layers can do, with any rows
            mask = mask[rows]
            for count in (1, 2) if target == "sim" else (1, 3, 1, 2):
                more = prompt(count, target, (0,) * len(mask), seed=turn)["input_ids"]
                mask = torch.cat([mask, torch.ones_like(more)], dim=1)
                assert torch.equal(forward(model, cache, more, mask), forward(model, theirs, more, mask))
            cache.batch.audit()


def test_full_pages_are_shared_and_not_copied(target: str) -> None:
    model = tiny("llama", target)
    inputs = prompt(18, target)
    with opened(model, target) as cache:
        forward(model, cache, inputs["input_ids"], inputs["attention_mask"])
        free = cache.batch.free_pages
        cache.batch_repeat_interleave(8)
        assert free - cache.batch.free_pages <= 7, "four full pages are shared, one partial page is copied"
        assert cache.batch.stats.copied_pages == 7
        cache.batch.audit()


def test_an_empty_cache_has_nothing_to_reorder(target: str) -> None:
    with opened(tiny("llama", target), target) as cache:
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        assert cache.stored_tokens == []


def test_rows_that_are_not_there_are_refused(target: str) -> None:
    model, inputs = tiny("llama", target), prompt(6, target, (0, 0, 0))
    with opened(model, target) as cache:
        forward(model, cache, inputs["input_ids"], inputs["attention_mask"])
        with pytest.raises(InputError, match="rows: 3 is not one of the 3 rows"):
            cache.reorder_cache(torch.tensor([0, 3, 1]))
        with pytest.raises(InputError, match="none is named of the 3 rows"):
            cache.batch_select_indices(torch.zeros(3, dtype=torch.bool))
        with pytest.raises(CapacityError, match="9 wanted, the cache was made for max_batch 8"):
            cache.batch_repeat_interleave(3)
        assert cache.stored_tokens == [6, 6, 6]
        cache.batch.audit()


def test_several_answers_of_one_prompt(target: str) -> None:
    """Sampling with equal draws; the rows are repeated before the first forward."""
    model, inputs = tiny("gemma3", target), prompt(12, target)
    steps = 4 if target == "sim" else 12
    options = {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(3)
    wanted = generated(model, inputs, steps, **options)
    with opened(model, target) as cache:
        torch.manual_seed(3)
        found = generated(model, inputs, steps, cache=cache, **options)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
