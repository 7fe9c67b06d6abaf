"""What can be committed again: rows of the last round alone, as long as nothing else has happened to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import numba_kv as kv
from tests.helpers.rounds import RoundModel, opened_rounds

BAD = kv.Status.BAD_COUNT


def refused(model: RoundModel) -> list[kv.Sequence]:
    """Commit a round of two sequences, the second with a count that cannot be: it keeps all of its four tokens."""
    first, second = model.admit(3, 3)
    model.verify()
    model.commit_on_device({0: 1, 1: 9})
    model.accepted({first: (0,)})
    model.waiting.clear()
    model.batch.sync_lengths()
    assert (first.length, second.length) == (4, 7)
    return [first, second]


CALLS: dict[str, Callable[[RoundModel, list[kv.Sequence]], object]] = {
    "step": lambda model, sequences: model.step(dict.fromkeys(sequences, 1)),
    "as long a step": lambda model, sequences: model.step(dict.fromkeys(sequences, 4)),
    "rewind": lambda model, sequences: model.rewind(sequences[1], 1),
    "admit": lambda model, sequences: model.admit(2),
    "reserve": lambda model, sequences: model.batch.reserve(1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", ["chain", "shared"])
def test_a_refusal_that_is_asked_for_late_is_told_and_nothing_waits(name: str, call: str) -> None:
    with opened_rounds(name) as model:
        first, second = refused(model)
        CALLS[call](model, [first, second])
        assert model.batch.refusals() == {second: BAD}
        with pytest.raises(kv.StateError, match="no verification step waits"):
            model.batch.commit({second: 1})
        model.check()
        model.verify()
        model.batch.commit(dict.fromkeys(model.lengths, 2))
        model.accepted(dict.fromkeys(model.lengths, (0, 1)))
        model.check()


def test_rows_that_moved_are_not_committed_for_others() -> None:
    with opened_rounds("chain") as model:
        first, second = refused(model)
        model.retire(first)
        assert model.batch.compact() == {second: 0}
        assert model.batch.refusals() == {second: BAD}
        with pytest.raises(kv.StateError, match="no verification step waits"):
            model.batch.commit({second: 1})
        model.check()


def test_a_refusal_of_an_older_round_does_not_open_the_last_one() -> None:
    """Its word stays until somebody asks; of the last round only its own refusals can be committed again."""
    with opened_rounds("chain") as model:
        first, second = refused(model)
        model.verify()
        model.commit_on_device({0: 1, 1: 1})
        model.accepted({first: (0,), second: (0,)})
        assert model.batch.refusals() == {second: BAD}
        with pytest.raises(kv.StateError, match="no verification step waits"):
            model.batch.commit({second: 1})
        model.check()
        for wrong in ({0: 9, 1: 1}, {0: -1, 1: 2}):  # the first one's of the last round is committed again, and nothing else
            model.verify()
            model.commit_on_device(wrong)
            model.accepted({second: range(wrong[1])})
            if wrong[0] == 9:
                model.waiting.clear()
        assert model.batch.refusals() == {first: BAD}
        model.batch.sync_lengths()
        model.batch.commit({first: 3})
        model.accepted({first: (0, 1, 2)})
        model.check()


def test_what_is_refused_while_another_round_waits_is_told() -> None:
    with opened_rounds("chain") as model:
        first, second = refused(model)
        model.verify()
        assert model.batch.refusals() == {second: BAD}
        model.batch.commit({first: 2, second: 3})
        model.accepted({first: (0, 1), second: (0, 1, 2)})
        model.check()
