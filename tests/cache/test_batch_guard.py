"""What protects a batch from its callers: one call at a time, any thread, and an end once device and host may disagree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import numba_kv as kv
from numba_kv.kernels.jit import Launch
from tests.helpers.batches import everything, metadata, opened, same
from tests.helpers.models import tiny_config


@pytest.fixture
def batch() -> Iterator[kv.Batch]:
    with opened(tiny_config(None, 6)) as batch:
        yield batch


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Return what `call` returns in a fresh thread; raise what it raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    value, error = found[0]
    if error is not None:
        raise error
    return value


def test_every_call_works_from_a_fresh_thread(batch: kv.Batch) -> None:
    """A thread that never saw the device works like the one that made the batch. pytorch#195256, TransformerEngine#734."""
    sequence = in_a_thread(lambda: batch.admit(num_tokens=9))
    view = in_a_thread(lambda: batch.step({sequence: 9}))
    assert in_a_thread(lambda: view.seq_lens.to_host().tolist()) == [9, 0]
    in_a_thread(lambda: batch.step(1))
    batch.step(1)
    in_a_thread(lambda: batch.rewind({sequence: 1}))
    other = in_a_thread(lambda: batch.update(retire=[sequence], admit=[3, 4])[1])
    in_a_thread(lambda: batch.retire(batch.sequences[0]))
    assert in_a_thread(batch.compact) == {other: 0}
    in_a_thread(batch.audit)
    assert in_a_thread(lambda: (batch.free_rows, batch.can_admit(), batch.stats.steps)) == (1, True, 3)
    in_a_thread(batch.close)
    again = in_a_thread(lambda: kv.Batch(batch.resources))
    again.audit()
    in_a_thread(batch.resources.close)


def test_calls_of_two_threads_do_not_overlap(batch: kv.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = batch.admit(num_tokens=9)
    inside, may_go = threading.Event(), threading.Event()
    launch = Launch.__call__

    def wait(self: Launch, *arguments: Any, **scalars: Any) -> None:
        inside.set()
        assert may_go.wait(60)
        launch(self, *arguments, **scalars)

    monkeypatch.setattr(Launch, "__call__", wait)
    stepping = threading.Thread(target=lambda: batch.step({sequence: 9}))
    stepping.start()
    assert inside.wait(60)
    for call in (
        lambda: batch.step({sequence: 1}),
        lambda: batch.admit(num_tokens=1),
        lambda: batch.retire(sequence),
        lambda: batch.rewind({sequence: 1}),
        batch.compact,
        batch.audit,
        batch.close,
    ):
        with pytest.raises(kv.StateError, match="in use by another thread"):
            call()
    may_go.set()
    stepping.join(60)
    assert sequence.length == 9
    batch.step({sequence: 1})
    batch.audit()


def test_a_failed_launch_ends_a_batch(batch: kv.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = batch.admit(num_tokens=9)
    empty = metadata(batch)

    def fail(self: Launch, *arguments: Any, **scalars: Any) -> None:
        raise kv.DeviceError("launch: the driver reports CUDA_ERROR_ILLEGAL_ADDRESS")

    with monkeypatch.context() as patch:
        patch.setattr(Launch, "__call__", fail)
        with pytest.raises(kv.DeviceError, match="ILLEGAL_ADDRESS") as failure:
            batch.step({sequence: 9})
    for call in (
        lambda: batch.step({sequence: 9}),
        lambda: batch.step(1),
        lambda: batch.admit(num_tokens=1),
        lambda: batch.retire(sequence),
        lambda: batch.rewind({sequence: 1}),
        batch.compact,
        batch.audit,
    ):
        with pytest.raises(kv.StateError, match="ILLEGAL_ADDRESS.*close it") as refused:
            call()
        assert refused.value.__cause__ is failure.value
    batch.close()
    assert sequence.state == "retired"
    with kv.Batch(batch.resources) as again:
        fresh = again.admit(num_tokens=9)
        found = metadata(again)
        assert {name: values.tolist() for name, values in found.items()} == {n: v.tolist() for n, v in empty.items()}
        again.step({fresh: 9})
        again.audit()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, kv.CapacityError])
def test_a_failed_copy_ends_a_batch_whatever_it_raises(
    batch: kv.Batch, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(*arguments: Any) -> None:
        raise error("copy") if error is not kv.CapacityError else kv.CapacityError("copy", needed=1, free=0)

    with monkeypatch.context() as patch:
        patch.setattr(batch.resources.device, "copy_to_device", fail)
        with pytest.raises(error, match="copy"):
            batch.admit(num_tokens=1)
    with pytest.raises(kv.StateError, match="close it"):
        batch.admit(num_tokens=1)
    batch.close()


def test_a_refusal_does_not_end_a_batch(batch: kv.Batch) -> None:
    sequence = batch.admit(num_tokens=9)
    before = everything(batch)
    with pytest.raises(kv.InputError):
        batch.step({sequence: 0})
    same(everything(batch), before)
    batch.step({sequence: 9})


def test_an_error_of_the_callers_own_iterable_does_not_end_a_batch(batch: kv.Batch) -> None:
    def prompts() -> Iterator[int]:
        yield 3
        raise LookupError("the caller's queue")

    before = everything(batch)
    with pytest.raises(LookupError, match="queue"):
        batch.update(admit=prompts())
    same(everything(batch), before)
    batch.admit(num_tokens=1)


def test_a_device_that_cannot_be_made_current_leaves_the_batch_usable(batch: kv.Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise kv.DeviceError("context: the driver reports CUDA_ERROR_UNKNOWN")

    with monkeypatch.context() as patch:
        patch.setattr(batch.resources.device, "enter", fail)
        with pytest.raises(kv.DeviceError, match="UNKNOWN"):
            in_a_thread(lambda: batch.admit(num_tokens=1))
    in_a_thread(lambda: batch.admit(num_tokens=1))
    batch.audit()


@pytest.mark.parametrize("where", ["numba_kv.batch.batch.Stepper", "numba_kv.cache.model_tables.KVPageTable"])
def test_too_little_host_memory_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise MemoryError("Unable to allocate 9 TiB")

    with monkeypatch.context() as patch:
        if "tables" in where:
            patch.setattr(where, fail)
            with pytest.raises(kv.CapacityError, match="host memory: .*9 TiB"):
                kv.SharedResources.create_for_llm(tiny_config(None, 6))
            return
        with kv.SharedResources.create_for_llm(tiny_config(None, 6)) as resources:
            patch.setattr(where, fail)
            with pytest.raises(kv.CapacityError, match="host memory: .*9 TiB"):
                kv.Batch(resources)
            patch.undo()
            kv.Batch(resources).audit()
