"""Real configurations that lie beside the repository on some machines: each is read for what it is, or refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from numba_kv.config import load_engine_config
from numba_kv.errors import UnsupportedModelError

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
REFUSED = [
    ("bamba", "recurrent"),
    ("deepseek_v3", "latent"),
    ("granitemoehybrid", "recurrent"),
    ("jamba", "recurrent"),
    ("mamba2", "recurrent"),
    ("nemotron_h", "recurrent"),
    ("qwen3_5_text", "recurrent"),
    ("qwen3_next", "recurrent"),
]


@pytest.mark.parametrize(("name", "windows", "heads", "head_dim", "capacity", "thetas"), READ, ids=[row[0] for row in READ])
def test_read(
    shared_data: Path, name: str, windows: dict[str, int], heads: int, head_dim: int, capacity: int, thetas: list[float]
) -> None:
    config = load_engine_config(shared_data / "configs" / f"{name}.json")
    assert Counter(str(layer.window) for layer in config.layers) == windows
    assert {(layer.num_kv_heads, layer.head_dim) for layer in config.layers} == {(heads, head_dim)}
    assert config.max_kv_cache_capacity == capacity
    assert [rope.theta for rope in config.ropes] == thetas


@pytest.mark.parametrize(("name", "reason"), REFUSED)
def test_refused(shared_data: Path, name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        load_engine_config(shared_data / "configs" / f"{name}.json")


def test_every_file_is_expected(shared_data: Path) -> None:
    found = {path.stem for path in (shared_data / "configs").glob("*.json")}
    assert found == {row[0] for row in READ} | {row[0] for row in REFUSED}


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
