"""Decode steps without the host choose the tokens that `generate` chooses; on a GPU they are replays of one graph."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.transformers_models import WINDOW, generated, opened_paged, prompt, tiny, torch

from numba_kv.adapters.transformers import PagedCache  # isort: skip  # behind the helper, which skips where there is no torch
from numba_kv.adapters.transformers_decoder import GreedyDecoder
from numba_kv.errors import CapacityError, InputError, ShapeError, StateError

STEPS = 2 * WINDOW + 3
PADDED = (WINDOW + 3, (0, WINDOW + 1, 4))


@pytest.fixture(autouse=True)
def not_in_sim(target: str) -> None:
    if target == "sim":
        pytest.skip("the simulator takes too long for attention over pages")


def forwards(model: Any) -> tuple[list[int], Any]:
    """Return a list that grows with each forward of the model, and what ends that."""
    calls: list[int] = []
    return calls, model.register_forward_pre_hook(lambda *_: calls.append(1)).remove


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gemma3", "gemma4", "gpt_oss", "llama4", "qwen3_5", "bamba", "falcon_h1", "lfm2"]
)
def test_the_same_tokens(name: str, target: str) -> None:
    model, inputs = tiny(name, target), prompt(PADDED[0], target, PADDED[1])
    if name == "gpt_oss":  # what it does by itself copies from the host, but for bfloat16
        model.set_experts_implementation("batched_mm")
    wanted, _ = generated(model, inputs, STEPS)
    calls, ignore = forwards(model)
    with opened_paged(model, target) as cache, GreedyDecoder(model, cache) as decoder:
        assert torch.equal(decoder.generate(**inputs, max_new_tokens=STEPS), wanted)
        assert len(calls) == (3 if target == "cuda" else STEPS), "a prompt, a step, and one that is captured"
        assert cache.get_seq_length() == PADDED[0] + STEPS - 1
        assert cache.stored_tokens == [PADDED[0] + STEPS - 1 - pads for pads in PADDED[1]]
        cache.batch.audit()
    ignore()


def test_a_graph_serves_other_prompts_and_numbers_of_rows(target: str) -> None:
    """Forwards of other kinds in between change nothing."""
    model = tiny("gemma3", target)
    calls, ignore = forwards(model)
    with opened_paged(model, target) as cache, GreedyDecoder(model, cache) as decoder:
        for seed, pads in enumerate([(0, 3), (2, 0), (0,), (0, 9)]):
            inputs = prompt(WINDOW + 5, target, pads, seed)
            wanted, _ = generated(model, inputs, 12)
            del calls[:]
            found = decoder.generate(**inputs, max_new_tokens=7)
            assert torch.equal(found, wanted[:, :-5])
            if target == "cuda":
                assert len(calls) == {0: 3, 1: 1, 2: 3, 3: 1}[seed]
            mask = torch.ones_like(found)
            mask[:, : WINDOW + 5] = inputs["attention_mask"]
            found, _ = generated(model, {"input_ids": found, "attention_mask": mask}, 2, cache=cache)
            assert torch.equal(found, wanted[:, :-3])
            assert torch.equal(decoder.decode(found[:, -1:], 3), wanted[:, -3:])
            cache.batch.audit()
            cache.reset()
    ignore()


def test_a_chat_goes_on(target: str) -> None:
    model, inputs = tiny("gemma3", target), prompt(5, target)
    with opened_paged(model, target) as cache, GreedyDecoder(model, cache) as decoder:
        ids = inputs["input_ids"]
        for more in (1, WINDOW, 3):
            ids = torch.cat([ids, prompt(more, target)["input_ids"]], dim=1)
            wanted, _ = generated(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 5)
            ids = decoder.generate(ids, max_new_tokens=5)
            assert torch.equal(ids, wanted)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_compiled_steps_are_one_graph(name: str, target: str) -> None:
    """Without a break, and never compiled again: nothing in the graph depends on lengths."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, inputs, counter = tiny(name, target), prompt(PADDED[0], target, PADDED[1]), CompileCounter()
    wanted, _ = generated(model, inputs, STEPS)
    with opened_paged(model, target) as cache:
        with GreedyDecoder(model, cache, compile_with={"backend": counter}) as decoder:
            found = decoder.generate(**inputs, max_new_tokens=STEPS - 4)
            mask = torch.ones_like(found)
            mask[:, : PADDED[0]] = inputs["attention_mask"]
            ordinary, _ = generated(model, {"input_ids": found, "attention_mask": mask}, 2, cache=cache)
            assert torch.equal(torch.cat([ordinary, decoder.decode(ordinary[:, -1:], 2)], dim=1), wanted)
        assert counter.frame_count == 1
        cache.batch.audit()
        assert model.config._attn_implementation == "sdpa"


