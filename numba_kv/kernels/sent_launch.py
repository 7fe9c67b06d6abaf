"""SentLaunch: words of a staging block onto the device, and the kernel that reads them there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.device.cuda_device import CudaDevice
from numba_kv.kernels.driver_calls import CALL_WORDS, DriverCalls
from numba_kv.kernels.launch_words import GRID, GRID_REST, STREAM

if TYPE_CHECKING:
    from numba_kv.device import Staging, Stream
    from numba_kv.kernels.jit import Launch

__all__ = ["SentLaunch"]

#: Words of the three calls that differ from one time to the next.
_SOURCE, _NBYTES, _COPY_STREAM = 2, 3, 4
_BLOCKS, _LAUNCH_STREAM = CALL_WORDS + GRID, CALL_WORDS + STREAM
_EVENT, _EVENT_STREAM = 2 * CALL_WORDS + 1, 2 * CALL_WORDS + 2


class SentLaunch:
    """A bound launch behind a copy: on `cuda` copy, event and launch are one compiled call, for a model waits for it.

    Parameters
    ----------
    launch : Launch
        Reads what is at `address`.
    staging : Staging
        Its acquired block is sent.
    address : int
        Device address with room for a whole block.
    """

    __slots__ = ("_address", "_calls", "_device", "_is_cuda", "_launch", "_staging")

    def __init__(self, launch: Launch, staging: Staging, address: int) -> None:
        self._launch = launch
        self._staging = staging
        self._address = address
        self._device = launch.device
        self._is_cuda = isinstance(launch.device, CudaDevice)
        self._calls: DriverCalls | None = None

    def __call__(self, num_words: int, items: int, stream: Stream) -> None:
        """Send the first words of the acquired block, and run the kernel over `items` items, at least 1.

        Raises
        ------
        InputError
            If the block has not so many words, or `num_words` is 0; nothing is enqueued then.
        DeviceError
            If the driver refuses.

        Stream: enqueues a copy, a kernel and an event. The stream's device is current in the caller's thread.
        """
        block, launch = self._staging.ready(num_words), self._launch
        event = block.event
        if event is None or not self._is_cuda:  # a block's first event is made when it is recorded
            self._staging.send_to(self._address, num_words, stream)
            launch(items, stream)
            return
        calls = self._calls or self._bound()
        words, nbytes = calls.words, 4 * num_words
        words[_SOURCE], words[_NBYTES], words[_EVENT] = block.address, nbytes, event.handle
        words[_COPY_STREAM] = words[_LAUNCH_STREAM] = words[_EVENT_STREAM] = stream.handle
        words[_BLOCKS] = launch.prepare(items) | GRID_REST
        calls()
        self._device.bytes_sent += nbytes
        self._staging.sent(event, stream)

    def _bound(self) -> DriverCalls:
        from numba_kv.kernels.on_cuda import launch_call

        copy, record = ("cuMemcpyHtoDAsync", self._address, 0, 0, 0), ("cuEventRecord", 0, 0)
        self._calls = calls = DriverCalls(copy, launch_call(self._launch), record)
        return calls
