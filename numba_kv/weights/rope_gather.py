"""RopeGather: the table rows of a step's tokens, by their positions on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.device import Device, Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError
from numba_kv.geometry import check_count
from numba_kv.kernels.rope_tables import gather_rope, gather_rope_sets
from numba_kv.weights.rope_table import RopeTable

if TYPE_CHECKING:
    from numba_kv.kernels.jit import Launch

__all__ = ["RopeGather", "RowSets", "check_gather"]

_MAX_THREADS = 256


class RowSets:
    """Which row set each sequence of a step reads, for tables with several: MRoPE rows, LongRoPE's short and long factors.

    Attributes
    ----------
    cu_seqlens_q : Tensor
        int32 [B + 1]: first token of each sequence; never decreasing.
    row_sets : Tensor
        int32 [B]: `RopeTable.set_index` of each sequence; any other number gives zeros.
    counts : Tensor or None
        int32 [B]: valid tokens of each sequence; those behind them get zeros. None: all are.
    """

    def __init__(self, cu_seqlens_q: Tensor, row_sets: Tensor, counts: Tensor | None = None) -> None:
        self.cu_seqlens_q = cu_seqlens_q
        self.row_sets = row_sets
        self.counts = counts


class RopeGather:
    """A gather that is bound to its arrays. Made by `RopeCache.gather`.

    Attributes
    ----------
    table : RopeTable
        Source.
    rows : Tensor
        float32 [T, D]: row t belongs to token t; zeros where its position is not in the table.
    """

    def __init__(self, device: Device, table: RopeTable, rows: Tensor, positions: Tensor, row_sets: RowSets | None) -> None:
        self.table = table
        self.rows = rows
        self._device = device
        threads = min(_MAX_THREADS, -(-table.config.rotary_dim // 32) * 32)
        values = {"gathered": rows, "positions": positions}
        if row_sets is None:
            source = {"table": _plane(table.tensor)}
            self._launch: Launch = gather_rope.bind(device, {**values, **source}, threads=threads)
            return
        counts = row_sets.counts
        self._launch = gather_rope_sets.bind(
            device,
            {
                **values,
                "table": table.rows,
                "sets": table.sets,
                "cu_seqlens_q": row_sets.cu_seqlens_q,
                "row_sets": row_sets.row_sets,
                "counts": row_sets.row_sets if counts is None else counts,
                "has_counts": int(counts is not None),
            },
            threads=threads,
        )

    def __call__(self, num_tokens: int, stream: object | None = None) -> Tensor:
        """Gather the rows of the first `num_tokens` tokens and return them, float32 [num_tokens, D]; a view of `rows`.

        Parameters
        ----------
        num_tokens : int
            Tokens of the step; a captured call keeps the number.
        stream : stream, optional
            A capturing stream, or the resources' stream (default).

        Raises
        ------
        InputError
            If there are not so many rows.
        StateError
            If the table was closed, or `stream` is another stream.

        Stream: enqueues one kernel. Cost: one read and one write of the rows; no allocation.
        """
        count = check_count("num_tokens", num_tokens, 0, self.rows.shape[0])
        view = self.rows[:count]  # raises after close
        device = self._device
        target = device.stream if stream is None else device.as_capturing_stream(stream)
        with device.active():
            self._launch(count, target)
        return view


def check_gather(table: RopeTable, positions: Tensor, row_sets: RowSets | None, capacity: int) -> None:
    """Refuse what cannot be gathered.

    Raises
    ------
    InputError
        If sequences of `capacity` tokens are longer than the table, or it has several row sets and `row_sets` is None.
    ShapeError
        If an array is not dense int32 of the right shape.
    """
    table.check(0, check_count("capacity", capacity, 1))
    _check("positions", positions, None)
    if row_sets is None:
        if table.sets.shape[0] > 1:
            raise InputError(
                f"row_sets: the table has {table.sets.shape[0]} row sets (sequences up to {table.limits} tokens, "
                f"{table.num_rows} rows); say which one each sequence reads"
            )
        return
    _check("cu_seqlens_q", row_sets.cu_seqlens_q, None)
    batch = row_sets.cu_seqlens_q.shape[0] - 1
    if batch < 1:
        raise ShapeError("cu_seqlens_q: int32 [B + 1] with at least one sequence is wanted")
    _check("row_sets", row_sets.row_sets, batch)
    if row_sets.counts is not None:
        _check("counts", row_sets.counts, batch)


def _check(name: str, tensor: Tensor, extent: int | None) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name}: {type(tensor).__name__} is not a Tensor")
    if tensor.dtype is not dtype("int32") or tensor.ndim != 1 or (extent is not None and tensor.shape != (extent,)):
        wanted = "one axis" if extent is None else f"[{extent}]"
        raise ShapeError(f"{name}: {tensor.dtype} {list(tensor.shape)} given, int32 of {wanted} wanted")


def _plane(tensor: Tensor) -> Tensor:
    """Return ``[1, S, D]`` as ``[S, D]``."""
    return tensor[0]
