"""SharedResources with rotary tables, adapters and external weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import numba_kv as kv
from numba_kv.weights import arena_nbytes
from tests.helpers.lora_files import pairs, peft, save_peft
from tests.helpers.models import tiny_config
from tests.helpers.ropes import plain, rope
from tests.helpers.weight_files import write

MODULE = "model.layers.0.self_attn.q_proj"


def config(**changes: object) -> kv.LLMEngineConfig:
    return replace(tiny_config(None, 6), ropes=(rope(theta=1e4, dim=8, positions=64),), **changes)


def lora_config(rank: int = 8) -> kv.LLMEngineConfig:
    return config(max_lora_rank=rank, lora_targets=(kv.LoRATarget(name=MODULE, k=12, n=16),))


def test_the_plan_counts_every_byte() -> None:
    """Planned bytes equal allocated bytes, rotary tables and adapter slots included. sglang#18039."""
    for engine in (tiny_config(None), config(), lora_config()):
        with kv.SharedResources.create_for_llm(engine) as resources:
            assert resources.device.memory.current_bytes == resources.plan.nbytes
        assert resources.device.memory.current_bytes == 0


def test_rotary_tables_cover_the_capacity() -> None:
    with kv.SharedResources.create_for_llm(config()) as resources:
        (table,) = resources.rope_tables
        capacity = resources.config.max_kv_cache_capacity
        found = table.tensor.to_host()
        assert found.shape == (1, capacity, 8)
        angles = np.arange(capacity)[:, None] * plain(8, 1e4)
        assert np.abs(found[0] - np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).max() < 1e-6
        assert resources.rope_pool.table(resources.config.ropes[0], capacity) is table


def test_adapters_are_loaded_at_construction(tmp_path: Path) -> None:
    folder = save_peft(tmp_path / "fr", peft(pairs(MODULE)))
    with kv.SharedResources.create_for_llm(lora_config(), {"fr": folder, "none": ""}) as resources:
        assert resources.lora_manager is not None
        assert list(resources.lora_manager.adapters) == ["fr"]
        batch = kv.Batch(resources)
        sequence = batch.admit(num_tokens=3)
        resources.lora_manager.assign({sequence.row: "fr"})
        assert resources.lora_manager.adapter_ids.to_host()[sequence.row] > 0
        view = batch.step({sequence: 3})
        bound = kv.bind(resources, view)
        assert any(name.endswith("lora_A.weight") for name in bound)


def test_adapters_without_room_for_them_are_refused(tmp_path: Path) -> None:
    folder = save_peft(tmp_path / "fr", peft(pairs(MODULE)))
    with pytest.raises(kv.ConfigError, match="lora_weights_map: fr given, but max_lora_rank is 0"):
        kv.SharedResources.create_for_llm(config(), {"fr": folder})
    with pytest.raises(kv.LoRAError, match="rank"):
        kv.SharedResources.create_for_llm(lora_config(rank=2), {"fr": folder})


def test_external_weights_are_loaded_on_request(tmp_path: Path) -> None:
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16)}
    path = write(tmp_path / "model.safetensors", values)
    with kv.SharedResources.create_for_llm(config()) as resources:
        weights = resources.external_weight_manager
        assert not weights.tensors
        weights.load(path)
        for name, expected in values.items():
            assert np.array_equal(weights.tensors[name].to_host(), expected)
    assert resources.device.memory.current_bytes == 0


def test_the_plan_keeps_room_for_external_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((3, 5), np.float16), "b": np.ones(1000, np.float32)}, path)
    nbytes = arena_nbytes(path)
    assert nbytes == 256 + 4096
    without = config()
    engine = replace(without, external_weights_nbytes=nbytes)
    plan = kv.plan_memory(engine)
    assert plan.parts["external_weights"] == plan.region("external_weights").nbytes == nbytes
    assert plan.nbytes == kv.plan_memory(without).nbytes + nbytes
    with kv.SharedResources.create_for_llm(engine) as resources:
        memory = resources.device.memory
        assert memory.current_bytes == plan.nbytes  # the arena is there before the weights
        allocations = memory.allocations
        resources.external_weight_manager.load(path)
        assert (memory.current_bytes, memory.allocations) == (plan.nbytes, allocations)
    assert memory.current_bytes == 0


