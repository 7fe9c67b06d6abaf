"""One adapter on the host: read, checked against an engine's targets, hashed.

Knows both layouts of adapter files. Does not know devices or slots. ::

    layout       names                                              A        B        scaling
    reference    the engine's inputs, <module>.lora_A.weight        [k, r]   [r, n]   in B already
    peft         base_model.model.<module>.lora_A.weight            [r, k]   [n, r]   from adapter_config.json
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from numba_kv.dtypes import DType, dtype
from numba_kv.errors import InputError, LoRAError
from numba_kv.weights.lora_matrices import Matrices, Piece
from numba_kv.weights.lora_peft import CONFIG_NAME, PeftConfig, read_peft_config
from numba_kv.weights.lora_targets import Placement, TargetTable
from numba_kv.weights.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

__all__ = ["HASH_NBYTES", "LAYOUTS", "HostAdapter", "ReadOptions", "Source", "read_adapter"]

#: Bytes of a content hash: 128 bits.
HASH_NBYTES = 16
LAYOUTS = ("auto", "reference", "peft")

#: A file, a folder of PEFT or of the reference's exporter, or the tensors themselves in the reference layout.
Source = str | os.PathLike[str] | Mapping[str, "NDArray[Any]"]

#: In a folder: PEFT's file, the reference exporter's file.
_FILES = {"adapter_model.safetensors": "peft", "processed_adapter_model.safetensors": "reference"}
_PEFT_PREFIX = "base_model.model."
#: PEFT puts the name of the adapter before ``weight`` while it is in memory.
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight")
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_OTHER_KINDS = {
    "lora_magnitude_vector": "a magnitude vector (DoRA)",
    "lora_embedding_": "an adapter of the embedding",
    ".bias": "a bias",
}


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How adapters are read.

    Attributes
    ----------
    max_rank : int
        Largest rank of a module.
    dtype : DType
        Element type on the device.
    fold_scaling : bool
        Whether B is multiplied by the scaling; else the engine does it.
    layout : {"auto", "reference", "peft"}
        ``"auto"``: peft where names begin with ``base_model.model.``.
    check_finite : bool
        Whether infinities and NaN are refused.
    convert : bool
        Whether element types other than `dtype` are converted; else they are refused.
    """

    max_rank: int
    dtype: DType
    fold_scaling: bool = True
    layout: str = "auto"
    check_finite: bool = True
    convert: bool = True


class HostAdapter:
    """A checked adapter. Owns the open file; what `matrices` returns reads it.

    Attributes
    ----------
    matrices : tuple of Matrices
        One a target, in the engine's order.
    content_hash : bytes
        128 bits of everything that decides what the adapter computes: engine names, shapes, element type, bytes, scalings.
    source : str
        Where it came from.
    """

    def __init__(self, matrices: tuple[Matrices, ...], content_hash: bytes, source: str, resources: ExitStack) -> None:
        self.matrices = matrices
        self.content_hash = content_hash
        self.source = source
        self._resources = resources

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._resources.close()

    def __enter__(self) -> HostAdapter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass
class _Pair:
    """What the file has of one module, A as [k, r] and B as [r, n]."""

    module: str
    a: NDArray[Any] | None = None
    b: NDArray[Any] | None = None
    a_name: str = ""
    b_name: str = ""


def read_adapter(source: Source, table: TargetTable, options: ReadOptions) -> HostAdapter:
    """Read an adapter and check it against the targets.

    Parameters
    ----------
    source : path or mapping of str to array
        See `Source`.
    table : TargetTable
        The engine's targets.
    options : ReadOptions
        Limits and layout.

    Raises
    ------
    InputError
        If `source` is neither a path nor a mapping.
    WeightError, LoRAError
        If the file cannot be read, is damaged, or does not fit the engine; names the tensor and the reason.

    Cost: reads and converts every element once.
    """
    with ExitStack() as resources:
        arrays, where, layout, folder = _open(source, options.layout, resources)
        if not arrays:
            raise LoRAError(f"{where}: it holds no tensors")
        config = None
        if layout == "peft":
            if folder is None or not os.path.exists(os.path.join(folder, CONFIG_NAME)):
                raise LoRAError(f"{where}: {CONFIG_NAME} is missing beside it; it says the scaling of an adapter in PEFT's layout")
            config = read_peft_config(os.path.join(folder, CONFIG_NAME))
        pairs = _pairs(arrays, where, table, config, options)
        matrices = _assemble(pairs, where, table, config, options)
        content_hash = _hash(matrices, options)
        return HostAdapter(matrices, content_hash, where, resources.pop_all())


