"""RopeTable: cosines and sines of every position of one rotation, on the device."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from numba_kv.config.rope_axes import has_axes, pair_axes
from numba_kv.config.rope_frequencies import Rotation, rotation_of
from numba_kv.device import Device, Memory, Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import INT32_MAX, check_count
from numba_kv.kernels.rope_tables import fill_rope, fill_rope_axes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from numba_kv.config import RopeConfig
    from numba_kv.config.rope_layout import RopeLayout

__all__ = ["RopeTable", "rotations_of"]


class RopeTable:
    """Rotary table of one configuration and length. Made by `RopeCache`, which borrows its memory to it.

    Attributes
    ----------
    config : RopeConfig
        What it was made of.
    length : int
        S: the longest sequence it serves; positions are 0 to S - 1.
    num_rows : int
        Sequences with positions of their own (MRoPE); else 1.
    rotations : tuple of Rotation
        Frequencies and magnitude of each variant.
    limits : tuple of int
        Longest sequence of each variant. Two for LongRoPE (short factors, long factors) and for dynamic scaling where
        `length` is beyond the limit of the first, else one.
    tensors : tuple of Tensor
        float32 [num_rows, S of the variant, D], each row the cosines of all D/2 pairs, then their sines; magnitude included.
    rows : Tensor
        float32 [all rows, D]: the variants one behind the other.
    sets : Tensor
        int64 [variants * num_rows, 2]: first row and length of each row set; see `set_index`.
    """

    def __init__(self, device: Device, layout: RopeLayout, memory: Memory, rotations: tuple[Rotation, ...]) -> None:
        import numpy as np

        self.config: RopeConfig = layout.config
        self.length = layout.length
        self.num_rows = layout.num_rows
        self.limits = layout.limits
        self.rotations = rotations
        self._device = device
        self._first_rows = layout.first_rows
        parts = {
            name: Tensor(memory, device, dtype(kind), shape, offset_nbytes=at)
            for name, (at, kind, shape) in layout.parts().items()
        }
        self.rows, self.sets = parts["table"], parts["sets"]
        row_nbytes = 4 * self.config.rotary_dim
        self.tensors = tuple(
            Tensor(
                memory, device, dtype("float32"), (self.num_rows, limit, self.config.rotary_dim), offset_nbytes=at * row_nbytes
            )
            for at, limit in zip(self._first_rows, self.limits, strict=True)
        )
        turns = np.array([r.inverse_frequencies for r in rotations], np.float64) / (2.0 * np.pi)
        parts["frequencies"].fill_from(turns)
        parts["magnitudes"].fill_from(np.array([r.magnitude for r in rotations], np.float64))
        parts["axes"].fill_from(np.array(pair_axes(self.config), np.int32))
        sets = [(at + r * s, s) for at, s in zip(self._first_rows, self.limits, strict=True) for r in range(self.num_rows)]
        parts["sets"].fill_from(np.array(sets, np.int64))
        self._constants = {name: parts[name] for name in ("frequencies", "magnitudes")}
        self._axes = parts["axes"]
        self.fill()

    def fill(self) -> None:
        """Write every row set from positions 0, 1, 2, ... Stream: enqueues one kernel a variant."""
        scalars = {"variant": 0, "first_row": 0, "length": 1}
        launch = fill_rope.bind(self._device, {"table": self.rows, **self._constants, **scalars})
        for variant, (at, limit) in enumerate(zip(self._first_rows, self.limits, strict=True)):
            items = self.num_rows * limit * (self.config.rotary_dim // 2)
            launch(items, self._device.stream, variant=variant, first_row=at, length=limit)

    @property
    def tensor(self) -> Tensor:
        """The table of sequences of the full length, float32 [num_rows, S, D]."""
        return self.tensors[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all variants' rows."""
        return self.rows.nbytes

    def variant(self, length: int) -> int:
        """Return which variant a sequence uses that will have `length` tokens in the end.

        Raises
        ------
        InputError
            If the table is shorter.
        """
        number = check_count("length", length, 0)
        self.check(0, number)
        return bisect_left(self.limits, number)

    def for_sequence(self, length: int) -> Tensor:
        """Return the tensor of a sequence that will have `length` tokens in the end; errors as `variant`."""
        return self.tensors[self.variant(length)]

    def set_index(self, length: int, row: int = 0) -> int:
        """Return the number of the row set of a sequence of `length` tokens in row `row`: what `gather` takes as `row_sets`."""
        return self.variant(length) * self.num_rows + check_count("row", row, 0, self.num_rows - 1)

    def check(self, start: int, num_tokens: int) -> None:
        """Refuse positions behind the end of the table.

        Raises
        ------
        InputError
            If ``start + num_tokens`` is above `length`; it names both.
        """
        first, count = check_count("start", start, 0), check_count("num_tokens", num_tokens, 0)
        if first + count > self.length:
            raise InputError(
                f"rope table: positions {first} to {first + count} are wanted, it has {self.length}; "
                "make a table of the longest sequence of all that use it"
            )

    def slice(self, start: int, num_tokens: int, *, length: int | None = None, row: int = 0) -> Tensor:
        """Return the rows of neighbouring positions, float32 [num_tokens, D]; a view.

        Parameters
        ----------
        start, num_tokens : int
            First position and how many.
        length : int, optional
            Tokens that the sequence will have in the end, which decides the variant; default: up to the last position here.
        row : int
            Row set of a multimodal table.

        Raises
        ------
        InputError
            If the table, or the variant of `length`, ends before.
        """
        self.check(start, num_tokens)
        final = start + num_tokens if length is None else length
        if final < start + num_tokens:
            raise InputError(f"length: {final} tokens in the end, but position {start + num_tokens - 1} is wanted")
        tensor = self.for_sequence(final)
        return tensor[check_count("row", row, 0, self.num_rows - 1), start : start + num_tokens]

    def set_positions(self, rows: ArrayLike, position_ids: ArrayLike) -> None:
        """Write row sets of a multimodal table from positions of their own.

        Parameters
        ----------
        rows : int [K]
            Row sets to write, each once.
        position_ids : int or float [K, 3, n]
            Time, height and width of each of the first n places; fractional times are fine. The places behind them go on from
            the largest position + 1, on all axes alike, as text does.

        Raises
        ------
        InputError, ShapeError
            If the configuration has no ``mrope_section``, or the arrays do not fit each other and the table, or hold what is no
            position.

        Stream: enqueues one kernel a variant and waits for one copy. Cost: one copy of the positions and one allocation,
        given back in stream order; not for a capture.
        """
        import numpy as np

        numbers, ids = np.atleast_1d(np.asarray(rows)), np.asarray(position_ids)
        if not has_axes(self.config):
            raise InputError(
                f"set_positions: the {self.config.rope_type} rope has no mrope_section; its positions have one axis"
            )
        if numbers.ndim != 1 or ids.ndim != 3 or ids.shape[:2] != (len(numbers), 3) or not 1 <= ids.shape[2] <= self.length:
            raise ShapeError(
                f"position_ids: shape {ids.shape} for {numbers.shape} rows; [rows, 3, 1 to {self.length} places] is wanted"
            )
        for row in numbers.tolist():
            check_count("rows", row, 0, self.num_rows - 1)
        if len(set(numbers.tolist())) != len(numbers):
            raise InputError(f"rows: {numbers.tolist()} names a row twice")
        if ids.dtype.kind not in "iuf" or not np.isfinite(ids).all() or np.abs(ids.astype(np.float64)).max() > INT32_MAX:
            raise InputError(f"position_ids: {ids.dtype} values that are no finite numbers up to {INT32_MAX}")
        with self._device.active():
            self._write_positions(numbers.astype(np.int64), ids.astype(np.float64))

    def _write_positions(self, rows: Any, ids: Any) -> None:
        import numpy as np

        device = self._device
        self.rows.check_open()
        following = np.floor(ids.max(axis=(1, 2))) + 1.0
        # one block, one copy; the integers travel as the bits that they are
        words = np.concatenate([ids.ravel(), following, rows.view(np.float64)])
        memory = device.allocate(words.nbytes)
        try:
            Tensor(memory, device, dtype("float64"), words.shape).fill_from(words)
            launch = fill_rope_axes.bind(
                device,
                {
                    "table": self.rows,
                    **self._constants,
                    "axes": self._axes,
                    "positions": Tensor(memory, device, dtype("float64"), ids.shape),
                    "next_positions": Tensor(memory, device, dtype("float64"), following.shape, offset_nbytes=ids.nbytes),
                    "rows": Tensor(memory, device, dtype("int64"), rows.shape, offset_nbytes=ids.nbytes + following.nbytes),
                    "variant": 0,
                    "first_row": 0,
                    "length": 1,
                },
            )
            for variant, (at, limit) in enumerate(zip(self._first_rows, self.limits, strict=True)):
                items = len(rows) * limit * (self.config.rotary_dim // 2)
                launch(items, device.stream, variant=variant, first_row=at, length=limit)
        finally:
            memory.close(device.stream)

    def __repr__(self) -> str:
        return f"RopeTable({self.config.rope_type}, {list(self.tensor.shape)})"


def rotations_of(layout: RopeLayout) -> tuple[Rotation, ...]:
    """Return the rotation of each variant, everything of the configuration checked. Host only."""
    pair_axes(layout.config)
    return tuple(rotation_of(layout.config, limit) for limit in layout.limits)
