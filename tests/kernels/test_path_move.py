"""Moves of an accepted path against a loop: words and bytes, heads together and apart, ids that name no move, floors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_kv as kv
from numba_kv.device import Device, Tensor, create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels import layout
from numba_kv.kernels.path_move import move_token_bytes, move_token_words
from tests.helpers.kv_pools import Guarded

LAYERS, HALVES, PAGES, PAGE, HEADS, DIM, WIDTH, ROWS = 2, 2, 9, 4, 2, 3, 5, 2
EXAMPLES = 10 if kv.target() == "sim" else 60


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def uploaded(device: Device, values: np.ndarray) -> Tensor:
    tensor = device.tensor(values.shape, dtype(values.dtype.name))
    tensor.fill_from(values)
    return tensor


@settings(max_examples=EXAMPLES)
@given(data=st.data(), unit=st.sampled_from([8, 1]), apart=st.booleans())
def test_paths(device: Device, data: st.DataObject, unit: int, apart: bool) -> None:
    """Group 1 of two; the row's table has a page that is not mapped, and one that is the null page."""
    kind = "uint64" if unit == 8 else "uint8"
    page = PAGE * HEADS * DIM
    layer = HALVES * PAGES * page + 5
    slab = Guarded(device, (LAYERS * layer,), kind)
    before = np.random.default_rng(2).integers(0, 256, LAYERS * layer * unit, np.uint8).view(kind)
    slab.fill(before)
    appended = np.array([[99, 99], data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))], np.int32)
    lengths = np.array([[99, 99], appended[1] + data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))], np.int32)
    floors = np.array(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 2))), np.int32)
    nodes = np.array([data.draw(st.lists(st.integers(-2, 13), min_size=4, max_size=4)) for _ in range(ROWS)], np.int32)
    groups = np.zeros((2, layout.GROUP_COLUMNS), np.int64)
    groups[1, [layout.SHIFT, layout.WIDTH, layout.TABLE_AT]] = 2, WIDTH, 3
    tables = np.full((ROWS, 2, WIDTH), 99, np.int32)
    tables[:, 0] = [[3, 0, -1, 6, 5], [2, 4, 1, PAGES - 2, 0]]
    tables[1, 0, 4] = 7
    flat = np.concatenate([np.full(3, 1, np.int32), tables.reshape(-1)])
    heads, dim = (HEADS, DIM) if apart else (1, HEADS * DIM)
    token_stride, head_stride = (DIM, PAGE * DIM) if apart else (HEADS * DIM, 0)
    launch = (move_token_words if unit == 8 else move_token_bytes).bind(
        device,
        {
            "slab": slab.tensor, "nodes": uploaded(device, nodes), "page_tables": uploaded(device, flat),
            "groups": uploaded(device, groups), "lengths": uploaded(device, lengths), "appended": uploaded(device, appended),
            "floors": uploaded(device, floors), "group": 1, "layers": LAYERS, "halves": HALVES, "heads": heads, "dim": dim,
            "layer_stride": layer, "half_stride": PAGES * page, "page_stride": page, "token_stride": token_stride,
            "head_stride": head_stride, "num_pages": PAGES - 2,
        },
    )  # fmt: skip
    launch(ROWS * LAYERS * HALVES, device.stream)
    expected = before.copy()
    pages = expected.reshape(LAYERS, layer)[:, : layer - 5].reshape(LAYERS, HALVES, PAGES, page)
    for row in range(ROWS):
        count, last = int(appended[1, row]), -1
        start = int(lengths[1, row]) - count
        source = pages.copy()
        for i, node in enumerate(nodes[row].tolist()):
            if i >= count or not max(last + 1, i) <= node < count:
                continue
            last = node
            (from_page, from_offset), (to_page, to_offset) = divmod(start + node, PAGE), divmod(start + i, PAGE)
            ids = int(tables[row, 0, from_page]), int(tables[row, 0, to_page])
            if start + i < floors[row] or not all(0 <= n < PAGES - 2 for n in ids):
                continue
            for head in range(heads):
                at, to = (offset * token_stride + head * head_stride for offset in (from_offset, to_offset))
                pages[:, :, ids[1], to : to + dim] = source[:, :, ids[0], at : at + dim]
    assert np.array_equal(slab.values(), expected)
