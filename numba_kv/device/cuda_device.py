"""The `cuda` target: one GPU through cuda.core, and the driver calls that it has no name for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from numba_kv.device.device import Device
from numba_kv.device.driver import check_driver, raise_allocation_error
from numba_kv.device.driver_functions import CopyFunctions, driver_function
from numba_kv.device.graph import CudaGraph, Graph
from numba_kv.device.memory import Memory, pinned_memory
from numba_kv.device.stream import CudaStream, Event, Stream, stream_handle
from numba_kv.errors import DeviceError, InputError, InteropError, StateError

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device.tensor import Tensor

__all__ = ["CudaDevice", "check_driver"]


class _Pushed:
    """Pops the context that `CudaDevice.active` has pushed."""

    __slots__ = ("_device",)

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._device.leave()


_UNCHANGED = nullcontext()


class _Held(threading.local):
    """The device that a call of this thread holds; see `Device.hold`."""

    device: CudaDevice | None = None


_held = _Held()


class CudaDevice(Device):
    """One GPU through cuda.core.

    Every method works from any thread, whatever device is current there, and leaves that device current.
    """

    def __init__(self, ordinal: int, stream: object | None = None) -> None:
        super().__init__()
        from cuda.bindings import driver
        from cuda.core import Device as NativeDevice

        self.target = "cuda"
        self.ordinal = ordinal
        self._driver: Any = driver
        self.native = NativeDevice(ordinal)
        before = check_driver(driver.cuCtxGetCurrent(), "current context")
        made = False
        try:
            self.native.set_current()
            self._context = check_driver(driver.cuCtxGetCurrent(), "current context")
            self.stream = self.as_stream(stream)
            made = True
        finally:
            if int(before) or not made:  # the caller's own choice stays; without one, a new device is as good as any
                check_driver(driver.cuCtxSetCurrent(before), "restoring the current device")

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor number."""
        major, minor = self.native.compute_capability
        return int(major), int(minor)

    def enter(self) -> bool:
        """Push the device's context if another one, or none, is current."""
        if _held.device is self:
            return False
        status, current = self._driver.cuCtxGetCurrent()
        if not status and current == self._context:
            return False
        check_driver(self._driver.cuCtxPushCurrent(self._context), "making the device current")
        return True

    def leave(self) -> None:
        """Pop the device's context."""
        check_driver(self._driver.cuCtxPopCurrent(), "restoring the current device")

    def hold(self) -> Any:
        """Make the device current, and note for this thread that it is."""
        before, entered = _held.device, self.enter()
        _held.device = self
        return before, entered

    def let_go(self, held: Any) -> None:
        """Restore what was noted, and what was current, before `hold`."""
        before, entered = held
        _held.device = before
        if entered:
            self.leave()

    def active(self) -> AbstractContextManager[None]:
        """Make the device current and return a context at whose end it is as before; for a `with` statement alone.

        It is current already in almost every call, and then there is nothing to make and to undo.
        """
        return _Pushed(self) if self.enter() else _UNCHANGED

    def allocate(self, nbytes: int) -> Memory:
        """Return zeroed device memory. Stream: allocation and zeroing are ordered on `stream`."""
        driver, stream = self._driver, self.stream
        with self.active():
            try:
                buffer = self.native.allocate(nbytes, stream=stream.native)  # type: ignore[attr-defined]
            except Exception as error:
                raise_allocation_error(error, f"memory of device {self.ordinal}", nbytes, self._free_nbytes)
                raise
            memory = Memory(int(buffer.handle), nbytes, None, buffer, self.memory)
            zeroing = driver.cuMemsetD8Async(memory.address, 0, nbytes, stream.driver_stream)  # type: ignore[attr-defined]
            check_driver(zeroing, "zeroing new memory")
            return memory

    def allocate_staging(self, nbytes: int) -> Memory:
        """Return page-locked host memory."""
        with self.active():
            try:
                return pinned_memory(nbytes, self, self.pinned)
            except Exception as error:
                raise_allocation_error(error, "page-locked host memory", nbytes, lambda: 0)  # nobody says how much is left
                raise

    def lock_pages(self, array: NDArray[np.uint8]) -> Memory:
        """Return the same pages, locked; where the system does not let ordinary memory be locked, others of the driver's."""
        from numba_kv.device.locked_pages import locked_pages

        try:
            return locked_pages(self, array)
        except DeviceError:
            memory = self.allocate_staging(array.nbytes)
        if memory.array is not None:
            memory.array[:] = array
        return memory

    def _free_nbytes(self) -> int:
        return int(check_driver(self._driver.cuMemGetInfo(), "memory query")[0])

    def foreign_place(self, address: int) -> str | None:
        """Return where `address` lies, in words, if that is not in this device's memory; managed memory is everybody's."""
        driver = self._driver
        attribute = driver.CUpointer_attribute
        with self.active():
            status, kind = driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
            if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
                return "memory that the driver does not know"
            check_driver((status,), "memory type of a pointer")
            ordinal = driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
            number = int(check_driver(ordinal, "device of a pointer"))
            on_device = int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
            if on_device and number == self.ordinal:
                return None
            managed = driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED, address)
            if check_driver(managed, "kind of a pointer"):
                return None
        return f"the memory of device {number}" if on_device else "host memory"

    def as_stream(self, stream: object | None) -> Stream:
        """Return `stream` (cuda.core, `__cuda_stream__`, torch, CuPy, non-zero int) as a CudaStream; None creates one."""
        from cuda.core import Stream as NativeStream

        if isinstance(stream, CudaStream):
            return stream
        with self.active():
            if stream is None:
                return CudaStream(self.native.create_stream(), self, owns=True)
            if isinstance(stream, NativeStream):
                return CudaStream(stream, self, owns=False, owner=stream)
            handle = stream_handle(stream)
            if handle == 0:
                raise InputError(
                    "stream: 0 is the legacy default stream, which orders nothing with other streams; pass a stream or None"
                )
            return CudaStream(NativeStream.from_handle(handle), self, owns=False, owner=stream)

    def as_capturing_stream(self, stream: object) -> Stream:
        """Return `stream`; no driver object is made, so that a capture is not disturbed."""
        driver, handle = self._driver, stream_handle(stream)
        if handle == self.stream.handle:
            return self.stream
        with self.active():
            status = check_driver(driver.cuStreamIsCapturing(driver.CUstream(handle)), "capture query")
        if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            raise StateError(
                f"stream: 0x{handle:x} is neither the resources' stream nor being captured; hand_over() moves the resources"
            )
        return CudaStream.of_address(handle, self, stream)

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        """Capture through cuda.core's graph builder."""
        return CudaGraph(self, work)

    def _copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy; page-locked sources must not change before it has run."""
        with self.active():
            copy = self._driver.cuMemcpyHtoDAsync(destination, source, nbytes, stream.driver_stream)  # type: ignore[attr-defined]
            check_driver(copy, "copy to the device")

    def copy_and_record(self, destination: int, source: int, nbytes: int, stream: Stream, again: Event | None) -> Event:
        """Enqueue a copy and an event; the device is looked at once."""
        if again is None or again.native is None:
            return super().copy_and_record(destination, source, nbytes, stream, again)
        entered = self.enter()
        try:
            (status,) = self._driver.cuMemcpyHtoDAsync(destination, source, nbytes, stream.driver_stream)  # type: ignore[attr-defined]
            if status:
                check_driver((status,), "copy to the device")
            self.bytes_sent += nbytes
            stream.native.record(again.native)  # type: ignore[attr-defined]
        finally:
            if entered:
                self.leave()
        return again

    def copy_functions(self) -> CopyFunctions:
        """Return the driver's own. They want the device to be current."""
        return CopyFunctions(
            copy=driver_function("cuMemcpyHtoDAsync"),
            record=driver_function("cuEventRecord"),
            query=driver_function("cuEventQuery"),
            make_current=driver_function("cuCtxSetCurrent"),
            context=int(self._context),
        )

    def copy_to_host(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy and wait."""
        with self.active():
            copy = self._driver.cuMemcpyDtoHAsync(destination, source, nbytes, stream.driver_stream)  # type: ignore[attr-defined]
            check_driver(copy, "copy to the host")
            stream.synchronize()

    def _fill_bits(self, tensor: Tensor, pattern: int, stream: Stream) -> None:
        """Enqueue a memset."""
        driver = self._driver
        calls = {1: driver.cuMemsetD8Async, 2: driver.cuMemsetD16Async, 4: driver.cuMemsetD32Async}
        call = calls[tensor.dtype.itemsize]
        with self.active():
            check_driver(call(tensor.address, pattern, tensor.size, stream.driver_stream), "fill")  # type: ignore[attr-defined]

    def order_consumer(self, stream: object | None) -> None:
        """Make a consumer's stream wait: DLPack numbers 1 and 2 are the default streams, -1 asks for no order."""
        if stream == -1:
            return
        handle = 1 if stream is None else stream_handle(stream)  # 1 and 2 are the driver's own names of these streams too
        if handle == 0:
            raise InteropError(
                "stream: DLPack gives 0 no meaning on CUDA; 1 is the legacy default stream, 2 the per-thread one"
            )
        if handle == self.stream.handle:
            return
        driver = self._driver
        consumer = driver.CUstream(handle)
        with self.active():
            if self._is_captured(consumer):
                return  # a capture may not wait for work outside it; its owner orders the graph
            event = self.stream.record().native
            check_driver(driver.cuStreamWaitEvent(consumer, event.handle, 0), "ordering the consumer's stream")

    def _is_captured(self, stream: Any) -> bool:
        """Return whether the driver says that waiting on `stream` would disturb a capture; False if it cannot tell."""
        driver = self._driver
        status, *found = driver.cuStreamIsCapturing(stream)
        if int(status):  # IMPLICIT: the legacy stream, while a stream that waits for it is being captured
            return bool(status == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return bool(found[0] != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)
