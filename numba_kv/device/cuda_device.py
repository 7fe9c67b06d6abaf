"""The `cuda` target: one GPU through cuda.core, and the driver calls that it has no name for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from numba_kv.device.device import Device
from numba_kv.device.graph import CudaGraph, Graph
from numba_kv.device.memory import Memory, pinned_memory
from numba_kv.device.stream import CudaStream, Stream, stream_handle
from numba_kv.errors import CapacityError, DeviceError, InputError, InteropError, StateError

if TYPE_CHECKING:
    from numba_kv.device.tensor import Tensor

__all__ = ["CudaDevice", "check_driver"]


def check_driver(result: Any, what: str) -> Any:
    """Return the values of a driver call's `(status, *values)`; raise DeviceError if it failed."""
    status, *values = result
    if int(status):
        raise DeviceError(f"{what}: the driver reports {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


class CudaDevice(Device):
    """One GPU through cuda.core."""

    def __init__(self, ordinal: int, stream: object | None = None) -> None:
        super().__init__()
        from cuda.bindings import driver
        from cuda.core import Device as NativeDevice

        self.target = "cuda"
        self.ordinal = ordinal
        self._driver: Any = driver
        before = check_driver(driver.cuCtxGetCurrent(), "current context")
        self.native = NativeDevice(ordinal)
        self.native.set_current()
        self._context = int(check_driver(driver.cuCtxGetCurrent(), "current context"))
        self.stream = self.as_stream(stream)
        if int(before):  # the caller's own choice stays; without one, ours is as good as any
            check_driver(driver.cuCtxSetCurrent(before), "restoring the current device")

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor number."""
        major, minor = self.native.compute_capability
        return int(major), int(minor)

    def enter(self) -> bool:
        """Push the device's context if another one, or none, is current."""
        driver = self._driver
        status, current = driver.cuCtxGetCurrent()
        if not status and int(current) == self._context:
            return False
        check_driver(driver.cuCtxPushCurrent(self._context), "making the device current")
        return True

    def leave(self) -> None:
        """Pop the device's context."""
        check_driver(self._driver.cuCtxPopCurrent(), "restoring the current device")

    def allocate(self, nbytes: int) -> Memory:
        """Return zeroed device memory. Stream: allocation and zeroing are ordered on `stream`."""
        from cuda.bindings import driver
        from cuda.core._utils.cuda_utils import CUDAError

        entered = self.enter()
        try:
            buffer = self.native.allocate(nbytes, stream=self.stream.native)  # type: ignore[attr-defined]
        except CUDAError as error:
            free = int(check_driver(driver.cuMemGetInfo(), "memory query")[0])
            raise CapacityError(
                f"device memory: {nbytes} bytes are wanted, {free} free on device {self.ordinal} ({error})",
                needed=nbytes,
                free=free,
            ) from error
        else:
            memory = Memory(int(buffer.handle), nbytes, None, buffer, self.memory)
            stream = self.stream.driver_stream  # type: ignore[attr-defined]
            check_driver(driver.cuMemsetD8Async(memory.address, 0, nbytes, stream), "zeroing new memory")
            return memory
        finally:
            if entered:
                self.leave()

    def allocate_staging(self, nbytes: int) -> Memory:
        """Return page-locked host memory."""
        return pinned_memory(nbytes, self.stream, self.pinned)

    def as_stream(self, stream: object | None) -> Stream:
        """Return `stream` (cuda.core, `__cuda_stream__`, torch, CuPy, non-zero int) as a CudaStream; None creates one."""
        from cuda.core import Stream as NativeStream

        if stream is None:
            return CudaStream(self.native.create_stream(), owns=True)
        if isinstance(stream, CudaStream):
            return stream
        if isinstance(stream, NativeStream):
            return CudaStream(stream, owns=False, owner=stream)
        handle = stream_handle(stream)
        if handle == 0:
            raise InputError(
                "stream: 0 is the legacy default stream, which orders nothing with other streams; pass a stream or None"
            )
        return CudaStream(NativeStream.from_handle(handle), owns=False, owner=stream)

    def as_capturing_stream(self, stream: object) -> Stream:
        """Return `stream`; no driver object is made, so that a capture is not disturbed."""
        from cuda.bindings import driver

        handle = stream_handle(stream)
        if handle == self.stream.handle:
            return self.stream
        status = check_driver(driver.cuStreamIsCapturing(driver.CUstream(handle)), "capture query")
        if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            raise StateError(
                f"stream: 0x{handle:x} is neither the resources' stream nor being captured; hand_over() moves the resources"
            )
        return CudaStream.of_address(handle, stream)

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        """Capture through cuda.core's graph builder."""
        return CudaGraph(self, work)

    def copy_to_device(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Enqueue a copy; page-locked sources must not change before it has run."""
        from cuda.bindings import driver

        check_driver(driver.cuMemcpyHtoDAsync(destination, source, nbytes, stream.driver_stream), "copy to the device")  # type: ignore[attr-defined]
        self.bytes_to_device += nbytes

    def copy_to_host(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy and wait."""
        from cuda.bindings import driver

        check_driver(driver.cuMemcpyDtoHAsync(destination, source, nbytes, stream.driver_stream), "copy to the host")  # type: ignore[attr-defined]
        stream.synchronize()

    def _fill_bits(self, tensor: Tensor, pattern: int, stream: Stream) -> None:
        """Enqueue a memset."""
        from cuda.bindings import driver

        calls = {1: driver.cuMemsetD8Async, 2: driver.cuMemsetD16Async, 4: driver.cuMemsetD32Async}
        call = calls[tensor.dtype.itemsize]
        with self.active():
            check_driver(call(tensor.address, pattern, tensor.size, stream.driver_stream), "fill")  # type: ignore[attr-defined]

    def order_consumer(self, stream: object | None) -> None:
        """Make a consumer's stream wait: DLPack numbers 1 and 2 are the default streams, -1 asks for no order."""
        if stream == -1:
            return
        from cuda.core import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Stream as NativeStream

        if stream is None or stream == 1:
            consumer = LEGACY_DEFAULT_STREAM
        elif stream == 2:
            consumer = PER_THREAD_DEFAULT_STREAM
        else:
            handle = stream_handle(stream)
            if handle == 0:
                raise InteropError(
                    "stream: DLPack gives 0 no meaning on CUDA; 1 is the legacy default stream, 2 the per-thread one"
                )
            if handle == self.stream.handle:
                return
            consumer = NativeStream.from_handle(handle)
        with self.active():
            status, capture = self._driver.cuStreamIsCapturing(self._driver.CUstream(int(consumer.handle)))
            idle = self._driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
            if not status and capture == idle:  # a capture may not wait for work outside it
                consumer.wait(self.stream.record().native)
