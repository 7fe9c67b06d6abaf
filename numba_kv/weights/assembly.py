"""Assembly: array parts, one after the other, converted and scaled range by range.

Knows how to write any range of the result without making the whole. Does not know why the parts are these.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from numba_kv.errors import WeightError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from numba_kv.dtypes import DType
    from numba_kv.weights.safetensors_file import SafetensorsFile
    from numba_kv.weights.windows import Fill

__all__ = ["Assembly", "FileRange"]


class FileRange:
    """A `Fill` of a file's own bytes from `offset` on. Borrows the file."""

    def __init__(self, file: SafetensorsFile, offset: int) -> None:
        self._file = file
        self._offset = offset

    @property
    def place(self) -> tuple[int, int]:
        """Descriptor of the file, and where in it the bytes begin."""
        return self._file.descriptor, self._offset

    def follows(self, other: Fill, nbytes: int) -> bool:
        """Return whether the bytes are those behind the first `nbytes` of another range."""
        return isinstance(other, FileRange) and other._file is self._file and other._offset + nbytes == self._offset

    def __call__(self, out: NDArray[np.uint8], begin: int) -> None:
        """Write the bytes from `begin` on into `out`."""
        self._file.read_into(out, self._offset + begin)


class Assembly:
    """A `Fill` of parts that follow each other in row-major order.

    Parameters
    ----------
    name : str
        Of the result, for messages.
    dtype : DType
        Element type of the result.
    parts : sequence of arrays
        Any strides; never written.
    scale : float
        Multiplies every element, in float32.
    """

    def __init__(self, name: str, dtype: DType, parts: Sequence[NDArray[Any]], scale: float = 1.0) -> None:
        self._name = name
        self._dtype = dtype
        self._numpy = dtype.numpy()
        self._parts = [part if part.ndim == 2 else _matrix(part) for part in parts if part.size]
        self._ends = list(accumulate(part.size for part in self._parts))
        self._scale = scale

    @staticmethod
    def constant(dtype: DType, value: float) -> Fill:
        """Return a `Fill` of one value."""
        kind = dtype.numpy()

        def fill(out: NDArray[np.uint8], begin: int) -> None:
            out.view(kind)[...] = value

        return fill

    def __call__(self, out: NDArray[np.uint8], begin: int) -> None:
        """Write the result's bytes from `begin` on into `out`; both are whole elements."""
        target = out.view(self._numpy)
        start = begin // self._numpy.itemsize
        at = 0
        place = bisect_right(self._ends, start)
        while at < len(target):
            part = self._parts[place]
            low = start + at - (self._ends[place] - part.size)
            high = min(part.size, low + len(target) - at)
            self._convert(target[at : at + high - low], part, low, high)
            at += high - low
            place += 1

    def _convert(self, target: NDArray[Any], part: NDArray[Any], low: int, high: int) -> None:
        """Write elements [low, high) of a matrix: the rest of a row, whole rows, the start of a row."""
        width = part.shape[1]
        while low < high:
            row, column = divmod(low, width)
            rows = (high - low) // width if column == 0 else 0
            if rows:
                source, count = part[row : row + rows], rows * width
                into = target[:count].reshape(rows, width)
            else:
                count = min(high - low, width - column)
                source, into = part[row, column : column + count], target[:count]
            self._store(into, source)
            target, low = target[count:], low + count

    def _store(self, into: NDArray[Any], source: NDArray[Any]) -> None:
        import numpy as np

        if source.dtype == into.dtype and self._scale == 1.0:
            into[...] = source
            return
        with np.errstate(over="ignore"):  # said below, with the name
            scaled = source if self._scale == 1.0 else source.astype(np.float32) * np.float32(self._scale)
            into[...] = scaled.astype(into.dtype)
        if into.dtype == np.float16:
            lost = np.isinf(into) & np.isfinite(source)
            if lost.any():
                value = float(source[lost].reshape(-1)[0]) * self._scale
                raise WeightError(f"{self._name}: {value} does not fit {self._dtype}")


def _matrix(part: NDArray[Any]) -> NDArray[Any]:
    return part.reshape(-1, part.shape[-1] if part.ndim else 1)
