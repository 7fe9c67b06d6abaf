"""RopeCache: what tables hold, how far they are exact, that they stay where they are, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numba_kv.config import LLMEngineConfig, RopeConfig, load_engine_config
from numba_kv.config.rope_frequencies import rotation_of
from numba_kv.device import create_device
from numba_kv.errors import CapacityError, ConfigError, InputError, StateError
from numba_kv.weights import engine_layouts
from tests.helpers.configs import huggingface
from tests.helpers.models import tiny_config
from tests.helpers.ropes import expected, opened, plain, rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONG = {"short_factor": (1.0, 1.1, 1.2, 1.3), "long_factor": (1.0, 2.0, 4.0, 8.0), "original_max_position_embeddings": 5}


@pytest.fixture
def compiled(target: str) -> str:
    """Skip a table that is too large for an interpreter."""
    if target == "sim":
        pytest.skip("the simulator interprets every pair of every position")
    return target


@pytest.mark.parametrize(
    ("dim", "theta", "position", "pair", "factor", "cosine", "sine"),
    [
        (64, 1e4, 1, 0, 1, 0.54030231, 0.84147098),
        (64, 1e4, 1, 1, 1, 0.73176098, 0.68156135),
        (128, 1e4, 5, 1, 1, -0.37330346, -0.92770929),
        (64, 1e4, 3, 0, 2, 0.0707372, 0.99749499),
    ],
)
def test_known_values(dim: int, theta: float, position: int, pair: int, factor: int, cosine: float, sine: float) -> None:
    config = rope("linear", theta, dim, factor=factor) if factor > 1 else rope(theta=theta, dim=dim)
    with opened() as cache:
        table = cache.table(config, position + 1)
        assert table.tensor.shape == (1, position + 1, dim)
        assert table.tensor.dtype.name == "float32"
        row = table.tensor.to_host()[0, position]
    assert row[pair] == pytest.approx(cosine, abs=1e-7)
    assert row[dim // 2 + pair] == pytest.approx(sine, abs=1e-7)


TYPES = [
    rope(),
    rope(dim=2),
    rope(dim=10, theta=1e6),
    rope("nope"),
    rope("linear", factor=2.5),
    rope("llama3", 5e5, **LLAMA3),
    rope("yarn", factor=4.0, original_max_position_embeddings=16),
    rope("proportional", partial_rotary_factor=0.5),
    rope("mrope", mrope_section=(2, 1, 1)),
    rope("dynamic", positions=6, factor=2.0),
    rope("longrope", positions=20, **LONG),
]


@pytest.mark.parametrize("config", TYPES, ids=lambda config: f"{config.rope_type}-{config.rotary_dim}")
@pytest.mark.parametrize("length", [1, 5, 6, 9])
def test_every_type_at_any_length(config: RopeConfig, length: int) -> None:
    with opened() as cache:
        table = cache.table(config, length)
        assert table.limits[-1] == length
        for limit, tensor in zip(table.limits, table.tensors, strict=True):
            rotation = rotation_of(config, limit)
            wanted = expected(rotation.inverse_frequencies, range(limit), rotation.magnitude)
            assert tensor.address % 256 == 0
            assert np.abs(tensor.to_host()[0] - wanted).max() < 2e-7


def test_llama3_probes(compiled: str) -> None:
    with opened() as cache:
        table = cache.table(rope("llama3", 5e5, 128, 131072, **LLAMA3), 4097).tensor.to_host()[0]
    probes = [(0, 1, 0.5403), (20, 128, -0.5218), (33, 4096, 0.2860), (36, 4096, 0.9496), (40, 4096, 0.9902)]
    for pair, position, cosine in probes:
        assert table[position, pair] == pytest.approx(cosine, abs=1e-4)


@pytest.mark.parametrize("dim", [64, 96, 128, 256, 512])
def test_phase_at_32767(compiled: str, dim: int) -> None:
    positions = [4096, 16383, 32767]
    types = [rope(dim=dim), rope("dynamic", dim=dim, positions=32768), rope("proportional", dim=dim, partial_rotary_factor=0.5)]
    with opened() as cache:
        for config in types:
            frequencies = plain(dim, 1e4)
            if config.rope_type == "proportional":
                frequencies[dim // 4 :] = 0
            found = cache.table(config, 32768).tensor.to_host()[0, positions]
            assert np.abs(found - expected(frequencies, positions)).max() < 1e-6
            if config.rope_type == "proportional":
                assert (found[:, dim // 2 - 1] == 1).all()
                assert (found[:, dim - 1] == 0).all()


def test_phase_of_a_unit_frequency_under_yarn(compiled: str) -> None:
    positions = [6437, 8191, 8192, 15950, 16383]
    with opened() as cache:
        config = rope("yarn", 1e4, 128, factor=1.0, original_max_position_embeddings=8192)
        found = cache.table(config, 16384).tensor.to_host()[0, positions]
    assert np.abs(found[:, 0] - np.cos(positions)).max() < 1e-6
    assert np.abs(found[:, 64] - np.sin(positions)).max() < 1e-6


@pytest.mark.parametrize("theta", [1e4, 1e6, 5e5])
def test_phase_at_a_million(compiled: str, theta: float) -> None:
    """float32 angles are wrong by 0.03 there. gpt-neox#1003, transformers#25681, candle#3520."""
    length, dim = (1 << 20) + 1, 16
    positions = np.r_[0:1000, length - 1000 : length, np.random.default_rng(5).integers(0, length, 3000)]
    with opened() as cache:
        found = cache.table(rope(theta=theta, dim=dim, positions=length), length).tensor.to_host()[0, positions]
    assert np.abs(found - expected(plain(dim, theta), positions)).max() < 1e-6


