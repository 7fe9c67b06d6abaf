"""Page copies against NumPy: 16 bytes, whole words and odd bytes, padded layers, parts, pairs that name no page."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kv.device import Device, create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels.kv_copy import copy_page_bytes, copy_page_units, copy_page_words
from numba_kv.kernels.wide_rows import reciprocal
from tests.helpers.kv_pools import Guarded


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("unit", [8, 1])
def test_pages_are_copied_in_every_layer_and_half(device: Device, unit: int, halves: int, parts: int) -> None:
    layers, pages, page, padding = 3, 7, 5, 2
    layer = halves * pages * page + padding
    kind = "uint64" if unit == 8 else "uint8"
    slab = Guarded(device, (layers * layer,), kind)
    before = np.random.default_rng(0).integers(0, 256, layers * layer * unit, np.uint8).view(kind)
    slab.fill(before)
    outside = [(-1, 0), (pages, 0), (0, pages - 2), (0, -1), (2**31 - 1, 0), (0, 2**31 - 1)]
    pairs = np.array([(0, 3), outside[0], (0, 1), *outside[1:], (pages - 2, 4)], np.int32)
    on_device = device.tensor(pairs.shape, dtype("int32"))
    on_device.fill_from(pairs)
    kernel = copy_page_words if unit == 8 else copy_page_bytes
    launch = kernel.bind(
        device,
        {
            "slab": slab.tensor,
            "pairs": on_device,
            "num_pairs": len(pairs),
            "halves": halves,
            "parts": parts,
            "part_size": -(-page // parts),
            "page_size": page,
            "layer_stride": layer,
            "half_stride": pages * page,
            "num_pages": pages - 1,
            "num_targets": pages - 2,
        },
    )
    launch(len(pairs) * layers * halves * parts, device.stream)
    expected = before.copy()
    view = expected.reshape(layers, layer)[:, : layer - padding].reshape(layers, halves, pages, page)
    for source, target in ((0, 3), (0, 1), (pages - 2, 4)):
        view[:, :, target] = view[:, :, source]
    assert np.array_equal(slab.values(), expected)


@pytest.mark.parametrize(("units", "parts"), [(1, 1), (3, 1), (37, 1), (37, 3), (40, 2)])
@pytest.mark.parametrize("halves", [1, 2])
def test_pages_are_copied_by_16_bytes(device: Device, halves: int, units: int, parts: int) -> None:
    layers, pages, page, padding = 3, 6, 16 * units, 32
    layer = halves * pages * page + padding
    slab = Guarded(device, (layers * layer,), "uint8")
    before = np.random.default_rng(1).integers(0, 256, layers * layer, np.uint8)
    slab.fill(before)
    pairs = np.array([(0, 3), (-1, 0), (0, 1), (0, pages - 2), (2**31 - 1, 0), (pages - 2, 2)], np.int32)
    on_device = device.tensor(pairs.shape, dtype("int32"))
    on_device.fill_from(pairs)
    launch = copy_page_units.bind(
        device,
        {
            "slab": slab.tensor,
            "pairs": on_device,
            "num_pairs": len(pairs),
            "halves": halves,
            "parts": parts,
            "by_pairs": reciprocal(len(pairs)),
            "by_halves": reciprocal(halves),
            "by_parts": reciprocal(parts),
            "part_size": 16 * -(-units // parts),
            "page_size": page,
            "layer_stride": layer,
            "half_stride": pages * page,
            "num_pages": pages - 1,
            "num_targets": pages - 2,
        },
        threads=32,
    )
    launch(len(pairs) * layers * halves * parts, device.stream)
    expected = before.copy()
    view = expected.reshape(layers, layer)[:, : layer - padding].reshape(layers, halves, pages, page)
    for source, target in ((0, 3), (0, 1), (pages - 2, 2)):
        view[:, :, target] = view[:, :, source]
    assert np.array_equal(slab.values(), expected)
