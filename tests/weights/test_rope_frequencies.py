"""Frequencies and magnitudes: known numbers of every type, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from numba_kv.config import RopeConfig
from numba_kv.config.rope_axes import pair_axes
from numba_kv.config.rope_frequencies import ROPE_TYPES, rotation_of, variant_limits
from numba_kv.errors import ConfigError
from numba_kv.weights import keys_stay_valid
from tests.helpers.ropes import plain, rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONG = {"short_factor": (1.0, 1.1, 1.2, 1.3), "long_factor": (1.0, 2.0, 4.0, 8.0), "original_max_position_embeddings": 16}


def frequencies(config: RopeConfig, length: int = 64) -> np.ndarray:
    return np.array(rotation_of(config, length).inverse_frequencies)


@pytest.mark.parametrize("dim", [2, 6, 64, 80, 96, 128, 256, 512])
def test_default(dim: int) -> None:
    for name in ("default", "mrope"):
        assert np.allclose(frequencies(rope(name, 1e6, dim)), plain(dim, 1e6).astype(float), rtol=1e-14)


def test_llama3() -> None:
    config = rope("llama3", 5e5, 128, 131072, **LLAMA3)
    found, base = frequencies(config), plain(128, 5e5).astype(float)
    known = {
        0: 1,
        20: 1.656044008099e-2,
        33: 3.126937503841e-4,
        36: 7.784655273932e-5,
        40: 3.428102195953e-5,
        63: 3.068925988915e-7,
    }
    for pair, value in known.items():
        assert found[pair] == pytest.approx(value, rel=1e-11)
    same, scaled = np.isclose(found, base, rtol=1e-12), np.isclose(found, base / 8, rtol=1e-12)
    assert (same.sum(), (~same & ~scaled).sum(), scaled.sum()) == (29, 6, 29)
    assert rotation_of(config, 64).magnitude == 1.0


@pytest.mark.parametrize(
    ("dim", "theta", "factor", "original", "known"),
    [
        (128, 1e4, 32, 8192, {16: 0.1, 20: 5.623413252e-2, 31: 8.862951732e-3, 40: 1.324203770e-3, 63: 3.608693702e-6}),
        (64, 1e4, 32, 8192, {16: 7.019230769e-3, 20: 1.277073670e-3, 31: 4.167254476e-6}),
        (128, 1e6, 4, 32768, {31: 8.029597275e-4, 40: 4.445698525e-5, 63: 3.102344402e-7}),
    ],
)
def test_yarn(dim: int, theta: float, factor: float, original: int, known: dict[int, float]) -> None:
    found = frequencies(rope("yarn", theta, dim, factor=factor, original_max_position_embeddings=original))
    for pair, value in known.items():
        assert found[pair] == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("parameters", "magnitude"),
    [
        ({"factor": 1}, 1.0),
        ({"factor": 0.5}, 1.0),
        ({"factor": 4}, 1.138629436),
        ({"factor": 32}, 1.346573590),
        ({"factor": 32, "attention_factor": 1.5}, 1.5),
        ({"factor": 32, "attention_factor": None}, 1.346573590),
    ],
)
def test_yarn_magnitude(parameters: dict[str, Any], magnitude: float) -> None:
    config = rope("yarn", **parameters, original_max_position_embeddings=64)
    assert rotation_of(config, 64).magnitude == pytest.approx(magnitude, rel=1e-9)


def test_yarn_without_truncation_and_without_a_ramp() -> None:
    rounded = rope("yarn", 1e4, 64, factor=32, original_max_position_embeddings=4096)
    exact = rope("yarn", 1e4, 64, factor=32, original_max_position_embeddings=4096, truncate=False)
    assert not np.array_equal(frequencies(rounded), frequencies(exact))
    steep = rope("yarn", 1e4, 8, factor=2, original_max_position_embeddings=4096, beta_fast=1.0, beta_slow=1.0, truncate=False)
    base = plain(8, 1e4).astype(float)
    assert np.allclose(frequencies(steep), base / [1, 1, 1, 2])


def test_linear() -> None:
    assert np.allclose(frequencies(rope("linear", factor=4)), plain(8, 1e4).astype(float) / 4, rtol=1e-14)


@pytest.mark.parametrize(("share", "moving"), [(1.0, 4), (0.75, 3), (0.5, 2), (0.3, 1), (0.1, 0)])
def test_proportional(share: float, moving: int) -> None:
    found = frequencies(rope("proportional", partial_rotary_factor=share, factor=2.0))
    assert np.allclose(found[:moving], plain(8, 1e4).astype(float)[:moving] / 2)
    assert (found[moving:] == 0).all()


def test_nope_stands_still() -> None:
    assert (frequencies(rope("nope")) == 0).all()


def test_dynamic_stretches_the_base_beyond_the_positions_of_the_model() -> None:
    config = rope("dynamic", factor=2.0, positions=64)
    for length in (1, 64):
        assert np.array_equal(frequencies(config, length), frequencies(rope()))
    stretched = 1e4 * (2.0 * 256 / 64 - 1.0) ** (8 / 6)
    assert np.allclose(frequencies(config, 256), plain(8, stretched).astype(float), rtol=1e-13)
    fixed = rope("dynamic", alpha=1000.0, factor=2.0)
    for length in (1, 256):
        assert np.allclose(frequencies(fixed, length), plain(8, 1e4 * 1000 ** (8 / 6)).astype(float), rtol=1e-13)


def test_longrope_takes_short_factors_up_to_its_original_length_and_long_ones_beyond() -> None:
    config, base = rope("longrope", positions=64, **LONG), plain(8, 1e4).astype(float)
    for length, key in ((1, "short_factor"), (16, "short_factor"), (17, "long_factor"), (64, "long_factor")):
        assert np.allclose(frequencies(config, length), base / LONG[key])
        assert rotation_of(config, length).magnitude == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))


def test_longrope_magnitude() -> None:
    parameters = {**LONG, "original_max_position_embeddings": 4096}
    assert rotation_of(rope("longrope", positions=131072, **parameters), 9).magnitude == pytest.approx(1.190238071)
    assert rotation_of(rope("longrope", positions=4096, **parameters), 9).magnitude == 1.0
    assert rotation_of(rope("longrope", positions=4096, factor=32.0, **parameters), 9).magnitude == pytest.approx(1.190238071)
    assert rotation_of(rope("longrope", attention_factor=1.25, **parameters), 9).magnitude == 1.25
    scaled = rope("longrope", short_mscale=1.1, long_mscale=1.3, **LONG)
    assert [rotation_of(scaled, n).magnitude for n in (16, 17)] == [1.1, 1.3]


def test_lengths_that_a_type_tells_apart() -> None:
    config = rope("longrope", **LONG)
    assert [variant_limits(config, n) for n in (1, 16, 17, 64)] == [(1,), (16,), (16, 17), (16, 64)]
    dynamic = rope("dynamic", factor=2.0)
    assert [variant_limits(dynamic, n) for n in (64, 65)] == [(64,), (64, 65)]
    assert variant_limits(rope("dynamic", alpha=9.0), 65) == (65,)
    assert variant_limits(rope(), 1 << 20) == (1 << 20,)


def test_keys_are_invalid_behind_a_switch() -> None:
    long, dynamic = rope("longrope", **LONG), rope("dynamic", factor=2.0)
    assert keys_stay_valid(long, 1, 16)
    assert keys_stay_valid(long, 17, 64)
    assert not keys_stay_valid(long, 16, 17)
    assert keys_stay_valid(dynamic, 1, 64)
    assert not keys_stay_valid(dynamic, 64, 65)
    assert not keys_stay_valid(dynamic, 65, 66)
    assert keys_stay_valid(rope("yarn", factor=4, original_max_position_embeddings=16), 1, 1 << 20)


def test_axes_of_pairs() -> None:
    def axes(dim: int, section: tuple[int, ...], interleaved: bool) -> str:
        config = rope("mrope", dim=dim, mrope_section=section, mrope_interleaved=interleaved)
        return "".join("THW"[a] for a in pair_axes(config))

    assert axes(128, (16, 24, 24), False) == "T" * 16 + "H" * 24 + "W" * 24
    assert axes(128, (24, 20, 20), True) == "THW" * 20 + "TTTT"
    assert axes(64, (11, 11, 10), True) == "THW" * 10 + "TH"
    assert axes(16, (2, 1, 1, 2, 1, 1), False) == "TTHWTTHW"
    assert pair_axes(rope()) == (0, 0, 0, 0)


BAD = [
    (rope("spiral"), ("rope_type", "'spiral'", "yarn")),
    (rope(dim=7), ("rotary_dim", "7", "even")),
    (rope(dim=0), ("rotary_dim", "0")),
    (rope(theta=0.0), ("theta", "0.0")),
    (rope(theta=math.nan), ("theta", "nan")),
    (rope(theta=math.inf), ("theta", "inf")),
    (rope(theta=True), ("theta", "True")),
    (rope(theta=1e-12), ("phase would be lost", "theta 1e-12")),
    (rope(positions=0), ("max_position_embeddings", "0")),
    (rope("linear"), ("factor", "missing")),
    (rope("linear", factor=0), ("factor", "0 is not")),
    (rope("linear", factor=1e-300), ("phase would be lost",)),
    (rope("llama3"), ("factor", "missing")),
    (rope("llama3", **{**LLAMA3, "high_freq_factor": 1.0}), ("high_freq_factor", "above low_freq_factor")),
    (rope("llama3", **{**LLAMA3, "original_max_position_embeddings": None}), ("original_max_position_embeddings", "missing")),
    (rope("yarn"), ("factor", "missing")),
    (rope("yarn", theta=1.0, factor=2), ("theta", "ramp")),
    (rope("yarn", factor=2, attention_factor=-1), ("attention_factor", "-1")),
    (rope("yarn", factor=2, truncate="no"), ("truncate", "'no'")),
    (rope("longrope"), ("short_factor", "missing")),
    (rope("longrope", **{**LONG, "short_factor": (1.0,) * 3}), ("short_factor", "3 factors", "4 are wanted")),
    (rope("longrope", **{**LONG, "long_factor": (1.0,) * 8}), ("long_factor", "8 factors", "4 are wanted")),
    (rope("longrope", **{**LONG, "long_factor": (1.0, 1.0, 0.0, 1.0)}), ("long_factor[2]", "0.0")),
    (rope("longrope", **{**LONG, "original_max_position_embeddings": 1}), ("original_max_position_embeddings", "at least 2")),
    (rope("proportional", partial_rotary_factor=1.5), ("partial_rotary_factor", "1.5")),
    (rope("dynamic"), ("factor", "missing", "65 tokens", "64 positions")),
    (rope("dynamic", dim=2, factor=2.0), ("rotary_dim", "more than 2")),
    (rope("dynamic", alpha=1e300), ("base", "finite")),
    (rope("dynamic", alpha=-1), ("alpha", "-1")),
]


@pytest.mark.parametrize(("config", "words"), BAD)
def test_bad_configurations(config: RopeConfig, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        rotation_of(config, 65)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("section", [(1, 1), (1, 1, 1), (2, 1, 2), (4, 0, -1), "abc", (1.0, 1, 2)])
def test_bad_sections(section: Any) -> None:
    with pytest.raises(ConfigError, match="mrope_section"):
        pair_axes(rope("mrope", mrope_section=section))


def test_every_type_of_both_dialects_is_known() -> None:
    from numba_kv.config.edgellm_rope import _TYPES as edgellm
    from numba_kv.config.huggingface_rope import _TYPES as huggingface

    assert set(ROPE_TYPES) == {*edgellm, *huggingface} - {"su"}
