"""Windows: a destination cut into equal parts, and the segments that reach into each.

Knows ranges. Does not know blocks or threads.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.errors import InputError
from numba_kv.weights.assembly import FileRange

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["GRAIN", "Fill", "Segment", "Windows"]

#: Windows are cut at multiples of this, so that no element is ever split.
GRAIN = 256

#: `fill(out, begin)` writes the segment's bytes from `begin` on into the uint8 array `out`. Runs on any thread.
Fill = Callable[["NDArray[np.uint8]", int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A range of the destination and what fills it.

    Attributes
    ----------
    begin, nbytes : int
        Where in the destination, a multiple of 256, and how much.
    fill : callable
        See `Fill`.
    """

    begin: int
    nbytes: int
    fill: Fill

    @property
    def end(self) -> int:
        """First byte after the segment."""
        return self.begin + self.nbytes


class Windows:
    """Segments cut into windows.

    Parameters
    ----------
    segments : sequence of Segment
        By rising `begin`, not overlapping.
    window_nbytes : int
        A multiple of 256.

    Attributes
    ----------
    nbytes : int
        End of the last segment.
    window_nbytes, count : int
        Bytes of a window, of which the last may have fewer, and how many there are; together they are [0, nbytes).

    Raises
    ------
    InputError
        If the segments overlap, are not sorted or not aligned.
    """

    def __init__(self, segments: Sequence[Segment], window_nbytes: int) -> None:
        self.nbytes = 0
        for segment in segments:
            if segment.begin < self.nbytes or segment.begin % GRAIN or segment.nbytes < 0:
                raise InputError(
                    f"segments: {segment.nbytes} bytes at {segment.begin} overlap, or do not start at a multiple of {GRAIN}"
                )
            self.nbytes = segment.begin + segment.nbytes
        self._segments = _joined(segments)
        self._begins = [s.begin for s in self._segments]
        self.window_nbytes = window_nbytes
        self.count = -(-self.nbytes // window_nbytes)

    def range(self, window: int) -> tuple[int, int]:
        """Return begin and end of a window."""
        begin = window * self.window_nbytes
        return begin, min(begin + self.window_nbytes, self.nbytes)

    def pieces(self) -> NDArray[np.int64]:
        """Return where bytes are to be taken from: int64 [pieces, 4], as `kernels.file_loop.load_windows` takes them.

        Begin and end of each segment, and descriptor and offset of its file; -1 and 0 for what is not simply a file's bytes.
        """
        import numpy as np

        rows = [(s.begin, s.end, *(s.fill.place if isinstance(s.fill, FileRange) else (-1, 0))) for s in self._segments]
        return np.array(rows, np.int64).reshape(-1, 4)

    def fill(self, out: NDArray[np.uint8], begin: int) -> None:
        """Write the destination's bytes from `begin` on into `out`; what belongs to no segment becomes 0."""
        at, end = begin, begin + len(out)
        first = max(0, bisect_right(self._begins, begin) - 1)
        if (
            self._segments and self._begins[first] <= begin and end <= self._segments[first].end
        ):  # most windows are a part of one segment
            self._segments[first].fill(out, begin - self._begins[first])
            return
        for place in range(first, bisect_left(self._begins, end)):
            segment = self._segments[place]
            low, high = max(begin, segment.begin), min(end, segment.end)
            if low >= high:  # the one before `begin` need not reach to it
                continue
            if at < low:
                out[at - begin : low - begin] = 0
            segment.fill(out[low - begin : high - begin], low - segment.begin)
            at = high
        if at < end:
            out[at - begin :] = 0


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments without empty ones, neighbours in one that are neighbours in a file: each is a call to the system."""
    found: list[Segment] = []
    begin = end = 0  # of the segment that grows, which `first` fills
    first: Fill | None = None
    for segment in segments:
        if not segment.nbytes:
            continue
        fill = segment.fill
        if first is None or segment.begin != end or not isinstance(fill, FileRange) or not fill.follows(first, end - begin):
            if first is not None:
                found.append(Segment(begin=begin, nbytes=end - begin, fill=first))
            begin, first = segment.begin, fill
        end = segment.begin + segment.nbytes
    if first is not None:
        found.append(Segment(begin=begin, nbytes=end - begin, fill=first))
    return found
