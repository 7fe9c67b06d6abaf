"""Rows between pages and dense arrays against NumPy: whole pages, positions, heads apart, words and bytes, parts, no page."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kv.device import Device, create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels.kv_dense import copy_dense_bytes, copy_dense_words
from tests.helpers.kv_pools import Guarded

LAYERS, HALVES, PAGES, PAGE, HEADS, DIM = 2, 2, 7, 4, 3, 5
PADDING = 6


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.mark.parametrize("to_dense", [1, 0])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("order", ["pages", "tokens first", "heads first"])
@pytest.mark.parametrize("unit", [8, 1])
def test_positions_of_a_row(device: Device, unit: int, order: str, parts: int, to_dense: int) -> None:
    kind = "uint64" if unit == 8 else "uint8"
    page = PAGE * HEADS * DIM
    layer = HALVES * PAGES * page + PADDING
    random = np.random.default_rng(1)

    def noise(size: int) -> np.ndarray:
        return random.integers(0, 256, size * unit, np.uint8).view(kind)

    table = np.array([9, 9, 3, 0, -1, 4, PAGES - 2, 1, 9], np.int32)  # the null page is not one of the row's
    row_at, first, count = 2, 1, (5 if order == "pages" else 18)
    heads, dim = {"pages": (1, page), "tokens first": (1, HEADS * DIM), "heads first": (HEADS, DIM)}[order]
    token_stride, head_stride = {"pages": (0, 0), "tokens first": (HEADS * DIM, 0), "heads first": (DIM, PAGE * DIM)}[order]
    slab = Guarded(device, (LAYERS * layer,), kind)
    dense = Guarded(device, (LAYERS * HALVES * count * heads * dim,), kind)
    pool, given = noise(LAYERS * layer), noise(LAYERS * HALVES * count * heads * dim)
    slab.fill(pool)
    dense.fill(given)
    tables = device.tensor(table.shape, dtype("int32"))
    tables.fill_from(table)
    part = -(-dim // parts)
    kernel = copy_dense_words if unit == 8 else copy_dense_bytes
    launch = kernel.bind(
        device,
        {
            "slab": slab.tensor, "dense": dense.tensor, "block_tables": tables, "row_at": row_at, "first": first,
            "count": count, "shift": 0 if order == "pages" else 2, "halves": HALVES, "parts": parts, "part_size": part,
            "heads": heads, "dim": dim, "layer_stride": layer, "half_stride": PAGES * page, "page_stride": page,
            "token_stride": token_stride, "head_stride": head_stride, "num_pages": PAGES - 2, "to_dense": to_dense,
        },
    )  # fmt: skip
    launch(LAYERS * HALVES * count * parts, device.stream)
    pool, given = pool.copy(), given.copy()
    pages = pool.reshape(LAYERS, layer)[:, : layer - PADDING].reshape(LAYERS, HALVES, PAGES, page)
    rows = given.reshape(LAYERS, HALVES, count, heads, dim)
    for i in range(count):
        logical, offset = (first + i, 0) if order == "pages" else divmod(first + i, PAGE)
        page_id = int(table[row_at + logical])
        for head in range(heads):
            at = offset * token_stride + head * head_stride
            if not 0 <= page_id < PAGES - 2:
                if to_dense:
                    rows[:, :, i, head] = 0
            elif to_dense:
                rows[:, :, i, head] = pages[:, :, page_id, at : at + dim]
            else:
                pages[:, :, page_id, at : at + dim] = rows[:, :, i, head]
    assert np.array_equal(slab.values(), pool)
    assert np.array_equal(dense.values(), given)
