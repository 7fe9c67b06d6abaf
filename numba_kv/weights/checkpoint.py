"""Checkpoint: the tensors of one safetensors file, or of all shards that an index names.

Knows which file holds which tensor. Does not know devices or engines.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from numba_kv.errors import InputError, StateError, WeightError
from numba_kv.weights.safetensors_file import SafetensorsFile, read_whole
from numba_kv.weights.safetensors_header import MAX_HEADER_NBYTES, TensorEntry, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["CANONICAL_INDEX", "Checkpoint"]

#: The index that wins where a folder has several.
CANONICAL_INDEX = "model.safetensors.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"


class Checkpoint:
    """Named tensors of one or more safetensors files. Owns the open files.

    Made by `open`. An index is authoritative: what it does not name does not exist, whatever else the shards or the folder
    hold. Every shard is opened and checked at once, so that a checkpoint that opens is complete.

    Attributes
    ----------
    tensors : mapping of str to TensorEntry
        Shard by shard, in the order of their bytes.
    files : tuple of SafetensorsFile
        The shards.
    """

    def __init__(self, files: Iterable[SafetensorsFile], owners: Mapping[str, SafetensorsFile], resources: ExitStack) -> None:
        self.files = tuple(files)
        self._owners = dict(owners)
        self._resources = resources
        self._closed = False
        self.tensors: Mapping[str, TensorEntry] = MappingProxyType(
            {name: file.tensors[name] for file in self.files for name in file.tensors if self._owners.get(name) is file}
        )

    @classmethod
    def open(cls, *paths: str | os.PathLike[str], check_total_size: bool = True) -> Checkpoint:
        """Open files, indexes or folders as one checkpoint.

        Parameters
        ----------
        *paths : path
            Each a ``.safetensors`` file, a ``.json`` index, or a folder: its ``model.safetensors.index.json``, else its
            first ``*.safetensors.index.json``, else all its ``*.safetensors`` files.
        check_total_size : bool
            Whether an index's ``metadata.total_size`` has to be the bytes of the tensors that it names.

        Raises
        ------
        InputError
            If no path is given, or `check_total_size` is no bool.
        WeightError
            If a file is missing, unreadable or damaged, an index names a tensor that its shard lacks or a path outside its
            folder, or a name is in two files; nothing stays open.

        Cost: reads the headers alone.
        """
        if not paths:
            raise InputError("paths: none given; name a safetensors file, an index or a folder")
        if not isinstance(check_total_size, bool):
            raise InputError(f"check_total_size: {check_total_size!r} is not True or False")
        with ExitStack() as resources:
            files: list[SafetensorsFile] = []
            owners: dict[str, SafetensorsFile] = {}
            for path in paths:
                for file, names in _files_of(path, resources, check_total_size):
                    files.append(file)
                    for name in names:
                        if name in owners:
                            raise _twice(name, owners[name], file)
                        owners[name] = file
            return cls(files, owners, resources.pop_all())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def file_of(self, name: str) -> SafetensorsFile:
        """Return the file that holds `name`.

        Raises
        ------
        WeightError
            If the checkpoint has no such tensor.
        StateError
            After `close`.
        """
        if self._closed:
            raise StateError("the checkpoint is closed")
        found = self._owners.get(name)
        if found is None:
            raise WeightError(f"there is no tensor {name!r} in {', '.join(file.path for file in self.files)}")
        return found

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor as a read-only array of the mapped file; see `SafetensorsFile.array`."""
        return self.file_of(name).array(name)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Close every file; a second call does nothing."""
        self._closed = True
        self._resources.close()

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __enter__(self) -> Checkpoint:
        if self._closed:
            raise StateError("the checkpoint is closed")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({len(self.tensors)} tensors in {len(self.files)} files{', closed' if self._closed else ''})"


def _twice(name: str, first: SafetensorsFile, second: SafetensorsFile) -> WeightError:
    return WeightError(f"tensor {name!r} is in {first.path} and in {second.path}; a name has to be in one file alone")


def _files_of(
    path: str | os.PathLike[str], resources: ExitStack, check_total_size: bool
) -> list[tuple[SafetensorsFile, Iterable[str]]]:
    """Return the open files of one path and the names that are taken from each."""
    try:
        where = Path(path)
        is_folder = where.is_dir()
    except (TypeError, ValueError):
        raise InputError(f"path: {path!r} is not a path") from None
    except OSError as error:  # a loop of links, a folder that may not be read
        raise WeightError(f"{path}: cannot be opened ({error.strerror or error})") from error
    if is_folder:
        found = _in_folder(where)
        if len(found) == 1 and found[0].name.endswith(_INDEX_SUFFIX):
            return _shards(found[0], resources, check_total_size)
        files = [resources.enter_context(SafetensorsFile(file)) for file in found]
        return [(file, file.tensors) for file in files]
    if where.suffix == ".json":
        return _shards(where, resources, check_total_size)
    file = resources.enter_context(SafetensorsFile(where))
    return [(file, file.tensors)]


def _in_folder(folder: Path) -> list[Path]:
    """Return the index of a folder, or all its safetensors files."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise WeightError(f"{folder}: cannot be listed ({error.strerror or error})") from error
    indexes = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if indexes:
        return [folder / (CANONICAL_INDEX if CANONICAL_INDEX in indexes else indexes[0])]
    files = [folder / name for name in names if name.endswith(".safetensors")]
    if not files:
        raise WeightError(f"{folder}: the folder holds neither *{_INDEX_SUFFIX} nor *.safetensors")
    return files


