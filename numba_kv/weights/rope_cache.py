"""RopeCache: the rotary tables of a process, each built once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numba_kv.config import LLMEngineConfig, RopeConfig
from numba_kv.config.rope_axes import has_axes
from numba_kv.config.rope_layout import RopeLayout, engine_layouts
from numba_kv.device import Device, Tensor
from numba_kv.device.graph import is_capturing
from numba_kv.dtypes import dtype
from numba_kv.errors import InputError, ShapeError, StateError
from numba_kv.geometry import check_count, round_up
from numba_kv.weights.rope_gather import RopeGather, RowSets, check_gather
from numba_kv.weights.rope_table import RopeTable, rotations_of

if TYPE_CHECKING:
    from numba_kv.device import Memory

__all__ = ["RopeCache", "RopeStats"]


@dataclass(frozen=True, slots=True)
class RopeStats:
    """What a RopeCache holds and did.

    Attributes
    ----------
    tables, nbytes : int
        Tables held, and the device memory taken for them and for gathered rows.
    built, found : int
        Requests that built a table, and that were answered by one already there.
    """

    tables: int
    nbytes: int
    built: int
    found: int


class RopeCache:
    """Rotary tables by configuration, length and number of row sets.

    A table is never changed, moved or dropped until `close`: a longer one is a new one, and what was captured with the old one
    stays valid.

    Parameters
    ----------
    device : Device
        Where the tables are.
    take : callable
        ``take(name, nbytes)`` gives device memory; its owner gives it back.
    """

    def __init__(self, device: Device, take: Callable[[str, int], Memory]) -> None:
        self._device = device
        self._take = take
        self._tables: dict[tuple[RopeConfig, int, int], RopeTable] = {}
        self._lock = threading.RLock()
        self._nbytes = self._built = self._found = 0
        self._closed = False

    def table(self, config: RopeConfig, length: int, *, num_rows: int = 1) -> RopeTable:
        """Return the table of a rotation for sequences of up to `length` tokens; builds it at the first request.

        Parameters
        ----------
        config : RopeConfig
            The whole record is the key.
        length : int
            S: the longest sequence of all that will use it, which may be more than the model was made for.
        num_rows : int
            Row sets of a multimodal table, each with positions of its own; they start as those of text.

        Raises
        ------
        ConfigError
            If the rotation is unknown or wrong.
        InputError
            If `length` or `num_rows` is out of range.
        CapacityError
            If the device has not the memory.
        StateError
            After `close`, or if a table would have to be built while the stream is being captured.

        A call that raises adds no table. Stream: enqueues the copies of the constants, which it waits for, and one kernel a
        variant. Cost: `RopeLayout.nbytes` of device memory.
        """
        if not isinstance(config, RopeConfig):
            raise InputError(f"config: {type(config).__name__} given, a RopeConfig is wanted")
        size, rows = check_count("length", length, 1), check_count("num_rows", num_rows, 1)
        if rows > 1 and not has_axes(config):
            raise InputError(f"num_rows: {rows} row sets of a {config.rope_type} rope without mrope_section are alike; 1 does")
        with self._lock:
            self._check_open()
            found = self._tables.get((config, size, rows))
            if found is not None:
                self._found += 1
                return found
            made = self._build(RopeLayout(config=config, length=size, num_rows=rows))
            self._tables[config, size, rows] = made
            self._built += 1
            return made

    def _build(self, layout: RopeLayout) -> RopeTable:
        rotations = rotations_of(layout)
        if is_capturing(self._device.stream):
            raise StateError(f"rope table of {layout.length} positions: not built yet; request it once before the capture")
        with self._device.active():
            memory = self._take("rope", layout.nbytes)
            table = RopeTable(self._device, layout, memory, rotations)
            self._nbytes += layout.nbytes
            return table

    def for_engine(self, config: LLMEngineConfig, *, mrope_rows: int | None = None) -> tuple[RopeTable, ...]:
        """Return the tables of an engine: one for each of its ropes, as long as its capacity.

        Models whose sliding and full layers rotate differently have two, sliding first, as `LLMEngineConfig.ropes` has them;
        models that do not rotate have none. `engine_layouts` tells their memory before.

        Parameters
        ----------
        config : LLMEngineConfig
            The engine.
        mrope_rows : int, optional
            Row sets of a multimodal table; default: one a row of the batch.

        Raises
        ------
        ConfigError, InputError, CapacityError, StateError
            As `table`.
        """
        layouts = engine_layouts(config, mrope_rows=mrope_rows)
        for layout in layouts:
            rotations_of(layout)  # refuse before the first is built
        return tuple(self.table(layout.config, layout.length, num_rows=layout.num_rows) for layout in layouts)

    def gather(
        self,
        table: RopeTable,
        positions: Tensor,
        *,
        capacity: int,
        row_sets: RowSets | None = None,
        rows: Tensor | None = None,
    ) -> RopeGather:
        """Bind a gather of table rows by position.

        Parameters
        ----------
        table : RopeTable
            Source.
        positions : Tensor
            int32 [T]: position of each token of a step, ragged rows one behind the other, as `StepView.positions`.
        capacity : int
            Most tokens of a sequence: no position reaches it.
        row_sets : RowSets, optional
            Which row set each sequence reads; needed if the table has several.
        rows : Tensor, optional
            float32 [T, D]: where the rows go; default: memory of the cache.

        Raises
        ------
        InputError
            If the table is shorter than `capacity`.
        ShapeError
            If an array is not of the shape or type above.
        StateError
            After `close`, or while the stream is being captured.

        Stream: host only. Cost: `T * D * 4` bytes without `rows`; compiles on first use.
        """
        if not isinstance(table, RopeTable):
            raise InputError(f"table: {type(table).__name__} given, a RopeTable is wanted")
        check_gather(table, positions, row_sets, capacity)
        shape = (positions.shape[0], table.config.rotary_dim)
        if rows is not None and (not isinstance(rows, Tensor) or rows.shape != shape or rows.dtype is not dtype("float32")):
            raise ShapeError(f"rows: {rows!r} given, float32 {list(shape)} wanted")
        with self._lock:
            self._check_open()
            if is_capturing(self._device.stream):
                raise StateError("gather: bind it once before the capture, and call it there")
            with self._device.active():
                if rows is None:
                    nbytes = round_up(max(1, 4 * shape[0] * shape[1]), 256)
                    rows = Tensor(self._take("rope_rows", nbytes), self._device, dtype("float32"), shape)
                    self._nbytes += nbytes
                return RopeGather(self._device, table, rows, positions, row_sets)

    @property
    def stats(self) -> RopeStats:
        """Counts so far."""
        with self._lock:
            return RopeStats(len(self._tables), self._nbytes, self._built, self._found)

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self._tables)

    def close(self) -> None:
        """Forget the tables and refuse further requests; a second call does nothing. The memory is its owner's to give back."""
        with self._lock:
            self._closed = True
            self._tables.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("RopeCache is closed")

    def __repr__(self) -> str:
        return f"RopeCache({len(self)} tables, {self._device.target})"
