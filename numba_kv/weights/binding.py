"""WeightBinding: one weight that an engine declares, and which tensors of a checkpoint it is made of.

Knows names, shapes and options, checked for themselves. Does not know what the checkpoint holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TypeVar

from numba_kv.dtypes import DType, dtype
from numba_kv.errors import ConfigError, InputError, WeightError

__all__ = ["ROLES", "Shard", "WeightBinding", "WeightInput", "check_bindings", "check_progress", "list_of"]

Item = TypeVar("Item")

#: Weights that are not inputs of the engine alone, and the names that mean the same. At most one each.
ROLES = {"embedding": "__embedding__", "ple_embedding": "__ple_embedding__"}
_ROLE_OF = {name: role for role, name in ROLES.items()}

#: What has to be equal of two weights that share storage.
_SHARED_FIELDS = (
    "shape",
    "dtype",
    "recipe",
    "shard",
    "rank0_only",
    "fill_value",
    "group_size",
    "keys_per_expert",
    "reciprocal",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightInput:
    """A weight as an engine declares it.

    Attributes
    ----------
    name : str
        Of the engine's input.
    shape : tuple of int
        Static extents.
    dtype : DType or str
        Element type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType

    def __post_init__(self) -> None:
        _check_name(self.name)
        object.__setattr__(self, "shape", _shape(self.shape, self.name))
        object.__setattr__(self, "dtype", _dtype(self.dtype, self.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The part of a tensor that one rank of a tensor-parallel group holds.

    Attributes
    ----------
    axis : int
        0, or 1 of a matrix.
    size : int
        Ranks of the group, more than 1.
    rank : int
        This one.
    """

    axis: int
    size: int
    rank: int

    def __post_init__(self) -> None:
        if self.axis not in (0, 1) or self.size < 2 or not 0 <= self.rank < self.size:
            raise WeightError(f"shard: axis {self.axis} of rank {self.rank} in {self.size}; axis 0 or 1, rank < size, size > 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBinding:
    """A weight, and how it is made.

    Attributes
    ----------
    name : str
        Of the engine's input; ``__embedding__`` and ``__ple_embedding__`` are not inputs.
    shape, dtype : tuple of int, DType or str
        What the engine declares.
    recipe : str
        Name in `numba_kv.weights.recipes.RECIPES`; empty: ``identity``.
    keys : tuple of str
        Names in the checkpoint; ``identity`` takes the first that exists. Empty: `name`, or the target's of an alias.
    storage_alias_of : str
        Name of another binding whose memory this one shares (tied weights); everything but the names has to be equal.
    role : {"", "embedding", "ple_embedding"}
        Which table the runtime itself looks tokens up in.
    shard : Shard, optional
        For ``identity``: the part to take.
    rank0_only : bool
        With `shard`: the whole tensor on rank 0, zeros on the others.
    embedding_scale : float
        For ``identity`` of float16: multiplies every element.
    fill_value : float
        For ``fill``.
    group_size : int
        For ``gptq_activation_permutation``.
    keys_per_expert : int
        For the alpha recipes.
    reciprocal : bool
        For the alpha recipes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    recipe: str = "identity"
    keys: tuple[str, ...] = ()
    storage_alias_of: str = ""
    role: str = ""
    shard: Shard | None = None
    rank0_only: bool = False
    embedding_scale: float = 1.0
    fill_value: float = 0.0
    group_size: int = 0
    keys_per_expert: int = 1
    reciprocal: bool = False
    nbytes: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        _check_name(self.name)
        set_ = object.__setattr__
        set_(self, "shape", _shape(self.shape, self.name))
        set_(self, "dtype", _dtype(self.dtype, self.name))
        set_(self, "recipe", self.recipe or "identity")
        keys = tuple(self.keys) if not isinstance(self.keys, str) else (self.keys,)
        set_(self, "keys", keys or (() if self.recipe == "fill" or self.storage_alias_of else (self.name,)))
        set_(self, "nbytes", math.prod(self.shape) * self.dtype.itemsize)
        set_(self, "role", self.role or _ROLE_OF.get(self.name, ""))
        if self.role and self.role not in ROLES:
            raise WeightError(f"weight {self.name!r}: role {self.role!r} is not one of {', '.join(ROLES)}")
        if not math.isfinite(self.embedding_scale):
            raise WeightError(f"weight {self.name!r}: embedding_scale {self.embedding_scale} is not a finite number")
        if not math.isfinite(self.fill_value):
            raise WeightError(f"weight {self.name!r}: fill_value {self.fill_value} is not a finite number")
        if self.shard is not None and self.recipe != "identity":
            raise WeightError(f"weight {self.name!r}: shard is for the recipe identity, this one is {self.recipe!r}")
        if self.rank0_only and self.shard is None:
            raise WeightError(f"weight {self.name!r}: rank0_only needs shard, which says the rank")

    @property
    def is_input(self) -> bool:
        """Whether the engine has an input of this name."""
        return self.name not in ROLES.values()


def list_of(name: str, given: object, kind: type[Item]) -> list[Item]:
    """Return an iterable of `kind` as a list.

    Raises
    ------
    InputError
        If it is something else; it names the argument.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise InputError(f"{name}: {given!r} is not a list of {kind.__name__}")
    found = list(given)
    for item in found:
        if not isinstance(item, kind):
            raise InputError(f"{name}: {item!r} is not a {kind.__name__}")
    return found


def check_progress(progress: object) -> None:
    """Check that what is told of progress can be called, if it is anything.

    Raises
    ------
    InputError
        Otherwise.
    """
    if progress is not None and not callable(progress):
        raise InputError(f"progress: {progress!r} cannot be called; progress(done_nbytes, total_nbytes) or None is wanted")


def check_bindings(bindings: Iterable[WeightBinding]) -> list[WeightBinding]:
    """Return the bindings once names, roles and aliases are sound.

    Raises
    ------
    WeightError
        If a name or role is there twice, or an alias names itself, another alias, nothing, or a weight that differs.
    """
    found = list_of("bindings", bindings, WeightBinding)
    by_name: dict[str, WeightBinding] = {}
    roles: dict[str, str] = {}
    for binding in found:
        if by_name.setdefault(binding.name, binding) is not binding:
            raise WeightError(f"bindings: weight {binding.name!r} is declared twice")
        if binding.role and roles.setdefault(binding.role, binding.name) != binding.name:
            raise WeightError(f"bindings: both {roles[binding.role]!r} and {binding.name!r} have the role {binding.role}")
    for binding in found:
        if binding.storage_alias_of:
            _check_alias(binding, by_name)
    return found


def _check_alias(alias: WeightBinding, by_name: dict[str, WeightBinding]) -> None:
    where = f"weight {alias.name!r}: storage_alias_of {alias.storage_alias_of!r}"
    target = by_name.get(alias.storage_alias_of)
    if target is None:
        raise WeightError(f"{where} is not a declared weight")
    if target is alias or target.storage_alias_of:
        what = "itself" if target is alias else "an alias too"
        raise WeightError(f"{where} is {what}; a weight with bytes of its own is wanted")
    if alias.embedding_scale != 1.0 or target.embedding_scale != 1.0:
        raise WeightError(f"{where}: weights with an embedding_scale cannot share storage")
    for name in _SHARED_FIELDS:
        mine, theirs = getattr(alias, name), getattr(target, name)
        if mine != theirs:
            raise WeightError(f"{where}: {name} {mine} differs from {theirs}")
    if alias.keys and alias.keys != target.keys:
        raise WeightError(f"{where}: keys {', '.join(alias.keys)} differ from {', '.join(target.keys)}")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise WeightError(f"name: {name!r} is not the name of a weight")


def _shape(shape: Sequence[int], name: str) -> tuple[int, ...]:
    try:
        found = tuple([-1 if isinstance(extent, bool) else index(extent) for extent in shape])
    except TypeError:
        found = (-1,)
    if found and min(found) < 0:
        raise WeightError(f"weight {name!r}: shape {shape!r} is not static; integers from 0 on are wanted")
    return found


def _dtype(kind: DType | str, name: str) -> DType:
    try:
        return dtype(kind)
    except ConfigError as error:
        raise WeightError(f"weight {name!r}: {error}") from None
