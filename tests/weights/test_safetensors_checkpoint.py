"""Checkpoints of several files: the index is authoritative, and everything about it is checked."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_kv.errors import InputError, StateError, WeightError
from numba_kv.weights import Checkpoint
from tests.helpers.weight_files import write, write_shards

A, B, C = (np.full(3, i, np.float32) for i in range(3))


def sharded(folder: Path) -> Path:
    return write_shards(folder, {"one.safetensors": {"a": A, "b": B}, "sub/two.safetensors": {"c": C}})


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    index = sharded(folder)
    content = json.loads(index.read_text())
    change(content)
    index.write_text(json.dumps(content))
    return index


@pytest.mark.parametrize("by", ["index", "folder"])
def test_an_index_names_what_exists(tmp_path: Path, by: str) -> None:
    index = sharded(tmp_path)
    write(tmp_path / "stray.safetensors", {"stray": A})  # in the folder, but not in the index
    with Checkpoint.open(index if by == "index" else tmp_path) as found:
        assert list(found.tensors) == ["a", "b", "c"]
        assert [Path(file.path).name for file in found.files] == ["one.safetensors", "two.safetensors"]
        assert found.array("c").tolist() == C.tolist()
        assert found.nbytes == 36
        assert "stray" not in found
        with pytest.raises(WeightError, match="no tensor 'stray' in .*one.safetensors"):
            found.array("stray")


def test_a_tensor_of_a_shard_that_the_index_does_not_name_does_not_exist(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        del content["weight_map"]["b"]
        content["metadata"]["total_size"] = 24

    with Checkpoint.open(edited(tmp_path, change)) as found:
        assert list(found.tensors) == ["a", "c"]


def test_the_canonical_index_wins(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x.safetensors": {"x": A}}, "consolidated.safetensors.index.json")
    with Checkpoint.open(tmp_path) as found:
        assert list(found.tensors) == ["x"]
    sharded(tmp_path)
    with Checkpoint.open(tmp_path) as found:
        assert list(found.tensors) == ["a", "b", "c"]


def test_a_folder_without_index_is_all_its_files(tmp_path: Path) -> None:
    write(tmp_path / "2.safetensors", {"b": B})
    write(tmp_path / "1.safetensors", {"a": A})
    (tmp_path / "notes.txt").write_text("no weights")
    with Checkpoint.open(tmp_path) as found:
        assert list(found.tensors) == ["a", "b"]


def test_several_paths(tmp_path: Path) -> None:
    index, extra = sharded(tmp_path), write(tmp_path / "extra.safetensors", {"d": A})
    with Checkpoint.open(index, extra) as found:
        assert list(found.tensors) == ["a", "b", "c", "d"]
    with pytest.raises(InputError, match="none given"):
        Checkpoint.open()


def test_total_size_is_checked_unless_told_otherwise(tmp_path: Path) -> None:
    index = edited(tmp_path, lambda content: content["metadata"].update(total_size=99))
    with pytest.raises(WeightError, match="total_size is 99, but the tensors of the index have 36 bytes"):
        Checkpoint.open(index)
    Checkpoint.open(index, check_total_size=False).close()
    Checkpoint.open(edited(tmp_path, lambda content: content["metadata"].update(total_size=36.0))).close()
    Checkpoint.open(edited(tmp_path, lambda content: content.pop("metadata"))).close()


def remap(name: str, shard: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["weight_map"].update({name: shard})


WRONG_INDEX = [
    ("no weight_map", lambda c: c.pop("weight_map"), "weight_map has to be an object"),
    ("weight_map is a list", lambda c: c.update(weight_map=["a"]), "weight_map has to be an object"),
    ("shard is a number", remap("a", 1), "weight_map has 1 for tensor 'a'"),
    ("shard is missing", remap("z", "three.safetensors"), "three.safetensors: cannot be opened"),
    ("shard lacks the tensor", remap("z", "one.safetensors"), "'z' should be in one.safetensors"),
    ("tensor is in the other shard", remap("a", "sub/two.safetensors"), "'a' should be in sub/two.safetensors"),
    ("path escapes", remap("a", "../one.safetensors"), "not a path inside the folder"),
    ("path escapes later", remap("a", "sub/../../one.safetensors"), "not a path inside the folder"),
    ("path escapes backwards", remap("a", "..\\one.safetensors"), "not a path inside the folder"),
    ("path is absolute", remap("a", "/etc/passwd"), "not a path inside the folder"),
    ("path has a drive", remap("a", "C:one.safetensors"), "not a path inside the folder"),
    ("path is empty", remap("a", ""), "not a path inside the folder"),
    ("path has a NUL", remap("a", "one\0.safetensors"), "not a path inside the folder"),
    ("shard is a folder", remap("a", "sub"), "sub: a folder"),
    ("shard is the index", remap("a", "model.safetensors.index.json"), "not a safetensors file"),
    ("same file under two names", remap("a", "./one.safetensors"), None),
    ("total_size is text", lambda c: c["metadata"].update(total_size="36"), "total_size is '36'"),
]


@pytest.mark.parametrize(("change", "says"), [w[1:] for w in WRONG_INDEX], ids=[w[0] for w in WRONG_INDEX])
def test_a_wrong_index(tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str | None) -> None:
    index = edited(tmp_path, change)
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(WeightError, match=says or "is in .* and in"):
        Checkpoint.open(index)
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {"a": "x", "a": "y"}}', "{", "\xff"])
def test_an_index_that_is_no_index(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightError, match="model.safetensors.index.json"):
        Checkpoint.open(path)


def test_a_name_in_two_shards_names_both(tmp_path: Path) -> None:
    index = write_shards(tmp_path, {"one.safetensors": {"a": A}, "two.safetensors": {"b": B}})
    write(tmp_path / "two.safetensors", {"b": B, "a": C})
    with pytest.raises(WeightError, match=r"'a' is in .*one.safetensors and in .*two.safetensors"):
        Checkpoint.open(index)
    index.unlink()
    with pytest.raises(WeightError, match=r"'a' is in .*one.safetensors and in .*two.safetensors"):
        Checkpoint.open(tmp_path)


def test_a_truncated_shard(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    shard = tmp_path / "sub" / "two.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(WeightError, match="two.safetensors: tensor 'c' .* truncated"):
        Checkpoint.open(index)


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="the folder holds neither"):
        Checkpoint.open(tmp_path)
    with pytest.raises(WeightError, match="cannot be opened"):
        Checkpoint.open(tmp_path / "none")
    with pytest.raises(InputError, match="not a path"):
        Checkpoint.open(7)  # type: ignore[arg-type]


def test_after_close(tmp_path: Path) -> None:
    found = Checkpoint.open(sharded(tmp_path))
    found.close()
    found.close()
    assert found.is_closed
    assert all(file.is_closed for file in found.files)
    with pytest.raises(StateError, match="closed"):
        found.array("a")
    with pytest.raises(StateError, match="closed"):
        found.__enter__()
