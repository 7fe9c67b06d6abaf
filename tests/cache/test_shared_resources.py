"""SharedResources: its members, their first contents, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.config.engine import LLMEngineConfig
from numba_kv.errors import CapacityError, InputError, PlanError, StateError, TargetError
from numba_kv.geometry import Window
from tests.helpers.models import chunked, tiny_config

MIXED = tiny_config(None, 8)
SEVERAL = tiny_config(None, 8, chunked(16), 12)


def create(config: LLMEngineConfig = MIXED, **options: Any) -> kv.SharedResources:
    return kv.SharedResources.create_for_llm(config, **options)


def test_the_members(target: str) -> None:
    with create() as resources:
        assert resources.device.target == target
        assert resources.config is MIXED
        assert [m.num_layers for m in resources.cache_managers] == [2]
        assert len(resources.kv_page_tables) == len(resources.swa_kv_page_tables) == 1
        assert resources.stream is resources.device.stream
        assert repr(resources) == f"SharedResources(model, {target}, {resources.plan.nbytes} bytes)"
        assert resources.device.memory.current_bytes == resources.plan.nbytes
        assert resources.lora_manager is None  # the configuration takes no adapters


def test_the_full_table_starts_as_the_identity() -> None:
    with create() as resources:
        table, window = resources.kv_page_tables[0], resources.get_swa_kv_page_table(0)
        assert table.is_identity
        assert (table.mode, table.num_pages, table.max_pages_per_seq) == ("dense", 34, 16)
        found = table.tensor.to_host()
        assert found.shape == (2, 2, 64)
        assert found[:, 0, :16].tolist() == [list(range(16)), list(range(16, 32))]
        assert np.array_equal(found[:, 1, :16], found[:, 0, :16] + 34)
        assert (found[:, :, 16:] == -1).all()
        assert window is not None
        assert (window.mode, window.num_pages, window.is_identity) == ("sparse", 2 * 3 + 2, False)
        assert (window.tensor.to_host() == -1).all()
        manager = resources.cache_managers[0]
        assert table.tensor.address == manager.step_buffers.page_tables[0].address
        assert window.tensor.address == manager.step_buffers.page_tables[1].address


def test_a_pool_that_is_smaller_than_all_rows_starts_unmapped() -> None:
    with create(tiny_config(None, num_kv_pages=20)) as resources:
        assert not resources.kv_page_tables[0].is_identity
        assert (resources.kv_page_tables[0].tensor.to_host() == -1).all()


def test_pools_and_lengths_are_zero() -> None:
    with create() as resources:
        for layer in range(2):
            assert not resources.cache_managers[0].kv(layer).to_host().astype(np.float32).any()
        assert resources.cache_managers[0].lengths.to_host().tolist() == [0, 0]


def test_a_model_of_windows_alone_has_an_empty_full_table() -> None:
    with create(tiny_config(8, 8)) as resources:
        assert resources.kv_page_tables[0].num_pages == 2
        assert (resources.kv_page_tables[0].tensor.to_host() == -1).all()
        assert resources.get_swa_kv_page_table(0) is resources.swa_kv_page_tables[0]


# -- the window tables


def test_one_window() -> None:
    with create() as resources:
        table = resources.get_swa_kv_page_table(0)
        assert table is resources.swa_kv_page_tables[0]
        assert table is resources.get_swa_kv_page_table(0, 8) is resources.get_swa_kv_page_table(0, Window("sliding", 8))
        with pytest.raises(InputError, match="window: 9 names 0 of sliding 8"):
            resources.get_swa_kv_page_table(0, 9)


@pytest.mark.parametrize("index", [-1, 1, 100])
def test_an_index_out_of_range_gives_none(index: int) -> None:
    with create() as resources:
        assert resources.get_swa_kv_page_table(index) is None
        assert resources.get_swa_kv_page_table(index, 8) is None


def test_without_windows_there_is_no_table() -> None:
    with create(tiny_config(None)) as resources:
        assert resources.swa_kv_page_tables == [None]
        assert resources.get_swa_kv_page_table(0) is None
        with pytest.raises(InputError, match="window: 8 names 0 of no windows"):
            resources.get_swa_kv_page_table(0, 8)


def test_several_windows_must_be_named() -> None:
    with create(SEVERAL) as resources:
        tables = resources.swa_kv_page_tables[0]
        assert isinstance(tables, tuple)
        assert [resources.get_swa_kv_page_table(0, w) for w in (8, chunked(16), Window("sliding", 12))] == list(tables)
        with pytest.raises(InputError, match="window: the model has sliding 8, chunked 16, sliding 12; name one of them"):
            resources.get_swa_kv_page_table(0)
        assert resources.get_swa_kv_page_table(1) is None


def test_windows_of_equal_tokens_are_told_apart_by_kind() -> None:
    with create(tiny_config(16, chunked(16))) as resources:
        with pytest.raises(InputError, match="window: 16 names 2 of sliding 16, chunked 16"):
            resources.get_swa_kv_page_table(0, 16)
        assert resources.get_swa_kv_page_table(0, chunked(16)) is not None


def test_the_mode_tensor() -> None:
    with create() as resources:
        assert resources.swa_kv_cache_mode is not None
        assert (resources.swa_kv_cache_mode.shape, str(resources.swa_kv_cache_mode.dtype)) == ((1,), "int8")
    with create(tiny_config(None, 8, use_bounded_swa=False)) as resources:
        assert resources.swa_kv_cache_mode is not None
        assert resources.swa_kv_cache_mode.shape == (0,)
        assert resources.swa_kv_page_tables == [None]
    with create(tiny_config(None)) as resources:
        assert resources.swa_kv_cache_mode is None


# -- the zero buffer


def test_the_zero_buffer_grows_and_keeps_the_old_address_valid() -> None:
    resources = create()
    old = resources.zero_buffer
    assert (old.shape, str(old.dtype)) == ((256,), "uint8")
    assert kv.allocate_zero_buffer(resources, 256) is old
    assert kv.allocate_zero_buffer(resources, 1) is old
    new = kv.allocate_zero_buffer(resources, 1000)
    assert new is resources.zero_buffer
    assert new.nbytes == 1024
    assert new.address != old.address
    assert not old.to_host().any()
    assert not new.to_host().any()
    assert kv.allocate_zero_buffer(resources, 1024, resources.stream) is new
    assert resources.device.memory.current_bytes == resources.plan.nbytes + 1024
    resources.close()
    assert resources.device.memory.current_bytes == 0
    for buffer in (old, new):
        with pytest.raises(StateError, match="given back"):
            buffer.to_host()


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True, "256", None])
def test_impossible_zero_buffers_are_refused(nbytes: int) -> None:
    with create() as resources:
        with pytest.raises(InputError, match="nbytes: .* is not a positive number of bytes"):
            kv.allocate_zero_buffer(resources, nbytes)
        assert resources.zero_buffer.nbytes == 256


def test_a_zero_buffer_that_does_not_fit_changes_nothing() -> None:
    with create() as resources:
        old, held = resources.zero_buffer, resources.device.memory.current_bytes
        with pytest.raises(CapacityError):
            kv.allocate_zero_buffer(resources, 1 << 62)
        assert resources.zero_buffer is old
        assert resources.device.memory.current_bytes == held


# -- what is refused


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="config: dict given; load_engine_config makes an LLMEngineConfig"):
        create({})  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="'tpu' is not one of"):
        create(target="tpu")
    with pytest.raises(InputError, match="is not a device number"):
        create(device=-1)
    with pytest.raises(PlanError, match="short"):
        create(memory_bytes=1000)