def test_one_table_for_equal_keys() -> None:
    with opened() as cache:
        config = rope("linear", factor=2.0)
        first = cache.table(config, 4)
        assert cache.table(rope("linear", factor=2), np.int64(4)) is first
        others = [
            cache.table(config, 5),
            cache.table(rope("linear", factor=3.0), 4),
            cache.table(rope("linear", 9.0, factor=2.0), 4),
        ]
        assert len({id(t) for t in (first, *others)}) == len(cache) == 4
        assert (cache.stats.tables, cache.stats.built, cache.stats.found) == (4, 4, 1)
        assert cache.stats.nbytes == cache._device.memory.current_bytes


def test_growth_leaves_the_old_table_where_it_is() -> None:
    with opened() as cache:
        old = cache.table(rope(), 4)
        before, address = old.tensor.to_host(), old.tensor.address
        new = cache.table(rope(), 9)
        assert old.tensor.address == address != new.tensor.address
        assert np.array_equal(old.tensor.to_host(), before)
        assert np.array_equal(new.tensor.to_host()[:, :4], before)
    for use in (lambda: cache.table(rope(), 4), lambda: cache.table(rope(), 5), lambda: old.tensor.to_host()):
        with pytest.raises(StateError):
            use()


def test_longrope_is_chosen_by_the_length_of_the_sequence() -> None:
    """At exactly the original length the short factors hold. vllm#27431, transformers#33129."""
    config = rope("longrope", positions=20, **LONG)
    with opened() as cache:
        table = cache.table(config, 12)
        assert table.limits == (5, 12)
        assert [table.variant(n) for n in (0, 1, 5, 6, 12)] == [0, 0, 0, 1, 1]
        assert table.for_sequence(5) is table.tensors[0]
        assert table.for_sequence(6) is table.tensor
        assert table.tensors[0].shape == (1, 5, 8)
        short = cache.table(config, 5)
        assert short.limits == (5,)
        assert np.array_equal(short.tensor.to_host(), table.tensors[0].to_host())
        assert not np.array_equal(table.tensors[0].to_host(), table.tensor.to_host()[:, :5])


def test_slices_are_checked() -> None:
    """A table shorter than start + tokens is refused. nanochat#520, gLLM#269, vllm#44286, vllm-ascend#1266, vllm#2164."""
    with opened() as cache:
        table = cache.table(rope("longrope", positions=20, **LONG), 9)
        assert np.array_equal(table.slice(2, 3).to_host(), table.tensors[0].to_host()[0, 2:5])
        assert np.array_equal(table.slice(2, 3, length=9).to_host(), table.tensor.to_host()[0, 2:5])
        assert np.array_equal(table.slice(4, 5).to_host(), table.tensor.to_host()[0, 4:9])
        assert table.slice(9, 0).shape == (0, 8)
        for start, tokens in ((0, 10), (9, 1), (5, 5), (2**31 - 1, 2**31 - 1)):
            with pytest.raises(InputError, match=f"{start} to {start + tokens} are wanted, it has 9"):
                table.slice(start, tokens)
        for call in (
            lambda: table.slice(-1, 1),
            lambda: table.slice(0, -1),
            lambda: table.slice(0, True),
            lambda: table.slice(3, 4, length=6),
            lambda: table.slice(0, 1, row=1),
            lambda: table.variant(10),
            lambda: table.set_index(3, 1),
        ):
            with pytest.raises(InputError):
                call()


