"""Device: where memory, streams, copies and graphs of one target come from."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

from numba_kv.device.memory import Memory, MemoryStats
from numba_kv.device.stream import Event, Stream, stream_handle
from numba_kv.device.target import resolve_target
from numba_kv.device.tensor import Tensor
from numba_kv.device.unique import Unique
from numba_kv.dtypes import DType
from numba_kv.errors import InputError, ShapeError

if TYPE_CHECKING:
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device.driver_functions import CopyFunctions
    from numba_kv.device.graph import Graph

__all__ = ["Device", "create_device"]


class _Active:
    """What `Device.active` returns. A class, because a generator costs twice as much and every driver call is in one."""

    __slots__ = ("_device", "_entered")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._entered = False

    def __enter__(self) -> None:
        self._entered = self._device.enter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._entered:
            self._device.leave()


class Device(Unique, ABC):
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
    bytes_sent : int
        Bytes that calls have copied from the host; without those of uploads, whose threads run beside the calls.
    """

    target: str
    ordinal: int = 0
    stream: Stream

    def __init__(self) -> None:
        self.memory = MemoryStats()
        self.pinned = MemoryStats()
        self.bytes_sent = 0
        self._bytes_uploaded = 0
        self._counting = threading.Lock()

    @property
    def bytes_to_device(self) -> int:
        """Bytes copied from the host so far."""
        return self.bytes_sent + self._bytes_uploaded

    def count_upload(self, nbytes: int) -> None:
        """Count bytes of an upload, from any thread."""
        with self._counting:
            self._bytes_uploaded += nbytes

    @abstractmethod
    def allocate(self, nbytes: int) -> Memory:
        """Return `nbytes` of zeroed memory. Stream: enqueues on `stream`."""

    @abstractmethod
    def allocate_staging(self, nbytes: int) -> Memory:
        """Return host memory that copies to the device can read asynchronously."""

    @abstractmethod
    def lock_pages(self, array: NDArray[np.uint8]) -> Memory:
        """Return memory as of `allocate_staging` with the bytes of an array: its own pages, if they can be locked.

        The array is not to be used any more.
        """

    @abstractmethod
    def as_stream(self, stream: object | None) -> Stream:
        """Return `stream` as a Stream of this device; None gives a new one."""

    def is_own_stream(self, stream: object) -> bool:
        """Return whether `stream` is the device's own."""
        if isinstance(stream, Stream):
            return stream is self.stream or (stream.handle != 0 and stream.handle == self.stream.handle)
        return bool(stream_handle(stream) == self.stream.handle != 0)

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

    def copy_to_device(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy host bytes at address `source`, which stay until it has run, to a device address. Stream: enqueues."""
        self._copy(destination, source, nbytes, stream)
        self.bytes_sent += nbytes

    @abstractmethod
    def _copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy as `copy_to_device`, uncounted."""

    def copy_and_record(self, destination: int, source: int, nbytes: int, stream: Stream, again: Event | None) -> Event:
        """Copy as `copy_to_device`, and return an event behind it as ``stream.record(again=again)``. Stream: enqueues both."""
        self.copy_to_device(destination, source, nbytes, stream)
        return stream.record(again=again)

    def copy_functions(self) -> CopyFunctions | None:
        """Return what the readers of an upload copy with; None where they can write to the device's memory themselves."""
        return None

    @abstractmethod
    def copy_to_host(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy device bytes to host memory. Stream: waits."""

    @abstractmethod
    def _fill_bits(self, tensor: Tensor, pattern: int, stream: Stream) -> None:
        """Set every element to the bits of the unsigned integer `pattern`. Stream: enqueues."""

    @abstractmethod
    def order_consumer(self, stream: object | None) -> None:
        """Make a consumer's stream (DLPack's numbering) wait for the work enqueued so far."""

    def enter(self) -> bool:
        """Make the device the calling thread's current one; return whether `leave` has to undo it."""
        return False

    def leave(self) -> None:
        """Give the calling thread the current device back that it had before `enter`."""

    def hold(self) -> Any:
        """Make the device the calling thread's current one until `let_go`; `enter` need not ask the driver until then.

        Returns what `let_go` takes. For calls that hand control to nobody else, who could make another device current.
        """
        return self.enter()

    def let_go(self, held: Any) -> None:
        """End a `hold`."""
        if held:
            self.leave()

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which the device is current, from whatever thread and whatever device the caller was on."""
        return _Active(self)

    def tensor(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Return a zeroed tensor with memory of its own.

        Raises
        ------
        ShapeError
            If an extent is no integer, or negative.
        CapacityError
            If the device has not enough memory.
        """
        extents = _extents(shape)
        return Tensor(self.allocate(max(1, prod(extents) * dtype.itemsize)), self, dtype, extents)

    def fill(self, tensor: Tensor, value: int, stream: Stream) -> None:
        """Set every element of a dense tensor of 1-, 2- or 4-byte elements to the bits of the integer `value`.

        Raises
        ------
        InputError
            If the tensor is not dense or its elements are larger, or the value is no integer.

        Stream: enqueues.
        """
        tensor.check_open()
        size = tensor.dtype.itemsize
        if not tensor.is_contiguous or size > 4:
            raise InputError("fill: a dense tensor of at most 4-byte elements is wanted")
        try:
            bits = index(value)
        except TypeError:
            raise InputError(f"fill: value: {value!r} is not an integer; the bits of an element are wanted") from None
        if tensor.size:
            self._fill_bits(tensor, bits & ((1 << (8 * size)) - 1), stream)

    def download(self, tensor: Tensor, stream: Stream | None = None) -> NDArray[Any]:
        """Return a copy of `tensor` in host memory. Stream: waits for `stream`."""
        import numpy as np

        stream = self._stream_or_own(stream)
        if not tensor.size:
            return np.empty(tensor.shape, tensor.dtype.numpy())
        with self.active():
            view, _, _ = self._span(tensor, stream)
        return np.ascontiguousarray(view).reshape(tensor.shape)

    def upload(self, tensor: Tensor, values: NDArray[Any], stream: Stream | None = None) -> None:
        """Copy host values of the same shape and type into a tensor. Stream: enqueues and waits.

        Cost: one copy; a strided tensor's span is read, changed and written back.
        """
        import numpy as np

        stream = self._stream_or_own(stream)
        if not tensor.size:
            return
        with self.active():
            if tensor.is_contiguous:
                source, address = np.ascontiguousarray(values), tensor.address
            else:
                view, source, address = self._span(tensor, stream)
                view[...] = values
            self.copy_to_device(address, source.ctypes.data, source.nbytes, stream)
            stream.synchronize()

    def _stream_or_own(self, stream: object | None) -> Stream:
        if stream is None:
            return self.stream
        return stream if isinstance(stream, Stream) else self.as_stream(stream)

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


def _extents(shape: Any) -> tuple[int, ...]:
    try:
        extents = [-1 if isinstance(extent, bool) else index(extent) for extent in shape]
    except TypeError:
        extents = [-1]
    if min(extents, default=0) < 0:
        raise ShapeError(f"shape: {shape!r} is not a tuple of extents, integers from 0 on")
    return tuple(extents)


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

        from numba_kv.device.cuda_device import CudaDevice
        from numba_kv.device.driver import check_driver

        count = check_driver(driver.cuDeviceGetCount(), "device count")
        if ordinal >= count:
            raise InputError(f"device: {ordinal} is not one of the {count} devices")
        return CudaDevice(ordinal, stream)
    if ordinal:
        raise InputError(f"device: the {name!r} target has only device 0, got {ordinal}")
    from numba_kv.device.host_device import HostDevice

    device = HostDevice(name)
    device.stream = device.as_stream(stream)
    return device
