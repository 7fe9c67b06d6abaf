"""Speculative rounds without the host: captured by the batch or by the caller, they leave what the same calls leave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.batch import RoundSteps
from numba_kv.kernels.jit import Kernel
from tests.helpers.rounds import DEPLOYMENTS, ROWS, RoundModel, opened_rounds
from tests.helpers.states import everything, int32, kinds_of

PROMPTS = (9, 4)


def seen(model: RoundModel) -> dict[str, Any]:
    """Return what can be seen of both models: lengths, tables, step data and states."""
    batch = model.batch
    batch.sync_lengths()
    batch.audit()
    found: dict[str, Any] = {}
    for place, caches in enumerate(batch.resources.cache_managers):
        buffers = caches.step_buffers
        for name in ("lengths", "high_water", "appended", "mapped_begin", "status", "seq_lens", "context_lens"):
            found[f"{place} {name}"] = getattr(buffers, name).to_host()
        for g, table in list(enumerate(buffers.page_tables))[1:]:  # of the full group pages run ahead
            found[f"{place} table {g}"] = table.to_host()
    states = batch.resources.cache_managers[0].mamba_cache
    for name in kinds_of(states):
        found[name] = everything(states, name)
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_captured_rounds_are_the_calls(name: str) -> None:
    """Two rounds a launch, three launches; the last row is not in use. Every counter agrees. transformers#45745"""
    counts = [2, 1, 55]
    with opened_rounds(name) as called, opened_rounds(name) as captured:
        called.admit(*PROMPTS)
        captured.admit(*PROMPTS)
        batch, steps = called.batch, called.batch.round_steps
        given = int32(batch.resources.device, counts)
        for _ in range(6):
            if steps.catch_up is not None:
                batch.catch_up(steps.catch_up)
            for _ in range(steps.draft_steps):
                batch.draft_step()
            batch.verify_step()
            batch.commit(given)
            batch.sync_lengths()  # or the host's bounds reach the capacity, long before the rows do
        device = captured.batch.resources.device
        accepted = int32(device, counts)
        graph = captured.batch.capture(accepted, rounds=2)
        graph.reserve(6)
        sent = device.bytes_to_device
        for _ in range(3):
            graph.launch()
        assert device.bytes_to_device == sent
        with pytest.raises(kv.StateError, match="reserved ones are left"):
            graph.launch()
        with pytest.raises(kv.StateError, match="launched and not noted"):
            captured.batch.step(1)
        graph.advanced()
        same(seen(captured), seen(called))
        assert [s.length for s in captured.batch.sequences] == [9 + 6 * 2, 4 + 6]
        graph.close()
        with pytest.raises(kv.StateError, match="closed"):
            graph.launch()
        for array in (given, accepted):
            array._memory.close(array.device.stream)


@pytest.mark.parametrize("name", ["tree", "replay"])
def test_rounds_of_trees_are_captured(name: str) -> None:
    """The arrays are read at each replay."""
    with opened_rounds(name) as model:
        sequences = model.admit(*PROMPTS)
        batch, device = model.batch, model.batch.resources.device
        accepted, nodes = int32(device, [0] * ROWS), int32(device, [[-1] * 3] * ROWS)
        graph = batch.capture(accepted, nodes, tree=batch.tree((-1, 0, 0, 1)))
        for paths in ([(0, 1, 3), (0, 2, -1), (0, 0, 0)], [(0, -1, -1), (0, 1, -1), (9, 9, 9)]):
            real = [[n for n in path if n >= 0] for path in paths[:2]]
            accepted.fill_from(np.array([*map(len, real), 9], np.int32))
            nodes.fill_from(np.array(paths, np.int32))
            before = [s.length for s in sequences]
            graph.reserve(1)
            graph.launch()
            graph.advanced()
            batch.sync_lengths()
            assert [s.length for s in sequences] == [n + len(path) for n, path in zip(before, real, strict=True)]
            assert batch.refusals() == {}
            batch.audit()
        graph.close()
        for array in (accepted, nodes):
            array._memory.close(device.stream)


