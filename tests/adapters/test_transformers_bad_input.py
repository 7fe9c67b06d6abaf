"""What a paged cache refuses, and what is left behind then."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest

from tests.helpers.transformers_models import FAMILIES, WINDOW, check_equal, generated, prompt, tiny, torch, transformers

from numba_kv.adapters.transformers import PagedCache  # isort: skip  # behind the helper, which skips where there is no torch
from numba_kv.errors import (
    CapacityError,
    ConfigError,
    InputError,
    InteropError,
    PlanError,
    ShapeError,
    StateError,
    UnsupportedModelError,
)


def opened(model: Any, target: str, **limits: Any) -> PagedCache:
    return PagedCache.for_model(model, **{"max_tokens": 40, "page_tokens": 4, "max_batch": 2, "target": target, **limits})


class Died(Exception):
    """What a layer raises in these tests."""


def fail_in(model: Any, layer: int, error: type[BaseException] = Died) -> Any:
    """Make a layer of the model raise before its attention; calling the result ends that."""

    def raise_it(*_: Any) -> None:
        raise error

    return model.model.layers[layer].register_forward_pre_hook(raise_it).remove


def test_a_batch_or_a_length_over_the_limits(target: str) -> None:
    model = tiny("gemma3", target)
    with opened(model, target) as cache:
        with pytest.raises(CapacityError, match="3 rows given, the cache was made for max_batch 2"):
            generated(model, prompt(5, target, (0, 0, 0)), 2, cache=cache)
        with pytest.raises(CapacityError, match="41 tokens, the cache was made for max_tokens 40"):
            generated(model, prompt(41, target), 2, cache=cache)
        assert cache.stored_tokens == []
        inputs = prompt(38, target, (0, 1))
        with pytest.raises(CapacityError, match="would have 41 tokens"):
            generated(model, inputs, 9, cache=cache)
        assert cache.stored_tokens == [40, 39]
        cache.batch.audit()
        cache.reset()
        check_equal(generated(model, inputs, 3, cache=cache), generated(model, inputs, 3))


def test_pads_do_not_count(target: str) -> None:
    model, inputs = tiny("gemma3", target), prompt(50, target, (20, 15))
    with opened(model, target) as cache:
        check_equal(generated(model, inputs, 3, cache=cache), generated(model, inputs, 3))


def test_too_few_pages_leave_no_row(target: str) -> None:
    model = tiny("llama", target)
    with opened(model, target, num_kv_pages=10) as cache:
        with pytest.raises(CapacityError, match="pages"):
            generated(model, prompt(30, target, (0, 0)), 2, cache=cache)
        assert cache.stored_tokens == []
        assert cache.batch.sequences == []
        check_equal(generated(model, prompt(20, target), 3, cache=cache), generated(model, prompt(20, target), 3))


def test_a_forward_with_more_tokens_than_planned(target: str) -> None:
    model, inputs = tiny("gemma3", target), prompt(20, target, (0, 0))
    with opened(model, target, max_batch_tokens=16) as cache:
        with pytest.raises(InputError, match="max_batch_tokens is 16"):
            generated(model, inputs, 2, cache=cache)
        assert cache.batch.sequences == []
        found = generated(model, inputs, 3, cache=cache, prefill_chunk_size=8)
        check_equal(found, generated(model, inputs, 3, prefill_chunk_size=8))


def test_another_batch_without_reset(target: str) -> None:
    model = tiny("llama", target)
    with opened(model, target) as cache:
        generated(model, prompt(5, target), 2, cache=cache)
        with torch.no_grad(), pytest.raises(InputError, match="2 rows given, the cache holds 1; call reset"):
            model(prompt(5, target, (0, 0))["input_ids"], cache=cache)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_forward_that_died_between_layers_is_taken_back(layer: int, target: str) -> None:
    model, inputs = tiny("gemma3", target), prompt(6, target, (0, 2))
    wanted = generated(model, inputs, 4)
    with opened(model, target, max_rewind_tokens=4) as cache:
        revive = fail_in(model, layer)
        with pytest.raises(Died):
            generated(model, inputs, 4, cache=cache)
        assert cache.get_seq_length() == 0
        assert cache.stored_tokens == []
        revive()
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(0)
        with torch.no_grad():
            model(ids[:, :4], attention_mask=mask[:, :4], position_ids=positions[:, :4], cache=cache)
            revive = fail_in(model, layer)
            with pytest.raises(Died):
                model(ids[:, 4:], attention_mask=mask, position_ids=positions[:, 4:], cache=cache)
        revive()
        assert cache.get_seq_length() == 4
        cache.batch.audit()
        found = generated(model, inputs, 4, cache=cache)
        assert torch.equal(found[0], wanted[0])


def test_a_forward_that_died_too_far_on_ends_the_cache_until_reset(target: str) -> None:
    """The ring no longer holds what the shorter rows would see."""
    model, inputs = tiny("gemma3", target), prompt(39, target)
    wanted = generated(model, inputs, 2)
    with opened(model, target) as cache, torch.no_grad():
        model(inputs["input_ids"][:, :15], cache=cache)
        revive = fail_in(model, 2)
        with pytest.raises(Died):
            model(inputs["input_ids"][:, 15:], cache=cache)
        revive()
        for call in (lambda: model(inputs["input_ids"][:, :1], cache=cache), lambda: cache.crop(0)):
            with pytest.raises(StateError, match="behind layer 1, and the layers after it lack its tokens; call reset"):
                call()
        cache.reset()
        check_equal(generated(model, inputs, 2, cache=cache), wanted)


@pytest.mark.parametrize("call", ["begin", "last move"])
def test_a_write_that_fails_is_taken_back(call: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the last layer, and before the first."""
    model, inputs = tiny("llama", target), prompt(6, target)
    wanted = generated(model, inputs, 3)
    with opened(model, target) as cache:
        kv = cache._kv
        last, name = len(model.model.layers) - 1, call.removeprefix("last ")
        original = getattr(kv, name)

        def failing(*arguments: Any) -> Any:
            if call == "begin" or arguments[0] == last:
                raise Died
            return original(*arguments)

        monkeypatch.setattr(kv, name, failing)
        with pytest.raises(Died):
            generated(model, inputs, 3, cache=cache)
        monkeypatch.undo()
        assert (cache.get_seq_length(), cache.stored_tokens) == (0, [])
        cache.batch.audit()
        check_equal(generated(model, inputs, 3, cache=cache), wanted)


