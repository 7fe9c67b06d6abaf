"""SpeculativeBatch in any order of calls, against recomputation from scratch.

K and V of both models are compared token by token with what was written, recurrent states with a float64 recurrence over all
tokens that were kept, lengths with their sum; after each action, whatever was refused on the way.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import numba_kv as kv
from tests.helpers.rounds import DEPLOYMENTS, ROWS, RoundModel, opened_rounds

SIMULATED = kv.target() == "sim"
TREES = [(-1, 0, 0, 1), (-1, 0, 1, 2), (-1, 0, 0, 0), (-1, 0, 1), (-1,)]


@st.composite
def paths_through(draw: st.DrawFn, parents: tuple[int, ...]) -> list[int]:
    """Return the nodes of a path from the root, or none."""
    path: list[int] = []
    while True:
        below = [node for node, parent in enumerate(parents) if parent == (path[-1] if path else -1)]
        if not below or draw(st.integers(0, 3)) == 0:
            return path
        path.append(draw(st.sampled_from(below)))


class RoundMachine(RuleBasedStateMachine):
    """Drives a SpeculativeBatch and its model together."""

    model: RoundModel | None = None

    @initialize(name=st.sampled_from(sorted(DEPLOYMENTS)), keeps=st.booleans())
    def open(self, name: str, keeps: bool) -> None:
        spec = DEPLOYMENTS[name].spec
        is_chain = not (spec.is_tree or spec.proposes_blocks)
        self.context = opened_rounds(name, keep_drafts=keeps and is_chain, catch_up_tokens=4)
        self.model = self.context.__enter__()
        self.capacity = DEPLOYMENTS[name].base.max_kv_cache_capacity

    def fits(self, tokens: int) -> bool:
        """Whether every row has room for so many tokens more."""
        return all(n + tokens <= self.capacity for n in self.model.lengths.values())

    has_sequences = precondition(lambda self: bool(self.model.lengths))

    @precondition(lambda self: len(self.model.lengths) < ROWS)
    @rule(prompt=st.integers(1, 20))
    def admit(self, prompt: int) -> None:
        self.model.admit(prompt)

    @has_sequences
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        self.model.retire(data.draw(st.sampled_from(self.model.batch.sequences)))

    @has_sequences
    @rule(data=st.data())
    def compact(self, data: st.DataObject) -> None:
        order = data.draw(st.none() | st.permutations(self.model.batch.sequences))
        self.model.batch.compact(order)

    @has_sequences
    @rule(data=st.data(), tokens=st.integers(1, 3))
    def step(self, data: st.DataObject, tokens: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.model.batch.sequences), min_size=1, unique=True))
        if self.fits(tokens) and all(self.model.draft_lengths[s] + tokens <= self.capacity for s in chosen):
            self.model.step(dict.fromkeys(chosen, tokens))

    @precondition(lambda self: self.model.lengths and self.model.states is None)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """Prompts stay whole, so that rounds go on. What rings no longer hold is refused, and nothing is changed."""
        sequence = data.draw(st.sampled_from(self.model.batch.sequences))
        most = min(2, self.model.lengths[sequence] - sequence.prompt_tokens)
        if most > 0:
            with suppress(kv.RewindTooFar):
                self.model.rewind(sequence, data.draw(st.integers(1, most)))

    @has_sequences
    @rule(
        data=st.data(),
        tree=st.none() | st.sampled_from(TREES),
        catches_up=st.booleans(),
        drafts=st.integers(0, 2),
        on_device=st.booleans(),
        refused=st.booleans(),
    )
    def round(self, data: st.DataObject, tree: Any, catches_up: bool, drafts: int, on_device: bool, refused: bool) -> None:
        """Propose, verify, commit; now and then one row's first commit is wrong."""
        model = self.model
        batch, verified = model.batch, 4 if tree is None else len(tree)
        if not self.fits(verified):
            return
        most = max((model.lengths[s] - model.draft_lengths[s] for s in model.lengths), default=0)
        if catches_up and most <= batch.catch_up_tokens:
            model.catch_up()
        if model.draft is not None and drafts * batch.draft_tokens <= 4:
            for _ in range(drafts):
                model.draft_step()
        model.verify(None if tree else verified, tree)
        chain = tree or (-1, *range(verified - 1))
        paths = {s: data.draw(paths_through(chain)) for s in batch.sequences}
        wrong = data.draw(st.sampled_from(batch.sequences)) if refused else None
        if wrong is not None:
            model.commit(paths, tree, True, {wrong: data.draw(st.sampled_from([-1, 5, 2**30]))})
            model.accepted({s: path for s, path in paths.items() if s is not wrong})
            assert batch.refusals() == {wrong: kv.Status.BAD_COUNT}
            model.check()
            paths = {wrong: paths[wrong]}
        model.commit(paths, tree, on_device)
        model.accepted(paths)
        assert batch.refusals() == {}

    @invariant()
    def everything_is_what_was_kept(self) -> None:
        if self.model is not None:
            self.model.check()

    def teardown(self) -> None:
        if self.model is not None:
            self.context.__exit__(None, None, None)


TestRounds: Any = RoundMachine.TestCase
TestRounds.settings = settings(max_examples=3 if SIMULATED else 25, stateful_step_count=6 if SIMULATED else 12)


@pytest.mark.parametrize("name", ["snapshots", "delta net"])
def test_a_wrong_state_is_found(name: str) -> None:
    """The comparison can fail: a state that nobody committed, and K that nobody wrote."""
    with opened_rounds(name) as model:
        model.admit(5)
        model.check()
        state = model.states.states.recurrent_state(1)
        state.fill_from(state.to_host() + state.dtype.numpy().type(0.1))
        with pytest.raises(AssertionError):
            model.check()