def test_a_round_in_a_capture_of_the_callers_own() -> None:
    """Model code runs between the calls; here it only looks at what it would read."""
    with opened_rounds("chain") as model:
        sequences = model.admit(*PROMPTS)
        batch, device = model.batch, model.batch.resources.device
        accepted = int32(device, [3, 1, 0])
        steps = RoundSteps(verify_tokens=4, draft_steps=3)

        def work(stream: object) -> None:
            for _ in range(3):
                batch.enqueue_draft_step(stream)
            batch.enqueue_verify_step(stream)
            batch.enqueue_commit(stream, accepted)

        batch.reserve(5, steps)
        graph = device.capture(work)
        for _ in range(5):
            graph.launch(device.stream)
        batch.advanced(5, steps)
        batch.sync_lengths()
        assert [s.length for s in sequences] == [9 + 15, 4 + 5]
        assert [batch.draft_length(s) for s in sequences] == [9 + 15, 4 + 5]
        batch.audit()
        graph.close()
        accepted._memory.close(device.stream)


def test_catching_up_in_a_capture_of_the_callers_own() -> None:
    """Rows are behind by different amounts in every round; the graph leaves what the calls leave."""
    counts, steps = [4, 1, 0], RoundSteps(verify_tokens=4, draft_steps=2, catch_up=1)
    with opened_rounds("chain") as called, opened_rounds("chain") as captured:
        called.admit(*PROMPTS)
        captured.admit(*PROMPTS)
        batch = called.batch
        accepted = int32(batch.resources.device, counts)
        for _ in range(4):
            batch.catch_up(1)
            for _ in range(2):
                batch.draft_step()
            batch.verify_step()
            batch.commit(accepted)
            batch.sync_lengths()
        own, device = captured.batch, captured.batch.resources.device
        given = int32(device, counts)

        def work(stream: object) -> None:
            own.enqueue_catch_up(stream, 1)
            for _ in range(2):
                own.enqueue_draft_step(stream)
            own.enqueue_verify_step(stream)
            own.enqueue_commit(stream, given)

        with pytest.raises(kv.InputError, match="ahead: 2 is not 0 or 1"):
            own.enqueue_catch_up(device.stream, 2)
        own.reserve(4, steps)
        graph = device.capture(work)
        assert [own.draft_length(s) for s in own.sequences] == list(PROMPTS)  # nothing ran
        for _ in range(4):
            graph.launch(device.stream)
        own.advanced(4, steps)
        same(seen(captured), seen(called))
        assert [(s.length, own.draft_length(s)) for s in own.sequences] == [(9 + 16, 9 + 15), (4 + 4, 4 + 4)]
        graph.close()
        for array in (accepted, given):
            array._memory.close(array.device.stream)


@pytest.mark.parametrize("name", ["tree", "replay", "snapshots"])
def test_nothing_is_bound_while_rounds_are_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, counts and paths are a caller's own arrays, which nobody has seen before. On `cpu` a launch is what captures."""
    bound: list[Kernel] = []
    bind = Kernel.bind

    def noted(kernel: Kernel, *arguments: Any, **options: Any) -> Any:
        bound.append(kernel)
        return bind(kernel, *arguments, **options)

    monkeypatch.setattr(Kernel, "bind", noted)
    with opened_rounds(name) as model:
        model.admit(*PROMPTS)
        batch, device = model.batch, model.batch.resources.device
        arrays = [int32(device, values) for values in ([1] * ROWS, [[0, 1, 3]] * ROWS, [[-1, 0, 0, 1]] * ROWS)]
        accepted, nodes, tree = arrays
        compiled = set(bound)

        def work(stream: object) -> None:
            batch.enqueue_verify_step(stream, tree=tree)
            batch.enqueue_commit(stream, accepted, nodes)

        steps = RoundSteps(verify_tokens=4)
        batch.reserve(1, steps)
        bound.clear()
        own = device.capture(work)
        own.launch(device.stream)
        assert set(bound) <= compiled  # addresses are new there, kernels are not
        batch.advanced(1, steps)
        arrays += [int32(device, values) for values in ([1] * ROWS, [[0, 1]] * ROWS, [[-1, 0, 1]] * ROWS)]
        captured: list[int] = []
        capture = device.capture

        def counted(work: Any) -> Any:
            captured.append(len(bound))
            found = capture(work)
            captured.append(len(bound))
            return found

        with monkeypatch.context() as patch:
            patch.setattr(device, "capture", counted)
            graph = batch.capture(arrays[3], arrays[4], tree=arrays[5])
        assert captured[0] == captured[1]
        graph.reserve(1)
        bound.clear()
        graph.launch()
        assert not bound
        graph.advanced()
        batch.sync_lengths()
        assert [s.length for s in batch.sequences] == [n + 2 for n in PROMPTS]
        batch.audit()
        for graph_made in (own, graph):
            graph_made.close()
        for array in arrays:
            array._memory.close(device.stream)


