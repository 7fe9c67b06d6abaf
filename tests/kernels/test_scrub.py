"""Scrubbed pages against NumPy: every element type in units of every size, parts, entries that are no page."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kv.device import Device, create_device
from numba_kv.dtypes import dtype
from numba_kv.kernels.scrub import FINITE, NAN, ZERO, scrub_8, scrub_16, scrub_32, scrub_64
from tests.helpers.kv_pools import NUMPY, Guarded

LAYERS, HALVES, PAGES, PADDING = 2, 2, 7, 8
EXPONENT = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80, "float8_e4m3": 0x7F}


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("mode", [ZERO, NAN, FINITE])
@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize("kind", NUMPY)
def test_scrubbed_pages(device: Device, kind: str, words: bool, mode: int, parts: int) -> None:
    size = NUMPY[kind].itemsize
    unit = 8 if words else size
    page = 24 if words else 7  # elements
    layer = HALVES * PAGES * page + PADDING // size * 2
    unsigned = f"uint{8 * size}"
    bits = np.random.default_rng(4).integers(0, 1 << 8 * size, LAYERS * layer, dtype=unsigned)
    bits[::3] |= np.array(EXPONENT[kind], unsigned)  # many that are not finite
    slab = Guarded(device, (LAYERS * layer * size // unit,), f"uint{8 * unit}").fill(bits.view(f"uint{8 * unit}"))
    table = np.array([9, 3, 0, -1, PAGES - 2, 1, 9], np.int32)
    tables = device.tensor(table.shape, dtype("int32"))
    tables.fill_from(table)
    scaled = size / unit
    launch = {8: scrub_8, 16: scrub_16, 32: scrub_32, 64: scrub_64}[8 * unit].bind(
        device,
        {
            "slab": slab.tensor, "block_tables": tables, "row_at": 1, "first": 1, "count": 4, "halves": HALVES,
            "parts": parts, "part_size": -(-int(page * scaled) // parts), "page_size": int(page * scaled),
            "layer_stride": int(layer * scaled), "half_stride": int(PAGES * page * scaled), "num_pages": PAGES - 2,
            "size": 8 * size, "exponent": EXPONENT[kind], "mode": mode,
        },
    )  # fmt: skip
    launch(LAYERS * HALVES * 4 * parts, device.stream)
    expected = bits.copy()
    pages = expected.reshape(LAYERS, layer)[:, : HALVES * PAGES * page].reshape(LAYERS, HALVES, PAGES, page)
    for page_id in (0, 1):  # 3 comes before the first; the others are no page
        found = pages[:, :, page_id]
        if mode == FINITE:
            found[~np.isfinite(found.view(NUMPY[kind]).astype(np.float32))] = 0
        else:
            found[:] = 0 if mode == ZERO else (1 << 8 * size) - 1
    if mode == NAN:
        assert np.isnan(pages[:, :, 0].view(NUMPY[kind]).astype(np.float32)).all()
    assert np.array_equal(slab.values().view(unsigned), expected)
