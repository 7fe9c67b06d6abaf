"""Generation with attention over pages equals generation with transformers' own cache: tokens, and logits up to rounding."""

from __future__ import annotations

from typing import Any

import pytest

from numba_kv.cache import KVIO
from tests.helpers.transformers_models import (
    FAMILIES,
    FAMILIES_IN_SIM,
    HYBRID_FAMILIES,
    WINDOW,
    check_near,
    generated,
    opened_paged,
    prompt,
    tiny,
    torch,
    transformers,
)

SHORT, LONG, PADDED = (WINDOW - 3, (0,)), (3 * WINDOW + 5, (0,)), (2 * WINDOW + 3, (0, WINDOW + 4, 5))


@pytest.fixture
def steps(target: str) -> int:
    return 3 if target == "sim" else WINDOW + 6


@pytest.fixture(autouse=True)
def nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every dense copy of pages fail."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("K and V were gathered")

    monkeypatch.setattr(KVIO, "gather", refuse)


def few_in_sim(target: str, is_wanted: bool) -> None:
    if target == "sim" and not is_wanted:
        pytest.skip("the simulator takes too long for everything")


@pytest.mark.parametrize("name", [*FAMILIES, *HYBRID_FAMILIES])
def test_a_family_generates_the_same(name: str, target: str, steps: int) -> None:
    few_in_sim(target, False)
    check_family(name, target, steps, PADDED)


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "gpt_oss", "llama4", "qwen2"])
def test_a_prompt_that_is_longer_than_the_window(name: str, target: str, steps: int) -> None:
    few_in_sim(target, False)
    check_family(name, target, steps, LONG)


@pytest.mark.parametrize("name", FAMILIES_IN_SIM)
def test_a_prompt_that_is_shorter_than_the_window(name: str, target: str, steps: int) -> None:
    check_family(name, target, steps, SHORT)


def check_family(name: str, target: str, steps: int, shape: tuple[int, tuple[int, ...]]) -> None:
    model, inputs = tiny(name, target), prompt(shape[0], target, shape[1])
    wanted = generated(model, inputs, steps)
    with opened_paged(model, target) as cache:
        check_near(generated(model, inputs, steps, cache=cache), wanted)
        cache.batch.audit()
        assert cache.get_seq_length() == shape[0] + steps - 1
        assert cache.stored_tokens == [shape[0] + steps - 1 - pads for pads in shape[1]]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gemma4"])
def test_bfloat16(name: str, target: str) -> None:
    """No further from float32 than the model's own attention is; sinks are converted."""
    few_in_sim(target, False)
    exact, model, inputs = tiny(name, target), tiny(name, target, "bfloat16"), prompt(*PADDED[:1], target, PADDED[1])
    with torch.no_grad():
        for own, other in zip(exact.parameters(), model.parameters(), strict=True):
            own.copy_(other)
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(0)
        wanted = exact(**inputs, position_ids=positions).logits[:, -1]
        theirs = model(**inputs, position_ids=positions).logits[:, -1].float()
        with opened_paged(model, target) as cache:
            ours = model(**inputs, position_ids=positions, cache=cache).logits[:, -1].float()
    tiny.cache_clear()
    assert (ours - wanted).norm() <= 1.5 * (theirs - wanted).norm()


@pytest.mark.parametrize(("page_tokens", "reach"), [(1, 0), (16, 5), (64, 0)])
def test_any_page_size_and_reach(page_tokens: int, reach: int, target: str, steps: int) -> None:
    few_in_sim(target, False)
    model, inputs = tiny("gemma3", target), prompt(LONG[0], target)
    wanted = generated(model, inputs, steps)
    with opened_paged(model, target, page_tokens=page_tokens, max_rewind_tokens=reach) as cache:
        check_near(generated(model, inputs, steps, cache=cache), wanted)
        cache.batch.audit()


