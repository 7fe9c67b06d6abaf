"""Rows of a batch and its tables: who is where, what an empty row holds, addresses, ownership."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import numba_kv as kv
from tests.helpers.batches import everything, metadata, opened, pages_of, same
from tests.helpers.models import tiny_config


@pytest.fixture
def batch() -> Iterator[kv.Batch]:
    """Three rows of 64 tokens, pages of 4, a full group and a sliding window of 6 (a ring of 3 pages)."""
    with opened(tiny_config(None, 6, max_batch_size=3, max_batch_tokens=192)) as batch:
        yield batch


# -- rows


def test_a_retired_row_is_empty_and_appends_nothing(batch: kv.Batch) -> None:
    """Rows without a sequence are -1, the null page and length 0, and no slot is theirs. vllm#56734."""
    first, second, third = batch.update(admit=[9, 9, 9])
    batch.step(dict.fromkeys((first, second, third), 9))
    batch.retire(second)
    found = metadata(batch)
    for g, group in enumerate(batch.plan.groups):
        assert (found[f"page_tables[{g}]"][1] == -1).all()
        assert (found[f"block_tables[{g}]"][1] == group.null_page).all()
    for name in ("lengths", "high_water", "leased"):
        assert not found[name][..., 1].any()
    view = batch.step(1)
    assert view.num_rows == 3
    assert view.cu_seqlens_q.to_host().tolist() == [0, 1, 1, 2]
    assert view.seq_lens.to_host().tolist() == [10, 0, 10]
    batch.audit()


def test_a_row_above_the_last_sequence_is_not_run(batch: kv.Batch) -> None:
    first, second, third = batch.update(admit=[3, 3, 3])
    assert batch.step({first: 3, second: 3, third: 3}).num_rows == 3
    batch.retire(third)
    assert batch.step(1).num_rows == 2
    batch.retire(first)
    assert batch.step(1).num_rows == 2
    batch.compact()
    assert batch.step(1).num_rows == 1


def test_a_handle_of_an_ended_sequence_reaches_nobody(batch: kv.Batch) -> None:
    """A late retire does not free the row's next owner. sglang#27586, TensorRT-LLM#16056."""
    old = batch.admit(num_tokens=8)
    batch.step({old: 8})
    batch.retire(old)
    new = batch.admit(num_tokens=8)
    batch.step({new: 8})
    assert (new.row, new.generation) == (old.row, old.generation + 1)
    before = everything(batch)
    for call in (
        lambda: batch.retire(old),
        lambda: batch.update(retire=[new, old]),
        lambda: batch.step({old: 1}),
        lambda: batch.rewind({old: 1}),
        lambda: batch.compact([old]),
    ):
        with pytest.raises(kv.StateError, match=r"Sequence\(row 0, generation 1, retired\) is not active"):
            call()
    with pytest.raises(kv.StateError, match="has no length"):
        old.length  # noqa: B018 - a property that raises
    same(everything(batch), before)


def test_rows_are_compacted(batch: kv.Batch) -> None:
    """No page is in two rows after rows moved and grew. vllm-tt-plugin#103."""
    long, short, other = batch.update(admit=[40, 3, 20])
    batch.step({long: 40, short: 3, other: 20})
    pages = {s: [pages_of(batch, s, g) for g in (0, 1)] for s in (short, other)}
    batch.retire(long)
    moved = batch.compact()
    assert moved == {other: 0}
    assert [s.row for s in (other, short)] == [0, 1]
    for sequence, held in pages.items():
        assert [pages_of(batch, sequence, g) for g in (0, 1)] == held
    batch.audit()
    batch.step({other: 30, short: 30})
    fresh = batch.admit(num_tokens=40)
    batch.step({fresh: 40})
    for g in (0, 1):
        live = [page for s in (other, short, fresh) for page in pages_of(batch, s, g)]
        assert len(set(live)) == len(live)
    batch.audit()


