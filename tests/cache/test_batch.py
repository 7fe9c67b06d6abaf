"""Batch as a user meets it: the life of sequences, what a step costs, pages of the full group."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import numba_kv as kv
from tests.helpers.batches import everything, mapped, opened, pages_of, same
from tests.helpers.models import tiny_config


@pytest.fixture
def batch() -> Iterator[kv.Batch]:
    """Three rows of 64 tokens, pages of 4, a full group and a sliding window of 6 (a ring of 3 pages)."""
    with opened(tiny_config(None, 6, max_batch_size=3, max_batch_tokens=192)) as batch:
        yield batch


# -- the life of a sequence


def test_a_sequence_from_its_prompt_to_its_end(batch: kv.Batch) -> None:
    sequence = batch.admit(tokens=[11, 12, 13, 14, 15])
    assert (sequence.row, sequence.generation, sequence.length, sequence.pending_tokens) == (0, 1, 0, 5)
    assert (sequence.prompt_tokens, sequence.state) == (5, "active")
    batch.step({sequence: 3})
    assert (sequence.length, sequence.pending_tokens) == (3, 2)
    batch.step({sequence: sequence.pending_tokens})
    view = batch.step(1)
    assert sequence.length == 6
    assert view.positions.to_host()[0] == 5
    assert view.slot_mapping[0].to_host()[0] == 5
    batch.retire(sequence)
    assert sequence.state == "retired"
    assert batch.sequences == []
    assert batch.free_pages == 3 * 16
    batch.audit()


def test_the_first_page_is_page_zero(batch: kv.Batch) -> None:
    """Page 0 is a page like any other; only -1 means nothing. tt-metal#45184."""
    sequence = batch.admit(num_tokens=2)
    view = batch.step({sequence: 2})
    assert pages_of(batch, sequence, 0)[0] == 0
    assert [t.to_host()[:2].tolist() for t in view.slot_mapping] == [[0, 1], [0, 1]]


def test_a_step_appends_what_each_sequence_says(batch: kv.Batch) -> None:
    first, second, third = batch.update(admit=[7, 5, 9])
    view = batch.step({first: 2, third: 9})
    assert view.cu_seqlens_q.to_host().tolist() == [0, 2, 2, 11]
    assert view.seq_lens.to_host().tolist() == [2, 0, 9]
    assert view.context_lens.to_host().tolist() == [0, 0, 0]
    assert view.positions.to_host()[:11].tolist() == [0, 1, *range(9)]
    assert (view.num_rows, view.num_tokens, view.max_query_tokens, view.kv_len_upper) == (3, 11, 9, 9)
    assert second.length == 0


def test_prefill_and_decode_in_one_step(batch: kv.Batch) -> None:
    running, fresh = batch.update(admit=[5, 8])
    batch.step({running: 5})
    view = batch.step({running: 1, fresh: 8})
    assert view.seq_lens.to_host().tolist() == [6, 8, 0]
    assert view.context_lens.to_host().tolist() == [5, 0, 0]
    assert view.positions.to_host()[:9].tolist() == [5, *range(8)]
    assert (view.slot_mapping[0].to_host()[:9] >= 0).all()


def test_lengths_are_right_while_equal_steps_repeat(batch: kv.Batch) -> None:
    sequence = batch.admit(num_tokens=1)
    batch.step({sequence: 1})
    for length in range(2, 12):
        view = batch.step(1)
        assert sequence.length == length
        assert (view.kv_len_upper, view.kv_len_is_exact) == (length, True)
        assert view.seq_lens.to_host().tolist() == [length, 0, 0]
    batch.audit()


def test_a_batch_that_nobody_closes_is_closed_by_its_block() -> None:
    with kv.SharedResources.create_for_llm(tiny_config(None)) as resources:
        with kv.Batch(resources) as batch:
            sequence = batch.admit(num_tokens=4)
            batch.step({sequence: 4})
        assert sequence.state == "retired"
        batch.close()
        for call in (lambda: batch.step(1), lambda: batch.admit(num_tokens=1), batch.audit, batch.compact, batch.can_admit):
            with pytest.raises(kv.StateError, match="closed"):
                call()
        for question in ("free_rows", "free_pages"):
            with pytest.raises(kv.StateError, match="closed"):
                getattr(batch, question)
        assert batch.stats.admitted == 1


# -- what a step costs


def test_equal_decode_steps_send_nothing_and_are_one_kernel(batch: kv.Batch) -> None:
    batch.step(dict.fromkeys(batch.update(admit=[3, 3, 3]), 3))
    batch.step(1)  # the counts change from 3 to 1
    device = batch.resources.device
    for _ in range(8):
        sent, launches = device.bytes_to_device, batch.stats.launches
        batch.step(1)
        assert device.bytes_to_device == sent
        assert batch.stats.launches == launches + 1
    assert batch.stats.steady_bytes_to_device == 0


def test_naming_the_sequences_costs_no_bytes_either(batch: kv.Batch) -> None:
    sequences = batch.update(admit=[3, 3, 3])
    for _ in range(2):
        batch.step(dict.fromkeys(sequences, 3))
    sent = batch.resources.device.bytes_to_device
    view = batch.step(dict.fromkeys(sequences, 3))
    assert batch.resources.device.bytes_to_device == sent
    assert view.seq_lens.to_host().tolist() == [9, 9, 9]


