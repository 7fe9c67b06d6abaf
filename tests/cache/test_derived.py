"""Derived forms through a batch: what kernels read through them is what they read through the tables with absolute positions.

The consumers are emulated in NumPy over pools that say which token lies in which slot.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.geometry import Window, ceil_div
from tests.helpers.batches import opened
from tests.helpers.models import chunked, tiny_config
from tests.helpers.naive_batch import NaiveBatch

TILE = 128
#: Pages and windows around each other: W = P - 1, P, P + 1, and a chunk of whole pages.
SHAPES = [(page, w) for page in (4, 16) for w in (page - 1, page, page + 1, chunked(2 * page))]


def lived(batch: kv.Batch, step: int) -> Iterator[tuple[NaiveBatch, dict[kv.Sequence, int]]]:
    """Drive a batch of at least four rows through its life; yield its model and the tokens of the last step."""
    naive = NaiveBatch(batch)

    def stepped(counts: dict[kv.Sequence, int]) -> dict[kv.Sequence, int]:
        naive.stepped(batch.step(counts), counts)
        return counts

    a, b, c = batch.update(admit=[5, 40, 1])
    naive.admitted([a, b, c])
    yield naive, {}  # nothing appended yet
    stepped({a: 5, b: 40})
    for _ in range(2 + 18 // step):  # windows rotate; c stays empty
        yield naive, stepped({a: step, b: 1})
    batch.rewind({a: step, b: 1})
    for sequence, count in ((a, step), (b, 1)):
        naive.rewound(sequence, count)
    yield naive, {}
    yield naive, stepped({a: step, b: 1, c: 1})
    batch.retire(a)
    naive.retired(a)
    yield naive, {}  # row 0 is empty
    batch.compact()
    yield naive, {}
    (d,) = batch.update(admit=[3])
    naive.admitted([d])
    stepped({d: 3, c: step})
    yield naive, stepped(dict.fromkeys((b, c, d), step))


def by_row(naive: NaiveBatch) -> dict[int, kv.Sequence]:
    return {sequence.row: sequence for sequence in naive.sequences}


@pytest.mark.parametrize(("page", "window"), SHAPES)
def test_csr_lists_what_the_page_tables_map(page: int, window: Window | int) -> None:
    """The last page of every row holds 1 to P tokens. flashinfer#320."""
    config = tiny_config(None, window, max_batch_size=4, page_tokens=page, max_step_tokens=3, max_batch_tokens=64)
    with opened(config) as batch:
        for naive, _ in lived(batch, 3):
            sequences = by_row(naive)
            for g in (0, 1):
                form = batch.derived.csr(g)
                starts, ids, last = (t.to_host() for t in (form.kv_indptr, form.kv_indices, form.last_page_len))
                table = batch._buffers.page_tables[g].to_host()[:, 0]
                assert ((last >= 1) & (last <= page)).all()
                for row in range(4):
                    length = sequences[row].length if row in sequences else 0
                    columns = np.flatnonzero(table[row] >= 0)
                    columns = columns[columns < ceil_div(length, page)]  # not those that run ahead
                    found = ids[starts[row] : starts[row + 1]]
                    assert found.tolist() == table[row, columns].tolist()
                    if len(found) and g == 0:
                        assert (len(found) - 1) * page + last[row] == length
                    if length == 0:
                        assert starts[row] == starts[row + 1]


@pytest.mark.parametrize(("page", "window"), SHAPES)
def test_the_host_knows_where_rows_begin_without_reading_back(page: int, window: Window | int) -> None:
    config = tiny_config(None, window, max_batch_size=4, page_tokens=page, max_step_tokens=3, max_batch_tokens=64)
    with opened(config) as batch:
        for _, counts in lived(batch, 3):
            for g in (0, 1):
                form, host = batch.derived.csr(g), batch.derived.csr_on_host(g)
                assert np.array_equal(host.kv_indptr, form.kv_indptr.to_host())
                assert np.array_equal(host.last_page_len, form.last_page_len.to_host())
                assert {a.dtype for a in (host.cu_seqlens_q, host.kv_indptr, host.last_page_len)} == {np.dtype(np.int32)}
            if counts:
                assert np.array_equal(host.cu_seqlens_q, batch._buffers.cu_seqlens_q.to_host())
            lengths = batch._buffers.lengths[0].to_host()
            assert batch.derived.cu_seqlens_k(0).to_host().tolist() == [0, *np.cumsum(lengths)]
            sums = batch.derived.cu_seqlens_k(1).to_host()
            assert sums.tolist() == [0, *np.cumsum(batch.derived.compact(1).window_seq_lens.to_host())]