def test_a_launch_that_fails_leaves_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_rounds("chain") as model:
        model.admit(*PROMPTS)
        batch, device = model.batch, model.batch.resources.device
        accepted = int32(device, [1] * ROWS)
        graph = batch.capture(accepted)
        model.draft_step()
        graph.reserve(1)

        def fail(stream: object) -> None:
            raise kv.DeviceError("launch failed")

        with monkeypatch.context() as patch:
            patch.setattr(graph._graph, "launch", fail)
            with pytest.raises(kv.DeviceError):
                graph.launch()
        assert batch._drafted == 1
        assert batch.base.stepper.reservation.launched_steps == 0
        graph.close()
        accepted._memory.close(device.stream)


def test_a_round_that_waits_is_committed_before_a_launch() -> None:
    with opened_rounds("chain") as model:
        first, second = model.admit(*PROMPTS)
        batch, device = model.batch, model.batch.resources.device
        accepted = int32(device, [1] * ROWS)
        graph = batch.capture(accepted)
        model.verify(3)
        with pytest.raises(kv.StateError, match="launch: the last verification step is not committed"):
            graph.launch()
        batch.commit({first: 1, second: 2})
        model.accepted({first: (0,), second: (0, 1)})
        model.check()
        graph.close()
        accepted._memory.close(device.stream)


@pytest.mark.parametrize("name", ["replay", "snapshots"])
def test_a_capture_between_a_step_and_its_commit_changes_neither(name: str) -> None:
    """Of fewer tokens and without a tree, by the batch and by the caller."""
    with opened_rounds(name) as model:
        first, second = model.admit(*PROMPTS)
        batch, device = model.batch, model.batch.resources.device
        accepted = int32(device, [1] * ROWS)
        model.verify(parents=(-1, 0, 0, 1))

        def work(stream: object) -> None:
            batch.enqueue_verify_step(stream, 2)
            batch.enqueue_commit(stream, accepted)

        graphs = [device.capture(work), batch.capture(accepted, steps=RoundSteps(verify_tokens=2))]
        with pytest.raises(kv.InputError, match="whose parent is 0 and not 1"):
            batch.commit({first: (0, 1, 2), second: (0,)})
        paths = {first: (0, 1, 3), second: (0, 2)}
        batch.commit(paths)
        model.accepted(paths)
        model.check()
        for graph in graphs:
            graph.close()
        accepted._memory.close(device.stream)


def test_room_for_a_draft_that_has_not_its_prompt() -> None:
    """The base took the prompt as a verification step: rounds that catch up bring it to the draft; others are refused whole."""
    with opened_rounds("chain", catch_up_tokens=4) as model:
        batch, device = model.batch, model.batch.resources.device
        (sequence,) = batch.update(admit=[3])
        batch.verify_step({sequence: 3})
        batch.commit({sequence: 3})
        assert (sequence.length, batch.draft_length(sequence)) == (3, 0)
        free = batch.free_pages
        with pytest.raises(kv.StateError, match="3 unprefilled tokens"):
            batch.reserve(9, RoundSteps(verify_tokens=4, draft_steps=3))
        assert batch.free_pages == free
        accepted = int32(device, [2] * ROWS)
        graph = batch.capture(accepted)
        with pytest.raises(kv.StateError, match="0 reserved ones are left"):
            graph.launch()
        graph.reserve(2)
        for _ in range(2):
            graph.launch()
        graph.advanced()
        batch.sync_lengths()
        assert (sequence.length, batch.draft_length(sequence)) == (7, 7)
        assert batch.refusals() == {}
        batch.audit()
        graph.close()
        accepted._memory.close(device.stream)


