"""Stand-ins for the CUDA driver and cuda.core, so that the calls of `CudaDevice` can be watched without a GPU.

Statuses and enums are the real ones of cuda.bindings, which needs no driver for them.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

__all__ = ["MINE", "OTHER", "FakeDriver", "FakeNative", "cuda_device", "fakes"]

#: Addresses of the device's own context and of somebody else's.
MINE, OTHER = 0x1000, 0x2000
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)


class FakeDriver:
    """A driver with a stack of contexts. `calls` holds (name, current context) of every call that needs one.

    Results of a call are set in `results`, by its name; without one a call succeeds and returns nothing.
    """

    def __init__(self, real: Any) -> None:
        self._real = real
        self.stack: list[int] = []
        self.calls: list[tuple[str, int]] = []
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.results: dict[str, Any] = {}
        self._functions: list[object] = []  # called by their addresses alone

    @property
    def current(self) -> int:
        return self.stack[-1] if self.stack else 0

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return self._real.CUresult.CUDA_SUCCESS, self.current

    def cuCtxPushCurrent(self, context: int) -> tuple[Any]:
        self.stack.append(int(context))
        return (self._real.CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, int]:
        return self._real.CUresult.CUDA_SUCCESS, self.stack.pop()

    def cuCtxSetCurrent(self, context: int) -> tuple[Any]:
        self.stack[-1:] = [int(context)] if int(context) else []
        return (self._real.CUresult.CUDA_SUCCESS,)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self._real, name)

        def call(*arguments: Any) -> Any:
            self.note(name)
            self.arguments[name] = arguments
            result = self.results.get(name, (self._real.CUresult.CUDA_SUCCESS,))
            return result(*arguments) if callable(result) else result

        return call

    def function(self, name: str) -> int:
        """Return the address of a function in C that does as the call of that name."""
        call = _FUNCTION(lambda *words: int(getattr(self, name)(*words)[0]))
        self._functions.append(call)
        return ctypes.cast(call, ctypes.c_void_p).value or 0

    def note(self, name: str) -> None:
        self.calls.append((name, self.current))


class FakeStream:
    """A stream of cuda.core."""

    def __init__(self, driver: FakeDriver, handle: int) -> None:
        self._driver, self.handle = driver, handle

    def record(self, event: object = None, options: object = None) -> Any:
        self._driver.note("record")
        return event or FakeEvent(self._driver)

    def wait(self, event: object) -> None:
        self._driver.note("wait")

    def sync(self) -> None:
        self._driver.note("sync")

    def close(self) -> None:
        self._driver.note("stream close")


class FakeEvent:
    """An event of cuda.core."""

    handle = 0xE

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    @property
    def is_done(self) -> bool:
        self._driver.note("is_done")
        return True

    def sync(self) -> None:
        self._driver.note("event sync")

    def __sub__(self, other: object) -> float:
        self._driver.note("elapsed")
        return 1.0


class FakeBuffer:
    """Memory of cuda.core."""

    def __init__(self, driver: FakeDriver, handle: int) -> None:
        self._driver, self.handle = driver, handle

    def close(self, stream: object = None) -> None:
        self._driver.note("buffer close")


class FakeNative:
    """cuda.core's device: `failure`, if set, is what the next allocation or stream raises."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.failure: Exception | None = None

    def set_current(self) -> None:
        self._driver.cuCtxSetCurrent(MINE)

    def create_stream(self) -> FakeStream:
        self._work("create_stream")
        return FakeStream(self._driver, 0x77)

    def allocate(self, nbytes: int, stream: object = None) -> FakeBuffer:
        self._work("allocate")
        return FakeBuffer(self._driver, 0xA000)

    def _work(self, name: str) -> None:
        self._driver.note(name)
        if self.failure is not None:
            raise self.failure


@contextmanager
def fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put the stand-ins in the place of the driver and of cuda.core's device; yields both."""
    bindings = pytest.importorskip("cuda.bindings", reason="cuda-python is not installed (pip install 'numba-kv[cu13]')")
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed (pip install 'numba-kv[cu13]')")
    from cuda.bindings import driver as real

    driver = FakeDriver(real)
    native = FakeNative(driver)
    with monkeypatch.context() as patch:
        patch.setattr(bindings, "driver", driver)
        patch.setattr(core, "Device", lambda ordinal: native)
        patch.setattr("numba_kv.device.cuda_device.driver_function", driver.function)
        patch.setattr(core, "LegacyPinnedMemoryResource", lambda: SimpleNamespace(allocate=native_pinned(native, driver)))
        yield driver, native


def native_pinned(native: FakeNative, driver: FakeDriver) -> Any:
    """Return an allocation of host memory that is real, so that arrays of it can be read."""
    import numpy as np

    def allocate(nbytes: int, stream: object = None) -> FakeBuffer:
        native._work("pinned allocate")
        pages = np.zeros(nbytes, np.uint8)
        buffer = FakeBuffer(driver, pages.ctypes.data)
        buffer.pages = pages  # type: ignore[attr-defined]
        return buffer

    return allocate


@contextmanager
def cuda_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield a CudaDevice on the stand-ins, with no context current and no call noted, and the stand-ins themselves."""
    from numba_kv.device.cuda_device import CudaDevice

    with fakes(monkeypatch) as (driver, native):
        device = CudaDevice(0)
        driver.stack.clear()
        driver.calls.clear()
        yield device, driver, native
