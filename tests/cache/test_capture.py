"""Steps that run without the host: captured steps, counts from the device, and what the host knows of them."""

from __future__ import annotations

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.dtypes import dtype
from numba_kv.geometry import FULL
from numba_kv.kernels.layout import Status


def make(rows: int = 3, capacity: int = 96, step: int = 1, **changes: object) -> kv.SharedResources:
    layers = (
        kv.AttentionLayer(num_kv_heads=1, head_dim=8, window=FULL),
        kv.AttentionLayer(num_kv_heads=1, head_dim=8, window=kv.Window("sliding", 10)),
    )
    settings = {"page_tokens": 4, "max_batch_tokens": 64, "lookahead_pages": 1, **changes}
    config = kv.LLMEngineConfig(
        layers=layers, max_batch_size=rows, max_kv_cache_capacity=capacity, max_step_tokens=step, **settings
    )
    return kv.SharedResources.create_for_llm(config)


def device_array(resources: kv.SharedResources, values: list[int]) -> kv.Tensor:
    tensor = resources.device.tensor((len(values),), dtype("int32"))
    tensor.fill_from(np.array(values, np.int32))
    return tensor


def snapshot(batch: kv.Batch) -> dict[str, np.ndarray]:
    buffers = batch.resources.cache_managers[0].step_buffers
    names = ("lengths", "high_water", "mapped_begin", "seq_lens", "context_lens", "leased", "cu_seqlens_q", "status")
    found = {name: getattr(buffers, name).to_host() for name in names}
    for name in ("lengths", "high_water"):  # the device keeps them once a group
        assert (found[name] == found[name][0]).all()
        found[name] = found[name][0]
    for g in range(2):
        found[f"page_tables {g}"] = buffers.page_tables[g].to_host()
        found[f"block_tables {g}"] = buffers.block_tables[g].to_host()
    return found


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    for name, values in one.items():
        assert np.array_equal(values, other[name]), name


def prefilled(resources: kv.SharedResources, prompts: list[int]) -> tuple[kv.Batch, list[kv.Sequence]]:
    batch = kv.Batch(resources)
    sequences = batch.update(admit=prompts)
    batch.step({s: s.pending_tokens for s in sequences})
    return batch, sequences


def test_a_captured_step_does_what_a_step_does() -> None:
    with make() as one, make() as other:
        captured, plain = prefilled(one, [5, 13, 1])[0], prefilled(other, [5, 13, 1])[0]
        graph = captured.capture()
        for _ in range(3):
            graph.reserve(7)
            sent = one.device.bytes_to_device
            for _ in range(7):
                graph.launch()
            assert one.device.bytes_to_device == sent
            graph.advanced()
            for _ in range(7):
                view = plain.step(1)
        assert [s.length for s in captured.sequences] == [26, 34, 22]
        mine, theirs = snapshot(captured), snapshot(plain)
        for name in ("page_tables 0", "block_tables 0", "leased"):  # pages run ahead differently
            mine.pop(name)
            theirs.pop(name)
        assert_equal(mine, theirs)
        assert view.num_tokens == 3
        captured.audit()


def test_a_captured_step_stays_right_when_rows_change() -> None:
    """A captured graph reads freed memory if clearing replaces buffers (ApxInf#89): ours keeps every address."""
    with make() as resources:
        batch, (a, b, c) = prefilled(resources, [5, 13, 1])
        graph = batch.capture()
        batch.update(retire=[a])
        graph.reserve(2)
        graph.launch()
        graph.launch()
        graph.advanced()
        assert [s.length for s in (b, c)] == [15, 3]
        batch.compact()
        (d,) = batch.update(admit=[9])
        batch.step({d: 9})
        graph.reserve(1)
        graph.launch()
        graph.advanced()
        assert [s.length for s in (b, c, d)] == [16, 4, 10]
        batch.audit()
        graph.close()
        graph.reserve(1)
        with pytest.raises(kv.StateError, match="closed"):
            graph.launch()


