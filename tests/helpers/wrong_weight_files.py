"""Safetensors files that are wrong in one way each."""

from __future__ import annotations

from numba_kv.weights.safetensors_header import MAX_HEADER_NBYTES
from tests.helpers.weight_files import entry, pack

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
