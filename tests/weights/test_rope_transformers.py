"""Frequencies and tables agree with the rotary embeddings of transformers, for real files and for every type."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_kv.config import RopeConfig, load_engine_config
from numba_kv.config.rope_frequencies import rotation_of
from numba_kv.errors import ConfigError, UnsupportedModelError
from tests.helpers.configs import huggingface
from tests.helpers.ropes import opened

torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
pytest.importorskip("transformers", minversion="5.0", reason="transformers is not installed (pip install 'numba-kv[interop]')")

from transformers import AutoConfig  # noqa: E402 - only where it is installed
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

REFERENCE = float(np.finfo(np.float32).eps) * 8  # transformers computes frequencies in float32


def default_frequencies(config: Any, layer_type: str | None) -> Any:
    """Return what models compute for the default type, for which the registry has no function."""
    if layer_type is None:
        from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

        return Phi3RotaryEmbedding.compute_default_rope_parameters(config)
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    return Gemma3RotaryEmbedding.compute_default_rope_parameters(config, layer_type=layer_type)


def theirs(config: Any, layer_type: str | None, length: int) -> tuple[np.ndarray, float]:
    """Return inverse frequencies and scaling of a transformers configuration for sequences of `length` tokens."""
    config.standardize_rope_params()
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = parameters["rope_type"]
    if kind == "default":
        frequencies, scaling = default_frequencies(config, layer_type)
    else:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length, layer_type=layer_type)
    return frequencies.to(torch.float64).numpy(), float(scaling)


def agree(rope: RopeConfig, config: Any, layer_type: str | None, length: int) -> None:
    frequencies, scaling = theirs(config, layer_type, length)
    rotation = rotation_of(rope, length)
    ours = np.array(rotation.inverse_frequencies)
    assert ours.shape == frequencies.shape
    assert np.allclose(ours, frequencies, rtol=REFERENCE, atol=0)
    assert rotation.magnitude == pytest.approx(scaling, rel=1e-12)
    with opened() as cache:  # as their forward has it: angles, then both halves scaled
        table = cache.table(rope, min(length, 32)).for_sequence(min(length, 32)).to_host()[0]
    short = rotation_of(rope, min(length, 32))
    angles = np.arange(len(table))[:, None] * np.array(short.inverse_frequencies)
    assert np.allclose(table, np.concatenate([np.cos(angles), np.sin(angles)], 1) * short.magnitude, atol=1e-6)


def layer_types(config: Any, count: int) -> list[str | None]:
    """Return the layer types of a configuration's ropes in the order of `LLMEngineConfig.ropes`."""
    config.standardize_rope_params()
    nested = [name for name in ("sliding_attention", "chunked_attention", "full_attention") if name in config.rope_parameters]
    return list(nested[:count]) if nested else [None]


def decoded(found: dict[str, Any]) -> Any:
    """Return an object of a file, or the number that transformers writes as one: ``{"__float__": "Infinity"}``."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def test_real_files(shared_data: Path) -> None:
    seen = 0
    for path in sorted((shared_data / "configs").glob("*.json")):
        source = json.loads(path.read_text(), object_hook=decoded)
        try:
            engine = load_engine_config(path)
        except UnsupportedModelError:
            continue
        except ConfigError as error:  # recurrent layers alone know no positions
            if "max_position_embeddings" not in str(error):
                raise
            engine = load_engine_config(path, max_kv_cache_capacity=4096)
            assert not engine.layers
        config = AutoConfig.for_model(**source).get_text_config()
        if not engine.layers or getattr(config, "rope_parameters", None) is None:  # nothing that rotates
            assert engine.ropes == (), path.name
            continue
        types = layer_types(config, len(engine.ropes))
        assert len(types) == len(engine.ropes), path.name
        for rope, layer_type in zip(engine.ropes, types, strict=True):
            assert (
                rope.theta
                == (config.rope_parameters if layer_type is None else config.rope_parameters[layer_type])["rope_theta"]
            )
            for length in (1, engine.max_kv_cache_capacity):
                agree(rope, config, layer_type, length)
            seen += 1
    assert seen >= 16


PAIRS = 8
LONG = {"long_factor": [1.0 + 0.5 * d for d in range(PAIRS)], "short_factor": [1.0 + 0.1 * d for d in range(PAIRS)]}
TYPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "truncate": False, "beta_fast": 20.0},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 5},
    {"rope_type": "longrope", "original_max_position_embeddings": 256, **LONG},
    {"rope_type": "longrope", "original_max_position_embeddings": 256, "attention_factor": 1.25, **LONG},
    {"rope_type": "longrope", "original_max_position_embeddings": 256, "factor": 3.0, **LONG},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
]


@pytest.mark.parametrize("parameters", TYPES, ids=lambda p: "-".join(str(v) for v in p.values() if not isinstance(v, list)))
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_every_type(parameters: dict[str, Any], theta: float) -> None:
    source = huggingface("llama", rope_parameters={"rope_theta": theta, **parameters})
    (rope,) = load_engine_config(source).ropes
    config = AutoConfig.for_model(**source)
    original = parameters.get("original_max_position_embeddings", 4096)
    for length in (1, original, original + 1, 4096, 9000):
        agree(rope, config, None, length)


def test_a_fixed_stretch_of_the_base() -> None:
    from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding

    parameters = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    source = huggingface("hunyuan_v1_dense", rope_parameters=parameters)
    embedding = HunYuanDenseV1RotaryEmbedding(AutoConfig.for_model(**source))
    (rope,) = load_engine_config(huggingface("llama", rope_parameters=parameters)).ropes
    for length in (1, 9000):
        ours = rotation_of(rope, length).inverse_frequencies
        assert np.allclose(ours, embedding.inv_freq.numpy(), rtol=REFERENCE)


MODULES = [
    ("qwen2_5_vl", "Qwen2_5_VLRotaryEmbedding", False, [2, 3, 3]),
    ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", True, [3, 3, 2]),
]


@pytest.mark.parametrize(("module", "name", "interleaved", "section"), MODULES)
def test_multimodal_rows(module: str, name: str, interleaved: bool, section: list[int]) -> None:
    kind = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, "mrope_interleaved": interleaved}
    config = AutoConfig.for_model(**huggingface(f"{module}_text", rope_parameters=parameters))
    (rope,) = load_engine_config(huggingface("llama", rope_parameters=parameters)).ropes
    ids = np.random.default_rng(1).integers(0, 40, (2, 3, 12))
    cosines, sines = kind(config)(torch.zeros(1), torch.from_numpy(ids).transpose(0, 1))
    with opened() as cache:
        table = cache.table(rope, 12, num_rows=2)
        table.set_positions([0, 1], ids)
        rows = table.tensor.to_host()
    assert np.allclose(rows[..., :PAIRS], cosines[..., :PAIRS].numpy(), atol=1e-5)
    assert np.allclose(rows[..., PAIRS:], sines[..., :PAIRS].numpy(), atol=1e-5)