def test_launches_need_a_reservation_and_are_noted_once() -> None:
    with make() as resources:
        batch, sequences = prefilled(resources, [5, 13, 1])
        graph = batch.capture()
        with pytest.raises(kv.StateError, match="0 reserved ones are left"):
            graph.launch()
        graph.reserve(2)
        graph.launch()
        with pytest.raises(kv.StateError, match="2 are noted, 1 were launched"):
            graph.advanced(2)
        graph.launch()
        with pytest.raises(kv.StateError, match="reserve more"):
            graph.launch()
        for call in (lambda: batch.step(1), batch.audit, batch.compact, lambda: batch.rewind({sequences[0]: 1})):
            with pytest.raises(kv.StateError, match="2 steps were launched and not noted"):
                call()
        graph.advanced(1)
        batch.advanced(1)
        assert graph.launched == 0
        assert sequences[0].length == 7
        batch.audit()


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None, "1"])
def test_steps_and_tokens_of_hostless_calls_are_positive_integers(bad: object) -> None:
    with make() as resources:
        batch, _ = prefilled(resources, [5, 13, 1])
        calls = [batch.reserve, batch.advanced, batch.capture, lambda n: batch.capture(steps=n)]
        for call in (*calls, lambda n: batch.reserve(1, n), lambda n: batch.enqueue_step(resources.stream, n)):
            with pytest.raises(kv.InputError):
                call(bad)
        batch.audit()


@pytest.mark.parametrize("many", [97, 2**62, 10**30])
def test_more_steps_than_a_row_has_tokens_are_refused(many: int) -> None:
    with make(step=4) as resources:
        batch, _ = prefilled(resources, [5, 13, 1])
        for call in (batch.reserve, batch.advanced, lambda n: batch.capture(steps=n), lambda n: batch.reserve(n, 4)):
            with pytest.raises(kv.CapacityError):
                call(many)
        batch.step(1)
        batch.audit()


def test_refused_and_reading_calls_keep_the_reservation() -> None:
    with make() as resources:
        batch, sequences = prefilled(resources, [5, 13, 1])
        graph = batch.capture()
        graph.reserve(20)
        with pytest.raises(kv.InputError):
            batch.step(65)
        with pytest.raises(kv.CapacityError):
            batch.reserve(90)
        with pytest.raises(kv.InputError):
            batch.rewind({sequences[0]: 6})
        batch.audit()
        batch.sync_lengths()
        graph.launch()
        graph.advanced()
        batch.step(1)
        with pytest.raises(kv.StateError, match="0 reserved ones"):
            graph.launch()
        batch.audit()


def test_a_launch_takes_the_tokens_that_were_reserved() -> None:
    with make(step=4) as resources:
        batch, _ = prefilled(resources, [5, 13, 1])
        graph = batch.capture(4)
        batch.reserve(8)
        with pytest.raises(kv.StateError, match="steps of 4 tokens a row, but steps of 1"):
            graph.launch()
        graph.reserve(2)
        graph.launch()
        graph.advanced()
        batch.audit()


def test_launches_of_several_graphs_are_noted_in_order() -> None:
    with make(step=4) as resources:
        batch, sequences = prefilled(resources, [5, 13, 1])
        counts = device_array(resources, [1, 0, 1])
        plain, driven = batch.capture(), batch.capture(counts=counts)
        batch.reserve(10)
        plain.launch()
        driven.launch()
        plain.launch()
        batch.advanced(3)
        assert (plain.launched, driven.launched) == (0, 0)
        batch.sync_lengths()
        assert [s.length for s in sequences] == [8, 15, 4]
        batch.audit()


def test_reserve_refuses_what_does_not_fit_and_changes_nothing() -> None:
    with make(capacity=40) as resources:
        batch, _ = prefilled(resources, [5, 13, 1])
        before = snapshot(batch)
        with pytest.raises(kv.CapacityError) as refused:
            batch.reserve(28)
        assert (refused.value.needed, refused.value.free) == (28, 27)
        assert_equal(before, snapshot(batch))
        batch.reserve(27)
        batch.audit()


def test_enqueue_step_and_its_notes() -> None:
    with make() as resources:
        batch, sequences = prefilled(resources, [5, 13, 1])
        batch.reserve(2)
        batch.enqueue_step(resources.stream)
        batch.enqueue_step(resources.stream)
        batch.advanced(2)
        assert [s.length for s in sequences] == [7, 15, 3]
        batch.audit()
        with pytest.raises(kv.StateError, match="1 are noted, 0 were reserved"):
            batch.advanced(1)
        with pytest.raises(kv.StateError, match="0 reserved ones"):
            batch.enqueue_step(resources.stream)