BAD: list[tuple[Any, Any, dict[str, Any], type[Exception]]] = [
    (rope("spiral"), 4, {}, ConfigError),
    (rope(dim=5), 4, {}, ConfigError),
    (rope("mrope", mrope_section=(1, 1, 1)), 4, {}, ConfigError),
    (rope("dynamic"), 65, {}, ConfigError),
    ("rope", 4, {}, InputError),
    (rope(), 0, {}, InputError),
    (rope(), -1, {}, InputError),
    (rope(), 2**31, {}, InputError),
    (rope(), 4.0, {}, InputError),
    (rope(), True, {}, InputError),
    (rope(), 4, {"num_rows": 0}, InputError),
    (rope(), 4, {"num_rows": 2}, InputError),
]


@pytest.mark.parametrize(("config", "length", "keys", "error"), BAD)
def test_a_refusal_adds_nothing(config: Any, length: Any, keys: dict[str, Any], error: type[Exception]) -> None:
    with opened() as cache:
        with pytest.raises(error):
            cache.table(config, length, **keys)
        assert cache.stats.nbytes == len(cache) == 0
        assert cache._device.memory.allocations == 0


def test_no_memory_adds_nothing(target: str) -> None:
    if target != "cuda":
        pytest.skip("host memory is mapped when it is touched; only a device runs out at once")
    with opened() as cache:
        with pytest.raises(CapacityError):
            cache.table(rope(dim=2048, positions=2**31 - 1), 2**30)
        assert cache.stats.nbytes == len(cache) == 0


def test_tables_of_an_engine() -> None:
    sliding, full = rope(theta=1e4), rope(theta=1e6)
    config = tiny_config(6, None, ropes=(sliding, full))
    with opened() as cache:
        tables = cache.for_engine(config)
        assert [t.config for t in tables] == [sliding, full]
        assert [t.tensor.shape for t in tables] == [(1, 64, 8)] * 2
        assert cache.for_engine(config) == tables
        assert sum(layout.nbytes for layout in engine_layouts(config)) == cache.stats.nbytes
        assert cache.for_engine(tiny_config(None)) == ()
        multimodal = tiny_config(None, ropes=(rope("mrope", mrope_section=(2, 1, 1)),), max_kv_cache_capacity=4)
        assert [t.tensor.shape for t in cache.for_engine(multimodal)] == [(2, 4, 8)]
        assert [t.tensor.shape for t in cache.for_engine(multimodal, mrope_rows=1)] == [(1, 4, 8)]
        count = len(cache)
        with pytest.raises(ConfigError, match="spiral"):
            cache.for_engine(tiny_config(None, ropes=(rope(theta=3.0), rope("spiral"))))
        assert len(cache) == count


def test_tables_of_a_gemma_file() -> None:
    source = huggingface("gemma3_text", sliding_window=64, rope_theta=1e6, rope_local_base_freq=1e4)
    config: LLMEngineConfig = load_engine_config(source, max_kv_cache_capacity=16)
    with opened() as cache:
        sliding, full = cache.for_engine(config)
        assert np.abs(sliding.tensor.to_host()[0] - expected(plain(16, 1e4), range(16))).max() < 2e-7
        assert np.abs(full.tensor.to_host()[0] - expected(plain(16, 1e6), range(16))).max() < 2e-7


def test_caches_of_two_devices_do_not_share() -> None:
    with opened(create_device()) as a, opened(create_device()) as b:
        assert a.table(rope(), 3).tensor.address != b.table(rope(), 3).tensor.address


def test_requests_from_threads_build_one_table() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with opened() as cache, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: cache.table(rope(), 8), range(16)))
        assert len({id(t) for t in found}) == len(cache) == 1
