"""Derived forms of a block table against NumPy, on hand-made arrays: CSR, compact windows, K and V ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import numba_kv as kv
from numba_kv.device import Device, create_device
from numba_kv.dtypes import dtype
from numba_kv.geometry import INT32_MAX, ceil_div, mapped_pages
from numba_kv.kernels import layout
from numba_kv.kernels.derived import compact_table, copy_indices, count_pages, split_table, sum_lengths
from tests.helpers.step_arrays import UNWRITTEN, StepArrays, full_group, same, window_group

EXAMPLES = 10 if kv.target() == "sim" else 50


@pytest.fixture(scope="module")
def device() -> Device:
    return create_device()


def of_lengths(arrays: StepArrays, lengths: list[int], count: int = 1) -> StepArrays:
    """Set the lengths of rows whose last step appended up to `count` tokens, and the pages that it left mapped."""
    arrays.lengths[:] = lengths
    for g, group in enumerate(arrays.groups[1:], 1):
        for row, length in enumerate(lengths):
            last = min(count, length)
            arrays.mapped_begin[g, row] = (
                mapped_pages(group.window, group.page, group.ring, length - last, last)[0] if last else 0
            )
    return arrays


def live_pages(arrays: StepArrays, g: int, row: int) -> list[int]:
    """Return the page ids of a row from its first mapped page to its last."""
    group = arrays.groups[g]
    end = 0 if group.is_empty else ceil_div(int(arrays.lengths[row]), group.page)
    return arrays.blocks(g)[row, int(arrays.mapped_begin[g, row]) : end].tolist()


def check_csr(device: Device, arrays: StepArrays, g: int) -> StepArrays:
    """Launch both kernels of the CSR form and compare every array."""
    group = arrays.groups[g]
    arrays.arrays.update(
        kv_indptr=np.full(arrays.rows + 1, UNWRITTEN, np.int32),
        kv_indices=np.full(arrays.rows * group.width + 1, UNWRITTEN, np.int32),
        last_page_len=np.full(arrays.rows, UNWRITTEN, np.int32),
    )
    pages = [live_pages(arrays, g, row) for row in range(arrays.rows)]
    expected = arrays.copy()
    expected.kv_indptr[:] = np.cumsum([0, *map(len, pages)])
    expected.last_page_len[:] = [
        (int(n) - 1) % group.page + 1 if ids else 1 for n, ids in zip(arrays.lengths, pages, strict=True)
    ]
    after = arrays.launch(count_pages, device, arrays.rows + 1, group=g)
    same(after, expected)
    expected.kv_indices[: expected.kv_indptr[-1]] = np.concatenate([np.zeros(0, np.int32), *map(np.int32, pages)])
    after = after.launch(copy_indices, device, arrays.rows, group=g)
    same(after, expected)
    assert ((after.last_page_len >= 1) & (after.last_page_len <= group.page)).all()
    return after


def check_compact(device: Device, arrays: StepArrays, g: int, width: int) -> StepArrays:
    """Launch the kernel of the compact form and compare every array."""
    group = arrays.groups[g]
    arrays.arrays.update(
        window_tables=np.full((arrays.rows, width), UNWRITTEN, np.int32),
        window_seq_lens=np.full(arrays.rows, UNWRITTEN, np.int32),
    )
    expected = arrays.copy()
    expected.window_tables[:] = group.null_page
    for row in range(arrays.rows):
        ids = live_pages(arrays, g, row)
        expected.window_tables[row, : len(ids)] = ids
    begins = arrays.mapped_begin[g].astype(np.int64) * group.page
    expected.window_seq_lens[:] = np.maximum(arrays.lengths - begins, 0)
    after = arrays.launch(compact_table, device, arrays.rows, group=g)
    same(after, expected)
    return after


def check_split(device: Device, arrays: StepArrays, g: int) -> StepArrays:
    """Launch the kernel of the K and V form and compare every array."""
    group = arrays.groups[g]
    arrays.arrays["kv_block_tables"] = np.full((arrays.rows, 2, group.width), UNWRITTEN, np.int32)
    expected = arrays.copy()
    expected.kv_block_tables[:, 0] = arrays.blocks(g)
    expected.kv_block_tables[:, 1] = arrays.blocks(g) + group.num_pages
    after = arrays.launch(split_table, device, arrays.rows, group=g)
    same(after, expected)
    return after


def check_sums(device: Device, arrays: StepArrays) -> None:
    """Launch the kernel of the sums of lengths and compare every array."""
    arrays.arrays["row_lengths"] = arrays.lengths.copy()
    arrays.arrays["cu_seqlens_k"] = np.full(arrays.rows + 1, UNWRITTEN, np.int32)
    expected = arrays.copy()
    expected.cu_seqlens_k[:] = np.cumsum([0, *arrays.lengths.tolist()])
    same(arrays.launch(sum_lengths, device, arrays.rows + 1), expected)


def five_rows(lengths: list[int]) -> StepArrays:
    """Return five rows of a full, a sliding and a chunked group: pages of 4, up to 32 tokens."""
    groups = [full_group(4, 8, 40), window_group("sliding", 6, 4, 8, 5), window_group("chunked", 8, 4, 8, 5)]
    arrays = StepArrays(groups, 5, 8)
    for row in range(5):
        arrays.lease(row, list(range(8 * row, 8 * row + 8))[::-1])
    return of_lengths(arrays, lengths)


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0, 0], [1, 4, 5, 8, 32], [0, 31, 0, 9, 0], [32, 0, 0, 0, 1], [7, 7, 7, 7, 7]])
@pytest.mark.parametrize("g", [0, 1, 2])
def test_csr_lists_the_mapped_pages(device: Device, lengths: list[int], g: int) -> None:
    """Every last page holds 1 to P tokens, that of an empty row included. flashinfer#320."""
    check_csr(device, five_rows(lengths), g)