def test_counts_from_the_device() -> None:
    with make(step=4) as resources:
        batch, (a, b, c) = prefilled(resources, [5, 13, 1])
        counts = device_array(resources, [0, 3, 4])
        view = batch.step(4, counts=counts)
        assert view.seq_lens.to_host().tolist() == [5, 16, 5]
        assert view.cu_seqlens_q.to_host().tolist() == [0, 4, 8, 12]
        assert not view.kv_len_is_exact
        assert view.kv_len_upper == 17
        slots = view.slot_mapping[0].to_host()[:12]
        assert ((slots >= 0) == np.array([0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1], bool)).all()
        with pytest.raises(kv.StateError, match="sync_lengths"):
            _ = a.length
        with pytest.raises(kv.StateError, match="sync_lengths"):
            batch.rewind({b: 1})
        batch.sync_lengths()
        assert [s.length for s in (a, b, c)] == [5, 16, 5]
        batch.audit()


@pytest.mark.parametrize("form", ["take_back", "accepted"])
def test_verification_of_drafts_is_one_launch(form: str) -> None:
    """Take the rejected drafts of the last step back and append the next drafts: one kernel, no word from the host."""
    with make(step=4, lookahead_pages=4) as resources:
        batch, sequences = prefilled(resources, [5, 13, 1])
        batch.step(4)
        keep = [1, 4, 2]
        array = device_array(resources, keep if form == "accepted" else [4 - n for n in keep])
        launches, sent = batch.stats.launches, resources.device.bytes_to_device
        view = batch.step(4, **{form: array})
        assert batch.stats.launches == launches + 1
        assert resources.device.bytes_to_device == sent
        assert view.context_lens.to_host().tolist() == [6, 17, 3]
        assert view.seq_lens.to_host().tolist() == [10, 21, 7]
        batch.sync_lengths()
        assert [s.length for s in sequences] == [10, 21, 7]
        batch.audit()


def test_the_device_refuses_a_row_and_goes_on_with_the_others() -> None:
    with make(step=4) as resources:
        batch, _ = prefilled(resources, [5, 13, 1])
        batch.step(2)
        before = snapshot(batch)
        view = batch.step(2, counts=device_array(resources, [1, 3, -1]), accepted=device_array(resources, [2, 2, 2]))
        status = snapshot(batch)["status"].tolist()
        assert status == [Status.OK, Status.BAD_COUNT, Status.BAD_COUNT]
        assert view.seq_lens.to_host().tolist() == [8, 15, 3]
        assert (view.slot_mapping[0].to_host()[1:6] == -1).all()
        after = snapshot(batch)
        for row in (1, 2):
            assert after["lengths"][row] == before["lengths"][row]
            assert np.array_equal(after["page_tables 1"][row], before["page_tables 1"][row])
        with pytest.raises(kv.StateError, match="BAD_COUNT"):
            batch.audit()
        refused = batch.refusals()
        assert {s.row: status for s, status in refused.items()} == {1: Status.BAD_COUNT, 2: Status.BAD_COUNT}
        assert batch.refusals() == {}
        batch.audit()


def test_accepted_more_than_the_last_step_is_refused_on_the_device() -> None:
    with make(step=4) as resources:
        batch, _ = prefilled(resources, [5, 13, 1])
        batch.step(2)
        batch.step(1, accepted=device_array(resources, [3, -1, 2]))
        assert snapshot(batch)["status"].tolist() == [Status.BAD_COUNT, Status.BAD_COUNT, Status.OK]


def test_a_row_that_runs_out_stops_by_itself() -> None:
    """Hundreds of steps with no host: a row that cannot go on stops where it is, its status is set, the others go on."""
    with make(rows=2, capacity=96, lookahead_pages=4) as resources:
        batch = kv.Batch(resources)
        a, b = batch.update(admit=[1, 80])
        batch.step({a: 1})
        for _ in range(4):
            batch.step({b: 20})
        graph = batch.capture()
        with pytest.raises(kv.CapacityError):
            graph.reserve(20)
        assert graph.reserve(20, partial=True) == 16
        for _ in range(20):
            graph.launch()
        graph.advanced()
        assert [a.length, b.length] == [21, 96]
        with pytest.raises(kv.StateError, match="OVER_CAPACITY"):
            batch.audit()
        assert batch.refusals() == {b: Status.OVER_CAPACITY}
        batch.audit()


