"""Whatever a mapping holds, reading it gives a configuration or a ConfigError, never another exception."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, strategies as st

from numba_kv.config import load_engine_config
from numba_kv.errors import ConfigError
from tests.helpers.configs import BAMBA, DELTA_NET, LFM2, MAMBA, NEMOTRON, ZAMBA2, edgellm, huggingface, per_layer
from tests.host.test_config_edgellm import RANKED
from tests.host.test_config_rope import LLAMA3, LONG

S, F = "sliding_attention", "full_attention"
VALID: list[dict[str, Any]] = [
    huggingface("gemma3n_text", sliding_window=64, num_kv_shared_layers=1, rope_local_base_freq=1e4, eos_token_id=[1]),
    huggingface(
        "llama4_text", attention_chunk_size=64, no_rope_layers=[1, 1, 1, 0, 1, 1], rope_scaling={"type": "llama3", **LLAMA3}
    ),
    huggingface("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=2, dtype="float16"),
    huggingface("phi3", rope_scaling={"type": "su", **LONG}, original_max_position_embeddings=512, partial_rotary_factor=1.0),
    huggingface("falcon", multi_query=True, new_decoder_architecture=False, num_kv_heads=2, kv_lora_rank=None),
    huggingface(
        "novel", 2, layer_types=[S, F], sliding_window=64, rope_parameters={F: {"rope_theta": 1e6}, S: {"rope_theta": 1e4}}
    ),
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 4}, "is_encoder_decoder": False},
    {"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 64, "n_positions": 128},
    edgellm(builder={"num_swa_pages": 64, "max_lora_rank": 8}, **per_layer(128, 0, 64), kv_sharing_donors=[-1, -1, -1]),
    edgellm(**RANKED, rope_scaling={"type": "dynamic", "alpha": 1000}, use_rope=True, eos_token_id=[1, 2]),
    edgellm(
        sliding_rope_config={"rope_theta": 1e4}, full_rope_config={"rope_theta": 1e6}, global_head_dim=128, full_rotary_dim=64
    ),
    edgellm(num_linear_attn_layers=3, num_attention_layers=9, **MAMBA),
    edgellm(layer_types=["attention", "mamba"], kv_layer_configs=[{"num_kv_heads": 4, "head_dim": 64}, None], **MAMBA),
    huggingface("bamba", attn_layer_indices=[1, 4], **BAMBA),
    huggingface("qwen3_next", 4, layer_types=["linear_attention"] * 3 + ["full_attention"], **DELTA_NET),
    huggingface("nemotron_h", hybrid_override_pattern="M-M*-E", **NEMOTRON),
    huggingface("lfm2", **LFM2),
    huggingface("zamba2", head_dim=None, attention_head_dim=32, **ZAMBA2),
    huggingface("jamba", attn_layer_period=3, attn_layer_offset=1, mamba_expand=2, mamba_d_state=4, mamba_d_conv=4),
    edgellm(ple_enabled=True, num_ple_inputs=12, ple_hidden_size=8, engine_role="llm", spec_decode_type="none"),
]

integers = st.sampled_from([0, 1, -1, 2, 3, 7, 16, 255, 2**31 - 1, 2**31, 2**63, 10**400]) | st.integers()
scalars = (
    st.none()
    | st.booleans()
    | integers
    | st.floats()
    | st.sampled_from(["", "mistral", "fp16", "yarn", S, "mamba"])
    | st.text()
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=8
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of everything inside `value`."""
    pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    return [(value, key) for key, _ in pairs] + [place for _, inner in pairs for place in places(inner)]


def reads_or_refuses(source: Any, **arguments: Any) -> None:
    try:
        config = load_engine_config(source, **arguments)
    except ConfigError:
        return
    assert config.layers or config.num_recurrent_layers
    for layer in config.layers:
        assert layer.window.is_full or 1 <= layer.window.tokens < config.max_kv_cache_capacity


@given(data=st.data(), base=st.sampled_from(VALID), changes=st.integers(1, 3))
def test_valid_files_with_values_replaced(data: st.DataObject, base: dict[str, Any], changes: int) -> None:
    source = copy.deepcopy(base)
    for _ in range(changes):
        container, key = data.draw(st.sampled_from(places(source)))
        if data.draw(st.booleans()) and isinstance(container, dict):
            del container[key]
        else:
            container[key] = data.draw(anything)
        if not places(source):
            break
    reads_or_refuses(source, rank=data.draw(st.sampled_from([None, None, 0, 1])))


@given(st.dictionaries(st.sampled_from(sorted({key for base in VALID for key in base})) | st.text(), anything, max_size=8))
def test_anything(source: dict[str, Any]) -> None:
    reads_or_refuses(source)


@given(
    base=st.sampled_from(VALID),
    keys=st.dictionaries(st.sampled_from(sorted({k for b in VALID for k in b})), anything, max_size=3),
)
def test_keys_of_other_families_added(base: dict[str, Any], keys: dict[str, Any]) -> None:
    reads_or_refuses({**keys, **base})
    reads_or_refuses({**base, **keys})


def test_the_valid_files_are_valid() -> None:
    for base in VALID:
        assert load_engine_config(base).layers


def test_every_single_value_replaced_by_each_kind_of_value() -> None:
    for base in VALID:
        for index in range(len(places(base))):
            for value in (None, True, -1, 0, 1.5, "x", [], {}, [0], {"a": 1}, float("nan"), 10**5000):
                source = copy.deepcopy(base)
                container, key = places(source)[index]
                container[key] = value
                reads_or_refuses(source)
