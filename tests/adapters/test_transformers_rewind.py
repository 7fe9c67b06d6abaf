"""Taking tokens back: crop, assisted generation with several kinds of drafts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.transformers_models import WINDOW, check_equal, generated, prompt, tiny, torch, transformers

from numba_kv.adapters.transformers import PagedCache  # isort: skip  # behind the helper, which skips where there is no torch
from numba_kv.errors import InputError, RewindTooFar


@pytest.fixture
def steps(target: str) -> int:
    return 5 if target == "sim" else 2 * WINDOW + 5


def opened(model: Any, target: str, **limits: Any) -> PagedCache:
    return PagedCache.for_model(
        model, **{"max_tokens": 96, "page_tokens": 4, "max_rewind_tokens": 6, "target": target, **limits}
    )


def fed(model: Any, cache: Any, ids: Any, mask: Any) -> Any:
    """Forward the columns of `ids` that the cache has not seen; return the last logits."""
    before = cache.get_seq_length()
    with torch.no_grad():
        return model(
            ids[:, before:], attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(0)[:, before:], cache=cache
        ).logits


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gemma4", "deepseek_v3", "mimo_v2_flash"])
@pytest.mark.parametrize("pads", [(0,), (0, 5, 9)], ids=["one", "padded"])
def test_tokens_that_are_taken_back_leave_no_trace(name: str, pads: tuple[int, ...], target: str) -> None:
    """Right tokens and wrong ones that are taken back at once, beside transformers' own cache, which cannot do more."""
    if target == "sim" and name not in ("llama", "gemma3"):
        pytest.skip("the simulator takes too long for every family")
    model = tiny(name, target)
    right, wrong = prompt(32, target, pads), prompt(32, target, pads, seed=9)
    mask = right["attention_mask"]
    ids = torch.cat([right["input_ids"][:, :24], wrong["input_ids"][:, 24:]], dim=1)
    with opened(model, target, max_batch=3) as cache:
        theirs = transformers.DynamicCache(config=model.config)
        theirs.activate_past_recording()
        for end, removed in ((20, 0), (24, 1), (26, 3), (25, 2), (28, 5), (24, 0), (30, 6), (25, 1)):
            logits = [fed(model, each, ids[:, :end], mask[:, :end]) for each in (theirs, cache)]
            assert torch.equal(*logits)
            for each in (theirs, cache):
                each.crop(-removed)
                assert each.get_seq_length() == end - removed
            cache.batch.audit()
        for end in (25, 32):
            assert torch.equal(*(fed(model, each, right["input_ids"][:, :end], mask[:, :end]) for each in (theirs, cache)))
        assert cache.stored_tokens == [32 - count for count in pads]


def test_a_crop_into_the_pads(target: str) -> None:
    """A row that has no token left takes pads on its left again."""
    model = tiny("gemma3", target)
    first, then = prompt(12, target, (0, 9)), prompt(14, target, (2, 11), seed=4)
    with opened(model, target, max_batch=2) as cache:
        fed(model, cache, first["input_ids"], first["attention_mask"])
        assert cache.stored_tokens == [12, 3]
        cache.crop(-6)
        assert cache.stored_tokens == [6, 0]
        cache.crop(-6)
        assert cache.stored_tokens == [0, 0]
        cache.batch.audit()
        found = [fed(model, cache, then["input_ids"][:, :n], then["attention_mask"][:, :n]) for n in (13, 14)]
        assert cache.stored_tokens == [12, 3]
    with opened(model, target, max_batch=2) as cache:
        wanted = [fed(model, cache, then["input_ids"][:, :n], then["attention_mask"][:, :n]) for n in (13, 14)]
    assert torch.equal(found[0][:, -2:], wanted[0][:, -2:])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "gemma4", "deepseek_v3", "mimo_v2_flash"])
