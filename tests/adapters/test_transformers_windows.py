"""Attention over pages sees what the layers' own masks show, also where transformers' caches keep something else."""

from __future__ import annotations

from typing import Any

import pytest

from numba_kv.errors import UnsupportedModelError
from tests.helpers.transformers_models import (
    FAMILIES,
    WINDOW,
    check_near,
    check_same,
    generated,
    made,
    opened,
    opened_paged,
    place,
    prompt,
    tiny,
    torch,
)

from numba_kv.adapters.transformers_packed import PackedCache  # isort: skip  # behind the helper: it skips where there is no torch

_SLIDING, _FULL = {"sliding_window": WINDOW}, {"layer_types": ["full_attention"] * 4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LONG_ROPE = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
TOKENS, PADS = 2 * WINDOW + 3, (0, 5)


@pytest.fixture(autouse=True)
def not_in_sim(target: str) -> None:
    if target == "sim":
        pytest.skip("the simulator takes too long for whole models")


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("Mistral", {}),
        ("Ministral3", {"rope_parameters": _LONG_ROPE}),
        ("Mixtral", _EXPERTS),
        ("Phi3", {}),
        ("Phimoe", _EXPERTS),
        ("Qwen3Moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "use_sliding_window": True}),
        ("Starcoder2", {}),
    ],
)
def test_layers_that_slide_though_they_are_said_to_be_full(family: str, extra: dict[str, Any], target: str) -> None:
    model = made(f"{family}Config", f"{family}ForCausalLM", {**extra, **_SLIDING, **_FULL}).to(place(target))
    inputs = prompt(TOKENS, target, PADS)
    wanted = generated(model, inputs, WINDOW)
    with opened(model, target) as cache:
        check_same(generated(model, inputs, WINDOW, cache=cache), wanted)
    with opened_paged(model, target) as cache:
        check_near(generated(model, inputs, WINDOW, cache=cache), wanted)


@pytest.mark.parametrize("extra", [_SLIDING, {**_SLIDING, "layer_types": ["sliding_attention"] * 4}])
def test_a_cache_that_slides_under_attention_that_does_not(extra: dict[str, Any], target: str) -> None:
    model = made("LlamaConfig", "LlamaForCausalLM", extra).to(place(target))
    inputs = prompt(TOKENS, target, PADS)
    with pytest.raises(UnsupportedModelError, match=r"sliding_window 8, but its attention .* remove sliding_window"):
        opened_paged(model, target)
    with pytest.raises(UnsupportedModelError, match="use PagedCache with attention='gather'"):
        PackedCache.for_model(model, max_batch=1, max_tokens=96)
    wanted = generated(model, inputs, WINDOW)
    with opened(model, target) as cache:
        check_same(generated(model, inputs, WINDOW, cache=cache), wanted)


def test_a_chunk_that_attention_does_not_know(target: str) -> None:
    model = made("LlamaConfig", "LlamaForCausalLM", {"attention_chunk_size": WINDOW}).to(place(target))
    with pytest.raises(UnsupportedModelError, match="remove attention_chunk_size"):
        opened_paged(model, target)


def test_a_window_that_hides_nothing(target: str) -> None:
    model = made("LlamaConfig", "LlamaForCausalLM", {"sliding_window": 96}).to(place(target))
    inputs = prompt(TOKENS, target, PADS)
    wanted = generated(model, inputs, WINDOW)
    with opened_paged(model, target) as cache:
        check_near(generated(model, inputs, WINDOW, cache=cache), wanted)


def test_a_decoder_that_is_derived_elsewhere(target: str) -> None:
    """Its module does not know the masks, that of its base does."""
    model = made(*FAMILIES["mistral"]).to(place(target))
    model.model.__class__ = type("Derived", (type(model.model),), {"__module__": __name__})
    inputs = prompt(TOKENS, target, PADS)
    wanted = generated(model, inputs, WINDOW)
    with opened_paged(model, target) as cache:
        check_near(generated(model, inputs, WINDOW, cache=cache), wanted)


@pytest.mark.parametrize(("said", "wanted"), [(None, "no window"), (WINDOW - 1, "a window of 7 tokens")])
def test_a_layer_that_asks_for_another_window(said: Any, wanted: str, target: str) -> None:
    model = tiny("gemma3", target)
    attention = model.model.layers[0].self_attn
    inputs = prompt(TOKENS, target)
    with opened_paged(model, target) as cache:
        try:
            attention.sliding_window = said
            with (
                torch.no_grad(),
                pytest.raises(UnsupportedModelError, match=f"layer 0 has {wanted}, but by its configuration it is sliding 8"),
            ):
                model(**inputs, cache=cache)
        finally:
            attention.sliding_window = WINDOW
        check_near(generated(model, inputs, WINDOW, cache=cache), generated(model, inputs, WINDOW))
