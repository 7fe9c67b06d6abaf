"""The KV pools: shapes, where V lies, who shares, and that nothing is lost beyond 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from numba_kv.cache import HybridCacheManager, KVCacheManager
from numba_kv.config.engine import LLMEngineConfig
from numba_kv.device import Device, Memory, create_device
from numba_kv.dtypes import KV_CACHE_DTYPES, dtype
from numba_kv.errors import CapacityError, InputError, StateError
from numba_kv.geometry import FULL, PAGE_TOKENS, Window
from numba_kv.plan import plan_memory
from tests.helpers.models import tiny_config

Make = Callable[[LLMEngineConfig], KVCacheManager]


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.fixture
def make(device: Device) -> Iterator[Make]:
    """Build managers; their memory is given back when the test ends."""
    taken: list[Memory] = []

    def take(name: str, nbytes: int) -> Memory:
        taken.append(device.allocate(nbytes))
        return taken[-1]

    yield lambda config: KVCacheManager(device, plan_memory(config), take)
    for memory in taken:
        memory.close(device.stream)


def test_layers_of_different_heads(make: Make) -> None:
    config = tiny_config(None, None, heads=[(4, 64), (2, 128)], max_kv_cache_capacity=200, page_tokens=128)
    manager = make(config)
    assert [manager.kv(i).shape for i in range(2)] == [(2, 6, 128, 4, 64), (2, 6, 128, 2, 128)]  # 4 pages and 2 reserved
    for layer in range(2):
        pool, storage = manager.kv(layer), manager.storage(layer)
        elements = storage.num_pages * 128 * storage.num_kv_heads * storage.head_dim
        assert pool.is_contiguous
        assert manager.k(layer).address == pool.address
        assert manager.v(layer).address == pool.address + 2 * elements
        assert manager.k(layer).strides == manager.v(layer).strides
        assert manager.v(layer).shape == pool.shape[1:]
        assert (storage.group, storage.window, storage.logical_pages, storage.owner) == (0, FULL, 2, layer)
    assert not manager.is_uniform
    assert (manager.num_layers, manager.nbytes) == (2, manager.plan.pool_nbytes)
    assert make(tiny_config(None, 8)).is_uniform


def test_window_layers_have_pools_of_their_own_size(make: Make) -> None:
    config = tiny_config(None, 129, page_tokens=128, max_kv_cache_capacity=8192, max_batch_tokens=8192)
    manager = make(config)
    assert [manager.storage(i).num_pages for i in range(2)] == [2 * 64 + 2, 2 * 2 + 2]
    assert [manager.storage(i).logical_pages for i in range(2)] == [64, 64]  # windows keep absolute positions
    assert manager.storage(1).window == Window("sliding", 129)
    assert [manager.kv(i).shape[1] for i in range(2)] == [130, 6]


def test_full_mode_gives_both_the_same_pages(make: Make) -> None:
    manager = make(tiny_config(None, 129, page_tokens=128, max_kv_cache_capacity=512, use_bounded_swa=False))
    assert manager.kv(0).shape == manager.kv(1).shape == (2, 10, 128, 1, 8)
    assert manager.storage(1).window == FULL


def test_retained_pages_come_on_top(make: Make) -> None:
    assert make(tiny_config(None, num_kv_pages=40)).storage(0).num_pages == 42


def test_a_borrower_has_its_donor_s_pool(make: Make) -> None:
    heads = [(2, 8), (1, 8), (2, 8), (1, 8)]
    manager = make(tiny_config(None, 8, None, 8, heads=heads, donors={2: 0, 3: 1}))
    assert [manager.kv(i).address for i in (2, 3)] == [manager.kv(i).address for i in (0, 1)]
    assert [manager.storage(i).owner for i in range(4)] == [0, 1, 0, 1]
    assert manager.kv(2).shape == manager.kv(0).shape


def test_a_donor_may_come_later(make: Make) -> None:
    manager = make(tiny_config(None, None, donors={0: 1}))
    assert manager.kv(0).address == manager.kv(1).address
    assert manager.storage(0).owner == 1


@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
def test_element_types(make: Make, kind: str) -> None:
    manager = make(tiny_config(None, 8, kv_cache_dtype=kind))
    pool = manager.kv(1)
    assert pool.dtype is dtype(kind)
    values = (np.arange(pool.size) % 16).reshape(pool.shape).astype(dtype(kind).numpy())
    pool.fill_from(values)
    assert np.array_equal(manager.v(1).to_host().astype(np.float32), values[1].astype(np.float32))
    assert not manager.kv(0).to_host().astype(np.float32).any()


@pytest.mark.parametrize("page", PAGE_TOKENS)
def test_page_sizes(make: Make, page: int) -> None:
    manager = make(tiny_config(None, 8, page_tokens=page, max_kv_cache_capacity=300))
    rows = -(-300 // page)
    assert manager.kv(0).shape == (2, 2 * rows + 2, page, 1, 8)
    assert [manager.storage(i).page_tokens for i in range(2)] == [page, page]


def test_pools_are_zero_aligned_and_apart(make: Make) -> None:
    manager = make(tiny_config(None, 8, None, 8, None, heads=[(3, 5), (2, 8), (3, 5), (1, 7), (1, 1)], kv_cache_dtype="fp8"))
    reaches = []
    for layer in range(5):
        pool = manager.kv(layer)
        assert pool.address % 256 == 0
        assert not pool.to_host().view(np.uint8).any()
        reaches.append((pool.address, pool.address + pool.nbytes))
        manager.k(layer).device.fill(pool, layer + 1, pool.device.stream)
    for (_, end), (begin, _) in zip(sorted(reaches), sorted(reaches)[1:], strict=False):
        assert end <= begin
    for layer in range(5):
        assert (manager.kv(layer).to_host().view(np.uint8) == layer + 1).all()


@pytest.mark.parametrize("layer", [-1, 2, 1.0, True, "0", None, slice(1)])
def test_layers_that_are_not_there_are_refused(make: Make, layer: int) -> None:
    manager = make(tiny_config(None, 8))
    for call in (manager.kv, manager.k, manager.v, manager.storage):
        with pytest.raises(InputError, match="layer: .* is not one of the 2 attention layers"):
            call(layer)


def test_numpy_integers_are_layers(make: Make) -> None:
    manager = make(tiny_config(None, 8))
    assert manager.kv(np.int32(1)).address == manager.kv(1).address
    assert manager.storage(np.int64(1)) == manager.storage(1)


def test_a_model_without_attention_layers(make: Make) -> None:
    manager = make(LLMEngineConfig(layers=(), max_batch_size=2, max_kv_cache_capacity=64))
    assert (manager.num_layers, manager.nbytes) == (0, 0)
    assert manager.is_uniform
    with pytest.raises(InputError, match="there are none"):
        manager.kv(0)


def test_a_closed_manager_says_so(make: Make) -> None:
    manager = make(tiny_config(None, 8))
    manager.close()
    manager.close()
    for call in (manager.kv, manager.k, manager.v, manager.storage):
        with pytest.raises(StateError, match="KVCacheManager is closed"):
            call(0)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_pool_beyond_32_bits(where: str) -> None:
    """4 Gi elements; on a host only what is touched is committed."""
    device, memories = create_device(where), []

    def take(name: str, nbytes: int) -> Memory:
        memories.append(device.allocate(nbytes))
        return memories[-1]

    config = tiny_config(None, heads=(8, 128), page_tokens=16, num_kv_pages=1 << 17, max_kv_cache_capacity=1 << 20)
    try:
        manager = KVCacheManager(device, plan_memory(config), take)
    except CapacityError as error:
        pytest.skip(f"there are no 8 GiB here: {error}")
    pool, pages = manager.kv(0), (1 << 17) + 2
    assert pool.size == 2 * pages * 16 * 8 * 128 > 2**32
    assert manager.v(0).address - pool.address == pages * 16 * 8 * 128 * 2
    last = manager.v(0)[pages - 1, 15, 7, 127:]
    assert last.address == pool.address + pool.nbytes - 2
    value = np.array([1.5], dtype("bfloat16").numpy())
    last.fill_from(value)
    assert last.to_host() == pool[1, -1, -1, -1, -1].to_host() == value
    assert not manager.k(0)[-1, -1].to_host().astype(np.float32).any()
    for memory in memories:
        memory.close(device.stream)


def test_the_hybrid_manager_owns_pools_and_step_arrays(device: Device) -> None:
    config, memories = tiny_config(None, 8), []

    def take(name: str, nbytes: int) -> Memory:
        memories.append(device.allocate(nbytes))
        return memories[-1]

    manager = HybridCacheManager(device, plan_memory(config), take)
    assert manager.num_layers == 2
    assert manager.kv(1).address == manager.kv_cache.kv(1).address
    assert manager.storage(1).window == Window("sliding", 8)
    assert manager.lengths.to_host().tolist() == [0, 0]
    assert repr(manager) == f"HybridCacheManager(2 layers, {manager.plan.nbytes} bytes)"
    buffers = manager.step_buffers
    for group, table, blocks in zip(manager.plan.groups, buffers.page_tables, buffers.block_tables, strict=True):
        assert table.shape == (2, 2, group.table_width)
        assert (table.to_host() == -1).all()
        assert (blocks.to_host() == group.null_page).all()
    assert [c if c is None else c.shape for c in buffers.carry_slots] == [None, (2, 7)]
    assert (buffers.slot_mapping[1].to_host() == -1).all()
    assert sum(m.nbytes for m in memories) == manager.plan.nbytes - 256 - 256  # zero buffer and mode are elsewhere
    manager.close()
    with pytest.raises(StateError, match="KVCacheManager is closed"):
        manager.kv(0)
    for memory in memories:
        memory.close(device.stream)