def test_rows_stop_where_the_pool_ends() -> None:
    with make(rows=2, capacity=96, num_kv_pages=26, lookahead_pages=0) as resources:
        batch, (a, b) = prefilled(resources, [10, 30])
        graph = batch.capture()
        steps = graph.reserve(90, partial=True)
        for _ in range(90):
            graph.launch()
        graph.advanced()
        assert steps == min(a.length - 10, b.length - 30)
        assert steps >= 30
        assert batch.free_pages < 2
        assert set(batch.refusals().values()) == {Status.PAGE_MISSING}
        batch.audit()


@pytest.mark.parametrize("retire", [False, True])
def test_a_refused_step_leaves_the_batch_usable(retire: bool) -> None:
    """What the device refused is read, cleared and forgotten; the row's table is clean when it ends."""
    with make(step=4) as resources:
        batch, sequences = prefilled(resources, [21, 13, 1])
        batch.step(2)
        batch.step(4, accepted=device_array(resources, [7, 2, 2]))
        assert batch.refusals() == {sequences[0]: Status.BAD_COUNT}
        if retire:
            batch.retire(sequences[0])
        batch.sync_lengths()
        batch.audit()
        assert [s.length for s in sequences[1:]] == [19, 7]
        if not retire:
            assert sequences[0].length == 23
        batch.step(1)
        batch.audit()


def test_a_step_after_a_driven_one_knows_that_it_does_not_know() -> None:
    with make(step=4) as resources:
        batch, _ = prefilled(resources, [5, 13, 1])
        batch.step(2, counts=device_array(resources, [0, 0, 0]))
        views = [batch.step(1) for _ in range(3)]
        assert [view.kv_len_is_exact for view in views] == [False] * 3
        assert [view.kv_len_upper for view in views] == [16, 17, 18]
        batch.sync_lengths()
        assert batch.step(1).kv_len_is_exact


def test_device_arrays_are_checked() -> None:
    with make(step=4) as resources, make() as other:
        batch, _ = prefilled(resources, [5, 13, 1])
        good = device_array(resources, [1, 1, 1])
        for bad in (device_array(resources, [1, 1]), resources.device.tensor((3,), dtype("int64")), good[::2]):
            with pytest.raises(kv.ShapeError, match="counts"):
                batch.step(1, counts=bad)
        for bad in ([1, 1, 1], device_array(other, [1, 1, 1]), "abc"):
            with pytest.raises(kv.InteropError, match="counts"):
                batch.step(1, counts=bad)
        with pytest.raises(kv.InputError, match="one of them"):
            batch.step(1, take_back=good, accepted=good)
        batch.audit()


def test_numpy_arrays_are_read_in_place_on_the_host() -> None:
    with make(step=4) as resources:
        if resources.device.target == "cuda":
            pytest.skip("device memory is not reachable by NumPy")
        batch, (a, _, _) = prefilled(resources, [5, 13, 1])
        counts = np.array([1, 0, 0], np.int32)
        graph = batch.capture(2, counts=counts)
        graph.reserve(2)
        graph.launch()
        counts[0] = 2
        graph.launch()
        graph.advanced()
        batch.sync_lengths()
        assert a.length == 8
        batch.audit()


def test_hand_over_moves_all_work() -> None:
    with make() as resources:
        batch, _ = prefilled(resources, [5, 13, 1])
        stream = resources.device.as_stream(None)
        resources.hand_over(stream)
        assert resources.stream is stream
        batch.step(1)
        batch.audit()
        with pytest.raises(kv.InputError):
            resources.hand_over(None)


def test_bounds_of_lengths_over_many_driven_steps() -> None:
    rng = np.random.default_rng(3)
    with make(step=3, capacity=96) as resources:
        batch, sequences = prefilled(resources, [5, 13, 1])
        expected, last = np.array([5, 13, 1]), np.array([0, 0, 0])
        batch.step(3)
        expected, last = expected + 3, np.array([3, 3, 3])
        for _ in range(15):
            keep = np.array([rng.integers(0, n + 1) for n in last])
            counts = rng.integers(0, 4, 3)
            batch.step(
                3,
                counts=device_array(resources, counts.tolist()),
                accepted=device_array(resources, keep.tolist()),
            )
            expected, last = expected - last + keep + counts, counts
            if rng.random() < 0.3:
                batch.sync_lengths()
                assert [s.length for s in sequences] == expected.tolist()
        batch.audit()
        assert [s.length for s in sequences] == expected.tolist()
