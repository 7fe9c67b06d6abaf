"""TensorMap: binding name -> Tensor, for engines whose inputs have names.

Knows names, tensors and when a name may be bound again. Does not know where the tensors come from. (Elsewhere a tensor map is
a descriptor of bulk copies on the device; this is none.)
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING

from numba_kv.bindings.names import Rebind, rebind_rule
from numba_kv.device import Tensor
from numba_kv.dtypes import DType
from numba_kv.errors import InputError, ShapeError, StateError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["BindingSnapshot", "BoundTensor", "TensorMap", "TensorMapView"]


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """What an engine is told of a tensor: `address`, `dtype`, `shape`, and `strides` in elements."""

    address: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BindingSnapshot:
    """What a map held at a moment, for example when a graph was captured. Plain numbers; keeps nothing alive.

    Attributes
    ----------
    tensors : mapping of str to BoundTensor
        In the order of the map.
    """

    tensors: Mapping[str, BoundTensor]


@dataclass(slots=True)
class _Store:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    is_closed: bool = False


class TensorMapView:
    """A map of binding names that can be read. Follows the `TensorMap` it comes from, and is closed with it."""

    def __init__(self, store: _Store) -> None:
        self._store = store

    def get(self, name: str) -> Tensor:
        """Return the tensor of `name`.

        Raises
        ------
        InputError
            If the name is not bound; it says which similar one is.
        StateError
            If the map is closed, or the tensor's memory has been given back.

        Stream: host only.
        """
        tensor = self._bound(name)
        try:
            tensor.check_open()
        except StateError as error:
            raise StateError(f"{name}: {error}") from None
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def keys(self) -> KeysView[str]:
        """Return the names in the order in which they were bound first."""
        return self._tensors.keys()

    def items(self) -> ItemsView[str, Tensor]:
        """Return names and tensors in the order in which the names were bound first."""
        return self._tensors.items()

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` that are not bound, in their order."""
        return tuple(name for name in names if name not in self._tensors)

    def snapshot(self) -> BindingSnapshot:
        """Return what is bound now, addresses and all. Host only."""
        return BindingSnapshot(MappingProxyType({name: _described(tensor) for name, tensor in self._tensors.items()}))

    def changes_since(self, snapshot: BindingSnapshot) -> tuple[str, ...]:
        """Return the names of `snapshot` that are bound to something else now, or not at all.

        A graph that was captured with these bindings may be replayed if there is none.
        """
        tensors = self._tensors
        return tuple(
            name for name, then in snapshot.tensors.items() if name not in tensors or _described(tensors[name]) != then
        )

    @property
    def is_closed(self) -> bool:
        """Whether the map was closed."""
        return self._store.is_closed

    @property
    def _tensors(self) -> dict[str, Tensor]:
        if self._store.is_closed:
            raise StateError("the TensorMap is closed")
        return self._store.tensors

    def _bound(self, name: str) -> Tensor:
        tensors = self._tensors
        try:
            return tensors[name]
        except (KeyError, TypeError):
            close = get_close_matches(name, tensors, n=1, cutoff=0.8) if isinstance(name, str) else []
            hint = f"did you mean {close[0]!r}?" if close else f"{len(tensors)} names are; iterate over the map to see them"
            raise InputError(f"name: {name!r} is not bound; {hint}") from None

    def __repr__(self) -> str:
        state = "closed" if self._store.is_closed else f"{len(self._store.tensors)} names"
        return f"{type(self).__name__}({state})"


