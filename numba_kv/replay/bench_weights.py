"""How fast weights are loaded, beside a plain copy of the same bytes from page-locked memory.

Knows how to make a file that lies in the page cache. Does not know what a good figure is.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from numba_kv.config import AttentionLayer, LLMEngineConfig
from numba_kv.device import Device
from numba_kv.errors import InvariantError
from numba_kv.replay.fresh_python import run_python
from numba_kv.shared_resources import SharedResources
from numba_kv.weights import ExternalWeightManager, Uploader

__all__ = ["measure_loading", "print_loads", "write_checkpoint"]

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
    target: str | None = None, *, nbytes: int = 1 << 30, repeat: int = 5, processes: int = 3, folder: str | None = None
) -> dict[str, object]:
    """Time loading a file from the page cache onto the device, beside a plain page-locked copy of the same bytes.

    The first load is that of a process which has loaded nothing yet; `external_weights_nbytes` announces it, so that device
    memory, staging, threads and the compiled loop are there. Without that the load makes them: `first_unannounced_ratio`. Later
    loads make their device memory, and nothing else.

    Parameters
    ----------
    target : {"cuda", "cpu"}, optional
        Default: the process's.
    nbytes : int
        Size of the file.
    repeat : int
        Later loads and copies of each process, in turns; medians are returned.
    processes : int
        Processes, each with a first load.
    folder : str, optional
        Where the temporary file goes; None: the system's folder for those.

    Cost: the file, the same bytes twice on the device, once page-locked.
    """
    with TemporaryDirectory(dir=folder) as place:
        path = Path(place) / "model.safetensors"
        write_checkpoint(path, nbytes)
        size = path.stat().st_size
        call = f"print_loads({str(path)!r}, {target!r}, {repeat}, announced="
        found, unannounced = (
            [json.loads(run_python(f"from {__name__} import print_loads; {call}{announced})")) for _ in range(processes)]
            for announced in (True, False)
        )
    copy, later, first = (statistics.median(chain(*(one[name] for one in found))) for name in ("copies", "later", "first"))
    surprised = statistics.median(chain(*(one["first"] for one in unannounced)))
    return {
        "target": found[0]["target"],
        "nbytes": size,
        "pinned_copy_gb_per_s": round(size / copy / 1e9, 2),
        "first_load_gb_per_s": round(size / first / 1e9, 2),
        "later_load_gb_per_s": round(size / later / 1e9, 2),
        "first_ratio": round(copy / first, 3),
        "first_unannounced_ratio": round(copy / surprised, 3),
        "later_ratio": round(copy / later, 3),
        "staging_nbytes": unannounced[0]["staging_nbytes"],
    }


def print_loads(path: str, target: str | None, repeat: int, *, announced: bool) -> None:
    """Time the first load of this process, then later ones and copies; print seconds as JSON."""
    layer, size = AttentionLayer(num_kv_heads=1, head_dim=64), Path(path).stat().st_size
    config = LLMEngineConfig(
        layers=(layer,), max_batch_size=1, max_kv_cache_capacity=256, external_weights_nbytes=size if announced else 0
    )
    with SharedResources.create_for_llm(config, target=target) as resources:
        device, manager = resources.device, resources.external_weight_manager
        before = device.pinned.current_bytes
        first = _seconds(lambda: manager.load(path))
        staging = device.pinned.current_bytes - before
        copies, later = [], []
        with closing(_PlainCopy(device, size)) as plain, Uploader(device) as uploader:
            plain.run()
            for _ in range(repeat + 1):
                copies.append(_seconds(plain.run))
                later.append(_load(device, path, uploader))
    times = {"first": [first], "copies": copies[1:], "later": later[1:]}  # the first of these makes staging
    sys.stdout.write(json.dumps({"target": device.target, "staging_nbytes": staging, **times}))


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _load(device: Device, path: str, uploader: Uploader) -> float:
    """Return the seconds of one load, from the open of the file to the last byte in new device memory."""
    device.stream.synchronize()
    with ExternalWeightManager(device, lambda name, nbytes: device.allocate(nbytes), uploader=uploader) as manager:
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
