"""Windows of a batch: what is mapped after any step, how much a ring holds, how far a row goes back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.geometry import ceil_div
from tests.helpers.batches import everything, mapped, metadata, opened, same
from tests.helpers.models import chunked, tiny_config


@pytest.fixture
def batch() -> Iterator[kv.Batch]:
    """Three rows of 64 tokens, pages of 4, a full group and a sliding window of 6 (a ring of 3 pages)."""
    with opened(tiny_config(None, 6, max_batch_size=3, max_batch_tokens=192)) as batch:
        yield batch


# -- windows


@pytest.mark.parametrize("page", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [6, chunked(6)])
def test_every_way_to_a_length_leaves_the_same_window(window: int | kv.Window, page: int) -> None:
    """Prefill, decode and chunks end with the same pages mapped, never more than a ring.

    transformers#37574, transformers#45940, mlx-lm#1914, mlx-examples#1093.
    """
    tokens = 6
    lengths = [1, tokens - 1, tokens, tokens + 1, tokens + page - 1, tokens + page, 2 * tokens + 1]
    config = tiny_config(window, page_tokens=page, max_batch_size=1, max_batch_tokens=64)
    with opened(config) as batch:
        group = batch.plan.groups[1]
        for length in lengths:
            tables = []
            for steps in ([length], [1] * length, [length - length // 2, length // 2], [2] * (length // 2) + [length % 2]):
                sequence = batch.admit(num_tokens=length)
                for count in steps:
                    if count:
                        batch.step({sequence: count})
                    assert len(mapped(batch, sequence, 1)) <= group.ring
                batch.step({sequence: 1})  # the query at `length` sees what it must
                tables.append(metadata(batch)["page_tables[1]"])
                found = mapped(batch, sequence, 1)
                low = max(0, length - tokens + 1) if isinstance(window, int) else length // tokens * tokens
                assert found == list(range(low // page, ceil_div(length + 1, page)))
                batch.retire(sequence)
            for table in tables[1:]:
                assert np.array_equal(table, tables[0])


def test_what_left_the_window_is_unmapped_on_the_device(batch: kv.Batch) -> None:
    """Entries outside of the window's pages are -1 after every step. vllm#42273, vllm#42276."""
    sequence = batch.admit(num_tokens=1)
    for length in range(1, 40):
        batch.step({sequence: 1})
        begin, end = max(0, length - 1 - 5) // 4, ceil_div(length, 4)
        assert mapped(batch, sequence, 1) == list(range(begin, end))
        assert mapped(batch, sequence, 0)[: ceil_div(length, 4)] == list(range(ceil_div(length, 4)))


@pytest.mark.parametrize("chunk", [2, 3, 8])
@pytest.mark.parametrize("start_below", [0, 1, 2])
def test_a_step_of_several_tokens_stays_within_the_ring(chunk: int, start_below: int) -> None:
    """Steps that begin just below a multiple of the window rotate like all others. mlx-lm#1914."""
    config = tiny_config(8, max_step_tokens=8, max_batch_size=1)
    with opened(config) as batch:
        sequence = batch.admit(num_tokens=16 - start_below)
        batch.step({sequence: 16 - start_below})
        batch.step({sequence: chunk})
        end = ceil_div(sequence.length, 4)
        low = max(0, 16 - start_below - 7) // 4
        assert mapped(batch, sequence, 1) == list(range(low, end))
        assert end - low <= batch.plan.groups[1].ring


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("chunk", [3, 5, 9])
@pytest.mark.parametrize("window", [1, 4, 7, chunked(5)])
def test_chunked_prefill_gathers_what_its_queries_see(window: int | kv.Window, chunk: int, page: int) -> None:
    """The tokens carried into a chunk are those its first query sees, no column more. mlx-swift-lm#39."""
    with opened(tiny_config(window, page_tokens=page, max_batch_size=1)) as batch:
        tokens = window if isinstance(window, int) else window.tokens
        sequence = batch.admit(num_tokens=30)
        written: dict[int, int] = {}
        while sequence.pending_tokens:
            start, count = sequence.length, min(chunk, sequence.pending_tokens)
            view = batch.step({sequence: count})
            low = max(0, start - tokens + 1) if isinstance(window, int) else start // tokens * tokens
            if count > 1:
                carried = view.carry_slots[1].to_host()[0]
                assert [written[slot] for slot in carried.tolist() if slot >= 0] == list(range(low, start))
            written.update(
                (slot, start + i) for i, slot in enumerate(view.slot_mapping[1].to_host()[:count].tolist()) if slot >= 0
            )


