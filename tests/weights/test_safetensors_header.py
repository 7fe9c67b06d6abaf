"""Headers of safetensors files: what is read, and every way in which one can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from numba_kv.errors import InputError, WeightError
from numba_kv.weights import SafetensorsFile
from numba_kv.weights.safetensors_header import parse_header, parse_length
from tests.helpers.weight_files import KINDS, entry, library_reads, pack, packed, values
from tests.helpers.wrong_weight_files import WRONG


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
    {"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.zeros((0, 2), np.int8), "c": np.float32(1).reshape(())},
    {"f": "pt"},
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
