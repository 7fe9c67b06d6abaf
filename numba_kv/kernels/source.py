"""Source text of the entry that unpacks a parameter block and calls a kernel's work item."""

from __future__ import annotations

import hashlib
import sys
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numba_kv.kernels.jit import Kernel

__all__ = ["array_kinds", "build_key", "call_arguments", "product_name", "unpack_lines"]

_ROOM = Path(__file__).parent
#: Extent of an array whose extent a kernel is not told.
_NO_EXTENT = 1 << 62


def unpack_lines(kernel: Kernel, word: str) -> list[str]:
    """Return one line an argument that makes it from the block; `word` formats word number i."""
    lines, at = [], 1
    for name, argument in kernel.arguments.items():
        if argument.value is not None:
            lines.append(f"{name} = {argument.value}")
        elif argument.dtype is None:
            lines.append(f"{name} = {word.format(i=at)}")
        else:
            extents = "".join(f"{word.format(i=at + 1 + axis)}, " for axis in range(argument.ndim))
            if not argument.has_extent:
                extents = f"{_NO_EXTENT},"
            lines.append(f"{name} = {argument.storage_name}_{argument.ndim}({word.format(i=at)}, ({extents}))")
        at += argument.words
    return lines


def array_kinds(kernel: Kernel) -> list[tuple[str, int]]:
    """Return element type and axes of each kind of array that the kernel takes."""
    return sorted({(a.storage_name, a.ndim) for a in kernel.arguments.values() if a.dtype is not None})


def call_arguments(kernel: Kernel) -> str:
    """Return the arguments of the call to the work item, after the leading ones."""
    return ", ".join(kernel.arguments)


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
        if path.parent == _ROOM:
            continue
        digest.update(code.co_code + repr(code.co_consts).encode())
        if path.is_file():
            digest.update(path.read_bytes())
        numbers = {n: v for n in code.co_names if isinstance(v := function.__globals__.get(n), (int, float))}
        digest.update(repr(numbers).encode())
    return f"{kernel.name}_{digest.hexdigest()}"