@pytest.mark.parametrize("lookahead", [0, 1, 4])
def test_pages_run_ahead_so_that_most_steps_send_nothing(lookahead: int) -> None:
    with opened(tiny_config(None, 6, lookahead_pages=lookahead)) as batch:
        first, second = batch.update(admit=[1, 2])
        batch.step({first: 1, second: 2})
        batch.step(1)
        blocks = sent = 0
        for _ in range(40):
            before = batch.resources.device.bytes_to_device
            batch.step(1)
            sent += batch.resources.device.bytes_to_device > before
        blocks = batch.stats.page_blocks - 1
        assert sent == blocks
        # one row crosses a page every 4 tokens, the other a token later; a block takes both `lookahead` pages further
        assert blocks <= (40 // 4 * 2 if lookahead == 0 else 40 // (4 * lookahead) + 1)
        assert blocks >= 40 // (4 * (lookahead + 1)) - 1


def test_several_sequences_change_in_one_copy_and_one_kernel(batch: kv.Batch) -> None:
    leaving = batch.update(admit=[3, 4, 5])[:2]
    batch.step({leaving[0]: 3})
    before = batch.stats
    made = batch.update(retire=leaving, admit=[6, 7])
    after = batch.stats
    assert after.launches == before.launches + 1
    assert (after.admitted, after.retired) == (before.admitted + 2, before.retired + 2)
    assert [s.row for s in made] == [0, 1]
    assert [s.generation for s in made] == [4, 5]
    batch.audit()


def test_an_update_of_nothing_is_nothing(batch: kv.Batch) -> None:
    before = everything(batch)
    assert batch.update() == []
    same(everything(batch), before)


# -- pages of the full group


def pool_of(pages: int, rows: int = 2, **limits: int) -> kv.LLMEngineConfig:
    """Return rows of 16 pages over a pool of `pages`."""
    return tiny_config(None, 6, max_batch_size=rows, num_kv_pages=pages, max_batch_tokens=128, **limits)


def test_pages_that_run_ahead_are_taken_back_before_anything_is_refused() -> None:
    with opened(pool_of(16)) as batch:
        first, second = batch.update(admit=[4, 40])
        batch.step({first: 4})
        assert len(mapped(batch, first, 0)) == 5  # one in use, four ahead
        batch.step({second: 40})  # all 11 that are free, so that none runs ahead of it
        assert batch.free_pages <= 1
        batch.step({second: 16})  # 14 pages
        assert len(mapped(batch, first, 0)) == 2
        batch.step({second: 4})
        assert (len(mapped(batch, first, 0)), len(mapped(batch, second, 0))) == (1, 15)
        batch.audit()


def test_a_step_without_pages_says_how_many_it_needs() -> None:
    """Exhaustion is one typed error with figures, and changes nothing. kvcached#262, kvcached#453, atlas#375."""
    with opened(pool_of(16)) as batch:
        first, second = batch.update(admit=[28, 28])
        batch.step({first: 28})
        batch.step({second: 28})
        before = everything(batch)
        with pytest.raises(kv.CapacityError, match="needs 5 more of 4 tokens, 0 are free and 2 run ahead") as refused:
            batch.step({second: 20})
        assert (refused.value.needed, refused.value.free, refused.value.evictable) == (5, 0, 2)
        same(everything(batch), before)
        batch.step({first: 4, second: 4})
        batch.audit()


def test_a_refused_step_keeps_the_order_of_the_free_pages() -> None:
    """A request for more than there is takes nothing, not even for a moment. kvcached#364."""

    def run(refuse: bool) -> list[int]:
        with opened(pool_of(16, lookahead_pages=0)) as batch:
            first, second = batch.update(admit=[20, 20])
            batch.step({first: 12})
            batch.step({second: 20})
            batch.rewind({second: 20})
            batch.update(retire=[second])
            other = batch.admit(num_tokens=60)
            if refuse:
                with pytest.raises(kv.CapacityError, match="pages"):
                    batch.step({first: 20, other: 60})
            batch.step({other: 52})
            return pages_of(batch, other, 0)

    assert run(refuse=True) == run(refuse=False)


def test_scattered_free_pages_serve_a_large_chunk() -> None:
    """No step needs neighbouring pages. llama.cpp#13194."""
    with opened(pool_of(32, rows=8, lookahead_pages=0)) as batch:
        sequences = batch.update(admit=[4] * 8)
        for _ in range(4):
            batch.step(dict.fromkeys(sequences, 4))
        batch.update(retire=sequences[::2])
        long = batch.admit(num_tokens=64)
        view = batch.step({long: 64})
        pages = pages_of(batch, long, 0)
        assert len(pages) == 16
        assert np.abs(np.diff(pages)).max() > 1
        expected = [page * 4 + i for page in pages for i in range(4)]
        assert view.slot_mapping[0].to_host()[:64].tolist() == expected
        batch.audit()


def test_whether_a_prompt_can_be_admitted() -> None:
    with opened(pool_of(16)) as batch:
        assert batch.can_admit(64)
        assert not batch.can_admit(65)
        first = batch.admit(num_tokens=30)
        batch.step({first: 30})
        free = batch.free_pages
        assert batch.can_admit(free * 4)
        assert not batch.can_admit(free * 4 + 1)
        batch.admit(num_tokens=1)
        assert not batch.can_admit()
