"""A batch of each model of a speculative pair: rounds of drafts, verification and rewinds, with windows in both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.errors import CapacityError, StateError
from numba_kv.geometry import mapped_pages
from tests.helpers.deployments import pair
from tests.helpers.models import tiny_config

K = 3
BASE = tiny_config(None, 6, page_tokens=2, max_kv_cache_capacity=48, max_batch_tokens=96)
DRAFT = tiny_config(None, 5, page_tokens=4, max_kv_cache_capacity=48 + K, max_batch_tokens=96)


@contextmanager
def opened(**changes: Any) -> Iterator[tuple[kv.Batch, kv.Batch]]:
    """Open a base of windows with a draft of other windows and pages, and a batch on each."""
    deployment = pair(steps=K, base=replace(BASE, **changes), draft=replace(DRAFT, **changes))
    with kv.SharedResources.create_for_spec_decode(deployment) as resources:
        yield kv.Batch(resources), kv.Batch(resources, index=1)
    assert resources.device.memory.current_bytes == resources.device.pinned.current_bytes == 0


def admit(base: kv.Batch, draft: kv.Batch, *prompts: int) -> list[tuple[kv.Sequence, kv.Sequence]]:
    """Admit prompts to both models and append them."""
    found = list(zip(base.update(admit=list(prompts)), draft.update(admit=list(prompts)), strict=True))
    for batch, sequences in ((base, [b for b, _ in found]), (draft, [d for _, d in found])):
        batch.step({s: s.pending_tokens for s in sequences})
    return found


def check_tables(batch: kv.Batch, sequence: kv.Sequence, before: int, count: int) -> None:
    """Check which pages of every group are mapped after `count` tokens were appended at `before`."""
    buffers = batch.resources.cache_managers[batch.plan is batch.resources.plans[1]].step_buffers
    for group in batch.plan.groups:
        table = buffers.page_tables[group.index].to_host()[sequence.row, 0]
        begin, end = mapped_pages(group.window, group.page_tokens, group.ring, before, count)
        mapped = np.flatnonzero(table >= 0)
        if group.window.is_full:  # which is mapped some pages ahead
            assert set(range(end)) <= set(mapped.tolist())
        else:
            assert mapped.tolist() == list(range(begin, end))


@pytest.mark.parametrize("kept", range(K + 1))
@pytest.mark.parametrize("prompt", [1, 5, 17])
def test_a_windowed_draft_goes_back_to_any_of_its_steps(prompt: int, kept: int) -> None:
    """`K` steps of one token each, then `kept` of them stay; and again, until the rows are full."""
    with opened() as (base, draft):
        ((row, drafted),) = admit(base, draft, prompt)
        length = prompt
        while length + K + 1 <= BASE.max_kv_cache_capacity:
            for _ in range(K):
                draft.step({drafted: 1})
            base.step({row: K + 1})
            check_tables(base, row, length, K + 1)
            check_tables(draft, drafted, length + K - 1, 1)
            for batch, sequence, back in ((base, row, K - kept), (draft, drafted, K - kept)):
                if back:
                    batch.rewind({sequence: back})
            draft.step({drafted: 1})  # the token of the base itself, which no draft proposed
            length += kept + 1
            assert (row.length, drafted.length) == (length, length)
            base.audit()
            draft.audit()


def test_random_rounds_keep_both_in_step() -> None:
    rng = np.random.default_rng(7)
    with opened(max_batch_size=3) as (base, draft):
        active: list[tuple[kv.Sequence, kv.Sequence]] = []
        for _ in range(40):
            over = [one for one in active if one[0].length + K + 1 > BASE.max_kv_cache_capacity]
            if over:
                base.update(retire=[b for b, _ in over])
                draft.update(retire=[d for _, d in over])
                active = [one for one in active if one not in over]
            if len(active) < 3 and rng.random() < 0.5:
                active += admit(base, draft, int(rng.integers(1, 20)))
            if not active:
                continue
            for _ in range(K):
                draft.step({d: 1 for _, d in active})
            base.step({b: K + 1 for b, _ in active})
            kept = {b: int(rng.integers(0, K + 1)) for b, _ in active}
            if any(count < K for count in kept.values()):
                base.rewind({b: K - kept[b] for b, _ in active if kept[b] < K})
                draft.rewind({d: K - kept[b] for b, d in active if kept[b] < K})
            draft.step({d: 1 for _, d in active})
            assert all((b.row, b.length) == (d.row, d.length) for b, d in active)
            base.audit()
            draft.audit()
        assert base.stats.rotated_pages > 0
        assert draft.stats.rotated_pages > 0


def test_the_device_says_how_many_are_kept() -> None:
    """The next step of each model takes its rejected tokens back, by counts on the device, as the host would."""
    with opened() as (base, draft), opened() as (plain, plain_draft):
        pairs, expected = admit(base, draft, 9, 4), admit(plain, plain_draft, 9, 4)
        resources = base.resources
        accepted = kv.Tensor(resources.take("accepted", 256), resources.device, kv.dtype("int32"), (2,))
        for kept in ([1, 4], [3, 2], [4, 1], [2, 4]):
            accepted.fill_from(np.array(kept, np.int32))
            for batch, column in ((base, 0), (draft, 1)):
                batch.step({one[column]: K + 1 for one in pairs})
                batch.step({one[column]: 1 for one in pairs}, accepted=accepted)
                batch.sync_lengths()
            for batch, column in ((plain, 0), (plain_draft, 1)):
                batch.step({one[column]: K + 1 for one in expected})
                back = {one[column]: K + 1 - n for one, n in zip(expected, kept, strict=True) if n < K + 1}
                if back:
                    batch.rewind(back)
                batch.step({one[column]: 1 for one in expected})
            for found, wanted in ((base, plain), (draft, plain_draft)):
                assert [s.length for s in found.sequences] == [s.length for s in wanted.sequences]
                found.audit()


def test_a_draft_never_runs_out_before_its_base() -> None:
    with opened() as (base, draft):
        ((row, drafted),) = admit(base, draft, BASE.max_kv_cache_capacity)
        for _ in range(K):
            draft.step({drafted: 1})
        with pytest.raises(CapacityError, match="max_kv_cache_capacity 48"):
            base.step({row: 1})
        draft.rewind({drafted: K})
        draft.audit()


def test_each_model_has_one_batch() -> None:
    with opened() as (base, draft):
        resources = base.resources
        for index, batch in enumerate((base, draft)):
            with pytest.raises(StateError, match="the tables are in use by Batch"):
                kv.Batch(resources, index=index)
            with pytest.raises(StateError, match="is lent to Batch"):
                resources.kv_page_tables[index].set_identity()
            assert resources.users[index] is batch
        draft.close()
        assert resources.users == (base,)
        resources.kv_page_tables[1].set_identity()
        ((row, _),) = admit(base, kv.Batch(resources, index=1), 5)
        base.close()
        assert (resources.kv_page_tables[0].tensor.to_host() == -1).all()
        assert row.state == "retired"
        resources.users[0].close()
        assert resources.users == ()


def test_derived_forms_of_two_models_are_two() -> None:
    with opened() as (base, draft):
        ((row, drafted),) = admit(base, draft, 9)
        forms = [batch.derived.csr(0) for batch in (base, draft)]
        assert forms[0].kv_indptr.address != forms[1].kv_indptr.address
        assert [form.kv_indptr.to_host().tolist()[1] for form in forms] == [5, 3]  # 9 tokens in pages of 2 and of 4
        base.step({row: 1})
        draft.step({drafted: 1})
        assert [batch.derived.csr(0).last_page_len.to_host().tolist()[0] for batch in (base, draft)] == [2, 2]


def test_a_failed_draft_leaves_the_base_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as (base, draft):
        ((row, drafted),) = admit(base, draft, 5)

        def fail(*arguments: Any, **options: Any) -> None:
            raise kv.DeviceError("launch failed")

        with monkeypatch.context() as patch:
            patch.setattr(draft.stepper.launches, "step", fail)
            with pytest.raises(kv.DeviceError):
                draft.step({drafted: 1})
        with pytest.raises(StateError, match="failed while work was being enqueued"):
            draft.step({drafted: 1})
        base.step({row: 1})
        base.audit()
        draft.close()
        kv.Batch(base.resources, index=1).audit()


def test_another_stream_takes_both() -> None:
    with opened() as (base, draft):
        ((row, drafted),) = admit(base, draft, 5)
        resources = base.resources
        resources.hand_over(resources.device.as_stream(None))
        base.step({row: K + 1})
        draft.step({drafted: 1})
        base.audit()
        draft.audit()
        with draft.guard:
            errors: list[BaseException] = []

            def hand_over() -> None:
                try:
                    resources.hand_over(resources.device.as_stream(None))
                except StateError as error:
                    errors.append(error)

            thread = threading.Thread(target=hand_over)
            thread.start()
            thread.join()
            assert [str(error) for error in errors] == ["Batch is in use by another thread; calls must not overlap"]
        base.step({row: 1})  # whose guard was given back


def test_closing_the_resources_closes_both() -> None:
    with opened() as (base, draft):
        admit(base, draft, 5)
        base.resources.close()
        for batch in (base, draft):
            with pytest.raises(StateError, match="closed"):
                batch.step(1)
            batch.close()


def test_a_step_of_the_draft_is_none_of_the_base() -> None:
    base = tiny_config(None, 6, max_kv_cache_capacity=48, max_batch_tokens=96)
    draft = tiny_config(None, 5, max_kv_cache_capacity=51, max_batch_tokens=96)
    with (
        kv.SharedResources.create_for_spec_decode(pair(steps=3, base=base, draft=draft), 2) as resources,
        kv.Batch(resources, index=1) as drafts,
        kv.KVIO(resources.cache_managers[0]) as io,
    ):
        view = drafts.step({drafts.admit(num_tokens=4): 4})
        array = resources.device.tensor((4, 1, 8), kv.dtype("bfloat16"))
        for call in (lambda: io.write(0, array, array, view), lambda: io.write_rotated(0, None, array, array, view, None)):
            with pytest.raises(kv.InputError, match="not a step of this model"):
                call()
