"""Recurrent states of a transformers model: where they are, what is refused, and forwards that end too early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.transformers_models import (
    HYBRID_FAMILIES,
    check_equal,
    generated,
    opened,
    opened_paged,
    prompt,
    tiny,
    torch,
    transformers,
)

from numba_kv.adapters.transformers import PagedCache  # isort: skip  # behind the helper, which skips where there is no torch
from numba_kv.adapters.transformers_decoder import GreedyDecoder
from numba_kv.adapters.transformers_packed import PackedCache
from numba_kv.errors import CapacityError, InteropError, RewindTooFar, ShapeError, StateError, UnsupportedModelError


class Died(RuntimeError):
    """What a layer raises."""


@pytest.fixture(autouse=True)
def not_in_sim(target: str) -> None:
    if target == "sim":
        pytest.skip("the simulator takes too long for models of this kind")


def states(cache: PagedCache) -> Any:
    return cache.resources.cache_managers[0].mamba_cache


def stop_at(model: Any, layer: int) -> Any:
    """Let a layer die behind its states and its K and V; return what ends that."""

    def die(*_: Any) -> None:
        raise Died

    return model.get_decoder().layers[layer].register_forward_hook(die).remove


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_states_are_in_the_pools(name: str, target: str) -> None:
    """What the model is handed are views of the slots of its rows; other slots stay as they were."""
    model, inputs = tiny(name, target), prompt(9, target, (0, 4, 2))
    theirs = transformers.DynamicCache(config=model.config)
    wanted = generated(model, inputs, 5, cache=theirs)
    with opened(model, target) as cache:
        check_equal(generated(model, inputs, 5, cache=cache), wanted)
        number = 0
        for index, layer in enumerate(theirs.layers):
            if not hasattr(layer, "conv_states"):
                continue
            assert cache.has_previous_state(index)
            for kind in ("conv", "recurrent"):
                own = getattr(layer, f"{kind}_states")[0]
                if own is None:  # a convolution alone
                    assert f"{kind}_state" not in states(cache).state_names
                    continue
                pool = torch.from_dlpack(states(cache).state(f"{kind}_state", number))
                view = getattr(cache, f"get_{kind}_state")(index)
                assert view.data_ptr() == pool.data_ptr()
                assert torch.equal(view, own)
                assert not pool[3:].any()
            number += 1
        assert number == states(cache).num_layers
        cache.reset()
        assert not cache.has_previous_state()
        cache.batch.audit()


def test_gradients_do_not_reach_the_states(target: str) -> None:
    model, ids = tiny("bamba", target), prompt(6, target)["input_ids"]
    wanted = torch.autograd.grad(model(ids).logits.sum(), model.get_input_embeddings().weight)[0]
    with opened(model, target) as cache:
        found = torch.autograd.grad(model(ids, cache=cache).logits.sum(), model.get_input_embeddings().weight)[0]
        assert torch.allclose(found, wanted, atol=1e-4)
        assert not any(cache.get_recurrent_state(layer).requires_grad for layer in (0, 2))


def test_inference_mode_in_between(target: str) -> None:
    """States that a forward under inference mode has left can be changed by one without, and the other way round."""
    model, ids = tiny("qwen3_5", target), prompt(9, target)["input_ids"]
    with torch.no_grad():
        wanted = model(ids).logits[:, -1]
    with opened(model, target) as cache:
        with torch.inference_mode():
            model(ids[:, :4], cache=cache)
        with torch.no_grad():
            model(ids[:, 4:6], cache=cache)
            model(ids[:, 6:7], cache=cache)
        with torch.inference_mode():
            model(ids[:, 7:8], cache=cache)
        with torch.no_grad():
            assert torch.allclose(model(ids[:, 8:], cache=cache).logits[:, -1], wanted, atol=1e-4)


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("name", ["jamba", "lfm2"])
def test_a_prompt_that_died_is_forgotten(name: str, layer: int, target: str) -> None:
    model, inputs = tiny(name, target), prompt(7, target, (0, 2))
    wanted = generated(model, inputs, 4)
    with opened(model, target) as cache:
        alive = stop_at(model, layer)
        with pytest.raises(Died):
            generated(model, inputs, 4, cache=cache)
        alive()
        assert cache.stored_tokens == []
        assert not cache.has_previous_state()
        check_equal_tokens(generated(model, inputs, 4, cache=cache), wanted)
        cache.batch.audit()


@pytest.mark.parametrize("layer", [0, 1, 3])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("name", ["jamba", "lfm2"])
def test_a_later_forward_that_died_ends_the_cache_until_reset(name: str, layer: int, tokens: int, target: str) -> None:
    """States cannot go back: not even where every layer has been reached."""
    model, inputs = tiny(name, target), prompt(7, target)
    ids = inputs["input_ids"]
    with opened(model, target) as cache, torch.no_grad():
        model(ids, cache=cache)
        alive = stop_at(model, layer)
        with pytest.raises(Died):
            model(ids[:, :tokens], cache=cache)
        alive()
        with pytest.raises(StateError, match=r"the cache cannot go on: a forward ended behind layer \d.*; call reset"):
            model(ids[:, :1], cache=cache)
        cache.reset()
        assert torch.equal(model(ids, cache=cache).logits, model(ids).logits)


def test_limits_are_known_before_any_state_changes(target: str) -> None:
    model, ids = tiny("qwen3_next", target), prompt(8, target)["input_ids"]
    with opened(model, target, max_tokens=10) as cache, torch.no_grad():
        model(ids, cache=cache)
        before = cache.get_recurrent_state(0).clone()
        with pytest.raises(CapacityError, match="a row would have 11 tokens"):
            model(ids[:, :3], cache=cache)
        assert torch.equal(cache.get_recurrent_state(0), before)
        assert model(ids[:, :2], cache=cache).logits.shape[1] == 2
        assert cache.stored_tokens == [10]


def test_tokens_are_not_taken_back_one_by_one(target: str) -> None:
    model, inputs = tiny("falcon_h1", target), prompt(8, target, (0, 3))
    with opened(model, target, max_rewind_tokens=4) as cache, torch.no_grad():
        assert not cache.is_croppable
        model(**inputs, cache=cache)
        with pytest.raises(RewindTooFar, match="crop: recurrent states cannot be taken back"):
            cache.crop(-1)
        with pytest.raises(RewindTooFar, match="a model that has some generates without drafts"):
            cache.activate_past_recording()
        assert cache.stored_tokens == [8, 5]
        cache.crop(0)
        cache.crop(-8)
        assert not cache.has_previous_state()
        assert torch.equal(model(**inputs, cache=cache).logits, model(**inputs).logits)


def test_drafts_are_refused(target: str) -> None:
    model, inputs = tiny("qwen3_5", target), prompt(8, target)
    with opened(model, target, max_rewind_tokens=20) as cache:
        with pytest.raises((RewindTooFar, ValueError)):
            generated(model, inputs, 4, cache=cache, prompt_lookup_num_tokens=3)
        assert cache.stored_tokens == []


def test_states_of_another_model(target: str) -> None:
    model, ids = tiny("bamba", target), prompt(5, target)["input_ids"]
    with opened(model, target) as cache, torch.no_grad():
        with pytest.raises(StateError, match="works in forwards of the model that the cache was made for"):
            tiny("granitemoehybrid", target)(ids, cache=cache)
        with pytest.raises(StateError, match="works in forwards of the model"):
            cache.update_conv_state(torch.zeros(1, 176, 4, device=model.device), 0)
        with pytest.raises(ShapeError, match=r"conv_states: \[1, 8, 4\] given, \[1, 176, 4\] wanted in layer 0"):
            cache.update_conv_state(torch.zeros(1, 8, 4, device=model.device), 0)
        with pytest.raises(ShapeError, match=r"conv_states: \[1, 176, 3\] given"):
            cache.update_conv_state(torch.zeros(1, 176, 9, device=model.device), 0, conv_kernel_size=3)
        with pytest.raises(ShapeError, match=r"recurrent_states: \[1, 8, 12, 16\] given, \[1, 8, 16, 12\] wanted"):
            cache.update_recurrent_state(torch.zeros(1, 8, 12, 16, device=model.device), 0)
        half = torch.zeros(1, 8, 16, 12, device=model.device, dtype=torch.float16)
        with pytest.raises(InteropError, match=r"recurrent_states: torch.float16 given, the cache was made for torch.float32"):
            cache.update_recurrent_state(half, 0)
        with pytest.raises(InteropError, match="conv_states: on meta, the cache is on"):
            cache.update_conv_state(torch.zeros(1, 176, 4, device="meta"), 0)
        assert cache.stored_tokens == []
        assert not cache.has_previous_state()
        assert torch.equal(model(ids, cache=cache).logits, model(ids).logits)


def test_what_cannot_be_done_with_states(target: str) -> None:
    model = tiny("bamba", target)
    with pytest.raises(UnsupportedModelError, match="would run through the sequences of a packed row; use PagedCache"):
        PackedCache.for_model(model, max_batch=2, max_tokens=16, target=target)
    with opened_paged(model, target) as cache, pytest.raises(UnsupportedModelError, match="compile_with"):
        GreedyDecoder(model, cache, compile_with={})
    config = transformers.Mamba2Config(
        num_heads=4, n_groups=1, head_dim=16, hidden_size=32, state_size=4, num_hidden_layers=2, vocab_size=16
    )
    pure = transformers.Mamba2ForCausalLM(config).to(model.device)
    with pytest.raises(UnsupportedModelError, match="'mamba2' has no attention, so it has no pages"):
        opened(pure, target)


def check_equal_tokens(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    """Check short generations: as `check_equal`, of which that wants more tokens."""
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
