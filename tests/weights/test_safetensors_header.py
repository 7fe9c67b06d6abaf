"""Headers of safetensors files: what is read, and every way in which one can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.errors import InputError, WeightError
from numba_kv.weights import SafetensorsFile
from numba_kv.weights.safetensors_header import MAX_HEADER_NBYTES, parse_header, parse_length
from tests.helpers.weight_files import KINDS, entry, library_reads, pack, packed, values

F32 = entry("F32", [2], 0, 8)
TWICE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'

# what is wrong, the file, what the refusal has to say
WRONG = [
    ("empty file", b"", "0 bytes"),
    ("shorter than the length", b"\x08\x00\x00", "3 bytes"),
    ("length past the file", pack({"a": F32}, length=1000), "truncated, or not a safetensors file"),
    ("length beyond the limit", pack({}, length=MAX_HEADER_NBYTES + 1), f"at most {MAX_HEADER_NBYTES}"),
    ("length of all ones", b"\xff" * 64, "at most"),
    ("length 0", pack(b""), "cannot hold a JSON object"),
    ("another format", b"GGUF\x03\x00\x00\x00" + bytes(64), "not a safetensors file"),
    ("not an object", pack([1, 2]), "not with '{'"),
    ("space before the object", pack(b"  {}"), "starts with"),
    ("broken JSON", pack(b'{"a":'), "not valid JSON"),
    ("text after the object", pack(b"{} x"), "not valid JSON"),
    ("not UTF-8", pack(b'{"\xff\xfe":1}'), "not valid JSON"),
    ("too deep", pack(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "not valid JSON"),
    ("name twice", pack(TWICE, bytes(8)), "'a' appears twice"),
    ("field twice", pack(b'{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}', bytes(8)), "'dtype' appears"),
    ("entry is a list", pack({"a": [1]}), "tensor 'a' is described by"),
    ("no dtype", pack({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "tensor 'a' has no dtype"),
    ("no shape", pack({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "tensor 'a' has no shape"),
    ("no offsets", pack({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "tensor 'a' has no data_offsets"),
    ("unknown field", pack({"a": {**F32, "scale": 2}}, bytes(8)), "'scale', which the format does not know"),
    ("unknown dtype", pack({"a": entry("F31", [2], 0, 8)}, bytes(8)), "dtype 'F31' is unknown"),
    ("dtype is a number", pack({"a": {**F32, "dtype": 32}}, bytes(8)), "dtype is 32"),
    ("4-bit floats", pack({"a": entry("F4", [4], 0, 2)}, bytes(2)), "dtype F4 is unsupported"),
    ("6-bit floats", pack({"a": entry("F6_E2M3", [4], 0, 3)}, bytes(3)), "dtype F6_E2M3 is unsupported"),
    ("other 6-bit floats", pack({"a": entry("F6_E3M2", [4], 0, 3)}, bytes(3)), "dtype F6_E3M2 is unsupported"),
    ("shape is a number", pack({"a": {**F32, "shape": 2}}, bytes(8)), "shape is 2"),
    ("negative extent", pack({"a": {**F32, "shape": [-2]}}, bytes(8)), r"shape is \[-2\]"),
    ("fractional extent", pack({"a": {**F32, "shape": [2.0]}}, bytes(8)), r"shape is \[2.0\]"),
    ("extent is a boolean", pack({"a": {**F32, "shape": [2, True]}}, bytes(8)), "shape is"),
    ("volume overflows", pack({"a": {**F32, "shape": [1 << 62, 1 << 62]}}, bytes(8)), "span 8 bytes"),
    ("extent of 400 bits", pack({"a": {**F32, "shape": [1 << 400]}}, bytes(8)), "63 bits"),
    ("number of 10,000 digits", pack(b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b"]}}"), "not valid JSON|63 bits"),
    ("NaN", pack(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)), "not valid JSON"),
    ("one offset", pack({"a": {**F32, "data_offsets": [8]}}, bytes(8)), "begin <= end"),
    ("end before begin", pack({"a": {**F32, "data_offsets": [8, 0]}}, bytes(8)), "begin <= end"),
    ("negative offset", pack({"a": {**F32, "data_offsets": [-8, 0]}}, bytes(8)), "data_offsets is"),
    ("fewer bytes than the shape", pack({"a": entry("F32", [3], 0, 8)}, bytes(8)), "span 8 bytes, but shape .* takes 12"),
    ("truncated data", pack({"a": F32}, bytes(7)), "tensor 'a' ends at byte .* truncated"),
    ("overlap", pack({"a": F32, "b": entry("F32", [2], 4, 12)}, bytes(12)), "tensor 'b' .* inside tensor 'a'.*overlap"),
    ("same bytes", pack({"a": F32, "b": F32}, bytes(8)), "overlap"),
    ("hole", pack({"a": F32, "b": entry("F32", [2], 12, 20)}, bytes(20)), "tensor 'b' .* hole of 4 bytes after tensor 'a'"),
    ("hole at the start", pack({"a": entry("F32", [2], 4, 12)}, bytes(12)), "hole of 4 bytes after the header"),
    ("empty tensor in a hole", pack({"a": F32, "b": entry("F32", [0], 16, 16)}, bytes(16)), "hole of 8 bytes"),
    ("bytes left over", pack({"a": F32}, bytes(9)), "1 bytes after tensor 'a' belong to no tensor"),
    ("only bytes", pack({}, bytes(4)), "4 bytes after the header belong to no tensor"),
    ("metadata of numbers", pack({"__metadata__": {"n": 1}}), "__metadata__ has to map strings to strings"),
    ("metadata is a list", pack({"__metadata__": ["n"]}), "__metadata__ has to map"),
    ("metadata is null", pack({"__metadata__": None}), "__metadata__ has to map"),
]


@pytest.mark.parametrize(("data", "says"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_file_is_refused_by_name_and_reason(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "wrong.safetensors"
    path.write_bytes(data)
    with pytest.raises(WeightError, match=f"(?s){says}") as caught:
        SafetensorsFile(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 700


def test_a_weight_error_is_an_input_error() -> None:
    assert issubclass(WeightError, InputError)
    assert (WeightError("x").missing, WeightError("x").extra, WeightError("x").mismatched) == ((), (), ())


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "": "ü"}])
def test_metadata_may_be_absent_empty_or_strings(metadata: dict[str, str] | None) -> None:
    found = _parse(packed({"a": np.zeros(2, np.float32)}, metadata))
    assert dict(found.metadata) == (metadata or {})
    assert list(found.tensors) == ["a"]


def test_a_file_of_metadata_alone_is_an_empty_set() -> None:
    assert not _parse(pack({"__metadata__": {"format": "pt"}})).tensors
    assert not _parse(pack({})).tensors


def test_scalars_and_empty_tensors() -> None:
    arrays = {
        "none": np.zeros((0, 4), np.float16),
        "scalar": np.array(3.5, np.float32),
        "between": np.zeros((2, 0), np.int64),
        "last": np.zeros(3, np.int8),
        "end": np.zeros(0, np.int8),
    }
    found = _parse(packed(arrays)).tensors
    assert {name: (e.shape, e.nbytes) for name, e in found.items()} == {n: (a.shape, a.nbytes) for n, a in arrays.items()}
    assert found["scalar"].shape == ()


def test_names_in_any_order_and_a_padded_header() -> None:
    header = {"z": entry("U8", [3], 0, 3), "a": entry("F32", [1], 5, 9), "m": entry("U8", [2], 3, 5)}
    found = _parse(pack(json.dumps(header).encode() + b"   ", bytes(9)))
    assert list(found.tensors) == ["z", "m", "a"]  # in the order of their bytes


@pytest.mark.parametrize("kind", KINDS)
def test_every_element_type(kind: str) -> None:
    data = packed({"a": values(kind, (3, 2))})
    found = _parse(data).tensors["a"]
    assert found.dtype.numpy() == np.dtype(KINDS[kind])
    assert data[found.offset : found.offset + found.nbytes] == values(kind, (3, 2)).tobytes()
    assert library_reads(data)["a"][0] == kind


SOUND = packed(
    {"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.zeros((0, 2), np.int8), "c": np.float32(1).reshape(())}, {"f": "pt"}
)
BYTES = st.binary(min_size=0, max_size=3)


@given(st.lists(st.tuples(st.integers(0, len(SOUND)), st.integers(0, 4), BYTES), min_size=1, max_size=3))
def test_what_is_accepted_the_library_reads_alike(edits: list[tuple[int, int, bytes]]) -> None:
    data = SOUND
    for at, removed, inserted in edits:
        data = data[:at] + inserted + data[at + removed :]
    try:
        found = _parse(data)
    except WeightError:
        return
    theirs = library_reads(data)
    ours = {n: (list(e.shape), data[e.offset : e.offset + e.nbytes]) for n, e in found.tensors.items()}
    assert ours == {name: (shape, content) for name, (_, shape, content) in theirs.items()}


def _parse(data: bytes):  # type: ignore[no-untyped-def]
    length = parse_length(data[:8], len(data), "made")
    return parse_header(data[8 : 8 + length], len(data), "made")