@pytest.mark.parametrize("noise", [0.0, 0.05, 5.0], ids=["same", "near", "useless"])
@pytest.mark.parametrize("tokens", [WINDOW - 3, 3 * WINDOW + 1])
def test_assisted_generation(name: str, noise: float, tokens: int, target: str, steps: int) -> None:
    """Drafts that are all taken, some, or none."""
    if target == "sim" and (name, noise) != ("gemma3", 0.05):
        pytest.skip("the simulator takes too long for every family")
    model, assistant = tiny(name, target), tiny(name, target, noise=noise)
    if noise == 0.0:
        assistant = tiny(name, target, seed=0, kind="float32", attention="sdpa", noise=1e-30)  # another object, equal weights
    inputs = prompt(tokens, target)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    wanted = generated(model, inputs, steps)
    theirs = generated(model, inputs, steps, assistant_model=assistant)
    assert torch.equal(theirs[0], wanted[0])
    with opened(model, target) as cache:
        found = generated(model, inputs, steps, cache=cache, assistant_model=assistant)
        check_equal(found, theirs)
        cache.batch.audit()
        if noise and target != "sim":  # where few tokens are drafted, all of them may be right
            assert cache.batch.stats.rewinds > 0


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_from_the_prompt_itself(name: str, target: str, steps: int) -> None:
    model, inputs = tiny(name, target), prompt(8, target)
    inputs["input_ids"] = inputs["input_ids"].repeat(1, 3)
    inputs["attention_mask"] = inputs["attention_mask"].repeat(1, 3)
    theirs = generated(model, inputs, steps, prompt_lookup_num_tokens=4)
    with opened(model, target) as cache:
        check_equal(generated(model, inputs, steps, cache=cache, prompt_lookup_num_tokens=4), theirs)
        cache.batch.audit()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_an_assistant_with_a_paged_cache(name: str, target: str) -> None:
    """What a draft model does: many single tokens, then all of them taken back at once."""
    model, rounds = tiny(name, target), 2 if target == "sim" else 6
    ids = prompt(40 + rounds, target)["input_ids"]
    with opened(model, target) as cache:
        theirs = transformers.DynamicCache(config=model.config)
        theirs.activate_past_recording()
        cache.activate_past_recording()
        for each in (theirs, cache):
            each.logits = []
            for turn in range(rounds):
                end = 11 + turn
                mask = torch.ones_like(ids)
                each.logits.append(fed(model, each, ids[:, :end], mask[:, :end]))
                for column in range(end, end + 6):
                    each.logits.append(fed(model, each, ids[:, : column + 1], mask[:, : column + 1]))
                each.crop(-6)
        assert all(torch.equal(a, b) for a, b in zip(cache.logits, theirs.logits, strict=True))


def test_drafts_are_refused_before_anything_was_generated(target: str) -> None:
    model, inputs = tiny("gemma3", target), prompt(20, target)
    with opened(model, target, max_rewind_tokens=0) as cache:
        assert not cache.is_croppable
        with pytest.raises(RewindTooFar, match="max_rewind_tokens: 0"):
            generated(model, inputs, 4, cache=cache, prompt_lookup_num_tokens=4)
        assert cache.get_seq_length() == 0
    with opened(tiny("llama", target), target, max_rewind_tokens=0) as cache:
        assert cache.is_croppable
        cache.activate_past_recording()
    with opened(model, target, max_rewind_tokens=0, max_tokens=WINDOW) as cache:
        assert cache.is_croppable, "a window that reaches the capacity is never left"


def test_a_crop_that_reaches_too_far_changes_nothing(target: str) -> None:
    model, inputs = tiny("gemma3", target), prompt(60, target)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with opened(model, target) as cache:
        fed(model, cache, ids[:, :40], mask[:, :40])
        with pytest.raises(RewindTooFar, match="a larger max_rewind_tokens"):
            cache.crop(-20)
        assert cache.stored_tokens == [40]
        found = fed(model, cache, ids[:, :44], mask[:, :44])
        cache.crop(-44)
        assert cache.stored_tokens == [0]
        fed(model, cache, ids[:, :40], mask[:, :40])
        assert torch.equal(fed(model, cache, ids[:, :44], mask[:, :44]), found)


@pytest.mark.parametrize(("removed", "complaint"), [(3, "3 given; 0, or minus"), (-8, "-8 given, -7 to 0")])
def test_a_wrong_number_is_refused(removed: int, complaint: str, target: str) -> None:
    model, inputs = tiny("llama", target), prompt(7, target)
    with opened(model, target) as cache:
        cache.crop(0)
        fed(model, cache, inputs["input_ids"], inputs["attention_mask"])
        with pytest.raises(InputError, match=complaint):
            cache.crop(removed)
        assert cache.get_seq_length() == 7
