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

__all__ = ["build_key", "call_arguments", "unpack_lines"]


def unpack_lines(kernel: Kernel, word: str) -> list[str]:
    """Return one line an argument that makes it from the block; `word` formats word number i."""
    lines, at = [], 1
    for name, argument in kernel.arguments.items():
        if argument.dtype is None:
            lines.append(f"{name} = {word.format(i=at)}")
        else:
            extents = "".join(f"{word.format(i=at + 1 + axis)}, " for axis in range(argument.ndim))
            maker = f"{argument.dtype.storage_name if argument.dtype.is_extension else argument.dtype.name}_{argument.ndim}"
            lines.append(f"{name} = {maker}({word.format(i=at)}, ({extents}))")
        at += argument.words
    return lines


def call_arguments(kernel: Kernel) -> str:
    """Return the arguments of the call to the work item, after the leading ones."""
    return ", ".join(kernel.arguments)


@lru_cache(maxsize=1)
def build_key() -> str:
    """Return a hash of everything that a compiled kernel depends on: the kernels' sources and the compilers' versions."""
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(sys.version.encode())
    for package in ("numba", "llvmlite", "numpy", "numba-cuda", "nvidia-nvvm", "cuda-bindings"):
        try:
            digest.update(f"{package}={version(package)};".encode())
        except PackageNotFoundError:
            digest.update(f"{package}=;".encode())
    return digest.hexdigest()
