"""What ours is measured beside does the same work."""

from __future__ import annotations

from collections.abc import Iterator
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


def test_the_triton_write_is_ours(beside: tuple[Any, kv.SharedResources, KVIO]) -> None:
    torch, resources, io = beside
    pools, device = filled(resources), resources.device
    random = np.random.default_rng(7)
    k, v = (device.tensor((TOKENS, H, D), dtype("bfloat16")) for _ in range(2))
    for tensor in (k, v):
        tensor.fill_from(random.integers(0x3C00, 0x4000, tensor.shape, np.uint16).view(tensor.to_host().dtype))
    slots = device.tensor((TOKENS,), dtype("int64"))
    slots.fill_from(random.permutation(PAGES * P)[:TOKENS])
    io.write_slots(1, k, v, slots)
    wanted = bits(pools[1]).copy()
    filled(resources)
    device.stream.synchronize()
    other = torch_kv.TorchKV(pools[1], k, v, slots)
    other.write(TOKENS, other.slots)
    torch.cuda.synchronize()
    assert (bits(pools[1]) == wanted).all()
