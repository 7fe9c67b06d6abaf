"""Copies of rows are bound before anything is enqueued: a kernel that cannot be compiled leaves the batch as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import numba_kv as kv
from numba_kv.errors import DeviceError
from numba_kv.kernels.jit import Kernel
from tests.helpers.batches import everything, same
from tests.helpers.kv_model import KVModel, opened_io
from tests.helpers.models import chunked, tiny_config
from tests.helpers.states import mamba2, recurrent_config

PAGES = ("copy_dense_words", "copy_dense_bytes")
STATES = ("copy_states_words", "copy_states_halves")


class Broken:
    """Kernels of these names cannot be bound."""

    names: tuple[str, ...] = ()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    bind, state = Kernel.bind, Broken()

    def fail(self: Kernel, *arguments: object, **options: object) -> object:
        if self.name in state.names:
            raise DeviceError(f"{self.name}: no compiler")
        return bind(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Kernel, "bind", fail)
    return state


def check(call: Callable[[], Any], batch: kv.Batch, broken: Broken, names: tuple[str, ...]) -> Any:
    """Call while kernels cannot be bound, compare all that can be seen, and call again."""
    before = everything(batch)
    broken.names = names
    with pytest.raises(DeviceError, match="no compiler"):
        call()
    broken.names = ()
    same(everything(batch), before)
    return call()


def test_pages_that_cannot_be_copied(broken: Broken) -> None:
    config = tiny_config(
        None, 6, chunked(8), heads=[(2, 8), (1, 8), (3, 5)], max_batch_size=3, max_batch_tokens=96, kv_cache_dtype="float32"
    )
    with opened_io(config) as (batch, io):
        model = KVModel(batch, io)
        first = batch.admit(num_tokens=11)
        model.step({first: 11})
        snapshot = check(lambda: batch.capture_kv(first, 0, 11), batch, broken, PAGES)
        second = batch.admit(num_tokens=12)
        check(lambda: batch.restore_kv(second, snapshot), batch, broken, PAGES)
        model.inherit(first, second)
        swapped = check(lambda: batch.swap_out(first), batch, broken, PAGES)
        told = model.told.pop(first)
        model.step({second: 1})
        back = check(lambda: batch.swap_in(swapped), batch, broken, PAGES)
        model.told[back] = told
        model.step({back: 1, second: 1})
        model.check()
        batch.audit()


def test_states_that_cannot_be_copied(broken: Broken) -> None:
    config = recurrent_config(mamba2(), 2, max_batch_size=2)
    with opened_io(config) as (batch, _):
        first = batch.admit(num_tokens=5)
        batch.step({first: 5})
        snapshot = check(lambda: batch.capture_kv(first, 0, 5), batch, broken, STATES)
        second = batch.admit(num_tokens=5)
        check(lambda: batch.restore_kv(second, snapshot), batch, broken, STATES)
        swapped = check(lambda: batch.swap_out(first), batch, broken, STATES)
        check(lambda: batch.swap_in(swapped), batch, broken, STATES)
        batch.audit()