@pytest.mark.parametrize(("chunk", "reach"), [(2, 0), (6, 0), (6, 7)])
@pytest.mark.parametrize("name", ["gemma3", "llama4", "gemma4", "granitemoehybrid"])
def test_a_padded_prompt_in_chunks(name: str, chunk: int, reach: int, target: str, steps: int) -> None:
    """Chunks that are longer and shorter than a short step, and rows of which a chunk holds nothing but pads."""
    few_in_sim(target, False)
    model, inputs = tiny(name, target), prompt(PADDED[0], target, PADDED[1])
    wanted = generated(model, inputs, steps, prefill_chunk_size=chunk)
    with opened_paged(model, target, max_rewind_tokens=reach) as cache:
        check_near(generated(model, inputs, steps, cache=cache, prefill_chunk_size=chunk), wanted)
        cache.batch.audit()
        assert cache.stored_tokens == [PADDED[0] + steps - 1 - pads for pads in PADDED[1]]


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_a_chat_goes_on(name: str, target: str, steps: int) -> None:
    """Three turns of a padded batch; each sends all ids of the turns before it, as a chat does."""
    few_in_sim(target, False)
    model, (tokens, pads) = tiny(name, target), PADDED

    def chat(cache: Any) -> list[tuple[Any, Any]]:
        inputs, answers = prompt(tokens, target, pads), []
        for turn, more in enumerate((0, 3, 2 * WINDOW)):
            said = prompt(more, target, (0,) * len(pads), seed=turn)
            ids = torch.cat([answers[-1][0] if turn else inputs["input_ids"], said["input_ids"]], dim=1)
            mask = torch.ones_like(ids)
            mask[:, :tokens] = inputs["attention_mask"]
            answers.append(generated(model, {"input_ids": ids, "attention_mask": mask}, 5, cache=cache))
        return answers

    wanted = chat(transformers.DynamicCache(config=model.config))
    with opened_paged(model, target) as cache:
        for found, answer in zip(chat(cache), wanted, strict=True):
            check_near(found, answer)
        cache.batch.audit()


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "llama4"])
def test_drafts_that_are_taken_back(name: str, target: str, steps: int) -> None:
    few_in_sim(target, False)
    model, assistant, inputs = tiny(name, target), tiny(name, target, noise=0.05), prompt(2 * WINDOW + 1, target)
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    wanted = generated(model, inputs, steps)
    with opened_paged(model, target, max_rewind_tokens=6) as cache:
        check_near(generated(model, inputs, steps, cache=cache, assistant_model=assistant), wanted)
        cache.batch.audit()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_beams(name: str, target: str, steps: int) -> None:
    few_in_sim(target, False)
    model, inputs = tiny(name, target), prompt(WINDOW + 3, target, (0, 4))
    options = {"num_beams": 2, "do_sample": False, "max_new_tokens": steps}
    wanted = model.generate(**inputs, **options)
    with opened_paged(model, target) as cache:
        assert torch.equal(model.generate(**inputs, **options, cache=cache), wanted)
        cache.batch.audit()


def test_a_window_that_covers_the_capacity(target: str) -> None:
    few_in_sim(target, False)
    for name in ("mistral", "llama4"):
        model, inputs = tiny(name, target), prompt(WINDOW - 3, target)
        wanted = generated(model, inputs, 4, prefill_chunk_size=2)
        with opened_paged(model, target, max_tokens=WINDOW) as cache:
            assert len(cache.resources.plan.groups) == 1
            found = generated(model, inputs, 4, cache=cache, prefill_chunk_size=2)
            assert torch.equal(found[0], wanted[0])


def test_a_window_of_one_token(target: str) -> None:
    """A query sees itself alone: nothing is carried into a long step."""
    few_in_sim(target, False)
    config = transformers.MistralConfig(**{**tiny("mistral").config.to_dict(), "sliding_window": 1})
    ids = prompt(9, target)["input_ids"]
    model = transformers.MistralForCausalLM(config).eval().to(ids.device)
    with opened_paged(model, target) as cache, torch.no_grad():
        found = [model(ids[:, begin:end], cache=cache).logits for begin, end in ((0, 4), (4, 7), (7, 8), (8, 9))]
        assert torch.allclose(torch.cat(found, dim=1), model(ids, use_cache=False).logits, atol=1e-3)


def test_a_forward_of_ones_own(target: str) -> None:
    """Without generate: a prompt, then tokens one by one, without any mask, under autograd and without."""
    few_in_sim(target, False)
    model = tiny("gemma3", target)
    ids = prompt(2 * WINDOW + 4, target)["input_ids"]
    whole = model(ids, use_cache=False).logits
    with opened_paged(model, target) as cache:
        logits = [model(ids[:, :11], cache=cache).logits]
        with torch.inference_mode():
            logits += [model(ids[:, i : i + 1], cache=cache).logits for i in range(11, ids.shape[1])]
        assert torch.allclose(torch.cat(logits, dim=1), whole, atol=1e-3)
        assert cache.stored_tokens == [ids.shape[1]]
