"""One adapter on the host: checked against an engine's targets, and hashed.

Knows what fits a target. Does not know files' layouts, devices or slots.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from numba_kv.config.lora_target import LoRATarget
from numba_kv.dtypes import DType, dtype
from numba_kv.errors import LoRAError
from numba_kv.weights.lora_files import AdapterFiles, Pair, Source, open_adapter, pairs_of
from numba_kv.weights.lora_matrices import Matrices, Piece
from numba_kv.weights.lora_peft import PeftConfig
from numba_kv.weights.lora_targets import Placement, TargetTable

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ADAPTER_DTYPES", "HASH_NBYTES", "HostAdapter", "ReadOptions", "read_adapter"]

#: Bytes of a content hash: 128 bits.
HASH_NBYTES = 16
#: Element types that files may have.
ADAPTER_DTYPES = ("float32", "float16", "bfloat16", "float64")


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
        See `open_adapter`.
    check_finite : bool
        Whether infinities and NaN are refused.
    convert : bool
        Whether other element types are converted; else they are refused.
    """

    max_rank: int
    dtype: DType
    fold_scaling: bool = True
    layout: str = "auto"
    check_finite: bool = True
    convert: bool = True


class HostAdapter:
    """A checked adapter. Owns the open file, which `matrices` read.

    Attributes
    ----------
    matrices : tuple of Matrices
        One a target, in the engine's order.
    content_hash : bytes
        128 bits of everything that decides what the adapter computes: target names, shapes, element type, bytes, scalings.
        Names of the adapter and of the file are not part of it.
    where : str
        Where it came from.
    """

    def __init__(self, matrices: tuple[Matrices, ...], content_hash: bytes, where: str, resources: ExitStack) -> None:
        self.matrices = matrices
        self.content_hash = content_hash
        self.where = where
        self._resources = resources

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._resources.close()

    def __enter__(self) -> HostAdapter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


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
        If `source` is neither a path nor a mapping of arrays.
    WeightError, LoRAError
        If the file cannot be read, is damaged, or does not fit the engine; names the tensor and the reason.

    Cost: reads and converts every element once.
    """
    with ExitStack() as resources:
        files = open_adapter(source, options.layout, resources)
        pieces: dict[int, list[tuple[Piece, float]]] = {}
        for pair in pairs_of(files, _inputs(table)):
            placements = table.find(pair.module)
            _check_pair(pair, placements, table, files, options)
            scaling = 1.0 if files.config is None else _scaling(pair, files.config)
            for place in placements:
                pieces.setdefault(place.target, []).append((_piece(pair, place), scaling))
        matrices = tuple(
            _matrices(target, sorted(pieces.get(number, ()), key=lambda item: item[0].column_at), files, options)
            for number, target in enumerate(table.targets)
        )
        content_hash = _hash(matrices, files, options)
        return HostAdapter(matrices, content_hash, files.where, resources.pop_all())


def _inputs(table: TargetTable) -> dict[str, tuple[str, str]]:
    return {name: (t.name, half) for t in table.targets for half, name in (("A", t.a_name), ("B", t.b_name))}


def _check_pair(
    pair: Pair, placements: tuple[Placement, ...], table: TargetTable, files: AdapterFiles, options: ReadOptions
) -> None:
    where, a, b = files.where, pair.a_name, pair.b_name
    if not placements:
        raise LoRAError(f"{where}: {a!r} is for {pair.module!r}, which is not one of the engine's targets", extra=(a, b))
    allowed = ADAPTER_DTYPES if options.convert else (options.dtype.name,)
    for name, array in ((a, pair.a), (b, pair.b)):
        if not any(array.dtype == dtype(kind).numpy() for kind in allowed):
            raise LoRAError(f"{where}: {name!r} is {array.dtype}, {' or '.join(allowed)} is wanted", mismatched=(name,))
    target = table.targets[placements[0].target]
    k, n = target.k, sum(place.n for place in placements)
    if pair.a.shape[1] != pair.rank:
        raise LoRAError(f"{where}: {a!r} has rank {pair.a.shape[1]}, {b!r} {pair.rank}; they have to agree", mismatched=(a, b))
    if pair.a.shape[0] != k:
        raise LoRAError(
            f"{where}: {a!r} takes {pair.a.shape[0]} channels, the engine's {pair.module!r} has {k}", mismatched=(a,)
        )
    if pair.b.shape[1] != n:
        raise LoRAError(
            f"{where}: {b!r} gives {pair.b.shape[1]} channels, the engine's {pair.module!r} has {n}", mismatched=(b,)
        )
    limit = options.max_rank if target.max_rank is None else target.max_rank
    if pair.rank > limit:
        raise LoRAError(f"{where}: {a!r} has rank {pair.rank}, at most {limit} is allowed (max_rank)", mismatched=(a, b))


def _scaling(pair: Pair, config: PeftConfig) -> float:
    if not config.covers(pair.module):
        raise LoRAError(f"{config.path}: target_modules does not list {pair.module!r}, but there is {pair.a_name!r}")
    stated = config.rank_of(pair.module)
    if stated != pair.rank:
        raise LoRAError(f"{config.path}: it says rank {stated} for {pair.module!r}, {pair.a_name!r} has {pair.rank}")
    return config.scaling_of(pair.module)


def _piece(pair: Pair, place: Placement) -> Piece:
    columns = pair.b[:, place.source : place.source + place.n]
    return Piece(a=pair.a, b=columns, a_name=pair.a_name, b_name=pair.b_name, column_at=place.column)


def _matrices(target: LoRATarget, pieces: list[tuple[Piece, float]], files: AdapterFiles, options: ReadOptions) -> Matrices:
    """Put pieces side by side; `pieces` are sorted by column."""
    for (left, _), (right, _) in zip(pieces, pieces[1:], strict=False):
        if left.column_at + left.b.shape[1] > right.column_at:
            both = f"{left.a_name!r} and {right.a_name!r}"
            raise LoRAError(f"{files.where}: {both} are for the same columns of {target.name!r}", extra=(right.a_name,))
    rank, room = sum(piece.rank for piece, _ in pieces), target.rank_room(options.max_rank)
    if rank > room:
        names = ", ".join(repr(piece.a_name) for piece, _ in pieces)
        raise LoRAError(
            f"{files.where}: {names} have rank {rank} together, target {target.name!r} has room for {room} (max_rank)",
            mismatched=tuple(piece.a_name for piece, _ in pieces),
        )
    scalings = {scaling for _, scaling in pieces}
    keep = len(scalings) == 1 and not options.fold_scaling  # a target has one scaling: where they differ they go into B
    placed, at = [], 0
    for piece, scaling in pieces:
        placed.append(replace(piece, rank_at=at, factor=1.0 if keep else scaling))
        at += piece.rank
    kept = scalings.pop() if keep else 1.0
    return Matrices(target=target, dtype=options.dtype, pieces=tuple(placed), scaling=kept if pieces else 0.0)


def _hash(matrices: Iterable[Matrices], files: AdapterFiles, options: ReadOptions) -> bytes:
    """Return the content hash; checks every element on the way."""
    found = blake2b(f"numba_kv.lora|{options.dtype}".encode(), digest_size=HASH_NBYTES)
    for one in matrices:
        name = one.target.name
        for piece in one.pieces:
            numbers = (len(name), one.target.k, one.target.n, piece.rank, piece.b.shape[1], piece.rank_at, piece.column_at)
            found.update(f"|{name}|{numbers}|{one.scaling.hex()}|".encode())
            for chunk in piece.checked(options.dtype, files.where, check_finite=options.check_finite):
                found.update(chunk.reshape(-1).view("uint8").data)
    return found.digest()