def test_a_compiled_step_that_dies_is_taken_back(target: str) -> None:
    torch._dynamo.reset()
    model, inputs = tiny("llama", target), prompt(6, target)
    wanted, _ = generated(model, inputs, 4)

    def give_up(graph: Any, examples: Any) -> Any:
        def run(*_: Any) -> None:
            raise Died

        return run

    with opened_paged(model, target) as cache:
        with torch.no_grad():
            first = model(**inputs, cache=cache).logits[:, -1:].argmax(-1)
        with pytest.raises(Died):
            GreedyDecoder(model, cache, compile_with={"backend": give_up}).decode(first, 2)
        assert model.config._attn_implementation == "sdpa"
        assert cache.stored_tokens == [6]
        rest = GreedyDecoder(model, cache).decode(first, 3)
        assert torch.equal(torch.cat([inputs["input_ids"], first, rest], dim=1), wanted)


def test_one_token_needs_no_step(target: str) -> None:
    model, inputs = tiny("llama", target), prompt(5, target)
    with opened_paged(model, target) as cache, GreedyDecoder(model, cache) as decoder, torch.inference_mode():
        assert torch.equal(decoder.generate(**inputs, max_new_tokens=1), generated(model, inputs, 1)[0])
        assert cache.stored_tokens == [5]


def test_what_is_refused(target: str) -> None:
    model, inputs = tiny("llama", target), prompt(5, target)
    ids = inputs["input_ids"]
    with (
        PagedCache.for_model(model, max_tokens=8, target=target) as gathering,
        pytest.raises(InputError, match="attention='paged'"),
    ):
        GreedyDecoder(model, gathering)
    with opened_paged(model, target, max_tokens=12) as cache:
        decoder = GreedyDecoder(model, cache)
        with pytest.raises(StateError, match="run the prompt first"):
            decoder.decode(ids[:, :1], 2)
        for count in (0, True, 1.5):
            with pytest.raises(InputError, match="max_new_tokens"):
                decoder.generate(ids, max_new_tokens=count)
        with pytest.raises(CapacityError, match="a row would have 13 tokens, the cache was made for max_tokens 12"):
            decoder.generate(ids, max_new_tokens=9)
        assert cache.stored_tokens == []
        decoder.generate(ids, max_new_tokens=2)
        with pytest.raises(InputError, match="6 tokens given, the cache holds 6"):
            decoder.generate(torch.cat([ids, ids[:, :1]], dim=1), max_new_tokens=2)
        with pytest.raises(ShapeError, match=r"\[1, 5\] given, \[1, 1\] wanted"):
            decoder.decode(ids, 2)
        with pytest.raises(InputError, match="steps"):
            decoder.decode(ids[:, :1], 0)
        with pytest.raises(CapacityError, match="exceed max_kv_cache_capacity 12"):
            decoder.decode(ids[:, :1], 7)
        assert cache.stored_tokens == [6]
        decoder.decode(ids[:, :1], 6)
        assert cache.stored_tokens == [12]
        cache.reset()
        found = decoder.generate(**prompt(5, target, (0, 2)), max_new_tokens=2)
        with pytest.raises(InputError, match="attention_mask: None given, but rows of the cache have pads"):
            decoder.generate(found, max_new_tokens=2)
        assert cache.stored_tokens == [6, 4]
        cache.batch.audit()
    with pytest.raises(StateError, match="closed"):
        decoder.decode(ids[:, :1], 1)
    with pytest.raises(StateError, match="closed"):
        GreedyDecoder(model, cache)