def test_csr_by_hand(device: Device) -> None:
    after = check_csr(device, five_rows([0, 5, 0, 8, 1]), 0)
    assert after.kv_indptr.tolist() == [0, 0, 2, 2, 4, 5]
    assert after.kv_indices[:5].tolist() == [15, 14, 31, 30, 39]
    assert after.last_page_len.tolist() == [1, 1, 1, 4, 1]
    after = check_csr(device, five_rows([0, 32, 0, 8, 1]), 1)
    assert after.kv_indptr.tolist() == [0, 0, 2, 2, 4, 5]  # a window of 6 from token 26 on: pages 6 and 7
    assert after.kv_indices[:2].tolist() == after.blocks(1)[1, 6:8].tolist()


def test_the_empty_full_group_lists_nothing(device: Device) -> None:
    arrays = StepArrays([full_group(4, 8, 0), window_group("sliding", 6, 4, 8, 2)], 2, 8)
    after = check_csr(device, of_lengths(arrays, [9, 30]), 0)
    assert after.kv_indptr.tolist() == [0, 0, 0]
    assert after.last_page_len.tolist() == [1, 1]


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0, 0], [1, 4, 5, 8, 32], [0, 31, 0, 9, 0]])
@pytest.mark.parametrize("width", [3, 32])
@pytest.mark.parametrize("g", [1, 2])
def test_compact_tables_start_at_the_first_mapped_page(device: Device, lengths: list[int], width: int, g: int) -> None:
    check_compact(device, five_rows(lengths), g, width)


def test_a_window_that_lost_its_pages_is_empty(device: Device) -> None:
    """Between a rewind and the next step no page may be mapped; no length is negative then."""
    arrays = five_rows([5, 6, 7, 8, 0])
    arrays.mapped_begin[1] = [2, 2, 2, 2, 0]
    after = check_compact(device, arrays.copy(), 1, 4)
    assert after.window_seq_lens.tolist() == [0, 0, 0, 0, 0]
    after = check_csr(device, arrays, 1)
    assert after.kv_indptr.tolist() == [0] * 6
    assert after.last_page_len.tolist() == [1] * 5


