"""Whose context it is: models, adapters and tenants that differ share nothing; limits do not matter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from numba_kv.config.engine import LLMEngineConfig
from numba_kv.config.layers import AttentionLayer
from numba_kv.context import engine_identity, row_identity
from numba_kv.errors import InputError
from numba_kv.geometry import FULL, Window
from numba_kv.ledger.reuse.groups import reuse_groups
from numba_kv.plan import plan_memory
from numba_kv.weights.lora_slots import LoRAAdapter

WINDOW = Window("sliding", 32)


def config(**changes: object) -> LLMEngineConfig:
    layers = tuple(AttentionLayer(num_kv_heads=2, head_dim=16, window=w) for w in (FULL, WINDOW))
    return replace(
        LLMEngineConfig(model_type="m", layers=layers, max_batch_size=2, max_kv_cache_capacity=256, vocab_size=10), **changes
    )


def adapter(name: str, content: bytes) -> LoRAAdapter:
    return LoRAAdapter(name=name, version=1, slot=1, content_hash=content, rank=4, targets=(), source="")


def test_limits_are_no_part_of_an_identity() -> None:
    base = engine_identity(config(), b"w")
    for change in ({"max_batch_size": 8}, {"max_kv_cache_capacity": 512}, {"num_kv_pages": 99}, {"kv_layout": "HND"}):
        assert engine_identity(config(**change), b"w") == base


def test_what_changes_keys_and_values_is() -> None:
    base = config()
    layer = AttentionLayer(num_kv_heads=4, head_dim=16, window=FULL)
    found = {
        engine_identity(base, b"w"),
        engine_identity(base, b"x"),
        engine_identity(base, b"w", b"scales"),
        engine_identity(config(kv_cache_dtype="float16"), b"w"),
        engine_identity(config(page_tokens=32), b"w"),
        engine_identity(config(layers=(layer,)), b"w"),
        engine_identity(config(vocab_size=11), b"w"),
    }
    assert len(found) == 7


def test_an_adapter_is_its_bytes_and_not_its_name() -> None:
    engine = engine_identity(config(), b"w")
    first, other = (row_identity(engine, adapter=adapter("fr", content * 16)) for content in (b"1", b"2"))
    assert len({engine, first, other}) == 3
    assert first == row_identity(engine, adapter=adapter("renamed", b"1" * 16))
    others = [row_identity(engine, salt=b""), row_identity(engine, salt=b"t"), row_identity(engine, rope=b"long")]
    assert len({engine, first, *others}) == 5


def test_a_digest_is_bytes() -> None:
    with pytest.raises(InputError, match="weights"):
        engine_identity(config(), "w")  # type: ignore[arg-type]


def test_groups_follow_the_memory_plan() -> None:
    groups = reuse_groups(plan_memory(config()))
    assert (groups.page_tokens, groups.has_full, groups.windows, groups.is_recurrent) == (16, True, (WINDOW,), False)
    assert groups.num_lines == 2
    windows = (AttentionLayer(num_kv_heads=2, head_dim=16, window=WINDOW),)
    assert not reuse_groups(plan_memory(config(layers=windows))).has_full
