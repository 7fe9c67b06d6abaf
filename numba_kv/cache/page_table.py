"""KVPageTable: the host-owned map from (slot, logical page) to a physical page, and its copy on the device.

Knows who may write (the host, or a borrower after `lend`), what is sent and when. The entries themselves are kept by
`HostTable`; pools and lengths are unknown here. Rows never move: there is no compaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from numba_kv.cache.device_table import DeviceTable, runs_of
from numba_kv.cache.host_table import HostTable, check_integer
from numba_kv.cache.row_gather import RowGather
from numba_kv.device import Device, Tensor
from numba_kv.device.guard import CallGuard
from numba_kv.device.unique import Unique
from numba_kv.errors import InputError, InvariantError, StateError
from numba_kv.geometry import INT32_MAX, MAX_POOL_PAGES

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["KVPageTable"]


class KVPageTable(Unique):
    """Page table of one window group: int32 ``[max_batch, 2, L]``, K ids in half 0, V ids in half 1.

    An unused entry is -1 in both halves, a used one is K in ``0..num_pages - reserved_pages - 1`` and V = K + `num_pages`.
    The host is the authority; the device copy changes only in `upload` and `upload_dirty`. The first of either sends
    the whole state, whatever was set and cleared before. A page may be live in several slots, but only once in a slot (the
    reference checks that in sparse mode alone; a row that holds a page twice overwrites its own keys in any mode).

    Calls work from any thread, one at a time: a call during another one raises StateError and changes nothing.

    Parameters
    ----------
    device : Device
        Where the copy lives.
    max_batch : int
        Slots, B.
    max_pages_per_seq : int
        Logical pages of a row, w.
    num_pages : int
        Pages of the pool, N, with the reserved ones.
    mode : {"dense", "sparse"}
        Dense rows have no hole (checked when they are uploaded); sparse rows (sliding windows) may.
    reserved_pages : int
        How many of the last ids never appear in the table; all of them where a group has no layers.
    tensor : Tensor, optional
        Device memory to use: dense int32 ``[max_batch, 2, L]`` with L >= w; columns from w on stay -1. Borrowed.
        Without it the table owns one with L = w.
    name : str
        What messages call the table.

    Attributes
    ----------
    last_upload_entries, last_upload_ranges : int
        int32 entries and contiguous ranges of the last upload.

    Raises
    ------
    InputError
        If a number is out of range or the mode is unknown.
    ShapeError
        If `tensor` does not fit.

    Cost: one device allocation unless `tensor` is given; page-locked memory at the first upload.
    Source: TensorRT Edge-LLM's page table, with complete first uploads, staging that does not stall and checked slots.
    """

    def __init__(
        self,
        device: Device,
        max_batch: int,
        max_pages_per_seq: int,
        num_pages: int,
        mode: Literal["dense", "sparse"] = "dense",
        *,
        reserved_pages: int = 0,
        tensor: Tensor | None = None,
        name: str = "page table",
    ) -> None:
        if not isinstance(device, Device):
            raise InputError(f"device: {type(device).__name__} is not a Device")
        if mode not in ("dense", "sparse"):
            raise InputError(f"mode: {mode!r} is not 'dense' or 'sparse'")
        self._mode = mode
        self._name = name
        self._max_batch = check_integer("max_batch", max_batch, 1, INT32_MAX)
        self._width = check_integer("max_pages_per_seq", max_pages_per_seq, 1, INT32_MAX)
        self._num_pages = check_integer("num_pages", num_pages, 1, MAX_POOL_PAGES)
        usable = self._num_pages - check_integer("reserved_pages", reserved_pages, 0, self._num_pages)
        self._copy = DeviceTable(device, self._max_batch, self._width, tensor)
        stored_width = self._copy.tensor.shape[2]
        self._host = HostTable(self._max_batch, self._width, stored_width, self._num_pages, usable, sparse=mode == "sparse")
        self._gather = RowGather(self._copy.tensor)
        self._is_identity = False
        self._owner: str | None = None
        self._loan: object = None
        self._device = device
        self._guard = CallGuard(device, name, poisons=False)  # rows count as sent only once their copies are enqueued
        self.last_upload_entries = 0
        self.last_upload_ranges = 0

    # -- what it is

    @property
    def max_batch(self) -> int:
        """Slots, B."""
        return self._max_batch

    @property
    def max_pages_per_seq(self) -> int:
        """Logical pages of a row, w."""
        return self._width

    @property
    def num_pages(self) -> int:
        """Pages of the pool, N, with the reserved ones; V = K + N."""
        return self._num_pages

    @property
    def mode(self) -> Literal["dense", "sparse"]:
        """Whether rows may have holes."""
        return self._mode

    @property
    def name(self) -> str:
        """What messages call the table."""
        return self._name

    @property
    def tensor(self) -> Tensor:
        """The copy on the device, int32 ``[max_batch, 2, L]``; its address never changes. Undefined before the first upload."""
        self._guard.check_open()
        return self._copy.tensor

    @property
    def is_identity(self) -> bool:
        """Whether `set_identity` was the last mutator. False does not mean that the layout differs."""
        return self._is_identity

    @property
    def is_lent(self) -> bool:
        """Whether somebody else writes the device copy."""
        return self._owner is not None

    @property
    def host_entries(self) -> NDArray[np.int32]:
        """Both halves on the host, int32 ``[max_batch, 2, L]``: a read-only view that follows later changes."""
        self._guard.check_open()
        view: NDArray[np.int32] = self._host.entries.view()
        view.flags.writeable = False
        return view

    def row(self, slot: int) -> NDArray[np.int32]:
        """Return the K ids of a slot on the host, int32 ``[w]``: a read-only view that follows later changes."""
        return self.host_entries[self._host.check_slot(slot), 0, : self._width]

    # -- mutators: host only; everything is checked before anything changes

    def set_identity(self) -> None:
        """Map page ``slot * w + logical`` everywhere.

        Raises
        ------
        InputError
            If the pool has fewer than ``max_batch * w`` pages that are not reserved.
        """
        with self._guard.host:
            self._check_host_owned("set_identity")
            self._host.set_identity()
            self._is_identity = True

    def set_row(self, slot: int, ids: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Map the first ``len(ids)`` logical pages of a slot and unmap the rest.

        Raises
        ------
        InputError
            If the slot or an id is out of range, there are more than w ids, or a page is given twice. -1 is an id in sparse
            mode only.
        """
        self._set_rows("set_row", [(slot, ids)])

    def set_rows(self, rows: Iterable[tuple[int, Sequence[int] | NDArray[np.integer[Any]]]]) -> None:
        """Do `set_row` for pairs (slot, ids), all or none; no ids clear a slot.

        Raises
        ------
        InputError
            As `set_row`, or if a slot is given twice.
        """
        self._set_rows("set_rows", rows)

    def set_entry(self, slot: int, logical: int, page: int) -> None:
        """Map one logical page. A hole that this leaves in a dense row is refused by the next upload.

        Raises
        ------
        InputError
            If an index or the page is out of range, or the page is live elsewhere in the slot.
        """
        with self._guard.host:
            self._check_host_owned("set_entry")
            self._host.set_entry(slot, logical, page)
            self._is_identity = False

    def clear_entry(self, slot: int, logical: int) -> None:
        """Unmap one logical page, if it is mapped.

        Raises
        ------
        InputError
            If an index is out of range.
        """
        with self._guard.host:
            self._check_host_owned("clear_entry")
            self._host.clear_entry(slot, logical)
            self._is_identity = False

    def check_invariants(self) -> None:
        """Check every entry on the host.

        Raises
        ------
        InvariantError
            For the first violation, with its slot and logical page.
        """
        with self._guard.host:
            self._check(None)

    # -- uploads

    def upload(self, stream: object | None = None) -> bool:
        """Send the rows that changed since the last upload; the first time all of them.

        Returns
        -------
        bool
            False if there was nothing to send; the counters then keep their values.

        Raises
        ------
        InvariantError
            If a row to be sent is wrong (a dense row with a hole). Nothing is sent and the rows stay changed.

        Stream: enqueues on `stream` (default: the device's own), behind earlier uploads on other streams.
        """
        with self._guard:
            self._check_host_owned("upload")
            slots = self._host.changed_slots() if self._copy.was_written else np.arange(self._max_batch)
            if not slots.size:
                return False
            self._check(slots)  # the other rows passed when they were sent, and have not changed
            pitch = 2 * self._host.stored_width
            runs = runs_of(slots)
            self._copy.send(self._host.entries, [(first * pitch, count * pitch) for first, count in runs], stream)
            self._host.mark_uploaded(slots)
            self.last_upload_entries, self.last_upload_ranges = slots.size * pitch, len(runs)
            return True

    def upload_dirty(self, stream: object | None = None) -> bool:
        """Send exactly the entries that changed since the last upload; the first time on top of a table of -1.

        One logical page is two ranges, one in each half; neighbours share a range.

        Returns
        -------
        bool
            Whether anything was enqueued. The counters are those of the changed entries, 0 and 0 if there were none.

        Raises
        ------
        InvariantError
            In dense mode, if a changed row has a hole. Nothing is sent and the rows stay changed.

        Stream: enqueues on `stream` (default: the device's own), behind earlier uploads on other streams.
        """
        with self._guard:
            self._check_host_owned("upload_dirty")
            slots = self._host.changed_slots()
            if self._mode == "dense":
                self._check(slots)
            is_first = not self._copy.was_written
            if not is_first and not slots.size:
                self.last_upload_entries = self.last_upload_ranges = 0
                return False
            entries = self._host.changed_entries()
            ranges = runs_of(entries)
            if is_first:
                self._copy.clear(stream)
            if ranges:
                self._copy.send(self._host.entries, ranges, stream)
            self._host.mark_uploaded(slots)
            self.last_upload_entries, self.last_upload_ranges = entries.size, len(ranges)
            return True

    def gather_rows(self, destination: Tensor, slots: Tensor, num_rows: int, stream: object | None = None) -> Tensor:
        """Build the table of an execution batch on the device: row r becomes this table's row ``slots[r]``.

        Parameters
        ----------
        destination : Tensor
            Dense int32 with room for ``num_rows * 2 * L`` elements; what lies behind them is left alone.
        slots : Tensor
            Dense int32, at least `num_rows`. A slot that does not exist gives a row of -1.
        num_rows : int
            Rows, at most `max_batch`.
        stream : stream, optional
            Default: the device's own.

        Returns
        -------
        Tensor
            The rows: int32 ``[num_rows, 2, L]``, a view of `destination`.

        Raises
        ------
        InputError, ShapeError
            If an argument does not fit, or `destination` overlaps what is read.

        Stream: enqueues one kernel and waits for nothing, so that it can be captured; on another stream than the last
        upload's the caller orders the two (`join`).
        """
        with self._guard:
            rows = check_integer("num_rows", num_rows, 0, self._max_batch)
            return self._gather(destination, slots, rows, self._copy.resolve(stream))

    def join(self, stream: object | None = None) -> None:
        """Put later work on a stream behind the last upload, whatever stream that was on.

        Parameters
        ----------
        stream : stream, optional
            Default: the device's own.

        Stream: enqueues a wait on `stream`; the host does not wait.
        """
        with self._guard:
            self._copy.join(self._copy.resolve(stream))

    # -- ownership

    def lend(self, owner: str, loan: object = None) -> object:
        """Let `owner` write the device copy: the host forgets its rows, mutators and uploads raise until `give_back`.

        Parameters
        ----------
        owner : str
            What messages call the borrower.
        loan : object, optional
            What to give back with; None makes one. A borrower that must be able to give back whatever interrupts it passes
            one that it has kept already.

        Returns
        -------
        object
            `loan`: whoever has it can end the loan.

        Raises
        ------
        StateError
            If the table is lent already.

        Stream: makes the device's own stream wait for an upload on another one; the device copy is left as it is for `owner` to
        overwrite.
        """
        with self._guard:
            self._check_host_owned("lend")
            self._copy.join(self._device.stream)
            self._host.clear()
            self._is_identity = False
            self._loan = object() if loan is None else loan
            self._owner = str(owner)
            return self._loan

    def is_lent_for(self, loan: object) -> bool:
        """Return whether the table is lent, and `loan` is what gives it back."""
        return self._owner is not None and self._loan is loan

    def give_back(self, loan: object, stream: object | None = None) -> None:
        """Make the table the host's again, with nothing mapped on either side.

        Parameters
        ----------
        loan : object
            What `lend` returned.
        stream : stream, optional
            Default: the device's own.

        Raises
        ------
        StateError
            If the table is not lent, or lent to somebody else.

        Stream: enqueues a fill of the device copy with -1 on `stream`.
        """
        with self._guard:
            if self._owner is None:
                raise StateError(f"give_back: {self._name} is not lent")
            if self._loan is not loan:
                raise StateError(f"give_back: {self._name} is lent to {self._owner}; pass what its lend() returned")
            self._copy.clear(stream)
            self._host.clear()
            self._owner = self._loan = None

    def close(self, *, even_if_lent: bool = False) -> None:
        """Give back the staging memory and, if it is the table's own, the device memory. A second call does nothing.

        Parameters
        ----------
        even_if_lent : bool
            Close it under its borrower: for who owns both.

        Raises
        ------
        StateError
            If the table is lent, or a call is running in another thread.

        Stream: waits for uploads in flight; the device memory is freed in the order of the device's own stream.
        """
        if self._guard.is_closed:
            return
        if self._owner is not None and not even_if_lent:
            raise StateError(f"close: {self._name} is lent to {self._owner}; give_back() it first")
        self._guard.close()
        with self._device.active():
            self._gather.close()
            self._copy.close()

    def __repr__(self) -> str:
        return f"KVPageTable({self._name!r}, {self._mode}, [{self._max_batch}, 2, {self._width}], num_pages={self._num_pages})"

    # -- pieces

    def _set_rows(self, call: str, rows: Iterable[tuple[int, Sequence[int] | NDArray[np.integer[Any]]]]) -> None:
        with self._guard.host:
            self._check_host_owned(call)
            self._host.set_rows(rows)
            self._is_identity = False

    def _check_host_owned(self, call: str) -> None:
        if self._owner is not None:
            raise StateError(f"{call}: {self._name} is lent to {self._owner}, which writes it on the device until it is closed")

    def _check(self, slots: NDArray[np.int64] | None) -> None:
        try:
            self._host.check_invariants(slots)
        except InvariantError as error:
            raise InvariantError(f"{self._name}: {error}") from None