def test_rows_are_put_in_a_given_order(batch: kv.Batch) -> None:
    first, second, third = batch.update(admit=[3, 4, 5])
    batch.step({first: 3, second: 4, third: 5})
    assert batch.compact([third, first, second]) == {third: 0, first: 1, second: 2}
    assert batch.step(1).seq_lens.to_host().tolist() == [6, 4, 5]
    assert batch.compact([third, first, second]) == {}
    assert batch.compact() == {}
    batch.audit()


def test_addresses_never_change(batch: kv.Batch) -> None:
    """Whatever happens to sequences and batches, a captured graph still points at live arrays. ApxInf#89."""
    resources = batch.resources
    buffers, manager = resources.cache_managers[0].step_buffers, resources.cache_managers[0]

    def addresses(view: kv.StepView) -> list[int]:
        tensors = [*view.page_tables, *view.block_tables, *view.slot_mapping, view.seq_lens, view.context_lens]
        tensors += [view.positions, view.cu_seqlens_q, *(t for t in buffers.carry_slots if t is not None)]
        tensors += [manager.lengths, *(manager.kv(layer) for layer in range(manager.num_layers))]
        tensors += [resources.kv_page_tables[0].tensor, resources.swa_kv_page_tables[0].tensor]
        return [t.address for t in tensors]

    sequences = batch.update(admit=[9, 2, 1])
    before = addresses(batch.step({sequences[0]: 9}))
    batch.retire(sequences[0])
    batch.compact()
    fresh = batch.admit(num_tokens=3)
    assert addresses(batch.step({fresh: 3})) == before
    batch.close()
    with kv.Batch(resources) as again:
        sequence = again.admit(num_tokens=30)
        assert addresses(again.step({sequence: 30})) == before


# -- who owns the tables


def test_one_batch_at_a_time(batch: kv.Batch) -> None:
    with pytest.raises(kv.StateError, match="in use"):
        kv.Batch(batch.resources)
    sequence = batch.admit(num_tokens=3)
    batch.step({sequence: 3})
    batch.close()
    with kv.Batch(batch.resources) as again:
        assert again.free_rows == 3
        again.audit()


def test_tables_are_lent_to_a_batch_and_come_back_empty(batch: kv.Batch) -> None:
    resources = batch.resources
    tables = [resources.kv_page_tables[0], resources.swa_kv_page_tables[0]]
    sequence = batch.admit(num_tokens=9)
    batch.step({sequence: 9})
    for table in tables:
        for call in (
            table.set_identity,
            table.upload,
            table.upload_dirty,
            lambda table=table: table.set_row(0, [1]),
            lambda table=table: table.set_entry(0, 0, 1),
            lambda table=table: table.clear_entry(0, 0),
        ):
            with pytest.raises(kv.StateError, match="lent to Batch"):
                call()
    batch.audit()
    batch.close()
    for table in tables:
        assert (table.tensor.to_host() == -1).all()
        assert (table.host_entries == -1).all()
        table.set_row(0, [1, 2])
        table.upload()
        assert table.tensor.to_host()[0, 0, :3].tolist() == [1, 2, -1]
    again = kv.Batch(resources)  # takes over a table that is not empty
    for table in tables:
        assert (table.tensor.to_host() == -1).all()
    again.audit()


def test_closing_the_resources_closes_their_batch() -> None:
    resources = kv.SharedResources.create_for_llm(tiny_config(None, 6))
    batch = kv.Batch(resources)
    sequence = batch.admit(num_tokens=3)
    batch.step({sequence: 3})
    resources.close()
    assert sequence.state == "retired"
    assert resources.device.memory.current_bytes == 0
    with pytest.raises(kv.StateError, match="closed"):
        batch.step(1)
    batch.close()
    with pytest.raises(kv.StateError, match="closed"):
        kv.Batch(resources)


def test_a_second_batch_starts_from_nothing(batch: kv.Batch) -> None:
    empty = metadata(batch)
    sequences = batch.update(admit=[30, 7])
    batch.step({sequences[0]: 30, sequences[1]: 7})
    batch.rewind({sequences[1]: 2})
    batch.close()
    with kv.Batch(batch.resources) as again:
        same(metadata(again), empty)
