"""How fast weights are loaded, beside a plain copy of the same bytes from page-locked memory.

Knows how to make a file that lies in the page cache. Does not know what a good figure is.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from numba_kv.device import Device, create_device
from numba_kv.errors import InvariantError
from numba_kv.weights import ExternalWeightManager, Uploader
from numba_kv.weights.upload import BLOCK_NBYTES

__all__ = ["measure_loading", "write_checkpoint"]

_TENSOR_NBYTES = 32 << 20


def write_checkpoint(path: Path, nbytes: int, seed: int = 0) -> None:
    """Write a safetensors file of about `nbytes` of random bfloat16 matrices. Cost: one tensor of host memory."""
    import numpy as np

    each = min(_TENSOR_NBYTES, nbytes) // 2048 * 2048
    count = max(1, nbytes // each)
    header = {
        f"model.layers.{i}.weight": {"dtype": "BF16", "shape": [each // 2048, 1024], "data_offsets": [i * each, (i + 1) * each]}
        for i in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _ in range(count):
            file.write(random.bytes(each))


def measure_loading(
    target: str | None = None,
    *,
    nbytes: int = 1 << 30,
    repeat: int = 5,
    folder: str | None = None,
    block_nbytes: int = BLOCK_NBYTES,
    num_readers: int | None = None,
) -> dict[str, object]:
    """Time loading a file from the page cache onto the device, beside a plain page-locked copy of the same bytes.

    Parameters
    ----------
    target : {"cuda", "cpu"}, optional
        Default: the process's.
    nbytes : int
        Size of the file.
    repeat : int
        Loads and copies, in turns; medians are returned.
    folder : str, optional
        Where the temporary file goes; None: the system's folder for those.
    block_nbytes, num_readers : int
        See `Uploader`.

    Cost: the file, the same bytes twice on the device, once page-locked.
    """
    device = create_device(target)
    with TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "model.safetensors"
        write_checkpoint(path, nbytes)
        size = path.stat().st_size
        plain = _PlainCopy(device, size)
        uploader = Uploader(device, block_nbytes=block_nbytes, num_readers=num_readers)
        try:
            kept: list[float] = []
            own: list[float] = []
            copies: list[float] = []
            _load(device, path, uploader)  # the file is in the page cache, the staging made, the driver warm
            staging = uploader.staged_nbytes
            for _ in range(repeat):
                copies.append(_seconds(plain.run))
                kept.append(_load(device, path, uploader))
                own.append(_load(device, path, None))
        finally:
            uploader.close()
            plain.close()
    copy, load, whole = (statistics.median(times) for times in (copies, kept, own))
    return {
        "target": device.target,
        "nbytes": size,
        "pinned_copy_gb_per_s": round(size / copy / 1e9, 2),
        "load_gb_per_s": round(size / load / 1e9, 2),
        "load_with_new_staging_gb_per_s": round(size / whole / 1e9, 2),
        "ratio": round(copy / load, 3),
        "ratio_with_new_staging": round(copy / whole, 3),
        "staging_nbytes": staging,
    }


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _load(device: Device, path: Path, uploader: Uploader | None) -> float:
    """Return the seconds of one load, from the open of the file to the last byte in device memory that is there already."""
    memory = device.allocate(path.stat().st_size)
    device.stream.synchronize()
    with ExternalWeightManager(device, lambda name, nbytes: memory, uploader=uploader) as manager:
        return _seconds(lambda: manager.load(path))


class _PlainCopy:
    """One page-locked block of all the bytes, and as much on the device."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        with device.active():
            self._source, self._destination = device.allocate_staging(nbytes), device.allocate(nbytes)
        if self._source.array is None:
            raise InvariantError("staging memory is not host memory")
        self._source.array[:] = 1

    def run(self) -> None:
        """Copy, and wait."""
        with self._device.active():
            stream = self._device.stream
            self._device.copy_to_device(self._destination.address, self._source.address, self._source.nbytes, stream)
            stream.synchronize()

    def close(self) -> None:
        """Give both back."""
        with self._device.active():
            self._source.close(self._device.stream)
            self._destination.close(self._device.stream)
