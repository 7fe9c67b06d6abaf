"""Listeners of kept blocks: they are told when a batch is idle, so nothing that they do can harm it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import numba_kv as kv
from numba_kv.batch.reuse_together import update_together
from numba_kv.context.options import ReuseOptions
from numba_kv.ledger.reuse.block_hash import Blake2bHash
from numba_kv.ledger.reuse.events import BlockEvent, BlocksRemoved, BlocksStored
from numba_kv.ledger.reuse.policy import PublishPolicy
from tests.helpers.deployments import pair
from tests.helpers.models import tiny_config
from tests.helpers.threads import in_a_thread

SIZE: dict[str, Any] = {"page_tokens": 4, "num_kv_pages": 17, "lookahead_pages": 0, "max_batch_tokens": 64}
CONFIG = tiny_config(None, max_batch_size=3, **SIZE)
DRAFT = tiny_config(None, max_batch_size=3, max_kv_cache_capacity=67, **SIZE)
ALL = PublishPolicy(publish="all", every_blocks=1)

Act = Callable[[kv.Batch, BlockEvent], object]


class Listener:
    """Notes events, and does something at each."""

    def __init__(self) -> None:
        self.events: list[BlockEvent] = []
        self.act: Act | None = None
        self.batch: kv.Batch | None = None

    def __call__(self, event: BlockEvent) -> None:
        self.events.append(event)
        if self.act is not None:
            assert self.batch is not None
            self.act(self.batch, event)

    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


@contextmanager
def listened(**options: Any) -> Iterator[tuple[kv.Batch, Listener]]:
    listener = Listener()
    with kv.SharedResources.create_for_llm(CONFIG) as resources:
        batch = kv.Batch(resources, reuse=ReuseOptions(naming=Blake2bHash(), policy=ALL, on_event=listener, **options))
        listener.batch = batch
        yield batch, listener
    assert resources.device.memory.current_bytes == 0


def computed(batch: kv.Batch, first: int, tokens: int = 13) -> kv.Sequence:
    """Admit a sequence and append its prompt; nothing of it is published yet."""
    sequence = batch.admit(list(range(first, first + tokens)))
    batch.step({sequence: sequence.pending_tokens})
    return sequence


def stored(batch: kv.Batch, _: Path) -> None:
    computed(batch, 0)
    batch.publish()


def stepped(batch: kv.Batch, _: Path) -> None:
    computed(batch, 0)
    assert batch.step(1).num_rows == 1


def admitted(batch: kv.Batch, _: Path) -> None:
    computed(batch, 0)
    assert batch.admit(list(range(13))).reused_tokens == 12


def retired(batch: kv.Batch, _: Path) -> None:
    batch.retire(computed(batch, 0))


def reserved(batch: kv.Batch, _: Path) -> None:
    computed(batch, 0)
    batch.reserve(2)


def swapped(batch: kv.Batch, _: Path) -> None:
    batch.swap_in(batch.swap_out(computed(batch, 0)))


def loaded(batch: kv.Batch, path: Path) -> None:
    batch.retire(computed(batch, 0))
    saved = batch.save_prefixes(path / "kept")
    batch.reuse.cache.clear()
    assert batch.load_prefixes(path / "kept") == saved


def evicted(batch: kv.Batch, _: Path) -> None:
    batch.retire(computed(batch, 0, 40))
    batch.retire(computed(batch, 100, 40))


CALLS = [stored, stepped, admitted, retired, reserved, swapped, loaded, evicted]


@pytest.fixture(params=CALLS, ids=lambda call: call.__name__)
def call(request: pytest.FixtureRequest) -> Callable[[kv.Batch, Path], None]:
    return request.param


def raises(batch: kv.Batch, event: BlockEvent) -> None:
    raise LookupError("the listener is broken")


def test_an_error_is_logged_and_harms_nothing(
    call: Callable[[kv.Batch, Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for act in (None, raises):
        with listened(weights=b"w") as (batch, listener):
            listener.act = act
            call(batch, tmp_path)
            batch.audit()
            found.append((listener.kinds(), batch.free_pages, batch.reuse.cache.num_blocks, vars(batch.stats)))
            batch.step({computed(batch, 50): 1})
            batch.clear()
            batch.audit()
    assert found[0] == found[1]
    errors = [record for record in caplog.records if record.name == "numba_kv.batch.reuse_events"]
    assert len(errors) >= len(found[0][0]) > 0
    assert all(record.levelno == logging.ERROR and record.exc_info and record.exc_info[0] is LookupError for record in errors)


def test_a_listener_can_call_the_batch_with_the_callers_device(
    call: Callable[[kv.Batch, Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listened(weights=b"w") as (batch, listener):
        device, depth = batch.resources.device, [0]

        def count(by: int) -> bool:
            depth[0] += by
            return True

        monkeypatch.setattr(device, "enter", lambda: count(1))
        monkeypatch.setattr(device, "leave", lambda: count(-1))
        seen: list[int] = []

        def act(batch: kv.Batch, event: BlockEvent) -> None:
            seen.append(depth[0])
            in_a_thread(batch.audit)
            if batch.free_rows and len(seen) < 3:  # another one that has something to tell
                batch.retire(computed(batch, 1000 * len(seen)))

        listener.act = act
        call(batch, tmp_path)
        assert len(seen) >= 2
        assert not any(seen)
        batch.audit()
        assert depth == [0]


def test_what_a_listener_causes_is_told_behind_what_was_waiting() -> None:
    with listened() as (batch, listener):
        batch.retire(computed(batch, 0, 40))
        listener.events.clear()

        def act(batch: kv.Batch, event: BlockEvent) -> None:
            listener.act = None
            batch.retire(computed(batch, 200, 8))
            assert listener.kinds() == [BlocksRemoved]  # not told within this one

        listener.act = act
        sequence = batch.admit(num_tokens=32)
        batch.step({sequence: 32})
        assert listener.kinds() == [BlocksRemoved, BlocksRemoved, BlocksStored]
        assert isinstance(listener.events[-1], BlocksStored)
        assert listener.events[-1].tokens.ravel().tolist() == list(range(200, 208))
        batch.audit()


def test_an_interrupt_of_a_listener_is_raised_and_the_rest_told_later() -> None:
    with listened() as (batch, listener):

        def interrupt(batch: kv.Batch, event: BlockEvent) -> None:
            listener.act = None
            raise KeyboardInterrupt

        sequences = batch.update(admit=[list(range(8)), list(range(100, 108))])
        batch.step(dict.fromkeys(sequences, 8))
        listener.act = interrupt
        with pytest.raises(KeyboardInterrupt):
            batch.publish()
        assert listener.kinds() == [BlocksStored]
        batch.audit()
        assert listener.kinds() == [BlocksStored, BlocksStored]


def test_both_batches_of_a_pair_are_idle_when_either_tells() -> None:
    listener = Listener()
    with kv.SharedResources.create_for_spec_decode(pair("mtp", base=CONFIG, draft=DRAFT)) as resources, ExitStack() as stack:
        batches = [
            stack.enter_context(
                kv.Batch(resources, index=index, reuse=ReuseOptions(policy=ALL, future_tokens=index, on_event=listener))
            )
            for index in range(2)
        ]
        listener.batch = batches[0]
        listener.act = lambda batch, event: [each.audit() for each in batches] and 1 / 0
        (first,) = update_together(batches, admit=[list(range(13))])
        for batch, sequence in zip(batches, first, strict=True):
            batch.step({sequence: 13})
        ((base, draft),) = update_together(batches, admit=[list(range(13))])
        assert base.reused_tokens == draft.reused_tokens == 12
        assert listener.kinds() == [BlocksStored, BlocksStored]
        update_together(batches, retire=[first, (base, draft)])
        for batch in batches:
            assert batch.guard.poison is None
            batch.audit()
