"""Source text of the entry that unpacks a parameter block and calls a kernel's work item."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numba_kv.kernels.jit import Kernel

__all__ = ["array_kinds", "build_key", "call_arguments", "constants_of", "product_name", "unpack_lines"]

_ROOM = Path(__file__).parent
#: Extent of an array whose extent a kernel is not told.
_NO_EXTENT = 1 << 62


def unpack_lines(kernel: Kernel, word: str) -> list[str]:
    """Return one line an argument that makes it from the block; `word` formats word number i.

    An argument's name has ``of_`` in front, which no name of the generated text has.
    """
    lines, at = [], 1
    for name, argument in kernel.arguments.items():
        if argument.value is not None:
            lines.append(f"of_{name} = {argument.value}")
        elif argument.dtype is None:
            lines.append(f"of_{name} = {word.format(i=at)}")
        else:
            extents = "".join(f"{word.format(i=at + 1 + axis)}, " for axis in range(argument.ndim))
            if not argument.has_extent:
                extents = f"{_NO_EXTENT},"
            lines.append(f"of_{name} = {argument.storage_name}_{argument.ndim}({word.format(i=at)}, ({extents}))")
        at += argument.words
    return lines


def array_kinds(kernel: Kernel) -> list[tuple[str, int]]:
    """Return element type and axes of each kind of array that the kernel takes."""
    return sorted({(a.storage_name, a.ndim) for a in kernel.arguments.values() if a.dtype is not None})


def call_arguments(kernel: Kernel) -> str:
    """Return the arguments of the call to the work item, after the leading ones."""
    return ", ".join(f"of_{name}" for name in kernel.arguments)


@lru_cache(maxsize=1)
def build_key() -> str:
    """Return a hash of what every compiled kernel depends on: this room's sources and the compilers' versions."""
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(_ROOM.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(sys.version.encode())
    for package in ("numba", "llvmlite", "numpy", "numba-cuda", "nvidia-nvvm", "cuda-bindings"):
        try:
            digest.update(f"{package}={version(package)};".encode())
        except PackageNotFoundError:
            digest.update(f"{package}=;".encode())
    return digest.hexdigest()


def product_name(kernel: Kernel) -> str:
    """Return a name for products of `kernel`: its own and a hash of what it depends on beside the build key."""
    digest = hashlib.blake2b(digest_size=8)
    declared = [(name, a.storage_name, a.ndim, a.has_extent, a.value) for name, a in kernel.arguments.items()]
    form = (kernel.function.__module__, kernel.function.__qualname__, kernel.block_form, kernel.followed, declared)
    digest.update(repr(form).encode())
    for function in kernel.functions:
        code = function.__code__
        path = Path(code.co_filename)
        digest.update(repr(constants_of(function)).encode())
        if path.parent == _ROOM:
            continue
        digest.update(code.co_code + repr(code.co_consts).encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return f"{kernel.name}_{digest.hexdigest()}"


def constants_of(function: FunctionType) -> list[tuple[str, object]]:
    """Return what a function finds under global names that the compiler takes for constants, with those names.

    Numbers, strings, tuples and arrays, of modules too; of compiled functions that it calls, theirs.
    """
    found: list[tuple[str, object]] = []
    seen: set[int] = set()
    pending = [function]
    while pending:
        for place, value in _globals_of(pending.pop()):
            called = getattr(value, "py_func", None)
            if isinstance(called, FunctionType) and id(called) not in seen:
                seen.add(id(called))
                pending.append(called)
            elif _is_constant(value):
                found.append((place, _shown(value)))
    return found


def _globals_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield each global name of a function, and of functions inside it, with what it finds there; of a module, its own too."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            yield name, value
            if isinstance(value, ModuleType):
                yield from ((f"{name}.{each}", getattr(value, each, None)) for each in code.co_names)


def _is_constant(value: object) -> bool:
    import numpy as np

    return isinstance(value, (bool, int, float, complex, str, bytes, tuple, np.generic, np.ndarray))


def _shown(value: object) -> object:
    import numpy as np

    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return repr(value)
