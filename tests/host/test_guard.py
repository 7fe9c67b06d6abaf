"""CallGuard: one call at a time, what ends an object and what does not, and the cheap form for calls of the host."""

from __future__ import annotations

import pytest

from numba_kv.device.guard import CallGuard
from numba_kv.device.host_device import HostDevice
from numba_kv.errors import DeviceError, InputError, StateError
from tests.helpers.threads import in_a_thread


class CountingDevice(HostDevice):
    """Says that another device was current, and counts."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.depth = self.entries = 0

    def enter(self) -> bool:
        self.depth += 1
        self.entries += 1
        return True

    def leave(self) -> None:
        self.depth -= 1


@pytest.fixture
def device() -> CountingDevice:
    return CountingDevice()


def fail(guard: CallGuard, error: type[BaseException], is_enqueueing: bool) -> None:
    with guard:
        guard.is_enqueueing = is_enqueueing
        raise error("no")


def test_the_device_is_current_inside_and_not_after(device: CountingDevice) -> None:
    guard = CallGuard(device, "thing")
    with guard:
        assert device.depth == 1
    with pytest.raises(InputError), guard:
        raise InputError("no")
    assert device.depth == 0


def test_a_part_is_read_alone_and_changed_by_its_driver(device: CountingDevice) -> None:
    driver, part = CallGuard(device, "pair"), CallGuard(device, "part")
    with part:
        pass
    part.drive(driver, "call its step")
    with pytest.raises(StateError, match="part is a part of pair, .* call its step"), part:
        pass
    with part.reads:
        assert device.depth == 1
        with pytest.raises(StateError, match="a call is running"), part.reads:
            pass
    with driver, part:
        assert device.depth == 2
    with pytest.raises(InputError), driver:
        raise InputError("no")
    with pytest.raises(StateError, match="is a part of pair"), part:
        pass
    assert device.depth == 0
    part.close()
    with pytest.raises(StateError, match="closed"), part.reads:
        pass


def test_a_call_inside_a_call_gives_the_device_back_once_each(device: CountingDevice) -> None:
    guard = CallGuard(device, "thing", poisons=False)
    with guard:
        with guard:
            assert device.depth == 2
        assert device.depth == 1
    assert device.depth == 0

    def enter() -> bool:  # as a GPU: nothing to do where it is current already
        is_new = device.depth == 0
        device.depth += is_new
        return is_new

    device.enter = enter  # type: ignore[method-assign]
    with guard, guard:
        assert device.depth == 1
    assert device.depth == 0


def test_calls_of_the_host_leave_the_device_alone(device: CountingDevice) -> None:
    guard = CallGuard(device, "thing")
    with guard.host, pytest.raises(StateError, match="thing is in use by another thread"):
        in_a_thread(guard.__enter__)
    with guard, pytest.raises(StateError, match="thing is in use by another thread"):
        in_a_thread(guard.host.__enter__)
    assert device.entries == 1
    with pytest.raises(LookupError), guard.host:
        raise LookupError("changes nothing")
    with guard:
        pass


@pytest.mark.parametrize("error", [InputError, DeviceError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("is_enqueueing", [False, True])
def test_without_poison_every_error_leaves_the_object_usable(
    device: CountingDevice, error: type[BaseException], is_enqueueing: bool
) -> None:
    guard = CallGuard(device, "thing", poisons=False)
    with pytest.raises(error):
        fail(guard, error, is_enqueueing)
    assert guard.poison is None
    assert not guard.is_enqueueing
    with guard:
        assert device.depth == 1


@pytest.mark.parametrize(
    ("error", "is_enqueueing", "ends"),
    [
        (InputError, False, False),
        (RuntimeError, False, False),
        (KeyboardInterrupt, False, True),
        (InputError, True, True),
        (RuntimeError, True, True),
        (KeyboardInterrupt, True, True),
    ],
)
def test_with_poison_an_error_during_work_or_an_interrupt_ends_it(
    device: CountingDevice, error: type[BaseException], is_enqueueing: bool, ends: bool
) -> None:
    guard = CallGuard(device, "thing")
    with pytest.raises(error) as failure:
        fail(guard, error, is_enqueueing)
    for form in (guard, guard.host):
        if not ends:
            with form:
                pass
            continue
        with pytest.raises(StateError, match="thing failed while work was being enqueued") as refusal, form:
            pytest.fail("it went on")
        assert refusal.value.__cause__ is failure.value
    assert device.depth == 0


def test_a_call_inside_a_call_is_refused(device: CountingDevice) -> None:
    guard = CallGuard(device, "thing")
    for outer in (guard, guard.host):
        for inner in (guard, guard.host):
            with outer, pytest.raises(StateError, match="thing: a call is running in this thread"), inner:
                pytest.fail("it went on")
    with guard:
        assert device.depth == 1


def test_a_closed_object_takes_no_call(device: CountingDevice) -> None:
    guard = CallGuard(device, "thing")
    with guard, pytest.raises(StateError, match="in use by another thread"):
        in_a_thread(guard.close)
    assert not guard.is_closed
    guard.close()
    guard.close()
    assert guard.is_closed
    for form in (guard, guard.host):
        for _ in range(2):
            with pytest.raises(StateError, match="thing is closed"), form:
                pytest.fail("it went on")


def test_what_follows_a_call_runs_when_the_next_one_can_be_made(device: CountingDevice) -> None:
    guard, seen = CallGuard(device, "thing"), []

    def after() -> None:
        with guard.part:
            seen.append(guard.is_busy)
        seen.append(device.depth)

    guard.finish()
    guard.after = after
    with guard.part:
        assert guard.is_busy
    with pytest.raises(InputError), guard.part:
        raise InputError("no")
    assert (seen, guard.is_busy, device.depth) == ([], False, 0)
    with guard:
        pass
    with pytest.raises(InputError):
        fail(guard, InputError, False)
    guard.finish()
    assert seen == [True, 0] * 3
    with pytest.raises(KeyboardInterrupt), guard.part:
        raise KeyboardInterrupt
    assert isinstance(guard.poison, KeyboardInterrupt)