class TensorMap(TensorMapView):
    """Binding names and their tensors, in order. Borrows the tensors: `close` forgets them and gives no memory back.

    A name is bound once. What may change when it is bound again is `rebind_rule`'s to say: nothing for pools, states and
    weights; the first extent for inputs of a step, whose address a captured graph has; anything for activations, features,
    adapters and rotary tables. The element type stays in any case.

    Every tensor speaks DLPack, so that a value can be handed to any library as it is.
    """

    def __init__(self) -> None:
        super().__init__(_Store())

    def set(self, name: str, tensor: Tensor) -> None:
        """Bind a name that is not bound.

        Raises
        ------
        InputError
            If the name is bound already or no name, or the tensor is none or on another device than the others.
        StateError
            If the map is closed, or the tensor's memory has been given back.

        Stream: host only.
        """
        tensors = self._tensors
        self._check(name, tensor)
        if name in tensors:
            again = "" if rebind_rule(name) is Rebind.NEVER else "; rebind() replaces it"
            raise InputError(f"name: {name!r} is bound already, to {tensors[name]!r}{again}")
        tensors[name] = tensor

    def rebind(self, name: str, tensor: Tensor) -> None:
        """Bind a name that is bound to another tensor. Its place in the order stays.

        Raises
        ------
        InputError
            If the name is not bound, or may not be bound to another address.
        ShapeError
            If the element type changes, or more of the shape than may.
        StateError
            If the map is closed, or the tensor's memory has been given back.

        Stream: host only.
        """
        self._check(name, tensor)
        _check_rebind(name, self._bound(name), tensor)
        self._tensors[name] = tensor

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Bind several names, those that are bound already by the rules of `rebind`: all of them or, with an error, none.

        Raises
        ------
        InputError, ShapeError, StateError
            As `set` and `rebind`.

        Stream: host only.
        """
        bound = self._tensors
        first = next(iter(tensors.values()), None)
        for name, tensor in tensors.items():
            self._check(name, tensor, first)
            if name in bound:
                _check_rebind(name, bound[name], tensor)
        bound.update(tensors)

    def remove(self, name: str) -> None:
        """Unbind a name. Raises as `get`, except that memory may have been given back."""
        self._bound(name)
        del self._tensors[name]

    def frozen(self) -> TensorMapView:
        """Return the map as something that can only be read; it follows the map."""
        return TensorMapView(self._store)

    def close(self) -> None:
        """Forget every tensor; a second call does nothing. The memory is its owner's to give back."""
        self._store.is_closed = True
        self._store.tensors.clear()

    def _check(self, name: str, tensor: Tensor, first: Tensor | None = None) -> None:
        """Refuse what cannot be bound to any name; `first` is what an empty map compares devices with."""
        if not isinstance(name, str) or not name:
            raise InputError(f"name: {name!r} is not the name of a binding")
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name}: {type(tensor).__name__} is not a Tensor; res.device.tensor() and the caches make them")
        tensor.check_open()
        other = next(iter(self._tensors.values()), tensor if first is None else first)
        if tensor.__dlpack_device__() != other.__dlpack_device__():
            raise InputError(f"{name}: the tensor is on {tensor.device!r}, the others are on {other.device!r}")

    def __enter__(self) -> TensorMap:
        self._tensors  # noqa: B018 - raises if closed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _described(tensor: Tensor) -> BoundTensor:
    return BoundTensor(tensor.address, tensor.dtype, tensor.shape, tensor.strides)


def _check_rebind(name: str, old: Tensor, new: Tensor) -> None:
    rule = rebind_rule(name)
    if rule is Rebind.NEVER and _described(old) != _described(new):
        raise InputError(f"{name}: bound to {old!r} for good, so not to {new!r}; remove() it first, or make another map")
    if rule is Rebind.SIZE and new.address != old.address:
        raise InputError(f"{name}: an input of a step keeps its address, {new!r} has another; make a new map")
    if old.dtype is not new.dtype:
        raise ShapeError(f"{name}: {new.dtype} given, {old.dtype} bound; the element type stays")
    if rule is Rebind.SIZE and (old.shape[1:], old.strides) != (new.shape[1:], new.strides):
        raise ShapeError(f"{name}: {list(new.shape)} given, {list(old.shape)} bound; only the first extent may change")
