"""The rotary rows of a step: those of every token's position, also inside a capture and with several row sets."""

from __future__ import annotations

import numpy as np
import pytest

import numba_kv as kv
from numba_kv.bindings import bind_rope
from tests.helpers.models import tiny_config
from tests.helpers.ropes import rope

LONG = {"short_factor": (1.0, 1.1, 1.2, 1.3), "long_factor": (1.0, 2.0, 4.0, 8.0), "original_max_position_embeddings": 5}


def test_sliding_and_full_rows_of_ragged_steps() -> None:
    config = tiny_config(None, 6, ropes=(rope(theta=1e3), rope(theta=1e6, dim=4)))
    with kv.SharedResources.create_for_llm(config) as resources, kv.Batch(resources) as batch:
        rotary = kv.StepRope(resources)
        tables = [table.tensor.to_host()[0] for table in rotary.tables]
        assert [t.shape for t in tables] == [(64, 8), (64, 4)]
        first, second = batch.update(admit=[9, 5])
        for counts, positions in (({first: 9, second: 5}, [*range(9), *range(5)]), ({first: 1, second: 1}, [9, 5])):
            view = batch.step(counts)
            found = rotary.gather(view)
            for rows, table, whole in zip(found, tables, rotary.rows, strict=True):
                assert np.array_equal(rows.to_host(), table[positions])
                assert rows.address == whole.address
        bound = kv.bind(resources, view, extra=bind_rope(rotary.rows, view))
        assert np.array_equal(bound["rope_rotary_cos_sin_full"].to_host(), tables[1][[9, 5]])


def test_a_captured_gather_follows_the_steps() -> None:
    config = tiny_config(None, 6, ropes=(rope(),))
    with kv.SharedResources.create_for_llm(config) as resources, kv.Batch(resources) as batch:
        rotary, device = kv.StepRope(resources), resources.device
        sequences = batch.update(admit=[3, 1])
        batch.step({sequences[0]: 3, sequences[1]: 1})
        view = batch.step(1)
        rotary.gather(view)  # compiled and bound before the capture

        def work(stream: kv.Stream) -> None:
            batch.enqueue_step(stream)
            rotary.gather(view, stream=stream)

        batch.reserve(20)
        graph = device.capture(work)
        for _ in range(20):
            graph.launch(device.stream)
        batch.advanced(20)
        table = rotary.tables[0].tensor.to_host()[0]
        assert np.array_equal(rotary.rows[0].to_host()[:2], table[[23, 21]])
        graph.close()


def test_short_and_long_factors_are_chosen_by_the_caller() -> None:
    config = tiny_config(None, max_kv_cache_capacity=16, ropes=(rope("longrope", positions=20, **LONG),))
    with kv.SharedResources.create_for_llm(config) as resources, kv.Batch(resources) as batch:
        rotary = kv.StepRope(resources)
        table = rotary.tables[0]
        sequences = batch.update(admit=[3, 12])
        view = batch.step({sequences[0]: 3, sequences[1]: 12})
        assert not rotary.gather(view)[0].to_host().any()  # nobody said which
        rotary.set_row_sets(np.array([table.set_index(3), table.set_index(12)], np.int32))
        found = rotary.gather(view)[0].to_host()
        short, long = (t.to_host()[0] for t in table.tensors)
        assert np.array_equal(found, np.concatenate([short[:3], long[:12]]))


def test_multimodal_rows_are_one_each() -> None:
    config = tiny_config(None, ropes=(rope(mrope_section=(1, 2, 1)),))
    with kv.SharedResources.create_for_llm(config) as resources, kv.Batch(resources) as batch:
        rotary = kv.StepRope(resources)
        assert rotary.row_sets[0] is not None
        assert rotary.row_sets[0].to_host().tolist() == [0, 1]
        sequences = batch.update(admit=[2, 3])
        view = batch.step({sequences[0]: 2, sequences[1]: 3})
        rows = rotary.tables[0].tensor.to_host()
        assert np.array_equal(rotary.gather(view)[0].to_host(), np.concatenate([rows[0, :2], rows[1, :3]]))


def test_what_is_refused() -> None:
    with kv.SharedResources.create_for_llm(tiny_config(None, ropes=(rope(),))) as resources:
        with kv.SharedResources.create_for_llm(tiny_config(None)) as other, kv.Batch(other) as batch:
            batch.admit(num_tokens=1)
            step = batch.step({batch.sequences[0]: 1})
            assert kv.StepRope(other).gather(step) == ()  # a model that does not rotate
            with pytest.raises(kv.InputError, match="not a step of these resources"):
                kv.StepRope(resources).gather(step)
        rotary = kv.StepRope(resources)
        for view in (None, 3):
            with pytest.raises(kv.InputError, match="not a step"):
                rotary.gather(view)  # type: ignore[arg-type]
        for table in (0, 1, -1, "0"):
            with pytest.raises(kv.InputError, match="is not one with several row sets"):
                rotary.set_row_sets(np.zeros(2, np.int32), table)  # type: ignore[arg-type]
        held = resources.device.memory.current_bytes
        kv.StepRope(resources)
        assert resources.device.memory.current_bytes == held  # the memory is the first one's
    with pytest.raises(kv.StateError, match="closed"):
        kv.StepRope(resources)
    with pytest.raises(kv.InputError, match="int is not a SharedResources"):
        kv.StepRope(5)  # type: ignore[arg-type]
