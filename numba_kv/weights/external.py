"""ExternalWeightManager: weights that an engine takes as inputs, from checkpoint to device memory to bindings.

Knows the order of things: load, validate, register. Does not know formats (`checkpoint`), conversions (`recipes`) or copies
(`upload`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from numba_kv.device import Device, Memory, Tensor
from numba_kv.device.graph import is_capturing
from numba_kv.errors import CapacityError, InputError, StateError, WeightError
from numba_kv.geometry import round_up
from numba_kv.weights.binding import WeightBinding, WeightInput, check_bindings, check_progress, list_of
from numba_kv.weights.checkpoint import Checkpoint
from numba_kv.weights.recipes import assemble
from numba_kv.weights.upload import STAGING_NBYTES, Progress, Segment, Uploader, lent_uploader

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ExternalWeightManager", "TensorTable", "arena_nbytes", "bindings_of", "layout"]

#: Every weight starts at a multiple of this.
_ALIGNMENT = 256
#: What a call says in a state that it does not want.
_NEXT = {
    "constructed": "load() comes first",
    "loaded": "they are loaded once; validate() comes next",
    "validated": "load(inputs=) or validate() did that, once; register() comes next",
    "closed": "nothing follows; other resources have weights of their own",
}


class TensorTable(Protocol):
    """What weights are registered in: names of bindings and their tensors."""

    def __contains__(self, name: object) -> bool:
        """Return whether `name` is bound."""

    def set(self, name: str, tensor: Tensor) -> None:
        """Bind `name`."""

    def remove(self, name: str) -> None:
        """Unbind `name`."""


class ExternalWeightManager:
    """External weights in one arena of device memory. `take` owns the arena; `close` gives it back early.

    It goes through three states, each once: constructed, loaded, validated; then it can be registered in any number of
    tables. A call that raises leaves the state and the device's memory as they were.

    The weights are copies on every target, also where the file could be mapped: they are writable, aligned to 256 bytes,
    and outlive the file, which may be overwritten or deleted.

    Parameters
    ----------
    device : Device
        Where the weights go.
    take : callable
        ``take(name, nbytes)`` returns device memory; see `SharedResources.take`.
    uploader : Uploader, optional
        Staging to share; None: each load makes its own, and gives it back.
    staging_nbytes : int
        Page-locked host bytes of a load at most, without `uploader`.
    planned_nbytes : int, optional
        What the arena may take at most, as planned: it is taken now. None: what a load needs, then.

    Raises
    ------
    CapacityError
        If the device does not have the planned memory.
    """

    def __init__(
        self,
        device: Device,
        take: Callable[[str, int], Memory],
        *,
        uploader: Uploader | None = None,
        staging_nbytes: int = STAGING_NBYTES,
        planned_nbytes: int | None = None,
    ) -> None:
        self._device = device
        self._take = take
        self._uploader = uploader
        self._staging_nbytes = staging_nbytes
        self._planned_nbytes: int | None = None
        self._memory: Memory | None = None
        if planned_nbytes is not None:
            self._planned_nbytes = round_up(planned_nbytes, _ALIGNMENT)
            self._memory = take("external_weights", self._planned_nbytes)
        self._bindings: tuple[WeightBinding, ...] = ()
        self._tensors: dict[str, Tensor] = {}
        self._state = "constructed"

    @property
    def state(self) -> str:
        """One of ``"constructed"``, ``"loaded"``, ``"validated"``, ``"closed"``."""
        return self._state

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every weight by name, in the order of the bindings or of the files; tied ones share their address."""
        return MappingProxyType(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def embedding(self) -> Tensor | None:
        """The weight with the role ``embedding``, or None."""
        return self._of_role("embedding")

    @property
    def ple_embedding(self) -> Tensor | None:
        """The weight with the role ``ple_embedding``, or None."""
        return self._of_role("ple_embedding")

    def _of_role(self, role: str) -> Tensor | None:
        return next((self._tensors[b.name] for b in self._bindings if b.role == role), None)

    def load(
        self,
        *paths: str | os.PathLike[str],
        bindings: Iterable[WeightBinding] | None = None,
        tied: Mapping[str, str] | None = None,
        required: Iterable[str] = (),
        inputs: Iterable[WeightInput] | None = None,
        check_total_size: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Load weights onto the device.

        Parameters
        ----------
        *paths : path
            Files, indexes or folders, as `Checkpoint.open` takes them.
        bindings : iterable of WeightBinding, optional
            What to make, in order. None: every tensor of the files, under its own name, as it is.
        tied : mapping of str to str, optional
            Without `bindings`: a further name -> the tensor whose memory it shares.
        required : iterable of str
            Without `bindings`: names that the files have to hold.
        inputs : iterable of WeightInput, optional
            What the engine declares: validates before a byte is moved.
        check_total_size : bool
            See `Checkpoint.open`.
        progress : callable, optional
            ``progress(done_nbytes, total_nbytes)``, called on this thread.

        Raises
        ------
        InputError
            If an argument is of another type.
        StateError
            If something is loaded already, or the manager was closed meanwhile.
        WeightError
            If a file is damaged, a weight missing, or not what a recipe or `inputs` wants.
        UnsupportedModelError
            If a recipe is one that only the reference's plugins can read.
        CapacityError
            If the weights are larger than planned, or the device does not have the memory.

        Stream: enqueues on the device's stream and waits. Cost: one allocation unless the arena is there, one copy a staging
        block.
        """
        self._want("constructed")
        check_progress(progress)
        if is_capturing(self._device.stream):
            raise StateError("external weights: the stream is being captured; load them before")
        with ExitStack() as undo, Checkpoint.open(*paths, check_total_size=check_total_size) as checkpoint:
            found = bindings_of(checkpoint, tied, required) if bindings is None else check_bindings(bindings)
            if inputs is not None:
                _compare(inputs, found)
            offsets, nbytes = layout(found)
            self._check_planned(nbytes)
            segments = [
                Segment(begin=offsets[b.name], nbytes=b.nbytes, fill=assemble(b, checkpoint))
                for b in found
                if not b.storage_alias_of
            ]

            def take() -> Memory:
                if self._memory is not None:
                    return self._memory
                memory = self._take("external_weights", max(nbytes, _ALIGNMENT))
                undo.callback(self._give_back, memory)
                return memory

            tensors: dict[str, Tensor] = {}

            def show(memory: Memory) -> None:
                for b in found:
                    tensors[b.name] = Tensor(memory, self._device, b.dtype, b.shape, offset_nbytes=offsets[b.name])

            with lent_uploader(self._uploader, self._device, self._staging_nbytes) as uploader:
                memory = uploader.upload(segments, take, progress, meanwhile=show)
            self._want("constructed")  # another call may have closed it, or loaded, meanwhile
            undo.pop_all()
        self._memory, self._bindings, self._tensors = memory, tuple(found), tensors
        self._state = "loaded" if inputs is None else "validated"

    def validate(self, inputs: Iterable[WeightInput]) -> None:
        """Compare what is loaded with what the engine declares: the same names, shapes and element types.

        Parameters
        ----------
        inputs : iterable of WeightInput
            Every weight that the engine takes from outside, and no other input.

        Raises
        ------
        StateError
            If nothing is loaded, or it is validated already.
        WeightError
            If a weight is missing, not declared, or of another shape or type; carries the names.

        Stream: host only.
        """
        self._want("loaded")
        _compare(inputs, self._bindings)
        self._state = "validated"

    def register(self, table: TensorTable) -> None:
        """Bind every weight that is an input of the engine, once each, in order.

        Raises
        ------
        InputError
            If `table` has not the methods of a `TensorTable`.
        StateError
            If the weights are not validated, or one of the names is bound already; nothing is bound then.

        Stream: host only.
        """
        self._want("validated")
        if isinstance(table, type):
            raise InputError(f"table: the class {table.__name__} given; an object of it is wanted")
        missing = [name for name in ("__contains__", "set", "remove") if not callable(getattr(table, name, None))]
        if missing:
            raise InputError(
                f"table: {type(table).__name__} given, without {' and '.join(missing)}; a TensorMap, or what has its methods"
            )
        names = [binding.name for binding in self._bindings if binding.is_input]
        bound = next((name for name in names if name in table), None)
        if bound is not None:
            raise StateError(f"weight {bound!r} is bound in this table already; weights are registered once a table")
        with ExitStack() as undo:
            for name in names:
                table.set(name, self._tensors[name])
                undo.callback(table.remove, name)
            undo.pop_all()

    def close(self) -> None:
        """Give the memory back; a second call does nothing. Tensors of it raise from now on. Stream: enqueues the free."""
        self._state = "closed"
        memory, self._memory = self._memory, None
        self._tensors, self._bindings = {}, ()
        if memory is not None:
            self._give_back(memory)

    def _check_planned(self, nbytes: int) -> None:
        planned = self._planned_nbytes
        if planned is not None and nbytes > planned:
            raise CapacityError(
                f"external weights: {nbytes} bytes are to be loaded, {planned} are planned; "
                f"make the configuration with external_weights_nbytes={nbytes}",
                needed=nbytes,
                free=planned,
            )

    def _give_back(self, memory: Memory) -> None:
        with self._device.active():
            memory.close(self._device.stream)

    def _want(self, state: str) -> None:
        if self._state != state:
            raise StateError(f"external weights are {self._state}; {_NEXT[self._state]}")

    def __enter__(self) -> ExternalWeightManager:
        if self._state == "closed":
            raise StateError("external weights are closed")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ExternalWeightManager({self._state}, {len(self._tensors)} weights, {self.nbytes} bytes)"


def layout(bindings: Iterable[WeightBinding]) -> tuple[dict[str, int], int]:
    """Return the offset of every weight in the arena, and the arena's bytes. Aliases have their target's offset."""
    offsets: dict[str, int] = {}
    aliases, end = [], 0
    for binding in bindings:
        if binding.storage_alias_of:
            aliases.append(binding)
            continue
        offsets[binding.name] = end
        end = round_up(end + binding.nbytes, _ALIGNMENT)
    offsets.update({alias.name: offsets[alias.storage_alias_of] for alias in aliases})
    return offsets, end


def arena_nbytes(*paths: str | os.PathLike[str]) -> int:
    """Return the device bytes that `ExternalWeightManager.load` takes for the tensors of a checkpoint as they are.

    Parameters
    ----------
    *paths : path
        As `Checkpoint.open`, and its errors.

    Cost: reads the headers alone.
    """
    with Checkpoint.open(*paths) as checkpoint:
        return max(_ALIGNMENT, layout(bindings_of(checkpoint))[1])


def bindings_of(
    checkpoint: Checkpoint, tied: Mapping[str, str] | None = None, required: Iterable[str] = ()
) -> list[WeightBinding]:
    """Return a binding of every tensor of a checkpoint as it is, and of every tied name.

    Raises
    ------
    WeightError
        If a required name is missing, a tied one has a tensor of its own, or its target does not exist.
    """
    missing = tuple(name for name in list_of("required", required, str) if name not in checkpoint)
    if not isinstance(tied, (Mapping, type(None))):
        raise InputError(f"tied: {tied!r} is not a mapping of names to names")
    if missing:
        raise WeightError(f"required: {', '.join(map(repr, missing))} missing from {checkpoint!r}", missing=missing)
    found = [WeightBinding(name=e.name, shape=e.shape, dtype=e.dtype) for e in checkpoint.tensors.values()]
    for name, target in (tied or {}).items():
        if name in checkpoint:
            raise WeightError(f"tied: {name!r} has a tensor of its own in {checkpoint.file_of(name).path}")
        if not isinstance(target, str) or target not in checkpoint:
            raise WeightError(f"tied: {name!r} shares the memory of {target!r}, which is missing", missing=(target,))
        entry = checkpoint.tensors[target]
        found.append(WeightBinding(name=name, shape=entry.shape, dtype=entry.dtype, storage_alias_of=target))
    return check_bindings(found)


def _compare(inputs: Iterable[WeightInput], bindings: Iterable[WeightBinding]) -> None:
    wanted: dict[str, WeightInput] = {}
    for item in list_of("inputs", inputs, WeightInput):
        if wanted.setdefault(item.name, item) is not item:
            raise WeightError(f"inputs: {item.name!r} is declared twice")
    given = {binding.name: binding for binding in bindings if binding.is_input}
    missing = tuple(name for name in wanted if name not in given)
    extra = tuple(name for name in given if name not in wanted)
    wrong = {
        name: f"{name!r} is {given[name].dtype} {list(given[name].shape)}, declared as {item.dtype} {list(item.shape)}"
        for name, item in wanted.items()
        if name in given and (given[name].shape, given[name].dtype) != (item.shape, item.dtype)
    }
    said = [
        *([f"missing: {_some(map(repr, missing))}"] if missing else []),
        *([f"not declared by the engine: {_some(map(repr, extra))}"] if extra else []),
        *([f"mismatched: {_some(wrong.values())}"] if wrong else []),
    ]
    if said:
        raise WeightError(f"external weights: {'; '.join(said)}", missing=missing, extra=extra, mismatched=tuple(wrong))


def _some(texts: Iterable[str]) -> str:
    """Return the first few of many."""
    found = list(texts)
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
