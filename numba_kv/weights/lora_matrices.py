"""The matrices of one target of one adapter, as rows of the wanted type.

Knows how pieces of an adapter lie in A and B. Does not know names or files. Two adapters in one fused projection (those of
q and v in q, k, v)::

    A [k, R]   | A of q | A of v | 0 |        B [R, n]   | B of q |   0    |   0    |
                                                         |   0    |   0    | B of v |
                                                         |   0    |   0    |   0    |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_kv.config.lora_target import LoRATarget
from numba_kv.dtypes import DType
from numba_kv.errors import LoRAError
from numba_kv.geometry import ceil_div

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from numba_kv.weights.upload import Fill

__all__ = ["Matrices", "Piece", "filler"]

#: Bytes of a matrix that are converted at a time when it is checked.
_CHUNK_NBYTES = 4 << 20
#: Bits of an exponent that is all ones: an infinity or NaN.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}

#: `rows(low, high)` returns rows [low, high) of a matrix. Runs on any thread.
Rows = Callable[[int, int], "NDArray[Any]"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """A pair of matrices of an adapter, or columns of one.

    Attributes
    ----------
    a, b : array [k, r], array [r, columns]
        Views of the file.
    a_name, b_name : str
        Where they come from, for messages.
    column_at, rank_at : int
        Where they go in the target's matrices.
    factor : float
        What B is multiplied by.
    """

    a: NDArray[Any]
    b: NDArray[Any]
    a_name: str
    b_name: str
    column_at: int
    rank_at: int = 0
    factor: float = 1.0

    @property
    def rank(self) -> int:
        """Columns of A and rows of B: r."""
        return int(self.b.shape[0])

    def checked(self, dtype: DType, where: str, *, check_finite: bool) -> Iterator[NDArray[Any]]:
        """Yield A, then B, in chunks of rows as they will be on the device; `where` is for messages.

        Raises
        ------
        LoRAError
            If an element does not fit `dtype`, or, with `check_finite`, is infinite or NaN.
        """
        for name, source, factor in ((self.a_name, self.a, 1.0), (self.b_name, self.b, self.factor)):
            step = max(1, _CHUNK_NBYTES // max(1, source.shape[1] * dtype.itemsize))
            for low in range(0, source.shape[0], step):
                part = source[low : low + step]
                found = np.ascontiguousarray(_convert(part, factor, dtype))
                bad = _non_finite(found, dtype)
                if bad is not None and not check_finite:
                    bad &= np.isfinite(part)
                if bad is not None and bad.any():
                    raise _refusal(where, name, float(part[bad][0]), factor, dtype)
                yield found


@dataclass(frozen=True, kw_only=True, eq=False)
class Matrices:
    """A and B of one target.

    Attributes
    ----------
    target : LoRATarget
        Of the engine.
    dtype : DType
        Wanted element type.
    pieces : tuple of Piece
        Side by side; empty: zeros.
    scaling : float
        What the engine multiplies by: 1 where that is in B already, 0 without pieces.
    """

    target: LoRATarget
    dtype: DType
    pieces: tuple[Piece, ...] = ()
    scaling: float = 0.0

    @property
    def rank(self) -> int:
        """Rank of all pieces together."""
        return sum(piece.rank for piece in self.pieces)

    def a_rows(self, width: int) -> Rows:
        """Return the rows of A [k, width]; columns from `rank` on are zeros."""

        def rows(low: int, high: int) -> NDArray[Any]:
            out = np.zeros((high - low, width), self.dtype.numpy())
            for piece in self.pieces:
                out[:, piece.rank_at : piece.rank_at + piece.rank] = _convert(piece.a[low:high], 1.0, self.dtype)
            return out

        return rows

    def b_rows(self) -> Rows:
        """Return the rows of B [any, n]; rows from `rank` on are zeros."""

        def rows(low: int, high: int) -> NDArray[Any]:
            out = np.zeros((high - low, self.target.n), self.dtype.numpy())
            for piece in self.pieces:
                first, last = max(low, piece.rank_at), min(high, piece.rank_at + piece.rank)
                if first < last:
                    source = piece.b[first - piece.rank_at : last - piece.rank_at]
                    columns = slice(piece.column_at, piece.column_at + piece.b.shape[1])
                    out[first - low : last - low, columns] = _convert(source, piece.factor, self.dtype)
            return out

        return rows


def filler(rows: Rows, width: int, dtype: DType) -> Fill:
    """Return a `Fill` of a dense matrix with `width` columns; a range of bytes may begin and end inside a row."""

    def fill(out: NDArray[np.uint8], begin: int) -> None:
        first, count = begin // dtype.itemsize, len(out) // dtype.itemsize
        low, high = first // width, ceil_div(first + count, width)
        skip = first - low * width
        out[...] = rows(low, high).reshape(-1)[skip : skip + count].view(np.uint8)

    return fill


def _convert(source: NDArray[Any], factor: float, dtype: DType) -> NDArray[Any]:
    """Return `source` times `factor` as `dtype`: a new array, or `source` itself if nothing changes."""
    wanted = dtype.numpy()
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is told by `Piece.checked`
        if factor != 1.0:
            wide = np.float64 if source.dtype.itemsize > 4 else np.float32
            source = source.astype(wide) * wide(factor)
        return source if source.dtype == wanted else source.astype(wanted)


def _non_finite(values: NDArray[Any], dtype: DType) -> NDArray[Any] | None:
    """Return which elements of a dense array are infinite or NaN, or None if none is."""
    ones = _EXPONENTS[dtype.name]
    bits = values.view(dtype.storage_name if dtype.is_extension else f"uint{8 * dtype.itemsize}")
    found = (bits & bits.dtype.type(ones)) == ones
    return found if found.any() else None


def _refusal(where: str, name: str, value: float, factor: float, dtype: DType) -> LoRAError:
    if not math.isfinite(value):
        return LoRAError(f"{where}: {name!r} holds {value}, which is no finite number", mismatched=(name,))
    times = f" times the scaling {factor:g}" if factor != 1.0 else ""
    return LoRAError(f"{where}: {name!r} holds {value:g}, which{times} does not fit {dtype}", mismatched=(name,))