def test_a_ring_is_as_large_as_the_step_limit_asks_for() -> None:
    for limit in (1, 4, 9):
        with opened(tiny_config(6, max_step_tokens=limit)) as batch:
            group = batch.plan.groups[1]
            assert group.ring == ceil_div(6 + limit - 2, 4) + 1
            assert group.usable_pages == 2 * group.ring
            sequence = batch.admit(num_tokens=64)
            batch.step({sequence: 64})
            assert len(mapped(batch, sequence, 1)) == group.ring
            assert batch.audit().pools[1].owned == group.ring


def test_carry_slots_are_there_only_in_long_steps(batch: kv.Batch) -> None:
    sequence = batch.admit(num_tokens=9)
    view = batch.step({sequence: 9})
    assert view.is_long
    assert view.carry_slots[0] is None
    assert view.carry_slots[1].shape == (3, 5)
    view = batch.step(1)
    assert not view.is_long
    assert view.carry_slots == (None, None)


# -- rewinds


def test_tokens_that_are_taken_back_can_be_appended_again(batch: kv.Batch) -> None:
    sequence, other = batch.update(admit=[9, 3])
    batch.step({sequence: 9, other: 3})
    batch.step(1)
    table = metadata(batch)["page_tables[1]"]
    batch.rewind({sequence: 1})
    assert (sequence.length, other.length) == (9, 4)
    batch.audit()
    batch.step({sequence: 1})
    assert np.array_equal(metadata(batch)["page_tables[1]"], table)


@pytest.mark.parametrize("limit", [1, 3, 8])
def test_a_row_goes_back_as_far_as_a_step_is_long(limit: int) -> None:
    """Deep inside a window a draft can be rejected, and its pages come back. mlx-engine#177, mlx-lm#118."""
    with opened(tiny_config(6, max_step_tokens=limit, max_batch_size=1)) as batch:
        sequence = batch.admit(num_tokens=30)
        batch.step({sequence: 30})
        for first in range(1, limit + 1):
            before = sequence.length
            batch.step({sequence: limit})
            batch.rewind({sequence: first})
            if first < limit:
                batch.rewind({sequence: limit - first})
            assert sequence.length == before
            batch.step({sequence: 1})
            assert mapped(batch, sequence, 1) == list(range((before - 5) // 4, before // 4 + 1))
            batch.audit()


def test_a_rewind_beyond_the_ring_is_refused_and_changes_nothing(batch: kv.Batch) -> None:
    sequence = batch.admit(num_tokens=30)
    batch.step({sequence: 30})
    before = everything(batch)
    with pytest.raises(kv.RewindTooFar, match="cannot go back to 10 tokens.*sliding 6 ring of 3 pages"):
        batch.rewind({sequence: 20})
    same(everything(batch), before)


def test_one_refused_rewind_refuses_all_of_a_call(batch: kv.Batch) -> None:
    far, near = batch.update(admit=[30, 30])
    batch.step({far: 30, near: 30})
    before = everything(batch)
    with pytest.raises(kv.RewindTooFar):
        batch.rewind({near: 1, far: 20})
    same(everything(batch), before)


def test_a_full_model_goes_back_anywhere() -> None:
    with opened(tiny_config(None)) as batch:
        sequence = batch.admit(num_tokens=50)
        batch.step({sequence: 50})
        batch.rewind({sequence: 49})
        assert sequence.length == 1
        batch.step({sequence: 60})
        batch.audit()


def test_a_whole_sequence_can_always_be_taken_back(batch: kv.Batch) -> None:
    sequence = batch.admit(num_tokens=30)
    batch.step({sequence: 30})
    batch.rewind({sequence: 30})
    assert (sequence.length, sequence.pending_tokens) == (0, 30)
    assert mapped(batch, sequence, 1) == []
    batch.audit()
    batch.step({sequence: 30})
    batch.rewind({sequence: 1})  # its longest length counts from the fresh start
    batch.audit()
