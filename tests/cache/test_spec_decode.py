"""create_for_spec_decode: members of both models, what they share, and that nothing stays behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.config.spec_decode import SPEC_MODES
from numba_kv.errors import CapacityError, ConfigError, InputError, PlanError, StateError, TargetError
from tests.cache.test_shared_resources_close import FailingDevice
from tests.helpers.deployments import pair
from tests.helpers.lora_files import pairs, peft, save_peft
from tests.helpers.models import chunked, tiny_config
from tests.helpers.ropes import rope

WINDOWED = tiny_config(None, 8, hidden_size=16, vocab_size=100)
WINDOWED_DRAFT = tiny_config(None, 6, max_kv_cache_capacity=67, page_tokens=8, heads=(2, 16))


def create(deployment: kv.DeploymentConfig | None = None, **options: Any) -> kv.SharedResources:
    found = pair(base=WINDOWED, draft=WINDOWED_DRAFT) if deployment is None else deployment
    return kv.SharedResources.create_for_spec_decode(found, **options)


@pytest.mark.parametrize("mode", SPEC_MODES)
def test_every_planned_byte_is_allocated_and_given_back(mode: str) -> None:
    deployment = pair(mode)
    with create(deployment) as resources:
        assert resources.deployment is deployment
        assert tuple(plan.config for plan in resources.plans) == deployment.engine_configs()
        assert (resources.plan, resources.config) == (resources.plans[0], resources.plans[0].config)
        assert resources.device.memory.current_bytes == sum(plan.nbytes for plan in resources.plans)
        assert repr(resources).endswith(f"{resources.device.memory.current_bytes} bytes)")
        models = 1 if mode == "gemma4_mtp" else 2
        assert len(resources.cache_managers) == len(resources.kv_page_tables) == len(resources.swa_kv_page_tables) == models
    assert resources.device.memory.current_bytes == resources.device.pinned.current_bytes == 0


def test_windows_in_base_and_draft() -> None:
    with create() as resources:
        base, draft = resources.cache_managers
        assert [group.ring for group in base.plan.groups] == [0, 4]
        assert [group.ring for group in draft.plan.groups] == [0, 2]
        for index, manager in enumerate(resources.cache_managers):
            full, window = resources.kv_page_tables[index], resources.get_swa_kv_page_table(index)
            assert window is not None
            assert window is resources.swa_kv_page_tables[index]
            assert window is resources.get_swa_kv_page_table(index, (8, 6)[index])
            assert full.is_identity
            assert (window.tensor.to_host() == -1).all()
            for table, tensor in zip((full, window), manager.step_buffers.page_tables, strict=True):
                assert table.tensor.address == tensor.address
            for layer in range(2):
                assert not manager.kv(layer).to_host().astype(np.float32).any()
        assert base.kv(0).shape == (2, 34, 4, 1, 8)
        assert draft.kv(0).shape == (2, 2 * 9 + 2, 8, 2, 16)
        assert repr(resources.kv_page_tables[1]).startswith("KVPageTable('draft: page table of full attention'")
        with pytest.raises(InputError, match="window: 8 names 0 of sliding 6"):
            resources.get_swa_kv_page_table(1, 8)
        assert resources.get_swa_kv_page_table(2) is None


def test_several_windows_of_a_draft_must_be_named() -> None:
    draft = tiny_config(8, chunked(16), max_kv_cache_capacity=67)
    with create(pair(draft=draft)) as resources:
        tables = resources.swa_kv_page_tables[1]
        assert isinstance(tables, tuple)
        assert [resources.get_swa_kv_page_table(1, w) for w in (8, chunked(16))] == list(tables)
        with pytest.raises(InputError, match="window: the model has sliding 8, chunked 16"):
            resources.get_swa_kv_page_table(1)


def test_the_mode_of_each_model() -> None:
    """Each may keep its windows in another way; only the shape counts."""
    rings, rows, none = tiny_config(8), tiny_config(8, use_bounded_swa=False), tiny_config(None)
    shapes = {"rings": (1,), "rows": (0,), "none": None}
    models = {"rings": rings, "rows": rows, "none": none}
    for base, draft in (
        ("rings", "rings"),
        ("rings", "none"),
        ("rings", "rows"),
        ("none", "rings"),
        ("rows", "rings"),
        ("none", "none"),
    ):
        drafted = replace(models[draft], max_kv_cache_capacity=67)
        with create(pair(base=models[base], draft=drafted)) as resources:
            found = [resources.get_swa_kv_cache_mode(i) for i in range(2)]
            assert [None if mode is None else mode.shape for mode in found] == [shapes[base], shapes[draft]]
            assert resources.swa_kv_cache_mode is found[0]
            assert resources.device.memory.current_bytes == sum(plan.nbytes for plan in resources.plans)


def test_a_draft_without_a_cache_reads_that_of_the_base() -> None:
    with create(pair("gemma4_mtp", base=WINDOWED)) as resources:
        assert resources.get_caches(1) is resources.get_caches(0) is resources.cache_managers[0]
        assert resources.get_swa_kv_cache_mode(1) is resources.swa_kv_cache_mode
        assert resources.get_swa_kv_page_table(1) is None
        with pytest.raises(InputError, match="index: 1 is not one of the 1 models with a cache; the draft reads the base's KV"):
            resources.get_plan(1)
        with pytest.raises(InputError, match="the draft reads the base's KV"):
            kv.Batch(resources, index=1)
        kv.Batch(resources).audit()


def test_model_numbers() -> None:
    with create() as resources:
        assert [resources.get_plan(i) for i in range(2)] == list(resources.plans)
        assert [resources.get_caches(i) for i in range(2)] == resources.cache_managers
        for call in (resources.get_plan, resources.get_caches, resources.get_rope_tables, resources.get_swa_kv_cache_mode):
            for wrong in (-1, 2, True, "0", None):
                with pytest.raises(InputError, match=f"index: {wrong!r} is not"):
                    call(wrong)  # type: ignore[arg-type]
        for wrong in (-1, 2, True, "0"):
            with pytest.raises(InputError, match=f"index: {wrong!r} is not"):
                kv.Batch(resources, index=wrong)  # type: ignore[arg-type]
    for call in (resources.get_plan, resources.get_caches, resources.get_rope_tables, resources.get_swa_kv_cache_mode):
        with pytest.raises(StateError, match="closed"):
            call(0)


# -- what both share


def test_rotary_tables() -> None:
    same, other = rope(theta=1e4), rope(theta=1e6)
    for ropes, tables in (((same,), 1), ((other,), 2)):
        deployment = pair(base=replace(WINDOWED, ropes=(same,)), draft=replace(WINDOWED_DRAFT, ropes=ropes))
        with create(deployment) as resources:
            assert len(resources.rope_pool) == tables
            (mine,), (its,) = resources.get_rope_tables(), resources.get_rope_tables(1)
            assert resources.rope_tables == (mine,)
            assert (mine is its) == (tables == 1)
            assert its.tensor.shape == (1, 67, 8)
            assert resources.rope_pool.table(ropes[0], 67) is its


@pytest.mark.parametrize("mode", ["mtp", "gemma4_mtp"])
def test_rotary_rows_of_a_step(mode: str) -> None:
    """A draft reads its table by the positions of its own step, or of the base's where it has none."""
    ropes = (rope(theta=1e4),), (rope(theta=1e6),)
    base = tiny_config(None, ropes=ropes[0])
    draft = tiny_config(None, ropes=ropes[1], max_kv_cache_capacity=64 if mode == "gemma4_mtp" else 67)
    with create(pair(mode, base=base, draft=draft)) as resources:
        batches = [kv.Batch(resources)] if mode == "gemma4_mtp" else [kv.Batch(resources), kv.Batch(resources, index=1)]
        views = [batch.step({batch.admit(num_tokens=5): count}) for batch, count in zip(batches, (5, 3), strict=False)]
        for index in range(2):
            step_rope, view = kv.StepRope(resources, index=index), views[min(index, len(views) - 1)]
            (rows,) = step_rope.gather(view)
            (table,) = resources.get_rope_tables(index)
            assert np.array_equal(rows.to_host(), table.tensor.to_host()[0, : view.num_tokens])
            assert kv.StepRope(resources, index=index).rows[0].address == step_rope.rows[0].address
        with pytest.raises(InputError, match="index: 2 is not one of the 2 models"):
            kv.StepRope(resources, index=2)


