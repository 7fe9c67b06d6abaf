"""Element types of pools and tables.

Knows names, sizes and how a name maps to a NumPy dtype. Does not import NumPy until an array is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["KV_CACHE_DTYPES", "DType", "dtype"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes
    ----------
    name : str
        The project's name, for example ``"bfloat16"``.
    itemsize : int
        Bytes of one element.
    numpy_name : str
        Name in NumPy or, where NumPy has none, in ml_dtypes.
    storage_name : str
        Integer type of the same size: what kernels that only move bytes and array interfaces see.
    """

    name: str
    itemsize: int
    numpy_name: str
    storage_name: str

    @property
    def is_extension(self) -> bool:
        """Whether NumPy itself lacks the type, so that ml_dtypes brings it."""
        return self.name in _EXTENSIONS

    def numpy(self) -> np.dtype:
        """Return the NumPy dtype (imports NumPy, and ml_dtypes for the types NumPy lacks)."""
        import numpy as np

        if self.is_extension:
            import ml_dtypes

            extension: np.dtype = np.dtype(getattr(ml_dtypes, self.numpy_name))
            return extension
        return np.dtype(self.numpy_name)

    def __str__(self) -> str:
        return self.name


#: Types that NumPy lacks and ml_dtypes brings.
_EXTENSIONS = frozenset({"bfloat16", "float8_e4m3", "float8_e5m2", "float8_e8m0"})

_TYPES = {
    t.name: t
    for t in (
        DType("float32", 4, "float32", "uint32"),
        DType("float16", 2, "float16", "uint16"),
        DType("bfloat16", 2, "bfloat16", "uint16"),
        DType("float8_e4m3", 1, "float8_e4m3fn", "uint8"),
        DType("int64", 8, "int64", "int64"),
        DType("int32", 4, "int32", "int32"),
        DType("int8", 1, "int8", "int8"),
        DType("uint8", 1, "uint8", "uint8"),
        # what checkpoints hold besides
        DType("float64", 8, "float64", "uint64"),
        DType("float8_e5m2", 1, "float8_e5m2", "uint8"),
        DType("float8_e8m0", 1, "float8_e8m0fnu", "uint8"),
        DType("int16", 2, "int16", "int16"),
        DType("uint64", 8, "uint64", "uint64"),
        DType("uint32", 4, "uint32", "uint32"),
        DType("uint16", 2, "uint16", "uint16"),
        DType("bool", 1, "bool", "uint8"),
        DType("complex64", 8, "complex64", "uint64"),
    )
}

#: What a KV pool can be stored as.
KV_CACHE_DTYPES = ("float16", "bfloat16", "float8_e4m3", "float32")

_ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "float8_e4m3fn": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
    "float8_e8m0fnu": "float8_e8m0",
}


def dtype(name: str | DType) -> DType:
    """Return the element type called `name` (project name, or a usual short form such as ``"bf16"``).

    Raises
    ------
    ConfigError
        If the name is not known.
    """
    if isinstance(name, DType):
        return name
    if isinstance(name, str):
        short = name.removeprefix("torch.")
        found = _TYPES.get(_ALIASES.get(short, short))
        if found is not None:
            return found
    raise ConfigError(f"dtype: {name!r} is not an element type; known are {', '.join(_TYPES)}")
