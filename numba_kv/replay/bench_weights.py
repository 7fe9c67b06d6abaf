"""How fast weights are loaded, beside a plain copy of the same bytes from page-locked memory.

Knows how to make a file that lies in the page cache. Does not know what a good figure is.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib import import_module
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from numba_kv.config import AttentionLayer, LLMEngineConfig
from numba_kv.device import Device, resolve_target
from numba_kv.errors import InvariantError
from numba_kv.replay.fresh_python import run_python
from numba_kv.shared_resources import SharedResources
from numba_kv.weights import ExternalWeightManager, Uploader, arena_nbytes

__all__ = ["CHECKPOINTS", "measure_loading", "print_loads", "write_checkpoint"]

_GIB = 1 << 30
_TENSOR_NBYTES = 32 << 20
#: Bytes and files of the checkpoints that are measured, and processes that announce their load. The largest is for a GPU: on a
#: host its bytes would be there three times.
CHECKPOINTS = ((_GIB, 1, 2), (_GIB, 4, 2), (4 * _GIB, 1, 1))


def write_checkpoint(folder: Path, nbytes: int, num_files: int = 1, seed: int = 0) -> None:
    """Write a checkpoint of about `nbytes` of random bfloat16 matrices, all of the same bytes; with an index if it has files.

    Cost: one tensor of host memory.
    """
    import numpy as np

    each = min(_TENSOR_NBYTES, nbytes // num_files) // 2048 * 2048
    count = max(1, nbytes // num_files // each)
    content = np.random.default_rng(seed).bytes(each)
    owners: dict[str, str] = {}
    for number in range(num_files):
        names = [f"model.layers.{number * count + i}.weight" for i in range(count)]
        path = folder / ("model.safetensors" if num_files == 1 else f"model-{number + 1:05}-of-{num_files:05}.safetensors")
        header = {
            name: {"dtype": "BF16", "shape": [each // 2048, 1024], "data_offsets": [i * each, (i + 1) * each]}
            for i, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for _ in names:
                file.write(content)
        owners.update(dict.fromkeys(names, path.name))
    if num_files > 1:
        index = {"metadata": {"total_size": num_files * count * each}, "weight_map": owners}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def measure_loading(
    target: str | None = None,
    *,
    checkpoints: Sequence[tuple[int, int, int]] | None = None,
    repeat: int = 5,
    folder: str | None = None,
) -> dict[str, object]:
    """Time loading checkpoints from the page cache onto the device, beside plain page-locked copies of the same bytes.

    The first load is that of a process which has loaded nothing yet; `external_weights_nbytes` announces it, so that device
    memory, staging, threads and the compiled loop are there. Without that the load makes them: `first_unannounced_ratio`, in a
    process that has Numba imported, as every process with a batch has; a process without pays that import besides, once. Later
    loads make their device memory, and nothing else.

    Parameters
    ----------
    target : {"cuda", "cpu"}, optional
        Default: the process's.
    checkpoints : sequence of three int each, optional
        Bytes, files, and processes that announce their load, beside one that does not; None: `CHECKPOINTS`, on the host
        without the largest. Those that do not fit the folder's disk are left out.
    repeat : int
        Later loads and copies of each process, in turns; medians are returned.
    folder : str, optional
        Where the temporary files go, one checkpoint at a time; None: the system's folder for those.

    Cost: the files, the same bytes twice on the device, once page-locked.
    """
    target = resolve_target(target)
    if checkpoints is None:
        checkpoints = [one for one in CHECKPOINTS if target == "cuda" or one[0] <= _GIB]
    found: list[dict[str, object]] = []
    for nbytes, files, processes in checkpoints:
        with TemporaryDirectory(dir=folder) as place:
            if nbytes + (64 << 20) > shutil.disk_usage(place).free:
                continue
            write_checkpoint(Path(place), nbytes, files)
            found.append({"files": files, **_measure(place, target, repeat, processes)})
    return {"target": target, "checkpoints": found}


def _measure(place: str, target: str, repeat: int, processes: int) -> dict[str, object]:
    call = f"from {__name__} import print_loads; print_loads({place!r}, {target!r}, {repeat}, announced="
    told = [json.loads(run_python(f"{call}True)")) for _ in range(processes)]
    untold = json.loads(run_python(f"{call}False)"))
    copy, later, first = (statistics.median(chain(*(one[name] for one in told))) for name in ("copies", "later", "first"))
    size = told[0]["nbytes"]
    return {
        "nbytes": size,
        "pinned_copy_gb_per_s": round(size / copy / 1e9, 2),
        "first_load_gb_per_s": round(size / first / 1e9, 2),
        "later_load_gb_per_s": round(size / later / 1e9, 2),
        "first_ratio": round(copy / first, 4),
        "first_unannounced_ratio": round(copy / untold["first"][0], 4),
        "later_ratio": round(copy / later, 4),
        "staging_nbytes": untold["staging_nbytes"],
    }


def print_loads(path: str, target: str, repeat: int, *, announced: bool) -> None:
    """Time the first load of this process, then, if it was announced, later ones and copies; print seconds as JSON."""
    layer, size = AttentionLayer(num_kv_heads=1, head_dim=64), arena_nbytes(path)
    config = LLMEngineConfig(
        layers=(layer,), max_batch_size=1, max_kv_cache_capacity=256, external_weights_nbytes=size if announced else 0
    )
    import_module("numba_kv.kernels.driver_loop")  # and with it Numba, as batches do
    with SharedResources.create_for_llm(config, target=target) as resources:
        device, manager = resources.device, resources.external_weight_manager
        before = device.pinned.current_bytes
        first = _seconds(lambda: manager.load(path))
        found: dict[str, object] = {
            "nbytes": size,
            "first": [first],
            "staging_nbytes": device.pinned.current_bytes - before,
        }
        if announced:
            found |= _later_loads(device, path, size, repeat)
    sys.stdout.write(json.dumps(found))


def _later_loads(device: Device, path: str, size: int, repeat: int) -> dict[str, object]:
    copies, later = [], []
    with closing(_PlainCopy(device, size)) as plain, Uploader(device) as uploader:
        plain.run()
        for _ in range(repeat + 1):  # the first of these makes staging
            copies.append(_seconds(plain.run))
            later.append(_load(device, path, uploader))
    return {"copies": copies[1:], "later": later[1:]}


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _load(device: Device, path: str, uploader: Uploader) -> float:
    """Return the seconds of one load, from the open of the first file to the last byte in new device memory."""
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
