"""Device: where memory, streams and copies of one target come from."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import index
from typing import TYPE_CHECKING, Any

from numba_kv.device.graph import CudaGraph, Graph, HostGraph
from numba_kv.device.memory import Memory, MemoryStats, host_memory, pinned_memory
from numba_kv.device.stream import CudaStream, HostStream, Stream, stream_handle
from numba_kv.device.target import resolve_target
from numba_kv.device.tensor import Tensor
from numba_kv.dtypes import DType
from numba_kv.errors import CapacityError, DeviceError, InputError, InteropError, ShapeError, StateError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CudaDevice", "Device", "HostDevice", "check_driver", "create_device"]


def check_driver(result: Any, what: str) -> Any:
    """Return the values of a driver call's `(status, *values)`; raise DeviceError if it failed."""
    status, *values = result
    if int(status):
        raise DeviceError(f"{what}: the driver reports {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


class Device(ABC):
    """One device of one target, and the stream its owner works on.

    Attributes
    ----------
    target : str
        ``"cuda"``, ``"cpu"`` or ``"sim"``.
    ordinal : int
        Number of the device; 0 on the host targets.
    stream : Stream
        Where everything is enqueued that names no stream.
    memory, pinned : MemoryStats
        Device bytes and page-locked host bytes given out.
    bytes_to_device : int
        Bytes copied from the host so far.
    """

    target: str
    ordinal: int = 0
    stream: Stream

    def __init__(self) -> None:
        self.memory = MemoryStats()
        self.pinned = MemoryStats()
        self.bytes_to_device = 0

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Return `nbytes` of zeroed memory. Stream: enqueues on `stream`."""

    @abstractmethod
    def allocate_staging(self, nbytes: int) -> Memory:
        """Return host memory that copies to the device can read asynchronously."""

    @abstractmethod
    def as_stream(self, stream: object | None) -> Stream:
        """Return `stream` as a Stream of this device; None gives a new one."""

    @abstractmethod
    def as_capturing_stream(self, stream: object) -> Stream:
        """Return `stream` if work may be enqueued there: it is the device's own, or is being captured.

        Raises
        ------
        StateError
            Otherwise.
        """

    @abstractmethod
    def capture(self, work: Callable[[Stream], None]) -> Graph:
        """Capture what `work` enqueues on the stream that it is given. Nothing runs."""

    @abstractmethod
    def copy_to_device(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy host bytes at address `source` to the device address `destination`. Stream: enqueues."""

    @abstractmethod
    def copy_to_host(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy device bytes to host memory. Stream: waits."""

    @abstractmethod
    def _fill_bits(self, tensor: Tensor, pattern: int, stream: Stream) -> None:
        """Set every element to the bits of the unsigned integer `pattern`. Stream: enqueues."""

    @abstractmethod
    def order_consumer(self, stream: object | None) -> None:
        """Make a consumer's stream (DLPack's numbering) wait for the work enqueued so far."""

    def make_current(self) -> None:  # noqa: B027 - host targets have no context
        """Make the device the calling thread's current one."""

    def tensor(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Return a zeroed tensor with memory of its own.

        Raises
        ------
        ShapeError
            If an extent is negative.
        CapacityError
            If the device has not enough memory.
        """
        size = dtype.itemsize
        for extent in shape:
            if extent < 0:
                raise ShapeError(f"shape: {shape} has a negative extent")
            size *= extent
        return Tensor(self.allocate(max(1, size)), self, dtype, shape)

    def fill(self, tensor: Tensor, value: int, stream: Stream) -> None:
        """Set every element of a dense tensor of 1-, 2- or 4-byte elements to the bits of the integer `value`.

        Raises
        ------
        InputError
            If the tensor is not dense or its elements are larger.

        Stream: enqueues.
        """
        tensor.check_open()
        size = tensor.dtype.itemsize
        if not tensor.is_contiguous or size > 4:
            raise InputError("fill: a dense tensor of at most 4-byte elements is wanted")
        if tensor.size:
            self._fill_bits(tensor, value & ((1 << (8 * size)) - 1), stream)

    def download(self, tensor: Tensor, stream: Stream | None = None) -> NDArray[Any]:
        """Return a copy of `tensor` in host memory. Stream: waits for `stream`."""
        import numpy as np

        stream = stream or self.stream
        if not tensor.size:
            return np.empty(tensor.shape, tensor.dtype.numpy())
        view, _, _ = self._span(tensor, stream)
        return np.ascontiguousarray(view).reshape(tensor.shape)

    def upload(self, tensor: Tensor, values: NDArray[Any], stream: Stream | None = None) -> None:
        """Copy host values of the same shape and type into a tensor. Stream: enqueues and waits.

        Cost: one copy; a strided tensor's span is read, changed and written back.
        """
        import numpy as np

        stream = stream or self.stream
        if not tensor.size:
            return
        if tensor.is_contiguous:
            source, address = np.ascontiguousarray(values), tensor.address
        else:
            view, source, address = self._span(tensor, stream)
            view[...] = values
        self.copy_to_device(address, source.ctypes.data, source.nbytes, stream)
        stream.synchronize()

    def _span(self, tensor: Tensor, stream: Stream) -> tuple[NDArray[Any], NDArray[Any], int]:
        """Return a tensor's elements as a view of a host copy of the bytes from its first to its last, and their address."""
        import numpy as np

        size = tensor.dtype.itemsize
        low, high = tensor.reach
        raw = np.empty((high - low) * size, np.uint8)
        address = tensor.address + low * size
        self.copy_to_host(raw.ctypes.data, address, raw.nbytes, stream)
        strides = tuple(s * size for s in tensor.strides)
        view: NDArray[Any] = np.ndarray(tensor.shape, tensor.dtype.numpy(), raw.data, -low * size, strides)
        return view, raw, address

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.target!r}, {self.ordinal})"