def test_the_host_says_when_it_does_not_know() -> None:
    config = tiny_config(None, 6, max_step_tokens=3)
    with kv.SharedResources.create_for_llm(config) as resources, kv.Batch(resources) as batch:
        a, b = batch.update(admit=[9, 5])
        batch.step({a: 9, b: 5})
        assert not batch.step(1).counts_from_device
        counts = resources.device.tensor((2,), kv.dtype("int32"))
        counts.fill_from(np.array([1, 3], np.int32))
        view = batch.step(3, counts=counts)
        assert view.counts_from_device
        with pytest.raises(kv.StateError, match=r"call sync_lengths\(\) first"):
            batch.derived.csr_on_host(1)
        batch.sync_lengths()
        assert np.array_equal(batch.derived.csr_on_host(1).kv_indptr, batch.derived.csr(1).kv_indptr.to_host())
        assert not batch.step(3, accepted=counts).counts_from_device
        batch.sync_lengths()
        for _ in range(3):
            batch.step(1)
        graph = batch.capture()
        graph.reserve(2)
        graph.launch()
        with pytest.raises(kv.StateError, match="advanced"):
            batch.derived.csr_on_host(0)
        graph.advanced()
        assert np.array_equal(batch.derived.csr_on_host(1).kv_indptr, batch.derived.csr(1).kv_indptr.to_host())
        with pytest.raises(kv.InputError, match="group: 2 is not one of"):
            batch.derived.csr_on_host(2)


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize(("page", "window"), SHAPES)
def test_compact_tables_are_read_like_whole_rows(page: int, window: Window | int, step: int) -> None:
    """Masks that count from the end see the same tokens in the compact table as absolute ones see in the page table."""
    config = tiny_config(None, window, max_batch_size=4, page_tokens=page, max_step_tokens=step, max_batch_tokens=64)
    with opened(config) as batch:
        group = batch.plan.groups[1]
        for naive, counts in lived(batch, step):
            form = batch.derived.compact(1)
            tables, lens = form.window_tables.to_host(), form.window_seq_lens.to_host()
            assert tables.shape == (4, ceil_div(group.ring, 128 // page) * (128 // page))
            assert ((tables >= 0) & (tables <= group.null_page)).all()
            whole = batch._buffers.page_tables[1].to_host()[:, 0]
            for sequence, count in counts.items():
                row, tokens = sequence.row, naive.sequences[sequence].tokens
                for back in range(count, 0, -1):
                    query, near = len(tokens) - back, int(lens[row]) - back
                    slots = [int(whole[row, p // page]) * page + p % page for p in range(naive.lowest(1, query), query + 1)]
                    low = near // window.tokens * window.tokens if isinstance(window, Window) else max(0, near - window + 1)
                    close = [int(tables[row, j // page]) * page + j % page for j in range(low, near + 1)]
                    assert close == slots
                    assert [naive.pools[1][s] for s in close] == tokens[naive.lowest(1, query) : query + 1]
            for row in set(range(4)) - by_row(naive).keys():
                assert lens[row] == 0
                assert (tables[row] == group.null_page).all()


@pytest.mark.parametrize("window", [6, chunked(8)])
def test_kv_block_tables_are_valid_everywhere(window: Window | int) -> None:
    with opened(tiny_config(None, window, max_batch_size=4)) as batch:
        for _ in lived(batch, 1):
            for g, group in enumerate(batch.plan.groups):
                form, blocks = batch.derived.kv_block_tables(g).to_host(), batch._buffers.block_tables[g].to_host()
                assert form.shape == (4, 2, group.table_width)
                assert np.array_equal(form[:, 0], blocks)
                assert np.array_equal(form[:, 1], blocks + group.num_pages)
                assert ((blocks >= 0) & (blocks <= group.null_page)).all()


def attend_in_tiles(table: np.ndarray, values: np.ndarray, page: int, low: int, length: int) -> np.ndarray:
    """Return attention of the last query over keys [low, length), loading every entry of each tile of 128 tokens.

    `values` [N, P] are K and V alike. What the mask hides gets probability 0, and 0 times NaN is NaN.
    """
    first, stop = low // TILE * TILE, ceil_div(length, TILE) * TILE
    positions = np.arange(first, stop)
    loaded = values[table[positions // page], positions % page]
    scores = np.where((positions >= low) & (positions < length), np.nan_to_num(loaded), -np.inf)
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ loaded


@pytest.mark.parametrize(("page", "window"), [(4, 6), (16, 17), (16, chunked(32)), (64, 100), (128, 129)])
def test_kernels_may_load_whole_tiles_of_block_tables(page: int, window: Window | int) -> None:
    """Entries left of the window and past the length lead to the row's own pages or to zeros, never to the trash page."""
    config = tiny_config(None, window, max_batch_size=4, page_tokens=page, max_kv_cache_capacity=300, max_batch_tokens=300)
    with opened(config) as batch:
        for naive, counts in lived(batch, 1):
            for g, group in enumerate(batch.plan.groups):
                blocks = batch._buffers.block_tables[g].to_host()
                assert ((blocks >= 0) & (blocks <= group.null_page)).all()
                assert group.table_width * page % TILE == 0
                for sequence in counts:
                    own = np.unique(blocks[sequence.row])
                    values = np.full((group.num_pages, page), np.nan)
                    values[own] = np.arange(1, len(own) * page + 1).reshape(len(own), page) / (len(own) * page)
                    values[group.null_page] = 0
                    low = naive.lowest(g, sequence.length - 1)
                    found = attend_in_tiles(blocks[sequence.row], values, page, low, sequence.length)
                    assert np.isfinite(found), (g, sequence)
                    exact = [values[blocks[sequence.row, p // page], p % page] for p in range(low, sequence.length)]
                    weights = np.exp(exact) / np.exp(exact).sum()
                    assert found == pytest.approx(weights @ exact)


def test_the_emulated_kernel_notices_a_foreign_page() -> None:
    values = np.zeros((3, 4))
    values[1] = np.nan
    table = np.zeros(64, int)
    assert np.isfinite(attend_in_tiles(table, values, 4, 5, 9))
    for column in (0, 31):  # left of the window; past the length, in the same tile
        table[:] = 0
        table[column] = 1
        assert np.isnan(attend_in_tiles(table, values, 4, 5, 9))
    table[:] = 0
    table[32] = 1
    assert np.isfinite(attend_in_tiles(table, values, 4, 5, 9))


def test_poison_behind_a_row_is_found_and_read_by_no_form() -> None:
    """An id behind a row's pages is what a kernel may read by accident: the audit names it. vllm#42494."""
    with opened(tiny_config(None, 6, max_batch_size=2)) as batch:
        a, b = batch.update(admit=[9, 9])
        batch.step({a: 9, b: 9})
        before = [batch.derived.csr(0).kv_indices.to_host(), batch.derived.compact(1).window_tables.to_host()]
        table = batch._buffers.block_tables[0]
        clean = table.to_host()
        poisoned = clean.copy()
        poisoned[a.row, -3:] = clean[b.row, 0]
        table.fill_from(poisoned)
        with pytest.raises(kv.InvariantError, match=r"block_tables\[0\]"):
            batch.audit()
        assert np.array_equal(batch.derived.csr(0).kv_indices.to_host(), before[0])
        assert np.array_equal(batch.derived.compact(1).window_tables.to_host(), before[1])
        table.fill_from(clean)
        batch.audit()


def test_requests_refresh_the_same_buffers() -> None:
    with opened(tiny_config(None, 6, max_batch_size=4)) as batch:
        device, derived = batch.resources.device, batch.derived
        addresses = None
        for _ in lived(batch, 1):
            sent, made = device.bytes_to_device, device.memory.allocations
            forms = [derived.csr(0), derived.csr(1), derived.compact(1), derived.kv_block_tables(0), derived.kv_block_tables(1)]
            found = [t.address for form in forms for t in (vars_of(form) or [form])]
            assert device.bytes_to_device == sent
            if addresses is not None:
                assert found == addresses
                assert device.memory.allocations == made
            addresses = found
        assert len(set(addresses or [])) == 10
        batch.audit()


def vars_of(form: object) -> list[kv.Tensor]:
    """Return the tensors of a form that has several."""
    return [getattr(form, name) for name in getattr(form, "__slots__", ()) if isinstance(getattr(form, name), kv.Tensor)]


def test_a_model_without_full_attention_has_an_empty_csr() -> None:
    with opened(tiny_config(6, max_batch_size=2)) as batch:
        a, _ = batch.update(admit=[9, 9])
        batch.step({a: 9})
        form = batch.derived.csr(0)
        assert form.kv_indptr.to_host().tolist() == [0, 0, 0]
        assert form.last_page_len.to_host().tolist() == [1, 1]
        host = batch.derived.csr_on_host(0)
        assert (host.kv_indptr.tolist(), host.last_page_len.tolist()) == ([0, 0, 0], [1, 1])
        assert (batch.derived.kv_block_tables(0).to_host()[:, 0] == batch.plan.groups[0].null_page).all()


def test_bad_group_numbers_are_refused() -> None:
    with opened(tiny_config(None, 6)) as batch:
        for group in (-1, 2, 1.0, True, None, "1", [1]):
            for request in (batch.derived.csr, batch.derived.compact, batch.derived.kv_block_tables):
                with pytest.raises(kv.InputError, match="group: "):
                    request(group)
        for group in (0, np.int64(0)):
            with pytest.raises(kv.InputError, match="only a window group"):
                batch.derived.compact(group)
        assert batch.derived.csr(np.int32(1)) is batch.derived.csr(1)
        assert batch.derived.csr(0, batch.resources.stream) is batch.derived.csr(0)
        batch.audit()
        batch.close()
        with pytest.raises(kv.StateError, match="closed"):
            batch.derived.csr(0)


def test_a_strided_view_of_the_pool_is_written_and_read_by_its_strides() -> None:
    """One head of one layer of a shared slab: neighbours in memory stay as they are. flashinfer#527, flash-attention#772."""
    config = tiny_config(None, None, heads=(3, 8), max_batch_size=2, kv_cache_dtype="float32")
    with opened(config) as batch:
        a, b = batch.update(admit=[9, 6])
        view = batch.step({a: 9, b: 6})
        caches = batch.resources.cache_managers[0].kv_cache
        head = caches.v(1)[:, :, 1]
        assert not head.is_contiguous
        slots, page = view.slot_mapping[0].to_host()[:15], 4
        values = np.arange(15 * 8, dtype=np.float32).reshape(15, 8) + 1
        pool = head.to_host()
        pool[slots // page, slots % page] = values
        head.fill_from(pool)
        table = view.page_tables[0].to_host()
        found = caches.kv(1).to_host().reshape(-1, page, 3, 8)  # V ids count on behind K
        for sequence, first, count in ((a, 0, 9), (b, 9, 6)):
            ids = table[sequence.row, 1, np.arange(count) // page]
            assert np.array_equal(found[ids, np.arange(count) % page, 1], values[first : first + count])
        found[table[:, 1][table[:, 1] >= 0], :, 1] = 0
        assert not found.any()
        assert not caches.kv(0).to_host().any()
        assert not caches.k(1).to_host().any()


def test_a_retired_row_writes_nothing_in_a_step_that_still_has_room_for_it() -> None:
    """A step that was laid out before: no page, no slot, no length, in models with and without full attention. vllm#56734."""
    for windows in ((None, 6), (6,)):
        with opened(tiny_config(*windows, max_batch_size=3)) as batch:
            sequences = batch.update(admit=[3, 3, 3])
            batch.step(dict.fromkeys(sequences, 3))
            view = batch.step(1)
            batch.retire(sequences[1])
            batch.stepper.enqueue(1, None, batch.resources.stream)  # as a graph of the caller's own would
            for slots, table in zip(view.slot_mapping, view.page_tables, strict=True):
                assert slots.to_host()[1] == -1
                assert (table.to_host()[1] == -1).all()
            assert view.seq_lens.to_host().tolist() == [5, 0, 5]


def test_padding_tokens_of_a_step_write_nothing() -> None:
    """A graph of a fixed number of tokens runs over the slots behind the last token too: they drop it. vllm#56734."""
    with opened(tiny_config(None, 6, max_batch_size=3)) as batch:
        sequences = batch.update(admit=[9, 9, 9])
        batch.step(dict.fromkeys(sequences, 9))
        batch.step(1)
        batch.retire(sequences[2])
        graph = batch.capture()
        graph.reserve(1)
        graph.launch()
        graph.advanced()
        for slots in batch._buffers.slot_mapping:
            assert (slots.to_host()[:2] >= 0).all()
            assert slots.to_host()[2] == -1