class Died(Exception):
    """What a layer raises in these tests."""


@pytest.mark.parametrize("steps_before", [0, 4])
def test_a_step_that_dies_is_taken_back(steps_before: int, target: str) -> None:
    """The first step runs as a forward; of a capture that dies nothing is left, and no graph."""
    model, inputs = tiny("gemma3", target), prompt(6, target, (0, 2))
    wanted, _ = generated(model, inputs, 9)

    def die(*_: Any) -> None:
        raise Died

    with opened_paged(model, target) as cache, GreedyDecoder(model, cache) as decoder:
        found = decoder.generate(**inputs, max_new_tokens=1 + steps_before)
        if steps_before and target == "cuda":
            decoder.close()  # so that the next step runs as a forward again
        hook = model.model.layers[2].register_forward_pre_hook(die)
        with pytest.raises(Died):
            decoder.decode(found[:, -1:], 3)
        hook.remove()
        assert cache.stored_tokens == [6 + steps_before, 4 + steps_before]
        rest = decoder.decode(found[:, -1:], 8 - steps_before)
        assert torch.equal(torch.cat([found, rest], dim=1), wanted)
        cache.batch.audit()


def test_a_decoder_of_another_model(target: str) -> None:
    model, other, inputs = tiny("llama", target), tiny("llama", target, seed=1), prompt(5, target)
    with opened_paged(model, target) as cache:
        with pytest.raises(StateError, match="works in forwards of the model that the cache was made for"):
            GreedyDecoder(other, cache).generate(**inputs, max_new_tokens=3)
        decoder = GreedyDecoder(model, cache)
        decoder.generate(**inputs, max_new_tokens=3)
        with pytest.raises(StateError, match="works in forwards of the model"):
            GreedyDecoder(other, cache).decode(inputs["input_ids"][:, :1], 2)
        with pytest.raises(StateError, match=r"the layers after it lack its tokens; call reset\(\)"):
            decoder.decode(inputs["input_ids"][:, :1], 2)
        cache.reset()
        assert torch.equal(decoder.generate(**inputs, max_new_tokens=6), generated(model, inputs, 6)[0])


@pytest.mark.gpu
def test_a_model_that_waits_cannot_be_captured(target: str) -> None:
    """The cache goes on without a graph's help."""
    model, inputs = tiny("gemma3", target), prompt(6, target)
    wanted, _ = generated(model, inputs, 6)

    def wait(module: Any, arguments: tuple[Any, ...]) -> None:
        arguments[0].sum().item()

    with opened_paged(model, target) as cache:
        decoder = GreedyDecoder(model, cache)
        found = decoder.generate(**inputs, max_new_tokens=2)
        hook = model.model.layers[1].register_forward_pre_hook(wait)
        with pytest.raises(StateError, match="a step of Gemma3ForCausalLM cannot be captured"):
            decoder.decode(found[:, -1:], 4)
        hook.remove()
        torch.cuda.synchronize()
        assert cache.stored_tokens == [7]
        found, _ = generated(model, {"input_ids": found, "attention_mask": torch.ones_like(found)}, 4, cache=cache)
        assert torch.equal(found, wanted)
        cache.batch.audit()


@pytest.mark.gpu
def test_a_stream_of_ones_own(target: str) -> None:
    model, inputs = tiny("gemma3", target), prompt(6, target)
    wanted, _ = generated(model, inputs, STEPS)
    with opened_paged(model, target) as cache, GreedyDecoder(model, cache) as decoder:
        for _ in range(2):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                found = decoder.generate(**inputs, max_new_tokens=STEPS)
            side.synchronize()
            assert torch.equal(found, wanted)
            cache.reset()