def test_a_row_that_is_refused_in_a_graph_says_why() -> None:
    with opened_rounds("chain") as model:
        first, second = model.admit(*PROMPTS)
        batch, device = model.batch, model.batch.resources.device
        accepted = int32(device, [5, 1, 0])
        graph = batch.capture(accepted)
        graph.reserve(1)
        graph.launch()
        graph.advanced()
        assert batch.refusals() == {first: kv.Status.BAD_COUNT}
        batch.sync_lengths()
        assert (first.length, second.length) == (9 + 4, 4 + 1)
        batch.audit()
        graph.close()
        accepted._memory.close(device.stream)


def test_rounds_that_cannot_be() -> None:
    with opened_rounds("chain") as model:
        batch, device = model.batch, model.batch.resources.device
        accepted = int32(device, [1, 1, 1])
        wrong = {
            "not a RoundSteps": 3,
            "5 of a row": RoundSteps(verify_tokens=5),
            "6 tokens drafted": RoundSteps(verify_tokens=4, draft_steps=3, draft_tokens=2),
        }
        for match, steps in wrong.items():
            with pytest.raises(kv.InputError, match=match):
                batch.capture(accepted, steps=steps)  # type: ignore[arg-type]
        with pytest.raises(kv.StateError, match="no sequence is active"):
            batch.reserve(1)
        for number in (49, 10**20):
            for call in (batch.reserve, batch.advanced, lambda n: batch.capture(accepted, rounds=n)):
                with pytest.raises(kv.CapacityError, match=f"rounds: {number} are more than the 48 tokens of a row"):
                    call(number)
        model.admit(45)
        with pytest.raises(kv.CapacityError, match="exceed max_kv_cache_capacity"):
            batch.reserve(1)
        batch.audit()
        accepted._memory.close(device.stream)


def test_rounds_that_the_draft_has_no_room_for_are_not_noted_in_the_base() -> None:
    with opened_rounds("chain") as model:
        (sequence,) = model.admit(8)
        batch, plain = model.batch, RoundSteps(verify_tokens=4)
        batch.reserve(1, plain)
        for each, match in ({"draft_steps": 1}, "0 were reserved"), ({"draft_steps": 2, "draft_tokens": 2}, "2 are noted"):
            with pytest.raises(kv.StateError, match=match):
                batch.advanced(1, RoundSteps(verify_tokens=4, **each))
        assert (batch.is_exact, sequence.length) == (True, 8)
        batch.advanced(1, plain)  # whose room is still there
        batch.sync_lengths()
        assert (sequence.length, batch.draft_length(sequence)) == (8, 8)


@pytest.mark.parametrize("name", ["verify_tokens", "draft_steps", "draft_tokens", "catch_up"])
def test_what_a_round_is_made_of_are_integers(name: str) -> None:
    wrong = [1.5, 1.0, "a", True, np.True_, -1, 10**30, np.array([0, 1]), np.array([1])]
    wrong += {"verify_tokens": [0, None], "draft_steps": [None], "draft_tokens": [0, None], "catch_up": [2]}[name]
    for value in wrong:
        with pytest.raises(kv.InputError, match=f"{name}: .* is not an integer in "):
            RoundSteps(**{"verify_tokens": 2, name: value})
    steps = RoundSteps(**{"verify_tokens": 2, name: np.int64(1)})
    assert type(getattr(steps, name)) is int
    assert steps == RoundSteps(**{"verify_tokens": 2, name: 1})


def test_steady_rounds_send_nothing() -> None:
    """Calls, not graphs: once layouts are there and pages run ahead, no byte goes to the device."""
    with opened_rounds("chain") as model:
        model.admit(1, 1)
        batch, device = model.batch, model.batch.resources.device
        accepted = int32(device, [1, 0, 0])
        sent = []
        for _ in range(4):
            before = device.bytes_to_device
            batch.catch_up(1)
            for _ in range(2):
                batch.draft_step()
            batch.verify_step()
            batch.commit(accepted)
            sent.append(device.bytes_to_device - before)
        assert sent[-1] == 0
        accepted._memory.close(device.stream)
