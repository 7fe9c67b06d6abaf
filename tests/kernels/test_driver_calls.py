"""Calls by their addresses: order, parameters, the first failure. Functions of this process stand for those of a driver."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from numba_kv.errors import DeviceError, InvariantError
from numba_kv.kernels import driver_calls, launch_words, on_cuda
from numba_kv.kernels.driver_calls import CALL_WORDS, DriverCalls, OwnWord

WORDS = [ctypes.c_int64] * 11
made: list[tuple[str, tuple[int, ...]]] = []


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[..., int]]]:
    """Driver functions by name, whose calls are written into `made`."""
    found: dict[str, Callable[..., int]] = {}
    alive: list[object] = []  # what is called by its address alone

    def address(name: str) -> int:
        def call(*words: int) -> int:
            made.append((name, words))
            return found[name](*words)

        function = ctypes.CFUNCTYPE(ctypes.c_int, *WORDS)(call)
        alive.append(function)
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    monkeypatch.setattr(driver_calls, "driver_function", address)
    made.clear()
    yield found
    alive.clear()


def test_calls_are_made_in_order_with_their_words(functions: dict[str, Callable[..., int]]) -> None:
    functions |= {"cuFirst": lambda *words: 0, "cuSecond": lambda *words: 0}
    calls = DriverCalls(("cuFirst", 5, 2**63 + 1), ("cuSecond", *range(1, 12)))
    calls()
    assert [name for name, _ in made] == ["cuFirst", "cuSecond"]
    assert made[0][1][:3] == (5, -(2**63) + 1, 0)  # 64 bits, as they are
    assert made[1][1] == tuple(range(1, 12))
    calls.words[CALL_WORDS + 1 + 10] = 77
    calls()
    assert made[-1][1] == (*range(1, 11), 77)


def test_a_parameter_can_be_the_address_of_a_word_of_its_call(functions: dict[str, Callable[..., int]]) -> None:
    def read(*words: int) -> int:
        return int(ctypes.c_int64.from_address(words[0]).value)

    functions |= {"cuFirst": lambda *words: 0, "cuSecond": read}
    calls = DriverCalls(("cuFirst",), ("cuSecond", OwnWord(3), 0, 700))
    with pytest.raises(DeviceError, match="cuSecond: the driver reports CUDA_ERROR_ILLEGAL_ADDRESS"):
        calls()
    with pytest.raises(InvariantError, match=r"cuFirst: a call has words 0\.\.11"):
        DriverCalls(("cuFirst", OwnWord(12)))
    with pytest.raises(InvariantError, match="cuFirst: 12 parameters given, at most 11 are passed"):
        DriverCalls(("cuFirst", *range(12)), ("cuSecond",))


def test_a_launch_has_the_layout_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr(launch_words, "driver_version", lambda: 13000)
    name, place, function, parameters, extra, *config = launch_words.launch_words(0xF, 96, 0xB0, (9, 0))
    assert (name, place, function, parameters, extra) == ("cuLaunchKernelEx", launch_words.GRID, 0xF, 0xB0, 0)
    assert len(config) + 5 == CALL_WORDS
    config[0] |= 1234
    config[launch_words.STREAM - launch_words.GRID] = 0x57
    wanted = driver.CUlaunchConfig()
    wanted.gridDimX, wanted.gridDimY, wanted.gridDimZ = 1234, 1, 1
    wanted.blockDimX, wanted.blockDimY, wanted.blockDimZ = 96, 1, 1
    wanted.sharedMemBytes, wanted.hStream = 0, driver.CUstream(0x57)
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    assert ctypes.string_at(config[5], 72) == ctypes.string_at(int(attribute.getPtr()), 72)
    config[5] = 0  # where the attributes are
    wanted.numAttrs = 1
    assert struct.pack("<7Q", *config)[:-4] == ctypes.string_at(int(wanted.getPtr()), 52)


@pytest.mark.parametrize(("capability", "version"), [((8, 9), 13000), ((9, 0), 12020)], ids=["older GPU", "older driver"])
def test_launches_do_not_overlap_where_they_cannot(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: int
) -> None:
    monkeypatch.setattr(launch_words, "driver_version", lambda: version)
    assert launch_words.launch_words(0xF, 96, 0xB0, capability)[-1] == 0


def test_the_first_failure_ends_them(functions: dict[str, Callable[..., int]]) -> None:
    statuses = iter([0, 700, 0])
    functions |= {name: lambda *words: next(statuses) for name in ("cuFirst", "cuSecond", "cuThird")}
    calls = DriverCalls(("cuFirst",), ("cuSecond",), ("cuThird",))
    with pytest.raises(DeviceError, match="cuSecond: the driver reports CUDA_ERROR_ILLEGAL_ADDRESS"):
        calls()
    assert [name for name, _ in made] == ["cuFirst", "cuSecond"]


def test_a_status_without_a_name_is_told_by_its_number(functions: dict[str, Callable[..., int]]) -> None:
    functions["cuFirst"] = lambda *words: 123456
    with pytest.raises(DeviceError, match="cuFirst: the driver reports error 123456"):
        DriverCalls(("cuFirst",))()


class Device:
    """Stands for a GPU that is current or not."""

    def __init__(self) -> None:
        self.is_current = False

    @contextmanager
    def active(self) -> Iterator[None]:
        before, self.is_current = self.is_current, True
        yield
        self.is_current = before


def repeated(monkeypatch: pytest.MonkeyPatch, device: Device) -> Callable[[object], None]:
    words = launch_words.launch_words(0xF, 64, 0xB0, (8, 0))
    monkeypatch.setattr(on_cuda, "launch_call", lambda launch: words)
    launch = SimpleNamespace(device=device, prepare=lambda items: items // 64)
    again = on_cuda.cuda_repeated(launch, 448)  # type: ignore[arg-type]
    return lambda stream: again(stream)  # type: ignore[arg-type]


def test_a_repeated_launch_is_one_call(functions: dict[str, Callable[..., int]], monkeypatch: pytest.MonkeyPatch) -> None:
    functions["cuLaunchKernelEx"] = lambda *words: 0
    again = repeated(monkeypatch, Device())
    again(SimpleNamespace(handle=0x57))
    ((name, (config, *words)),) = made
    assert (name, words[:3]) == ("cuLaunchKernelEx", [0xF, 0xB0, 0])
    assert words[3:8] == [7 | 1 << 32, 1 | 64 << 32, 1 | 1 << 32, 0, 0x57]
    assert config


def test_a_refused_launch_is_made_with_the_device_current(
    functions: dict[str, Callable[..., int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    functions["cuLaunchKernelEx"] = lambda *words: 0 if device.is_current else 201
    repeated(monkeypatch, device)(SimpleNamespace(handle=1))
    assert len(made) == 2
    assert not device.is_current
    functions["cuLaunchKernelEx"] = lambda *words: 719
    with pytest.raises(DeviceError, match="CUDA_ERROR_LAUNCH_FAILED"):
        repeated(monkeypatch, device)(SimpleNamespace(handle=1))
