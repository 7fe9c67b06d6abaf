"""Adapter files: where the tensors of an adapter are, and which of them are A and B of a module.

Knows both layouts. Does not know what an engine wants. ::

    layout       names                                              A        B        scaling
    reference    the engine's inputs, <module>.lora_A.weight        [k, r]   [r, n]   in B already
    peft         base_model.model.<module>.lora_A.weight            [r, k]   [n, r]   from adapter_config.json
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numba_kv.errors import InputError, LoRAError
from numba_kv.weights.lora_peft import CONFIG_NAME, PeftConfig, read_peft_config
from numba_kv.weights.safetensors_file import SafetensorsFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LAYOUTS", "AdapterFiles", "Pair", "Source", "open_adapter", "pairs_of"]

LAYOUTS = ("auto", "reference", "peft")

#: A file, a folder of PEFT or of the reference's exporter, or the tensors themselves in the reference layout.
Source = str | os.PathLike[str] | Mapping[str, "NDArray[Any]"]

#: In a folder: PEFT's file, the reference exporter's file.
_FILES = {"adapter_model.safetensors": "peft", "processed_adapter_model.safetensors": "reference"}
_PEFT_PREFIX = "base_model.model."
#: PEFT puts the name of the adapter before ``weight`` while it is in memory.
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(\.[^.]+)?\.weight")
_OTHER_KINDS = {
    "lora_magnitude_vector": "a magnitude vector (DoRA)",
    "lora_embedding_": "an adapter of the embedding",
    ".bias": "a bias",
}


@dataclass(frozen=True, kw_only=True)
class AdapterFiles:
    """An adapter's tensors, open for reading.

    Attributes
    ----------
    arrays : mapping of str to array
        By name; they read the mapped file.
    where : str
        Name for messages.
    config : PeftConfig or None
        In PEFT's layout.
    """

    arrays: Mapping[str, NDArray[Any]]
    where: str
    config: PeftConfig | None = None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A and B of one module.

    Attributes
    ----------
    module : str
        Its path, without PEFT's prefix.
    a, b : array [k, r], array [r, n]
        Views.
    a_name, b_name : str
        In the file.
    """

    module: str
    a: NDArray[Any] = field(repr=False)
    b: NDArray[Any] = field(repr=False)
    a_name: str
    b_name: str

    @property
    def rank(self) -> int:
        """Rows of B: r, if A agrees."""
        return int(self.b.shape[0])


def open_adapter(source: Source, layout: str, resources: ExitStack) -> AdapterFiles:
    """Open an adapter; `resources` closes it.

    Parameters
    ----------
    source : path or mapping
        See `Source`.
    layout : {"auto", "reference", "peft"}
        ``"auto"``: by the name of a folder's file; of a file: peft where names begin with ``base_model.model.``.
    resources : ExitStack
        Takes the open file.

    Raises
    ------
    InputError
        If `source` is of another type, or tensors without a file are to be in PEFT's layout.
    WeightError, LoRAError
        If a file is missing, unreadable or damaged, or has no tensors.
    """
    if layout not in LAYOUTS:
        raise InputError(f"layout: {layout!r} is not one of {', '.join(LAYOUTS)}")
    if isinstance(source, Mapping):
        if layout == "peft":
            raise InputError("source: tensors in PEFT's layout need its adapter_config.json; give the folder")
        return _not_empty(AdapterFiles(arrays=dict(source), where="source"))
    try:
        path = os.fspath(source)
    except TypeError:
        path = b""  # type: ignore[assignment]
    if not isinstance(path, str):
        raise InputError(f"source: {source!r} is neither a path nor a mapping of names to arrays")
    if os.path.isdir(path):
        wanted = [name for name, kind in _FILES.items() if layout in ("auto", kind)]
        name = next((name for name in wanted if os.path.lexists(os.path.join(path, name))), None)
        if name is None:
            raise LoRAError(f"{path}: the folder holds no {' and no '.join(wanted)}")
        path, layout = os.path.join(path, name), _FILES[name]
    file = resources.enter_context(SafetensorsFile(path))
    if layout == "auto":
        layout = "peft" if any(name.startswith(_PEFT_PREFIX) for name in file.tensors) else "reference"
    files = _not_empty(AdapterFiles(arrays={name: file.array(name) for name in file.tensors}, where=path))
    if layout == "reference":
        return files
    beside = os.path.join(os.path.dirname(path), CONFIG_NAME)
    if not os.path.lexists(beside):
        raise LoRAError(f"{path}: {CONFIG_NAME} is missing beside it; PEFT's layout has the scaling there")
    return AdapterFiles(arrays=files.arrays, where=path, config=read_peft_config(beside))


def _not_empty(files: AdapterFiles) -> AdapterFiles:
    if not files.arrays:
        raise LoRAError(f"{files.where}: it holds no tensors")
    return files


def pairs_of(files: AdapterFiles, inputs: Mapping[str, tuple[str, str]]) -> list[Pair]:
    """Return A and B of every module.

    Parameters
    ----------
    files : AdapterFiles
        The tensors; each has to be a matrix.
    inputs : mapping of str to (str, str)
        Names of the engine's inputs -> module and ``"A"`` or ``"B"``; used in the reference layout.

    Raises
    ------
    LoRAError
        If a tensor is neither A nor B of a module, or a half is missing or there twice.
    """
    found: dict[str, dict[str, str]] = {}
    for name in files.arrays:
        module, half = _split(name, files, inputs)
        other = found.setdefault(module, {}).setdefault(half, name)
        if other != name:
            raise LoRAError(f"{files.where}: {other!r} and {name!r} are both {half} of {module!r}", extra=(name,))
    for module, halves in found.items():
        if len(halves) < 2:
            have, lack = ("A", "B") if "A" in halves else ("B", "A")
            missing = halves[have].replace(f"lora_{have}", f"lora_{lack}")
            raise LoRAError(f"{files.where}: {halves[have]!r} has no {lack} for {module!r} beside it", missing=(missing,))
    return [_pair(module, halves["A"], halves["B"], files) for module, halves in found.items()]


def _split(name: object, files: AdapterFiles, inputs: Mapping[str, tuple[str, str]]) -> tuple[str, str]:
    if not isinstance(name, str):
        raise InputError(f"source: {name!r} is not the name of a tensor")
    if files.config is None and name in inputs:
        return inputs[name]
    match = _HALF.fullmatch(name)
    if match is None:
        what = next((what for mark, what in _OTHER_KINDS.items() if mark in name), "neither lora_A nor lora_B of a module")
        raise LoRAError(f"{files.where}: {name!r} is {what}; only pairs of A and B are supported", extra=(name,))
    return match["module"].removeprefix(_PEFT_PREFIX), match["half"]


def _pair(module: str, a_name: str, b_name: str, files: AdapterFiles) -> Pair:
    halves = []
    for name in (a_name, b_name):
        array = files.arrays[name]
        shape = getattr(array, "shape", None)
        if shape is None:
            raise InputError(f"source: {name!r} is {type(array).__name__}, a NumPy array is wanted")
        if len(shape) != 2 or not all(shape):
            raise LoRAError(f"{files.where}: {name!r} has shape {list(shape)}, a matrix is wanted", mismatched=(name,))
        halves.append(array if files.config is None else array.T)
    return Pair(module=module, a=halves[0], b=halves[1], a_name=a_name, b_name=b_name)
