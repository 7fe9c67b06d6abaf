"""Real configurations that lie beside the repository on some machines: each is read for what it is, or refused."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from numba_kv.config import GatedDeltaNetLayer, Mamba1Layer, Mamba2Layer, RecurrentLayer, load_engine_config
from numba_kv.errors import ConfigError, UnsupportedModelError
from numba_kv.plan import plan_memory

# file, layers by window, KV heads, head size, capacity, bases of the rotation
READ = [
    ("cohere2", {"sliding 4096": 30, "full": 10}, 64, 128, 8192, [1e4]),
    ("gemma2", {"sliding 4096": 13, "full": 13}, 4, 256, 8192, [1e4]),
    ("gemma3_270m", {"sliding 512": 15, "full": 3}, 1, 256, 32768, [1e4, 1e6]),
    ("gemma3_text", {"sliding 4096": 22, "full": 4}, 4, 256, 131072, [1e4, 1e6]),
    ("gemma3n_text", {"sliding 512": 28, "full": 7}, 2, 256, 32768, [1e4, 1e6]),
    ("gpt_oss", {"sliding 128": 18, "full": 18}, 8, 64, 131072, [1.5e5]),
    ("llama", {"full": 32}, 32, 128, 2048, [1e4]),
    ("llama4_text", {"chunked 8192": 36, "full": 12}, 8, 128, 131072, [5e5]),
    ("mistral", {"sliding 4096": 32}, 8, 128, 131072, [1e4]),
    ("phi3", {"full": 32}, 32, 96, 4096, [1e4]),
    ("qwen2_5_vl", {"full": 80}, 8, 128, 32768, [1e6]),
    ("qwen3", {"full": 32}, 32, 128, 32768, [1e4]),
    ("smollm3", {"full": 36}, 4, 128, 32768, [2e6]),
    ("v4_gemma3_1b", {"sliding 512": 22, "full": 4}, 1, 256, 32768, [1e4, 1e6]),
    ("v4_llama31_8b", {"full": 32}, 8, 128, 131072, [5e5]),
    ("v4_mistral_7b_v01", {"sliding 4096": 32}, 8, 128, 32768, [1e4]),
]
# file, decoder layers by what they keep, kind, state [H, D, S], convolution [C, columns], attention (KV heads, head size)
HYBRID = [
    ("bamba", {"recurrent": 32}, Mamba2Layer, (128, 64, 256), (8704, 4), None),
    ("granitemoehybrid", {"recurrent": 32}, Mamba2Layer, (128, 64, 256), (8704, 4), None),
    ("jamba", {"recurrent": 28, "attention": 4}, Mamba1Layer, (1, 8192, 16), (8192, 4), (8, 128)),
    ("nemotron_h", {"recurrent": 1, "attention": 1, "none": 2}, Mamba2Layer, (128, 64, 128), (10240, 4), (8, 128)),
    ("qwen3_5_text", {"recurrent": 24, "attention": 8}, GatedDeltaNetLayer, (32, 128, 128), (8192, 4), (4, 256)),
    ("qwen3_next", {"recurrent": 36, "attention": 12}, GatedDeltaNetLayer, (32, 128, 128), (8192, 4), (2, 256)),
]
REFUSED = [
    ("deepseek_v3", "latent"),
]
#: File -> what has to be given because the family's defaults leave it out.
INCOMPLETE = {"mamba2": "max_kv_cache_capacity"}


@pytest.mark.parametrize(("name", "windows", "heads", "head_dim", "capacity", "thetas"), READ, ids=[row[0] for row in READ])
def test_read(
    shared_data: Path, name: str, windows: dict[str, int], heads: int, head_dim: int, capacity: int, thetas: list[float]
) -> None:
    config = load_engine_config(shared_data / "configs" / f"{name}.json")
    assert Counter(str(layer.window) for layer in config.layers) == windows
    assert {(layer.num_kv_heads, layer.head_dim) for layer in config.layers} == {(heads, head_dim)}
    assert config.max_kv_cache_capacity == capacity
    assert [rope.theta for rope in config.ropes] == thetas


@pytest.mark.parametrize(
    ("name", "types", "kind", "state", "conv", "attention"), HYBRID, ids=[row[0] for row in HYBRID]
)
def test_hybrid(
    shared_data: Path,
    name: str,
    types: dict[str, int],
    kind: type[RecurrentLayer],
    state: tuple[int, int, int],
    conv: tuple[int, int],
    attention: tuple[int, int] | None,
) -> None:
    config = load_engine_config(shared_data / "configs" / f"{name}.json")
    assert Counter(config.layer_types) == types
    layer = config.recurrent_layer
    assert type(layer) is kind
    assert (layer.state_shape, layer.conv_shape()) == (state, conv)
    assert (layer.recurrent_state_dtype, layer.conv_state_dtype) == ("float32", "bfloat16")
    assert {(a.num_kv_heads, a.head_dim) for a in config.layers} == ({attention} if attention else set())
    assert config.num_recurrent_layers == types["recurrent"]
    plan = plan_memory(replace(config, max_batch_size=1, max_kv_cache_capacity=1024))
    assert plan.state_nbytes >= types["recurrent"] * (4 * math.prod(state) + 2 * math.prod(conv))


@pytest.mark.parametrize("name", INCOMPLETE)
def test_what_the_defaults_leave_out_is_asked_for(shared_data: Path, name: str) -> None:
    path = shared_data / "configs" / f"{name}.json"
    with pytest.raises(ConfigError, match=INCOMPLETE[name]) as caught:
        load_engine_config(path)
    assert not isinstance(caught.value, UnsupportedModelError)
    config = load_engine_config(path, max_kv_cache_capacity=4096)
    assert (config.layers, config.num_recurrent_layers) == ((), 64)
    assert config.recurrent_layer.state_shape == (128, 64, 128)


@pytest.mark.parametrize(("name", "reason"), REFUSED)
def test_refused(shared_data: Path, name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load_engine_config(shared_data / "configs" / f"{name}.json")


def test_every_file_is_expected(shared_data: Path) -> None:
    found = {path.stem for path in (shared_data / "configs").glob("*.json")}
    assert found == {row[0] for row in (*READ, *HYBRID, *REFUSED)} | set(INCOMPLETE)


def test_shared_kv(shared_data: Path) -> None:
    config = load_engine_config(shared_data / "configs" / "gemma3n_text.json")
    donors = [layer.kv_donor for layer in config.layers]
    assert donors[:20] == [None] * 20
    assert donors[20:] == [18, 18, 18, 18, 19] * 3


def test_both_key_styles_of_one_family_agree(shared_data: Path) -> None:
    older = load_engine_config(shared_data / "configs" / "v4_gemma3_1b.json")
    newer = load_engine_config(shared_data / "configs" / "gemma3_270m.json")
    assert older.ropes == newer.ropes
    assert older.layers[:18] == newer.layers
