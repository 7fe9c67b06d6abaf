"""Tensor: a typed, strided view of device memory, and its exchange with other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from operator import index as as_integer
from typing import TYPE_CHECKING, Any

from numba_kv.device.dlpack import device_of, to_capsule
from numba_kv.device.unique import Unique
from numba_kv.dtypes import DType, dtype as named_dtype
from numba_kv.errors import InputError, InteropError, ShapeError, StateError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.device.device import Device
    from numba_kv.device.memory import Memory
    from numba_kv.device.stream import Stream

__all__ = ["Tensor"]


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


class Tensor(Unique):
    """A view of device memory. Borrows the memory and keeps its owner alive.

    Attributes
    ----------
    shape : tuple of int
        Extents.
    strides : tuple of int
        Distances between neighbours, in elements.
    dtype : DType
        Element type.
    address : int
        Device address of the first element; it never changes.
    device : Device
        Where the memory is.
    """

    __slots__ = ("_memory", "address", "device", "dtype", "shape", "strides")

    def __init__(
        self,
        memory: Memory,
        device: Device,
        dtype: DType,
        shape: tuple[int, ...],
        *,
        offset_nbytes: int = 0,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self._memory = memory
        self.device = device
        self.dtype = dtype
        self.shape = tuple(shape)
        self.strides = _contiguous(self.shape) if strides is None else strides
        self.address = memory.address + offset_nbytes
        low, high = (0, self.size) if strides is None else self.reach
        if offset_nbytes + low * dtype.itemsize < 0 or offset_nbytes + high * dtype.itemsize > memory.nbytes:
            raise ShapeError(f"shape: {shape} of {dtype} at byte {offset_nbytes} does not fit {memory.nbytes} bytes")

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie densely in row-major order."""
        return self.size == 0 or all(
            n == 1 or s == c for n, s, c in zip(self.shape, self.strides, _contiguous(self.shape), strict=True)
        )

    @property
    def reach(self) -> tuple[int, int]:
        """Half-open range of elements that the tensor touches, counted from its first one."""
        if not self.size:
            return 0, 0
        ends = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + 1

    def __len__(self) -> int:
        if not self.shape:
            raise InputError("len() of a tensor without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[place] for place in range(len(self)))

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)}, {self.device.target})"

    def __getitem__(self, index: object) -> Tensor:
        """Return the sub-tensor of integers and slices; it shares memory and keeps it alive.

        Raises
        ------
        InputError
            If an index is out of range or neither an integer nor a slice.
        """
        self.check_open()
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) > self.ndim:
            raise InputError(f"index: {len(parts)} indices for {self.ndim} axes")
        offset, shape, strides = 0, [], []
        for axis, part in enumerate(parts):
            extent, step = self.shape[axis], self.strides[axis]
            if isinstance(part, slice):
                try:
                    start, stop, jump = part.indices(extent)
                except (TypeError, ValueError) as error:
                    raise InputError(f"index: {part!r} on axis {axis}: {error}") from None
                count = len(range(start, stop, jump))
                offset += start * step if count else 0
                shape.append(count)
                strides.append(step * jump)
                continue
            try:
                place = as_integer(part)
            except TypeError:
                raise InputError(f"index: {part!r} on axis {axis} is neither an integer nor a slice") from None
            if not -extent <= place < extent:
                raise InputError(f"index: {place} on axis {axis} is not in {-extent}..{extent - 1}")
            offset += place % extent * step
        shape += self.shape[len(parts) :]
        strides += self.strides[len(parts) :]
        at = self.address - self._memory.address + offset * self.dtype.itemsize
        view = Tensor.__new__(Tensor)
        view._memory, view.device, view.dtype = self._memory, self.device, self.dtype
        view.shape, view.strides, view.address = tuple(shape), tuple(strides), self._memory.address + at
        return view

    def as_storage(self) -> Tensor:
        """Return the same memory as unsigned integers of the element's size: for libraries that lack the element type.

        float8 and bool become uint8, bfloat16 and float16 uint16, float32 uint32; integers stay what they are.
        """
        self.check_open()
        view = Tensor.__new__(Tensor)
        view._memory, view.device, view.dtype = self._memory, self.device, named_dtype(self.dtype.storage_name)
        view.shape, view.strides, view.address = self.shape, self.strides, self.address
        return view

    def numpy(self) -> NDArray[Any]:
        """Return the elements as a NumPy array that shares the memory (host targets).

        Raises
        ------
        InteropError
            On `cuda`: use `to_host`.
        """
        self.check_open()
        if self._memory.array is None:
            raise InteropError("numpy(): the tensor is in device memory; to_host() copies it")
        import numpy as np

        kind, size = self.dtype.numpy(), self.dtype.itemsize
        start = self.address - self._memory.address
        if not self.size:
            return np.empty(self.shape, kind)
        strides = tuple(s * size for s in self.strides)
        shared: NDArray[Any] = np.ndarray(self.shape, kind, self._memory.array.data, start, strides)
        return shared

    def to_host(self, stream: Stream | None = None) -> NDArray[Any]:
        """Return a copy as a NumPy array.

        Stream: waits for the work enqueued so far on `stream` (default: the device's own).
        """
        self.check_open()
        return self.device.download(self, stream)

    def fill_from(self, values: NDArray[Any], stream: Stream | None = None) -> None:
        """Copy a NumPy array of the same shape and element type into the tensor.

        Raises
        ------
        ShapeError
            If shape or element type differ.

        Stream: enqueues on `stream` and waits. For tests and set-up, not for steps.
        """
        self.check_open()
        import numpy as np

        if not isinstance(values, (np.ndarray, np.generic)):
            raise ShapeError(f"values: {type(values).__name__} given, an array of {self.dtype} {self.shape} wanted")
        if values.shape != self.shape or values.dtype != self.dtype.numpy():
            raise ShapeError(f"values: {values.dtype} {values.shape} given, {self.dtype} {self.shape} wanted")
        self.device.upload(self, values, stream)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array protocol, on the host targets."""
        if self._memory.array is None:
            raise AttributeError("__array_interface__ is for host memory")
        return self.numpy().view(self._storage_numpy()).__array_interface__

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the elements as a NumPy array (host targets; a clear refusal on `cuda`, where NumPy would take a list)."""
        import numpy as np

        return np.array(self.numpy(), dtype, copy=copy)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA array protocol version 3, on `cuda`. bfloat16 and float8 appear as unsigned integers of their size."""
        if self.device.target != "cuda":
            raise AttributeError("__cuda_array_interface__ is for device memory")
        self.check_open()
        itemsize = self.dtype.itemsize
        return {
            "shape": self.shape,
            "typestr": self._storage_numpy().str,
            "data": (self.address if self.size else 0, False),
            "strides": None if self.is_contiguous else tuple(s * itemsize for s in self.strides),
            "stream": self.device.stream.handle,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device type and number."""
        return device_of(self)

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        """Return a DLPack capsule that shares the memory and keeps it alive.

        Stream: on `cuda` the consumer's `stream` is made to wait for the device's own stream (-1: it is not).
        """
        self.check_open()
        if copy:
            raise InteropError("copy: True is not possible; a tensor is exchanged without a copy")
        try:
            is_elsewhere = dl_device is not None and tuple(dl_device) != device_of(self)
        except TypeError:
            raise InteropError(f"dl_device: {dl_device!r} is not a pair (device type, number)") from None
        if is_elsewhere:
            raise InteropError(f"dl_device: {dl_device} is wanted, the tensor is on {device_of(self)}")
        self.device.order_consumer(stream)
        return to_capsule(self)

    def _storage_numpy(self) -> np.dtype[Any]:
        import numpy as np

        return np.dtype(self.dtype.storage_name) if self.dtype.is_extension else self.dtype.numpy()

    def check_open(self) -> None:
        """Raise StateError if the memory has been given back."""
        if self._memory.is_closed:
            raise StateError("the tensor's memory has been given back; SharedResources was closed")
