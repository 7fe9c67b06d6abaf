"""A model on packed steps: sequences that join, wait and leave get the tokens that each would get alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.transformers_models import WINDOW, generated, not_by_name, prompt, tiny, torch

from numba_kv.adapters.transformers_packed import PackedCache  # isort: skip  # behind the helper: it skips without torch
from numba_kv.errors import InputError, ShapeError, StateError, UnsupportedModelError


@pytest.fixture(autouse=True)
def not_in_sim(target: str) -> None:
    if target == "sim":
        pytest.skip("the simulator takes too long for attention over pages")


def opened(model: Any, target: str, **limits: Any) -> PackedCache:
    sizes = {"max_tokens": 64, "page_tokens": 4, "max_batch": 3, "target": target, **limits}
    return PackedCache.for_model(model, **sizes)


def alone(model: Any, ids: list[int], tokens: int) -> list[int]:
    inputs = {"input_ids": torch.tensor([ids], device=model.device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return generated(model, inputs, tokens)[0][0].tolist()


def drawn(tokens: int, seed: int) -> list[int]:
    return prompt(tokens, seed=seed)["input_ids"][0].tolist()


def forward(model: Any, cache: PackedCache, tokens: dict[Any, list[int]]) -> dict[Any, int]:
    """Make a step and its forward; return the likeliest next token of each sequence in it."""
    view = cache.batch.step({sequence: len(ids) for sequence, ids in tokens.items()})
    with torch.no_grad():
        logits = model(**cache.model_inputs(view, tokens)).logits
    return {sequence: int(logits[0, sequence.row].argmax()) for sequence in tokens}


def served(model: Any, cache: PackedCache, arrivals: list[tuple[int, list[int], int]], chunk: int) -> list[list[int]]:
    """Serve (step of arrival, prompt, tokens to generate) with prompts in chunks; return all ids of each."""
    texts = [list(ids) for _, ids, _ in arrivals]
    waiting, active, step = list(range(len(arrivals))), {}, 0
    while waiting or active:
        for i in [i for i in waiting if arrivals[i][0] <= step and len(active) < 3]:
            waiting.remove(i)
            active[cache.batch.admit(texts[i])] = i
        tokens = {s: texts[i][s.length : s.length + chunk] for s, i in active.items()}
        for sequence, token in (forward(model, cache, tokens) if tokens else {}).items():
            i = active[sequence]
            if sequence.length < len(texts[i]):
                continue
            texts[i].append(token)
            if len(texts[i]) == len(arrivals[i][1]) + arrivals[i][2]:
                cache.batch.retire(sequence)
                del active[sequence]
        cache.batch.audit()
        step += 1
    return texts


@pytest.mark.parametrize(("name", "reach"), [("llama", 0), ("gemma3", 0), ("gemma3", 5), ("gemma4", 0), ("llama4", 5)])
def test_sequences_that_join_and_leave(name: str, reach: int, target: str) -> None:
    """More than there are rows, and prompts in chunks beside rows that decode."""
    model = tiny(name, target)
    arrivals = [(0, drawn(3 * WINDOW, 1), 9), (0, drawn(3, 2), 5), (2, drawn(WINDOW, 3), 12), (5, drawn(17, 4), 8)]
    wanted = [alone(model, ids, tokens) for _, ids, tokens in arrivals]
    with opened(model, target, max_rewind_tokens=reach) as cache:
        assert served(model, cache, arrivals, 5) == wanted
        assert served(model, cache, arrivals[::-1], 64) == wanted[::-1]


def test_tokens_of_the_device_and_rows_without_any(target: str) -> None:
    model = tiny("gemma3", target)
    texts = [drawn(9, seed) for seed in range(3)]
    with opened(model, target) as cache, torch.no_grad():
        rows = cache.batch.update(admit=texts)
        for sequence, text in zip(rows, texts, strict=True):
            found = forward(model, cache, {sequence: text})
            assert found[sequence] == alone(model, text, 1)[-1]
        view = cache.batch.step({rows[2]: 1, rows[0]: 1})
        tokens = {rows[i]: torch.tensor([7], device=model.device) for i in (2, 0)}
        inputs = cache.model_inputs(view, tokens)
        assert inputs["input_ids"].shape == inputs["position_ids"].shape == (1, 2)
        logits = model(**inputs).logits
        for i in (0, 2):
            assert int(logits[0, i].argmax()) == alone(model, [*texts[i], 7], 1)[-1]


def test_forks_and_rewinds(target: str) -> None:
    """What the batch does to sequences, the model sees."""
    model, text = tiny("gemma3", target), drawn(2 * WINDOW + 1, 1)
    with opened(model, target, max_rewind_tokens=4) as cache:
        first = cache.batch.admit(text)
        forward(model, cache, {first: text})
        (second,) = cache.batch.fork(first, 1)
        found = forward(model, cache, {first: [5, 6, 7], second: [8]})
        assert found == {first: alone(model, [*text, 5, 6, 7], 1)[-1], second: alone(model, [*text, 8], 1)[-1]}
        cache.batch.rewind({first: 2})
        assert forward(model, cache, {first: [9]})[first] == alone(model, [*text, 5, 9], 1)[-1]
        cache.batch.audit()


def test_what_is_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny("llama", target), drawn(6, 1)
    ids = torch.tensor([text], device=model.device)
    with opened(model, target) as cache, opened(model, target) as other, torch.no_grad():
        with pytest.raises(StateError, match="not the forward of a step"):
            model(ids, cache=cache)
        sequence, foreign = cache.batch.admit(text), other.batch.admit(text)
        view = cache.batch.step({sequence: 6})
        with pytest.raises(InputError, match="tokens: 5 given, the step has 6"):
            cache.model_inputs(view, {sequence: text[:5]})
        for wrong in (other.batch.step({foreign: 6}), None):
            with pytest.raises(InputError, match="is not a step of this cache's batch"):
                cache.model_inputs(wrong, {sequence: text})
        inputs = cache.model_inputs(view, {sequence: text})
        with pytest.raises(InputError, match="attention_mask: packed steps have no pads"):
            model(**inputs, attention_mask=torch.ones_like(ids))
        inputs = cache.model_inputs(view, {sequence: text})
        with pytest.raises(ShapeError, match=r"\[1, 5\] given, \[1, 6\] announced"):
            model(**{**inputs, "input_ids": ids[:, :5], "position_ids": inputs["position_ids"][:, :5]})
        model(**cache.model_inputs(view, {sequence: text}))
        with pytest.raises(StateError, match="this step has had its forward"):
            cache.model_inputs(view, {sequence: text})
        with pytest.raises(StateError, match="not the forward of a step"):
            model(**inputs)
        inputs = cache.model_inputs(cache.batch.step({sequence: 1}), {sequence: [3]})
        cache.batch.step({sequence: 1})
        with pytest.raises(StateError, match="the batch has made another step since model_inputs"):
            model(**inputs)
        for call in (
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(ids),
            lambda: cache.batch_select_indices(ids),
            lambda: cache.batch_repeat_interleave(2),
        ):
            with pytest.raises(StateError, match=r"use cache\.batch\."):
                call()
        cache.reset()
        assert cache.batch.sequences == []
    assert "closed" in repr(cache)
    with pytest.raises(StateError, match="PackedCache is closed"):
        cache.model_inputs(view, {})
    not_by_name(monkeypatch, model.model)
    with pytest.raises(UnsupportedModelError, match="does not choose its attention by name"):
        opened(model, target)


class Died(Exception):
    """What a layer raises in these tests."""


def test_a_forward_that_dies(target: str) -> None:
    """Its tokens are taken back by the caller, whose batch it is."""
    model, text = tiny("gemma3", target), drawn(6, 1)

    def die(*_: Any) -> None:
        raise Died

    with opened(model, target) as cache:
        sequence = cache.batch.admit(text)
        view = cache.batch.step({sequence: 6})
        hook = model.model.layers[2].register_forward_pre_hook(die)
        with pytest.raises(Died):
            model(**cache.model_inputs(view, {sequence: text}))
        hook.remove()
        assert model.config._attn_implementation == "sdpa"
        with pytest.raises(StateError, match="this step has had its forward; rewind its tokens"):
            cache.model_inputs(view, {sequence: text})
        cache.batch.rewind({sequence: 6})
        assert forward(model, cache, {sequence: text})[sequence] == alone(model, text, 1)[-1]