class HostDevice(Device):
    """The `cpu` and `sim` targets: NumPy memory, every call has finished when it returns."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target
        self.stream = HostStream()

    def allocate(self, nbytes: int) -> Memory:
        """Return zeroed host memory; large blocks are committed as they are touched."""
        return host_memory(nbytes, self.memory)

    def allocate_staging(self, nbytes: int) -> Memory:
        """Return ordinary host memory."""
        return host_memory(nbytes, self.pinned)

    def as_stream(self, stream: object | None) -> Stream:
        """Return `stream` if it is a host stream, or a new one for None."""
        if stream is None:
            return HostStream()
        if isinstance(stream, HostStream):
            return stream
        raise InputError(f"stream: {stream!r} cannot be used on the {self.target!r} target; pass None")

    def as_capturing_stream(self, stream: object) -> Stream:
        """Return a host stream."""
        return self.as_stream(stream)

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        """Return a graph that calls `work` again."""
        return HostGraph(work)

    def copy_to_device(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy bytes."""
        ctypes.memmove(destination, source, nbytes)
        self.bytes_to_device += nbytes

    def copy_to_host(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy bytes."""
        ctypes.memmove(destination, source, nbytes)

    def _fill_bits(self, tensor: Tensor, pattern: int, stream: Stream) -> None:
        """Set every element."""
        tensor.numpy().view(f"uint{8 * tensor.dtype.itemsize}").fill(pattern)

    def order_consumer(self, stream: object | None) -> None:
        """Return at once: nothing is ever pending."""


class CudaDevice(Device):
    """One GPU through cuda.core. Makes itself current on creation."""

    def __init__(self, ordinal: int, stream: object | None = None) -> None:
        super().__init__()
        from cuda.core import Device as NativeDevice

        self.target = "cuda"
        self.ordinal = ordinal
        self.native = NativeDevice(ordinal)
        self.native.set_current()
        self.stream = self.as_stream(stream)

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor number."""
        major, minor = self.native.compute_capability
        return int(major), int(minor)

    def make_current(self) -> None:
        """Make the device the calling thread's current one."""
        self.native.set_current()

    def allocate(self, nbytes: int) -> Memory:
        """Return zeroed device memory. Stream: allocation and zeroing are ordered on `stream`."""
        from cuda.bindings import driver
        from cuda.core._utils.cuda_utils import CUDAError

        try:
            buffer = self.native.allocate(nbytes, stream=self.stream.native)  # type: ignore[attr-defined]
        except CUDAError as error:
            free = int(check_driver(driver.cuMemGetInfo(), "memory query")[0])
            raise CapacityError(
                f"device memory: {nbytes} bytes are wanted, {free} free on device {self.ordinal} ({error})",
                needed=nbytes,
                free=free,
            ) from error
        memory = Memory(int(buffer.handle), nbytes, None, buffer, self.memory)
        stream = self.stream.driver_stream  # type: ignore[attr-defined]
        check_driver(driver.cuMemsetD8Async(memory.address, 0, nbytes, stream), "zeroing new memory")
        return memory

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
        consumer.wait(self.stream.record().native)


def create_device(target: str | None = None, ordinal: int = 0, stream: object | None = None) -> Device:
    """Return a device of `target` (default: `numba_kv.target()`).

    Raises
    ------
    TargetError
        If the target cannot work here.
    InputError
        If the device does not exist, or the stream is not one of the target's.
    """
    name = resolve_target(target)
    try:
        number = -1 if isinstance(ordinal, bool) else index(ordinal)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(f"device: {ordinal!r} is not a device number")
    ordinal = number
    if name == "cuda":
        from cuda.bindings import driver

        count = check_driver(driver.cuDeviceGetCount(), "device count")
        if ordinal >= count:
            raise InputError(f"device: {ordinal} is not one of the {count} devices")
        return CudaDevice(ordinal, stream)
    if ordinal:
        raise InputError(f"device: the {name!r} target has only device 0, got {ordinal}")
    device = HostDevice(name)
    device.stream = device.as_stream(stream)
    return device
