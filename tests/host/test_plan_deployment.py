"""Plans of a base and its draft: rings, shared tables, one budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from numba_kv.config import DeploymentConfig, RopeConfig
from numba_kv.config.rope_layout import RopeLayout
from numba_kv.config.spec_decode import SPEC_MODES
from numba_kv.errors import ConfigError, InputError, PlanError
from numba_kv.geometry import Window, ring_pages
from numba_kv.plan import plan_memory
from numba_kv.plan_deployment import DeploymentPlan, plan_deployment
from tests.helpers.deployments import pair
from tests.helpers.models import tiny_config
from tests.helpers.ropes import rope

WINDOWED = tiny_config(None, 32, max_kv_cache_capacity=256, max_batch_tokens=256)
WINDOWED_DRAFT = tiny_config(16, max_kv_cache_capacity=300, max_batch_tokens=256)


def regions(plan: DeploymentPlan) -> dict[str, int]:
    """Return the bytes of every region of all models by its name; draft regions are marked."""
    marks = ("", "draft ")
    return {marks[place] + r.name: r.nbytes for place, model in enumerate(plan.models) for r in model.regions}


@pytest.mark.parametrize("mode", SPEC_MODES)
def test_each_model_is_planned_for_what_the_deployment_says(mode: str) -> None:
    deployment = pair(mode)
    plan = plan_deployment(deployment)
    assert plan.deployment is deployment
    assert tuple(model.config for model in plan.models) == deployment.engine_configs()
    assert plan.nbytes == sum(regions(plan).values())
    assert len(regions(plan)) == sum(len(model.regions) for model in plan.models)  # no name twice in one model
    for model in plan.models:
        alone = plan_memory(model.config)
        assert model.groups == alone.groups
        own = [r for r in alone.regions if r.name not in ("zero_buffer", "swa_kv_cache_mode")]
        assert list(model.regions[: len(own)]) == own


@pytest.mark.parametrize("steps", [1, 3, 8, 12])
def test_rings_hold_a_round(steps: int) -> None:
    """R is that of a step of the round's tokens: 9 for 8 proposals, in base and draft."""
    plan = plan_deployment(pair(steps=steps, base=WINDOWED, draft=WINDOWED_DRAFT))
    for model, tokens in zip(plan.models, (32, 16), strict=True):
        (group,) = model.groups[1:]
        assert group.ring == ring_pages(Window("sliding", tokens), 4, steps + 1, model.config.max_kv_cache_capacity)
        assert group.ring > ring_pages(Window("sliding", tokens), 4, 1, 256) or steps == 1


def test_what_both_share_is_counted_once() -> None:
    deployment = pair(
        base=replace(WINDOWED, external_weights_nbytes=1000), draft=replace(WINDOWED_DRAFT, external_weights_nbytes=9)
    )
    found = regions(plan_deployment(deployment))
    assert found["zero_buffer"] == 256
    assert found["swa_kv_cache_mode"] == 256
    assert found["external_weights"] == 1024
    assert not {"draft zero_buffer", "draft swa_kv_cache_mode", "draft external_weights"} & found.keys()
    only_draft = regions(plan_deployment(pair(base=tiny_config(None), draft=tiny_config(8, max_kv_cache_capacity=67))))
    assert only_draft["swa_kv_cache_mode"] == 256
    neither = regions(plan_deployment(pair(base=tiny_config(None), draft=tiny_config(None, max_kv_cache_capacity=67))))
    assert "swa_kv_cache_mode" not in neither
    large = plan_deployment(pair(max_draft_tokens=101))
    assert large.models[0].region("zero_buffer").shape == (808,)
    assert large.models[0].region("zero_buffer").nbytes == 1024


# -- rotary tables


def layouts(base: tuple[RopeConfig, ...], draft: tuple[RopeConfig, ...], **numbers: Any) -> tuple[tuple[RopeLayout, ...], ...]:
    plan = plan_deployment(
        pair(base=tiny_config(None, ropes=base), draft=tiny_config(None, ropes=draft, max_kv_cache_capacity=67), **numbers)
    )
    names = [r.name for r in plan.models[0].regions if r.name.startswith("rope.")]
    assert len(names) == len({layout for model in plan.ropes for layout in model})
    assert not any(r.name.startswith("rope.") for r in plan.models[1].regions)
    return plan.ropes


PLAIN = rope(theta=1e4, dim=8, positions=64)


def test_an_equal_rotation_is_one_table_as_long_as_the_longer_rows() -> None:
    ((mine,), (its,)) = layouts((PLAIN,), (PLAIN,))
    assert mine == its == RopeLayout(config=PLAIN, length=67)


def test_other_rotations_have_tables_of_their_own() -> None:
    other = rope(theta=1e6, dim=8, positions=64)
    assert layouts((PLAIN,), (other,)) == (
        (RopeLayout(config=PLAIN, length=64),),
        (RopeLayout(config=other, length=67),),
    )
    assert layouts((PLAIN, other), (other,)) == (
        (RopeLayout(config=PLAIN, length=64), RopeLayout(config=other, length=67)),
        (RopeLayout(config=other, length=67),),
    )
    assert layouts((), (PLAIN,)) == ((), (RopeLayout(config=PLAIN, length=67),))
    assert layouts((PLAIN,), ()) == ((RopeLayout(config=PLAIN, length=64),), ())


