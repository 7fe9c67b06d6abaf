"""SentLaunch: words of a staging block onto the device, and the kernel that reads them there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.device.cuda_device import CudaDevice
from numba_kv.kernels.driver_calls import CALL_WORDS, DriverCalls

if TYPE_CHECKING:
    from numba_kv.device import Staging, Stream
    from numba_kv.device.stream import Event
    from numba_kv.kernels.jit import Launch

__all__ = ["SentLaunch"]


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

    __slots__ = ("_address", "_calls", "_device", "_launch", "_staging")

    def __init__(self, launch: Launch, staging: Staging, address: int) -> None:
        self._launch = launch
        self._staging = staging
        self._address = address
        self._device = launch.device
        self._calls: DriverCalls | None = None

    def __call__(self, num_words: int, items: int, stream: Stream) -> None:
        """Send the first words of the acquired block, and run the kernel over `items` items, at least 1.

        Raises
        ------
        InputError
            If the block has not so many words, or `num_words` is 0; nothing is enqueued then.
        DeviceError
            If the driver refuses.

        Stream: enqueues a copy, an event and a kernel.
        """
        block = self._staging.ready(num_words)
        if block.event is None or not isinstance(self._device, CudaDevice):  # the first event of a block is made by its record
            self._staging.send_to(self._address, num_words, stream)
            self._launch(items, stream)
            return
        self._send(block.address, 4 * num_words, items, block.event, stream.handle)
        self._device.bytes_to_device += 4 * num_words
        self._staging.sent(block.event, stream)

    def _send(self, source: int, nbytes: int, items: int, event: Event, stream: int) -> None:
        from numba_kv.kernels.on_cuda import GRID, STREAM, launch_call

        if self._calls is None:
            copy, record = ("cuMemcpyHtoDAsync", self._address, 0, 0, 0), ("cuEventRecord", 0, 0)
            self._calls = DriverCalls(copy, launch_call(self._launch), record)
        calls, launch = self._calls, self._launch
        words, kernel, record_at = calls.words, CALL_WORDS, 2 * CALL_WORDS
        words[2], words[3], words[4] = source, nbytes, stream
        launch.block[0] = items
        words[kernel + GRID] = items if launch.kernel.block_form else -(-items // launch.threads)
        words[kernel + STREAM] = stream
        words[record_at + 1], words[record_at + 2] = event.handle, stream
        calls()
