"""Opening, mapping and reading safetensors files, beside what the safetensors library does."""

from __future__ import annotations

import errno
import gc
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from numba_kv.errors import InputError, StateError, WeightError
from numba_kv.weights import SafetensorsFile, safetensors_file
from tests.helpers.weight_files import KINDS, library_reads, packed, values, write

POSIX = os.name == "posix"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_every_type_is_byte_for_byte_what_the_library_writes_and_reads(tmp_path: Path) -> None:
    path = tmp_path / "all.safetensors"
    arrays = {f"t.{kind}": values(kind, shape, i) for i, kind in enumerate(KINDS) for shape in [(3, 5)]}
    arrays |= {f"scalar.{kind}": values(kind, (), 7) for kind in KINDS} | {"none": np.zeros((4, 0), np.float32)}
    safetensors.numpy.save_file(arrays, path, {"format": "np"})
    theirs = library_reads(path.read_bytes())
    with SafetensorsFile(path) as file:
        assert dict(file.metadata) == {"format": "np"}
        assert set(file.tensors) == set(arrays) == set(theirs)
        for name, array in arrays.items():
            found = file.array(name)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes() == theirs[name][2]
            raw = np.empty(file.tensors[name].nbytes, np.uint8)
            file.read_into(raw, file.tensors[name].offset)
            assert raw.tobytes() == theirs[name][2]


def test_arrays_are_those_of_the_library(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    plain = [kind for kind in KINDS if not kind.startswith(("BF", "F8"))]  # NumPy knows these, so the library returns them
    safetensors.numpy.save_file({kind: values(kind, (2, 3), 1) for kind in plain}, path)
    theirs = safetensors.numpy.load_file(path)
    with SafetensorsFile(path) as file:
        for name, array in theirs.items():
            assert np.array_equal(file.array(name), array, equal_nan=array.dtype.kind in "fc")


def test_what_lies_unaligned_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "odd.safetensors", {"byte": np.ones(3, np.int8), "odd": np.arange(5, dtype=np.float64)})
    with SafetensorsFile(path) as file:
        assert file.tensors["odd"].offset % 8
        assert file.array("odd").tolist() == [0, 1, 2, 3, 4]


def test_arrays_share_the_mapping_and_outlive_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": np.arange(8, dtype=np.int32)})
    file = SafetensorsFile(path)
    array = file.array("a")
    assert not array.flags.owndata
    assert not array.flags.writeable
    file.close()
    file.close()
    del file
    gc.collect()
    assert array.tolist() == list(range(8))


def test_after_close(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path / "a.safetensors", {"a": np.zeros(2, np.int8)}))
    file.close()
    assert file.is_closed
    for call in (lambda: file.array("a"), lambda: file.read_into(np.empty(1, np.uint8), 0), file.__enter__):
        with pytest.raises(StateError, match="closed"):
            call()


def test_an_unknown_tensor(tmp_path: Path) -> None:
    with SafetensorsFile(write(tmp_path / "a.safetensors", {"a": np.zeros(2, np.int8)})) as file:
        with pytest.raises(WeightError, match="no tensor 'b'"):
            file.array("b")
        with pytest.raises(WeightError, match="no tensor 'b'"):
            file.entry("b")


@pytest.mark.skipif(not POSIX, reason="an open file cannot be shortened on Windows")
def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": np.zeros(10_000, np.int8)})
    with SafetensorsFile(path) as file:
        os.truncate(path, 5000)
        with pytest.raises(WeightError, match=r"ends at byte 5000, .* truncated while it was read"):
            file.read_into(np.empty(10_000, np.uint8), file.tensors["a"].offset)
        with pytest.raises(WeightError, match="has become shorter"):
            file.array("a")


@pytest.mark.skipif(not POSIX, reason="an open file cannot be replaced on Windows")
def test_another_file_of_the_same_name_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", {"a": np.full(4, 1, np.int32)})
    other = write(tmp_path / "b.safetensors", {"a": np.full(4, 2, np.int32)})
    with SafetensorsFile(path) as file:
        os.replace(other, path)
        assert file.array("a").tolist() == [1, 1, 1, 1]
        raw = np.empty(16, np.uint8)
        file.read_into(raw, file.tensors["a"].offset)
        assert raw.view(np.int32).tolist() == [1, 1, 1, 1]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="none.safetensors: cannot be opened"):
        SafetensorsFile(tmp_path / "none.safetensors")


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="a folder; a safetensors file is wanted"):
        SafetensorsFile(tmp_path)


@pytest.mark.skipif(not POSIX, reason="needs symbolic links")
def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(WeightError, match="cannot be opened"):
        SafetensorsFile(tmp_path / "a")


@pytest.mark.skipif(not POSIX, reason="needs symbolic links")
def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to(write(tmp_path / "blob", {"a": np.ones(1, np.int8)}))
    with SafetensorsFile(tmp_path / "link.safetensors") as file:
        assert list(file.tensors) == ["a"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(WeightError, match="not a regular file"):
        SafetensorsFile(tmp_path / "pipe")


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.safetensors", {"a": np.zeros(2, np.int8)})

    def refuse(*args: object) -> int:  # file modes do not stop root
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(safetensors_file.os, "open", refuse)
    with pytest.raises(WeightError, match=r"a.safetensors: cannot be opened \(Permission denied\)"):
        SafetensorsFile(path)


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with SafetensorsFile(write(tmp_path / "a.safetensors", {"a": np.zeros(2, np.int8)})) as file:
        monkeypatch.setattr(safetensors_file, "_read_at", fail)
        with pytest.raises(WeightError, match="cannot be read at byte 5 .Input/output error"):
            file.read_into(np.empty(2, np.uint8), 5)


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_an_impossible_path(path: str) -> None:
    with pytest.raises(WeightError, match="cannot be opened"):
        SafetensorsFile(path)


@pytest.mark.parametrize("path", [None, 3.5, b"a", ["a"]])
def test_no_path(path: object) -> None:
    with pytest.raises(InputError, match="path: .* is not a path"):
        SafetensorsFile(path)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="counts the entries of /proc/self/fd")
def test_nothing_stays_open(tmp_path: Path) -> None:
    good = write(tmp_path / "good.safetensors", {"a": np.zeros(2, np.int8)})
    (tmp_path / "bad.safetensors").write_bytes(packed({"a": np.zeros(2, np.int8)}) + b"x")
    before = open_files()
    for _ in range(3):
        with pytest.raises(WeightError):
            SafetensorsFile(tmp_path / "bad.safetensors")
        with pytest.raises(WeightError):
            SafetensorsFile(tmp_path)
        with SafetensorsFile(good) as file:
            file.array("a")
        SafetensorsFile(good)  # nobody closes it
    gc.collect()
    assert open_files() == before


def test_the_library_refuses_nothing_that_is_written_here(tmp_path: Path) -> None:
    assert set(library_reads(packed({kind: values(kind, (2,)) for kind in KINDS}))) == set(KINDS)
    assert safetensors.__version__
