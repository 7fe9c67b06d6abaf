"""The device's copy of a page table, and how entries get there.

Knows memory, staging and the order of writes. Does not know what the entries mean, which of them have changed, or who calls
at the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from numba_kv.device import Device, Event, Memory, Staging, Stream, Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DeviceTable", "runs_of"]

_INT32 = dtype("int32")
#: What the staging blocks of a table may take together; two are always allowed, so that one copy never stalls the host.
_STAGING_BYTES = 64 << 20


class DeviceTable:
    """An int32 tensor ``[max_batch, 2, L]`` and its staging. Owns the staging, and the tensor if none is given.

    Parameters
    ----------
    device : Device
        Where it is.
    max_batch, width : int
        Slots, and the least L.
    tensor : Tensor, optional
        Memory to borrow.

    Attributes
    ----------
    tensor : Tensor
        The copy.
    was_written : bool
        Whether every entry is defined.

    Raises
    ------
    InputError, ShapeError
        If `tensor` does not fit.
    """

    def __init__(self, device: Device, max_batch: int, width: int, tensor: Tensor | None) -> None:
        self._device = device
        self._memory: Memory | None = None
        if tensor is None:
            self._memory = device.allocate(4 * max_batch * 2 * width)
            tensor = Tensor(self._memory, device, _INT32, (max_batch, 2, width))
        elif not isinstance(tensor, Tensor) or tensor.device is not device:
            raise InputError(f"tensor: {tensor!r} is not a tensor on the table's device")
        fits = tensor.ndim == 3 and tensor.shape[:2] == (max_batch, 2) and tensor.shape[2] >= width
        if tensor.dtype is not _INT32 or not fits or not tensor.is_contiguous:
            raise ShapeError(
                f"tensor: {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.strides)} given, "
                f"dense int32 [{max_batch}, 2, at least {width}] wanted"
            )
        self.tensor = tensor
        self.was_written = False
        self._staging: Staging | None = None
        self._event: Event | None = None  # after the last write; None if that is on the device's own stream, or before it

    def send(self, entries: NDArray[np.int32], ranges: list[tuple[int, int]], stream: object | None) -> None:
        """Copy (first, count) ranges of the host's entries to the same places. Stream: enqueues a copy a range."""
        staging, source = self._staging_of_table(), entries.reshape(-1)
        block = staging.acquire()
        for first, count in ranges:
            block[first : first + count] = source[first : first + count]
        resolved = self._enter(stream)
        staging.send([(first, count, self.tensor, first) for first, count in ranges], resolved)
        self._leave(resolved)

    def clear(self, stream: object | None) -> None:
        """Set every entry to -1. Stream: enqueues."""
        resolved = self._enter(stream)
        self._device.fill(self.tensor, -1, resolved)
        self._leave(resolved)

    def join(self, stream: Stream) -> None:
        """Put later work on `stream` behind the last write. Stream: enqueues a wait, unless the order is there already."""
        own = self._device.stream
        if self._event is not None:
            stream.wait(self._event)
            if stream.handle == own.handle:  # from here on the device's own stream stands for the last write
                self._event = None
        elif stream.handle != own.handle:
            stream.wait(own.record())

    def resolve(self, stream: object | None) -> Stream:
        """Return `stream` as a stream of the device; None is the device's own."""
        return self._device.stream if stream is None else self._device.as_stream(stream)

    def close(self) -> None:
        """Give back staging, and the tensor's memory if it is owned. Stream: waits for copies in flight."""
        if self._staging is not None:
            self._staging.close()
        if self._memory is not None:
            self.join(self._device.stream)  # the free is ordered there
            self._memory.close(self._device.stream)

    def _staging_of_table(self) -> Staging:
        """Return the staging, whose blocks are laid out like the table; made at the first upload, so a lent table has none."""
        if self._staging is None:
            words = self.tensor.size
            self._staging = Staging(self._device, words, max_blocks=min(16, max(2, _STAGING_BYTES // (4 * words))))
        return self._staging

    def _enter(self, stream: object | None) -> Stream:
        """Return the stream to write on, behind the last write and behind the allocation."""
        resolved = self.resolve(stream)
        self.join(resolved)
        return resolved

    def _leave(self, stream: Stream) -> None:
        # The device's own stream outlives the table, so its event is recorded only if another stream ever needs it.
        self._event = None if stream.handle == self._device.stream.handle else stream.record()
        self.was_written = True


def runs_of(indices: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return (first, count) of each maximal run of consecutive numbers in ascending `indices`."""
    if not indices.size:
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(indices) != 1) + 1))
    counts = np.diff(starts, append=indices.size)
    return list(zip(indices[starts].tolist(), counts.tolist(), strict=True))
