"""Models whose K and V differ in size: what they take, and which of them are refused with the reason."""

from __future__ import annotations

import pytest

from tests.helpers.transformers_models import (
    UNEQUAL_FAMILIES,
    WINDOW,
    check_equal,
    check_near,
    generated,
    opened,
    prompt,
    tiny,
    torch,
    transformers,
)

from numba_kv.adapters.transformers_packed import PackedCache  # isort: skip  # behind the helper: it skips where there is no torch
from numba_kv.adapters.transformers_sizes import KVSizes
from numba_kv.errors import ShapeError, UnsupportedModelError


@pytest.mark.parametrize("keys", [1, 4, 5, 12])
@pytest.mark.parametrize("values", [1, 4, 7, 13])
def test_halves_and_parts(keys: int, values: int) -> None:
    sizes = KVSizes(keys, values, is_latent=False)
    k, v = torch.randn(2, 3, 5, keys), torch.randn(2, 3, 5, values)
    halves = sizes.halves(k, v)
    assert {tuple(half.shape) for half in halves} == {(2, 3, 5, (keys + values + 1) // 2)}
    for found, wanted in zip(sizes.parts(*halves), (k, v), strict=True):
        assert torch.equal(found, wanted)
        assert found.is_contiguous()
    assert sum(int((half == 0).sum()) for half in halves) == (keys + values) % 2 * 30


@pytest.mark.parametrize(("name", "channels"), [("deepseek_v3", 24 + 8), ("mistral4", 7 + 8 + 1)])
def test_a_latent_takes_its_own_bytes(name: str, channels: int, target: str) -> None:
    """One row a token and layer for all heads, not K and V of each."""
    with opened(tiny(name, target), target, max_batch=1) as cache:
        (pages,) = {group.num_pages for group in cache.resources.plan.groups if group.num_pages}
        assert cache.resources.plan.pool_nbytes == 4 * pages * 4 * channels * 4  # layers, pages, tokens, channels, float32


def test_one_that_a_simulator_runs(target: str) -> None:
    """The other tests leave these families out there."""
    model, inputs = tiny("deepseek_v3", target), prompt(6, target, (0, 2))
    wanted = generated(model, inputs, 4)
    with opened(model, target) as cache:
        check_equal(generated(model, inputs, 4, cache=cache), wanted)


def test_a_window_keeps_its_ring(target: str) -> None:
    if target == "sim":
        pytest.skip("the simulator takes too long for that")
    model, inputs = tiny("mimo_v2_flash", target), prompt(5 * WINDOW, target)
    with opened(model, target) as cache:
        generated(model, inputs, 20, cache=cache)
        layers = cache.resources.plan.config.layers
        assert [(layer.num_kv_heads, layer.head_dim, layer.window.is_full) for layer in layers[:2]] == [
            (2, 14, False),
            (1, 14, True),
        ]
        assert cache.resources.plan.groups[1].ring == 3


def test_windows_with_more_heads_whose_k_and_v_are_alike(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if target == "sim":
        pytest.skip("the simulator takes too long for that")
    config, causal, extra = UNEQUAL_FAMILIES["mimo_v2_flash"]
    monkeypatch.setitem(UNEQUAL_FAMILIES, "mimo of one size", (config, causal, {**extra, "v_head_dim": 16}))
    monkeypatch.setattr("tests.helpers.transformers_models._EAGER_ONLY", ("mimo of one size",))
    model, inputs = tiny("mimo of one size", target), prompt(2 * WINDOW, target, (0, 2))
    wanted = generated(model, inputs, 8)
    with opened(model, target) as cache:
        check_equal(generated(model, inputs, 8, cache=cache), wanted)
    with opened(model, target, attention="paged") as cache:
        check_near(generated(model, inputs, 8, cache=cache), wanted)
        assert [layer.num_kv_heads for layer in cache.resources.plan.config.layers] == [2, 1, 2, 1]


@pytest.mark.parametrize("name", UNEQUAL_FAMILIES)
def test_attention_over_pages_is_refused(name: str, target: str) -> None:
    reason = "K of 16 and V of 12 channels" if name == "mimo_v2_flash" else "caches a latent for each token"
    model = tiny(name, target)
    for refused in (
        lambda: opened(model, target, attention="paged"),
        lambda: PackedCache.for_model(model, max_batch=1, max_tokens=8),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{name}.*{reason}.*attention='gather'"):
            refused()


def test_keys_of_an_indexer_are_refused(target: str) -> None:
    _, _, sizes = UNEQUAL_FAMILIES["deepseek_v3"]
    config = transformers.DeepseekV32Config(
        **sizes,
        vocab_size=32,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        index_n_heads=2,
    )
    model = transformers.DeepseekV32ForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match="keep keys of an indexer"):
        opened(model, target)


@pytest.mark.parametrize(
    ("k", "v", "complaint"),
    [
        ((1, 4, 3, 24), (1, 4, 3, 12), r"key_states: \[1, 4, 3, 24\] given, \[B, 1, n, 24\] wanted"),  # K and V of the heads
        ((1, 1, 3, 24), (1, 1, 3, 24), r"value_states: \[1, 1, 3, 24\] given, \[B, 1, n, 8\] wanted"),
        ((1, 1, 3, 24), (1, 1, 2, 8), r"value_states: \[1, 1, 2, 8\] given, \[1, 1, 3, 8\] wanted"),
    ],
)
def test_what_is_no_latent_is_refused(k: tuple[int, ...], v: tuple[int, ...], complaint: str, target: str) -> None:
    model = tiny("deepseek_v3", target)
    with opened(model, target) as cache, pytest.raises(ShapeError, match=complaint):
        cache.update(torch.zeros(k, device=model.device), torch.zeros(v, device=model.device), 0)
