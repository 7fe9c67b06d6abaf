"""A safetensors file of kept prefixes: written whole or not at all, read only if it is of the same model and undamaged.

::

    metadata   format, engine (what computed them), layout (what pages are), identities, digest of all bytes
    tensors    runs, tokens, lines, tails, tail_lines, keys, key_ends, media       as `PrefixImage` has them
               pages.0, pages.1, ..., states                                       uint8, a row for each page or snapshot
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.errors import InputError, NumbaKVError, WeightError
from numba_kv.ledger.reuse.groups import SNAPSHOTS, ReuseGroups
from numba_kv.ledger.reuse.identity import ContextIdentity
from numba_kv.ledger.reuse.prefix_image import PrefixImage
from numba_kv.weights.safetensors_file import SafetensorsFile, path_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PrefixFile", "file_to_write", "read_prefixes", "write_prefixes"]

_FORMAT = "numba_kv prefixes 1"
#: Fields of an identity that belong to a sequence, not to the engine.
_OWN = ("rope", "adapter", "salt", "position", "embedding")
_TYPES = {
    "runs": "int32", "tokens": "int32", "lines": "int32", "tails": "int32", "tail_lines": "int32", "keys": "uint8",
    "key_ends": "int64", "media": "uint8",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class PrefixFile:
    """What a file holds.

    Attributes
    ----------
    image : PrefixImage
        The prefixes.
    rows : dict of int to uint8 [n, bytes]
        Pages of each line, and snapshots.
    """

    image: PrefixImage
    rows: dict[int, NDArray[np.uint8]]


def file_to_write(path: str | os.PathLike[str]) -> Path:
    """Return the file that a path names, or a link that it names points to; it need not be there.

    Raises
    ------
    InputError
        If it is no path, or something other than a regular file is there.
    """
    name = path_text(path)
    try:
        target = Path(os.path.realpath(name))
        is_other = os.path.lexists(target) and not stat.S_ISREG(target.lstat().st_mode)
    except (OSError, ValueError) as error:
        raise InputError(f"path: {name!r} cannot be written ({error})") from error
    if is_other:
        raise InputError(f"path: {name!r} is there and is not a regular file; only such a file is replaced")
    return target


def write_prefixes(path: str | os.PathLike[str], found: PrefixFile, engine: ContextIdentity, layout: list[Any]) -> None:
    """Write a file, which takes the place of one of that name when all of it is on the disk.

    Only its owner may read it: it holds what users wrote, and the salts of tenants.

    Raises
    ------
    InputError
        As `file_to_write`, or if it cannot be written; a file that was there is as it was.
    """
    from safetensors.numpy import save_file

    target = file_to_write(path)
    image = found.image
    media = [[row, [[*part[:3], part[3].hex()] for part in parts]] for row, parts in sorted(image.media.items())]
    tensors: dict[str, NDArray[Any]] = {
        "runs": image.runs,
        "tokens": image.tokens,
        "lines": image.lines,
        "tails": image.tails,
        "tail_lines": image.tail_lines,
        "keys": np.frombuffer(b"".join(image.keys), np.uint8),
        "key_ends": np.cumsum([len(key) for key in image.keys], dtype=np.int64),
        "media": np.frombuffer(json.dumps(media).encode(), np.uint8),
    }
    tensors |= {_name(line): rows for line, rows in found.rows.items()}
    metadata = {
        "format": _FORMAT,
        "engine": json.dumps(_engine(engine)),
        "layout": json.dumps(layout),
        "identities": json.dumps([{name: _hex(getattr(one, name)) for name in _OWN} for one in image.identities]),
    }
    metadata["digest"] = _digest(metadata, tensors)
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, name, metadata)
            os.fsync(descriptor)
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise InputError(f"path: {os.fspath(path)} cannot be written ({error})") from error


def read_prefixes(path: str | os.PathLike[str], engine: ContextIdentity, layout: list[Any], groups: ReuseGroups) -> PrefixFile:
    """Read a file of the same model, checked throughout.

    Raises
    ------
    WeightError
        If it cannot be read, is damaged, or holds something else.
    InputError
        If another model, other weights or another layout of pages computed it; says which.
    """
    with SafetensorsFile(path) as file:
        metadata = dict(file.metadata)
        if metadata.get("format") != _FORMAT:
            raise WeightError(f"{file.path}: no file of kept prefixes (format {metadata.get('format')!r}, {_FORMAT!r} wanted)")
        tensors = {name: file.array(name) for name in file.tensors}
        if metadata.pop("digest", None) != _digest(metadata, tensors):
            raise WeightError(f"{file.path}: what it holds does not match its digest; the file is damaged")
        _check_model(file.path, metadata, engine, layout)
        lines = [*range(1 + len(groups.windows)), SNAPSHOTS]
        missing = {*_TYPES, *map(_name, lines)} - tensors.keys()
        wrong = [name for name, kind in _TYPES.items() if name in tensors and tensors[name].dtype != kind]
        if missing or wrong:
            raise WeightError(f"{file.path}: tensors {sorted(missing) or wrong} are missing or of another type")
        try:
            image = _image(tensors, _identities(engine, metadata["identities"]))
        except (NumbaKVError, ValueError, KeyError, TypeError, IndexError) as error:
            raise WeightError(f"{file.path}: what it says of its prefixes cannot be read ({error})") from error
        rows = {line: tensors[_name(line)] for line in lines}
        if any(found.ndim != 2 or found.dtype != np.uint8 for found in rows.values()):
            raise WeightError(f"{file.path}: pages are not rows of bytes")
        image.check(groups, {line: len(found) for line, found in rows.items()})
        for found, nbytes in zip(rows.values(), layout[-1], strict=True):
            if found.shape[1] != nbytes and len(found):
                raise WeightError(f"{file.path}: pages of {found.shape[1]} bytes, {nbytes} wanted")
        return PrefixFile(image, rows)


def _check_model(path: str, metadata: dict[str, str], engine: ContextIdentity, layout: list[Any]) -> None:
    mine, text = _engine(engine), metadata.get("engine", "")
    differ = [] if text == json.dumps(mine) else _differing(text, mine)
    if metadata.get("layout") != json.dumps(layout):
        differ.append("layout of pages")
    if differ:
        raise InputError(
            f"{path}: computed by another model: {', '.join(differ)} differ; prefixes are of one configuration, one set of "
            "weights, one element type, one page size and one kv_layout"
        )


def _differing(text: str, mine: dict[str, Any]) -> list[str]:
    try:
        its = json.loads(text)
    except ValueError:
        its = None
    return [name for name in mine if its.get(name) != mine[name]] if isinstance(its, dict) else ["engine"]


def _image(tensors: dict[str, NDArray[Any]], identities: list[ContextIdentity]) -> PrefixImage:
    keys, ends = tensors["keys"].tobytes(), [0, *tensors["key_ends"].tolist()]
    if ends[-1] != len(keys) or sorted(ends) != ends:
        raise ValueError("keys do not end where they should")
    media = json.loads(tensors["media"].tobytes().decode())
    return PrefixImage(
        identities=tuple(identities),
        runs=tensors["runs"].reshape(-1, 4),
        tokens=tensors["tokens"],
        lines=tensors["lines"],
        media={int(row): tuple((int(a), int(b), int(c), bytes.fromhex(d)) for a, b, c, d in parts) for row, parts in media},
        tails=tensors["tails"].reshape(-1, 5),
        tail_lines=tensors["tail_lines"],
        keys=tuple(keys[low:high] for low, high in zip(ends, ends[1:], strict=False)),
    )


def _identities(engine: ContextIdentity, text: str) -> list[ContextIdentity]:
    found = []
    for fields in json.loads(text):
        rope, adapter, salt, position, embedding = (fields[n] if fields[n] is None else bytes.fromhex(fields[n]) for n in _OWN)
        found.append(replace(engine, rope=rope, adapter=adapter, salt=salt, position=position, embedding=embedding))
    return found


def _engine(engine: ContextIdentity) -> dict[str, Any]:
    return {name: _hex(value) for name, value in asdict(engine).items() if name not in _OWN}


def _hex(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def _name(line: int) -> str:
    return "states" if line == SNAPSHOTS else f"pages.{line}"


def _digest(metadata: dict[str, str], tensors: dict[str, NDArray[Any]]) -> str:
    """Return a digest of everything: names, types, shapes and bytes."""
    found = hashlib.blake2b(digest_size=16, person=b"numba_kv file")
    found.update(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        found.update(json.dumps([name, str(array.dtype), array.shape]).encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