def _shards(index: Path, resources: ExitStack, check_total_size: bool) -> list[tuple[SafetensorsFile, Iterable[str]]]:
    content = parse_json(read_whole(index, what="an index of shards", max_nbytes=MAX_HEADER_NBYTES), str(index))
    wanted: dict[str, list[str]] = {}
    for name, shard in _weight_map(content, index).items():
        wanted.setdefault(shard, []).append(name)
    opened: list[tuple[SafetensorsFile, Iterable[str]]] = []
    for shard, names in wanted.items():
        _check_inside(shard, index)
        file = resources.enter_context(SafetensorsFile(index.parent / shard))
        for name in names:
            if name not in file.tensors:
                raise WeightError(f"{index}: tensor {name!r} should be in {shard}, but {file.path} has no such tensor")
        opened.append((file, names))
    _check_unique(opened)
    if check_total_size:
        _check_total(content.get("metadata"), sum(f.tensors[n].nbytes for f, names in opened for n in names), index)
    return opened


def _weight_map(content: dict[str, Any], index: Path) -> dict[str, str]:
    found = content.get("weight_map")
    if not isinstance(found, dict):
        raise WeightError(f"{index}: weight_map has to be an object of tensor names and files; it is {type(found).__name__}")
    for name, shard in found.items():
        if not isinstance(shard, str):
            raise WeightError(f"{index}: weight_map has {shard!r} for tensor {name!r}, the name of a file is wanted")
    return found


def _check_inside(shard: str, index: Path) -> None:
    """Refuse a shard's path that leaves the index's folder. Links are followed: shared caches of models are made of them."""
    posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
    if not posix.parts or "\0" in shard or posix.is_absolute() or windows.anchor or ".." in (*posix.parts, *windows.parts):
        raise WeightError(f"{index}: shard {shard!r} is not a path inside the folder of the index")


def _check_unique(opened: list[tuple[SafetensorsFile, Iterable[str]]]) -> None:
    """Refuse a tensor of the index that a second shard holds too: which one is meant would be a guess."""
    owners = {name: file for file, names in opened for name in names}
    for file, _ in opened:
        for name in file.tensors:
            if owners.get(name, file) is not file:
                raise _twice(name, owners[name], file)


def _check_total(metadata: Any, nbytes: int, index: Path) -> None:
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        return
    if isinstance(total, float) and total.is_integer():  # some writers sum in floats
        total = int(total)
    if type(total) is not int or total != nbytes:
        raise WeightError(
            f"{index}: metadata.total_size is {total!r}, but the tensors of the index have {nbytes} bytes; "
            "check_total_size=False ignores it"
        )