@pytest.mark.parametrize("g", [0, 1, 2])
def test_split_tables_are_valid_everywhere(device: Device, g: int) -> None:
    after = check_split(device, five_rows([0, 31, 0, 9, 0]), g)
    assert (after.kv_block_tables >= 0).all()
    assert after.kv_block_tables[:, 1].max() < 2 * after.groups[g].num_pages


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0, 0], [1, 4, 5, 8, 32], [0, 31, 0, 9, 0]])
def test_sums_of_lengths(device: Device, lengths: list[int]) -> None:
    check_sums(device, five_rows(lengths))


def test_large_page_ids_are_exact(device: Device) -> None:
    """V ids up to the largest int32. vllm#50427."""
    last = INT32_MAX // 2 - 3
    arrays = StepArrays([full_group(256, 2, last + 1), window_group("sliding", 4, 256, 2, 1)], 1, 16)
    arrays.lease(0, [last, 7])
    arrays.blocks(1)[:] = [last, 3]
    of_lengths(arrays, [257])
    arrays.groups[1] = replace(arrays.groups[1], num_pages=last + 3)
    arrays.arrays["groups"][1, layout.NUM_PAGES] = last + 3
    for g in (0, 1):
        assert check_split(device, arrays.copy(), g).kv_block_tables[0].tolist() == [
            arrays.blocks(g)[0].tolist(),
            [int(page) + last + 3 for page in arrays.blocks(g)[0]],
        ]
        assert check_csr(device, arrays.copy(), g).kv_indices[:2].tolist() == arrays.blocks(g)[0].tolist()


@st.composite
def rows_of_a_group(draw: st.DrawFn) -> tuple[StepArrays, int]:
    """Rows of any length, of a full group and a window, after steps of up to 3 tokens."""
    rows, page = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4, 16]))
    width = ceil_div(48, page)
    kind, tokens = draw(st.sampled_from(["sliding", "chunked"])), draw(st.integers(1, 20))
    groups = [full_group(page, width, rows * width), window_group(kind, tokens, page, width, rows, 3)]
    arrays = StepArrays(groups, rows, 8, seed=draw(st.integers(0, 9)))
    for row in range(rows):
        arrays.lease(row, list(range(row * width, (row + 1) * width)))
    lengths = draw(st.lists(st.integers(0, 48), min_size=rows, max_size=rows))
    return of_lengths(arrays, lengths, draw(st.integers(1, 3))), draw(st.integers(0, 1))


@given(rows_of_a_group(), st.integers(1, 8))
@settings(max_examples=EXAMPLES)
def test_any_rows(device: Device, case: tuple[StepArrays, int], extra: int) -> None:
    arrays, g = case
    check_csr(device, arrays.copy(), g)
    check_split(device, arrays.copy(), g)
    check_compact(device, arrays.copy(), 1, arrays.groups[1].ring + extra)


def test_rows_of_a_huge_table_are_found(device: Device) -> None:
    """A row pitch of 2^30 entries: only the row that is meant is read. flash-attention#772."""
    width, int32 = 1 << 30, dtype("int32")
    try:
        table = device.tensor((3 * width,), int32)
    except kv.CapacityError as error:
        pytest.skip(f"the table does not fit here ({error})")
    table[2 * width : 2 * width + 3].fill_from(np.array([5, 3, 9], np.int32))
    described = np.zeros((1, 16), np.int64)
    described[0, [layout.SHIFT, layout.WIDTH, layout.NUM_PAGES]] = 2, width, 42
    values = {
        "groups": described,
        "mapped_begin": np.zeros((1, 3), np.int32),
        "kv_indptr": np.array([0, 0, 0, 3], np.int32),
        "kv_indices": np.full(4, UNWRITTEN, np.int32),
    }
    tensors = {name: device.tensor(a.shape, dtype(a.dtype.name)) for name, a in values.items()}
    for name, tensor in tensors.items():
        tensor.fill_from(values[name])
    copy_indices.bind(device, {**tensors, "block_tables": table, "group": 0})(3, device.stream)
    assert tensors["kv_indices"].to_host().tolist() == [5, 3, 9, UNWRITTEN]