def _open(source: Source, layout: str, resources: ExitStack) -> tuple[dict[str, NDArray[Any]], str, str, str | None]:
    """Return the tensors, a name for messages, the layout, and the folder."""
    if isinstance(source, Mapping):
        if layout == "peft":
            raise InputError("source: tensors in PEFT's layout need its adapter_config.json; give the folder")
        return dict(source), "source", "reference", None
    try:
        path = os.fspath(source)
    except TypeError:
        path = b""
    if not isinstance(path, str):
        raise InputError(f"source: {source!r} is neither a path nor a mapping of names to arrays")
    named = ""
    if os.path.isdir(path):
        wanted = [name for name, kind in _FILES.items() if layout in ("auto", kind)]
        name = next((name for name in wanted if os.path.exists(os.path.join(path, name))), None)
        if name is None:
            raise LoRAError(f"{path}: the folder holds no {' and no '.join(wanted)}")
        path, named = os.path.join(path, name), _FILES[name]
    file = resources.enter_context(SafetensorsFile(path))
    if layout == "auto":
        prefixed = any(name.startswith(_PEFT_PREFIX) for name in file.tensors)
        layout = named or ("peft" if prefixed else "reference")
    return {name: file.array(name) for name in file.tensors}, path, layout, os.path.dirname(path) or "."


def _pairs(
    arrays: Mapping[str, NDArray[Any]], where: str, table: TargetTable, config: PeftConfig | None, options: ReadOptions
) -> list[_Pair]:
    """Return A and B of every module of the file, checked for themselves."""
    inputs = {name: (t.name, half) for t in table.targets for half, name in (("A", t.a_name), ("B", t.b_name))}
    found: dict[str, _Pair] = {}
    for name, array in arrays.items():
        if not isinstance(name, str):
            raise InputError(f"source: {name!r} is not the name of a tensor")
        match = _HALF.fullmatch(name)
        if config is None and name in inputs:
            module, half = inputs[name]
        elif match:
            module, half = match["module"].removeprefix(_PEFT_PREFIX), match["half"]
        else:
            what = next((what for mark, what in _OTHER_KINDS.items() if mark in name), "neither lora_A nor lora_B of a module")
            raise LoRAError(f"{where}: {name!r} is {what}; only pairs of A and B are supported", extra=(name,))
        _check_array(name, array, where, options)
        pair = found.setdefault(module, _Pair(module))
        if getattr(pair, half.lower()) is not None:
            raise LoRAError(f"{where}: {name!r} and {getattr(pair, f'{half.lower()}_name')!r} are both {half} of {module!r}")
        setattr(pair, half.lower(), array if config is None else array.T)
        setattr(pair, f"{half.lower()}_name", name)
    return list(found.values())


def _check_array(name: str, array: NDArray[Any], where: str, options: ReadOptions) -> None:
    shape, kind = getattr(array, "shape", None), getattr(array, "dtype", None)
    if shape is None or kind is None:
        raise InputError(f"source: {name!r} is {type(array).__name__}, a NumPy array is wanted")
    allowed = _DTYPES if options.convert else (options.dtype.name,)
    if not any(kind == dtype(allowed_name).numpy() for allowed_name in allowed):
        more = "" if options.convert else " without conversion"
        raise LoRAError(f"{where}: {name!r} is {kind}, one of {', '.join(allowed)} is wanted{more}", mismatched=(name,))
    if len(shape) != 2 or not all(shape):
        raise LoRAError(f"{where}: {name!r} has shape {list(shape)}, a matrix is wanted", mismatched=(name,))


def _assemble(
    pairs: Iterable[_Pair], where: str, table: TargetTable, config: PeftConfig | None, options: ReadOptions
) -> tuple[Matrices, ...]:
    """Return the matrices of every target."""
    pieces: dict[int, list[tuple[Piece, float]]] = {}
    for pair in pairs:
        placements = _check_pair(pair, where, table, options.max_rank)
        scaling = 1.0 if config is None else _scaling(pair, where, config)
        for place in placements:
            pieces.setdefault(place.target, []).append((_piece(pair, place), scaling))
    found = []
    for number, target in enumerate(table.targets):
        mine = sorted(pieces.get(number, ()), key=lambda item: item[0].column_at)
        rank, room = sum(piece.rank for piece, _ in mine), target.rank_room(options.max_rank)
        for (left, _), (right, _) in zip(mine, mine[1:], strict=False):
            if left.column_at + left.b.shape[1] > right.column_at:
                raise LoRAError(f"{where}: {left.b_name!r} and {right.b_name!r} are both for the same columns of {target.name!r}")
        if rank > room:
            raise LoRAError(
                f"{where}: rank {rank} of {', '.join(repr(piece.a_name) for piece, _ in mine)} together, "
                f"target {target.name!r} has room for {room}",
                mismatched=(target.name,),
            )
        found.append(Matrices(target=target, dtype=options.dtype, **_side_by_side(mine, options.fold_scaling)))
    return tuple(found)


