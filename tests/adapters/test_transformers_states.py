"""Recurrent states of a transformers model: where they are, what is refused, and forwards that end too early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.transformers_models import (
    HYBRID_FAMILIES,
    check_same,
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
from numba_kv.errors import CapacityError, InputError, InteropError, RewindTooFar, ShapeError, StateError, UnsupportedModelError


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
    places: dict[tuple[str, int], int] = {}

    class Watched(PagedCache):
        def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
            return self.watch("conv", layer_idx, super().get_conv_state(layer_idx, state_idx))

        def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
            return self.watch("recurrent", layer_idx, super().get_recurrent_state(layer_idx, state_idx))

        def watch(self, kind: str, layer: int, view: Any) -> Any:
            if view is not None:
                places[kind, layer] = view.data_ptr()
            return view

    with Watched.for_model(model, max_batch=4, max_tokens=32, page_tokens=4, target=target) as cache:
        check_same(generated(model, inputs, 5, cache=cache), wanted)
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
                assert places[kind, index] == pool.data_ptr()
                assert torch.equal(pool[:3].view(own.shape), own)
                assert not pool[3:].any()
                shown = PagedCache.get_conv_state if kind == "conv" else PagedCache.get_recurrent_state
                assert torch.equal(shown(cache, index), own)
            number += 1
        assert number == states(cache).num_layers
        cache.reset()
        assert not cache.has_previous_state()
        cache.batch.audit()


@pytest.mark.parametrize("name", ["bamba", "lfm2", "qwen3_5"])
def test_gradients_do_not_reach_the_pools(name: str, target: str) -> None:
    """Prompts and single tokens, whose states are changed in place, again and again: no graph outlives its forward."""
    model, ids = tiny(name, target), prompt(6, target)["input_ids"]
    weight = model.get_input_embeddings().weight
    with opened(model, target) as cache:
        for _ in range(2):
            wanted = torch.autograd.grad(model(ids).logits.sum(), weight)[0]
            found = torch.autograd.grad(model(ids, cache=cache).logits.sum(), weight)[0]
            assert torch.allclose(found, wanted, atol=1e-3)
            for _ in range(2):
                logits = model(ids[:, :1], cache=cache).logits
                if name == "lfm2":  # of the others' single tokens there are no gradients: they write over what these need
                    torch.autograd.grad(logits.sum(), weight)
            layer = next(index for index, is_linear in enumerate(cache.is_linear) if is_linear)
            assert not cache.get_conv_state(layer).requires_grad
            cache.reset()


@pytest.mark.parametrize("name", ["jamba", "lfm2", "falcon_h1", "qwen3_5"])
def test_a_step_with_gradients_behind_a_prompt_without(name: str, target: str) -> None:
    model, ids = tiny(name, target), prompt(9, target)["input_ids"]
    theirs = transformers.DynamicCache(config=model.config)
    with opened(model, target) as cache:
        for each in (cache, theirs):
            with torch.no_grad():
                model(ids[:, :6], cache=each)
        assert torch.equal(model(ids[:, 6:7], cache=cache).logits, model(ids[:, 6:7], cache=theirs).logits)


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
        check_same(generated(model, inputs, 4, cache=cache), wanted)
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
        with pytest.raises(StateError, match="cannot go on: a forward failed that had changed recurrent states; call reset"):
            model(ids[:, :1], cache=cache)
        cache.reset()
        assert torch.equal(model(ids, cache=cache).logits, model(ids).logits)


def test_a_forward_that_died_before_the_cache_knew_of_it_changes_nothing(target: str) -> None:
    model, ids = tiny("jamba", target), prompt(7, target)["input_ids"]
    is_ill = False

    def die(*_: Any) -> None:
        if is_ill:
            raise Died

    alive = model.get_decoder().register_forward_pre_hook(die).remove
    with torch.no_grad():
        theirs = transformers.DynamicCache(config=model.config)
        wanted = [model(ids[:, :count], cache=theirs).logits for count in (7, 1, 2)]
        with opened(model, target) as cache:
            for count, logits in zip((7, 1, 2), wanted, strict=True):
                is_ill = True
                with pytest.raises(Died):
                    model(ids[:, :count], cache=cache)
                is_ill = False
                assert torch.equal(model(ids[:, :count], cache=cache).logits, logits)
            assert cache.stored_tokens == [10]
    alive()


@pytest.mark.parametrize("name", ["bamba", "lfm2"])
def test_interrupted_steps_are_not_gone_on_from(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls no hook behind an interrupt. The last layer has been shown its state, and has not changed it yet."""
    model, ids = tiny(name, target), prompt(9, target)["input_ids"]
    layer = {"bamba": 2, "lfm2": 3}[name]
    with opened_paged(model, target) as cache, GreedyDecoder(model, cache) as decoder, torch.no_grad():
        model(ids, cache=cache)
        show = PagedCache.get_conv_state

        def interrupt(self: PagedCache, layer_idx: int, state_idx: int = 0) -> Any:
            view = show(self, layer_idx, state_idx)
            if layer_idx == layer:
                raise KeyboardInterrupt
            return view

        monkeypatch.setattr(PagedCache, "get_conv_state", interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder.decode(ids[:, :1], 3)
        monkeypatch.undo()
        for call in (
            lambda: decoder.decode(ids[:, :1], 3),
            lambda: model(ids[:, :1], cache=cache),
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: cache.crop(-1),
        ):
            with pytest.raises(StateError, match="a forward was interrupted; call reset"):
                call()
        cache.reset()
        with pytest.raises(StateError, match="works in forwards of the model that"):  # the interrupted one is over
            tiny(name, target, seed=7)(ids, cache=cache)
        assert not cache.has_previous_state()
        wanted, _ = generated(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 5)
        assert torch.equal(decoder.generate(ids, max_new_tokens=5), wanted)


def test_after_close(target: str) -> None:
    model, ids = tiny("qwen3_5", target), prompt(7, target)["input_ids"]
    cache = opened(model, target)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.close()
        assert not cache.has_previous_state()
        for call in (cache.get_conv_state, cache.get_recurrent_state):
            with pytest.raises(StateError, match="PagedCache is closed"):
                call(0)
        with pytest.raises(StateError, match="PagedCache is closed"):
            model(ids[:, :1], cache=cache)


def test_rows_that_have_moved_find_their_states_after_a_reset(target: str) -> None:
    model, inputs = tiny("bamba", target), prompt(7, target, (0, 2, 4))
    with opened(model, target) as cache:
        with torch.no_grad():
            model(**inputs, cache=cache)
        cache.batch.compact([cache.batch.sequences[row] for row in (2, 0, 1)])
        cache.reset()
        wanted = generated(model, inputs, 6)
        check_same(generated(model, inputs, 6, cache=cache), wanted)
        cache.batch.audit()


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
        with pytest.raises(RewindTooFar, match="crop: states of recurrent layers cannot be taken back"):
            cache.crop(-1)
        with pytest.raises(RewindTooFar, match="a model that has some generates without drafts"):
            cache.activate_past_recording()
        assert cache.stored_tokens == [8, 5]
        cache.crop(0)
        cache.crop(-8)
        assert not cache.has_previous_state()
        assert torch.equal(model(**inputs, cache=cache).logits, model(**inputs).logits)


def test_drafts_are_refused(target: str) -> None:
    """Of a convolution alone, too; transformers itself refuses the others."""
    model, inputs = tiny("lfm2", target), prompt(8, target)
    with opened(model, target, max_rewind_tokens=20) as cache:
        with pytest.raises(RewindTooFar, match="a model that has some generates without drafts"):
            generated(model, inputs, 4, cache=cache, prompt_lookup_num_tokens=3)
        assert cache.stored_tokens == []


@pytest.mark.parametrize("name", ["bamba", "qwen3_5", "lfm2"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_another_model_changes_nothing(name: str, tokens: int, target: str) -> None:
    model, ids = tiny(name, target), prompt(5, target)["input_ids"]
    with opened(model, target) as cache, torch.no_grad():
        for count in (5, 1):
            with pytest.raises(StateError, match="works in forwards of the model that"):
                tiny(name, target, seed=7)(ids[:, :tokens], cache=cache)
            assert torch.equal(model(ids[:, :count], cache=cache).logits[:, -1], after(model, ids, count))


def after(model: Any, ids: Any, count: int) -> Any:
    """Return the last logits of all of `ids`, and of one more token of theirs if `count` is 1, with transformers' own cache."""
    theirs = transformers.DynamicCache(config=model.config)
    logits = model(ids, cache=theirs).logits
    return (logits if count > 1 else model(ids[:, :1], cache=theirs).logits)[:, -1]


def test_states_that_do_not_fit(target: str) -> None:
    """In the place of what the model's own layers bring."""
    model, ids = tiny("bamba", target), prompt(5, target)["input_ids"]
    conv, recurrent = (2, 176, 4), (2, 8, 16, 12)
    wrong: list[tuple[str, tuple[int, ...], Any, dict[str, Any], type[Exception], str]] = [
        ("conv", (1, 176, 4), None, {}, ShapeError, r"conv_states: \[1, 176, 4\] given, \[2, 176, 4\] wanted in layer 0"),
        ("conv", (2, 8, 4), None, {}, ShapeError, r"conv_states: \[2, 8, 4\] given"),
        ("conv", (2, 176, 9), None, {"conv_kernel_size": 3}, ShapeError, r"conv_states: \[2, 176, 3\] given"),
        (
            "conv",
            conv,
            torch.float64,
            {},
            InteropError,
            "conv_states: torch.float64 given, the cache was made for torch.float32",
        ),
        ("conv", conv, None, {"state_idx": 1}, InputError, "state_idx: 1 given"),
        ("conv", conv, "meta", {}, InteropError, "conv_states: on meta, the cache is on"),
        (
            "recurrent",
            (2, 8, 12, 16),
            None,
            {},
            ShapeError,
            r"recurrent_states: \[2, 8, 12, 16\] given, \[2, 8, 16, 12\] wanted",
        ),
        ("recurrent", (9, 8, 16, 12), None, {}, ShapeError, r"recurrent_states: \[9, 8, 16, 12\] given"),
        ("recurrent", recurrent, torch.float16, {}, InteropError, "recurrent_states: torch.float16 given"),
        ("recurrent", recurrent, None, {"state_idx": 1}, InputError, "state_idx: 1 given"),
    ]
    ids = ids.expand(2, -1)
    with opened(model, target) as cache, torch.no_grad():
        for kind, shape, place, options, error, complaint in wrong:
            made = {"device": "meta"} if place == "meta" else {"device": model.device, "dtype": place}

            def bring(*_: Any, kind: str = kind, shape: Any = shape, made: Any = made, options: Any = options) -> None:
                getattr(cache, f"update_{kind}_state")(torch.zeros(shape, **made), 0, **options)

            ends = model.get_decoder().layers[0].register_forward_pre_hook(bring).remove
            with pytest.raises(error, match=complaint):
                model(ids, cache=cache)
            ends()
            assert cache.stored_tokens == []
        for call in (cache.get_conv_state, cache.get_recurrent_state):
            with pytest.raises(InputError, match="state_idx: 2"):
                call(0, 2)
            with pytest.raises(ValueError, match="layer 1"):
                call(1)
        with pytest.raises(StateError, match="update_conv_state: a cache with recurrent states works in forwards"):
            cache.update_conv_state(torch.zeros(conv, device=model.device), 0)
        assert torch.equal(model(ids, cache=cache).logits, model(ids).logits)


def test_lengths_and_limits_of_every_kind_of_layer(target: str) -> None:
    """Layers with attention say what those of other models say; those without have no length."""
    for name, lengths in (("bamba", [-1, 96, -1, 96]), ("falcon_h1", [96] * 4), ("zamba2", [-1, 96, -1, 96])):
        with opened(tiny(name, target), target) as cache:
            assert [cache.get_max_length(index) for index in range(4)] == lengths
            assert cache.get_max_length() == 96
            assert cache.get_mask_sizes(5, 0) == (5, 0)
            assert cache.is_linear == [length < 0 for length in lengths]


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
