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
_KINDS = {name: dtype(kind) for name, kind in _DTYPES.items()}
_FIELDS = dict.fromkeys(("dtype", "shape", "data_offsets"))
#: Above every number that is taken.
_END = 1 << 63


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
    """Return one tensor. Messages are put together once one is needed: checkpoints have thousands."""
    if not isinstance(value, dict) or value.keys() != _FIELDS.keys():
        raise _wrong_fields(name, value, path)
    kind = _KINDS.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if kind is None:
        raise _wrong_dtype(name, value["dtype"], path)
    shape = _integers(name, "shape", value["shape"], path)
    offsets = _integers(name, "data_offsets", value["data_offsets"], path)
    if len(offsets) != 2 or offsets[1] < offsets[0]:
        raise WeightError(
            f"{path}: tensor {name!r}: data_offsets {_short(list(offsets))} are no [begin, end] with begin <= end"
        )
    nbytes = kind.itemsize
    for extent in shape:
        nbytes *= extent
    begin, end = offsets
    if end - begin != nbytes:
        raise WeightError(
            f"{path}: tensor {name!r}: data_offsets {list(offsets)} span {end - begin} bytes, "
            f"but shape {_short(list(shape))} of {kind} takes {_number(nbytes)}"
        )
    return TensorEntry(name=name, dtype=kind, shape=shape, offset=data_start + begin, nbytes=nbytes)


def _wrong_fields(name: str, value: Any, path: str) -> WeightError:
    where = f"{path}: tensor {name!r}"
    if not isinstance(value, dict):
        return WeightError(f"{where} is described by {_short(value)}, an object with {', '.join(_FIELDS)} is wanted")
    for field in _FIELDS:
        if field not in value:
            return WeightError(f"{where} has no {field}")
    unknown = sorted(value.keys() - _FIELDS.keys())  # it could change what the bytes mean
    return WeightError(f"{where} has the field {unknown[0]!r}, which the format does not know")


def _wrong_dtype(name: str, value: Any, path: str) -> WeightError:
    where = f"{path}: tensor {name!r}: dtype"
    if not isinstance(value, str):
        return WeightError(f"{where} is {_short(value)}, a string is wanted")
    if value in _UNSUPPORTED:
        return WeightError(f"{where} {value} is unsupported here ({_UNSUPPORTED[value]}); supported are {', '.join(_DTYPES)}")
    return WeightError(f"{where} {_short(value)} is unknown; known are {', '.join(_DTYPES)}")


def _integers(name: str, field: str, value: Any, path: str) -> tuple[int, ...]:
    if isinstance(value, list):
        for number in value:
            if type(number) is not int or not 0 <= number < _END:  # a bool is no number here
                break
        else:
            return tuple(value)
    where = f"{path}: tensor {name!r}: {field}"
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise WeightError(f"{where} is {_short(value)}, a list of integers from 0 on is wanted")
    raise WeightError(f"{where} is {_short([_number(n) for n in value])}, numbers have to fit 63 bits")


def _check_layout(entries: list[TensorEntry], data_start: int, file_nbytes: int, path: str) -> None:
    """Refuse overlaps, holes and bytes that belong to nothing; `entries` are sorted by offset."""
    end, before = data_start, None
    for entry in entries:
        begin, next_end = entry.offset, entry.offset + entry.nbytes
        if begin != end or next_end > file_nbytes:
            where, last = f"{path}: tensor {entry.name!r}", _what(before)
            if next_end > file_nbytes:
                raise WeightError(f"{where} ends at byte {next_end}, but the file has {file_nbytes}: it is truncated")
            if begin < end:
                raise WeightError(f"{where} starts at byte {begin}, inside {last}, which ends at {end}: they overlap")
            raise WeightError(f"{where} starts at byte {begin}, a hole of {begin - end} bytes after {last}")
        end, before = next_end, entry.name
    if end < file_nbytes:
        raise WeightError(f"{path}: {file_nbytes - end} bytes after {_what(before)} belong to no tensor")


def _what(tensor: str | None) -> str:
    return "the header" if tensor is None else f"tensor {tensor!r}"


def _number(value: int) -> str:
    """Return `value` for a message; numbers of absurd length only by their size."""
    return str(value) if value.bit_length() < 128 else f"a number of {value.bit_length()} bits"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
