"""Safetensors files made by hand, so that they can be wrong in one way at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from numba_kv.device import Device, Memory

#: The format's name -> NumPy's or ml_dtypes' type; every element type that is read.
KINDS = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I16": np.int16,
    "U16": np.uint16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I32": np.int32,
    "U32": np.uint32,
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
    "U64": np.uint64,
    "C64": np.complex64,
}
_NAMES = {np.dtype(kind): name for name, kind in KINDS.items()}


def entry(kind: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


def pack(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file of a header (text, bytes or what JSON takes) and data; `length` lies about the header's."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def packed(arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None, padding: int = 0) -> bytes:
    """Return a sound file of `arrays`, in their order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, array in arrays.items():
        header[name] = entry(_NAMES[array.dtype], list(array.shape), at, at + array.nbytes)
        at += array.nbytes
    text = json.dumps(header).encode() + b" " * padding
    return pack(text, b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values()))


def write(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> Path:
    path.write_bytes(packed(arrays, metadata))
    return path


def write_shards(folder: Path, shards: dict[str, dict[str, np.ndarray]], index: str = "model.safetensors.index.json") -> Path:
    """Write shards and the index of everything in them; return the index."""
    for name, arrays in shards.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, arrays)
    total = sum(array.nbytes for arrays in shards.values() for array in arrays.values())
    content = {
        "metadata": {"total_size": total},
        "weight_map": {name: shard for shard, arrays in shards.items() for name in arrays},
    }
    (folder / index).write_text(json.dumps(content))
    return folder / index


def values(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return random bits of an element type (0 and 1 for bool)."""
    random = np.random.default_rng(seed)
    numpy = np.dtype(KINDS[kind])
    count = int(np.prod(shape, dtype=np.int64))
    if kind == "BOOL":
        return random.integers(0, 2, count).astype(np.bool_).reshape(shape)
    return np.frombuffer(random.bytes(count * numpy.itemsize), numpy).reshape(shape)


def library_reads(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """Return what the safetensors library reads: name -> type, shape, bytes."""
    return {name: (found["dtype"], found["shape"], bytes(found["data"])) for name, found in safetensors.deserialize(data)}


class Taker:
    """``take`` of SharedResources: device memory that is counted."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.taken: list[Memory] = []

    def __call__(self, name: str, nbytes: int) -> Memory:
        self.taken.append(self.device.allocate(nbytes))
        return self.taken[-1]
