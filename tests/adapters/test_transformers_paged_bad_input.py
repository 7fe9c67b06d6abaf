"""What attention over pages refuses, how it leaves the model, and what is left behind a forward that fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.helpers.transformers_models import WINDOW, check_near, generated, not_by_name, prompt, tiny, torch, transformers

from numba_kv.adapters.transformers import PagedCache  # isort: skip  # behind the helper, which skips where there is no torch
from numba_kv.errors import InputError, StateError, UnsupportedModelError


def opened(model: Any, target: str, **limits: Any) -> PagedCache:
    sizes = {"max_tokens": 48, "page_tokens": 4, "max_batch": 3, "target": target, **limits}
    return PagedCache.for_model(model, attention="paged", **sizes)


def not_in_sim(target: str) -> None:
    if target == "sim":
        pytest.skip("the simulator takes too long for attention over pages")


class Died(Exception):
    """What a layer raises in these tests."""


def fail_in(model: Any, layer: int, error: type[BaseException] = Died) -> Any:
    """Make a layer of the model raise before its attention; calling the result ends that."""

    def raise_it(*_: Any) -> None:
        raise error

    return model.model.layers[layer].register_forward_pre_hook(raise_it).remove


def test_an_unknown_attention(target: str) -> None:
    with pytest.raises(InputError, match=r"attention: 'flash' given, one of 'gather', 'paged' wanted"):
        PagedCache.for_model(tiny("llama", target), max_tokens=8, attention="flash")


def test_a_model_that_does_not_choose_by_name(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", target)
    not_by_name(monkeypatch, model.model)
    with pytest.raises(UnsupportedModelError, match="LlamaModel does not choose its attention by name"):
        opened(model, target)


def test_a_model_that_looks_in_both_directions(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gemma3", target)
    monkeypatch.setattr(model.config, "is_causal", False, raising=False)
    with pytest.raises(UnsupportedModelError, match="see later ones"):
        opened(model, target)


def test_the_choice_lasts_as_long_as_a_forward(target: str) -> None:
    """Whatever ends it, and also if the cache goes."""
    model, inputs = tiny("gemma3", target), prompt(5, target)
    seen: list[str] = []

    def look(module: Any, *_: Any) -> None:
        seen.append(module.config._attn_implementation)

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(look)
    with opened(model, target) as cache:
        assert model.config._attn_implementation == "sdpa"
        generated(model, inputs, 2, cache=cache)
        generated(model, inputs, 2)
        assert seen == ["numba_kv"] * 2 + ["sdpa"] * 2
        cache.reset()
        revive = fail_in(model, 2)
        with pytest.raises(Died):
            generated(model, inputs, 2, cache=cache)
        revive()
        assert model.config._attn_implementation == "sdpa"
        for restore in (cache.reset, cache.close):
            revive = fail_in(model, 1, KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                generated(model, inputs, 2, cache=cache)
            revive()
            with torch.no_grad(), pytest.raises(StateError, match="K and V are not what a PagedCache"):
                model(**inputs, use_cache=False)
            restore()
            assert model.config._attn_implementation == "sdpa"
    hook.remove()


def test_other_caches_of_the_same_model_are_not_disturbed(target: str) -> None:
    not_in_sim(target)
    model, inputs = tiny("gemma3", target), prompt(2 * WINDOW, target)
    wanted = generated(model, inputs, 6)
    with opened(model, target) as first, opened(model, target) as second:
        for cache in (first, None, second):
            check_near(generated(model, inputs, 6, cache=cache), wanted)
    check_near(generated(model, inputs, 6), wanted)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_forward_that_died_between_layers_is_taken_back(layer: int, target: str) -> None:
    not_in_sim(target)
    model, inputs = tiny("gemma3", target), prompt(6, target, (0, 2))
    wanted = generated(model, inputs, 6)
    with opened(model, target, max_rewind_tokens=4) as cache:
        revive = fail_in(model, layer)
        with pytest.raises(Died):
            generated(model, inputs, 6, cache=cache)
        assert cache.stored_tokens == []
        revive()
        check_near(generated(model, inputs, 6, cache=cache), wanted)


def test_layers_that_are_called_one_by_one(target: str) -> None:
    """Nobody would attend over their pages."""
    model = tiny("llama", target)
    ids = prompt(7, target)["input_ids"]
    with opened(model, target) as cache, torch.no_grad():
        hidden = model.model.embed_tokens(ids)
        rotary = model.model.rotary_emb(hidden, torch.arange(7, device=ids.device)[None])
        with pytest.raises(StateError, match="works in forwards of the model that the cache was made for"):
            model.model.layers[0](hidden, position_embeddings=rotary, cache=cache, attention_mask=None)
        with pytest.raises(StateError, match="works in forwards of the model"):
            tiny("llama", target, seed=1)(ids, cache=cache)
        assert cache.stored_tokens == []


def test_layers_that_attend_in_another_way(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    not_in_sim(target)
    model, ids = tiny("llama", target), prompt(7, target)["input_ids"]
    with opened(model, target) as cache, torch.no_grad():
        with monkeypatch.context() as changed:
            changed.setattr(model.model.layers[2].self_attn, "config", copy.deepcopy(model.config))
            with pytest.raises(StateError, match=r"layers \[2\] did not attend over their pages"):
                model(ids, cache=cache)
        with pytest.raises(StateError, match=r"layers \[2\] did not attend .*; call reset"):
            model(ids, cache=cache)
        cache.reset()
        assert torch.allclose(model(ids, cache=cache).logits, model(ids).logits, atol=1e-3)


def test_keys_of_an_earlier_forward(target: str) -> None:
    model, ids = tiny("llama", target), prompt(7, target)["input_ids"]
    kept: list[Any] = []
    with opened(model, target) as cache, torch.no_grad():
        update = cache.update

        def keep(*arguments: Any, **options: Any) -> Any:
            kept.append(update(*arguments, **options))
            return kept[0]

        cache.update = keep
        with pytest.raises(StateError, match="layers"):
            model(ids, cache=cache)
        cache.reset()
        with pytest.raises(StateError, match="of an earlier forward"):
            model(ids, cache=cache)


def four_dimensional(rows: int, tokens: int, device: Any) -> Any:
    return torch.ones((rows, 1, tokens, tokens), dtype=torch.bool, device=device).tril()


def test_masks_that_are_made_already(target: str) -> None:
    model, ids = tiny("gemma3", target), prompt(7, target)["input_ids"]
    mask = four_dimensional(1, 7, ids.device)
    with opened(model, target) as cache, torch.no_grad():
        for given in (mask, {"full_attention": mask, "sliding_attention": None}):
            with pytest.raises(InputError, match="one of .B, tokens. or none is wanted by attention over pages"):
                model(ids, attention_mask=given, cache=cache)
        assert cache.stored_tokens == []
        found = model(ids, attention_mask={"full_attention": None, "sliding_attention": None}, cache=cache)
        assert torch.allclose(found.logits, model(ids).logits, atol=1e-3)


def test_masks_that_hide_what_is_stored(target: str) -> None:
    """Inside a prompt, on its right, later on, or all of a forward."""
    model = tiny("llama", target)
    ids = prompt(8, target, (0, 0))["input_ids"]
    with opened(model, target) as cache, torch.no_grad():
        for row, column in ((1, 3), (0, 7)):
            mask = torch.ones_like(ids)
            mask[row, column] = 0
            with pytest.raises(InputError, match=f"attention_mask: hides column {column} of row {row}, which is stored"):
                model(ids, attention_mask=mask, cache=cache)
        with pytest.raises(InputError, match="hides column 7 of row 0"):
            model(ids, attention_mask=torch.zeros_like(ids), cache=cache)
        assert cache.stored_tokens == []
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        model(ids[:, :5], attention_mask=mask[:, :5], cache=cache)
        assert cache.stored_tokens == [5, 2]
        mask[1, 4] = 0
        with pytest.raises(InputError, match="hides column 4 of row 1"):
            model(ids[:, 5:6], attention_mask=mask[:, :6], cache=cache)
        with pytest.raises(InputError, match="hides column 4 of row 0"):
            model(ids[:, 5:6], attention_mask=torch.tensor([[1] * 4, [1, 1, 1, 0]], device=ids.device), cache=cache)
        assert cache.stored_tokens == [5, 2]


def test_masks_of_another_shape(target: str) -> None:
    """What lies behind a mask is hidden, whatever lies before it; one that is longer, or for fewer rows, may show all."""
    model, ids = tiny("llama", target), prompt(6, target, (0, 0))["input_ids"]
    with opened(model, target) as cache, torch.no_grad():
        for columns in (1, 5):
            with pytest.raises(InputError, match=rf"hides column {columns} of row 0 \(it has {columns} of 6\)"):
                model(ids, attention_mask=torch.ones_like(ids[:, :columns]), cache=cache)
        with pytest.raises(InputError, match="hides column 0 of row 0, which is stored"):
            model(ids, attention_mask=torch.zeros_like(ids[:1]), cache=cache)
        assert cache.stored_tokens == []
        model(ids, attention_mask=torch.ones((1, 9), device=ids.device), cache=cache)
        assert cache.stored_tokens == [6, 6]
        with pytest.raises(InputError, match=r"hides column 1 of row 0 \(it has 1 of 7\)"):
            model(ids[:, :1], attention_mask=torch.ones_like(ids[:, :1]), cache=cache)
        model(ids[:, :1], attention_mask=torch.ones((2, 7), device=ids.device), cache=cache)
        assert cache.stored_tokens == [7, 7]


def test_masks_of_images_and_blocks(target: str) -> None:
    """What a model adds to a causal mask is not in the pages."""
    from transformers import masking_utils

    model, ids = tiny("gemma3", target), prompt(7, target)["input_ids"]
    hidden = model.model.embed_tokens(ids)
    common = {"config": copy.deepcopy(model.config), "inputs_embeds": hidden, "attention_mask": None, "cache": None}
    common["config"]._attn_implementation = "numba_kv"
    with opened(model, target):
        blocks = torch.zeros_like(ids)
        for make in (masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask):
            assert make(**common) is None
            with pytest.raises(InputError, match="adds to a causal mask"):
                make(**common, block_sequence_ids=blocks)
            with pytest.raises(InputError, match="adds to a causal mask"):
                make(**common, or_mask_function=lambda batch, head, q, kv: kv == q)
        with pytest.raises(InputError, match="adds to a causal mask"):
            masking_utils.create_bidirectional_mask(**common)


def test_dropout(target: str) -> None:
    config = transformers.LlamaConfig(**{**tiny("llama").config.to_dict(), "attention_dropout": 0.5})
    model, ids = transformers.LlamaForCausalLM(config), prompt(7, target)["input_ids"]
    model.to(ids.device)
    with opened(model, target) as cache:
        with pytest.raises(InputError, match="dropout: attention over pages knows none"):
            model.train()(ids, cache=cache)
        assert cache.stored_tokens == []
        model.eval()(ids, cache=cache)
        assert cache.stored_tokens == [7]
