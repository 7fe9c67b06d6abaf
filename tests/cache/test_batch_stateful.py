"""Batch against a naive model, in any order of calls: admit, step, long steps, rewind, retire, update, compact, fork,
reorder, swap, captured steps, and steps whose counts come from the device.

After each action both device tables equal the model's and the audit passes; after a refused one nothing has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import numba_kv as kv
from numba_kv.batch.capture import CapturedStep
from numba_kv.dtypes import dtype
from numba_kv.geometry import FULL
from numba_kv.kernels.layout import Status
from tests.helpers.captured import PROMPTS, model, prefilled
from tests.helpers.naive_batch import NaiveBatch, NaiveSequence

SIMULATED = kv.target() == "sim"
WINDOWS = st.one_of(
    st.builds(kv.Window, st.just("sliding"), st.integers(1, 20)),
    st.builds(kv.Window, st.just("chunked"), st.integers(1, 20)),
)


@st.composite
def configs(draw: st.DrawFn) -> kv.LLMEngineConfig:
    """Small models of any shape: windows, page sizes, step limits, pools too small for every row at full length."""
    page = draw(st.sampled_from([1, 2, 4, 16]))
    capacity = draw(st.integers(20, 90))
    rows = draw(st.integers(1, 4))
    windows = draw(st.lists(WINDOWS, max_size=2, unique=True))
    has_full = draw(st.booleans()) or not windows
    row_pages = -(-capacity // page)
    pool = draw(st.one_of(st.none(), st.integers(row_pages, row_pages * rows)))
    layers = [kv.AttentionLayer(num_kv_heads=1, head_dim=8, window=w) for w in windows]
    if has_full:
        layers.append(kv.AttentionLayer(num_kv_heads=1, head_dim=8, window=FULL))
    return kv.LLMEngineConfig(
        layers=tuple(layers),
        max_batch_size=rows,
        max_kv_cache_capacity=capacity,
        page_tokens=page,
        max_step_tokens=draw(st.sampled_from([1, 1, 2, 5])),
        max_batch_tokens=draw(st.sampled_from([30, 200])),
        num_kv_pages=pool,
        lookahead_pages=draw(st.sampled_from([0, 1, 4])),
    )


class BatchMachine(RuleBasedStateMachine):
    """Drives a Batch and its model together."""

    @initialize(config=configs())
    def open(self, config: kv.LLMEngineConfig) -> None:
        self.resources = kv.SharedResources.create_for_llm(config)
        self.batch = kv.Batch(self.resources)
        self.naive = NaiveBatch(self.batch)
        self.config = config
        self.waiting: dict[kv.SwappedSequence, NaiveSequence] = {}
        self.graphs: dict[tuple[int, int], CapturedStep] = {}
        shape = (config.max_batch_size,)
        self.arrays = {
            name: self.resources.device.tensor(shape, dtype("int32")) for name in ("counts", "take_back", "accepted")
        }

    def teardown(self) -> None:
        if hasattr(self, "resources"):
            self.resources.close()
            for graph in self.graphs.values():
                with pytest.raises(kv.StateError, match="closed"):
                    graph.launch()
                graph.close()
            assert self.resources.device.memory.current_bytes == sum(a.nbytes for a in self.arrays.values())

    @property
    def live(self) -> list[kv.Sequence]:
        return self.batch.sequences

    @rule(prompts=st.lists(st.integers(1, 30), min_size=1, max_size=2), leave=st.integers(0, 2), data=st.data())
    def update(self, prompts: list[int], leave: int, data: st.DataObject) -> None:
        prompts = [min(p, self.config.max_kv_cache_capacity) for p in prompts]
        leaving = data.draw(st.lists(st.sampled_from(self.live), max_size=leave, unique=True)) if self.live else []
        if len(prompts) > self.batch.free_rows + len(leaving):
            with pytest.raises(kv.CapacityError) as refused:
                self.batch.update(retire=leaving, admit=prompts)
            assert refused.value.needed == len(prompts)
            return
        made = self.batch.update(retire=leaving, admit=prompts)
        for sequence in leaving:
            self.naive.retired(sequence)
        self.naive.admitted(made)
        assert [s.pending_tokens for s in made] == prompts

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.batch.retire(sequence)
        self.naive.retired(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def step_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.live), min_size=1, unique=True))
        counts = {s: data.draw(st.one_of(st.integers(1, 3), st.integers(1, 40))) for s in chosen}
        self._step(counts, counts)

    @precondition(lambda self: self.live)
    @rule(count=st.sampled_from([1, 1, 1, 2, 9]), times=st.integers(1, 6))
    def step_every(self, count: int, times: int) -> None:
        counts = dict.fromkeys(self.live, count)
        if any(s.pending_tokens for s in self.live):
            with pytest.raises(kv.StateError):
                self.batch.step(count)
            return
        for _ in range(times):
            self._step(count, counts)

    def _step(self, argument: object, counts: dict[kv.Sequence, int]) -> None:
        before = {s: s.length for s in self.live}
        if self._is_refused(lambda: self.batch.step(argument), before, counts):
            assert {s: s.length for s in self.live} == before
        else:
            self.naive.stepped(self.batch.step(argument), counts)

    def _is_refused(
        self, call: Callable[[], object], longest: dict[kv.Sequence, int], counts: dict[kv.Sequence, int], steps: int = 1
    ) -> bool:
        """Whether steps cannot be, from lengths of at most `longest`; if so, check that the call says why."""
        after = {s: n + steps * counts.get(s, 0) for s, n in longest.items()}
        full = self.batch.plan.groups[0]
        if sum(counts.values()) > self.config.max_batch_tokens:
            with pytest.raises(kv.InputError):
                call()
        elif any(after[s] > self.config.max_kv_cache_capacity for s in counts):
            with pytest.raises(kv.CapacityError):
                call()
        elif not full.is_empty and self._pages_of(after.values()) > full.usable_pages:
            with pytest.raises(kv.CapacityError) as refused:
                call()
            assert refused.value.needed > refused.value.free + refused.value.evictable
        else:
            return False
        return True

    def _pages_of(self, lengths: Iterable[int]) -> int:
        """Return the full-group pages of sequences of these lengths, those that are shared counted once."""
        page = self.batch.plan.groups[0].page_tokens
        return sum(-(-n // page) for n in lengths) - self.naive.pages_saved()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.sampled_from([None, 1, 2, 3]))
    def fork(self, data: st.DataObject, count: int | None) -> None:
        parent = data.draw(st.sampled_from(self.live))
        full, number, length = self.batch.plan.groups[0], count or 1, parent.length
        copied = number if length % full.page_tokens else 0
        held = self._pages_of(s.length for s in self.live)
        if number > self.batch.free_rows or (not full.is_empty and held + copied > full.usable_pages):
            with pytest.raises(kv.CapacityError) as refused:
                self.batch.fork(parent, number)
            assert refused.value.needed > refused.value.free + refused.value.evictable
            return
        made = self.batch.fork(parent) if count is None else self.batch.fork(parent, count)
        self.naive.forked(parent, made if isinstance(made, list) else [made])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        parents = {s: data.draw(st.sampled_from(self.live)) for s in self.live}
        full, kept = self.batch.plan.groups[0], set(parents.values())
        contents, before = self.naive.reordering(), {s: s.length for s in self.live}
        names = {page for s in kept for page in self.naive.sequences[s].pages}
        copied = sum(s.length % full.page_tokens > 0 for s in parents.values()) - sum(
            s.length % full.page_tokens > 0 for s in kept
        )
        if not full.is_empty and len(names) + copied > full.usable_pages:
            with pytest.raises(kv.CapacityError):
                self.batch.reorder(parents)
            assert {s: s.length for s in self.live} == before
            return
        self.batch.reorder(parents)
        if any(s is not parent for s, parent in parents.items()):
            self.naive.reordered(parents, contents)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        naive = self.naive.swapped_out(sequence)
        self.waiting[self.batch.swap_out(sequence)] = naive
        self.naive.retired(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        swapped = data.draw(st.sampled_from(list(self.waiting)))
        full, lengths = self.batch.plan.groups[0], [s.length for s in self.live]
        held = 0 if full.is_empty else self._pages_of([*lengths, swapped.length])
        if not self.batch.free_rows or held > full.usable_pages:
            with pytest.raises(kv.CapacityError) as refused:
                self.batch.swap_in(swapped)
            assert refused.value.needed > refused.value.free + refused.value.evictable
            return
        self.naive.swapped_in(self.batch.swap_in(swapped), self.waiting.pop(swapped))

    @precondition(lambda self: self.live)
    @rule(tokens=st.integers(1, 5), rounds=st.integers(1, 20), steps=st.sampled_from([1, 1, 3]), own=st.booleans())
    def replay(self, tokens: int, rounds: int, steps: int, own: bool) -> None:
        """Steps without the host: a captured step that outlives every change of composition, or one enqueued by the caller."""
        tokens = min(tokens, self.config.max_step_tokens)
        total = rounds * steps
        if any(s.pending_tokens for s in self.live):
            with pytest.raises(kv.StateError):
                self.batch.reserve(total, tokens)
            return
        before = {s: s.length for s in self.live}
        if self._is_refused(lambda: self.batch.reserve(total, tokens), before, dict.fromkeys(self.live, tokens), total):
            return
        self.batch.reserve(total, tokens)
        sent, made = self.resources.device.bytes_to_device, self.resources.device.memory.allocations
        if own:
            for _ in range(total):
                self.batch.enqueue_step(self.resources.stream, tokens)
            self.batch.advanced(total, tokens)
        else:
            graph = self.graphs.get((tokens, steps))
            if graph is None:
                graph = self.graphs[tokens, steps] = self.batch.capture(tokens, steps=steps)
            for _ in range(rounds):
                graph.launch()
            graph.advanced()
        assert (self.resources.device.bytes_to_device, self.resources.device.memory.allocations) == (sent, made)
        assert all(s.length == n + total * tokens for s, n in before.items())
        self.naive.replayed(tokens, total)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), form=st.sampled_from([None, "take_back", "accepted"]), counted=st.booleans(), times=st.integers(1, 4))
    def step_by_the_device(self, data: st.DataObject, form: str | None, counted: bool, times: int) -> None:
        """Steps whose counts only the device knows; the host leases for the longest case and learns lengths afterwards."""
        longest = {s: s.length for s in self.live}
        for _ in range(times if form or counted else 0):
            chosen = data.draw(st.lists(st.sampled_from(self.live), min_size=1, unique=True))
            room = {s: data.draw(st.integers(1, 10)) for s in chosen}
            counts = {s: data.draw(st.integers(0, n)) for s, n in room.items()} if counted else room
            back = {s: data.draw(st.integers(0, self._most_back(n))) for s, n in self.naive.sequences.items()} if form else {}
            given: dict[str, kv.Tensor] = {}
            spoiled = data.draw(st.sets(st.sampled_from(chosen), max_size=1)) if counted else set()
            if counted:
                wrong = {s: data.draw(st.sampled_from([-1, room[s] + 1])) for s in spoiled}
                given["counts"] = self._array("counts", {**counts, **wrong})
            if form:
                keep = {s: n.last - back[s] for s, n in self.naive.sequences.items()}
                given[form] = self._array(form, back if form == "take_back" else keep)
            if self._is_refused(lambda: self.batch.step(room, **given), longest, room):  # noqa: B023 - called at once
                break
            view = self.batch.step(room, **given)
            longest = {s: n + room.get(s, 0) for s, n in longest.items()}
            nothing = dict.fromkeys(spoiled, 0)  # a row that the device refuses is left as it is
            self.naive.stepped(view, room, {**counts, **nothing}, {**back, **nothing})
            assert self.batch.refusals() == dict.fromkeys(spoiled, Status.BAD_COUNT)
        self.batch.sync_lengths()
        assert all(s.length == len(n.tokens) for s, n in self.naive.sequences.items())

    def _most_back(self, naive: NaiveSequence) -> int:
        """Return how many tokens of its last step a sequence can lose for sure."""
        kept = self.config.max_step_tokens - (naive.high_water - len(naive.tokens))
        return max(0, min(naive.last, kept, len(naive.tokens) - naive.fence))

    def _array(self, name: str, values: dict[kv.Sequence, int]) -> kv.Tensor:
        found = np.zeros(self.config.max_batch_size, np.int32)
        for sequence, value in values.items():
            found[sequence.row] = value
        self.arrays[name].fill_from(found)
        return self.arrays[name]

    @precondition(lambda self: any(s.length for s in self.live))
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.live if s.length]))
        count = data.draw(st.integers(1, sequence.length))
        naive = self.naive.sequences[sequence]
        target = sequence.length - count
        try:
            self.batch.rewind({sequence: count})
        except kv.RewindTooFar:
            assert target > 0
            if target >= self.naive.floor(sequence):
                assert naive.high_water - target > self.config.max_step_tokens
                assert len(self.batch.plan.groups) > 1
        else:
            self.naive.rewound(sequence, count)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ordered=st.booleans())
    def compact(self, data: st.DataObject, ordered: bool) -> None:
        if ordered:
            order = data.draw(st.permutations(self.live))
            self.batch.compact(order)
            assert [s.row for s in order] == list(range(len(order)))
        else:
            self.batch.compact()
            assert sorted(s.row for s in self.live) == list(range(len(self.live)))

    @precondition(lambda self: self.live)
    @rule()
    def refuse_nonsense(self) -> None:
        sequence = self.live[0]
        for counts in ({sequence: 0}, {sequence: -1}, {sequence: 1.5}, {sequence: True}, {}):
            with pytest.raises(kv.InputError):
                self.batch.step(counts)
        for count in (0, -1, sequence.length + 1, "1"):
            with pytest.raises(kv.InputError):
                self.batch.rewind({sequence: count})

    @invariant()
    def tables_equal_the_model(self) -> None:
        if hasattr(self, "naive"):
            self.naive.check_tables()


TestBatch = BatchMachine.TestCase
TestBatch.settings = settings(
    max_examples=60 if SIMULATED else 150,
    stateful_step_count=20 if SIMULATED else 30,
)


def test_numpy_integers_are_integers() -> None:
    layers = (kv.AttentionLayer(num_kv_heads=1, head_dim=8),)
    config = kv.LLMEngineConfig(layers=layers, max_batch_size=2, max_kv_cache_capacity=32, max_batch_tokens=64)
    with kv.SharedResources.create_for_llm(config) as resources, kv.Batch(resources) as batch:
        sequence = batch.admit(num_tokens=np.int32(5))
        batch.step({sequence: np.int64(5)})
        batch.step(np.int16(1))
        batch.rewind({sequence: np.uint8(2)})
        assert sequence.length == 4
        batch.audit()


@pytest.mark.parametrize("steps", [1, 500])
def test_500_steps_without_the_host(steps: int) -> None:
    """Windows rotate over a hundred times; the row in the middle is retired and writes nothing. vllm#56734."""
    with kv.SharedResources.create_for_llm(model()) as resources:
        batch, naive, sequences = prefilled(resources, PROMPTS)
        batch.retire(sequences[1])
        naive.retired(sequences[1])
        graph = batch.capture(steps=steps)
        graph.reserve(500)
        for _ in range(500 // steps):
            graph.launch()
        graph.advanced()
        assert [s.length for s in batch.sequences] == [505, 501, 517]
        naive.replayed(1, 500)
        naive.check_tables()
