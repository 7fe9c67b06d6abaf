"""What ours is measured beside does the same work."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.adapters import torch_kv
from numba_kv.cache.kv_io import KVIO
from numba_kv.dtypes import dtype
from numba_kv.geometry import FULL

pytestmark = pytest.mark.gpu

LAYERS, PAGES, P, H, D = 3, 12, 16, 4, 32
TOKENS = 70


@pytest.fixture
def beside() -> Iterator[tuple[Any, kv.SharedResources, KVIO]]:
    """Give torch, resources and their KVIO."""
    torch = pytest.importorskip("torch", reason="torch is not installed (pip install 'numba-kv[interop]')")
    pytest.importorskip("triton", reason="Triton is not installed")
    config = kv.LLMEngineConfig(
        layers=(kv.AttentionLayer(num_kv_heads=H, head_dim=D, window=FULL),) * LAYERS,
        max_batch_size=1,
        max_kv_cache_capacity=PAGES * P,
        page_tokens=P,
        num_kv_pages=PAGES,
        kv_cache_dtype="bfloat16",
    )
    with kv.SharedResources.create_for_llm(config, target="cuda") as resources, KVIO(resources.cache_managers[0]) as io:
        yield torch, resources, io
        torch.cuda.synchronize()


def filled(resources: kv.SharedResources) -> list[Any]:
    """Return every layer's pool, full of other numbers."""
    pools = [resources.cache_managers[0].kv(layer) for layer in range(LAYERS)]
    random = np.random.default_rng(5)
    for pool in pools:
        pool.fill_from(random.integers(0x3C00, 0x4000, pool.shape, np.uint16).view(pool.to_host().dtype))
    return pools


def bits(tensor: Any) -> Any:
    return tensor.to_host().view(np.uint16)


@pytest.mark.parametrize("way", ["with_torch", "with_triton"])
def test_page_copies_are_ours(beside: tuple[Any, kv.SharedResources, KVIO], way: str) -> None:
    torch, resources, io = beside
    pairs = np.array([[0, 7], [3, 1], [9, 4]])
    pools = filled(resources)
    io.copy_pages(0, pairs)
    wanted = [bits(pool).copy() for pool in pools]
    before = [bits(pool).copy() for pool in filled(resources)]
    getattr(torch_kv.PageCopy(pools, pairs), way)()
    torch.cuda.synchronize()
    assert all((bits(pool) == after).all() for pool, after in zip(pools, wanted, strict=True))
    assert all((after != old).any() for after, old in zip(wanted, before, strict=True))


@pytest.fixture
def tokens(beside: tuple[Any, kv.SharedResources, KVIO]) -> tuple[Any, ...]:
    """Return k, v and slots of a step, and a rotary table with its positions."""
    device, random = beside[1].device, np.random.default_rng(7)
    k, v = (device.tensor((TOKENS, H, D), dtype("bfloat16")) for _ in range(2))
    for tensor in (k, v):
        tensor.fill_from(random.integers(0x3C00, 0x4000, tensor.shape, np.uint16).view(tensor.to_host().dtype))
    slots, positions = device.tensor((TOKENS,), dtype("int64")), device.tensor((TOKENS,), dtype("int32"))
    slots.fill_from(random.permutation(PAGES * P)[:TOKENS])
    positions.fill_from(random.permutation(TOKENS).astype(np.int32))
    table = device.tensor((1, TOKENS, D), dtype("float32"))
    table.fill_from(random.uniform(-1, 1, table.shape).astype(np.float32))
    return k, v, slots, positions, table


def test_the_triton_write_is_ours(beside: tuple[Any, kv.SharedResources, KVIO], tokens: tuple[Any, ...]) -> None:
    torch, resources, io = beside
    k, v, slots, _, _ = tokens
    pools = filled(resources)
    io.write_slots(1, k, v, slots)
    wanted = bits(pools[1]).copy()
    filled(resources)
    resources.device.stream.synchronize()
    torch_kv.TorchKV(pools[1], k, v, slots).write_few(slots)()
    torch.cuda.synchronize()
    assert (bits(pools[1]) == wanted).all()


def test_the_triton_rotation_is_ours(beside: tuple[Any, kv.SharedResources, KVIO], tokens: tuple[Any, ...]) -> None:
    """But for the last bit: Triton's compiler fuses products and sums."""
    torch, resources, io = beside
    k, v, slots, positions, table = tokens
    pools = filled(resources)
    step = SimpleNamespace(num_tokens=TOKENS, slot_mapping=(slots,), positions=positions)
    io.write_rotated(1, None, k, v, step, table)
    wanted = pools[1].to_host().astype(np.float32)
    filled(resources)
    resources.device.stream.synchronize()
    torch_kv.TorchKV(pools[1], k, v, slots).rotate_then_write(None, table, positions, slots)()
    torch.cuda.synchronize()
    np.testing.assert_allclose(pools[1].to_host().astype(np.float32), wanted, rtol=2**-7, atol=2**-9)