def test_adapters_and_external_weights_are_the_base_s(tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    owner = {"max_lora_rank": 8, "lora_targets": (kv.LoRATarget(name=module, k=12, n=16),), "external_weights_nbytes": 1 << 12}
    deployment = pair(base=replace(WINDOWED, **owner), draft=replace(WINDOWED_DRAFT, **owner))
    folder = save_peft(tmp_path / "fr", peft(pairs(module)))
    with create(deployment, lora_weights_map={"fr": folder, "none": ""}) as resources:
        assert resources.lora_manager is not None
        assert list(resources.lora_manager.adapters) == ["fr"]
        assert resources.external_weight_manager is not None
        planned = sum(plan.nbytes for plan in resources.plans)
        assert resources.device.memory.current_bytes == planned
    with pytest.raises(ConfigError, match="lora_weights_map: fr given"):
        create(lora_weights_map={"fr": folder})


def test_the_zero_buffer() -> None:
    with create(pair(max_draft_tokens=101)) as resources:
        assert resources.zero_buffer.shape == (808,)
        assert not resources.zero_buffer.to_host().any()
        assert kv.allocate_zero_buffer(resources, 808) is resources.zero_buffer
    with create() as resources:
        assert resources.zero_buffer.shape == (256,)


def test_rows() -> None:
    with create(max_runtime_batch_size=1) as resources:
        for manager in resources.cache_managers:
            assert manager.lengths.to_host().tolist() == [0]
            assert manager.step_buffers.page_tables[0].shape[0] == 1


# -- construction as a whole


@pytest.mark.parametrize("mode", ["mtp", "gemma4_mtp"])
def test_a_failed_allocation_gives_everything_back(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    deployment = pair(mode, base=replace(WINDOWED, ropes=(rope(),)), draft=None if mode == "gemma4_mtp" else WINDOWED_DRAFT)
    number = 1
    while True:
        failing = FailingDevice(number, monkeypatch)
        try:
            resources = create(deployment)
        except CapacityError as error:
            assert "none is left" in str(error)  # noqa: PT017 - the loop ends where nothing fails
            assert failing.device.memory.current_bytes == 0
            assert failing.device.pinned.current_bytes == 0
            number += 1
        else:
            assert failing.calls == number - 1
            resources.close()
            assert failing.device.memory.current_bytes == 0
            break
    assert number > (15 if mode == "gemma4_mtp" else 40)


def test_a_wrong_adapter_gives_everything_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    never = FailingDevice(0, monkeypatch)
    owner = {"max_lora_rank": 8, "lora_targets": (kv.LoRATarget(name="m", k=12, n=16),)}
    with pytest.raises(kv.NumbaKVError):
        create(pair(base=replace(WINDOWED, **owner), draft=WINDOWED_DRAFT), lora_weights_map={"fr": str(tmp_path / "nowhere")})
    assert never.calls > 0
    assert never.device.memory.current_bytes == never.device.pinned.current_bytes == 0


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="deployment: LLMEngineConfig given, a DeploymentConfig is wanted"):
        create(WINDOWED)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"deployment: no draft.*create_for_llm\(deployment.base\)"):
        create(kv.DeploymentConfig(base=WINDOWED))
    with pytest.raises(ConfigError, match="max_runtime_batch_size: 3 is not in 1..2"):
        create(max_runtime_batch_size=3)
    with pytest.raises(PlanError, match="short"):
        create(memory_bytes=1000)
    with pytest.raises(TargetError, match="'tpu' is not one of"):
        create(target="tpu")


def test_a_budget() -> None:
    deployment = pair(base=WINDOWED, draft=WINDOWED_DRAFT)
    with create(deployment) as resources:
        whole = sum(plan.nbytes for plan in resources.plans)
    with create(deployment, memory_bytes=whole - 4096) as resources:
        assert resources.device.memory.current_bytes == sum(plan.nbytes for plan in resources.plans) <= whole - 4096
        assert not any(table.is_identity for table in resources.kv_page_tables)
        assert (resources.kv_page_tables[1].tensor.to_host() == -1).all()


def test_a_base_alone_is_a_deployment_too() -> None:
    with kv.SharedResources.create_for_llm(WINDOWED) as resources:
        assert resources.deployment == kv.DeploymentConfig(base=WINDOWED)
        assert resources.plans == (resources.plan,)
        assert resources.get_rope_tables() == resources.rope_tables
        with pytest.raises(InputError, match="index: 1 is not one of the 1 models$"):
            resources.get_caches(1)
        with pytest.raises(InputError, match="index: 1 is not one of the 1 models with a cache$"):
            kv.Batch(resources, index=1)