def test_more_external_weights_than_planned_are_refused(tmp_path: Path) -> None:
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    save_file({"a": np.ones((3, 5), np.float16)}, small)
    save_file({"a": np.ones(1000, np.float32)}, large)
    engine = replace(config(), external_weights_nbytes=arena_nbytes(small))
    with kv.SharedResources.create_for_llm(engine) as resources:
        held = resources.device.memory.current_bytes
        with pytest.raises(kv.CapacityError, match="4096 bytes are to be loaded, 256 are planned") as refused:
            resources.external_weight_manager.load(large)
        assert (refused.value.needed, refused.value.free) == (4096, 256)
        assert resources.device.memory.current_bytes == held
        resources.external_weight_manager.load(small)


def test_external_weights_take_pages_from_a_budget() -> None:
    engine = config()
    budget = kv.plan_memory(engine).nbytes
    page = kv.plan_memory(engine).groups[0].page_nbytes
    fewer = kv.plan_memory(replace(engine, external_weights_nbytes=3 * page), budget)
    assert fewer.groups[0].usable_pages <= kv.plan_memory(engine, budget).groups[0].usable_pages - 3
    with pytest.raises(kv.PlanError, match=f"external weights {1 << 40}"):
        kv.plan_memory(replace(engine, external_weights_nbytes=1 << 40), budget)
    with pytest.raises(kv.ConfigError, match="external_weights_nbytes: -1"):
        replace(engine, external_weights_nbytes=-1)


# -- one way in for everything that comes from files


def both(tmp_path: Path) -> tuple[Path, Path]:
    weights = write(tmp_path / "model.safetensors", {"a": np.arange(600, dtype=np.float32)})
    return weights, save_peft(tmp_path / "fr", peft(pairs(MODULE)))


def test_loads_of_all_kinds_share_their_staging(tmp_path: Path) -> None:
    weights, adapter = both(tmp_path)
    with kv.SharedResources.create_for_llm(lora_config()) as resources:
        assert resources.lora_manager is not None
        pinned, seen = resources.device.pinned, []

        def note(done: int, total: int) -> None:
            with pytest.raises(kv.StateError, match="an upload is running in this thread"):
                resources.external_weight_manager.load(weights)  # it goes through the same blocks
            seen.append(done)

        before = pinned.current_bytes
        resources.lora_manager.load("fr", adapter, progress=note)
        assert seen
        held = pinned.current_bytes
        resources.external_weight_manager.load(weights)
        assert pinned.current_bytes <= max(held, before + (64 << 20))
        assert np.array_equal(resources.external_weight_manager.tensors["a"].to_host(), np.arange(600, dtype=np.float32))
    assert pinned.current_bytes == resources.device.memory.current_bytes == 0


@pytest.mark.parametrize("kind", ["weights", "adapter"])
def test_close_is_refused_while_something_is_loaded(tmp_path: Path, kind: str) -> None:
    weights, adapter = both(tmp_path)
    with kv.SharedResources.create_for_llm(lora_config()) as resources, kv.Batch(resources) as batch:
        sequence = batch.admit(num_tokens=3)
        assert resources.lora_manager is not None
        seen = []

        def close(done: int, total: int) -> None:
            seen.append(done)
            with pytest.raises(kv.StateError, match="are being loaded"):
                resources.close()

        if kind == "weights":
            resources.external_weight_manager.load(weights, progress=close)
            assert resources.external_weight_manager.tensors["a"].to_host()[5] == 5
        else:
            resources.lora_manager.load("fr", adapter, progress=close)
            assert list(resources.lora_manager.adapters) == ["fr"]
        assert seen
        batch.step({sequence: 3})  # nothing was closed
    assert resources.device.memory.current_bytes == resources.device.pinned.current_bytes == 0


def test_weights_that_are_closed_while_they_are_loaded_leave_nothing(tmp_path: Path) -> None:
    weights, _ = both(tmp_path)
    with kv.SharedResources.create_for_llm(config()) as resources:
        held = resources.device.memory.current_bytes
        manager = resources.external_weight_manager
        with pytest.raises(kv.StateError, match="external weights are closed; nothing follows"):
            manager.load(weights, progress=lambda done, total: manager.close())
        assert (manager.state, manager.nbytes, dict(manager.tensors)) == ("closed", 0, {})
        assert resources.device.memory.current_bytes == held
