"""StepRope: the rotary rows of a step's tokens, gathered on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba_kv.batch.view import StepView
from numba_kv.device import Tensor
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, StateError
from numba_kv.geometry import round_up
from numba_kv.shared_resources import SharedResources
from numba_kv.weights import RopeTable, RowSets

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["StepRope"]


class StepRope:
    """Gathers the rows of every rotary table of a model by the positions of a step. Borrows tables and step arrays.

    Which row set a sequence reads is the caller's choice where a table has several: see `row_sets`.

    Parameters
    ----------
    resources : SharedResources
        Borrowed.
    index : int
        Model; 0 is the base, 1 the draft. A draft without a cache of its own gathers by the positions of the base's step.

    Attributes
    ----------
    tables : tuple of RopeTable
        ``resources.get_rope_tables(index)``: none, one, or those of sliding and of full layers.
    rows : tuple of Tensor
        float32 [T, D] of each table at fixed addresses, T the most tokens of a step; what `bind_rope` takes.
    row_sets : tuple of Tensor or None
        int32 [B] of each table with several row sets: which one each row reads (`RopeTable.set_index`). Those of a multimodal
        table start as one a row; those of a table with short and long factors as -1, which reads zeros, until they are set.
        One memory for all of a model: another StepRope starts them again.

    Raises
    ------
    InputError, StateError
        If `resources` is no SharedResources or is closed, or there is no such model.

    Stream: enqueues the start of `row_sets` and waits. Cost: ``4 * T * D`` bytes a table; compiles on first use.
    """

    def __init__(self, resources: SharedResources, *, index: int = 0) -> None:
        if not isinstance(resources, SharedResources):
            raise InputError(f"resources: {type(resources).__name__} is not a SharedResources")
        if resources.is_closed:
            raise StateError("SharedResources is closed")
        caches = resources.get_caches(index)
        self.tables = resources.get_rope_tables(index)
        self._buffers = buffers = caches.step_buffers
        self._device = resources.device
        self._take = resources.taker(index)
        config = caches.plan.config
        self.row_sets = tuple(self._sets(config.max_batch_size, i, table) for i, table in enumerate(self.tables))
        self._gathers = tuple(
            resources.rope_pool.gather(
                table,
                buffers.positions,
                capacity=config.max_kv_cache_capacity,
                row_sets=None if sets is None else RowSets(buffers.cu_seqlens_q, sets),
                rows=self._rows(i, table),
            )
            for i, (table, sets) in enumerate(zip(self.tables, self.row_sets, strict=True))
        )
        self.rows = tuple(gather.rows for gather in self._gathers)

    def gather(self, view: StepView, *, stream: object | None = None) -> tuple[Tensor, ...]:
        """Gather the rows of a step's tokens; dropped tokens get those of position 0.

        Parameters
        ----------
        view : StepView
            The current step.
        stream : optional
            The resources' own, or one that is being captured; a captured call keeps the number of tokens.

        Returns
        -------
        tuple of Tensor
            float32 [num_tokens, D], views of `rows`.

        Raises
        ------
        InputError
            If `view` is of another batch.
        StateError
            If the resources were closed, or `stream` is a foreign one.

        Stream: enqueues one kernel a table. Cost: no allocation.
        """
        if not isinstance(view, StepView) or view.positions is not self._buffers.positions:
            raise InputError(f"view: {view!r} is not a step of these resources; Batch.step returns one")
        return tuple(gather(view.num_tokens, stream) for gather in self._gathers)

    def set_row_sets(self, values: NDArray[np.int32], table: int = 0) -> None:
        """Set which row set each row reads.

        Parameters
        ----------
        values : int32 [B]
            `RopeTable.set_index` of each row, on the host; a number that the table does not have reads zeros.
        table : int
            Which of `tables`.

        Raises
        ------
        InputError
            If there is no such table, or it has one row set.
        ShapeError
            If `values` is not int32 [B].

        Stream: enqueues a copy and waits.
        """
        sets = self.row_sets[table] if type(table) is int and 0 <= table < len(self.row_sets) else None
        if sets is None:
            raise InputError(f"table: {table!r} is not one with several row sets; the others need none")
        sets.fill_from(values)

    def _rows(self, place: int, table: RopeTable) -> Tensor:
        return self._tensor(f"rope_rows.{place}", "float32", (self._buffers.positions.shape[0], table.config.rotary_dim))

    def _sets(self, rows: int, place: int, table: RopeTable) -> Tensor | None:
        import numpy as np

        if table.sets.shape[0] == 1:
            return None
        found = self._tensor(f"rope_row_sets.{place}", "int32", (rows,))
        one_each = len(table.limits) == 1 and table.num_rows >= rows
        found.fill_from(np.arange(rows, dtype=np.int32) if one_each else np.full(rows, -1, np.int32))
        return found

    def _tensor(self, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        """Return memory of the resources, the same for every StepRope of a model that is made."""
        nbytes = dtype(kind).itemsize
        for extent in shape:
            nbytes *= extent
        return Tensor(self._take(name, round_up(nbytes, 256)), self._device, dtype(kind), shape)

    def __repr__(self) -> str:
        return f"StepRope({len(self.tables)} tables)"
