"""The header of a safetensors file, checked strictly.

Knows the format's JSON and what makes a layout sound. Does not open files: it is given the header's bytes and the size
of the file. ::

    0        8                8 + length                          file size
    | length | JSON header    | tensor | tensor | ... | tensor    |
                              ^ data_offsets count from here; no overlap, no hole, nothing left over
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from numba_kv.dtypes import DType, dtype
from numba_kv.errors import WeightError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LENGTH_NBYTES", "MAX_HEADER_NBYTES", "Header", "TensorEntry", "parse_header", "parse_json", "parse_length"]

#: Bytes of the little-endian header length at the start of a file.
LENGTH_NBYTES = 8
#: Longest header that is read; the format's own limit.
MAX_HEADER_NBYTES = 100_000_000

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3",
    "F8_E8M0": "float8_e8m0",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
}
#: In the format, but without an element type here.
_UNSUPPORTED = {
    "F4": "elements smaller than a byte",
    "F6_E2M3": "elements smaller than a byte",
    "F6_E3M2": "elements smaller than a byte",
    "F8_E4M3FNUZ": "the FNUZ encoding",
    "F8_E5M2FNUZ": "the FNUZ encoding",
}
_FIELDS = ("dtype", "shape", "data_offsets")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file.

    Attributes
    ----------
    name : str
        As the file has it.
    dtype : DType
        Element type.
    shape : tuple of int
        Extents; empty for a scalar.
    offset : int
        First byte, counted from the start of the file; not aligned to anything.
    nbytes : int
        Bytes of all elements; 0 for an empty tensor.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file says of itself.

    Attributes
    ----------
    tensors : mapping of str to TensorEntry
        In the order of their bytes in the file.
    metadata : mapping of str to str
        ``__metadata__``; empty if there is none.
    """

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def parse_length(prefix: bytes, file_nbytes: int, path: str) -> int:
    """Return the length of the JSON header.

    Parameters
    ----------
    prefix : bytes
        The first 8 bytes of the file (fewer if it has no more).
    file_nbytes : int
        Size of the file.
    path : str
        Of the file, for messages.

    Raises
    ------
    WeightError
        If the file is too short, or the length is impossible.
    """
    if len(prefix) < LENGTH_NBYTES:
        raise WeightError(
            f"{path}: {file_nbytes} bytes; the header's length alone takes {LENGTH_NBYTES}: not a safetensors file"
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_NBYTES:
        raise WeightError(f"{path}: the header would be {length} bytes, at most {MAX_HEADER_NBYTES}; not a safetensors file?")
    if length > file_nbytes - LENGTH_NBYTES:
        raise WeightError(
            f"{path}: the header would be {length} bytes, but the file is {file_nbytes}: truncated, or not a safetensors file"
        )
    if length < 2:
        raise WeightError(f"{path}: a header of {length} bytes cannot hold a JSON object")
    return length


def parse_header(text: bytes, file_nbytes: int, path: str) -> Header:
    """Return what the JSON header `text` says, once it is proven sound.

    Parameters
    ----------
    text : bytes
        The header, without the length before it.
    file_nbytes : int
        Size of the file.
    path : str
        Of the file, for messages.

    Raises
    ------
    WeightError
        If it is not JSON, a field is missing, unknown or of the wrong type, an element type is unknown or unsupported, a
        name appears twice, bytes disagree with shape, or tensors overlap, leave holes or reach past the file.
    """
    if not text.startswith(b"{"):
        raise WeightError(f"{path}: the header starts with {text[:1]!r}, not with '{{'; not a safetensors file?")
    found = parse_json(text, path)
    data_start = LENGTH_NBYTES + len(text)
    metadata = _metadata(found.pop("__metadata__", {}), path)
    entries = [_entry(name, value, data_start, path) for name, value in found.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_layout(entries, data_start, file_nbytes, path)
    tensors = MappingProxyType({entry.name: entry for entry in entries})
    return Header(tensors=tensors, metadata=MappingProxyType(metadata))


def parse_json(text: bytes, path: str) -> dict[str, Any]:
    """Return the JSON object in `text`; a name that appears twice in an object is an error.

    Raises
    ------
    WeightError
        If it is not UTF-8, not JSON, not an object, or a name appears twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise WeightError(f"{path}: the name {twice!r} appears twice")
        return found

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        found = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except WeightError:
        raise
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise WeightError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise WeightError(f"{path}: the JSON is {type(found).__name__}, an object is wanted")
    return found


def _metadata(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise WeightError(f"{path}: __metadata__ has to map strings to strings, got {_short(value)}")
    return value


def _entry(name: str, value: Any, data_start: int, path: str) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict):
        raise WeightError(f"{where} is described by {_short(value)}, an object with {', '.join(_FIELDS)} is wanted")
    for field in _FIELDS:
        if field not in value:
            raise WeightError(f"{where} has no {field}")
    unknown = sorted(set(value) - set(_FIELDS))
    if unknown:  # it could change what the bytes mean
        raise WeightError(f"{where} has the field {unknown[0]!r}, which the format does not know")
    kind = _dtype(value["dtype"], where)
    shape = _integers(value["shape"], f"{where}: shape")
    offsets = _integers(value["data_offsets"], f"{where}: data_offsets")
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise WeightError(f"{where}: data_offsets {_short(list(offsets))} are no [begin, end] with begin <= end")
    nbytes = kind.itemsize
    for extent in shape:
        nbytes *= extent
    if offsets[1] - offsets[0] != nbytes:
        raise WeightError(
            f"{where}: data_offsets {list(offsets)} span {offsets[1] - offsets[0]} bytes, "
            f"but shape {_short(list(shape))} of {kind} takes {_number(nbytes)}"
        )
    return TensorEntry(name=name, dtype=kind, shape=shape, offset=data_start + offsets[0], nbytes=nbytes)


def _dtype(value: Any, where: str) -> DType:
    if not isinstance(value, str):
        raise WeightError(f"{where}: dtype is {_short(value)}, a string is wanted")
    if value in _UNSUPPORTED:
        raise WeightError(
            f"{where}: dtype {value} is unsupported here ({_UNSUPPORTED[value]}); supported are {', '.join(_DTYPES)}"
        )
    if value not in _DTYPES:
        raise WeightError(f"{where}: dtype {_short(value)} is unknown; known are {', '.join(_DTYPES)}")
    return dtype(_DTYPES[value])


def _integers(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):  # a bool is no number here
        raise WeightError(f"{where} is {_short(value)}, a list of integers from 0 on is wanted")
    if any(n >= 1 << 63 for n in value):
        raise WeightError(f"{where} is {_short([_number(n) for n in value])}, numbers have to fit 63 bits")
    return tuple(value)


def _check_layout(entries: list[TensorEntry], data_start: int, file_nbytes: int, path: str) -> None:
    """Refuse overlaps, holes and bytes that belong to nothing; `entries` are sorted by offset."""
    end, before = data_start, "the header"
    for entry in entries:
        where = f"{path}: tensor {entry.name!r}"
        if entry.offset + entry.nbytes > file_nbytes:
            raise WeightError(
                f"{where} ends at byte {entry.offset + entry.nbytes}, but the file has {file_nbytes}: it is truncated"
            )
        if entry.offset < end:
            raise WeightError(f"{where} starts at byte {entry.offset}, inside {before}, which ends at {end}: they overlap")
        if entry.offset > end:
            raise WeightError(f"{where} starts at byte {entry.offset}, a hole of {entry.offset - end} bytes after {before}")
        end, before = entry.offset + entry.nbytes, f"tensor {entry.name!r}"
    if end < file_nbytes:
        raise WeightError(f"{path}: {file_nbytes - end} bytes after {before} belong to no tensor")


def _number(value: int) -> str:
    """Return `value` for a message; numbers of absurd length only by their size."""
    return str(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
