"""Generation with a paged cache equals generation with transformers' own, token for token and logit for logit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.transformers_models import (
    FAMILIES,
    FAMILIES_IN_SIM,
    HYBRID_FAMILIES,
    NAMELESS_FAMILIES,
    UNEQUAL_FAMILIES,
    WINDOW,
    check_equal,
    generated,
    opened,
    prompt,
    tiny,
    torch,
    transformers,
)

SHORT, LONG, PADDED = (WINDOW - 3, (0,)), (3 * WINDOW + 5, (0,)), (2 * WINDOW + 3, (0, WINDOW + 4, 5))


@pytest.fixture
def steps(target: str) -> int:
    """Tokens to generate: well beyond the window, where there is time for that."""
    return 5 if target == "sim" else 2 * WINDOW + 5


def check_family(name: str, target: str, steps: int, shape: tuple[int, tuple[int, ...]], **options: Any) -> None:
    if target == "sim" and name not in FAMILIES_IN_SIM:
        pytest.skip("the simulator takes too long for every family")
    model = tiny(name, target, **options)
    inputs = prompt(shape[0], target, shape[1])
    wanted = generated(model, inputs, steps)
    with opened(model, target) as cache:
        check_equal(generated(model, inputs, steps, cache=cache), wanted)
        cache.batch.audit()
        assert cache.get_seq_length() == shape[0] + steps - 1
        assert cache.stored_tokens == [shape[0] + steps - 1 - pads for pads in shape[1]]


@pytest.mark.parametrize("shape", [SHORT, LONG, PADDED], ids=["short", "long", "padded"])
@pytest.mark.parametrize("name", [*FAMILIES, *NAMELESS_FAMILIES, *UNEQUAL_FAMILIES, *HYBRID_FAMILIES])
def test_a_family_generates_the_same(name: str, shape: tuple[int, tuple[int, ...]], target: str, steps: int) -> None:
    check_family(name, target, steps, shape)


@pytest.mark.parametrize("shape", [LONG, PADDED], ids=["long", "padded"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "gemma4", "deepseek_v3", "mimo_v2_flash", *HYBRID_FAMILIES])
def test_bfloat16(name: str, shape: tuple[int, tuple[int, ...]], target: str, steps: int) -> None:
    check_family(name, target, steps, shape, kind="bfloat16")


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4"])
def test_eager_attention(name: str, target: str, steps: int) -> None:
    check_family(name, target, steps, PADDED, attention="eager")


@pytest.mark.parametrize("page_tokens", [1, 2, 16, 64])
@pytest.mark.parametrize("reach", [0, 1, 5])
def test_any_page_size_and_reach(page_tokens: int, reach: int, target: str, steps: int) -> None:
    model, inputs = tiny("gemma3", target), prompt(LONG[0], target)
    wanted = generated(model, inputs, steps)
    with opened(model, target, page_tokens=page_tokens, max_rewind_tokens=reach) as cache:
        check_equal(generated(model, inputs, steps, cache=cache), wanted)
        cache.batch.audit()


@pytest.mark.parametrize("reach", [0, 7])
@pytest.mark.parametrize("chunk", [1, 6, 7])
@pytest.mark.parametrize("shape", [LONG, PADDED], ids=["long", "padded"])
@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "llama4", "deepseek_v3", "mimo_v2_flash", "qwen3_next", "falcon_h1", "lfm2"]
)
def test_a_prompt_in_chunks(
    name: str, shape: tuple[int, tuple[int, ...]], chunk: int, reach: int, target: str, steps: int
) -> None:
    """Chunks that are longer and shorter than a short step, and rows of which a chunk holds nothing but pads."""
    if target == "sim" and (name, chunk) != ("gemma3", 6):
        pytest.skip("the simulator takes too long for every chunk")
    model, inputs = tiny(name, target), prompt(shape[0], target, shape[1])
    wanted = generated(model, inputs, steps, prefill_chunk_size=chunk)
    with opened(model, target, max_rewind_tokens=reach) as cache:
        check_equal(generated(model, inputs, steps, cache=cache, prefill_chunk_size=chunk), wanted)
        cache.batch.audit()
        assert cache.stored_tokens == [shape[0] + steps - 1 - pads for pads in shape[1]]


def test_pads_that_fill_a_whole_step_are_kept_once(target: str) -> None:
    """A forward of nothing but pads stores one column, as a step has to have a token; its mask hides it."""
    model, inputs = tiny("gemma3", target), prompt(20, target, (11, 15))
    wanted = generated(model, inputs, 6, prefill_chunk_size=4)
    with opened(model, target) as cache:
        check_equal(generated(model, inputs, 6, cache=cache, prefill_chunk_size=4), wanted)
        assert cache.stored_tokens == [25 - 3, 25 - 3]


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "deepseek_v3", "mimo_v2_flash", "qwen3_5", "bamba"])
@pytest.mark.parametrize("shape", [SHORT, PADDED], ids=["one", "padded"])
def test_a_chat_goes_on(name: str, shape: tuple[int, tuple[int, ...]], target: str, steps: int) -> None:
    """Three turns; each sends all ids of the turns before it, as a chat does."""
    if target == "sim" and name not in FAMILIES_IN_SIM:
        pytest.skip("the simulator takes too long for every family")
    model = tiny(name, target)

    def chat(cache: Any) -> list[tuple[Any, Any]]:
        inputs, answers = prompt(shape[0], target, shape[1]), []
        for turn, more in enumerate((0, 3, 2 * WINDOW)):
            said = prompt(more, target, (0,) * len(shape[1]), seed=turn)
            ids = torch.cat([answers[-1][0] if turn else inputs["input_ids"], said["input_ids"]], dim=1)
            mask = torch.ones_like(ids)
            mask[:, : shape[0]] = inputs["attention_mask"]
            answers.append(generated(model, {"input_ids": ids, "attention_mask": mask}, min(steps, 12), cache=cache))
        return answers

    wanted = chat(transformers.DynamicCache(config=model.config))
    with opened(model, target) as cache:
        for found, answer in zip(chat(cache), wanted, strict=True):
            check_equal(found, answer)
        cache.batch.audit()


def test_a_window_that_covers_the_capacity(target: str, steps: int) -> None:
    """It is stored as full attention, and handed on as transformers has it."""
    model = tiny("mistral", target) if target != "sim" else tiny("gemma3", target)
    assert model.config.sliding_window == WINDOW
    inputs = prompt(WINDOW - 3, target)
    wanted = generated(model, inputs, 4, prefill_chunk_size=2)
    with opened(model, target, max_tokens=WINDOW) as cache:
        assert len(cache.resources.plan.groups) == 1
        check_equal(generated(model, inputs, 4, cache=cache, prefill_chunk_size=2), wanted)


@pytest.mark.parametrize("name", ["gemma3", "nemotron_h"])
def test_a_cache_is_used_again_after_reset(name: str, target: str, steps: int) -> None:
    if target == "sim" and name not in FAMILIES_IN_SIM:
        pytest.skip("the simulator takes too long for every family")
    model = tiny(name, target)
    with opened(model, target) as cache:
        for seed, (tokens, pads) in enumerate([PADDED, SHORT, LONG, (12, (0, 3))]):
            inputs = prompt(tokens, target, pads, seed)
            check_equal(generated(model, inputs, steps, cache=cache), generated(model, inputs, steps))
            cache.reset()
            assert cache.get_seq_length() == 0
            assert cache.stored_tokens == []
            cache.batch.audit()


def test_the_older_keyword_works(target: str) -> None:
    model, inputs = tiny("llama", target), prompt(5, target)
    wanted = generated(model, inputs, 4)
    with opened(model, target) as cache, pytest.warns(FutureWarning, match="past_key_values"):
        check_equal(generated(model, inputs, 4, past_key_values=cache), wanted)


def test_a_forward_of_ones_own(target: str) -> None:
    """Without generate: a prompt, then tokens one by one, without any mask, under autograd."""
    model = tiny("gemma3", target)
    ids = prompt(2 * WINDOW + 4, target)["input_ids"]
    whole = model(ids, use_cache=False).logits
    with opened(model, target) as cache:
        logits = [model(ids[:, :11], cache=cache).logits]
        logits += [model(ids[:, i : i + 1], cache=cache).logits for i in range(11, ids.shape[1])]
        assert torch.allclose(torch.cat(logits, dim=1), whole, atol=1e-4)
        assert cache.stored_tokens == [ids.shape[1]]


def test_layers_that_are_called_one_by_one(target: str) -> None:
    """The hooks of the decoder see nothing of this; what is stored is the same."""
    model = tiny("llama", target)
    ids = prompt(7, target)["input_ids"]
    wanted = model(ids, use_cache=False).logits
    with opened(model, target) as cache:
        hidden = model.model.embed_tokens(ids)
        positions = torch.arange(7, device=ids.device)[None]
        rotary = model.model.rotary_emb(hidden, positions)
        for layer in model.model.layers:
            hidden = layer(hidden, position_embeddings=rotary, cache=cache, attention_mask=None)
        assert torch.allclose(model.lm_head(model.model.norm(hidden)), wanted, atol=1e-5)
        assert cache.stored_tokens == [7]


def test_window_pages_stay_within_the_ring(target: str) -> None:
    model, inputs = tiny("gemma3", target), prompt(60, target)
    with opened(model, target) as cache:
        generated(model, inputs, 20 if target != "sim" else 3, cache=cache)
        group = cache.resources.plan.groups[1]
        mapped = cache.resources.cache_managers[0].step_buffers.page_tables[1].to_host()[0, 0]
        assert group.ring == 3
        assert (mapped >= 0).sum() <= group.ring


def test_memory_of_windows_does_not_grow_with_the_length(target: str) -> None:
    model = tiny("mistral", target)
    sizes = []
    for tokens in (64, 512):
        with opened(model, target, max_tokens=tokens, max_batch=1) as cache:
            sizes.append(cache.resources.plan.pool_nbytes)
            assert all(layer.is_sliding for layer in cache.layers)
    assert sizes[0] == sizes[1]