def test_a_rotation_that_depends_on_the_length_is_not_stretched() -> None:
    """Dynamic scaling turns sequences beyond the model's positions (64) in another way: the base has none."""
    dynamic = RopeConfig(rope_type="dynamic", theta=1e4, rotary_dim=8, max_position_embeddings=64, parameters={"factor": 2.0})
    assert layouts((dynamic,), (dynamic,)) == (
        (RopeLayout(config=dynamic, length=64),),
        (RopeLayout(config=dynamic, length=67),),
    )
    longer = replace(dynamic, max_position_embeddings=128)
    ((mine,), (its,)) = layouts((longer,), (longer,))
    assert mine == its == RopeLayout(config=longer, length=67)


def test_a_multimodal_table_is_one_for_both() -> None:
    """The draft's file may state other positions: what the base rotates by is what counts."""
    axes = RopeConfig(
        rope_type="mrope", theta=1e4, rotary_dim=8, max_position_embeddings=64, parameters={"mrope_section": [2, 1, 1]}
    )
    ((mine,), (its,)) = layouts((axes,), (replace(axes, max_position_embeddings=32),))
    assert mine == its == RopeLayout(config=axes, length=67, num_rows=2)


def test_a_draft_without_a_cache_rotates_as_far_as_the_base() -> None:
    other = rope(theta=1e6, dim=8, positions=64)
    base = tiny_config(None, ropes=(PLAIN,))
    for ropes in ((PLAIN,), (other,)):
        plan = plan_deployment(pair("gemma4_mtp", base=base, draft=replace(base, ropes=ropes)))
        assert plan.ropes == ((RopeLayout(config=PLAIN, length=64),), (RopeLayout(config=ropes[0], length=64),))
        assert sum(r.name.startswith("rope.") for r in plan.models[0].regions) == len({PLAIN, ropes[0]})


# -- budgets


def sequences(plan: DeploymentPlan) -> list[float]:
    """Return how many rows of full length each pool holds."""
    return [model.groups[0].usable_pages / model.groups[0].row_pages for model in plan.models]


BIG = tiny_config(None, None, heads=(4, 64), max_batch_size=6, max_kv_cache_capacity=256, max_batch_tokens=256)
BIG_DRAFT = tiny_config(None, heads=(4, 64), max_batch_size=6, max_kv_cache_capacity=320, page_tokens=16, max_batch_tokens=256)


def test_a_budget_is_shared_so_that_both_hold_as_many_sequences() -> None:
    deployment = pair(base=BIG, draft=BIG_DRAFT)
    whole = plan_deployment(deployment)
    assert plan_deployment(deployment, memory_bytes=whole.nbytes) == whole
    assert plan_deployment(deployment, memory_bytes=whole.nbytes + 10**9) == whole
    last = [0.0, 0.0]
    for part in (0.3, 0.5, 0.7, 0.9):
        budget = int(whole.nbytes * part)
        plan = plan_deployment(deployment, memory_bytes=budget)
        held = sequences(plan)
        assert plan.nbytes <= budget
        assert abs(held[0] - held[1]) <= 1 / 20 + 1 / 64  # pages of a draft's row, of a base's row
        assert all(now >= before for now, before in zip(held, last, strict=True))
        last = held
        more = [replace(m.config, num_kv_pages=m.groups[0].usable_pages + 2) for m in plan.models]
        assert sum(plan_memory(config).nbytes for config in more) > budget  # no two pages more would have fitted
    assert last[0] > 5


def test_stated_pages_are_kept() -> None:
    deployment = pair(base=replace(BIG, num_kv_pages=100), draft=BIG_DRAFT)
    whole = plan_deployment(deployment)
    plan = plan_deployment(deployment, memory_bytes=whole.nbytes - 100_000)
    assert [m.groups[0].usable_pages for m in plan.models] == [100, plan.models[1].groups[0].usable_pages]
    assert plan.models[1].groups[0].usable_pages < whole.models[1].groups[0].usable_pages


def test_a_budget_that_is_too_small_says_what_is_missing() -> None:
    deployment = pair(base=BIG, draft=BIG_DRAFT)
    with pytest.raises(
        PlanError, match=r"memory: 1000 bytes are given and \d+ needed, .* short \(base \d+, draft \d+\)"
    ) as caught:
        plan_deployment(deployment, memory_bytes=1000)
    needed = caught.value.needed_bytes
    assert caught.value.shortfall_bytes == needed - 1000
    assert sequences(plan_deployment(deployment, memory_bytes=needed)) == [1, 1]
    with pytest.raises(PlanError):
        plan_deployment(deployment, memory_bytes=needed - 1)


def test_fewer_rows() -> None:
    deployment = pair(base=BIG, draft=BIG_DRAFT)
    plan = plan_deployment(deployment, 2)
    assert [m.config.max_batch_size for m in plan.models] == [2, 2]
    assert sequences(plan) == [2, 2]


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="deployment: LLMEngineConfig is not a DeploymentConfig"):
        plan_deployment(BIG)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_runtime_batch_size: 7 is not in 1..6"):
        plan_deployment(pair(base=BIG, draft=BIG_DRAFT), 7)
    with pytest.raises(PlanError, match="memory_bytes: 0"):
        plan_deployment(pair(), memory_bytes=0)


def test_a_base_alone_is_planned_as_ever() -> None:
    (plan,) = plan_deployment(DeploymentConfig(base=BIG)).models
    assert plan == plan_memory(BIG)
