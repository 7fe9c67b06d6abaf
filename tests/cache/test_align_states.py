"""Recurrent states that are moved to the slots of their rows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cache.test_batch_states import MODELS, caches, marked_rows, marks, slots
from tests.helpers.batches import opened
from tests.helpers.kv_pools import same_bits
from tests.helpers.models import tiny_config
from tests.helpers.states import everything, fill, kinds_of, mamba2, recurrent_config


@pytest.mark.parametrize("name", MODELS)
def test_states_follow_their_rows_when_they_are_told_to(name: str) -> None:
    """Behind `align_states` row i finds its states in slot i, whatever order the rows had; rows that are free count too."""
    with opened(MODELS[name]) as batch:
        states = caches(batch).mamba_cache
        made = marked_rows(batch)
        launches = batch.stats.launches
        assert batch.align_states() == 0
        assert batch.stats.launches == launches
        batch.compact([made[2], made[0], made[3], made[1]])
        assert slots(batch) == [2, 0, 3, 1]
        assert batch.align_states() == 4
        assert slots(batch) == [0, 1, 2, 3]
        assert [marks(states, slot) for slot in range(4)] == [{3}, {1}, {4}, {2}]
        batch.audit()
        batch.retire(made[0])
        batch.compact([made[1], made[3], made[2]])
        assert slots(batch) == [3, 2, 0, -1]
        assert batch.align_states() == 4  # the free row's slot is in the cycle
        assert slots(batch) == [0, 1, 2, -1]
        assert [marks(states, slot) for slot in range(3)] == [{2}, {4}, {3}]
        batch.audit()
        batch.step({made[1]: 1})
        batch.admit(num_tokens=1)
        assert [marks(states, slot) for slot in range(4)] == [{2}, {4}, {3}, {0}]
        batch.audit()


@pytest.mark.parametrize("sizes", [(9000, 7), (7, 9000), (3, 3)])
def test_every_byte_of_states_moves(sizes: tuple[int, int]) -> None:
    """States of more than one part, and of bytes that are no whole words; two cycles at once, in every layer."""
    heads = {"num_heads": 1, "num_groups": 1, "head_dim": 1}
    layer = mamba2(**heads, state_size=sizes[0], conv_dim=sizes[1], recurrent_state_dtype="float16")
    with opened(recurrent_config(layer, layers=2, max_batch_size=6)) as batch:
        states = caches(batch).mamba_cache
        made = batch.update(admit=[1] * 6)
        batch.step({s: 1 for s in made})
        before = {kind: fill(states, kind, np.random.default_rng(1)) for kind in kinds_of(states)}
        order = [1, 2, 0, 3, 5, 4]
        batch.compact([made[row] for row in order])
        assert batch.align_states() == 5
        for kind in before:
            assert same_bits(everything(states, kind), before[kind][:, order])
        batch.audit()


def test_a_model_without_recurrent_layers_has_no_states_to_align() -> None:
    with opened(tiny_config(None, max_batch_size=3)) as batch:
        made = batch.update(admit=[1, 1])
        batch.compact([made[1], made[0]])
        assert batch.align_states() == 0