def test_an_interrupted_forward_is_noticed(target: str) -> None:
    """An interrupt passes by torch's hooks."""
    model, inputs = tiny("gemma3", target), prompt(9, target)
    with opened(model, target) as cache:
        revive = fail_in(model, 1, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            generated(model, inputs, 2, cache=cache)
        revive()
        with pytest.raises(StateError, match=r"a forward was interrupted; call reset\(\)"):
            generated(model, inputs, 2, cache=cache)
        cache.reset()
        check_equal(generated(model, inputs, 2, cache=cache), generated(model, inputs, 2))


def test_layers_that_skip_one_are_noticed(target: str) -> None:
    model, ids = tiny("llama", target), prompt(5, target)["input_ids"]
    with opened(model, target) as cache:
        k = torch.zeros((1, 2, 5, 16), device=ids.device)
        for layer in (0, 1, 3):
            cache.update(k, k, layer)
        with pytest.raises(StateError, match="behind layer 3"):
            cache.update(k, k, 0)
        with pytest.raises(ShapeError, match=r"rows and tokens \[1, 4\] in layer 2, \[1, 5\] in the layers before it"):
            cache.update(k[:, :, :4], k[:, :, :4], 2)
        with pytest.raises(StateError, match="behind layer 3"):
            cache.crop(-4)
        cache.crop(-5)
        assert cache.stored_tokens == [0]


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_prompt_again_without_reset(name: str, target: str) -> None:
    """Nothing of it is new to the cache, as transformers sees it, where the answer was longer than the prompt."""
    if target == "sim" and name != "llama":
        pytest.skip("the simulator takes too long for every family")
    model, inputs = tiny(name, target), prompt(2, target)
    with opened(model, target) as cache:
        generated(model, inputs, 5, cache=cache)
        with pytest.raises(InputError, match=r"no new token given, the cache holds 6 already; call reset\(\) before another"):
            generated(model, inputs, 5, cache=cache)
        assert cache.stored_tokens == [6]
        cache.reset()
        generated(model, inputs, 5, cache=cache)


def test_two_models_cannot_share_a_cache(target: str) -> None:
    model, other = tiny("llama", target), tiny("llama", target, seed=1)
    inputs = prompt(5, target)
    with opened(model, target) as cache:
        generated(model, inputs, 2, cache=cache)
        with torch.no_grad(), pytest.raises(StateError, match="tokens of another model"):
            other(inputs["input_ids"], cache=cache)
        assert cache.stored_tokens == [6]


def test_a_model_of_other_heads(target: str) -> None:
    """One that differs in the first layer leaves nothing behind; one that differs later on leaves a cache to be reset."""
    model, ids = tiny("llama", target), prompt(5, target)["input_ids"]
    with opened(model, target) as cache, torch.no_grad():
        with pytest.raises(ShapeError, match=r"\[1, 4, 5, 16\] given, .* in layer 0; the cache is of another model"):
            tiny("gpt_neox", target)(ids, cache=cache)
        assert cache.stored_tokens == []
        with pytest.raises(ShapeError, match="in layer 1; the cache is of another model"):
            tiny("gemma4", target)(ids, cache=cache)
        with pytest.raises(StateError, match="behind layer 0"):
            model(ids, cache=cache)
        cache.reset()
        assert torch.equal(model(ids, cache=cache).logits, model(ids).logits)


def test_another_element_type(target: str) -> None:
    with opened(tiny("llama", target), target) as cache:
        with torch.no_grad(), pytest.raises(InteropError, match="bfloat16 given, the cache was made for torch.float32"):
            tiny("llama", target, "bfloat16")(prompt(5, target)["input_ids"], cache=cache)
        assert cache.stored_tokens == []


def test_another_device(target: str) -> None:
    with opened(tiny("llama", target), target) as cache:
        k = torch.zeros((1, 2, 5, 16), device="meta")
        with pytest.raises(InteropError, match="on meta, the cache is on"):
            cache.update(k, k, 0)


@pytest.mark.parametrize(
    ("k", "v", "complaint"),
    [
        ((1, 2, 5, 8), (1, 2, 5, 8), r"\[1, 2, 5, 8\] given, \[B, 2, n, 16\] wanted in layer 0"),
        ((1, 2, 5, 16), (1, 2, 4, 16), r"value_states: \[1, 2, 4, 16\] given, \[1, 2, 5, 16\] wanted"),
        ((2, 5, 16), (2, 5, 16), r"\[2, 5, 16\] given"),
        ((1, 2, 0, 16), (1, 2, 0, 16), r"\[1, 2, 0, 16\] given"),
    ],
)
def test_shapes(k: tuple[int, ...], v: tuple[int, ...], complaint: str, target: str) -> None:
    model = tiny("llama", target)
    with opened(model, target) as cache:
        with pytest.raises(ShapeError, match=complaint):
            cache.update(torch.zeros(k, device=model.device), torch.zeros(v, device=model.device), 0)
        assert cache.stored_tokens == []


def test_layers_that_store_nothing(target: str) -> None:
    model = tiny("gemma4", target)
    with opened(model, target) as cache:
        k = torch.zeros((1, 2, 5, 16), device=model.device)
        with pytest.raises(InputError, match=r"layer_idx: 2 stores no K and V; the layers of the cache that do are \[0, 1\]"):
            cache.update(k, k, 2)
        with pytest.raises(InputError, match="layer_idx: 9"):
            cache.update(k, k, 9)


@pytest.mark.parametrize(
    ("limits", "error", "complaint"),
    [
        ({"max_tokens": 0}, InputError, "max_tokens: 0"),
        ({"max_batch": True}, InputError, "max_batch: True"),
        ({"max_rewind_tokens": -1}, InputError, "max_rewind_tokens: -1"),
        ({"page_tokens": 3}, ConfigError, "page_tokens: 3"),
        ({"max_batch_tokens": 1}, ConfigError, "max_batch_tokens"),
        ({"memory_bytes": 1000}, PlanError, "1000"),
    ],
)
def test_limits(limits: dict[str, Any], error: type[Exception], complaint: str, target: str) -> None:
    with pytest.raises(error, match=complaint):
        opened(tiny("llama", target), target, **limits)


def test_a_target_that_is_not_where_the_model_is(target: str) -> None:
    with pytest.raises(InputError, match="cannot serve a model on"):
        opened(tiny("llama", target), "cpu" if target == "cuda" else "cuda")


def test_pads_that_become_visible(target: str) -> None:
    """They are not there: a later mask cannot show them."""
    model, inputs = tiny("llama", target), prompt(8, target, (0, 3))
    mask = torch.ones((2, 10), dtype=torch.long, device=model.device)
    with opened(model, target) as cache, torch.no_grad():
        model(**inputs, cache=cache)
        with pytest.raises(InputError, match="row 1 shows some of its first 3 columns, which were pads"):
            model(inputs["input_ids"][:, :2], attention_mask=mask, cache=cache)
        assert cache.stored_tokens == [8, 5]
        mask[1, :3] = 0
        model(inputs["input_ids"][:, :2], attention_mask=mask, cache=cache)
        assert cache.stored_tokens == [10, 7]


def test_what_is_no_model() -> None:
    with pytest.raises(InputError, match="dict is not a transformers model"):
        PagedCache.for_model({}, max_tokens=8)


@pytest.mark.parametrize(
    ("config", "model", "sizes"),
    [
        ("MambaConfig", "MambaForCausalLM", {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 4}),
        ("GPT2Config", "GPT2LMHeadModel", {"n_layer": 1, "n_embd": 16, "n_head": 2, "add_cross_attention": True}),
    ],
)
def test_models_that_keep_something_else(config: str, model: str, sizes: dict[str, Any]) -> None:
    settings = getattr(transformers, config)(**sizes, vocab_size=32)
    with pytest.raises(UnsupportedModelError):
        PagedCache.for_model(getattr(transformers, model)(settings), max_tokens=16)


def test_an_element_type_that_no_cache_has(target: str) -> None:
    with pytest.raises(ConfigError, match="dtype is float64"):
        PagedCache.for_model(tiny("llama", target, "float64"), max_tokens=8)


def test_after_close(target: str) -> None:
    model = tiny("llama", target)
    cache = opened(model, target)
    generated(model, prompt(5, target), 2, cache=cache)
    device = cache.resources.device
    cache.close()
    cache.close()
    assert cache.is_closed
    assert device.memory.current_bytes == 0
    calls: list[Any] = [lambda: generated(model, prompt(5, target), 2, cache=cache), cache.reset, cache.__enter__]
    calls += [lambda: cache.crop(0), lambda: cache.reorder_cache(torch.tensor([0])), lambda: cache.batch_repeat_interleave(1)]
    for call in calls:
        with pytest.raises(StateError, match="closed"):
            call()
    assert "closed" in repr(cache)


def test_a_copy_is_refused(target: str) -> None:
    with opened(tiny("llama", target), target) as cache:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(StateError, match="cannot be copied"):
                make(cache)


def test_the_model_is_left_as_it_was(target: str) -> None:
    """No hook stays, neither after `close` nor behind a cache that nobody closed, and a refusal adds none."""
    model = tiny("llama", target)
    decoder = model.get_decoder()

    def hooks() -> int:
        return len(decoder._forward_pre_hooks) + len(decoder._forward_hooks)

    before = hooks()
    with opened(model, target) as cache:
        assert hooks() == before + 2
    assert hooks() == before
    cache = opened(model, target)
    generated(model, prompt(5, target), 2, cache=cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert hooks() == before
    with pytest.raises(PlanError):
        opened(model, target, memory_bytes=1000)
    assert hooks() == before


def test_other_caches_of_the_same_model_are_not_disturbed(target: str) -> None:
    """Two paged caches and transformers' own, in turns; a failure with one of them is none of another's."""
    model, inputs = tiny("gemma3", target), prompt(2 * WINDOW, target)
    wanted = generated(model, inputs, 3)
    with opened(model, target) as first, opened(model, target) as second:
        check_equal(generated(model, inputs, 3, cache=first), wanted)
        revive = fail_in(model, 2)
        with pytest.raises(Died):
            generated(model, inputs, 3, cache=second)
        revive()
        check_equal(generated(model, inputs, 3), wanted)
        check_equal(generated(model, inputs, 3, cache=second), wanted)
        assert first.stored_tokens == second.stored_tokens == [2 * WINDOW + 2]


def test_every_family_is_known() -> None:
    """So that the list of tests is not shorter than it says."""
    assert len(FAMILIES) >= 12
