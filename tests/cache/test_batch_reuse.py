"""What a batch with reuse promises, call by call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.context.options import ReuseOptions
from numba_kv.dtypes import dtype
from numba_kv.kernels.layout import Status
from numba_kv.ledger.reuse.block_hash import Blake2bHash
from numba_kv.ledger.reuse.content import MediaSpan
from numba_kv.ledger.reuse.events import BlocksRemoved, BlocksStored
from numba_kv.ledger.reuse.policy import PublishPolicy
from tests.helpers.batches import everything, opened, pages_of, same
from tests.helpers.lora_files import OUT, SIZES, pairs, reference
from tests.helpers.models import chunked, tiny_config
from tests.helpers.ropes import rope
from tests.helpers.states import mamba2, recurrent_config

CONFIG = tiny_config(max_batch_size=3, num_kv_pages=20, lookahead_pages=0, max_batch_tokens=64)
ALL = PublishPolicy(publish="all")
TARGETS = tuple(kv.LoRATarget(name=name, k=k, n=n) for name, (k, n) in SIZES.items())


@contextmanager
def reusing(config: kv.LLMEngineConfig = CONFIG, **options: Any) -> Iterator[kv.Batch]:
    with kv.SharedResources.create_for_llm(config) as resources:
        yield kv.Batch(resources, reuse=ReuseOptions(**options))
    assert resources.device.memory.current_bytes == 0
    assert resources.device.pinned.current_bytes == 0


@pytest.fixture
def batch() -> Iterator[kv.Batch]:
    with reusing() as opened_batch:
        yield opened_batch


def computed(batch: kv.Batch, tokens: list[int], **options: Any) -> kv.Sequence:
    """Admit a sequence and append its prompt."""
    sequence = batch.admit(tokens, **options)
    while sequence.pending_tokens:
        batch.step({sequence: batch.prefill_chunk(sequence)})
    return sequence


def test_a_prompt_is_there_for_the_next_one_while_it_still_runs(batch: kv.Batch) -> None:
    first = computed(batch, list(range(11)))
    second = batch.admit([*range(9), 70, 71, 72])
    assert (first.reused_tokens, second.reused_tokens) == (0, 8)
    assert (second.length, second.pending_tokens, second.prompt_tokens) == (8, 4, 12)
    assert pages_of(batch, second, 0) == pages_of(batch, first, 0)[:2]
    assert batch.audit().pools[0].leased == 2
    batch.step({second: 4})
    assert pages_of(batch, second, 0)[2] != pages_of(batch, first, 0)[2]
    batch.audit()


def test_one_token_is_always_left_to_compute(batch: kv.Batch) -> None:
    computed(batch, list(range(12)))
    again = batch.admit(list(range(12)))
    assert (again.reused_tokens, again.pending_tokens) == (11, 1)
    assert batch.stats.copied_pages == 1
    batch.step({again: 1})
    assert batch.audit().pools[0].leased == 3  # the page that was copied is a duplicate as soon as it is published
    batch.publish()
    first, second = batch.sequences
    assert pages_of(batch, first, 0) == pages_of(batch, second, 0)
    batch.audit()


def test_what_nobody_reads_is_cached_and_goes_when_pages_are_wanted(batch: kv.Batch) -> None:
    batch.retire(computed(batch, list(range(40))))
    report = batch.audit().pools[0]
    assert (report.free, report.owned, report.cached) == (10, 0, 10)
    assert (batch.free_pages, batch.evictable_pages) == (10, 10)
    assert batch.can_admit(64)
    other = batch.admit(num_tokens=60)
    batch.step({other: 60})
    assert batch.reuse.figures.evicted_blocks == 5
    assert batch.audit().pools[0].cached == 5
    assert batch.admit(list(range(40))).reused_tokens == 20  # the end went first


def test_pages_that_are_read_are_not_given_up(batch: kv.Batch) -> None:
    computed(batch, list(range(40)))
    batch.publish()
    second = batch.admit(num_tokens=44)
    before = everything(batch)
    with pytest.raises(kv.CapacityError, match="0 pages are kept for reuse and read by no row") as refused:
        batch.step({second: 44})
    assert (refused.value.needed, refused.value.free, refused.value.evictable) == (11, 10, 0)
    same(everything(batch), before)


def test_a_refusal_counts_what_is_kept() -> None:
    with reusing() as batch:
        batch.retire(computed(batch, list(range(12))))
        held = batch.admit(num_tokens=60)
        batch.step({held: 60})
        other = batch.admit(num_tokens=24)
        kept = batch.reuse.cache.num_blocks
        with pytest.raises(kv.CapacityError) as refused:
            batch.step({other: 24})
        assert (refused.value.needed, refused.value.free, refused.value.evictable) == (6, 2, 3)
        assert batch.reuse.cache.num_blocks == kept
        batch.audit()


def test_salts_adapters_and_media_tell_contexts_apart(batch: kv.Batch) -> None:
    computed(batch, list(range(12)))
    assert batch.admit(list(range(12)), salt=b"tenant").reused_tokens == 0
    digest = MediaSpan(4, 4, b"d" * 16)
    assert batch.admit(list(range(12)), media=[digest]).reused_tokens == 4
    misses = batch.reuse.figures.misses
    assert misses == {"full: unknown_identity": 2, "full: diverged": 1}


def test_a_policy_says_what_is_left_and_what_is_used(batch: kv.Batch) -> None:
    computed(batch, list(range(12)), policy=PublishPolicy(publish="none"))
    batch.publish()
    assert batch.reuse.cache.num_blocks == 0
    computed(batch, list(range(12)))
    assert computed(batch, list(range(12)), policy=PublishPolicy(reuse=False)).reused_tokens == 0
    assert batch.reuse.figures.misses["all: bypass"] == 1


def test_tails_go_on_from_the_last_token_of_a_prompt(batch: kv.Batch) -> None:
    batch.retire(computed(batch, list(range(10)), policy=PublishPolicy(tails=True)))
    assert batch.audit().pools[0].cached == 3
    assert batch.admit([*range(10), 77]).reused_tokens == 10
    batch.audit()


def test_generated_tokens_are_kept_if_the_batch_is_told(batch: kv.Batch) -> None:
    first = computed(batch, list(range(6)), policy=ALL)
    batch.note_tokens(first, [50])
    assert batch.known_tokens(first) == 7
    for token in range(51, 57):
        batch.step()
        batch.note_tokens(first, [token])
    assert first.length == 12
    batch.publish()
    assert batch.reuse.cache.num_blocks == 2  # the last page may still be taken back
    batch.retire(first)
    assert batch.reuse.cache.num_blocks == 3
    assert batch.admit([*range(6), *range(50, 60)]).reused_tokens == 12


def test_a_rewind_forgets_what_is_known(batch: kv.Batch) -> None:
    first = computed(batch, list(range(10)), policy=ALL)
    batch.step()
    batch.note_tokens(first, [50])
    batch.rewind({first: 3})
    assert batch.known_tokens(first) == 8
    batch.note_tokens(first, [60, 61])
    batch.step({first: 2})
    batch.step()
    batch.retire(first)
    assert batch.admit([*range(8), 60, 61, 1, 1]).reused_tokens == 8


def test_a_rewind_into_a_published_page_copies_it(batch: kv.Batch) -> None:
    first = computed(batch, list(range(12)))
    batch.publish()
    kept = pages_of(batch, first, 0)
    batch.rewind({first: 6})
    mine = pages_of(batch, first, 0)
    assert mine[0] == kept[0]
    assert mine[1] != kept[1]
    report = batch.audit().pools[0]
    assert (report.owned, report.leased, report.cached) == (1, 1, 2)
    batch.rewind({first: 2})
    assert first.length == 4
    batch.audit()
    batch.step({first: 8})
    batch.rewind({first: 12})
    batch.audit()
    assert batch.admit(list(range(13))).reused_tokens == 12


def test_the_device_takes_nothing_back_that_is_published(batch: kv.Batch) -> None:
    first = computed(batch, list(range(12)))
    array = batch.resources.device.tensor((3,), dtype("int32"))
    array.fill_from(np.array([1, 0, 0], np.int32))
    batch.step({first: 1}, take_back=array)
    assert batch.refusals() == {first: Status.REWIND_TOO_FAR}
    batch.sync_lengths()
    assert first.length == 12
    array._memory.close(batch.resources.stream)
    batch.audit()


def test_what_the_device_may_take_back_is_not_known_any_more() -> None:
    with reusing(replace(CONFIG, max_step_tokens=4)) as batch:
        first = computed(batch, list(range(8)), policy=ALL)
        batch.step({first: 4})
        batch.note_tokens(first, [1, 2, 3, 4])
        array = batch.resources.device.tensor((3,), dtype("int32"))
        array.fill_from(np.array([2, 0, 0], np.int32))
        batch.step({first: 1}, take_back=array)
        assert batch.known_tokens(first) == 8
        batch.sync_lengths()
        assert first.length == 11
        batch.retire(first)
        assert batch.reuse.cache.num_blocks == 2
        array._memory.close(batch.resources.stream)


def test_forks_and_swaps_take_their_tokens_along(batch: kv.Batch) -> None:
    first = computed(batch, list(range(10)), policy=ALL)
    child = batch.fork(first)
    batch.step()
    batch.note_tokens(first, [50])
    batch.note_tokens(child, [60])
    swapped = batch.swap_out(child)
    batch.audit()
    back = batch.swap_in(swapped)
    assert batch.known_tokens(back) == 11
    batch.note_tokens(back, [61])
    batch.step({back: 1})
    batch.retire(back)
    batch.retire(first)
    batch.audit()
    assert batch.admit([*range(10), 60, 61, 5]).reused_tokens == 12
    assert batch.admit([*range(10), 50, 61, 5]).reused_tokens == 10


def test_a_prompt_that_was_swapped_out_on_its_way_is_published(batch: kv.Batch) -> None:
    first = batch.admit(list(range(12)))
    batch.step({first: 5})
    swapped = batch.swap_out(first)
    assert batch.reuse.cache.num_blocks == 1
    back = batch.swap_in(swapped)
    batch.step({back: back.pending_tokens})
    batch.publish()
    assert batch.reuse.cache.num_blocks == 3
    assert batch.audit().pools[0].owned == 0  # the page that is kept already took the place of the row's own
    other = batch.swap_out(back)
    other.close()
    assert batch.audit().pools[0].cached == 3


def test_restored_tokens_are_not_published(batch: kv.Batch) -> None:
    first = computed(batch, list(range(8)), policy=PublishPolicy(publish="none"))
    with batch.capture_kv(first, 0, 8) as snapshot:
        second = batch.admit(list(range(20, 32)))
        batch.restore_kv(second, snapshot)
    batch.step({second: 4})
    batch.retire(second)
    assert batch.reuse.cache.num_blocks == 0


def test_events_tell_of_blocks_by_name() -> None:
    events: list[object] = []
    with reusing(naming=Blake2bHash(), on_event=events.append) as batch:
        batch.retire(computed(batch, list(range(9))))
        batch.reuse.cache.clear()
    stored, removed = events
    assert isinstance(stored, BlocksStored)
    assert isinstance(removed, BlocksRemoved)
    assert stored.tokens.ravel().tolist() == list(range(8))
    assert set(removed.names) == set(stored.names)


def test_counted_prompts_reuse_and_leave_nothing(batch: kv.Batch) -> None:
    first = batch.admit(num_tokens=12)
    batch.step({first: 12})
    with pytest.raises(kv.InputError, match="admitted without its tokens"):
        batch.note_tokens(first, [1])
    batch.retire(first)
    assert batch.reuse.cache.num_blocks == batch.reuse.figures.lookups == 0


def test_captured_steps_take_pages_that_are_only_kept(batch: kv.Batch) -> None:
    batch.retire(computed(batch, list(range(64))))
    first = computed(batch, list(range(100, 112)))
    assert (batch.free_pages, batch.evictable_pages) == (1, 16)
    graph = batch.capture()
    assert graph.reserve(60, partial=True) == 52
    assert batch.reuse.figures.evicted_blocks == 12
    for _ in range(52):
        graph.launch()
    graph.advanced()
    assert first.length == 64
    report = batch.audit().pools[0]
    assert (report.owned, report.leased, report.cached) == (13, 3, 4)
    graph.close()


def test_a_fork_and_a_swapped_sequence_take_pages_that_are_only_kept(batch: kv.Batch) -> None:
    batch.retire(computed(batch, list(range(64))))
    first = batch.admit(num_tokens=15)
    batch.step({first: 15})
    assert batch.free_pages == 0
    child = batch.fork(first)
    assert batch.reuse.figures.evicted_blocks == 1
    swapped = batch.swap_out(child)
    other = batch.admit(num_tokens=4)
    batch.step({other: 4})
    back = batch.swap_in(swapped)
    assert batch.reuse.figures.evicted_blocks == 5
    assert back.length == 15
    batch.audit()


def test_adapters_are_told_apart_by_their_bytes() -> None:
    config = replace(CONFIG, max_lora_rank=4, max_loras=3, lora_targets=TARGETS)
    with reusing(config) as batch:
        manager = batch.resources.lora_manager
        manager.load("fr", reference(pairs(OUT, seed=1)))
        batch.retire(computed(batch, list(range(12)), adapter="fr"))
        assert batch.admit(list(range(12))).reused_tokens == 0
        again = batch.admit(list(range(12)), adapter="fr")
        assert (again.reused_tokens, again.adapter.name) == (11, "fr")
        batch.retire(again)
        manager.unload("fr")
        manager.load("fr", reference(pairs(OUT, seed=2)))
        other = batch.admit(list(range(12)), adapter="fr")
        assert other.reused_tokens == 0
        assert manager.rows[other.row] == other.adapter


def test_models_with_long_and_short_rotations_want_to_know_which() -> None:
    factors = {"long_factor": (2.0,) * 4, "short_factor": (1.0,) * 4, "original_max_position_embeddings": 16}
    with reusing(replace(CONFIG, ropes=(rope("longrope", **factors),))) as batch:
        with pytest.raises(kv.InputError, match="rope: the model rotates"):
            batch.admit(list(range(12)))
        batch.retire(computed(batch, list(range(12)), rope=b"short"))
        assert batch.admit(list(range(20)), rope=b"long").reused_tokens == 0
        assert batch.admit(list(range(13)), rope=b"short").reused_tokens == 12


def test_wrong_arguments_change_nothing(batch: kv.Batch) -> None:
    first = computed(batch, list(range(12)))
    batch.publish()
    before, figures = everything(batch), batch.reuse.figures
    for options in ({"policy": "all"}, {"salt": "text"}, {"media": [1]}, {"media": [MediaSpan(10, 4, b"d" * 16)]}):
        with pytest.raises(kv.InputError):
            batch.admit(list(range(12)), **options)
    for tokens in ([-1], [1.5], [[1]], []):
        with pytest.raises((kv.InputError, kv.ShapeError)):
            batch.admit(tokens)
    for tokens, words in (
        (None, "None is neither a sequence of token ids nor their number"),
        (True, "True is neither"),
        ("abc", "str"),
    ):
        with pytest.raises(kv.InputError, match=words):
            batch.update(admit=[tokens])
    with pytest.raises(kv.InputError, match="adapters: 'fr' given"):
        batch.admit(list(range(12)), adapter="fr")
    with pytest.raises(kv.CapacityError, match="exceeds max_kv_cache_capacity"):
        batch.admit(list(range(65)))
    with pytest.raises(kv.InputError):
        batch.note_tokens(first, [-5])
    with pytest.raises(kv.InputError):
        batch.prefill_chunk(first, 0)
    same(everything(batch), before)
    assert batch.reuse.figures == figures


@pytest.mark.parametrize(
    "wrong",
    [{"naming": 3}, {"naming": "blake2b"}, {"on_event": 5}, {"future_tokens": np.array([0, 1])}, {"future_tokens": 1.0}],
    ids=str,
)
def test_options_of_another_type(wrong: dict[str, Any]) -> None:
    with pytest.raises(kv.InputError, match=f"{next(iter(wrong))}: "):
        kv.ReuseOptions(**wrong)


def test_a_batch_without_reuse_says_so() -> None:
    with opened(CONFIG) as batch:
        assert batch.reuse is None
        sequence = batch.admit([1, 2, 3])
        assert (sequence.reused_tokens, batch.evictable_pages) == (0, 0)
        for options in ({"policy": ALL}, {"salt": b"s"}, {"media": [MediaSpan(0, 1, b"d" * 16)]}):
            with pytest.raises(kv.InputError, match="made with reuse="):
                batch.admit([1], **options)
        for call in (batch.publish, lambda: batch.note_tokens(sequence, [1]), lambda: batch.known_tokens(sequence)):
            with pytest.raises(kv.InputError, match="made without reuse"):
                call()
        assert batch.prefill_chunk(sequence, 2) == 2


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (tiny_config(None, 6), {}, "kept_window_pages: 0"),
        (recurrent_config(mamba2()), {}, "kept_states: 0"),
        (CONFIG, {"scrub": "poison"}, "together with reuse"),
    ],
)
def test_what_cannot_be_reused_is_refused(config: kv.LLMEngineConfig, options: dict[str, str], words: str) -> None:
    with kv.SharedResources.create_for_llm(config) as resources:
        with pytest.raises(kv.ConfigError, match=words):
            kv.Batch(resources, reuse=ReuseOptions(), **options)
        with pytest.raises(kv.InputError, match="is not a ReuseOptions"):
            kv.Batch(resources, reuse=True)
        kv.Batch(resources).close()


def test_nothing_planned_for_reuse_takes_nothing() -> None:
    config = tiny_config(None, 6)
    plan, more = kv.plan_memory(config), kv.plan_memory(replace(config, kept_window_pages=5))
    window, larger = plan.groups[1], more.groups[1]
    assert (window.kept_pages, larger.kept_pages) == (0, 5)
    assert (larger.usable_pages, larger.num_pages) == (window.usable_pages, window.num_pages + 5)
    states = recurrent_config(mamba2())
    assert not [r for r in kv.plan_memory(states).regions if r.name == "kept_states"]
    region = kv.plan_memory(replace(states, kept_states=3)).region("kept_states")
    with kv.SharedResources.create_for_llm(replace(states, kept_states=3)) as resources:
        assert region.shape == (3, resources.cache_managers[0].mamba_cache.slot_nbytes)


@pytest.mark.parametrize("window", [6, chunked(8)])
def test_windows_are_copied_at_points_only(window: Any) -> None:
    config = tiny_config(None, window, max_batch_size=3, kept_window_pages=8, max_batch_tokens=64)
    with reusing(config, policy=PublishPolicy(every_blocks=0)) as batch:
        first = computed(batch, list(range(22)))
        second = batch.admit([*range(20), 70, 71])
        assert second.reused_tokens == 20
        assert batch.audit().pools[1].cached == batch.reuse.cache.store.windows[0].num_kept > 0
        with pytest.raises(kv.RewindTooFar, match="its first 20 tokens were not computed here"):
            batch.rewind({second: 1})
        third = batch.admit([*range(13), 70])
        assert third.reused_tokens == (8 if window == chunked(8) else 0)
        with batch.capture_kv(second, 0, 20) as snapshot:
            assert (snapshot.first(0), snapshot.first(1)) == (0, 12 if window == 6 else 16)
            batch.retire(third)
            third = batch.admit(num_tokens=30)
            batch.restore_kv(third, snapshot)
        swapped = batch.swap_out(third)
        for heir in (lambda: batch.swap_in(swapped), lambda: batch.fork(second)):
            sequence = heir()
            batch.step({sequence: 3})
            batch.rewind({sequence: 3})
            with pytest.raises(kv.RewindTooFar, match="its first 20 tokens were not computed here"):
                batch.rewind({sequence: 1})
            batch.retire(sequence)
        batch.step({second: 2})
        with pytest.raises(kv.RewindTooFar):
            batch.rewind({second: 3})
        batch.rewind({second: 2})
        batch.rewind({second: 20})
        assert second.length == 0
        batch.rewind({first: 1})
        batch.audit()


def test_a_prompt_in_one_step_keeps_what_its_ring_still_has() -> None:
    config = tiny_config(None, 6, max_batch_size=3, kept_window_pages=8, max_batch_tokens=64)
    with reusing(config, policy=PublishPolicy(every_blocks=1)) as batch:
        first = batch.admit(list(range(33)))
        assert batch.prefill_chunk(first) == 4
        batch.step({first: 33})
        batch.publish()
        assert batch.reuse.figures.skipped_copies > 0
        assert batch.admit([*range(32), 9]).reused_tokens == 32
        assert batch.admit([*range(16), 9]).reused_tokens == 0
        batch.audit()


def test_states_that_are_verified_are_kept_for_prompts_only() -> None:
    config = recurrent_config(mamba2(), kept_states=3, max_verify_tokens=3, conv_state_room=3, max_step_tokens=3)
    with reusing(config, policy=ALL) as batch:
        first = computed(batch, list(range(9)))
        batch.note_tokens(first, [50, 51, 52])
        batch.step({first: 3})
        batch.retire(first)
        assert batch.reuse.cache.store.snapshots.num_kept == 1
        assert batch.admit([*range(9), 50, 51, 52, 1]).reused_tokens == 9
    with reusing(recurrent_config(mamba2(), kept_states=3), policy=ALL) as batch:
        first = computed(batch, list(range(9)))
        batch.note_tokens(first, [50, 51, 52])
        batch.step({first: 3})
        batch.retire(first)
        assert batch.admit([*range(9), 50, 51, 52, 1]).reused_tokens == 12


def test_snapshots_of_states_are_taken_where_a_chunk_ends() -> None:
    config = recurrent_config(mamba2(), kept_states=3)
    with reusing(config, policy=PublishPolicy(every_blocks=2)) as batch:
        first = batch.admit(list(range(21)))
        chunks = []
        while first.pending_tokens:
            chunks.append(batch.prefill_chunk(first))
            batch.step({first: chunks[-1]})
        assert chunks == [8, 8, 5]
        assert batch.admit([*range(20), 9]).reused_tokens == 16
        assert batch.admit([*range(21), 9]).reused_tokens == 21
        assert batch.reuse.cache.store.snapshots.num_kept == 3
        batch.audit()
