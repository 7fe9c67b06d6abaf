"""Plans: what is counted is what is allocated, budgets are exact, limits are kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from numba_kv.config.engine import LLMEngineConfig
from numba_kv.dtypes import KV_CACHE_DTYPES, dtype
from numba_kv.errors import PlanError
from numba_kv.geometry import FULL, MAX_POOL_PAGES, PAGE_TOKENS, RESERVED_PAGES, Window, table_pages
from numba_kv.plan import ALIGNMENT, MemoryPlan, plan_memory
from numba_kv.shared_resources import SharedResources
from tests.helpers.models import chunked, tiny_config

MODELS = {
    "full": tiny_config(None, None),
    "sliding alone": tiny_config(8, 8),
    "window of 1": tiny_config(None, 1),
    "several windows": tiny_config(None, 8, chunked(16), 12, 8),
    "heterogeneous": tiny_config(None, 8, None, 8, heads=[(4, 64), (2, 128), (1, 16), (2, 64)]),
    "donors": tiny_config(None, 8, None, 8, heads=[(2, 8), (1, 8), (2, 8), (1, 8)], donors={2: 0, 3: 1}),
    "few pages": tiny_config(None, 8, num_kv_pages=16),
    "full mode": tiny_config(None, 8, use_bounded_swa=False),
    "deep stack": tiny_config(None, hidden_size=512, num_deepstack_features=3),
    "odd sizes": tiny_config(None, 7, heads=(3, 5), max_batch_size=3, max_kv_cache_capacity=37, kv_cache_dtype="fp8"),
    "long steps": tiny_config(None, 8, max_step_tokens=16, page_tokens=16),
}


@pytest.mark.parametrize("name", MODELS)
def test_planned_bytes_are_the_allocated_ones(name: str) -> None:
    plan = plan_memory(MODELS[name])
    with SharedResources.create_for_llm(MODELS[name], target="cpu") as resources:
        assert resources.device.memory.current_bytes == plan.nbytes
        assert resources.plan == plan


@pytest.mark.parametrize("name", MODELS)
def test_regions_hold_what_they_are_for(name: str) -> None:
    plan = plan_memory(MODELS[name])
    assert len({region.name for region in plan.regions}) == len(plan.regions)
    assert plan.pool_nbytes == sum(r.nbytes for r in plan.regions if r.name.startswith("kv."))
    for region in plan.regions:
        assert region.nbytes % ALIGNMENT == 0
        assert region.nbytes >= np.prod(region.shape) * dtype(region.dtype).itemsize
        assert plan.region(region.name) is region
    with pytest.raises(KeyError):
        plan.region("nothing")


@pytest.mark.parametrize("name", MODELS)
def test_each_layer_is_in_one_group_and_each_owner_in_one_slab(name: str) -> None:
    config = MODELS[name]
    plan = plan_memory(config)
    assert sorted(layer for g in plan.groups for layer in g.layers) == list(range(len(config.layers)))
    stored = sorted(layer for g in plan.groups for s in g.slabs for layer in s.layers)
    assert stored == [i for i, layer in enumerate(config.layers) if layer.owns_kv]
    assert plan.groups[0].window is FULL
    assert [g.index for g in plan.groups] == list(range(len(plan.groups)))
    for group in plan.groups:
        assert group.num_pages == group.usable_pages + RESERVED_PAGES
        assert (group.null_page, group.trash_page) == (group.num_pages - 2, group.num_pages - 1)
        assert group.table_width == table_pages(config.max_kv_cache_capacity, config.page_tokens)
        for slab in group.slabs:
            shape = (len(slab.layers), 2, group.num_pages, config.page_tokens, slab.num_kv_heads, slab.head_dim)
            assert slab.shape == shape
            assert slab.layer_nbytes % ALIGNMENT == 0
            dense = np.prod(slab.shape[1:]) * dtype(config.kv_cache_dtype).itemsize
            assert 0 <= slab.layer_nbytes - dense < ALIGNMENT
            for layer in slab.layers:
                assert (config.layers[layer].num_kv_heads, config.layers[layer].head_dim) == shape[-2:]


def test_groups_come_full_first_and_then_in_model_order() -> None:
    plan = plan_memory(MODELS["several windows"])
    assert [g.window for g in plan.groups] == [FULL, Window("sliding", 8), chunked(16), Window("sliding", 12)]
    assert [g.layers for g in plan.groups] == [(0,), (1, 4), (2,), (3,)]
    assert [g.ring for g in plan.groups] == [0, 3, 4, 4]
    assert [g.usable_pages for g in plan.groups] == [32, 6, 8, 8]


def test_heterogeneous_layers_are_stored_by_their_own_size() -> None:
    full, sliding = plan_memory(MODELS["heterogeneous"]).groups
    assert [(s.layers, s.num_kv_heads, s.head_dim) for s in full.slabs] == [((0,), 4, 64), ((2,), 1, 16)]
    assert [(s.layers, s.num_kv_heads, s.head_dim) for s in sliding.slabs] == [((1,), 2, 128), ((3,), 2, 64)]
    assert full.page_nbytes == 2 * 4 * (4 * 64 + 1 * 16) * 2
    assert sliding.page_nbytes == 2 * 4 * (2 * 128 + 2 * 64) * 2


def test_borrowing_layers_take_no_memory() -> None:
    alone = plan_memory(tiny_config(None, 8, heads=[(2, 8), (1, 8)]))
    shared = plan_memory(MODELS["donors"])
    assert shared.pool_nbytes == alone.pool_nbytes
    assert [g.layers for g in shared.groups] == [(0, 2), (1, 3)]
    assert [s.layers for g in shared.groups for s in g.slabs] == [(0,), (1,)]


def test_the_full_group_is_empty_without_full_layers() -> None:
    plan = plan_memory(MODELS["sliding alone"])
    full = plan.groups[0]
    assert full.is_empty
    assert (full.usable_pages, full.num_pages, full.slabs, full.nbytes) == (0, RESERVED_PAGES, (), 0)
    assert (plan.max_sequences, plan.max_tokens) == (2, 128)


def test_full_mode_gives_window_layers_full_rows() -> None:
    plan = plan_memory(MODELS["full mode"])
    assert [g.window for g in plan.groups] == [FULL]
    assert plan.groups[0].layers == (0, 1)
    assert plan.region("swa_kv_cache_mode").shape == (1,)


def test_what_fits() -> None:
    plan = plan_memory(MODELS["few pages"])
    assert (plan.groups[0].usable_pages, plan.max_sequences, plan.max_tokens) == (16, 1, 64)
    assert plan_memory(MODELS["full"]).max_sequences == 2
    assert plan_memory(MODELS["full"]).max_tokens == 128


@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
@pytest.mark.parametrize("page", PAGE_TOKENS)
def test_page_sizes_and_element_types(page: int, kind: str) -> None:
    plan = plan_memory(tiny_config(None, 8, page_tokens=page, kv_cache_dtype=kind))
    for group in plan.groups:
        assert group.page_nbytes == 2 * page * 8 * dtype(kind).itemsize
        assert group.nbytes == sum(s.nbytes for s in group.slabs) >= group.num_pages * group.page_nbytes


def test_the_zero_buffer_of_deep_stack_models() -> None:
    assert plan_memory(MODELS["deep stack"]).region("zero_buffer").nbytes == 2 * 512 * 2
    assert plan_memory(MODELS["full"]).region("zero_buffer").nbytes == 256


# -- budgets


def least(config: LLMEngineConfig) -> MemoryPlan:
    """Return the plan that holds one full sequence and no more."""
    row = plan_memory(config).groups[0].row_pages
    return replace(plan_memory(replace(config, num_kv_pages=row)), config=config)


BUDGETED = tiny_config(None, 8, None, heads=[(3, 5), (2, 8), (1, 1)], max_batch_size=4, kv_cache_dtype="fp8")


def test_a_budget_that_holds_everything_changes_nothing() -> None:
    everything = plan_memory(BUDGETED)
    assert plan_memory(BUDGETED, everything.nbytes) == everything
    assert plan_memory(BUDGETED, 10 * everything.nbytes) == everything
    assert plan_memory(BUDGETED, np.int64(everything.nbytes)) == everything


def test_one_byte_less_costs_at_least_a_page() -> None:
    everything = plan_memory(BUDGETED)
    smaller = plan_memory(BUDGETED, everything.nbytes - 1)
    assert smaller.groups[0].usable_pages < everything.groups[0].usable_pages
    assert smaller.nbytes < everything.nbytes


def test_one_sequence_must_fit() -> None:
    smallest = least(BUDGETED)
    assert plan_memory(BUDGETED, smallest.nbytes).nbytes <= smallest.nbytes
    assert plan_memory(BUDGETED, smallest.nbytes).max_sequences >= 1
    with pytest.raises(PlanError, match="1 short") as caught:
        plan_memory(BUDGETED, smallest.nbytes - 1)
    assert caught.value.needed_bytes == smallest.nbytes
    assert caught.value.budget_bytes == smallest.nbytes - 1
    assert caught.value.shortfall_bytes == 1


def test_a_stated_pool_is_not_made_smaller() -> None:
    config = replace(BUDGETED, num_kv_pages=40)
    plan = plan_memory(config)
    assert plan_memory(config, plan.nbytes) == plan
    with pytest.raises(PlanError, match="window rings of 4 rows"):
        plan_memory(config, plan.nbytes - 1)


def test_rings_that_do_not_fit_name_what_to_lower() -> None:
    config = tiny_config(8, max_batch_size=8)
    needed = plan_memory(config).nbytes
    with pytest.raises(PlanError, match=r"lower max_batch_size \(8\), max_kv_cache_capacity \(64\) or max_step_tokens \(1\)"):
        plan_memory(config, needed - 1)


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "24GiB"])
def test_impossible_budgets_are_refused(budget: object) -> None:
    with pytest.raises(PlanError, match="is not a positive number of bytes"):
        plan_memory(BUDGETED, budget)  # type: ignore[arg-type]


def test_pages_that_cannot_hold_one_sequence_are_refused() -> None:
    with pytest.raises(PlanError, match="num_kv_pages: 15 pages of 4 tokens do not hold one sequence"):
        plan_memory(tiny_config(None, num_kv_pages=15))
    assert plan_memory(tiny_config(None, num_kv_pages=16)).groups[0].usable_pages == 16


models = st.builds(
    tiny_config,
    st.sampled_from([None, 8, chunked(8)]),
    st.sampled_from([None, 5, chunked(16)]),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 40)),
    max_batch_size=st.integers(1, 6),
    max_kv_cache_capacity=st.integers(16, 300),
    page_tokens=st.sampled_from([1, 4, 16, 64]),
    kv_cache_dtype=st.sampled_from(KV_CACHE_DTYPES),
    max_step_tokens=st.integers(1, 8),
)


@settings(max_examples=30)
@given(config=models, shares=st.lists(st.integers(0, 1000), min_size=2, max_size=2))
def test_more_memory_never_fits_less(config: LLMEngineConfig, shares: list[int]) -> None:
    smallest, everything = least(config).nbytes, plan_memory(config).nbytes
    low, high = sorted(smallest + (everything - smallest) * share // 1000 for share in shares)
    small, large = plan_memory(config, low), plan_memory(config, high)
    assert small.nbytes <= low
    assert large.nbytes <= high
    assert small.max_tokens <= large.max_tokens
    assert small.groups[0].usable_pages <= large.groups[0].usable_pages
    pages = small.groups[0].usable_pages
    if not small.groups[0].is_empty and pages < plan_memory(config).groups[0].usable_pages:
        assert plan_memory(replace(config, num_kv_pages=pages + 1)).nbytes > low, "one page more would have fitted"


@settings(max_examples=30)
@given(config=models, more=st.sampled_from(["max_batch_size", "max_kv_cache_capacity", "max_step_tokens", "max_batch_tokens"]))
def test_larger_limits_never_take_less(config: LLMEngineConfig, more: str) -> None:
    larger = replace(config, **{more: getattr(config, more) + 1})
    assert plan_memory(larger).nbytes >= plan_memory(config).nbytes


# -- limits of int32


def huge(rows: int, tokens: int, *windows: int | None) -> LLMEngineConfig:
    return tiny_config(
        *windows,
        heads=(1, 1),
        max_batch_size=rows,
        max_batch_tokens=rows,
        max_kv_cache_capacity=tokens,
        page_tokens=1,
    )


def test_the_largest_pool() -> None:
    tokens = (MAX_POOL_PAGES - RESERVED_PAGES) // 1024
    assert plan_memory(huge(1024, tokens, None)).groups[0].num_pages <= MAX_POOL_PAGES


@pytest.mark.parametrize(("rows", "tokens", "window"), [(1024, 2**21, None), (2**20, 2**20, 1024)])
def test_a_pool_whose_ids_do_not_fit_int32_is_refused(rows: int, tokens: int, window: int | None) -> None:
    with pytest.raises(PlanError, match=f"at most {MAX_POOL_PAGES}"):
        plan_memory(huge(rows, tokens, window))


def test_a_budget_keeps_the_ids_of_a_full_pool_in_int32() -> None:
    config = huge(1024, 2**21, None)
    smaller = plan_memory(config, 10**11)
    assert smaller.nbytes <= 10**11
    assert 2**21 <= smaller.groups[0].usable_pages < MAX_POOL_PAGES
    assert plan_memory(config, 10**15).groups[0].num_pages == MAX_POOL_PAGES


def test_num_kv_pages_counts_usable_pages() -> None:
    config = replace(huge(1, 16, None), num_kv_pages=MAX_POOL_PAGES)
    with pytest.raises(PlanError, match=f"{MAX_POOL_PAGES + RESERVED_PAGES} pages"):
        plan_memory(config)
    assert plan_memory(replace(config, num_kv_pages=MAX_POOL_PAGES - RESERVED_PAGES)).groups[0].num_pages == MAX_POOL_PAGES
