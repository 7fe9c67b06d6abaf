"""Deployment and budget -> memory plans: every byte of a base and its draft, before any is allocated.

Knows what the two models share: one budget, rotary tables of equal rotations, one zero buffer. Does not know devices.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from numba_kv.config.deployment import DeploymentConfig
from numba_kv.config.engine import LLMEngineConfig
from numba_kv.config.rope_frequencies import keys_stay_valid
from numba_kv.config.rope_layout import RopeLayout, engine_layouts
from numba_kv.errors import InputError, PlanError
from numba_kv.geometry import MAX_POOL_PAGES, RESERVED_PAGES, ceil_div, round_up
from numba_kv.plan import ALIGNMENT, MemoryPlan, Region, check_budget, plan_memory

__all__ = ["DeploymentPlan", "plan_deployment"]

#: Regions that there is one of for all models.
_SHARED_REGIONS = ("zero_buffer", "swa_kv_cache_mode")


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """Every byte of device memory that the models of a deployment take.

    Attributes
    ----------
    deployment : DeploymentConfig
        What was planned for.
    models : tuple of MemoryPlan
        Base, and draft if it has a cache of its own. Rotary tables, zero buffer and mode are counted in the base's.
    ropes : tuple of tuple of RopeLayout
        Rotary tables of the base and, if there is one, of the draft. Equal ones are one table.
    """

    deployment: DeploymentConfig
    models: tuple[MemoryPlan, ...]
    ropes: tuple[tuple[RopeLayout, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all regions of all models."""
        return sum(plan.nbytes for plan in self.models)


def plan_deployment(
    deployment: DeploymentConfig, max_runtime_batch_size: int | None = None, memory_bytes: int | None = None
) -> DeploymentPlan:
    """Plan the caches of a deployment.

    Parameters
    ----------
    deployment : DeploymentConfig
        The models.
    max_runtime_batch_size : int, optional
        Rows; see `DeploymentConfig.check_batch_size`.
    memory_bytes : int, optional
        Budget for everything. Pools whose pages are not stated share what it leaves, so that they hold as many sequences each,
        at most every row at full length.

    Raises
    ------
    ConfigError
        If the number of rows is wrong.
    PlanError
        If the budget does not hold the plan, or not even one sequence of full capacity; carries the shortfall.
    """
    if not isinstance(deployment, DeploymentConfig):
        raise InputError(f"deployment: {type(deployment).__name__} is not a DeploymentConfig")
    budget = None if memory_bytes is None else check_budget(memory_bytes)
    configs = deployment.engine_configs(max_runtime_batch_size)
    ropes = _rope_layouts(deployment, configs)
    if budget is None:
        return _build(deployment, configs, ropes)
    # A share of `steps` is one sequence. Bytes never fall as the share grows.
    steps, rows = max(_row_pages(config) for config in configs), configs[0].max_batch_size
    least = _build(deployment, _share(configs, steps, steps), ropes)
    if least.nbytes > budget:
        raise PlanError(
            f"memory: {budget} bytes are given and {least.nbytes} needed, {least.nbytes - budget} short "
            f"({_listed(least)}); lower max_runtime_batch_size ({rows}) or the capacities, or take a smaller kv_cache_dtype",
            needed_bytes=least.nbytes,
            budget_bytes=budget,
        )
    more = range(steps + 1, steps * rows + 1)
    fitting = bisect_right(more, budget, key=lambda part: _build(deployment, _share(configs, part, steps), ropes).nbytes)
    return _build(deployment, _share(configs, steps + fitting, steps), ropes)


def _listed(plan: DeploymentPlan) -> str:
    names = ("base", "draft")
    return ", ".join(f"{name} {model.nbytes}" for name, model in zip(names, plan.models, strict=False))


def _row_pages(config: LLMEngineConfig) -> int:
    return ceil_div(config.max_kv_cache_capacity, config.page_tokens)


def _share(configs: tuple[LLMEngineConfig, ...], part: int, steps: int) -> tuple[LLMEngineConfig, ...]:
    """Return `configs` with pools of ``part / steps`` sequences where pages are not stated."""
    found = []
    for config in configs:
        row = _row_pages(config)
        pages = min(ceil_div(part * row, steps), MAX_POOL_PAGES - RESERVED_PAGES)
        is_part = config.num_kv_pages is None and pages < config.max_batch_size * row
        found.append(replace(config, num_kv_pages=pages) if is_part else config)
    return tuple(found)


def _rope_layouts(deployment: DeploymentConfig, configs: tuple[LLMEngineConfig, ...]) -> tuple[tuple[RopeLayout, ...], ...]:
    """Return the tables of base and draft; those that rotate alike get one length, so that they are one table."""
    base, draft = list(engine_layouts(configs[0])), deployment.draft
    if draft is None:
        return (tuple(base),)
    # Rows and capacity are those of the draft, or of the base whose KV it reads.
    drafted = list(engine_layouts(replace(configs[-1], ropes=deployment.draft_ropes())))
    for place, mine in enumerate(drafted):
        for other, its in enumerate(base):
            short, long = sorted((mine.length, its.length))
            if replace(mine, length=its.length) == its and keys_stay_valid(its.config, short, long):
                drafted[place] = base[other] = replace(its, length=long)
    return tuple(base), tuple(drafted)


def _build(
    deployment: DeploymentConfig, configs: tuple[LLMEngineConfig, ...], ropes: tuple[tuple[RopeLayout, ...], ...]
) -> DeploymentPlan:
    has_windows = any(config.has_window_layers for config in configs)
    models = []
    for config in configs:
        plan = plan_memory(config)
        own = [r for r in plan.regions if r.name not in _SHARED_REGIONS and not r.name.startswith("rope.")]
        models.append(replace(plan, regions=tuple(own)))
    shared = [
        Region(f"rope.{place}", layout.shape, "float32", layout.nbytes)
        for place, layout in enumerate(dict.fromkeys(layout for layouts in ropes for layout in layouts))
    ]
    zeros = deployment.zero_buffer_nbytes(configs[0].max_batch_size)
    shared.append(Region("zero_buffer", (zeros,), "uint8", round_up(zeros, ALIGNMENT)))
    if has_windows:
        shared.append(Region("swa_kv_cache_mode", (1,), "int8", ALIGNMENT))
    models[0] = replace(models[0], regions=(*models[0].regions, *shared))
    return DeploymentPlan(deployment, tuple(models), ropes)