def _check_pair(pair: _Pair, where: str, table: TargetTable, max_rank: int) -> tuple[Placement, ...]:
    placements = table.find(pair.module)
    if not placements:
        name = pair.a_name or pair.b_name
        raise LoRAError(f"{where}: {name!r} is for {pair.module!r}, which is not one of the engine's targets", extra=(name,))
    if pair.a is None or pair.b is None:
        have, lack = (pair.a_name, "lora_B") if pair.b is None else (pair.b_name, "lora_A")
        raise LoRAError(f"{where}: {have!r} has no {lack} beside it", missing=(have.replace("lora_A", "lora_?").replace("lora_B", "lora_?").replace("lora_?", lack),))
    target = table.targets[placements[0].target]
    k, n = target.k, sum(place.n for place in placements)
    (a_k, a_rank), (b_rank, b_n) = pair.a.shape, pair.b.shape
    if a_rank != b_rank:
        raise LoRAError(f"{where}: {pair.a_name!r} has rank {a_rank}, {pair.b_name!r} {b_rank}", mismatched=(pair.a_name, pair.b_name))
    if a_k != k:
        raise LoRAError(f"{where}: {pair.a_name!r} is for {a_k} input channels, {target.name!r} has {k}", mismatched=(pair.a_name,))
    if b_n != n:
        raise LoRAError(f"{where}: {pair.b_name!r} is for {b_n} output channels, {pair.module!r} has {n}", mismatched=(pair.b_name,))
    limit = max_rank if target.max_rank is None else target.max_rank
    if a_rank > limit:
        raise LoRAError(f"{where}: {pair.a_name!r} has rank {a_rank}, at most {limit} is allowed (max_rank)", mismatched=(pair.a_name,))
    return placements


def _scaling(pair: _Pair, where: str, config: PeftConfig) -> float:
    if not config.covers(pair.module):
        raise LoRAError(f"{where}: {pair.a_name!r} is of a module that target_modules of {config.path} does not list")
    stated, rank = config.rank_of(pair.module), pair.b.shape[0]  # type: ignore[union-attr]
    if stated != rank:
        raise LoRAError(f"{where}: {pair.a_name!r} has rank {rank}, {config.path} states {stated}", mismatched=(pair.a_name,))
    return config.scaling_of(pair.module)


def _piece(pair: _Pair, place: Placement) -> Piece:
    return Piece(
        a=pair.a,  # type: ignore[arg-type]
        b=pair.b[:, place.source : place.source + place.n],  # type: ignore[index]
        a_name=pair.a_name,
        b_name=pair.b_name,
        rank_at=0,
        column_at=place.column,
        factor=1.0,
    )


def _side_by_side(pieces: list[tuple[Piece, float]], fold: bool) -> dict[str, Any]:
    """Return the pieces of a target with their places along the rank and their factors, and the target's scaling."""
    scalings = {scaling for _, scaling in pieces}
    kept = scalings.pop() if len(scalings) == 1 and not fold else 1.0  # one target has one scaling: others go into B
    found, at = [], 0
    for piece, scaling in pieces:
        factor = 1.0 if kept == scaling and not fold else scaling
        found.append(
            Piece(
                a=piece.a,
                b=piece.b,
                a_name=piece.a_name,
                b_name=piece.b_name,
                rank_at=at,
                column_at=piece.column_at,
                factor=factor,
            )
        )
        at += piece.rank
    return {"pieces": tuple(found), "scaling": kept if found else 0.0}


def _hash(matrices: Iterable[Matrices], options: ReadOptions) -> bytes:
    """Return the content hash; checks every element on the way."""
    found = blake2b(f"numba_kv LoRA {options.dtype}".encode(), digest_size=HASH_NBYTES)
    for one in matrices:
        for piece in one.pieces:
            name = one.target.name
            numbers = (one.target.k, one.target.n, piece.rank, piece.b.shape[1], piece.rank_at, piece.column_at)
            found.update(f"|{len(name)}|{name}|{numbers}|{one.scaling.hex()}|".encode())
            for chunk in piece.checked(options.dtype, check_finite=options.check_finite):
                found.update(chunk.view("uint8").data if chunk.ndim else chunk.tobytes())
    return found.digest()
